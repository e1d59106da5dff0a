"""Ranks that do a collective operation together: all of them, in one state, or none.

A save, a load or an export runs collectives on every rank. If one rank calls it and another
doesn't, or calls it in another state, or fails in the middle, the others wait: for gloo's timeout
(30 minutes), or until NCCL's watchdog ends the process. An :class:`Agreement` makes the ranks meet
before the operation and after it, in the key-value store that formed the process group. The store
is not part of the collectives, so it still answers when they don't.

A meeting. Each rank sets a key with its claim (what it is about to do, in which state) and counts
itself in. The last to arrive compares the claims and settles the verdict; the others wait for it. A
rank whose deadline passes settles the verdict instead, that ranks were lost, and so does a rank
whose body fails, for the meeting that comes next. The verdict is set once, by compare-and-set, and
everybody believes it: no rank goes on alone because its news came in the moment the others gave up,
and one that was stopped, and wakes up after the others left, learns that they did.

How long it takes. A rank waits at most one deadline at the meeting before the body, one at each of
the body's collectives (their timeouts are lowered to the deadline), and one at the meeting after
it; each time up to a second longer if the store itself doesn't answer. It raises at the first of
these that fails, so a rank that is lost costs the others one deadline, counted from when they first
need it. A rank that is busy for longer counts as lost: a deadline has to exceed what the slowest
rank does alone, such as writing its file while the others wait. A process group that is made inside
the body has the timeout that it was given.

What it costs. A meeting is 5 operations of the store on each rank (set the claim, count in, look
for the verdict, read it, delete the claim of the meeting before) and for those who wait a look from
time to time; the last to arrive reads all claims. There are two meetings for each operation.
Measured with 2 ranks on 2 cores: _MEASURED_. Keys of a meeting are deleted once all ranks are at
the next, so the store doesn't grow (the file of a ``FileStore`` does: it is a log).

NCCL. A collective of NCCL that waits for a lost rank raises nothing in the caller: it is a kernel
in a stream. ``ProcessGroupNCCL`` has a watchdog thread that looks for collectives that failed or
took longer than the group's timeout (10 minutes by default; here lowered to the deadline, like
gloo's, for collectives that begin in the body). What it does then is set by
``TORCH_NCCL_ASYNC_ERROR_HANDLING``: 3, the default, takes the process down without cleaning up the
communicators; 1 aborts the communicators and takes the process down; 2 only aborts them; 0 does
nothing. A second thread, the heartbeat monitor (``TORCH_NCCL_ENABLE_MONITORING``, on by default),
ends the process when the watchdog itself is stuck in a call for
``TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC``, 8 minutes by default. So on CUDA a rank that waits in a
collective for a lost one does not raise and restore: by default its process ends, about one
deadline later, and the launcher restarts the job. With mode 2 the abort lets the kernel end, with
its output unfinished, and the error may reach nobody; then it is the meeting after the body that
raises. Ranks that wait in a meeting rather than in a collective raise as described here, and so do
those whose collectives are gloo's, such as the ones with which ``torch.distributed.checkpoint``
plans on CPU tensors.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch.distributed as dist

from placement import torch_private
from placement.errors import PlacementError
from placement.journal import one_line

__all__ = ["Agreement", "GroupPoisoned", "RankLost", "RanksDisagree"]

_Result = TypeVar("_Result")

_STORE_ANSWERS_WITHIN = 1.0
"""Seconds beyond a deadline that the store may take to answer. Its server may be part of a rank
that is stopped, and then an operation waits for ever, whatever its timeout."""

_FIRST_LOOK, _LAST_LOOK, _LOOK_PER_RANK = 100e-6, 20e-3, 50e-6
"""Seconds between two looks for a verdict: of the first two, of later ones at most, and how much
later for each rank, so that a thousand of them leave the store's server some rest."""


