"""What must hold in a trace, one small class a rule.

A rule is fed event by event, in the order of wall time, and reports what violates it. It sees the
events of one *scope* only: of a process, of one module in a process, or of all ranks of a run; an
instance is made for each. To add a rule, subclass :class:`Rule`, compare what you need, call
``self.report``, and put the class into :data:`RULES`.

Rules judge by :data:`placement.states.TABLE` and know no placement by name. An event of a kind that
a rule does not ask for is none of its business, so kinds that are newer than a rule pass it by.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from functools import lru_cache
from itertools import takewhile
from operator import attrgetter
from typing import ClassVar

from placement.cli.reading import Entry, Process
from placement.cli.rows import change, named
from placement.errors import (
    IllegalTransition,
    OwnershipChanged,
    PlacementDrift,
    PlacementError,
    PlacementHeld,
    TornPlacement,
)
from placement.states import TABLE, Component, Illegal, Placement, Row, Trigger
from placement.trace import RECOVERY, Event, EventKind, Outcome


class Sort(IntEnum):
    """How likely a violation is no fault of its own, but what another one led to."""

    FAULT = 0
    APART = 1
    """The ranks went apart: one of them had a fault, perhaps."""
    STOPPED = 2
    """A process stopped: it had a fault, or waited for a rank that had."""


@dataclass(frozen=True)
class Violation:
    """One place where a trace breaks a rule.

    Attributes:
        rule: what was broken, in a few words.
        entry: the event to blame; its call site is the place in the engine to look at.
        message: what is wrong with it.
        elsewhere: other call sites that took part, as ``who: file:line``.
        sort: what kind of violation it is.
    """

    rule: str
    entry: Entry
    message: str
    elsewhere: tuple[str, ...] = ()
    sort: Sort = Sort.FAULT

    @property
    def place(self) -> tuple[Sort, float]:
        """Its place among others: causes before what they may have led to, then by time."""
        return self.sort, self.entry.event.wall


_PLACE = attrgetter("place")


@dataclass
class Findings:
    """What was found in a trace, without keeping more of it than is told.

    Attributes:
        first: the violation to look at first.
        by_rule: for each rule, how often it was broken, and where first.
        notes: what could not be judged, and why.
    """

    first: Violation | None = None
    by_rule: dict[str, tuple[int, Violation]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add(self, violation: Violation) -> None:
        """Take a violation."""
        count, first = self.by_rule.get(violation.rule, (0, violation))
        self.by_rule[violation.rule] = count + 1, min(first, violation, key=_PLACE)
        self.first = violation if self.first is None else min(self.first, violation, key=_PLACE)

    @property
    def count(self) -> int:
        """How many violations there were."""
        return sum(count for count, _ in self.by_rule.values())


class Rule(ABC):
    """One thing that must hold.

    Args:
        findings: takes the violations, and notes on what could not be judged.
    """

    title: ClassVar[str]
    """What a violation is called."""

    def __init__(self, findings: Findings) -> None:
        self.findings = findings

    @staticmethod
    def scope(entry: Entry) -> Hashable:
        """Which instance of the rule sees ``entry``; by default one for each module of each
        process."""
        return entry.process, entry.event.module

    @abstractmethod
    def see(self, entry: Entry) -> None:
        """Judge the next event."""

    def end(self) -> None:  # noqa: B027, most rules have judged everything by then
        """Judge what the trace ends with."""

    def report(
        self,
        entry: Entry,
        message: str,
        *,
        title: str = "",
        elsewhere: tuple[str, ...] = (),
        sort: Sort = Sort.FAULT,
    ) -> None:
        """Report a violation, under another title than the rule's if need be."""
        self.findings.add(Violation(title or self.title, entry, message, elsewhere, sort))


class Numbers(Rule):
    """Events are numbered without a gap, and the clock does not go back.

    A bounded trace may have dropped its beginning; nothing may be missing later.
    """

    title = "events are missing"

    def __init__(self, findings: Findings) -> None:
        super().__init__(findings)
        self._last: Event | None = None

    @staticmethod
    def scope(entry: Entry) -> Hashable:
        return entry.process

    def see(self, entry: Entry) -> None:
        last, event = self._last, entry.event
        self._last = event
        if last is None:
            return
        if event.number != last.number + 1:
            self.report(
                entry,
                f"event {last.number} is followed by {event.number}: lines were lost, added or "
                "put in another order",
            )
        if event.monotonic < last.monotonic:
            self.report(
                entry,
                f"the monotonic clock goes back by {last.monotonic - event.monotonic:.6f} s, which "
                "no process sees: the file was edited or put together from several",
                title="the clock goes back",
            )


