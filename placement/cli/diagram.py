"""``placement states``: draws the machine from its table, so that no drawing can disagree."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator, Mapping
from typing import Any, TextIO

from rich import box
from rich.console import Console
from rich.table import Table

from placement.cli import plotting
from placement.states import TABLE, TORN, Illegal, Legal, Placement, Row, Trigger

Machine = Mapping[tuple[Placement, Trigger], Row]


class Format(enum.Enum):
    """What a machine can be printed as."""

    MERMAID = "mermaid"
    TABLE = "table"
    SVG = "svg"


def show(format: Format, file: TextIO, table: Machine = TABLE) -> None:
    """Print the machine of ``table`` to ``file``.

    Raises:
        TraceError: an SVG was asked for and matplotlib is not there.
    """
    if format is Format.MERMAID:
        file.write(mermaid(table))
    elif format is Format.TABLE:
        console = Console(file=file)
        # Reasons are sentences: where nobody watches the width, they need not be broken.
        console.width = console.width if console.is_terminal else 160
        console.print(as_table(table))
    else:
        draw(table).savefig(file, format="svg", bbox_inches="tight")


def mermaid(table: Machine = TABLE) -> str:
    """The machine as a ``stateDiagram-v2``: legal rows as arrows, refused triggers as a note."""
    lines = ["stateDiagram-v2"]
    for placement in Placement:
        lines.append(f"    {placement.value}")
        if refused := ", ".join(trigger.value for trigger in _refused(table, placement)):
            lines += [
                f"    note right of {placement.value}",
                f"        refused: {refused}",
                "    end note",
            ]
    lines += [
        f"    {source.value} --> {row.dest.value} : {trigger.value}"
        for (source, trigger), row in table.items()
        if isinstance(row, Legal)
    ]
    return "\n".join(lines) + "\n"


def as_table(table: Machine = TABLE) -> Table:
    """Every pair of placement and trigger: where it leads and what happens, or why it is refused
    and what to do instead."""
    told = Table(box=box.ROUNDED, show_lines=True)
    for title in ("placement", "trigger", "leads to", "what happens, or why not"):
        told.add_column(title, no_wrap=title != "what happens, or why not")
    for (source, trigger), row in table.items():
        if isinstance(row, Legal):
            told.add_row(source.value, trigger.value, f"[green]{row.dest.value}", row.meaning)
        else:
            told.add_row(source.value, trigger.value, "[red]refused", _reason(row))
    told.add_row("any, torn", "any", "[red]refused", _reason(TORN))
    return told


def _reason(row: Illegal) -> str:
    return f"{row.why}.\n[dim]instead: {row.instead}"


def _refused(table: Machine, placement: Placement) -> Iterator[Trigger]:
    return (
        trigger
        for (source, trigger), row in table.items()
        if source is placement and isinstance(row, Illegal)
    )


def draw(table: Machine = TABLE) -> Any:
    """The machine as a matplotlib figure: placements in a row, legal rows as arrows.

    Raises:
        TraceError: matplotlib is not there.
    """
    left, right = -_MARGIN, _APART * (len(Placement) - 1) + _MARGIN
    bottom, top = -1.1, 1.15
    figure, axes = plotting.figure(right - left, top - bottom)
    where = {placement: _APART * index for index, placement in enumerate(Placement)}
    for placement, x in where.items():
        refused = ", ".join(trigger.value for trigger in _refused(table, placement))
        axes.text(
            x,
            0,
            placement.value,
            ha="center",
            va="center",
            fontsize=12,
            bbox={
                "boxstyle": "round,pad=0.8",
                "facecolor": plotting.color_of(placement.value),
                "edgecolor": "0.2",
                "alpha": 0.85,
            },
        )
        if refused:
            axes.text(x, -0.5, f"refused: {refused}", ha="center", fontsize=9, color="#b3261e")
    for (source, dest), names in _arrows(table).items():
        if source is dest:
            _draw_loop(axes, where[source], names)
        else:
            _draw_arrow(axes, where[source], where[dest], names)
    # One unit is one inch, so that what is placed around the fixed size of a text fits.
    axes.set_xlim(left, right)
    axes.set_ylim(bottom, top)
    axes.set_axis_off()
    return figure


def _arrows(table: Machine) -> dict[tuple[Placement, Placement], str]:
    """What leads from one placement to another, as the label of one arrow."""
    arrows: dict[tuple[Placement, Placement], str] = {}
    for (source, trigger), row in table.items():
        if isinstance(row, Legal):
            known = arrows.get((source, row.dest))
            arrows[source, row.dest] = f"{known}, {trigger.value}" if known else trigger.value
    return arrows


_APART = 3.0
"""Inches from one placement to the next."""

_MARGIN = 1.25
"""Inches from the middle of the outermost placements to the edge."""

_BEND = 0.3
"""How far an arrow leaves the straight line, as part of its length."""

_ARROW = {"arrowstyle": "-|>", "color": "0.2", "lw": 1.4, "mutation_scale": 14}


def _draw_arrow(axes: Any, start: float, stop: float, names: str) -> None:
    """An arc above the row for arrows to the right, below it for those to the left."""
    side = math.copysign(1, stop - start)
    axes.annotate(
        "",
        xy=(stop - side * 0.5, side * 0.3),
        xytext=(start + side * 0.5, side * 0.3),
        arrowprops={**_ARROW, "connectionstyle": f"arc3,rad={-_BEND}"},
    )
    apex = 0.3 + _BEND / 2 * (abs(stop - start) - 1)
    axes.text((start + stop) / 2, side * (apex + 0.12), names, ha="center", va="center")


def _draw_loop(axes: Any, x: float, names: str) -> None:
    axes.annotate(
        "",
        xy=(x + 0.25, 0.3),
        xytext=(x - 0.25, 0.3),
        arrowprops={**_ARROW, "connectionstyle": "arc3,rad=-2"},
    )
    axes.text(x, 0.95, names, ha="center", va="center")
