"""How much device memory an export takes: one bucket, to the byte."""

from __future__ import annotations

import gc

import pytest
import torch
from models import policy
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Shard

from placement import PlacementManager, find_compute_device
from placement.testing import Ranks

WIDTH = 64
LAYER = WIDTH * WIDTH * 4
LAYERS = 6


def layers() -> nn.Sequential:
    """Alike layers, and a last one of twice the size."""
    alike = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
    return nn.Sequential(*alike, nn.Linear(WIDTH, 2 * WIDTH, bias=False))


def sharded(**options: object) -> nn.Module:
    mesh = init_device_mesh(find_compute_device().type, (torch.distributed.get_world_size(),))
    return fully_shard(layers(), mesh=mesh, **options)  # type: ignore[no-any-return, call-overload]


def fsdp2() -> nn.Module:
    return sharded(offload_policy=policy())


def fsdp1() -> nn.Module:
    device = find_compute_device()
    return FullyShardedDataParallel(layers().to(device), device_id=device)


def by_columns() -> nn.Module:
    return sharded(shard_placement_fn=lambda parameter: Shard(1))


def rise(
    manager: PlacementManager, bucket_bytes: int, dtype: torch.dtype | None = None
) -> tuple[int, int]:
    """By how many bytes device memory rises while the weights come and are dropped, and by how
    many it is higher afterwards."""
    gc.collect()
    torch.accelerator.synchronize()
    before = torch.accelerator.memory_allocated()
    torch.accelerator.reset_peak_memory_stats()
    for _, weight in manager.export_weights(bucket_bytes=bucket_bytes, dtype=dtype):
        del weight
    peak = torch.accelerator.max_memory_allocated() - before
    return peak, torch.accelerator.memory_allocated() - before


def takes_one_bucket(kind: str) -> None:
    manager = PlacementManager({"fsdp1": fsdp1, "fsdp2": fsdp2}[kind]())
    largest, all_of_them = 2 * LAYER, (LAYERS + 2) * LAYER
    expected = {
        (1, None): largest,  # which is larger than the bucket
        (2 * LAYER, None): 2 * LAYER,
        (3 * LAYER, None): 3 * LAYER,
        (4 * LAYER - 1, None): 3 * LAYER,
        (2**30, None): all_of_them,
        (2 * LAYER, torch.bfloat16): 2 * LAYER,  # of twice as many weights
        (1, torch.bfloat16): largest // 2,
    }
    assert {asked: rise(manager, *asked) for asked in expected} == {
        asked: (nbytes, 0) for asked, nbytes in expected.items()
    }


@pytest.mark.parametrize("kind", ["fsdp1", "fsdp2"])
def test_device_memory_rises_by_one_bucket_exactly(
    two_ranks: Ranks, device_type: str, kind: str
) -> None:
    if device_type != "sim":
        pytest.skip("exact memory is the simulated accelerator's")
    two_ranks.run(takes_one_bucket, kind)


def takes_three_times_a_weight() -> None:
    manager = PlacementManager(by_columns())
    for bucket_bytes in (1, 6 * LAYER, 9 * LAYER):
        peak, left = rise(manager, bucket_bytes)
        assert peak <= max(bucket_bytes, 3 * 2 * LAYER)
        assert left == 0


def test_weights_that_are_sharded_by_columns_take_no_more_than_is_documented(
    two_ranks: Ranks, device_type: str
) -> None:
    if device_type != "sim":
        pytest.skip("exact memory is the simulated accelerator's")
    two_ranks.run(takes_three_times_a_weight)


def test_a_weight_that_is_kept_keeps_its_own_bytes_only(one_rank: str) -> None:
    if one_rank != "sim":
        pytest.skip("exact memory is the simulated accelerator's")
    manager = PlacementManager(fsdp2())
    gc.collect()
    before = torch.accelerator.memory_allocated()
    kept = [w for number, (_, w) in enumerate(manager.export_weights()) if number == 0]
    assert torch.accelerator.memory_allocated() - before == LAYER
    kept.clear()
    assert torch.accelerator.memory_allocated() == before
