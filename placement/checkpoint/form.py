"""What a checkpoint's files are called and say.

A checkpoint is a directory::

    step-00001200/
        manifest.json             what there is: step, ranks, versions, and each file's size and
                                  checksum
        contents.json             what is where: every tensor's chunks, and every value that is
                                  no tensor
        rank-00000.safetensors    the chunks that rank 0 wrote (https://github.com/huggingface/safetensors)
        rank-00001.safetensors    ...

Nothing in it is code, or is read in a way that could run code. The manifest is written last and
vouches for the other files; its seal vouches for itself. Checksums are XXH3 of 64 bits
(https://xxhash.com): they find damage, not forgery.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import torch
import xxhash

from placement.errors import DamagedCheckpoint, ForeignCheckpoint, NewerCheckpoint

FORMAT = "torch-placement checkpoint"
VERSION = 1
"""Of the format. A checkpoint of a later version is refused by name."""

MANIFEST = "manifest.json"
CONTENTS = "contents.json"

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F4": torch.float4_e2m1fn_x2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""The dtypes that can be saved, by the name that safetensors has for them."""

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

Natural = Annotated[int, msgspec.Meta(ge=0)]


class File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file as it has to be.

    Attributes:
        bytes: its size.
        xxh3_64: its checksum, in hexadecimal.
    """

    bytes: Natural
    xxh3_64: str


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``manifest.json``.

    Attributes:
        format, version: of the checkpoint's form.
        step: the training step.
        world_size: how many ranks wrote it.
        torch: version of torch.
        placement: where each component was when it was saved, for the reader.
        files: all other files.
        seal: checksum of the rest of the manifest.
    """

    step: Natural
    world_size: Natural
    torch: str
    placement: dict[str, str]
    files: dict[str, File]
    format: str = FORMAT
    version: Natural = VERSION
    seal: str = ""

    def sealed(self) -> Manifest:
        """This manifest with its checksum."""
        unsealed = msgspec.structs.replace(self, seal="")
        return msgspec.structs.replace(self, seal=xxhash.xxh3_64_hexdigest(encoded(unsealed)))


class Chunk(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A block of a tensor, as one rank wrote it.

    Attributes:
        offsets, sizes: which block, in elements along each dimension.
        file: the file that it is in.
        key: what it is called there.
    """

    offsets: tuple[Natural, ...]
    sizes: tuple[Natural, ...]
    file: str
    key: str


class StoredTensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor, whole.

    Attributes:
        dtype: as safetensors calls it.
        shape: of the whole tensor.
        sharded: whether it was distributed over ranks when it was saved.
        chunks: blocks that cover it without overlap.
    """

    dtype: str
    shape: tuple[Natural, ...]
    sharded: bool
    chunks: list[Chunk]


class ParameterGroup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One of an optimizer's groups: names of parameters, and everything else that it has."""

    parameters: list[str]
    options: Any


class OptimizerState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An optimizer.

    Attributes:
        kind: name of its class; None if it is not known.
        state: of each parameter that has any, by name.
        groups: in the optimizer's order.
    """

    kind: str | None
    state: dict[str, Any]
    groups: list[ParameterGroup]


class SchedulerState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A learning rate scheduler: name of its class, if it is known, and its state."""

    kind: str | None
    state: Any


class Contents(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``contents.json``. Values are trees as ``tree.py`` makes them, which refer to ``tensors``.

    Attributes:
        tensors: every tensor, by the name under which the trees know it.
        model: the state dict, by name.
        optimizer: None for a model without one.
        scheduler: None without one.
        extras: what the user gave.
        ranks: of each rank, the state of its random generators.
    """

    tensors: dict[str, StoredTensor]
    model: dict[str, Any]
    optimizer: OptimizerState | None
    scheduler: SchedulerState | None
    extras: Any
    ranks: list[Any]


class _Head(msgspec.Struct, frozen=True):
    format: str
    version: int


Form = TypeVar("Form")


def tensor_file(rank: int) -> str:
    """Name of the file that ``rank`` writes."""
    return f"rank-{rank:05d}.safetensors"


def encoded(form: msgspec.Struct) -> bytes:
    """``form`` as JSON."""
    return msgspec.json.encode(form)


def decoded(raw: bytes, form: type[Form], path: Path) -> Form:
    """Read what :func:`encoded` made.

    Raises:
        DamagedCheckpoint: it is something else.
    """
    try:
        return msgspec.json.decode(raw, type=form)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise damaged(path, f"it is not what this library writes: {error}") from None


def decoded_manifest(raw: bytes, path: Path) -> Manifest:
    """Read a manifest.

    Raises:
        ForeignCheckpoint: it is not one of ours.
        NewerCheckpoint: it is of a later version.
        DamagedCheckpoint: it was changed.
    """
    head = decoded(raw, _Head, path)
    if head.format != FORMAT:
        raise ForeignCheckpoint(
            asked="loading a checkpoint",
            state=f"{path} says that its format is {head.format!r}",
            why=f"only {FORMAT!r} is known here",
            instead="read it with the program that wrote it",
        )
    if head.version > VERSION:
        raise NewerCheckpoint(
            asked="loading a checkpoint",
            state=f"{path} has version {head.version} of the format",
            why=f"this version of torch-placement knows the format up to {VERSION}",
            instead="load it with the version that wrote it, or a later one",
        )
    manifest = decoded(raw, Manifest, path)
    if manifest.sealed() != manifest:
        raise damaged(path, "it was changed after it was written: its seal does not fit")
    return manifest


def damaged(path: Path, why: str) -> DamagedCheckpoint:
    """The refusal of a checkpoint because of one file."""
    return DamagedCheckpoint(
        asked="loading a checkpoint",
        state=f"{path} is damaged",
        why=why,
        instead="load another step, or bring an undamaged copy; nothing was changed",
    )
