"""``placement plot``: placements, phases, moved bytes and memory over time, with matplotlib.

Each run has a panel of bands, one for each component of each module, and beneath it panels for
bytes moved and for memory. A run's time starts with its own first event.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from placement.cli.reading import Process, Run, TraceError, Traces
from placement.states import Component, Operation, Placement
from placement.trace import Event, EventKind, Outcome

_PALETTE = ("#2a9d5c", "#f0a830", "#5b7fd4", "#a05fb4", "#3aa6a6", "#c2674f")
_PHASE_COLORS = ("#c9d6ea", "#dcd3ea", "#cfe6d8", "#f3dcc4", "#ead0d6")
_ALARM = "#d62728"
_MARKS = {
    "refused": ("x", "refused"),
    "failed": ("d", "failed"),
    "foreign": ("v", "moved past the manager"),
}
"""The marker and label for each list of moments that a row has."""

_DOUBT: dict[str, Any] = {"facecolor": "none", "edgecolor": "white", "hatch": "////", "lw": 0}

_RANK_COLORS = ("#222222", "#c2187a", "#0e9aa7", "#7a6a00", "#7048c6", "#4d8f2f", "#888888")
_DIRECTIONS = {"to device": "#2f6db5", "to host": "#c8743a"}
_BINS = 240
"""Bars of moved bytes along the whole time axis."""

_RESOLUTION = 3000
"""Spans shorter than this part of the whole axis can't be seen."""

_BAND = 0.3
"""Height of one band in inches."""

_PARAMS = Component.PARAMS.value


def figure(width: float, height: float) -> tuple[Any, Any]:
    """An empty figure of ``width`` by ``height`` inches, and its axes.

    Raises:
        TraceError: matplotlib is not installed.
    """
    made = _matplotlib().Figure(figsize=(width, height), layout="constrained")
    return made, made.subplots()


def color_of(placement: str) -> str:
    """The colour of a placement, the same in every picture; grey if this version has none such."""
    known = [known.value for known in Placement]
    if placement not in known:
        return "#999999"
    return _PALETTE[known.index(placement) % len(_PALETTE)]


def _matplotlib() -> Any:
    try:
        # Neither pyplot nor a screen is needed, so nothing of the user's session is touched.
        from matplotlib import figure
    except ImportError:
        raise TraceError(
            Path("matplotlib"),
            None,
            "pictures are drawn with matplotlib, which is not installed",
            "pip install matplotlib",
        ) from None
    return figure


_Span = tuple[float, float, str]
"""Begin and end in seconds, and what was then."""


@dataclass
class _Row:
    """One component of a module, or, without one, the contexts of the module.

    Attributes:
        spans: ``(begin, end, placement or operation)`` in seconds.
        refused: when something was refused.
        failed: when something failed.
        foreign: when something was moved past the manager.
        doubtful: from each such moment to when the manager next saw where the component is.
    """

    spans: list[_Span] = field(default_factory=list)
    refused: list[float] = field(default_factory=list)
    failed: list[float] = field(default_factory=list)
    foreign: list[float] = field(default_factory=list)
    doubtful: list[tuple[float, float | None]] = field(default_factory=list)

    def found(self, moment: float, placement: str) -> None:
        """Note where the component was seen; it is taken to be there until it is elsewhere."""
        self.seen(moment)
        if not self.spans or self.spans[-1][2] != placement:
            self.spans.append((moment, moment, placement))

    def doubted(self, moment: float) -> None:
        """Note that somebody may have moved the component."""
        if not self.doubtful or self.doubtful[-1][1] is not None:
            self.doubtful.append((moment, None))

    def seen(self, moment: float) -> None:
        """Note that the manager looked where the component is."""
        if self.doubtful and self.doubtful[-1][1] is None:
            self.doubtful[-1] = self.doubtful[-1][0], moment

    def marked(self, moment: float, event: Event) -> None:
        """Note what an event has to be looked at for."""
        outcome = event.outcome
        if event.kind is EventKind.FOREIGN:
            self.foreign.append(moment)
        elif outcome is Outcome.REFUSED:
            self.refused.append(moment)
        elif outcome is Outcome.FAILED:
            self.failed.append(moment)


