"""Ranks that do a collective operation together: all of them, in one state, or none.

A save, a load or an export runs collectives on every rank. If one rank calls it and another
doesn't, or calls it in another state, or fails in the middle, the others wait: for gloo's timeout
(30 minutes), or until NCCL's watchdog ends the process. An :class:`Agreement` makes the ranks meet
before the operation and after it, in the key-value store that formed the process group. The store
is not part of the collectives, so it still answers when they don't.

A meeting. Each rank sets a key with its claim (what it is about to do, in which state) and counts
itself in. The last to arrive compares the claims and settles the verdict; the others wait for it. A
rank whose deadline passes settles the verdict instead, that ranks were lost, and so does a rank
that is interrupted, for the meeting that comes next. After the body each rank claims how it went:
those whose body failed come, too, and raise their own error after it. A rank whose body is a
generator that was dropped claims that, and doesn't wait: if all dropped it they are still in step,
and it hears of the verdict before its next operation. The verdict is set once, by
compare-and-set, and everybody believes it: no rank goes on alone because its news came in the
moment the others gave up, and one that was stopped, and wakes up after the others left, learns that
they did.

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
Together they took 1.8 ms over a ``TCPStore`` and 1.2 ms over a ``FileStore`` with 2 ranks on 2
cores, 3.1 and 2.1 ms with 4 (torch 2.13.0, medians). Keys of a meeting are deleted once all ranks
are at the next, so the store doesn't grow (the file of a ``FileStore`` does: it is a log).

NCCL. A collective of NCCL that waits for a lost rank raises nothing in the caller: it is a kernel
in a stream. ``ProcessGroupNCCL`` has a watchdog thread that looks for collectives that failed or
took longer than the group's timeout (10 minutes by default; here lowered to the deadline, like
gloo's, for collectives that begin in the body). What it does then is set by
``TORCH_NCCL_ASYNC_ERROR_HANDLING``: 3, the default, takes the process down without cleaning up the
communicators; 1 aborts the communicators and takes the process down; 2 only aborts them; 0 does
nothing. (With ``TORCH_NCCL_BLOCKING_WAIT`` a wait for a collective blocks the caller instead.) A
second thread, the heartbeat monitor (``TORCH_NCCL_ENABLE_MONITORING``, on by default), ends the
process when the watchdog itself is stuck in a call for ``TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC``, 8
minutes by default. So on CUDA a rank that waits in a collective for a lost one does not raise and
restore: by default its process ends, about one deadline later, and the launcher restarts the job.
With mode 2 the abort lets the kernel end, with its output unfinished, and the error may reach
nobody; then it is the meeting after the body that raises. Ranks that wait in a meeting rather than
in a collective raise as described here, and so do those whose collectives are gloo's: with a group
made as ``cpu:gloo,cuda:nccl`` these are the ones that ``torch.distributed.checkpoint`` plans with.
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
from typing import TypeVar
from weakref import WeakKeyDictionary

import torch.distributed as dist

from placement import torch_private
from placement.errors import GroupPoisoned, RankLost, RanksDisagree
from placement.journal import one_line

_Result = TypeVar("_Result")

_STORE_ANSWERS_WITHIN = 1.0
"""Seconds beyond a deadline that the store may take to answer. Its server may be part of a rank
that is stopped, and then an operation waits for ever, whatever its timeout."""

_OUTCOME, _WENT_WELL, _DROPPED = "outcome", "it went well", "its consumer dropped it"
"""What ranks claim at the meeting after the body."""

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
    def together(
        self, operation: str, facts: Mapping[str, str], refusal: Exception | None = None
    ) -> Iterator[None]:
        """A context that all ranks enter in the same state, or none, and leave together.

        Inside it, collectives of every process group that exists time out after the deadline.
        Without a process group, and with a single rank, it does nothing.

        Args:
            operation: what is about to be done.
            facts: what has to be the same on all ranks, as text, by name.
            refusal: why this rank can't take part, known before anything moved. It is raised here
                once the others know, which saves them the deadline and leaves the group as it was.

        Raises:
            RanksDisagree: the ranks are about to do different things, or are in different states,
                or some refuse. It is raised on every rank that does not refuse, the body has not
                run, and the group is as before.
            RankLost: a rank did not come before the body, did not finish it, or failed in it. The
                group is poisoned.
            GroupPoisoned: a rank was lost, or a body failed, earlier.

        An error of the body is the one that propagates, once the other ranks have left the body,
        too. If all of them failed alike (the disk is full), they are still in step, and the group
        is as before; otherwise it is poisoned, and who did not fail is told who did.
        """
        group = _group()
        if group is None or dist.get_world_size() == 1:
            if refusal is not None:
                raise refusal
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
        here.end_what_was_dropped()
        here.refuse_if_poisoned(operation)
        claim = {
            "operation": operation,
            **facts,
            "manager": f"number {self._number} of its group",
            "refusal": "none" if refusal is None else one_line(refusal),
        }
        try:
            here.meet(operation, claim)
        except RanksDisagree:
            if refusal is None:
                raise
        if refusal is not None:
            raise refusal
        try:
            with _lowered_timeouts(timedelta(seconds=self.deadline)):
                yield
        except Exception as error:
            here.meet_after_failure(operation, error)
            raise
        except GeneratorExit:
            here.leave_dropped(operation)
            raise
        except BaseException as interrupt:
            here.tell(operation, interrupt)
            raise
        here.meet_after_success(operation)

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
        """Meet the others before the body of ``operation``.

        Raises:
            RanksDisagree: their claims differ.
            RankLost: not all of them came. The group is poisoned.
        """
        if said := self._met(operation, claim).said:
            raise RanksDisagree(
                **self._asked(operation),
                why=_differences(said),
                instead="call the same operation on every rank, in the same state and step",
                said=said,
            )

    def meet_after_success(self, operation: str) -> None:
        """Meet the others after the body, which went well on this rank.

        Raises:
            RankLost: not all of them came, or it failed on another. The group is poisoned.
        """
        if said := self._met(operation, self._end(operation, _WENT_WELL)).said:
            failed = said[_OUTCOME]
            ranks = [rank for told, who in failed.items() if told != _WENT_WELL for rank in who]
            self.group.poisoned = _failures(operation, failed)
            raise self._lost(operation, self.group.poisoned, ranks)

    def meet_after_failure(self, operation: str, error: Exception) -> None:
        """Meet the others after the body, which failed on this rank. Never raises: ``error`` is
        what propagates, and gets a note if there is more to tell."""
        if self.group.poisoned is not None:
            return  # by an operation inside this one, and the others know
        if type(error) is RuntimeError or isinstance(error, dist.DistError):
            # It may be a collective's. Then all may say the same, and still be out of step, and
            # there is nobody worth waiting for.
            self.tell(operation, error)
            return
        try:
            # The others may be in a collective that times out just now.
            end = self._end(operation, one_line(error))
            said = self._met(operation, end, _STORE_ANSWERS_WITHIN).said
        except RankLost as lost:
            error.add_note(f"Besides, {lost.why}.")
            return
        if said:
            self.group.poisoned = _failures(operation, said[_OUTCOME])
            error.add_note(f"On all ranks: {self.group.poisoned}.")

    def leave_dropped(self, operation: str) -> None:
        """Claim that the body was dropped, which may happen wherever Python collects a generator,
        and wait for nobody."""
        if self.group.poisoned is not None:
            return
        number = next(self.group.meetings)
        claim = self._end(operation, _DROPPED)
        try:
            _in_time(
                lambda _: self._meeting(number).come(claim),
                min(self.deadline, _STORE_ANSWERS_WITHIN),
            )
        except (RuntimeError, TimeoutError) as error:
            self.group.poisoned = f"rank {self.rank} dropped {operation}: {one_line(error)}"
        else:
            self.group.dropped = operation, number

    def end_what_was_dropped(self) -> None:
        """Wait for the verdict on a body that this rank dropped. It poisons the group unless all
        dropped it.

        Raises:
            RankLost: not all of them came. The group is poisoned.
        """
        if self.group.dropped is not None:
            (operation, number), self.group.dropped = self.group.dropped, None
            if said := self._met(operation, None, number=number).said:
                self.group.poisoned = _failures(operation, said[_OUTCOME])

    def _met(
        self,
        operation: str,
        claim: Mapping[str, str] | None,
        more: float = 0.0,
        number: int | None = None,
    ) -> _Verdict:
        """Meet the others, waiting for ``more`` seconds beyond the deadline; the verdict, if all
        came.

        Args:
            operation: before or after which they meet.
            claim: what this rank claims; None if it came to the meeting earlier.
            more: seconds.
            number: of the meeting, if it is not the next.

        Raises:
            RankLost: not all of them came, or one was interrupted. The group is poisoned.
        """
        until = time.monotonic() + self.deadline + more
        number = next(self.group.meetings) if number is None else number

        def attend(left: threading.Event) -> _Verdict:
            meeting = self._meeting(number)
            verdict = meeting.attend(claim, until, left)
            if verdict.complete:
                self.group.clear_finished()
            self.group.finished.append(meeting)
            return verdict

        try:
            verdict = _in_time(attend, self.deadline + more + _STORE_ANSWERS_WITHIN)
        except TimeoutError:
            verdict = _Verdict(
                why="the process group's store does not answer; its server is part of rank 0, "
                "unless the launcher has it"
            )
        except RuntimeError as error:  # torch.distributed.DistError, and FileStore's own
            verdict = _Verdict(why=f"the process group's store failed: {one_line(error)}")
        except BaseException as interrupt:
            self.tell(operation, interrupt, number)
            raise
        if not verdict.complete:
            self.group.poisoned = verdict.why
            raise self._lost(operation, verdict.why, verdict.ranks)
        return verdict

    def _lost(self, operation: str, why: str, ranks: Sequence[int]) -> RankLost:
        return RankLost(
            **self._asked(operation),
            why=why,
            instead="move tensors locally, and restart the job: this process group is poisoned",
            ranks=ranks,
        )

    @staticmethod
    def _end(operation: str, outcome: str) -> dict[str, str]:
        return {"operation": f"the end of {operation}", _OUTCOME: outcome}

    def tell(self, operation: str, error: BaseException, meeting: int | None = None) -> None:
        """Poison the group because of ``error``, and let the others know as soon as they meet.

        Args:
            operation: in which it happened.
            error: is given a note if something else had happened before.
            meeting: the number of the meeting that this rank was interrupted in, if it was.
        """
        if self.group.poisoned is not None:
            return  # they know
        failure = f"rank {self.rank} failed in {operation}: {one_line(error)}"
        mine = _Verdict(ranks=[self.rank], why=failure)
        self.group.poisoned = mine.why

        def settle(_: threading.Event) -> _Verdict:
            number = next(self.group.meetings) if meeting is None else meeting
            verdict = self._news(number, operation, mine)
            if verdict.complete:  # they are in the body, where this rank will not come
                verdict = self._news(next(self.group.meetings), operation, mine)
            return verdict

        try:
            verdict = _in_time(settle, min(self.deadline, _STORE_ANSWERS_WITHIN))
        except (RuntimeError, TimeoutError):
            return  # no store, no news: the others have their deadline
        if verdict != mine:
            self.group.poisoned = verdict.why
            error.add_note(f"Before that, {verdict.why}.")

    def _news(self, number: int, operation: str, mine: _Verdict) -> _Verdict:
        """Make ``mine`` the verdict of a meeting, behind the failures that were claimed there
        before: they are likely to be its cause."""
        meeting = self._meeting(number)
        failed: dict[str, list[int]] = {}
        for rank, claim in meeting.claims_so_far().items():
            if (outcome := claim.get(_OUTCOME, _WENT_WELL)) != _WENT_WELL:
                failed.setdefault(outcome, []).append(rank)
        if failed:
            ranks = [rank for who in failed.values() for rank in who]
            why = f"{_failures(operation, failed)}; {mine.why}"
            mine = _Verdict(ranks=[*ranks, *mine.ranks], why=why)
        return meeting.settle(mine)

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
    dropped: tuple[str, int] | None = None
    """The operation that this rank dropped last and the number of the meeting after it, if the
    verdict is still to be heard."""
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

    def come(self, claim: Mapping[str, str]) -> _Verdict | None:
        """Come; the verdict, if this rank is the last."""
        self.store.set(self._claim(self.rank), json.dumps(dict(claim)))
        if self.store.add(self._arrived, 1) == self.size:
            return self.settle(_compared(self._claims()))
        return None

    def attend(
        self, claim: Mapping[str, str] | None, until: float, left: threading.Event
    ) -> _Verdict:
        """Come, unless ``claim`` is None, and wait for the verdict until ``until``, in seconds of
        the monotonic clock, or until ``left`` is set."""
        began = time.monotonic()
        if claim is not None and (verdict := self.come(claim)) is not None:
            return verdict
        pause, longest = _FIRST_LOOK, max(_LAST_LOOK, _LOOK_PER_RANK * self.size)
        while not self.store.check([self._verdict]):
            # The wait of a store is of no use here: FileStore's takes up to a second longer than
            # asked, and none ends early.
            remaining = until - time.monotonic()
            if remaining <= 0:
                return self.settle(self._without_the_missing(time.monotonic() - began))
            if left.wait(min(pause, remaining)):
                return _Verdict(why="this rank left")  # which is for it to tell
            pause = min(2 * pause, longest)
        return self._read(self.store.get(self._verdict))

    def settle(self, verdict: _Verdict) -> _Verdict:
        """Make ``verdict`` the meeting's, unless it has one; return the one it has."""
        return self._read(self.store.compare_set(self._verdict, "", json.dumps(asdict(verdict))))

    def claims_so_far(self) -> dict[int, dict[str, str]]:
        """What the ranks that have come claim."""
        came = [rank for rank in range(self.size) if self.store.check([self._claim(rank)])]
        return {rank: json.loads(self.store.get(self._claim(rank))) for rank in came}

    def clear(self) -> None:
        """Delete this rank's keys; rank 0 deletes those of all."""
        keys = [self._claim(self.rank)]
        if self.rank == 0:
            keys += [self._arrived, self._verdict]
        for key in keys:
            self.store.delete_key(key)

    def _without_the_missing(self, waited: float) -> _Verdict:
        claims = self.claims_so_far()
        missing = [rank for rank in range(self.size) if rank not in claims]
        if not missing:  # the last one was lost after it came, or comes this moment
            return _compared([claims[rank] for rank in range(self.size)])
        return _Verdict(
            ranks=missing,
            why=f"{_listed(missing)} did not come: rank {self.rank} gave up after {waited:.1f} s",
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


def _failures(operation: str, outcomes: Mapping[str, Sequence[int]]) -> str:
    return "; ".join(
        f"{_listed(who)} failed in {operation}: {told}"
        for told, who in outcomes.items()
        if told != _WENT_WELL
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
            if communicator.timeout > deadline and communicator.set_timeout(deadline):
                restoring.callback(communicator.set_timeout, communicator.timeout)
        yield
