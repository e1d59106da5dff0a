"""Kinds of owner beside FSDP2: FSDP1, and one that a stranger adds from outside."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import (
    Whereabouts,
    adam,
    assert_equal,
    local,
    normed,
    normed_batch,
    normed_loss,
    values,
    whereabouts,
)
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel, ShardingStrategy
from torch.nn.parallel import DistributedDataParallel

from placement import (
    Component,
    Mode,
    OwnershipUnclear,
    Placement,
    PlacementManager,
    Trace,
    find_compute_device,
)
from placement.owners import _KINDS as KINDS
from placement.owners import register
from placement.owners.plain import PlainModule
from placement.states import MODEL, Operation
from placement.testing import Ranks


def fsdp1(use_orig_params: bool, strategy: ShardingStrategy) -> FullyShardedDataParallel:
    device = find_compute_device()
    return FullyShardedDataParallel(
        normed().to(device),
        device_id=device,
        use_orig_params=use_orig_params,
        sharding_strategy=strategy,
    )


def train(module: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> tuple[float, float]:
    loss = normed_loss(module, [x.to(find_compute_device()) for x in normed_batch(step)])
    loss.backward()
    norm = module.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item(), norm.item()


def settled(manager: PlacementManager) -> Whereabouts:
    """Where everything is, but for gradients: FSDP1 keeps the flat one of a step that is over until
    the next time it is called."""
    return {k: v for k, v in whereabouts(manager).items() if not k.startswith("grad ")}


def fsdp1_whole_lifecycle(use_orig_params: bool, strategy: ShardingStrategy) -> None:
    """Offloaded by hand between steps, FSDP1 trains as it does untouched."""
    untouched = fsdp1(use_orig_params, strategy)
    untouched_optimizer = adam(untouched.parameters())
    module, trace = fsdp1(use_orig_params, strategy), Trace()
    optimizer = adam(module.parameters())
    manager = PlacementManager(
        module, optimizer, rest=Placement.CPU_MANUAL, verify="always", trace=trace
    )
    for step in range(3):
        expected = train(untouched, untouched_optimizer, step)
        with manager.training():
            assert train(module, optimizer, step) == expected
        found = settled(manager)
        assert {device for device, _ in found.values()} == {"cpu"}

        known = len(trace)
        with manager.saving() as mode:
            assert mode is Mode.STAGED
            state = get_model_state_dict(module)
            get_optimizer_state_dict(module, optimizer)
        truth = get_model_state_dict(untouched)
        assert state.keys() == truth.keys()
        assert all(torch.equal(local(state[name]), local(truth[name])) for name in truth)
        assert [
            (event.component, event.name, event.source, event.dest)
            for event in list(trace)[known:]
            if event.kind.value == "trigger"
        ] == [
            *((c.value, "onload", "cpu_manual", "gpu") for c in Component),
            ("params", "save", "gpu", "gpu"),
            *((c.value, "offload", "gpu", "cpu_manual") for c in Component),
        ]
        assert settled(manager) == found
    manager.onload()
    assert_equal(
        values(manager.census()), values(PlacementManager(untouched, untouched_optimizer).census())
    )


LIFECYCLES = [
    (True, ShardingStrategy.FULL_SHARD),
    (False, ShardingStrategy.FULL_SHARD),
    (True, ShardingStrategy.SHARD_GRAD_OP),
    (True, ShardingStrategy.NO_SHARD),
]


@pytest.mark.parametrize(("use_orig_params", "strategy"), LIFECYCLES)
def test_fsdp1_is_staged_for_a_checkpoint_and_trains_as_if_untouched(
    one_rank: str, use_orig_params: bool, strategy: ShardingStrategy
) -> None:
    fsdp1_whole_lifecycle(use_orig_params, strategy)


@pytest.mark.parametrize(("use_orig_params", "strategy"), LIFECYCLES)
def test_fsdp1_on_two_ranks(
    two_ranks: Ranks, use_orig_params: bool, strategy: ShardingStrategy
) -> None:
    two_ranks.run(fsdp1_whole_lifecycle, use_orig_params, strategy)


def fsdp1_trains_after_a_pass_without_backward(
    use_orig_params: bool, strategy: ShardingStrategy
) -> None:
    """Each rank on its own data, so that only averaged gradients agree."""
    untouched, module = fsdp1(use_orig_params, strategy), fsdp1(use_orig_params, strategy)
    untouched_optimizer, optimizer = adam(untouched.parameters()), adam(module.parameters())
    manager = PlacementManager(module, optimizer, rest=Placement.CPU_MANUAL)
    for step in range(2):
        with manager.evaluating():  # and autograd is on
            train_loss = normed_loss(module, [x.to(manager.device) for x in normed_batch(9)])
        del train_loss
        normed_loss(untouched, [x.to(manager.device) for x in normed_batch(9)])
        expected = train(untouched, untouched_optimizer, 10 * dist.get_rank() + step)
        with manager.training():
            assert train(module, optimizer, 10 * dist.get_rank() + step) == expected


@pytest.mark.parametrize(("use_orig_params", "strategy"), LIFECYCLES)
@pytest.mark.parametrize("count", [1, 2])
def test_fsdp1_still_reduces_gradients_after_a_pass_without_backward_and_a_move(
    ranks: Callable[[int], Ranks], count: int, use_orig_params: bool, strategy: ShardingStrategy
) -> None:
    ranks(count).run(fsdp1_trains_after_a_pass_without_backward, use_orig_params, strategy)


def bytes_left_after_an_offload(use_orig_params: bool, strategy: ShardingStrategy) -> list[int]:
    """On the device, before a module's first pass, after a step, and after an evaluation."""
    gc.collect()
    before = torch.accelerator.memory_allocated()
    module = fsdp1(use_orig_params, strategy)
    batch = [x.to(find_compute_device()) for x in normed_batch()]
    optimizer = adam(module.parameters())
    manager, left = PlacementManager(module, optimizer), []

    def offload() -> None:
        manager.offload()
        gc.collect()
        left.append(torch.accelerator.memory_allocated() - before)

    before += sum(x.nbytes for x in batch)
    offload()
    with manager.training():
        normed_loss(module, batch).backward()
        optimizer.step()
    offload()
    with manager.evaluating(), torch.no_grad():
        normed_loss(module, batch)
    offload()
    return left


