"""One event as one line of text, in columns that stay as wide as they began.

The widths come from the first events, so that a trace of any length can be printed as it is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import chain, islice

from rich import filesize
from rich.style import Style

from placement.cli.reading import Entry, Process
from placement.trace import Event, EventKind, Outcome

_LOOKED_AT = 1000
"""How many events determine the widths of the columns."""

_TITLES = (
    "seconds",
    "took",
    "process",
    "module",
    "component",
    "what",
    "from → to",
    "to device",
    "to host",
    "phase",
    "outcome",
    "call site",
)
_TO_THE_RIGHT = {"seconds", "took", "to device", "to host"}
_TIMES = 2
"""How many columns differ in every row. The rest of a row is often that of an earlier one."""

_STYLES: dict[object, Style] = {
    Outcome.REFUSED: Style.parse("yellow"),
    Outcome.FAILED: Style.parse("bold red"),
    EventKind.FOREIGN: Style.parse("magenta"),
    EventKind.ENTER: Style.parse("dim"),
    EventKind.OPERATION: Style.parse("bold"),
}


class Rows:
    """Formats entries as lines.

    Args:
        start: wall time in seconds since the epoch that the first column counts from.
        width: characters of a terminal's line, to which rows are cropped and where refusals and
            failures explain themselves on a line of their own; None for plain text, where a row
            is a line, and complete.
    """

    def __init__(self, start: float, width: int | None = None) -> None:
        self._start = start
        self._width = width
        self.fit(())

    def lines(self, entries: Iterable[Entry]) -> Iterator[str]:
        """A header and a line for each entry, each with its newline."""
        rest = iter(entries)
        first = list(islice(rest, _LOOKED_AT))
        self.fit(first)
        yield self.header()
        for entry in chain(first, rest):
            yield self.line(entry)

    def fit(self, entries: Iterable[Entry]) -> None:
        """Make the columns wide enough for ``entries``."""
        cells = ((*self._times(entry.event), *_cells(*_key(entry))) for entry in entries)
        columns = [
            f"%{'' if column[0] in _TO_THE_RIGHT else '-'}{max(map(len, column))}s"
            for column in zip(_TITLES, *cells)
        ]
        self._of_times = "  ".join([*columns[:_TIMES], ""])
        of_rest = "  ".join(columns[_TIMES:])
        self._rest = lru_cache(4096)(lambda *key: (of_rest % _cells(*key)).rstrip())
        self._header = self._cropped((self._of_times + of_rest) % _TITLES).rstrip() + "\n"

    def header(self) -> str:
        """The titles of the columns, after :meth:`fit`."""
        return self._header

    def line(self, entry: Entry) -> str:
        """The line of one entry, after :meth:`fit`."""
        event = entry.event
        line = self._of_times % self._times(event) + self._rest(*_key(entry))
        if self._width is None:
            return f"{line}  {event.detail}\n" if event.detail else f"{line}\n"
        line = self._cropped(line)
        if event.detail:
            line += f"\n    {event.detail}"
        style = _STYLES.get(event.outcome) or _STYLES.get(event.kind)
        return (style.render(line) if style else line) + "\n"

    def _times(self, event: Event) -> tuple[str, str]:
        return (
            f"{event.wall - self._start:.6f}",
            f"{event.seconds:.4f}" if event.seconds else "-",
        )

    def _cropped(self, line: str) -> str:
        if self._width is None or len(line) <= self._width:
            return line
        return line[: self._width - 1] + "…"


_Key = tuple[
    Process, str, str | None, EventKind, str, str, str, int, int, int, str | None, str, Outcome
]


def _key(entry: Entry) -> _Key:
    """What the columns after the times are made of."""
    event = entry.event
    return (
        entry.process,
        event.module,
        event.component,
        event.kind,
        event.name,
        event.source,
        event.dest,
        event.bytes_to_device,
        event.bytes_to_host,
        event.bytes_unchanged,
        event.phase,
        event.call_site,
        event.outcome,
    )


def _cells(
    process: Process,
    module: str,
    component: str | None,
    kind: EventKind,
    name: str,
    source: str,
    dest: str,
    bytes_to_device: int,
    bytes_to_host: int,
    bytes_unchanged: int,
    phase: str | None,
    call_site: str,
    outcome: Outcome,
) -> tuple[str, ...]:
    return (
        process.label,
        module,
        component or "-",
        what(kind, name),
        change(source, dest),
        size(bytes_to_device),
        size(bytes_to_host) if bytes_to_host or not bytes_unchanged else "unchanged",
        phase or "-",
        named(outcome),
        short(call_site) or "-",
    )


def named(value: EventKind | Outcome | str) -> str:
    """The name of a kind or outcome, known to this version or not."""
    return value if isinstance(value, str) else value.value


def what(kind: EventKind | str, name: str) -> str:
    """An event's kind and name."""
    return f"{named(kind)} {name}"


def change(source: str, dest: str) -> str:
    """A placement, or the change from one to another."""
    return source if source == dest else f"{source} → {dest}"


def size(count: int) -> str:
    """Bytes in decimal units."""
    return filesize.decimal(count) if count else "-"


def short(call_site: str) -> str:
    """The last two parts of a call site's path."""
    return "/".join(call_site.replace("\\", "/").split("/")[-2:])