class Agreement:
    """One manager's part in the collective operations of the default process group.

    What is agreed about is the group's, not the manager's: all managers of a group meet in one
    sequence, and an operation that fails poisons the group for all of them. A group that was
    destroyed and initialised anew is not poisoned. One thread at a time may use a group.

    Args:
        deadline: seconds that ranks wait for each other.

    Raises:
        ValueError: a deadline that is not positive.
    """

    def __init__(self, deadline: float) -> None:
        if not deadline > 0:
            raise ValueError(f"a deadline is a positive number of seconds, not {deadline}")
        self.deadline = deadline
        self._group: _Group | None = None
        self._number = -1
        if (group := _group()) is not None:
            self._join(group)

    @property
    def poisoned(self) -> str | None:
        """Why no further collective operation is possible in the present group, or None."""
        group = _group()
        return group.poisoned if group is not None else None

    @contextmanager
    def together(self, operation: str, facts: Mapping[str, str]) -> Iterator[None]:
        """A context that all ranks enter in the same state, or none, and leave together.

        Inside it, collectives of every process group that exists time out after the deadline.
        Without a process group, and with a single rank, it does nothing.

        Args:
            operation: what is about to be done.
            facts: what has to be the same on all ranks, as text, by name.

        Raises:
            RanksDisagree: the ranks are about to do different things, or are in different states.
                It is raised on every rank, the body has not run, and the group is as before.
            RankLost: a rank did not come before the body, did not finish it, or failed in it. The
                group is poisoned.
            GroupPoisoned: a rank was lost, or a body failed, earlier.

        An error of the body is the one that propagates, with a note if another rank's came first;
        the others get theirs, and the group is poisoned.
        """
        group = _group()
        if group is None or dist.get_world_size() == 1:
            yield
            return
        self._join(group)
        here = _Rank(
            group,
            torch_private.default_store(),
            dist.get_rank(),
            dist.get_world_size(),
            self.deadline,
        )
        here.refuse_if_poisoned(operation)
        manager = f"number {self._number} of its group"
        here.meet(operation, {"operation": operation, **facts, "manager": manager})
        try:
            with _lowered_timeouts(timedelta(seconds=self.deadline)):
                yield
            here.meet(operation, {"operation": f"the end of {operation}"})
        except BaseException as error:
            here.tell(operation, error)
            raise

    def _join(self, group: _Group) -> None:
        if self._group is not group:
            self._group, self._number = group, next(group.numbers)


@dataclass(frozen=True)
class _Rank:
    """This rank, among the others of the default group."""

    group: _Group
    store: dist.Store
    rank: int
    size: int
    deadline: float

    def refuse_if_poisoned(self, operation: str) -> None:
        """
        Raises:
            GroupPoisoned: the group is.
        """
        if self.group.poisoned is not None:
            raise GroupPoisoned(
                **self._asked(operation),
                why=f"the group is poisoned: {self.group.poisoned}",
                instead="move tensors locally, and restart the job, or destroy the process group "
                "and initialise it again",
            )

    def meet(self, operation: str, claim: Mapping[str, str]) -> None:
        """Meet the others, before or after the body of ``operation``.

        Raises:
            RanksDisagree: their claims differ.
            RankLost: not all of them came, or one has failed. The group is poisoned.
        """
        until = time.monotonic() + self.deadline
        number = next(self.group.meetings)

        def attend(left: threading.Event) -> _Verdict:
            meeting = self._meeting(number)
            verdict = meeting.attend(claim, until, left)
            if verdict.complete:
                self.group.clear_finished()
            self.group.finished.append(meeting)
            return verdict

        try:
            verdict = _in_time(attend, self.deadline + _STORE_ANSWERS_WITHIN)
        except TimeoutError:
            verdict = _Verdict(
                why="the process group's store does not answer; its server is part of rank 0, "
                "unless the launcher has it"
            )
        except RuntimeError as error:  # torch.distributed.DistError, and FileStore's own
            verdict = _Verdict(why=f"the process group's store failed: {one_line(error)}")
        except BaseException as interrupt:
            self.tell(operation, interrupt)
            raise
        if verdict.said:
            raise RanksDisagree(
                **self._asked(operation),
                why=_differences(verdict.said),
                instead="call the same operation on every rank, in the same state and step",
                said=verdict.said,
            )
        if not verdict.complete:
            self.group.poisoned = verdict.why
            raise RankLost(
                **self._asked(operation),
                why=verdict.why,
                instead="move tensors locally, and restart the job: this process group is poisoned",
                ranks=tuple(verdict.ranks),
            )

    def tell(self, operation: str, error: BaseException) -> None:
        """Poison the group because of ``error``, and let the others know as soon as they meet."""
        if self.group.poisoned is not None:
            return  # they know
        failure = f"rank {self.rank} failed in {operation}: {one_line(error)}"
        mine = _Verdict(ranks=[self.rank], why=failure)
        self.group.poisoned = mine.why
        number = next(self.group.meetings)
        try:
            verdict = _in_time(
                lambda left: self._meeting(number).settle(mine),
                min(self.deadline, _STORE_ANSWERS_WITHIN),
            )
        except (RuntimeError, TimeoutError):
            return  # no store, no news: the others have their deadline
        if verdict != mine:
            self.group.poisoned = verdict.why
            if hasattr(error, "add_note"):  # Python 3.11
                error.add_note(f"Before that, {verdict.why}.")

    def _meeting(self, number: int) -> _Meeting:
        prefix = self.group.prefix(self.store, self.size)
        return _Meeting(self.store, f"{prefix}/{number}", self.rank, self.size)

    def _asked(self, operation: str) -> dict[str, str]:
        return {
            "asked": f"{operation} by all ranks together",
            "state": f"rank {self.rank} of {self.size}",
        }