_Key = tuple[Process, str]
"""A module in a process."""


@dataclass
class _Drawn:
    """What is drawn of one run.

    Attributes:
        start: wall time of its first event, in seconds since the epoch.
        end: seconds from there to its last event.
        rows: by module and component; the empty component is the module's contexts.
        open: since when, and in which leases, each module is in a context.
        moved: ``(seconds, direction, bytes)``.
        memory: ``(seconds, bytes)`` by process and what was measured.
    """

    start: float
    end: float = 0.0
    rows: defaultdict[_Key, defaultdict[str, _Row]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(_Row))
    )
    open: defaultdict[_Key, dict[int | None, tuple[float, str]]] = field(
        default_factory=lambda: defaultdict(dict)
    )
    moved: list[tuple[float, str, int]] = field(default_factory=list)
    memory: defaultdict[tuple[Process, str], list[tuple[float, int]]] = field(
        default_factory=lambda: defaultdict(list)
    )

    def add(self, process: Process, event: Event) -> None:
        """Take the next event in the order of wall time."""
        key = process, event.module
        rows, moment = self.rows[key], event.wall - self.start
        self.end = max(self.end, moment)
        if event.kind is EventKind.ENTER:
            rows[_PARAMS].found(moment, event.source)
            self.open[key][event.lease] = moment, event.name
        elif event.kind is EventKind.OPERATION:
            rows[_PARAMS].found(moment, event.dest)
            begin, name = self.open[key].pop(event.lease, (moment - event.seconds, event.name))
            if not self.open[key]:  # inner contexts are part of the outermost one
                rows[""].spans.append((begin, moment, name))
        elif event.component is not None:
            rows[event.component].found(max(0.0, moment - event.seconds), event.source)
            rows[event.component].found(moment, event.dest)
        rows[event.component or ""].marked(moment, event)
        if event.kind is EventKind.FOREIGN:
            for component in rows.keys() - {""}:
                rows[component].doubted(moment)
        elif event.kind is EventKind.ENTER:  # it was compared with the tensors
            for row in rows.values():
                row.seen(moment)
        for direction, size in zip(_DIRECTIONS, (event.bytes_to_device, event.bytes_to_host)):
            if size:
                self.moved.append((moment, direction, size))
        for what, sizes in (("device", event.device_bytes), ("host", event.host_bytes)):
            if sizes is not None:
                samples = self.memory[process, what]
                before = max([moment - event.seconds, *(known for known, _ in samples[-1:])])
                samples += [(before, sizes[0]), (moment, sizes[1])]

    def close(self) -> None:
        """Let contexts that never ended last until the end."""
        for key, leases in self.open.items():
            for begin, name in list(leases.values())[:1]:
                self.rows[key][""].spans.append((begin, self.end, name))


