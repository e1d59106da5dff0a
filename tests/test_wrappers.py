"""However a module is sharded or compiled, offloading it between steps changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
import torch.distributed as dist
from models import adam
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from placement import Placement, PlacementManager, find_compute_device, sim
from placement.testing import Ranks

Shard = Callable[[nn.Sequential, str], nn.Module]


def layers(hidden: int = 10) -> nn.Sequential:
    """Layers whose sizes divide by no more than two."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, hidden), nn.GELU(), nn.Linear(hidden, 6))


def all_ranks(device: str) -> DeviceMesh:
    return init_device_mesh(device, (dist.get_world_size(),))


def squares(device: str, names: tuple[str, str], first: int) -> DeviceMesh:
    """A mesh of two dimensions, the first of that many ranks if there are as many."""
    size = dist.get_world_size()
    first = min(first, size)
    return init_device_mesh(device, (first, size // first), mesh_dim_names=names)


def one_group(module: nn.Sequential, device: str) -> nn.Module:
    return fully_shard(module, mesh=all_ranks(device))


def offloaded(module: nn.Sequential, device: str) -> nn.Module:
    return fully_shard(module, mesh=all_ranks(device), offload_policy=CPUOffloadPolicy())


def hybrid(module: nn.Sequential, device: str) -> nn.Module:
    return fully_shard(module, mesh=squares(device, ("replicate", "shard"), first=2))


def hybrid_offloaded(module: nn.Sequential, device: str) -> nn.Module:
    mesh = squares(device, ("replicate", "shard"), first=2)
    return fully_shard(module, mesh=mesh, offload_policy=CPUOffloadPolicy())


def tensor_parallel(
    module: nn.Sequential, device: str, policy: OffloadPolicy | None = None
) -> nn.Module:
    size = dist.get_world_size()
    mesh = squares(device, ("data", "tensor"), first=2 if size > 2 else 1)
    parallelize_module(module, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return fully_shard(module, mesh=mesh["data"], offload_policy=policy or OffloadPolicy())


def tensor_parallel_offloaded(module: nn.Sequential, device: str) -> nn.Module:
    return tensor_parallel(module, device, CPUOffloadPolicy())


def mixed_precision(module: nn.Sequential, device: str) -> nn.Module:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    return fully_shard(module, mesh=all_ranks(device), mp_policy=policy)


def kept_after_forward(module: nn.Sequential, device: str) -> nn.Module:
    mesh = all_ranks(device)
    fully_shard(module[0], mesh=mesh, reshard_after_forward=False)
    return fully_shard(module, mesh=mesh, reshard_after_forward=False)


def resharded_to_fewer(module: nn.Sequential, device: str) -> nn.Module:
    mesh = all_ranks(device)
    fully_shard(module[0], mesh=mesh, reshard_after_forward=2)
    return fully_shard(module, mesh=mesh, reshard_after_forward=2)


def several_roots(module: nn.Sequential, device: str) -> nn.Module:
    mesh = all_ranks(device)
    fully_shard(module[0], mesh=mesh)
    fully_shard(module[2], mesh=mesh)
    return module


def some_ignored(module: nn.Sequential, device: str) -> nn.Module:
    ignored = {module[2].weight}
    return fully_shard(module, mesh=all_ranks(device), ignored_params=ignored)


def some_ignored_offloaded(module: nn.Sequential, device: str) -> nn.Module:
    return fully_shard(
        module,
        mesh=all_ranks(device),
        ignored_params={module[2].weight},
        offload_policy=CPUOffloadPolicy(),
    )


def old_fsdp(module: nn.Sequential, device: str, **options: object) -> nn.Module:
    options = {"use_orig_params": True, **options}
    return FullyShardedDataParallel(module, device_id=find_compute_device(), **options)


def old_fsdp_flat(module: nn.Sequential, device: str) -> nn.Module:
    return old_fsdp(module, device, use_orig_params=False)


def old_fsdp_ignored(module: nn.Sequential, device: str) -> nn.Module:
    return old_fsdp(module, device, ignored_states=[module[2]])


def data_parallel(module: nn.Sequential, device: str) -> nn.Module:
    return DistributedDataParallel(module)


def step(
    module: nn.Module, optimizer: torch.optim.Optimizer, number: int, device: torch.device
) -> tuple[float, float]:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(number)).to(device)
    loss = module(x).square().mean()
    loss.backward()
    norm = torch.zeros(())
    if len({type(parameter) for parameter in module.parameters()}) == 1:  # or torch refuses to clip
        norm = nn.utils.clip_grad_norm_(module.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item(), (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()


def adam_one_by_one(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """torch takes no mixture of DTensors and others at once, as ignored parameters make one."""
    return torch.optim.AdamW(parameters, lr=1e-2, foreach=False)


def same_on_the_cpu(
    twin: nn.Module, optimizer: torch.optim.Optimizer, number: int
) -> tuple[float, float]:
    return step(twin, optimizer, number, torch.device("cpu"))


def trains_as_if_untouched(shard: Shard, hidden: int) -> None:
    """To the bit as one that is wrapped alike and not moved, and nearly as a plain one on the CPU.
    All ranks have the same data, so that their average is what one has."""
    device = find_compute_device()
    if shard is hybrid_offloaded and device.type == "sim":
        # FSDP2 lets the reduced gradient go before it waits for its copy to the host, in an order
        # that is safe (FSDPParamGroup.finalize_backward) and that delayed copies call a fault.
        sim.set_delayed_copies(False)
    untouched = shard(layers(hidden).to(device), device.type)
    module, twin = shard(layers(hidden).to(device), device.type), layers(hidden)
    untouched_optimizer = adam_one_by_one(untouched.parameters())
    optimizer = adam_one_by_one(module.parameters())
    twin_optimizer = adam_one_by_one(twin.parameters())
    manager = PlacementManager(module, optimizer, verify="always")
    managed = manager.placement is Placement.CPU_FSDP2_MANAGED
    close = {"rel": 2e-2 if shard is mixed_precision else 1e-5}
    if not managed:
        manager.offload()
    for number in range(3):
        expected = step(untouched, untouched_optimizer, number, device)
        on_cpu = same_on_the_cpu(twin, twin_optimizer, number)
        with manager.training():
            assert step(module, optimizer, number, device) == expected
        assert expected[0] == pytest.approx(on_cpu[0], **close)
        with manager.evaluating(), torch.no_grad():
            module(torch.ones(2, 6, device=device))
        ignored = {"2.weight"} if managed else set()
        stray = {s.name for s in manager.census().sites if s.device.type != "cpu"}
        assert {name for name in stray if name.split("/")[0] not in ignored} == set()
    exported = dict(manager.export_weights())
    for name, weight in PlacementManager(untouched, untouched_optimizer).export_weights():
        assert torch.equal(exported[name], weight), name
    if shard is not mixed_precision:
        for name, weight in zip(twin.state_dict(), exported.values(), strict=True):
            assert torch.allclose(weight.cpu(), twin.state_dict()[name], atol=1e-4), name


EVERYWHERE: list[Shard] = [
    one_group,
    offloaded,
    hybrid,
    hybrid_offloaded,
    tensor_parallel,
    tensor_parallel_offloaded,
    mixed_precision,
    kept_after_forward,
    several_roots,
    some_ignored,
    some_ignored_offloaded,
    old_fsdp,
    old_fsdp_flat,
    old_fsdp_ignored,
    data_parallel,
]


@pytest.mark.parametrize("shard", EVERYWHERE)
@pytest.mark.parametrize("count", [1, 2])
def test_a_wrapped_module_trains_as_if_untouched(
    ranks: Callable[[int], Ranks], count: int, shard: Shard
) -> None:
    ranks(count).run(trains_as_if_untouched, shard, 10)


@pytest.mark.parametrize("shard", [one_group, offloaded, several_roots, old_fsdp, old_fsdp_flat])
def test_uneven_shards_train_as_if_untouched(two_ranks: Ranks, shard: Shard) -> None:
    two_ranks.run(trains_as_if_untouched, shard, 7)


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
def test_on_four_ranks_too(four_ranks: Ranks, shard: Shard) -> None:
    four_ranks.run(trains_as_if_untouched, shard, 10)


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
    fully_shard(module[0], mesh=all_ranks(device))
    return fully_shard(module, mesh=all_ranks(device))


@pytest.mark.parametrize("shard", [two_groups, old_fsdp])
@pytest.mark.parametrize("count", [1, 2])
def test_an_evaluation_between_backward_and_step_leaves_no_stale_weights(
    ranks: Callable[[int], Ranks], count: int, shard: Shard
) -> None:
    expected = ranks(count).run(train_with_evaluations, shard, ())
    for after in (("backward",), ("forward",), ("forward", "backward")):
        assert ranks(count).run(train_with_evaluations, shard, after) == expected