# One process group.


@dataclass(eq=False)
class _Group:
    """What has to be remembered of one default group, as long as it exists.

    It refers to neither the group nor its store, whose lives it must not prolong.
    """

    poisoned: str | None = None
    numbers: Iterator[int] = field(default_factory=itertools.count)
    """Of the agreements, in the order in which they were made: the same on all ranks."""
    meetings: Iterator[int] = field(default_factory=itertools.count)
    finished: list[_Meeting] = field(default_factory=list)
    """Meetings that are over on this rank, but may not be on others."""
    _prefix: str | None = None

    def prefix(self, store: dist.Store, size: int) -> str:
        """Where the keys of this group's meetings are. A group that is made anew over the same
        store finds the keys of the one before, so the store counts who comes."""
        if self._prefix is None:
            earlier = store.add("placement/agreement/ranks", 1) - 1
            self._prefix = f"placement/agreement/{earlier // size}"
        return self._prefix

    def clear_finished(self) -> None:
        """Delete the keys of finished meetings: all ranks have come to a later one."""
        for meeting in self.finished:
            meeting.clear()
        self.finished.clear()


_groups: WeakKeyDictionary[object, _Group] = WeakKeyDictionary()


def _group() -> _Group | None:
    """What is remembered of the present default group; None without one."""
    if not dist.is_available() or not dist.is_initialized():
        return None
    return _groups.setdefault(dist.group.WORLD, _Group())


# One meeting.


@dataclass(frozen=True)
class _Verdict:
    """What came of a meeting: all came and agree (``complete``, nothing ``said``), all came and
    disagree, or ``ranks`` were lost.

    Attributes:
        complete: all came.
        said: for each fact that differs, which ranks said what.
        ranks: who was lost, as far as is known.
        why: how.
    """

    complete: bool = False
    said: dict[str, dict[str, list[int]]] = field(default_factory=dict)
    ranks: list[int] = field(default_factory=list)
    why: str = ""


@dataclass(frozen=True)
class _Meeting:
    """One rank's part in a meeting. All of it may wait for the store's server without end."""

    store: dist.Store
    prefix: str
    rank: int
    size: int

    def attend(self, claim: Mapping[str, str], until: float, left: threading.Event) -> _Verdict:
        """Come, and wait for the verdict until ``until``, in seconds of the monotonic clock, or
        until ``left`` is set."""
        began = time.monotonic()
        self.store.set(self._claim(self.rank), json.dumps(dict(claim)))
        if self.store.add(self._arrived, 1) == self.size:
            return self.settle(_compared(self._claims()))
        pause, longest = _FIRST_LOOK, max(_LAST_LOOK, _LOOK_PER_RANK * self.size)
        while not self.store.check([self._verdict]):
            # The wait of a store is of no use here: FileStore's takes up to a second longer than
            # asked, and none ends early.
            remaining = until - time.monotonic()
            if remaining <= 0 or left.wait(min(pause, remaining)):
                return self.settle(self._without_the_missing(time.monotonic() - began))
            pause = min(2 * pause, longest)
        return self._read(self.store.get(self._verdict))

    def settle(self, verdict: _Verdict) -> _Verdict:
        """Make ``verdict`` the meeting's, unless it has one; return the one it has."""
        return self._read(self.store.compare_set(self._verdict, "", json.dumps(asdict(verdict))))

    def clear(self) -> None:
        """Delete this rank's keys; rank 0 deletes those of all."""
        keys = [self._claim(self.rank)]
        if self.rank == 0:
            keys += [self._arrived, self._verdict]
        for key in keys:
            self.store.delete_key(key)

    def _without_the_missing(self, waited: float) -> _Verdict:
        missing = [r for r in range(self.size) if not self.store.check([self._claim(r)])]
        if not missing:  # the last one was lost after it came, or comes this moment
            return _compared(self._claims())
        return _Verdict(
            ranks=missing,
            why=f"{_listed(missing)} did not come within {waited:.1f} s, so rank {self.rank} gave up",
        )

    def _claims(self) -> list[dict[str, str]]:
        claims = self.store.multi_get([self._claim(rank) for rank in range(self.size)])
        return [json.loads(claim) for claim in claims]

    @staticmethod
    def _read(verdict: bytes) -> _Verdict:
        return _Verdict(**json.loads(verdict))

    @property
    def _arrived(self) -> str:
        return f"{self.prefix}/arrived"

    @property
    def _verdict(self) -> str:
        return f"{self.prefix}/verdict"

    def _claim(self, rank: int) -> str:
        return f"{self.prefix}/{rank}"