class LegalTriggers(Rule):
    """A trigger that was fired is a legal row of the table, and led where the row says."""

    title = "an illegal trigger was fired"

    def see(self, entry: Entry) -> None:
        event = entry.event
        if event.kind is not EventKind.TRIGGER or event.outcome is not Outcome.OK:
            return
        row = _row(event.source, event.name)
        if row is None:
            self.report(
                entry, f"the table has no trigger {event.name} in a placement {event.source}"
            )
        elif isinstance(row, Illegal):
            self.report(entry, f"{event.name} is illegal in {event.source}: {row.why}")
        elif row.dest.value != event.dest:
            self.report(
                entry,
                f"{event.name} leads from {event.source} to {row.dest.value}, "
                f"and the trace says to {event.dest}",
            )


@lru_cache
def _row(source: str, name: str) -> Row | None:
    try:
        return TABLE[Placement(source), Trigger(name)]
    except ValueError:
        return None


_OF_A_COMPONENT = (EventKind.TRIGGER, EventKind.MOVE, EventKind.ADOPTION)
"""Events that say where a component was found, and where it was left."""


class ForeignMoves(Rule):
    """Nobody moves tensors without the manager, unless the manager adopts them where they are."""

    title = "moved past the manager"

    def __init__(self, findings: Findings) -> None:
        super().__init__(findings)
        self._pending: list[Entry] = []

    def see(self, entry: Entry) -> None:
        if entry.event.kind is EventKind.FOREIGN:
            self._pending.append(entry)
        elif entry.event.kind is EventKind.ADOPTION:
            self._pending.clear()
        else:
            self.end()

    def end(self) -> None:
        for entry in self._pending:
            self.report(
                entry,
                f"{entry.event.name} moved tensors, or may have, while the record says "
                f"{entry.event.source}; the manager did not adopt what it left",
            )
        self._pending.clear()


class Continuity(Rule):
    """A component is found in the placement that it was left in."""

    title = "moved without the manager"

    def __init__(self, findings: Findings) -> None:
        super().__init__(findings)
        self._left: dict[str, Entry] = {}

    def see(self, entry: Entry) -> None:
        event = entry.event
        if event.kind in _OF_A_COMPONENT:
            if event.component is not None:
                self._found(entry, event.component, event.source)
        elif event.kind is EventKind.ENTER:
            self._found(entry, Component.PARAMS.value, event.source)
        elif event.kind is EventKind.OPERATION:
            self._found(entry, Component.PARAMS.value, event.dest)

    def _found(self, entry: Entry, component: str, placement: str) -> None:
        left = self._left.get(component)
        self._left[component] = entry
        if left is not None and left.event.dest != placement:
            self.report(
                entry,
                f"the {component} was left in {left.event.dest} by event {left.event.number} and "
                f"is found in {placement}: the record changed without a trigger",
                elsewhere=(
                    f"left by {named(left.event.kind)} {left.event.name}: {left.event.call_site}",
                ),
            )


