"""However a module is sharded or compiled, offloading it between steps changes nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from models import adam
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from placement import Placement, PlacementManager, find_compute_device
from placement.testing import Ranks

Shard = Callable[[nn.Sequential, str], nn.Module]


def layers() -> nn.Sequential:
    """Layers whose sizes divide by no more than two."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.Linear(10, 6))


def one_group(module: nn.Sequential, device: str) -> nn.Module:
    return fully_shard(module, mesh=init_device_mesh(device, (4,)))


def hybrid(module: nn.Sequential, device: str) -> nn.Module:
    mesh = init_device_mesh(device, (2, 2), mesh_dim_names=("replicate", "shard"))
    return fully_shard(module, mesh=mesh)


def tensor_parallel(module: nn.Sequential, device: str) -> nn.Module:
    mesh = init_device_mesh(device, (2, 2), mesh_dim_names=("data", "tensor"))
    parallelize_module(module, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return fully_shard(module, mesh=mesh["data"])


def mixed_precision(module: nn.Sequential, device: str) -> nn.Module:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    return fully_shard(module, mesh=init_device_mesh(device, (4,)), mp_policy=policy)


def kept_after_forward(module: nn.Sequential, device: str) -> nn.Module:
    mesh = init_device_mesh(device, (4,))
    fully_shard(module[0], mesh=mesh, reshard_after_forward=False)
    return fully_shard(module, mesh=mesh, reshard_after_forward=False)


def resharded_to_fewer(module: nn.Sequential, device: str) -> nn.Module:
    mesh = init_device_mesh(device, (4,))
    fully_shard(module[0], mesh=mesh, reshard_after_forward=2)
    return fully_shard(module, mesh=mesh, reshard_after_forward=2)


def several_roots(module: nn.Sequential, device: str) -> nn.Module:
    mesh = init_device_mesh(device, (4,))
    fully_shard(module[0], mesh=mesh)
    fully_shard(module[2], mesh=mesh)
    return module


def step(
    module: nn.Module, optimizer: torch.optim.Optimizer, number: int, device: torch.device
) -> tuple[float, float]:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(number)).to(device)
    loss = module(x).square().mean()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(module.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item(), (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()


def trains_as_if_untouched(shard: Shard) -> None:
    device = find_compute_device()
    untouched = shard(layers().to(device), device.type)
    module = shard(layers().to(device), device.type)
    untouched_optimizer, optimizer = adam(untouched.parameters()), adam(module.parameters())
    manager = PlacementManager(module, optimizer, rest=Placement.CPU_MANUAL)
    for number in range(3):
        expected = step(untouched, untouched_optimizer, number, device)
        with manager.training():
            assert step(module, optimizer, number, device) == expected
        with manager.evaluating(), torch.no_grad():
            module(torch.ones(2, 6, device=device))
        assert {str(site.device) for site in manager.census().sites} == {"cpu"}
    exported = dict(manager.export())
    for name, weight in PlacementManager(untouched, untouched_optimizer).export():
        assert torch.equal(exported[name], weight), name


@pytest.mark.parametrize(
    "shard",
    [
        one_group,
        hybrid,
        tensor_parallel,
        mixed_precision,
        kept_after_forward,
        resharded_to_fewer,
        several_roots,
    ],
)
def test_a_sharded_module_trains_as_if_untouched(four_ranks: Ranks, shard: Shard) -> None:
    four_ranks.run(trains_as_if_untouched, shard)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_module_trains_as_if_untouched_and_is_compiled_once(
    one_rank: str, backend: str
) -> None:
    torch._dynamo.reset()
    device = find_compute_device()
    untouched = layers().to(device)
    module = torch.compile(layers().to(device), backend=backend)
    untouched_optimizer, optimizer = adam(untouched.parameters()), adam(module.parameters())
    manager = PlacementManager(module, optimizer, rest=Placement.CPU_MANUAL)
    compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for number in range(3):
        expected = step(untouched, untouched_optimizer, number, device)
        with manager.training():
            assert step(module, optimizer, number, device) == pytest.approx(expected, rel=1e-6)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] - compiled == 1


# An evaluation in the middle of a training step.


def evaluated(module: nn.Module, manager: PlacementManager, device: torch.device) -> None:
    with manager.evaluating(), torch.no_grad():
        module(torch.ones(2, 6, device=device))


def train_with_evaluations(shard: Shard, after: tuple[str, ...]) -> list[float]:
    """Losses of three steps, with an evaluation after each of the phases named."""
    device = find_compute_device()
    module = shard(layers().to(device), device.type)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5, momentum=0.9)
    manager = PlacementManager(module, optimizer, verify="always")
    losses = []
    for number in range(3):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(number)).to(device)
        with manager.training():
            loss = module(x).square().mean()
            if "forward" in after:
                evaluated(module, manager, device)
            loss.backward()
            if "backward" in after:
                evaluated(module, manager, device)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def two_groups(module: nn.Sequential, device: str) -> nn.Module:
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    fully_shard(module[0], mesh=mesh)
    return fully_shard(module, mesh=mesh)


def old_fsdp(module: nn.Sequential, device: str) -> nn.Module:
    return FullyShardedDataParallel(module, device_id=torch.device(device), use_orig_params=True)


@pytest.mark.parametrize("shard", [two_groups, old_fsdp])
@pytest.mark.parametrize("count", [1, 2])
def test_an_evaluation_between_backward_and_step_leaves_no_stale_weights(
    ranks: Callable[[int], Ranks], count: int, shard: Shard
) -> None:
    expected = ranks(count).run(train_with_evaluations, shard, ())
    for after in (("backward",), ("forward",), ("forward", "backward")):
        assert ranks(count).run(train_with_evaluations, shard, after) == expected
