"""What a manager costs when there is nothing to do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from bench.common import Measured, layers, median_seconds, verls_moves
from rl_step import Moves
from torch import nn

from placement import PlacementManager, Trace
from placement.trace import EventKind, call_site

RUNS = 7
FEW, MANY = 128, 10_000
_TINY = 16
"""Bytes of each tensor: nothing is to be moved."""


def measure(device: str) -> dict[str, Measured]:
    moves = verls_moves(device)
    few, many = layers(FEW, _TINY, device), layers(MANY, _TINY, device)
    # Before a manager watches the modules.
    theirs = [_microseconds_of_no_move(moves, module) for module in (few, many)]
    managed, large = (PlacementManager(module, trace=Trace()) for module in (few, many))
    context = _microseconds(partial(_enter, managed), 200)
    bare = _microseconds(_enter_bare, 1000)
    return {
        "noop_us_128": Measured(context, theirs[0]),
        "noop_us_10000": Measured(_microseconds(partial(_enter, large), 200), theirs[1]),
        "context_us": Measured(context - bare),
        "trace_us_per_event": Measured(_microseconds(partial(_record, Trace()), 2000)),
        "census_ms_10000": Measured(_microseconds(large.census, 1) / 1e3),
    }


def _microseconds(work: Callable[[], object], repeats: int) -> float:
    return median_seconds(work, RUNS, repeats) * 1e6


def _microseconds_of_no_move(moves: Moves | None, module: nn.Module) -> float | None:
    """verl's onload of a module that is on the device."""
    if moves is None:
        return None
    return median_seconds(partial(moves.load_model, module), runs=5) * 1e6


@contextmanager
def _bare() -> Iterator[None]:
    yield


def _enter_bare() -> None:
    with _bare():
        pass


def _enter(manager: PlacementManager) -> None:
    with manager.training():
        pass


def _record(trace: Trace) -> None:
    trace.record(
        module="M#0",
        component=None,
        kind=EventKind.OPERATION,
        name="train",
        source="gpu",
        dest="gpu",
        call_site=call_site(),
    )