class LeasesEnd(Rule):
    """Every context that is entered ends once. An inner one may outlive its outer one."""

    title = "a context is never left"

    def __init__(self, findings: Findings) -> None:
        super().__init__(findings)
        self._open: dict[int, Entry] = {}
        self._outlived: dict[int, Entry] = {}
        self._first: int | None = None

    def see(self, entry: Entry) -> None:
        event = entry.event
        if event.lease is None:
            return
        if event.kind is EventKind.ENTER:
            if event.lease in self._open:
                self.report(
                    entry,
                    f"lease {event.lease} is entered while it is open",
                    title="a lease is entered twice",
                )
            self._open[event.lease] = entry
            self._first = event.lease if self._first is None else self._first
        elif event.kind is EventKind.OPERATION:
            self._ended(entry, event.lease)

    def _ended(self, entry: Entry, lease: int) -> None:
        entered = self._open.pop(lease, None) or self._outlived.pop(lease, None)
        if entered is None:
            # Its beginning may have been dropped with the beginning of the trace.
            if not entry.process.first or (self._first is not None and lease >= self._first):
                self.report(
                    entry,
                    f"{entry.event.name} ends in a context (lease {lease}) that was not entered, "
                    "or has ended before",
                    title="a context ends that is not open",
                )
            return
        if entered.event.name != entry.event.name:
            self.report(
                entry,
                f"lease {lease} was entered for {entered.event.name} and ended as "
                f"{entry.event.name}",
                title="a context ends as another",
                elsewhere=(f"entered: {entered.event.call_site}",),
            )
        # Leases count up, so those that were entered in this one stand at the end.
        for inner in list(takewhile(lambda other: other > lease, reversed(self._open))):
            self._outlived[inner] = self._open.pop(inner)

    def end(self) -> None:
        for entry in self._outlived.values():
            self.report(
                entry,
                f"a lease leak: the context for {entry.event.name} (lease "
                f"{entry.event.lease}) outlived the one around it and was never left, so what it "
                "found was never put back",
            )
        for entry in self._open.values():
            if entry.process.cut or entry.process.streamed:
                self.report(
                    entry,
                    f"the trace ends inside this context for {entry.event.name} (lease "
                    f"{entry.event.lease}): the process was killed in it, or never left it",
                    title="the trace ends inside a context",
                    sort=Sort.STOPPED,
                )
            else:
                self.report(
                    entry,
                    f"a lease leak: the process wrote its trace without having left the context "
                    f"for {entry.event.name} (lease {entry.event.lease})",
                )


@dataclass
class _Lease:
    number: int | None
    found: dict[str, str]


class FoundIsRestored(Rule):
    """A context leaves every component in the placement that it found.

    One that ends before a younger one leaves that to the younger one, as the manager does.
    """

    title = "the placement found was not restored"

    def __init__(self, findings: Findings) -> None:
        super().__init__(findings)
        self._now: dict[str, str] = {}
        self._open: list[_Lease] = []

    def see(self, entry: Entry) -> None:
        event = entry.event
        if event.kind in _OF_A_COMPONENT and event.component is not None:
            if event.component not in self._now:
                # Nothing moved it before, so that is where every open context found it.
                for lease in self._open:
                    lease.found[event.component] = event.source
            self._now[event.component] = event.dest
        elif event.kind is EventKind.ENTER:
            self._now[Component.PARAMS.value] = event.source
            self._open.append(_Lease(event.lease, dict(self._now)))
        elif event.kind is EventKind.OPERATION:
            self._now[Component.PARAMS.value] = event.dest
            self._left(entry)

    def _left(self, entry: Entry) -> None:
        event = entry.event
        numbers = [lease.number for lease in self._open]
        found = {Component.PARAMS.value: event.source}
        if event.lease in numbers:
            index = numbers.index(event.lease)
            found = self._open.pop(index).found
            if index < len(self._open):
                self._open[index].found = found
                return
        for component, placement in found.items():
            if self._now[component] != placement:
                self.report(
                    entry,
                    f"the context for {event.name} found the {component} in {placement} and left "
                    f"it in {self._now[component]}",
                )


