"""What a manager costs when there is nothing to do: ``make bench``.

Prints, in microseconds, the median over runs of entering and leaving an idle context, beside a bare
context manager; of recording an event; and in milliseconds of a census.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import nn

from placement import PlacementManager, Trace
from placement.trace import EventKind, call_site

RUNS = 15
SIZES = (128, 10_000)


def median_us(work: Callable[[], object], repeats: int) -> float:
    """Median over runs of the microseconds that one call of ``work`` takes."""
    runs = []
    for _ in range(RUNS):
        started = time.perf_counter()
        for _ in range(repeats):
            work()
        runs.append((time.perf_counter() - started) / repeats * 1e6)
    return statistics.median(runs)


@contextmanager
def bare() -> Iterator[None]:
    yield


def enter_bare() -> None:
    with bare():
        pass


def main() -> None:
    if torch.accelerator.current_accelerator(check_available=True) is None:
        from placement import sim

        sim.enable()
    device = torch.accelerator.current_accelerator()
    table = Table("", *(f"{size:,} tensors" for size in SIZES), "unit", box=box.SIMPLE_HEAD)
    rows: dict[str, list[float]] = {}
    for size in SIZES:
        module = nn.ParameterList(nn.Parameter(torch.zeros(4, device=device)) for _ in range(size))
        manager = PlacementManager(
            module, torch.optim.SGD(module.parameters(), lr=0.1), trace=Trace()
        )
        for name in ("training", "evaluating"):

            def enter(name: str = name, manager: PlacementManager = manager) -> None:
                with getattr(manager, name)():
                    pass

            rows.setdefault(f"idle {name}()", []).append(median_us(enter, 200))
        rows.setdefault("a bare context manager", []).append(median_us(enter_bare, 1000))
        rows.setdefault("census (ms)", []).append(median_us(manager.census, 1) / 1e3)
    for name, values in rows.items():
        unit = "ms" if "ms" in name else "µs"
        table.add_row(name.removesuffix(" (ms)"), *(f"{value:.2f}" for value in values), unit)
    trace = Trace()

    def record() -> None:
        trace.record(
            module="M#0",
            component=None,
            kind=EventKind.OPERATION,
            name="train",
            source="gpu",
            dest="gpu",
            call_site=call_site(),
        )

    table.add_row("recording an event", f"{median_us(record, 2000):.2f}", "", "µs")
    Console().print(table)


if __name__ == "__main__":
    main()