def plot(traces: Traces, output: Path) -> None:
    """Draw ``traces`` into ``output``, in the format that its ending says.

    Raises:
        TraceError: a file can't be read as a trace, matplotlib is not installed, or it can't write
            such a file.
    """
    figure_module = _matplotlib()
    runs: dict[Run, _Drawn] = {}
    for entry in traces:
        run = entry.process.run
        runs.setdefault(run, _Drawn(entry.event.wall)).add(entry.process, entry.event)
    if not runs:
        raise TraceError(traces.files[0], None, "no event to draw", "pass a trace with events")
    panels: list[tuple[float, Callable[[Any, _Drawn], None], Run, _Drawn]] = []
    for run, drawn in runs.items():
        drawn.close()
        bands = 0.3 + _BAND * sum(len(rows) for rows in drawn.rows.values())
        panels.append((bands, _draw_rows, run, drawn))
        if drawn.moved:
            panels.append((1.0, _draw_moved, run, drawn))
        if drawn.memory:
            panels.append((1.4, _draw_memory, run, drawn))
    heights = [height for height, *_ in panels]
    made = figure_module.Figure(figsize=(15, 1.4 + 1.2 * sum(heights)), layout="constrained")
    axes = made.subplots(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    for index, (panel, (_, draw, run, drawn)) in enumerate(zip(axes, panels)):
        draw(panel, drawn)
        panel.set_xlim(0, drawn.end or 1e-3)
        panel.spines[["top", "right"]].set_visible(False)
        if draw is _draw_rows:
            panel.set_title(run.label, loc="left", fontweight="bold")
        if panels[index + 1 :] and panels[index + 1][3] is drawn:
            panel.tick_params(labelbottom=False)
        else:
            panel.set_xlabel("seconds since the first event")
    made.legend(handles=list(_legend(runs.values())), loc="outside upper center", ncols=7)
    try:
        made.savefig(output, dpi=120)
    except (OSError, ValueError) as error:
        raise TraceError(output, None, str(error), "choose another output file") from None


def _draw_rows(axes: Any, drawn: _Drawn) -> None:
    labels: list[str] = []
    for (process, module), rows in sorted(drawn.rows.items(), key=_by_rank_and_module):
        if labels:
            axes.axhline(len(labels) - 0.5, color="0.75", lw=0.8)
        for component in sorted(rows, key=_in_their_order):
            row, y = rows[component], len(labels)
            if component:
                spans = _until_next(row.spans, drawn.end)
                _draw_spans(axes, y, spans, color_of, drawn.end)
                _draw_doubts(axes, y, row, drawn.end)
                labels.append(component)
            else:
                _draw_spans(axes, y, row.spans, _phase_color, drawn.end, named=True)
                labels.append(f"rank {process.rank}  {_shortened(module)}")
            for kind, (marker, _) in _MARKS.items():
                moments = getattr(row, kind)
                axes.plot(moments, [y] * len(moments), marker, color=_ALARM, ms=8, mew=2, zorder=4)
    axes.set_yticks(range(len(labels)), labels, fontsize=9)
    axes.set_ylim(len(labels) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)


def _in_their_order(component: str) -> int:
    """The contexts first, then the components as the table has them."""
    known = ["", *(component.value for component in Component)]
    return known.index(component) if component in known else len(known)


def _by_rank_and_module(item: tuple[_Key, object]) -> tuple[int, str, str]:
    (process, module), _ = item
    return process.rank, process.label, module


def _until_next(spans: list[_Span], end: float) -> list[_Span]:
    """Spans that last until the next one begins."""
    begins = [begin for begin, _, _ in spans]
    return [(begin, until, name) for (begin, _, name), until in zip(spans, [*begins[1:], end])]


def _draw_spans(
    axes: Any,
    y: int,
    spans: list[_Span],
    color: Callable[[str], str],
    end: float,
    *,
    named: bool = False,
) -> None:
    """One row of coloured spans, with their names in them where there is room."""
    by_name: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for begin, until, name in _visible(spans, end / _RESOLUTION):
        by_name[name].append((begin, until - begin))
        if named and until - begin > 0.011 * len(name) * end:
            axes.text((begin + until) / 2, y, name, ha="center", va="center", fontsize=8.5)
    for name, bars in by_name.items():
        axes.broken_barh(bars, (y - 0.4, 0.8), color=color(name), lw=0)


def _draw_doubts(axes: Any, y: int, row: _Row, end: float) -> None:
    bars = [(begin, (end if until is None else until) - begin) for begin, until in row.doubtful]
    axes.broken_barh(bars, (y - 0.4, 0.8), **_DOUBT)


def _visible(spans: list[_Span], least: float) -> Iterator[_Span]:
    """``spans``, with those shorter than ``least`` put together as what most of them are, so that
    a picture of a million of them stays a picture."""
    short: defaultdict[str, float] = defaultdict(float)
    since = 0.0
    for begin, until, name in spans:
        if short and (until - begin >= least or begin - since >= least):
            yield since, begin, max(short, key=lambda name: short[name])
            short.clear()
        if until - begin >= least:
            yield begin, until, name
        else:
            since = since if short else begin
            short[name] += until - begin
    if short:
        yield since, until, max(short, key=lambda name: short[name])


def _draw_moved(axes: Any, drawn: _Drawn) -> None:
    """Bytes moved by all ranks: to the device upwards, to the host downwards."""
    width = (drawn.end or 1e-3) / _BINS
    for sign, (direction, color) in zip((1, -1), _DIRECTIONS.items()):
        bins = [0] * (_BINS + 1)
        for moment, moved, size in drawn.moved:
            if moved == direction:
                bins[int(moment / width)] += sign * size
        places = [index for index, size in enumerate(bins) if size]
        axes.bar(
            [(index + 0.5) * width for index in places],
            [bins[index] for index in places],
            width=width,
            color=color,
        )
    axes.axhline(0, color="0.3", lw=0.8)
    axes.set_ylabel("moved", fontsize=9)
    _count_bytes(axes)


def _draw_memory(axes: Any, drawn: _Drawn) -> None:
    """Allocated bytes of the device at the left, resident bytes of the process at the right."""
    right = axes.twinx()
    processes = _with_memory(drawn)
    for panel, what, style in ((axes, "device", "-"), (right, "host", ":")):
        for number, process in enumerate(processes):
            samples = drawn.memory[process, what]
            points = list(_thinned(samples))
            moments, sizes = zip(*points)
            panel.plot(
                moments,
                sizes,
                style,
                color=_RANK_COLORS[number % len(_RANK_COLORS)],
                drawstyle="steps-post",
                lw=1.2,
                alpha=0.8 if len(points) == len(samples) else 0.4,
            )
        panel.set_ylabel(f"{what} memory", fontsize=9)
        _count_bytes(panel)


def _thinned(samples: list[tuple[float, int]]) -> Iterator[tuple[float, int]]:
    """The samples if they can be seen, else the least and the most of each group of them."""
    together = len(samples) // _RESOLUTION
    if together < 4:
        yield from samples
        return
    for index in range(0, len(samples), together):
        group = samples[index : index + together]
        sizes = [size for _, size in group]
        yield group[0][0], min(sizes)
        yield group[0][0], max(sizes)


def _with_memory(drawn: _Drawn) -> list[Process]:
    """The processes whose memory is known, in the order of their colours."""
    return sorted({process for process, _ in drawn.memory}, key=lambda process: process.label)


def _count_bytes(axes: Any) -> None:
    from matplotlib.ticker import EngFormatter, MaxNLocator

    axes.yaxis.set_major_locator(MaxNLocator(3))
    axes.yaxis.set_major_formatter(EngFormatter("B"))
    axes.tick_params(axis="y", labelsize=8)


def _legend(runs: Collection[_Drawn]) -> Iterator[Any]:
    """What the colours and marks mean, as far as they occur."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    rows = [row for drawn in runs for rows in drawn.rows.values() for row in rows.items()]
    seen = {name for component, row in rows if component for _, _, name in row.spans}
    for placement in [known.value for known in Placement if known.value in seen]:
        yield Patch(color=color_of(placement), label=placement)
    phases = {name for component, row in rows if not component for _, _, name in row.spans}
    for phase in [known.value for known in Operation if known.value in phases]:
        yield Patch(color=_phase_color(phase), label=phase)
    for direction, color in _DIRECTIONS.items():
        if any(moved == direction for drawn in runs for _, moved, _ in drawn.moved):
            yield Patch(color=color, label=f"moved {direction}")
    for kind, (marker, label) in _MARKS.items():
        if any(getattr(row, kind) for _, row in rows):
            yield Line2D([], [], marker=marker, color=_ALARM, linestyle="", mew=2, label=label)
    if any(row.doubtful for _, row in rows):
        yield Patch(**{**_DOUBT, "edgecolor": "0.5"}, label="the record, in doubt")
    most = max((_with_memory(drawn) for drawn in runs), key=len)
    for number, process in enumerate(most[: len(_RANK_COLORS)]):
        color = _RANK_COLORS[number]
        yield Line2D([], [], color=color, label=f"device memory, rank {process.rank}")
        yield Line2D([], [], color=color, linestyle=":", label=f"host memory, rank {process.rank}")


def _phase_color(operation: str) -> str:
    known = [known.value for known in Operation]
    index = known.index(operation) if operation in known else len(known)
    return _PHASE_COLORS[index % len(_PHASE_COLORS)]


def _shortened(module: str) -> str:
    return module if len(module) <= 24 else f"{module[:10]}…{module[-12:]}"
