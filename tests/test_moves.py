"""A move is exact: identity, sharing, layout and values survive it, and memory is freed."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from models import adam, assert_equal, normed, normed_batch, normed_loss, sharded, values
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from placement import (
    CannotMove,
    NotEnoughMemory,
    Placement,
    PlacementManager,
    Trace,
)
from placement.tensors import parts
from placement.testing import SimulatedAccelerator, assert_round_trip
from placement.transfer import Transfer


class Peculiar(nn.Module):
    """Tensors of every layout that a move must put back as it was."""

    def __init__(self, device: str) -> None:
        super().__init__()
        slab = torch.arange(24.0, device=device)
        self.one = nn.Parameter(slab[:8].view(2, 4))
        self.two = nn.Parameter(slab[8:24].view(4, 4).t())  # another layout, the same storage
        self.tied = self.one
        self.low = nn.Parameter(torch.randn(5, device=device).bfloat16())
        self.frozen = nn.Parameter(torch.randn(3, device=device), requires_grad=False)
        self.register_buffer("expanded", torch.ones(1, device=device).expand(4, 3))
        self.register_buffer("empty", torch.empty(0, 7, device=device))
        self.register_buffer("counts", torch.arange(5, device=device), persistent=False)
        self.register_buffer("same_counts", self.counts)


def facts(module: nn.Module) -> dict[str, object]:
    """What must not change, with storages told apart by who shares them."""
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers()]
    storages: dict[int, int] = {}
    return {
        name: (
            id(tensor),
            tensor.dtype,
            tensor.shape,
            tensor.stride(),
            tensor.storage_offset(),
            tensor.requires_grad,
            part.untyped_storage().nbytes(),
            storages.setdefault(part.untyped_storage().data_ptr(), len(storages))
            if part.numel()
            else None,
        )
        for name, tensor in named
        for part in parts(tensor)
    }


def test_everything_comes_back_as_it_was(one_rank: str) -> None:
    module = Peculiar(one_rank)
    manager = PlacementManager(module, verify="always")
    before, contents = facts(module), values(manager.census())
    for _ in range(2):
        manager.offload()
        assert {site.device.type for site in manager.census().sites} == {"cpu"}
        assert facts(module) == before
        assert_equal(values(manager.census()), contents)
        manager.onload()
        assert {site.device.type for site in manager.census().sites} == {one_rank}
        assert facts(module) == before
        assert_equal(values(manager.census()), contents)


def test_a_storage_is_copied_once(one_rank: str, trace: Trace) -> None:
    module = Peculiar(one_rank)
    manager = PlacementManager(module, trace=trace)
    manager.offload()
    copied = sum(event.bytes_to_host for event in trace.moves())
    distinct = {
        t.untyped_storage().data_ptr(): t for t in [*module.parameters(), *module.buffers()]
    }
    assert copied == sum(t.untyped_storage().nbytes() for t in distinct.values())


@pytest.mark.parametrize("shard", [False, True], ids=["plain", "fsdp2"])
def test_weak_references_hooks_and_optimizer_keys_survive(one_rank: str, shard: bool) -> None:
    module = normed().to(one_rank)
    if shard:
        module = sharded(module)
    optimizer = adam(module.parameters())
    parameter = module.second.weight
    reference, fired = weakref.ref(parameter), []
    parameter.register_hook(lambda gradient: fired.append(gradient.device.type))
    manager = PlacementManager(module, optimizer)
    manager.offload()
    manager.onload()
    assert reference() is module.second.weight
    assert optimizer.param_groups[0]["params"][-2] is parameter
    module(torch.randn(4, 6, device=one_rank)).sum().backward()
    if not shard:  # FSDP2 computes with the gathered parameter, whose hooks are others
        assert fired == [one_rank]
    optimizer.step()


@pytest.mark.parametrize("shard", [False, True], ids=["plain", "fsdp2"])
def test_after_an_offload_nothing_is_left_on_the_device(one_rank: str, shard: bool) -> None:
    gc.collect()
    before = torch.accelerator.memory_allocated()
    module = normed()
    module = sharded(module) if shard else module.to(one_rank)
    optimizer = adam(module.parameters())
    module(torch.randn(4, 6, device=one_rank)).sum().backward()
    optimizer.step()
    manager = PlacementManager(module, optimizer)
    manager.offload()
    gc.collect()
    assert torch.accelerator.memory_allocated() == before


def test_gradients_move_with_their_parameters(one_rank: str) -> None:
    module = sharded(normed())
    module(torch.randn(4, 6, device=one_rank)).sum().backward()
    manager = PlacementManager(module)
    before = values(manager.census())
    manager.offload()
    assert module.second.weight.grad.to_local().device.type == "cpu"
    manager.onload()
    assert_equal(values(manager.census()), before)


def test_gathered_parameters_are_resharded_before_a_move(one_rank: str) -> None:
    module = sharded(normed())
    with torch.no_grad():
        module(torch.randn(4, 6, device=one_rank))
    module.unshard()
    PlacementManager(module).offload()
    assert type(module.second.weight).__name__ == "DTensor"


def test_a_move_in_the_middle_of_a_forward_pass_is_refused(one_rank: str) -> None:
    module = sharded(normed())
    manager = PlacementManager(module)
    refused = []

    def move(*_: object) -> None:
        with pytest.raises(CannotMove, match="middle of forward") as caught:
            manager.offload()
        refused.append(caught.value)

    module.norm.register_forward_hook(move)
    module(torch.randn(4, 6, device=one_rank))
    assert len(refused) == 1
    assert manager.placement is Placement.GPU


def test_what_can_not_be_moved_exactly_is_refused_by_name(one_rank: str) -> None:
    module = nn.Linear(2, 2)
    module.register_buffer("sparse", torch.eye(2).to_sparse())
    manager = PlacementManager(module)
    with pytest.raises(CannotMove, match=r"sparse \(buffer\)"):
        manager.onload()
    assert module.weight.device.type == "cpu"


@pytest.mark.parametrize("known", [False, True], ids=["the first move", "a known way"])
def test_too_little_memory_is_refused_with_the_numbers_before_the_first_copy(
    one_rank: str, known: bool
) -> None:
    if one_rank != "sim":
        pytest.skip("lowers the capacity, which only the simulated accelerator can")
    from placement import sim

    module = nn.Linear(1000, 1000, device=one_rank if known else "cpu")
    manager = PlacementManager(module)
    if known:
        manager.offload()
    gc.collect()
    torch.accelerator.empty_cache()
    before = sim.counters()
    sim.set_capacity(torch.accelerator.memory_allocated() + 2_000_000)
    try:
        with pytest.raises(NotEnoughMemory, match="4,004,000 bytes are to go to sim:0"):
            manager.onload()
    finally:
        sim.set_capacity(None)
    assert (sim.counters() - before).host_to_device_copies == 0
    assert manager.placement is Placement.CPU_MANUAL
    manager.onload()


# A failure.


def there_and_back(manager: PlacementManager) -> None:
    manager.offload()
    manager.onload()


def test_a_copy_that_fails_leaves_everything_as_it_was(one_rank: str, trace: Trace) -> None:
    if one_rank != "sim":
        pytest.skip("makes a copy fail, which only the simulated accelerator can")
    from placement import sim

    module = sharded(normed())
    manager = PlacementManager(module, trace=trace, verify="always")
    before = facts(module), values(manager.census())
    with sim.failing() as plan:
        there_and_back(manager)
    points = plan.seen.copies
    assert points > 4
    for point in range(1, points + 1):
        with sim.failing(copy=point), pytest.raises(RuntimeError, match="planned"):
            there_and_back(manager)
        manager.verify()
        manager.onload()
        assert facts(module)["second.weight"] == before[0]["second.weight"]
        assert_equal(values(manager.census()), before[1])


# Waiting.


def read_after_an_offload(manager: PlacementManager) -> bool:
    """Whether what the host reads right after an offload is what was on the device."""
    before = values(manager.census())
    manager.offload()
    after = values(manager.census())
    return all(torch.equal(before[name], after[name]) for name in before)


def test_offloaded_means_that_the_host_may_read(one_rank: str) -> None:
    module = sharded(normed())
    assert read_after_an_offload(PlacementManager(module))


def test_without_the_wait_the_host_reads_too_early(
    one_rank: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if one_rank != "sim":
        pytest.skip("lets copies land late, which only the simulated accelerator can")
    monkeypatch.setattr(Transfer, "land", lambda self, component: None)
    assert not read_after_an_offload(PlacementManager(sharded(normed())))


def test_host_copies_are_pinned_and_what_was_found_pageable_stays_so(one_rank: str) -> None:
    offloaded = PlacementManager(normed().to(one_rank))
    offloaded.offload()
    assert all(parameter.is_pinned() for parameter in offloaded.module.parameters())
    found_pageable = PlacementManager(normed())
    found_pageable.onload()
    found_pageable.offload()
    assert not any(parameter.is_pinned() for parameter in found_pageable.module.parameters())


def test_memory_that_can_not_be_pinned_is_ordinary_memory_and_a_warning(
    one_rank: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty = torch.empty

    def refuse(*args: object, pin_memory: bool = False, **kwargs: object) -> torch.Tensor:
        if pin_memory:
            raise RuntimeError("host memory exhausted")
        return empty(*args, **kwargs)

    manager = PlacementManager(normed().to(one_rank))
    before = values(manager.census())
    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.warns(UserWarning, match="could not be pinned"):
        manager.offload()
    monkeypatch.undo()
    assert_equal(values(manager.census()), before)


# Out of memory.


def test_out_of_memory_in_the_middle_of_an_onload_leaks_nothing_and_the_retry_works(
    sim_accelerator: SimulatedAccelerator, one_rank: str
) -> None:
    from placement import sim

    module = sharded(normed())
    optimizer = adam(module.parameters())
    normed_loss(module, [x.to(one_rank) for x in normed_batch()]).backward()
    optimizer.step()
    manager = PlacementManager(module, optimizer, rest=Placement.CPU_MANUAL)
    before = values(manager.census())
    gc.collect()
    torch.accelerator.empty_cache()
    device, host = sim_accelerator.allocated_bytes(), sim.pinned_bytes()
    with sim_accelerator.failing() as plan:
        manager.onload()
        manager.offload()
    points = 0
    for point in range(1, plan.seen.allocations + 1):
        # From this allocation on the device is full; the check before the move could not know.
        with sim.failing(capacity=(point, 0)), pytest.raises(torch.OutOfMemoryError):
            manager.onload()
        assert manager.placement is Placement.CPU_MANUAL
        assert sim_accelerator.allocated_bytes() == device
        assert sim.pinned_bytes() == host
        assert_equal(values(manager.census()), before)
        points += 1
    assert points >= 10
    manager.onload()
    manager.verify()
    manager.offload()
    assert (sim_accelerator.allocated_bytes(), sim.pinned_bytes()) == (device, host)


# Tensors made of tensors.


def test_a_subclass_with_inner_tensors_moves_with_them(one_rank: str) -> None:
    def part() -> torch.Tensor:
        return torch.randn(3, 4, device=one_rank)

    module = nn.Module()
    module.weight = nn.Parameter(TwoTensor(part(), part()))
    manager = PlacementManager(module)
    with assert_round_trip(module):
        manager.offload()
        assert module.weight.a.device.type == module.weight.b.device.type == "cpu"
        assert module.weight.device.type == "cpu"
        manager.onload()
