"""What the ranks of the default process group do in step inside a checkpoint.

A failure of one rank is raised on all of them, as the same error. So no rank waits for one that
gave up, and the group can be used afterwards (``placement/agreement.py`` poisons it only if the
ranks fail in different ways).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException

from placement.errors import CheckpointFailed, PlacementError

_Kept = TypeVar("_Kept")
_Told = TypeVar("_Told")


def rank() -> int:
    """This rank in the default group; 0 without one."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def world_size() -> int:
    """How many ranks there are; 1 without a group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


@contextmanager
def quiet_without_a_group() -> Iterator[None]:
    """torch warns that it saves and loads in one process only, if there is no process group. That
    is meant."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


@dataclass(frozen=True)
class Together:
    """Phases of one save or load.

    Attributes:
        asked: what it is, as errors name it.
        afterwards: what is to be done, as errors of the system tell it.
    """

    asked: str
    afterwards: str

    def each(self, work: Callable[[], tuple[_Kept, _Told]]) -> tuple[_Kept, list[_Told]]:
        """Do ``work`` on each rank.

        Args:
            work: returns what this rank keeps, and what all are told.

        Returns:
            The first, and what the ranks told, in their order.

        Raises:
            PlacementError: it failed on a rank; the same error on all of them.
        """
        done: tuple[_Kept, _Told] | None = None
        error: Exception | None = None
        try:
            done = work()
        except Exception as raised:
            error = raised
        failure = None if error is None else self.told(error)
        everyone = _gathered((done[1] if done is not None else None, failure))
        for told in (failure for _, failure in everyone if failure is not None):
            raise told from (error if error is not told else None)
        assert done is not None
        return done[0], [told for told, _ in everyone]  # type: ignore[misc]

    def first(self, work: Callable[[], _Told]) -> _Told:
        """Do ``work`` on rank 0 only; what it returned there, on every rank. Raises like
        :meth:`each`."""
        _, told = self.each(lambda: (None, work() if rank() == 0 else None))
        return told[0]  # type: ignore[return-value]

    @contextmanager
    def planning(self) -> Iterator[None]:
        """Raise what torch's planning raises on all ranks as the error of the first that failed."""
        try:
            yield
        except CheckpointException as failed:  # which is no Exception
            number, (error, _) = min(failed.failures.items())
            raise self.told(error, number) from error

    def told(self, error: BaseException, on: int | None = None) -> PlacementError:
        """``error`` as it is raised on all ranks."""
        if isinstance(error, PlacementError):
            return error
        number = rank() if on is None else on
        return CheckpointFailed(
            asked=self.asked,
            state=f"rank {number} of {world_size()}: {error}",
            why=f"it met {type(error).__name__}",
            instead=self.afterwards,
        )


def _gathered(mine: _Told) -> list[_Told]:
    if world_size() == 1:
        return [mine]
    everyone: list[_Told] = [mine] * world_size()
    dist.all_gather_object(everyone, mine)
    return everyone
