"""``placement export``: a trace in the format of Perfetto and chrome://tracing.

The Trace Event Format's JSON object form, written event by event. Every process of a trace is a
process there; it has a track for the contexts of each module, and one for each of its components.
Times are microseconds since the first event.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Generator, Iterator
from typing import Any, TextIO

from placement.cli.reading import Entry, Process, Traces
from placement.cli.rows import named, what
from placement.trace import Event, EventKind, Outcome

_HAVE_A_LENGTH = (EventKind.OPERATION, EventKind.TRIGGER, EventKind.MOVE)
_TOLD_BY_THE_FORMAT = ("wall", "monotonic", "kind", "name", "seconds", "rank")


def write(traces: Traces, file: TextIO) -> int:
    """Write ``traces`` to ``file``.

    Returns:
        How many events were written, in the terms of the format.

    Raises:
        TraceError: a file can't be read as a trace.
    """
    count = 0
    file.write('{"displayTimeUnit":"ms","traceEvents":[')
    for count, event in enumerate(_exported(traces), 1):
        file.write(",\n" if count > 1 else "\n")
        file.write(json.dumps(event, separators=(",", ":")))
    file.write("\n]}\n")
    return count


def _exported(traces: Traces) -> Iterator[dict[str, Any]]:
    writers: dict[Process, _Writer] = {}
    start: float | None = None
    for entry in traces:
        start = entry.event.wall if start is None else start
        writer = writers.get(entry.process)
        if writer is None:
            # Within a process the monotonic clock orders and spaces events; the wall clock only
            # says where the process's first event stands among the others' ones.
            origin = entry.event.monotonic - (entry.event.wall - start)
            writer = writers[entry.process] = _Writer(len(writers) + 1, origin)
            yield writer.metadata("process_name", 0, entry.process.label)
        yield from writer.events(entry)


class _Track:
    """A row of spans that nest or follow each other, as the format wants it."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.busy_until = 0
        self._spans: list[tuple[int, int]] = []

    def takes(self, begin: int, end: int, earliest: int) -> bool:
        """Add a span that ends after all others, if it crosses none of them.

        Args:
            begin, end: the span, in nanoseconds.
            earliest: no later span will begin before this.
        """
        spans = [span for span in self._spans if span[0] < begin and span[1] > earliest]
        if any(other_end > begin for _, other_end in spans):
            return False
        self._spans = [*spans, (begin, end)]
        return True


class _Writer:
    """Turns one process's entries into the format's events.

    Args:
        pid: the process's number in the file.
        origin: time of its monotonic clock that is written as 0, in seconds.
    """

    def __init__(self, pid: int, origin: float) -> None:
        self._pid = pid
        self._origin = origin
        self._tracks: dict[str, _Track] = {}
        self._entered: dict[int | None, int] = {}
        self._sampled: dict[str, int] = {}

    def metadata(self, name: str, tid: int, value: str) -> dict[str, Any]:
        """Name the process or one of its tracks."""
        return {"ph": "M", "name": name, "pid": self._pid, "tid": tid, "args": {"name": value}}

    def events(self, entry: Entry) -> Iterator[dict[str, Any]]:
        """What one entry becomes."""
        event = entry.event
        end = round((event.monotonic - self._origin) * 1e9)
        begin = end - round(event.seconds * 1e9)
        if event.kind is EventKind.ENTER:
            self._entered[event.lease] = end
            return
        if event.kind is EventKind.OPERATION:
            begin = self._entered.get(event.lease, begin)
            track = yield from self._track_for_context(event.module, begin, end)
            self._entered.pop(event.lease, None)
        else:
            track = yield from self._track(f"{event.module} {event.component or 'contexts'}")
            begin = min(end, max(begin, track.busy_until))  # rounded clocks may overlap
            track.busy_until = end
        place = {"pid": self._pid, "tid": track.number, "cat": named(event.kind)}
        told = {"args": _arguments(event)}
        if event.kind in _HAVE_A_LENGTH:
            yield {"ph": "X", "name": event.name, **_time(begin, end), **place, **told}
        if event.kind not in _HAVE_A_LENGTH or event.outcome is not Outcome.OK:
            name = what(event.kind, event.name)
            if event.outcome is not Outcome.OK:
                name = f"{named(event.outcome)}: {event.name}"
            yield {"ph": "i", "s": "t", "name": name, **_time(end), **place, **told}
        yield from self._memory("device memory", event.device_bytes, begin, end)
        yield from self._memory("host memory", event.host_bytes, begin, end)

    def _track(self, name: str) -> Generator[dict[str, Any], None, _Track]:
        """The track with this name, which is announced when it is first used."""
        track = self._tracks.get(name)
        if track is None:
            track = self._tracks[name] = _Track(len(self._tracks) + 1)
            yield self.metadata("thread_name", track.number, name)
        return track

    def _track_for_context(
        self, module: str, begin: int, end: int
    ) -> Generator[dict[str, Any], None, _Track]:
        """The module's track for contexts; another one for a context that outlived the one
        around it, since spans of one track can't cross."""
        earliest = min([begin, *self._entered.values()])
        for number in itertools.count(1):
            name = f"{module} contexts" + (f" ({number})" if number > 1 else "")
            track = yield from self._track(name)
            if track.takes(begin, end, earliest):
                return track
        raise AssertionError("a new track takes any span")

    def _memory(
        self, name: str, sizes: tuple[int, int] | None, begin: int, end: int
    ) -> Iterator[dict[str, Any]]:
        """Two samples of a counter: before and after."""
        if sizes is None:
            return
        begin = max(begin, self._sampled.get(name, begin))
        self._sampled[name] = end
        for moment, size in zip((begin, end), sizes):
            yield {
                "ph": "C",
                "name": name,
                "pid": self._pid,
                **_time(moment),
                "args": {"bytes": size},
            }


def _time(begin: int, end: int | None = None) -> dict[str, float]:
    """The format's fields for a moment or span, which it wants in microseconds."""
    return {"ts": begin / 1000} | ({} if end is None else {"dur": (end - begin) / 1000})


def _arguments(event: Event) -> dict[str, Any]:
    """What the format has no field for."""
    return {
        name: named(value) if name == "outcome" else value
        for name, value in event._asdict().items()
        if name not in _TOLD_BY_THE_FORMAT and value not in (None, "")
    }
