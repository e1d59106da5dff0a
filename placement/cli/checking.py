"""``placement check``: replays traces against the rules, and tells of the violation that is most
likely the cause of the others."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field

from placement.cli.reading import Entry, Process, Traces
from placement.cli.rows import Rows
from placement.cli.rules import RULES, Findings, Rule, Violation
from placement.trace import EventKind

_REACH = 3
"""How many events before and after a violation are shown."""


@dataclass
class Checked:
    """What a check read, and what it found.

    Attributes:
        findings: the violations, and what could not be judged.
        files: files read.
        processes: the processes that recorded something.
        events: events read.
        operations: operations among them.
        start: wall time of the first event, in seconds since the epoch.
    """

    findings: Findings
    files: int = 0
    processes: dict[Process, None] = field(default_factory=dict)
    events: int = 0
    operations: int = 0
    start: float = 0.0

    @property
    def summary(self) -> str:
        """What was read, in a line."""
        ranks = len({(process.run, process.rank) for process in self.processes})
        return ", ".join(
            f"{count} {thing}{'' if count == 1 else 's'}"
            for count, thing in (
                (self.files, "file"),
                (ranks, "rank"),
                (self.events, "event"),
                (self.operations, "operation"),
            )
        )


def check(traces: Traces, rules: Sequence[type[Rule]] = RULES) -> Checked:
    """Feed every event to every rule.

    Raises:
        TraceError: a file can't be read as a trace.
    """
    checked = Checked(Findings(), len(traces.files))
    instances: dict[tuple[type[Rule], Hashable], Rule] = {}
    feeds: dict[tuple[Process, str], list[Rule]] = {}
    for entry in traces:
        event, process, _ = entry
        feed = feeds.get((process, event.module))
        if feed is None:
            checked.start = checked.start or event.wall
            checked.processes[process] = None
            feed = feeds[process, event.module] = [
                instances.setdefault((rule, rule.scope(entry)), rule(checked.findings))
                for rule in rules
            ]
        checked.events += 1
        checked.operations += event.kind is EventKind.OPERATION
        for rule in feed:
            rule.see(entry)
    for rule in instances.values():
        rule.end()
    return checked


def told(checked: Checked, traces: Traces, width: int | None) -> Iterator[str]:
    """Lines on the violation to look at first and its neighbourhood, and on how many more."""
    findings = checked.findings
    assert findings.first is not None
    first = findings.first
    entry, event = first.entry, first.entry.event
    yield f"violation: {first.rule}\n"
    yield f"  {first.message}\n"
    yield f"  at {event.call_site or 'an unknown call site'}\n"
    for site in first.elsewhere:
        yield f"  {site}\n"
    yield (
        f"  in {entry.process.path}:{entry.line}, event {event.number} of {entry.process.label}, "
        f"{event.wall - checked.start:.6f} s after the first\n\n"
    )
    yield from _neighbourhood(entry, traces, Rows(checked.start, width))
    if findings.count > 1:
        yield f"\n{findings.count - 1} further violation{'' if findings.count == 2 else 's'}:\n"
        by_place = sorted(findings.by_rule.items(), key=lambda found: found[1][1].place)
        for rule, (count, violation) in by_place:
            yield from _further(rule, count, violation, first)
    yield f"\n{checked.summary}, {findings.count} violation{'' if findings.count == 1 else 's'}\n"


def _neighbourhood(entry: Entry, traces: Traces, rows: Rows) -> Iterator[str]:
    near = traces.near(entry, _REACH)
    rows.fit(near)
    yield f"  {rows.header()}"
    for other in near:
        yield f"{'>' if other.line == entry.line else ' '} {rows.line(other)}"


def _further(rule: str, count: int, violation: Violation, first: Violation) -> Iterator[str]:
    if violation is first:
        if count > 1:
            yield f"  {count - 1} x {rule}\n"
        return
    event, process = violation.entry.event, violation.entry.process
    yield (
        f"  {count} x {rule}, first at {event.call_site} ({process.path}:{violation.entry.line})\n"
    )
