"""``make bench``: what moves cost, in a table and in ``bench.json``."""

from __future__ import annotations

import importlib.util
import json
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from bench.common import Measured, processes
from rich import box
from rich.console import Console
from rich.table import Table

OUTPUT = Path("bench.json")
NOT_RUN = "not run"

_TABLE_WIDTH = 116
"""Columns that the table needs, so that it is whole in a log, too."""


@dataclass(frozen=True)
class Figure:
    """What is expected of a figure.

    Attributes:
        unit: of the numbers.
        at_least: the bar, where more is better.
        at_most: the bar, where less is better.
        times_verl: another bar of the same kind, as a multiple of verl's.
    """

    unit: str
    at_least: float | None = None
    at_most: float | None = None
    times_verl: float | None = None

    @property
    def more_is_better(self) -> bool:
        return self.at_least is not None

    def bar(self, found: Measured) -> float | None:
        """The strictest bar that is known."""
        bars = [self.at_least, self.at_most, found.limit]
        if self.times_verl is not None and found.verl is not None:
            bars.append(self.times_verl * found.verl)
        known = [bar for bar in bars if bar is not None]
        return (max if self.more_is_better else min)(known, default=None)

    def met(self, found: Measured) -> bool | None:
        """Whether ours clears the bar; None if one of them is not known."""
        if found.ours is None or (bar := self.bar(found)) is None:
            return None
        return found.ours >= bar if self.more_is_better else found.ours <= bar


FIGURES = {
    "params_16x16MB_of_copy": Figure("of copy", at_least=0.95),
    "params_128x2MB_of_copy": Figure("of copy", at_least=0.9),
    "params_1000x64KB_of_copy": Figure("of copy", at_least=0.4, times_verl=8),
    "optimizer_of_copy": Figure("of copy", at_least=0.9),
    "optimizer_2000x64KB_of_copy": Figure("of copy", at_least=0.4),
    "noop_us_128": Figure("µs", at_most=50),
    "noop_us_10000": Figure("µs", at_most=50),
    "context_us": Figure("µs", at_most=50),
    "trace_us_per_event": Figure("µs"),
    "census_ms_10000": Figure("ms"),
    "rl_step_bytes": Figure("B", times_verl=0.7),
    "eval_to_host_bytes": Figure("B"),
    "save_bytes": Figure("B", at_most=0),
    "host_bytes_ratio": Figure("of offloaded", at_most=1.05),
    "device_after_offload_bytes": Figure("B", at_most=0),
}
"""In the order of the table."""


def main(
    device: Annotated[
        str | None,
        typer.Option(
            help="Compute device: cuda, xpu, ..., or sim for the simulated accelerator. By default "
            "the accelerator that torch finds, else the simulated one."
        ),
    ] = None,
    count: Annotated[
        int, typer.Option("--processes", min=1, help="Processes that measure each time.")
    ] = 5,
) -> None:
    """Measure everything, print a table and write bench.json."""
    if device is None:
        found = torch.accelerator.current_accelerator(check_available=True)
        device = found.type if found is not None else "sim"
    console = Console()
    console.print(f"{count} processes on {device}, load average {os.getloadavg()[0]:.1f}")
    runs = [*processes("bench.counted", device, 1), *processes("bench.timed", device, count)]
    figures = {
        name: in_json(figure, [run[name] for run in runs if name in run])
        for name, figure in FIGURES.items()
    }
    OUTPUT.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    console.width = max(console.width, _TABLE_WIDTH)
    console.print(table_of(figures))


def in_json(figure: Figure, runs: Sequence[Measured]) -> dict[str, Any]:
    """Medians over processes, with the least and the most of them."""
    values = {
        side: [value for run in runs if (value := getattr(run, side)) is not None]
        for side in ("ours", "verl")
    }
    medians = {side: statistics.median(found) if found else None for side, found in values.items()}
    found = Measured(**medians, limit=runs[0].limit if runs else None)
    verl_is_there = importlib.util.find_spec("verl") is not None
    return {
        "ours": found.ours if found.ours is not None else NOT_RUN,
        "verl": found.verl if found.verl is not None or verl_is_there else NOT_RUN,
        "limit": figure.bar(found),
        "met": figure.met(found),
        "unit": figure.unit,
        "spread": {side: [min(some), max(some)] for side, some in values.items() if some},
    }


def table_of(figures: Mapping[str, dict[str, Any]]) -> Table:
    table = Table("figure", "ours", "spread", "verl", "limit", "met", "unit", box=box.SIMPLE_HEAD)
    for name, row in figures.items():
        sign = "≥" if FIGURES[name].more_is_better else "≤"
        table.add_row(
            name,
            in_words(row["ours"]),
            " .. ".join(map(in_words, row["spread"].get("ours", ()))),
            in_words(row["verl"]),
            f"{sign} {in_words(row['limit'])}" if row["limit"] is not None else "",
            {True: "yes", False: "[red]no[/red]", None: ""}[row["met"]],
            row["unit"],
        )
    return table


def in_words(value: float | str | None) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


if __name__ == "__main__":
    typer.run(main)