@pytest.mark.parametrize(("use_orig_params", "strategy"), LIFECYCLES)
@pytest.mark.parametrize("count", [1, 2])
def test_after_an_offload_fsdp1_keeps_nothing_on_the_device(
    ranks: Callable[[int], Ranks], count: int, use_orig_params: bool, strategy: ShardingStrategy
) -> None:
    left = ranks(count).run(bytes_left_after_an_offload, use_orig_params, strategy)
    assert left == [[0, 0, 0]] * count


def test_fsdp1_that_offloads_itself_is_refused(one_rank: str) -> None:
    module = FullyShardedDataParallel(
        normed(), device_id=find_compute_device(), cpu_offload=CPUOffload(True)
    )
    with pytest.raises(OwnershipUnclear, match="CPUOffload"):
        PlacementManager(module)


class Foreign(nn.Linear):
    """A module of somebody else's kind."""


class ForeignOwner(PlainModule):
    name = "somebody else's"
    stages = {Operation.EXPORT: MODEL}  # noqa: RUF012

    @classmethod
    def recognise(cls, module: nn.Module) -> ForeignOwner | None:  # type: ignore[override]
        return cls(module) if isinstance(module, Foreign) else None


@pytest.fixture
def foreign_owner() -> Iterator[None]:
    register(ForeignOwner)
    yield
    KINDS.remove(ForeignOwner)


@pytest.mark.usefixtures("foreign_owner")
def test_a_kind_of_owner_can_be_added_from_outside(one_rank: str) -> None:
    manager = PlacementManager(Foreign(2, 2), trace=Trace())
    assert manager.owner.name == "somebody else's"
    with manager.exporting() as mode:
        assert mode is Mode.STAGED
        assert manager.module.weight.device.type == one_rank
    with manager.saving() as mode:
        assert mode is Mode.IN_PLACE
    assert manager.placement is Placement.CPU_MANUAL
    assert dist.is_initialized()