def _compared(claims: Sequence[Mapping[str, str]]) -> _Verdict:
    """The verdict on the claims of all ranks, in their order."""
    said: dict[str, dict[str, list[int]]] = {}
    for fact in dict.fromkeys(itertools.chain.from_iterable(claims)):
        values: dict[str, list[int]] = {}
        for rank, claim in enumerate(claims):
            values.setdefault(claim.get(fact, "not given"), []).append(rank)
        if len(values) > 1:
            said[fact] = values
    return _Verdict(complete=True, said=said)


def _differences(said: Mapping[str, Mapping[str, Sequence[int]]]) -> str:
    return "; ".join(
        f"{fact} is " + ", but ".join(f"{value} on {_listed(who)}" for value, who in values.items())
        for fact, values in said.items()
    )


def _listed(ranks: Sequence[int]) -> str:
    """``rank 1``, or ``ranks 0-2, 5`` for 0, 1, 2 and 5."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    listed = ", ".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs)
    return f"rank{'s' if len(ranks) > 1 else ''} {listed}"


# Waiting, and for how long.


def _in_time(work: Callable[[threading.Event], _Result], seconds: float) -> _Result:
    """Do ``work`` in a thread of its own, so that it can be left behind.

    Args:
        work: is given an event that is set when nobody waits for its result any more.
        seconds: how long to wait for it.

    Raises:
        TimeoutError: it was not done in time.
    """
    left = threading.Event()
    outcome: Future[_Result] = Future()

    def run() -> None:
        try:
            outcome.set_result(work(left))
        except Exception as error:
            outcome.set_exception(error)

    threading.Thread(target=run, name="placement-agreement", daemon=True).start()
    try:
        return outcome.result(timeout=seconds)
    except FutureTimeoutError:  # Python 3.10: not a TimeoutError
        raise TimeoutError(f"not done within {seconds} s") from None
    finally:
        left.set()


@contextmanager
def _lowered_timeouts(deadline: timedelta) -> Iterator[None]:
    """Collectives of all process groups that begin in the block time out after ``deadline``, unless
    they do so earlier anyway. A backend that knows no timeouts keeps to itself."""
    with ExitStack() as restoring:
        for communicator in torch_private.communicators():
            found = communicator.timeout or dist.constants.default_pg_timeout
            if found > deadline and communicator.set_timeout(deadline):
                restoring.callback(communicator.set_timeout, found)
        yield


# Errors.


class _OfRanks(PlacementError):
    """An error with attributes beyond those that all have; each is a keyword argument."""

    def __reduce__(self) -> tuple[Any, ...]:
        parts = {name: part for name, part in self.__dict__.items() if name != "__notes__"}
        return (_rebuild, (type(self), parts))


def _rebuild(cls: type[_OfRanks], parts: dict[str, Any]) -> _OfRanks:
    return cls(**parts)


class RanksDisagree(_OfRanks):
    """The ranks were about to do different things together, or the same in different states. It
    is raised on all of them, before any did.

    Attributes:
        said: for each fact that differs, which ranks said what.
    """

    def __init__(self, *, said: Mapping[str, Mapping[str, Sequence[int]]], **parts: Any) -> None:
        self.said = said
        super().__init__(**parts)


class RankLost(_OfRanks):
    """A rank did not come to a collective operation, or did not finish it: it is late, it died, or
    it failed. This is raised on the others, within the deadline. If the operation had begun, what
    it made on this rank is to be discarded; the placement is restored.

    Attributes:
        ranks: which, as far as is known.
    """

    def __init__(self, *, ranks: Sequence[int], **parts: Any) -> None:
        self.ranks = tuple(ranks)
        super().__init__(**parts)


class GroupPoisoned(PlacementError):
    """A collective operation after one that failed. Ranks may be missing, or be in the middle of
    another collective; only local moves are possible."""