class RanksInStep(Rule):
    """All ranks do the same operations with a module, and move it through the same placements.

    Ranks are compared module by module, so a module that one rank alone has is none of the
    others' business. After the first difference a module's sequence is not compared any more,
    since everything after it would differ too; and if its operations differ, that its transitions
    do as well is no news.
    """

    title = "the ranks are out of step"

    _OPERATION, _TRANSITION = "operation", "transition"
    _CHANGES = (EventKind.TRIGGER, EventKind.ADOPTION)

    _AHEAD = 10_000
    """Steps that one rank may be ahead of another before that is reported."""

    def __init__(self, findings: Findings) -> None:
        super().__init__(findings)
        self._nth: dict[Process, int] = {}
        self._count: defaultdict[int, int] = defaultdict(int)
        self._having: defaultdict[tuple[int, str], set[int]] = defaultdict(set)
        self._sequences: dict[tuple[int, str, str], _Sequence | None] = {}
        self._differences: dict[tuple[int, str, str], tuple[Entry, str, tuple[str, ...]]] = {}
        self._comparable = True

    @staticmethod
    def scope(entry: Entry) -> Hashable:
        return entry.process.run

    def see(self, entry: Entry) -> None:
        event, process = entry.event, entry.process
        if len(process.run.files) < 2 or not self._comparable:
            return
        nth = self._nth.get(process)
        if nth is None:
            # A job that was started again has several processes of each rank, one after another.
            nth = self._nth[process] = self._count[process.rank]
            self._count[process.rank] += 1
            if process.first:
                self._comparable = False
                self.findings.notes.append(
                    f"{process.label}: the beginning was dropped (it starts with event "
                    f"{process.first}), so ranks are not compared"
                )
                return
        self._having[nth, event.module].add(process.rank)
        if event.kind is EventKind.OPERATION:
            self._step((nth, event.module, self._OPERATION), entry)
        elif event.kind in self._CHANGES and event.outcome is Outcome.OK:
            self._step((nth, event.module, self._TRANSITION), entry)

    def _step(self, key: tuple[int, str, str], entry: Entry) -> None:
        sequence = self._sequences.setdefault(key, _Sequence())
        if sequence is None:
            return
        sequence.add(entry)
        ranks = {rank for rank, files in entry.process.run.files.items() if files > key[0]}
        while sequence.steps and sequence.steps[0].keys() >= ranks:
            if not self._agree(key, sequence):
                return
        if len(sequence.steps) > self._AHEAD and not self._agree(key, sequence):
            return

    def _agree(self, key: tuple[int, str, str], sequence: _Sequence) -> bool:
        """Take the next step off a sequence, if the ranks agree on it."""
        nth, module, sort = key
        step = sequence.steps.popleft()
        place = f"{sort} {sequence.taken + 1} of {module}"
        sequence.taken += 1
        if missing := self._having[nth, module] - step.keys():
            self._differ(
                key,
                step,
                f"{place}: rank {', '.join(map(str, sorted(missing)))} has none, while "
                + self._told(step),
                next(iter(step.values())),
            )
            return False
        alike: defaultdict[str, list[int]] = defaultdict(list)
        for rank, entry in step.items():
            alike[_in_words(entry.event)].append(rank)
        if len(alike) > 1:
            odd = min(alike.values(), key=lambda ranks: (len(ranks), -max(ranks)))
            self._differ(key, step, f"{place} differs: " + self._told(step), step[max(odd)])
            return False
        return True

    def _differ(
        self, key: tuple[int, str, str], step: Mapping[int, Entry], message: str, entry: Entry
    ) -> None:
        self._sequences[key] = None
        sites = tuple(f"rank {rank}: {step[rank].event.call_site}" for rank in sorted(step))
        self._differences[key] = entry, message, sites

    @staticmethod
    def _told(step: Mapping[int, Entry]) -> str:
        return ", ".join(f"rank {rank} did {_in_words(step[rank].event)}" for rank in sorted(step))

    def end(self) -> None:
        if not self._comparable:
            return
        for key, sequence in self._sequences.items():
            while sequence is not None and sequence.steps:
                if not self._agree(key, sequence):
                    break
        for (nth, module, sort), (entry, message, sites) in self._differences.items():
            if sort == self._OPERATION or (nth, module, self._OPERATION) not in self._differences:
                self.report(entry, message, elsewhere=sites, sort=Sort.APART)


class _Sequence:
    """What the ranks did with one module, from the first place that not all have reached."""

    def __init__(self) -> None:
        self.steps: deque[dict[int, Entry]] = deque()
        self.taken = 0
        self._done: defaultdict[int, int] = defaultdict(int)

    def add(self, entry: Entry) -> None:
        """Put an event at its rank's next place."""
        rank = entry.process.rank
        place = self._done[rank] - self.taken
        self._done[rank] += 1
        if place < 0:  # the others were taken without it
            return
        if place == len(self.steps):
            self.steps.append({})
        self.steps[place][rank] = entry


def _in_words(event: Event) -> str:
    mode = f" {event.mode}" if event.mode else ""
    of = f" of the {event.component}" if event.component else ""
    return f"{event.name}{of}{mode} ({change(event.source, event.dest)})"