# DDP.


def train_ddp(module: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> float:
    """One step on this rank's own data, so that only averaged gradients agree."""
    batch = normed_batch(step * dist.get_world_size() + dist.get_rank())
    loss = normed_loss(module, [x.to(find_compute_device()) for x in batch])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def ddp(**options: Any) -> DistributedDataParallel:
    device = find_compute_device()
    return DistributedDataParallel(
        normed().to(device), device_ids=None if device.type == "sim" else [device], **options
    )


def ddp_trains_as_if_untouched(options: dict[str, Any]) -> None:
    untouched = ddp(**options)
    untouched_optimizer = adam(untouched.parameters())
    module, hooked = ddp(**options), []
    if not options:

        def hook(state, bucket):  # DDP wants real annotations, and this file's are strings
            hooked.append(bucket.index())
            return default_hooks.allreduce_hook(dist.group.WORLD, bucket)

        module.register_comm_hook(None, hook)
    optimizer = adam(module.parameters())
    manager = PlacementManager(module, optimizer, rest=Placement.CPU_MANUAL, verify="always")
    assert manager.owner.name == "DDP"
    for step in range(3):
        expected = train_ddp(untouched, untouched_optimizer, step)
        with manager.training():
            assert train_ddp(module, optimizer, step) == expected
    assert len(hooked) == (3 if not options else 0)
    manager.onload()
    theirs = dict(untouched.named_parameters())
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter, theirs[name]), name
        others = [torch.empty_like(parameter) for _ in range(dist.get_world_size())]
        dist.all_gather(others, parameter.detach())
        assert all(torch.equal(parameter, other) for other in others), "the ranks trained apart"


DDP_OPTIONS = [{}, {"gradient_as_bucket_view": True}, {"static_graph": True}]


@pytest.mark.parametrize("options", DDP_OPTIONS, ids=str)
def test_ddp_still_averages_gradients_after_a_round_trip(
    two_ranks: Ranks, options: dict[str, Any]
) -> None:
    two_ranks.run(ddp_trains_as_if_untouched, options)


def plain_torch_trains_apart() -> list[float]:
    module = ddp()
    module.to("cpu")
    module.to(find_compute_device())
    optimizer = adam(module.parameters())
    train_ddp(module, optimizer, 0)
    weight = module.module.second.weight.detach()
    others = [torch.empty_like(weight) for _ in range(dist.get_world_size())]
    dist.all_gather(others, weight)
    return [float((weight - other).abs().max()) for other in others]


def test_plain_torch_loses_the_averaging_in_silence(two_ranks: Ranks) -> None:
    apart = two_ranks.run(plain_torch_trains_apart)
    assert max(apart[0]) > 0


def test_after_an_offload_ddp_keeps_nothing_on_the_device(one_rank: str) -> None:
    gc.collect()
    before = torch.accelerator.memory_allocated()
    module = ddp()
    manager = PlacementManager(module)
    manager.offload()
    gc.collect()
    assert torch.accelerator.memory_allocated() == before
    manager.onload()
    train_ddp(module, adam(module.parameters()), 0)


def test_ddp_that_was_made_on_the_cpu_is_refused(one_rank: str) -> None:
    with pytest.raises(OwnershipUnclear, match="while its parameters were on the CPU"):
        PlacementManager(DistributedDataParallel(normed()))


# A gradient scaler.


def test_a_gradient_scaler_moves_with_the_optimizer(one_rank: str) -> None:
    module = normed().to(one_rank)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler(one_rank, init_scale=8.0)
    manager = PlacementManager(module, optimizer, scaler=scaler, verify="always")
    for step in range(2):
        with manager.training():
            loss = normed_loss(module, [x.to(one_rank) for x in normed_batch(step)])
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        manager.offload()
        devices = {str(site.device) for site in manager.census().sites}
        assert devices == {"cpu"}
        assert "gradient scaler/scale" in [site.name for site in manager.census().sites]
        manager.onload()
    assert scaler.get_scale() == 8.0
    assert scaler.state_dict()["_growth_tracker"] == 2
