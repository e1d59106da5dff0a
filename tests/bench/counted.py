"""What is counted, not timed: bytes that a step of reinforcement learning copies, and memory."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from bench.common import Measured, report, sharded, verls_moves
from models import assert_equal
from rl_step import ByHand, Managed, Outcome, Way, rl_step

from placement import PlacementManager, Trace

CYCLES = 100

UNEVEN = 8 * [512, 512, 128, 128, 1792, 1792, 1792, 1 / 16, 1 / 16]
"""KB of each tensor: eight layers in the proportions of Llama 3 8B's, whose sizes are not powers of
two."""


def measure(device: str) -> dict[str, Measured]:
    found = {"host_bytes_ratio": Measured(host_bytes_ratio(device))}
    if device == "sim":  # nothing else counts copies
        found |= bytes_of_a_step(device)
    return found


def host_bytes_ratio(device: str) -> float:
    """The most pinned memory that a manager keeps in a hundred cycles, a byte that was offloaded.

    Raises:
        AssertionError: it is not the same after each cycle.
    """
    module = sharded(torch.zeros(int(size * 256), device=device) for size in UNEVEN)
    manager = PlacementManager(module, trace=Trace())
    kept = set()
    for _ in range(CYCLES):
        manager.offload()
        kept.add(manager.host_bytes)
        manager.onload()
    assert len(kept) == 1, kept
    offloaded = sum(parameter.nbytes for parameter in module.parameters())
    return kept.pop() / offloaded


def bytes_of_a_step(device: str) -> dict[str, Measured]:
    """The second step of each way, after the one that makes the optimizer's state.

    Raises:
        AssertionError: they do not end with the same bits.
    """
    ours, left = after_two_steps(lambda: Managed(Trace()))
    theirs, left_by_verl = None, None
    if (moves := verls_moves(device)) is not None:
        theirs, left_by_verl = after_two_steps(lambda: ByHand(moves))
        assert_equal(ours.values, theirs.values)

    def of_both(read: Callable[[Outcome], int]) -> tuple[int, int | None]:
        return read(ours), read(theirs) if theirs is not None else None

    evaluation = ours.copied["log-probabilities"]
    return {
        "rl_step_bytes": Measured(*of_both(lambda step: step.total)),
        "eval_to_host_bytes": Measured(
            *of_both(lambda step: step.copied["log-probabilities"].to_host),
            limit=evaluation.to_device // 100,  # buffers and digests; no parameter
        ),
        "save_bytes": Measured(*of_both(lambda step: step.copied["save"].both_ways)),
        "device_after_offload_bytes": Measured(left, left_by_verl),
    }


def after_two_steps(make: Callable[[], Way]) -> tuple[Outcome, int]:
    """What the second step copied, and the bytes that are then left on the device."""
    gc.collect()
    before = torch.accelerator.memory_allocated()
    way = make()
    with tempfile.TemporaryDirectory() as folder:
        for number in range(2):
            outcome = rl_step(way, number, Path(folder))
    gc.collect()
    return outcome, torch.accelerator.memory_allocated() - before


if __name__ == "__main__":
    report(measure)
