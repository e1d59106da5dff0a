"""What a save and a load cost the device: of its memory, nothing."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from models import adam, sharded, whereabouts
from torch import nn
from training import stepped

from engine import Offload
from placement import Checkpoints, Placement, PlacementManager, Trace
from placement.testing import Ranks

LAYER = 64


def managed(offload: Offload) -> PlacementManager:
    from torch.distributed.fsdp import CPUOffloadPolicy

    module = nn.Sequential(*(nn.Linear(LAYER, LAYER) for _ in range(6)))
    sharded(module, CPUOffloadPolicy() if offload is Offload.POLICY else None)
    rest = Placement.CPU_MANUAL if offload is Offload.MANUAL else None
    return stepped(PlacementManager(module, adam(module.parameters()), rest=rest, trace=Trace()))


def peak_of(work: object) -> int:
    """Bytes of the device that ``work()`` took at most, beyond those before it."""
    gc.collect()
    torch.accelerator.synchronize()
    torch.accelerator.reset_peak_memory_stats()
    before = torch.accelerator.memory_allocated()
    work()  # type: ignore[operator]
    peak = torch.accelerator.max_memory_allocated()
    assert torch.accelerator.memory_allocated() == before
    return peak - before


def save_and_load(directory: Path, offload: Offload, blocking: bool) -> tuple[int, int, int]:
    manager = managed(offload)
    places = whereabouts(manager)
    kept = Checkpoints(directory, manager)

    def save() -> None:
        kept.save(1, blocking=blocking)
        kept.finish()

    peaks = peak_of(save), peak_of(kept.load)
    fresh = managed(offload)
    again = peak_of(Checkpoints(directory, fresh).load)
    assert whereabouts(manager) == places
    return *peaks, again


@pytest.mark.parametrize("offload", Offload)
@pytest.mark.parametrize("blocking", [True, False], ids=["blocking", "not blocking"])
def test_a_save_and_a_load_take_no_memory_of_the_device(
    two_ranks: Ranks, tmp_path: Path, offload: Offload, blocking: bool
) -> None:
    for saving, loading, again in two_ranks.run(save_and_load, tmp_path, offload, blocking):
        assert saving == 0
        assert loading == 0
        assert again == 0


def test_a_view_that_is_not_contiguous_takes_itself_at_most(one_rank: str, tmp_path: Path) -> None:
    weight = torch.randn(256, 256, device=one_rank)
    module = nn.Linear(256, 256, bias=False, device=one_rank)
    module.weight = nn.Parameter(weight.t())
    kept = Checkpoints(tmp_path, PlacementManager(module, trace=Trace()))
    assert peak_of(lambda: kept.save(1)) <= weight.nbytes
    kept.load()
    assert torch.equal(module.weight, weight.t())