class NothingBeforeLanding(Rule):
    """What was copied is not used before the copies have landed."""

    title = "a read before landing"

    def __init__(self, findings: Findings) -> None:
        super().__init__(findings)
        self._in_flight: dict[str | None, Entry] = {}

    def see(self, entry: Entry) -> None:
        event = entry.event
        if event.kind is EventKind.ISSUED:
            self._in_flight[event.component] = entry
        elif event.kind is EventKind.LANDED or event.outcome is not Outcome.OK:
            self._in_flight.pop(event.component, None)  # or the move was given up
        elif event.kind in (EventKind.TRIGGER, EventKind.ENTER, EventKind.OPERATION):
            for component, issued in self._in_flight.items():
                if event.component in (None, component):
                    self.report(
                        entry,
                        f"{event.name} while the {component}'s copies of event "
                        f"{issued.event.number} ({issued.event.name}) were in flight",
                        elsewhere=(f"issued: {issued.event.call_site}",),
                    )
            self._in_flight.clear()


class NothingAfterTorn(Rule):
    """No trigger of a module succeeds after one of its moves tore it, until it is recovered."""

    title = "a torn module went on"

    def __init__(self, findings: Findings) -> None:
        super().__init__(findings)
        self._torn: Entry | None = None

    def see(self, entry: Entry) -> None:
        event = entry.event
        if self._torn is None:
            if _tells_of(event, TornPlacement):
                self._torn = entry
        elif event.kind is EventKind.MOVE and event.name == RECOVERY:
            self._torn = None
        elif event.kind is EventKind.TRIGGER and event.outcome is Outcome.OK:
            self.report(
                entry,
                f"{event.name} succeeded although event {self._torn.event.number} says that the "
                "module is torn",
                elsewhere=(f"torn: {self._torn.event.call_site}",),
            )


class RefusalsAreHeeded(Rule):
    """A refusal that says that the caller is wrong about a placement is not swallowed.

    In a context, the context must fail after it. Outside of all contexts nothing may follow it but
    the recovery of a torn module: whoever made the mistake would go on with tensors that are not
    where it thinks they are. A refusal for lack of memory, or of a tensor that can't be moved, may
    be answered by doing without the move, so it is no matter of this rule.
    """

    title = "a refusal was swallowed"

    _MISTAKES = (IllegalTransition, PlacementHeld, PlacementDrift, OwnershipChanged)

    def __init__(self, findings: Findings) -> None:
        super().__init__(findings)
        self._pending: dict[int | None, Entry] = {}

    def see(self, entry: Entry) -> None:
        event = entry.event
        outside = self._pending.get(None)
        if outside is not None and not _is_echo(event, outside.event):
            del self._pending[None]
            if event.kind is not EventKind.MOVE or event.name != RECOVERY:
                self._swallowed(
                    outside, f"the module went on with {named(event.kind)} {event.name}", event
                )
        if event.kind is EventKind.OPERATION:
            refused = self._pending.pop(event.lease, None)
            if refused is not None and event.outcome is not Outcome.FAILED:
                self._swallowed(refused, f"{event.name}, the context around it, ended well", event)
        elif event.kind is EventKind.REFUSAL and _tells_of(event, *self._MISTAKES):
            self._pending.setdefault(event.lease, entry)

    def _swallowed(self, refused: Entry, and_then: str, went_on: Event) -> None:
        self.report(
            refused,
            f"{refused.event.detail or refused.event.name}: the caller caught this, and {and_then}",
            elsewhere=(f"went on: {went_on.call_site}",),
        )


def _is_echo(event: Event, refused: Event) -> bool:
    """Whether an event only says again what was refused, on the error's way out."""
    return event.outcome is not Outcome.OK and event.detail == refused.detail


def _tells_of(event: Event, *errors: type[PlacementError]) -> bool:
    """Whether an event's detail is one of these errors, or of their subclasses."""
    return event.detail.partition(":")[0] in _names(errors)


@lru_cache
def _names(errors: tuple[type[PlacementError], ...]) -> frozenset[str]:
    return frozenset(error.__name__ for base in errors for error in _with_subclasses(base))


def _with_subclasses(error: type[PlacementError]) -> Iterator[type[PlacementError]]:
    yield error
    for subclass in error.__subclasses__():
        yield from _with_subclasses(subclass)


RULES: tuple[type[Rule], ...] = (
    Numbers,
    LegalTriggers,
    ForeignMoves,
    Continuity,
    LeasesEnd,
    FoundIsRestored,
    RanksInStep,
    NothingBeforeLanding,
    NothingAfterTorn,
    RefusalsAreHeeded,
)
"""What ``placement check`` judges by."""
