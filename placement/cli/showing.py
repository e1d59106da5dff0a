"""``placement show``: which events are shown, as a table or as a tree."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase

from placement.cli.reading import Entry, Process, Traces
from placement.cli.rows import change, named, short, size, what
from placement.states import Component, Operation
from placement.trace import Event, EventKind, Outcome


@dataclass(frozen=True)
class Wanted:
    """Which events to show; an empty collection asks for all.

    Attributes:
        components: the event concerns one of these alone.
        ranks: it was recorded by one of these.
        phases: it happened in a context for one of these.
        outcomes: it ended in one of these ways.
        modules: ``fnmatch`` patterns, one of which its module matches.
    """

    components: Collection[Component] = ()
    ranks: Collection[int] = ()
    phases: Collection[Operation] = ()
    outcomes: Collection[Outcome] = ()
    modules: Collection[str] = ()

    def among(self, entries: Iterable[Entry]) -> Iterable[Entry]:
        """The entries wanted."""
        tests = list(self._tests())
        if not tests:
            return entries
        return (entry for entry in entries if all(test(entry.event) for test in tests))

    def _tests(self) -> Iterator[Callable[[Event], bool]]:
        if self.components:
            components = {component.value for component in self.components}
            yield lambda event: event.component in components
        if self.ranks:
            yield lambda event: event.rank in self.ranks
        if self.phases:
            phases = {phase.value for phase in self.phases}
            yield lambda event: event.phase in phases
        if self.outcomes:
            yield lambda event: event.outcome in self.outcomes
        if self.modules:
            yield lambda event: any(fnmatchcase(event.module, pattern) for pattern in self.modules)


def tree(traces: Traces, wanted: Wanted) -> Iterator[str]:
    """Lines that nest what happened in the contexts it happened in, a process at a time.

    A context is opened by a line when it is entered and closed by one when it ends, so a trace of
    any length can be printed as it is read.
    """
    for entries in traces.one_by_one():
        process: Process | None = None
        open_leases: dict[str, list[int | None]] = {}
        start = 0.0
        for entry in wanted.among(entries):
            event = entry.event
            if entry.process is not process:
                process, start = entry.process, event.wall
                open_leases.clear()
                yield f"{process.label}  {process.path}\n"
            around = open_leases.setdefault(event.module, [])
            depth = around.index(event.lease) + 1 if event.lease in around else len(around)
            if event.kind is EventKind.ENTER:
                around.append(event.lease)
                branch = "│ " * depth + "┌"
            elif event.kind is EventKind.OPERATION and event.lease in around:
                around.remove(event.lease)
                branch = "│ " * (depth - 1) + "└"
            else:
                branch = "│ " * depth + "─"
            yield f"{event.wall - start:12.6f}  {branch} {_in_words(event)}\n"


def _in_words(event: Event) -> str:
    """One event of a tree. What the context says already is left out."""
    moved = [
        f"{size(count)} {where}"
        for count, where in ((event.bytes_to_device, "in"), (event.bytes_to_host, "out"))
        if count
    ]
    words = [
        event.module if event.component is None else f"{event.module} {event.component}",
        what(event.kind, event.name),
        change(event.source, event.dest),
        *moved,
        *([f"{event.seconds:.4f} s"] if event.seconds else []),
        *([named(event.outcome)] if event.outcome is not Outcome.OK else []),
        short(event.call_site),
        event.detail,
    ]
    return "  ".join(filter(None, words))
