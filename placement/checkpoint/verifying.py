"""A checkpoint on disk, and whether it is undamaged. Verifying it runs nothing that is in it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from placement.checkpoint import files
from placement.checkpoint.form import (
    CONTENTS,
    DTYPES,
    MANIFEST,
    Chunk,
    Contents,
    Manifest,
    StoredTensor,
    damaged,
    decoded,
    decoded_manifest,
    tensor_file,
)
from placement.checkpoint.storage import metadata_of
from placement.checkpoint.tensor_file import TensorFile
from placement.checkpoint.tree import tensors_in
from placement.errors import ForeignCheckpoint
from placement.torch_private import faults_of_plan

_OF_TORCH = ".metadata"
"""What a checkpoint of ``torch.distributed.checkpoint`` has: a pickle."""


class Stored:
    """A checkpoint that was read as far as its JSON files.

    Args:
        path: its directory.

    Attributes:
        manifest, contents: what they say.

    Raises:
        ForeignCheckpoint: it is something else.
        NewerCheckpoint: its format is newer.
        DamagedCheckpoint: one of the two is damaged, or they do not fit together.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if not (path / MANIFEST).exists():
            raise _without_manifest(path)
        _size_of(path / MANIFEST)
        self.manifest: Manifest = decoded_manifest(files.read(path / MANIFEST), path / MANIFEST)
        self._require_names()
        self._require_undamaged(CONTENTS)
        self.contents = decoded(files.read(path / CONTENTS), Contents, path / CONTENTS)
        if fault := next(self._faults(), None):
            raise damaged(path / CONTENTS, fault)

    def verify(self, part: int, parts: int) -> None:
        """Verify every ``parts``-th file from the ``part``-th on, byte for byte.

        Raises:
            DamagedCheckpoint: one of them is not as it was written.
        """
        for name in sorted(self.manifest.files.keys() - {CONTENTS})[part::parts]:
            self._require_undamaged(name)
            TensorFile(self.path / name).require(self._chunks_in(name))

    def _require_names(self) -> None:
        """The files are those that this format has: no path that leads out of the directory."""
        expected = {CONTENTS, *map(tensor_file, range(self.manifest.world_size))}
        if strange := sorted(self.manifest.files.keys() ^ expected):
            raise damaged(self.path / MANIFEST, f"it should not be without, or with, {strange[0]}")

    def _require_undamaged(self, name: str) -> None:
        path, expected = self.path / name, self.manifest.files[name]
        if (size := _size_of(path)) != expected.bytes:
            raise damaged(path, f"it has {size:,} bytes, and was written with {expected.bytes:,}")
        if (found := files.look_at(path)) != expected:
            raise damaged(
                path, f"its checksum is {found.xxh3_64}, and was {expected.xxh3_64} when written"
            )

    def _chunks_in(self, file: str) -> dict[str, tuple[StoredTensor, Chunk]]:
        return {
            chunk.key: (tensor, chunk)
            for tensor in self.contents.tensors.values()
            for chunk in tensor.chunks
            if chunk.file == file
        }

    def _faults(self) -> Iterator[str]:
        """What does not fit together in the contents."""
        contents = self.contents
        if len(contents.ranks) not in (0, self.manifest.world_size):
            yield "it is not of as many ranks as the manifest"
        trees = [contents.model, contents.extras, contents.ranks]
        if contents.scheduler is not None:
            trees.append(contents.scheduler.state)
        if contents.optimizer is not None:
            trees += [contents.optimizer.state, [g.options for g in contents.optimizer.groups]]
        for name in tensors_in(trees):
            if name not in contents.tensors:
                yield f"there is no tensor {name}"
        for name, tensor in contents.tensors.items():
            if tensor.dtype not in DTYPES:
                yield f"{name} has the unknown dtype {tensor.dtype}"
            if any(chunk.file not in self.manifest.files for chunk in tensor.chunks):
                yield f"{name} is in a file that the manifest has not"
            dimensions = {len(n) for chunk in tensor.chunks for n in (chunk.offsets, chunk.sizes)}
            if dimensions != {len(tensor.shape)} or (not tensor.shape and len(tensor.chunks) > 1):
                yield f"{name} and its chunks have different dimensions"
        yield from faults_of_plan(metadata_of(contents.tensors))


def _size_of(path: Path) -> int:
    """Bytes of a file; what is none is damage. A pipe would be waited for without end."""
    try:
        return files.size_of(path)
    except OSError as error:
        raise damaged(path, f"it can't be read: {error.strerror}") from error


def _without_manifest(path: Path) -> Exception:
    if (path / _OF_TORCH).exists():
        return ForeignCheckpoint(
            asked="loading a checkpoint",
            state=f"{path} is one of torch.distributed.checkpoint",
            why=f"its {_OF_TORCH} is a pickle, and reading that can run any code",
            instead="if you trust who wrote it: placement convert --trust-pickle",
        )
    return damaged(path / MANIFEST, "it is missing")
