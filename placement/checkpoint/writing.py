"""Writing one checkpoint: every rank its file, rank 0 the rest.

A save that blocks does it in the caller. One that does not, does it in a thread, which runs no
collective: the other ranks tell rank 0 that their file is on the disk by a small file beside it,
and rank 0 publishes the checkpoint as soon as all have. So ``latest`` changes then, without waiting
for anybody's next call. Errors wait for that call.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from placement.checkpoint import files, tensor_file
from placement.checkpoint.directory import CheckpointDirectory, Draft
from placement.checkpoint.form import CONTENTS, MANIFEST, Contents, File, Manifest, encoded
from placement.checkpoint.form import tensor_file as name_of_file

_LOG = logging.getLogger("placement")

_LOOK_EVERY = 0.02
"""Seconds between two looks of rank 0 for the files of the others."""


@dataclass(frozen=True)
class Publication:
    """What rank 0 does when all ranks have written their files.

    Attributes:
        directory, draft: where.
        contents: what the checkpoint holds.
        manifest: all of it but the files.
        keep: how many steps stay; None keeps all.
    """

    directory: CheckpointDirectory
    draft: Draft
    contents: Contents
    manifest: Manifest
    keep: int | None

    def publish(self, written: list[File]) -> None:
        """Complete the draft, and make it the newest checkpoint.

        Args:
            written: the file of each rank.
        """
        path = self.draft.path
        listed = {name_of_file(rank): file for rank, file in enumerate(written)}
        listed[CONTENTS] = files.write(path / CONTENTS, [memoryview(encoded(self.contents))])
        manifest = msgspec.structs.replace(self.manifest, files=listed).sealed()
        files.write(path / MANIFEST, [memoryview(encoded(manifest))])
        self.directory.publish(self.draft)
        self.directory.prune(self.draft.edition, self.keep)


@dataclass(frozen=True)
class Share:
    """What one rank writes.

    Attributes:
        draft: the directory that it goes to.
        rank, world_size: who this is.
        tensors: by their key.
    """

    draft: Path
    rank: int
    world_size: int
    tensors: Mapping[str, torch.Tensor]

    def write(self) -> File:
        """Write it, and wait until it is on the disk."""
        return files.write(self.draft / name_of_file(self.rank), tensor_file.content(self.tensors))


class Pending:
    """A checkpoint that threads write, one on each rank.

    The thread is no daemon: an interpreter that ends waits for it, and the checkpoint is published
    if every rank's is written.

    Args:
        step: of the checkpoint, for the log.
        share: what this rank writes, in memory of its own.
        publication: on rank 0, what is done in the end.
        deadline: seconds that rank 0 waits for the others after it has written its own file.
    """

    def __init__(
        self, step: int, share: Share, publication: Publication | None, deadline: float
    ) -> None:
        self.step = step
        self.publication = publication
        self._share = share
        self._deadline = deadline
        self._written: Future[File] = Future()
        self._published: Future[None] = Future()
        self._abandoned = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"checkpoint of step {step}")
        self._thread.start()

    def written(self) -> File:
        """Wait until this rank's file is on the disk. Raises what writing it raised."""
        return self._written.result()

    def published(self) -> None:
        """Wait, on rank 0, until the checkpoint is published. Raises what that raised."""
        self._published.result()

    def give_up(self) -> None:
        """Wait for no other rank any more, and remove what this one has written."""
        self._abandoned.set()
        self._thread.join()
        if self.publication is not None:
            self.publication.directory.discard(self.publication.draft)

    def _run(self) -> None:
        try:
            file = self._share.write()
            if self._share.rank > 0:
                self._tell(file)
            self._written.set_result(file)
        except BaseException as error:
            _LOG.error("the checkpoint of step %s could not be written: %s", self.step, error)
            self._written.set_exception(error)
            self._published.set_exception(error)
            return
        try:
            if self.publication is not None:
                self.publication.publish([file, *self._files_of_others()])
            self._published.set_result(None)
        except BaseException as error:
            _LOG.error("the checkpoint of step %s was not published: %s", self.step, error)
            self._published.set_exception(error)

    def _tell(self, file: File) -> None:
        note = self._note(self._share.rank)
        files.replace(note, encoded(file), note.with_suffix(".unfinished"))

    def _files_of_others(self) -> Iterator[File]:
        """The files of the other ranks, as they come.

        Raises:
            TimeoutError: one did not come, or will not.
        """
        until = time.monotonic() + self._deadline
        for rank in range(1, self._share.world_size):
            note = self._note(rank)
            while not note.exists():
                if self._abandoned.wait(_LOOK_EVERY) or time.monotonic() > until:
                    raise TimeoutError(f"rank {rank} did not write its file")
            yield msgspec.json.decode(files.read(note), type=File)
            files.remove_file(note)

    def _note(self, rank: int) -> Path:
        return self._share.draft / f"rank-{rank:05d}.written"
