"""The front door: the checkpoints of one training run."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.optim.lr_scheduler import LRScheduler

from placement.checkpoint.directory import CheckpointDirectory, Draft, edition_of
from placement.checkpoint.form import MANIFEST, Contents, File, Manifest, damaged, tensor_file
from placement.checkpoint.loading import Incoming
from placement.checkpoint.storage import Reader, Taker
from placement.checkpoint.taking import Taken, take
from placement.checkpoint.together import Together, quiet_without_a_group, rank, world_size
from placement.checkpoint.verifying import Stored
from placement.checkpoint.writing import Pending, Publication, Share
from placement.errors import CannotSave, ContradictoryOptions, RanksDisagree
from placement.manager import PlacementManager


@dataclass(frozen=True)
class Loaded:
    """What a load brought, beside what went into the module, the optimizer and the scheduler.

    Attributes:
        step: of the checkpoint.
        extras: what was saved with it.
        random_state: whether the random generators are where they were. They are not after a load
            with another number of ranks or on another kind of device: then they were left alone.
    """

    step: int
    extras: Any
    random_state: bool


class Checkpoints:
    """Saves a managed module, its optimizer and all that training needs to go on, and loads it.

    A checkpoint is there as a whole or not at all, and a load changes everything or nothing; see
    docs/checkpoints.md. All ranks of the default process group make one of these for the same
    directory, and call it together.

    Args:
        directory: where the checkpoints are, which all ranks see.
        manager: of the module and the optimizer. Its contexts guard every save and load, so both
            work in every placement, and leave it as it was found.
        scheduler: the learning rate scheduler.
        max_to_keep: how many steps stay. The lowest go, after a new one is whole; the new one
            never does. None keeps all.

    Raises:
        ContradictoryOptions: ``max_to_keep`` is less than 1.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        manager: PlacementManager,
        *,
        scheduler: LRScheduler | None = None,
        max_to_keep: int | None = None,
    ) -> None:
        if max_to_keep is not None and max_to_keep < 1:
            raise ContradictoryOptions(
                asked=f"max_to_keep={max_to_keep}",
                state="a save leaves its checkpoint",
                why="the one that was saved last stays, so at least one does",
                instead="pass 1 or more, or None to keep all",
            )
        self._directory = CheckpointDirectory(Path(directory))
        self._manager = manager
        self._scheduler = scheduler
        self._max_to_keep = max_to_keep
        self._pending: Pending | None = None

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Wait for a save that is under way. Not after an exception: the other ranks may not come.
        Then its threads end it by themselves, and the log has their errors."""
        if error is None:
            self.finish()

    def steps(self) -> list[int]:
        """The steps of which there is a checkpoint, in order."""
        return self._directory.steps()

    def save(self, step: int, extras: Any = None, blocking: bool = True) -> None:
        """Save a checkpoint, and make it the latest.

        Args:
            step: the training step it is of, not negative. If there is a checkpoint of it, it is
                replaced.
            extras: what else is to come back: tensors and plain data (docs/checkpoints.md), the
                same on all ranks.
            blocking: whether to return when the checkpoint is whole. Otherwise everything is copied
                to host memory first, and written from there by a thread: training and moves may go
                on at once. The next save or load, and :meth:`finish`, wait for it, and raise its
                error if it failed.

        Raises:
            CannotSave: a value can't come back exactly. Nothing was written.
            CheckpointFailed: it could not be written; the checkpoint before is whole. Or this
                happened to the save before, which did not block: then this one has not begun.
            PlacementError: see :meth:`placement.PlacementManager.saving`.
        """
        _require_number(step)
        self.finish()
        with self._manager.saving(step):
            self._save(step, extras, blocking)

    def finish(self) -> None:
        """Wait until a save that is under way is whole. Does nothing if there is none.

        Raises:
            CheckpointFailed: it failed; the checkpoint before is whole.
            PlacementError: see :meth:`placement.PlacementManager.saving`.
        """
        pending = self._pending
        if pending is None:
            return
        with self._manager.saving(pending.step):
            self._pending = None
            try:
                _complete(_saving(pending.step), pending.written, lambda _: pending.published())
            except BaseException:
                pending.give_up()
                raise

    def load(self, step: int | None = None) -> Loaded:
        """Load a checkpoint into the module, the optimizer and the scheduler, and put the random
        generators where they were.

        Every check is through on all ranks before anything changes on any. Only what can go wrong
        while values are put into place, such as memory of the device that runs out, leaves a part
        of them; the error says so.

        Args:
            step: which; None for the latest.

        Returns:
            What else there is.

        Raises:
            NoCheckpoint: there is none.
            DamagedCheckpoint, ForeignCheckpoint, NewerCheckpoint: it can't be read.
            CheckpointMismatch: it does not fit.
            CheckpointFailed: it could not be read; or a save before, which did not block, failed.
            PlacementError: see :meth:`placement.PlacementManager.loading`.
        """
        self.finish()
        together = Together("loading a checkpoint", "see to it and load again; nothing was changed")
        with self._manager.loading(step):
            stored, seals = together.each(lambda: self._verified(step))
            _require_same([{"checkpoint": seal} for seal in seals])
            incoming, _ = together.each(lambda: (self._fitted(stored), None))
            with together.planning(), quiet_without_a_group():
                dcp.load(
                    incoming.buffers,
                    storage_reader=Reader(stored.path, stored.contents.tensors, incoming.buffers),
                    planner=DefaultLoadPlanner(flatten_state_dict=False),
                )
            extras, _ = _INSTALLING.each(lambda: (incoming.install(), None))
        return Loaded(stored.manifest.step, extras, incoming.random_state)

    # Saving.

    def _save(self, step: int, extras: Any, blocking: bool) -> None:
        """Plan with all ranks, and take what is to be written; then write it, or begin to."""
        together = _saving(step)
        taken, told = together.each(lambda: self._taken(extras))
        _require_same([digests for digests, _ in told])
        draft = together.first(lambda: self._directory.begin(step))
        try:
            taker = Taker(tensor_file(rank()), _itself if blocking else _private_copy)
            with together.planning(), quiet_without_a_group():
                dcp.save(
                    taken.tensors,
                    storage_writer=taker,
                    planner=DefaultSavePlanner(
                        flatten_state_dict=False, dedup_save_to_lowest_rank=True
                    ),
                )
            share = Share(draft.path, rank(), world_size(), taker.taken)
            publication = self._publication(draft, taken, taker, [tree for _, tree in told])
            if blocking:
                _complete(together, share.write, publication.publish)
            else:
                to_publish = publication if rank() == 0 else None
                self._pending = Pending(step, share, to_publish, self._manager.deadline)
        except BaseException:
            if rank() == 0:
                self._directory.discard(draft)
            raise

    def _taken(self, extras: Any) -> tuple[Taken, tuple[dict[str, str], Any]]:
        taken = take(self._manager, self._scheduler, extras, rank())
        return taken, (taken.digests(), taken.generators)

    def _publication(
        self, draft: Draft, taken: Taken, taker: Taker, generators: list[Any]
    ) -> Publication:
        contents = Contents(
            tensors=taker.tensors,
            model=taken.model,
            optimizer=taken.optimizer,
            scheduler=taken.scheduler,
            extras=taken.extras,
            ranks=generators,
        )
        manifest = Manifest(
            step=draft.edition.step,
            world_size=world_size(),
            torch=str(torch.__version__),
            placement={c.value: place.value for c, place in self._manager.placements.items()},
            files={},
        )
        return Publication(self._directory, draft, contents, manifest, self._max_to_keep)

    # Loading.

    def _verified(self, step: int | None) -> tuple[Stored, str]:
        """The checkpoint, of which this rank has verified its part; its seal."""
        path = self._directory.find(step)
        stored = Stored(path)
        if stored.manifest.step != edition_of(path).step:
            raise damaged(path / MANIFEST, f"it is of step {stored.manifest.step}")
        stored.verify(rank(), world_size())
        return stored, stored.manifest.seal

    def _fitted(self, stored: Stored) -> Incoming:
        return Incoming(stored, self._manager, self._scheduler, rank(), world_size())


def _require_number(step: int) -> None:
    if type(step) is not int or step < 0:
        raise CannotSave(
            asked="saving a checkpoint",
            state=f"its step is {step!r}",
            why="checkpoints are named after a step, and found by it",
            instead="pass the number of steps that were taken, as an int",
        )


def _saving(step: int) -> Together:
    return Together(
        f"saving the checkpoint of step {step}",
        "see to it and save again; the checkpoint before is whole",
    )


_INSTALLING = Together(
    "putting a loaded checkpoint into place",
    "load again before anything else: the values are the checkpoint's in part",
)


def _complete(
    together: Together, written: Callable[[], File], publish: Callable[[list[File]], None]
) -> None:
    """Publish a checkpoint when every rank has written its file."""
    _, everyone = together.each(lambda: (None, written()))
    together.first(lambda: publish(everyone))


def _require_same(said: list[dict[str, str]]) -> None:
    """
    Args:
        said: of each rank, the checksum of each thing that is to be the same on all.

    Raises:
        RanksDisagree: one is not.
    """
    ranks: dict[str, dict[str, list[int]]] = {}
    for number, checksums in enumerate(said):
        for name, checksum in checksums.items():
            ranks.setdefault(name, {}).setdefault(checksum, []).append(number)
    differing = {name: who for name, who in ranks.items() if len(who) > 1}
    if differing:
        raise RanksDisagree(
            asked="a checkpoint of all ranks together",
            state=f"these differ from rank to rank: {', '.join(differing)}",
            why="a checkpoint holds one of each, for every rank",
            instead="pass the same on every rank; what belongs to one, such as its place in the "
            "data, in a list with an entry for each",
            said=differing,
        )


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _private_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in host memory that nobody else has."""
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
