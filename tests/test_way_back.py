"""The way back of a move, taken without planning it: only if nothing is other than it was."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from models import Normed, adam, local, normed, normed_batch, normed_loss, sharded
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from placement import (
    AlreadyManaged,
    CannotMove,
    Component,
    Placement,
    PlacementDrift,
    PlacementManager,
    Trace,
    mover,
    sim,
)
from placement.torch_private import shard_groups
from placement.transfer import Transfer
from placement.undisturbed import undisturbed


class Shared(nn.Module):
    """A parameter that looks into a part of another's bytes, and one that is to be transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.whole = nn.Parameter(torch.arange(12.0))
        self.part = nn.Parameter(self.whole.data[:4])
        self.square = nn.Parameter(torch.arange(9.0).view(3, 3))
        self.child = nn.Linear(2, 2)


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was asked of each move that was planned."""
    asked: list[str] = []

    class Noted(Transfer):
        def __init__(self, *args: object, **kwargs: object) -> None:
            asked.append(str(kwargs["asked"]))
            super().__init__(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(mover, "Transfer", Noted)
    return asked


def travelled(manager: PlacementManager, planned: list[str]) -> None:
    """Travel until the way is known in both directions."""
    for _ in range(2):
        manager.offload()
        manager.onload()
    planned.clear()
    manager.offload()
    manager.onload()
    assert planned == []


def held(manager: PlacementManager) -> dict[str, tuple[torch.Tensor, tuple[int, ...]]]:
    """A copy of the values of every tensor, and its strides."""
    return {
        f"{site.name} {site.kind.value}": (
            local(site.holding.tensor).detach().cpu().clone(),
            site.holding.tensor.stride(),
        )
        for site in manager.census().sites
    }


def transpose(module: Shared) -> None:
    module.square.data = module.square.data.t()


def look_elsewhere(module: Shared) -> None:
    module.part.data = module.whole.data[4:8]


def point_elsewhere(module: Shared) -> None:
    module.square.data = torch.full_like(module.square, 7.0)


def replace_a_parameter(module: Shared) -> None:
    module.child.weight = nn.Parameter(torch.full_like(module.child.weight, 7.0))


def replace_a_module(module: Shared) -> None:
    module.child = nn.Linear(3, 1, device=module.whole.device)


def remove_a_module(module: Shared) -> None:
    del module.child


def add_a_module_below(module: Shared) -> None:
    module.child.add_module("below", nn.Linear(1, 1, device=module.whole.device))


def show_a_part(module: Shared) -> None:
    module.square.data = module.square.data[:2]


def cast(module: Shared) -> None:
    module.child.double()


def conjugate(module: Shared) -> None:
    module.square.data = torch.complex(module.square.data, module.square.data).conj().imag


def have_a_gradient(module: Shared) -> None:
    module.square.grad = torch.full_like(module.square, 7.0)


@pytest.mark.parametrize(
    "change",
    [
        transpose,
        look_elsewhere,
        point_elsewhere,
        replace_a_parameter,
        replace_a_module,
        remove_a_module,
        add_a_module_below,
        show_a_part,
        cast,
        conjugate,
        have_a_gradient,
    ],
)
@pytest.mark.parametrize("on_device", [True, False])
def test_what_somebody_changed_goes_along(
    one_rank: str,
    planned: list[str],
    change: Callable[[Shared], None],
    on_device: bool,
) -> None:
    module = Shared().to(one_rank)
    module.part.data = module.whole.data[:4]  # to() parted them
    manager = PlacementManager(module)
    travelled(manager, planned)
    if not on_device:
        manager.offload()
    change(module)
    before = held(manager)
    (manager.offload if on_device else manager.onload)()
    assert planned != []
    for _ in range(2):
        after = held(manager)
        assert after.keys() == before.keys()
        for name, (values, strides) in before.items():
            torch.testing.assert_close(after[name][0], values, rtol=0, atol=0)
            assert after[name][1] == strides, name
        (manager.onload if on_device else manager.offload)()
    shared = module.part.untyped_storage().data_ptr() == module.whole.untyped_storage().data_ptr()
    assert shared


def point_a_shard_elsewhere(module: Normed) -> None:
    shard = module.first.weight._local_tensor
    shard.data = torch.full_like(shard, 7.0)


def keep_and_point_elsewhere(module: Normed) -> None:
    module.kept = [module.first.weight._local_tensor.data]
    point_a_shard_elsewhere(module)


def another_shard(module: Normed) -> None:
    weight = module.first.weight
    weight._local_tensor = torch.full_like(weight._local_tensor, 7.0)


@pytest.mark.parametrize(
    "change", [point_a_shard_elsewhere, keep_and_point_elsewhere, another_shard]
)
def test_a_shard_that_was_changed_goes_along(
    one_rank: str, planned: list[str], change: Callable[[nn.Module], None]
) -> None:
    module = sharded(normed().to(one_rank))
    manager = PlacementManager(module)
    travelled(manager, planned)
    change(module)
    before = held(manager)
    manager.offload()
    assert planned != []
    assert torch.equal(local(module.first.weight), torch.full((5, 6), 7.0))
    assert torch.equal(before["first.weight param"][0], torch.full((5, 6), 7.0))


@pytest.mark.parametrize("on_device", [True, False])
def test_a_base_that_was_pointed_elsewhere_does_not_take_its_view_along(
    one_rank: str, planned: list[str], on_device: bool
) -> None:
    base = torch.arange(12.0, device=one_rank)
    module = nn.Linear(2, 2).to(one_rank)
    module.register_buffer("view", base[2:6])
    assert module.view._base is base
    manager = PlacementManager(module)
    travelled(manager, planned)
    if not on_device:
        manager.offload()
    kept = module.view.detach()  # so that as many look into the old bytes as before
    base.data = torch.full_like(base, 7.0)
    for _ in range(2):
        (manager.offload if on_device else manager.onload)()
        assert planned != []
        assert torch.equal(module.view.cpu(), torch.arange(2.0, 6.0))
        assert torch.equal(base.cpu(), torch.full((12,), 7.0))
        assert base.device == module.view.device == module.weight.device
        (manager.onload if on_device else manager.offload)()
    assert torch.equal(kept.cpu(), torch.arange(2.0, 6.0))


@pytest.mark.parametrize("shard", [False, True], ids=["plain", "fsdp2"])
def test_whoever_keeps_what_lay_on_the_host_keeps_its_values(
    one_rank: str, planned: list[str], shard: bool
) -> None:
    module = normed().to(one_rank)
    module = sharded(module) if shard else module
    optimizer = adam(module.parameters())
    manager = PlacementManager(module, optimizer)
    travelled(manager, planned)
    manager.offload()
    kept = local(module.first.weight.detach())
    value = kept.clone()
    manager.onload()
    normed_loss(module, [x.to(one_rank) for x in normed_batch()]).backward()
    optimizer.step()
    manager.offload()
    assert torch.equal(kept, value)
    assert not torch.equal(local(module.first.weight), value)


@pytest.mark.parametrize("watched", [False, True])
def test_nothing_hidden_travels_with_a_padded_shard(one_rank: str, watched: bool) -> None:
    """FSDP2 makes padded shards as views of tensors that nobody else has."""
    gc.collect()
    of_others = torch.accelerator.memory_allocated()
    module = sharded(normed().to(one_rank))
    (weight,) = (s for s in shard_groups(module)[0].parameters if s.parameter.shape == (5, 6))
    padded = weight.padded_shard
    assert padded._base is not None
    watch = weakref.ref(padded) if watched else None  # torch swaps nothing under a weak reference
    values = padded.cpu()
    gc.collect()
    before = torch.accelerator.memory_allocated()
    manager = PlacementManager(module)
    assert (padded._base is None) is not watched
    assert weight.padded_shard is padded
    for _ in range(3):
        manager.offload()
        assert torch.accelerator.memory_allocated() == of_others
        assert torch.equal(padded, values)
        manager.onload()
        assert torch.accelerator.memory_allocated() == before
        assert torch.equal(padded.cpu(), values)
    assert watch is None or watch() is padded


def test_a_padded_shard_that_is_a_wrapper_stays_one(one_rank: str) -> None:
    module = nn.Linear(4, 4, bias=False).to(one_rank)
    part = module.weight.detach()
    module.weight = nn.Parameter(TwoTensor(part.clone(), part.clone()))
    module = sharded(module)
    (weight,) = shard_groups(module)[0].parameters
    assert weight.padded_shard._base is not None
    manager = PlacementManager(module)
    for move in (manager.offload, manager.onload, manager.offload):
        move()
        assert type(weight.padded_shard) is TwoTensor
        assert torch.equal(local(module.weight).a.cpu(), part.cpu())
        assert torch.equal(weight.padded_shard.a.view(4, 4).cpu(), part.cpu())


def test_whoever_takes_what_lies_on_the_host_while_it_is_copied_keeps_its_values(
    one_rank: str, planned: list[str]
) -> None:
    """The move had looked before that; so it is for the next one to see."""
    module = normed().to(one_rank)
    manager = PlacementManager(module)
    travelled(manager, planned)
    manager.offload()
    begun = manager.onload(wait=False)
    kept = module.first.weight.detach()
    value = kept.clone()
    begun.wait()
    assert planned == []
    with torch.no_grad():
        module.first.weight.add_(1)
    manager.offload()
    assert planned != []
    assert torch.equal(kept, value)
    assert torch.equal(module.first.weight, value + 1)


def test_copies_that_went_ahead_on_a_lost_way_leave_no_memory(
    one_rank: str, planned: list[str]
) -> None:
    module = normed().to(one_rank)
    manager = PlacementManager(module)
    travelled(manager, planned)
    manager.offload()
    gc.collect()
    left = torch.accelerator.memory_allocated()
    module.first.weight.data = torch.full_like(module.first.weight, 7.0)
    manager.onload()
    assert planned == ["onload()"]
    assert torch.equal(module.first.weight.cpu(), torch.full((5, 6), 7.0))
    manager.offload()
    assert torch.accelerator.memory_allocated() == left


def test_a_move_that_is_refused_after_its_copies_went_ahead_leaves_everything(
    one_rank: str, planned: list[str], trace: Trace
) -> None:
    module = normed().to(one_rank)
    manager = PlacementManager(module, trace=trace)
    travelled(manager, planned)
    manager.offload()
    left, before = torch.accelerator.memory_allocated(), held(manager)
    weight, seen = module.first.weight, len(trace)
    module.first.weight = nn.Parameter(torch.empty(5, 6, device="meta"))
    with pytest.raises(PlacementDrift, match=r"first\.weight"):
        manager.onload()
    assert torch.accelerator.memory_allocated() == left
    assert manager.placement is Placement.CPU_MANUAL
    assert [event.kind.value for event in list(trace)[seen:]] == ["refusal"]
    module.first.weight = weight
    after = held(manager)
    assert all(torch.equal(after[name][0], values) for name, (values, _) in before.items())
    manager.onload()
    manager.verify()


def test_a_device_copy_that_went_ahead_on_a_lost_way_overwrites_nothing(
    one_rank: str, planned: list[str]
) -> None:
    module = sharded(normed().to(one_rank))
    manager = PlacementManager(module)
    travelled(manager, planned)
    before = held(manager)
    module.first.register_buffer("new", torch.ones(3, device=one_rank))
    nbytes, counted = sum(site.nbytes for site in manager.census().sites), sim.counters()
    manager.offload()
    assert planned == ["offload()"]
    assert (sim.counters() - counted).device_to_host_bytes > nbytes  # some went ahead
    after = held(manager)
    assert all(torch.equal(after[name][0], values) for name, (values, _) in before.items())
    manager.onload()
    manager.verify()


def test_what_was_freed_on_the_device_is_refused_on_a_known_way(
    one_rank: str, planned: list[str]
) -> None:
    module = normed().to(one_rank)
    manager = PlacementManager(module)
    travelled(manager, planned)
    storage = module.first.weight.untyped_storage()
    nbytes = storage.nbytes()
    storage.resize_(0)
    with pytest.raises(CannotMove, match=r"first\.weight"):
        manager.offload()
    assert manager.placement is Placement.GPU
    storage.resize_(nbytes)
    manager.offload()
    manager.verify()


def test_memory_that_another_manager_came_to_share_is_refused_on_a_known_way(
    one_rank: str, planned: list[str]
) -> None:
    module, other = normed().to(one_rank), normed().to(one_rank)
    manager, others = PlacementManager(module), PlacementManager(other)
    travelled(manager, planned)
    other.first.weight.data = module.first.weight.data
    with pytest.raises(AlreadyManaged, match=r"first.weight"):
        manager.offload()
    assert module.first.weight.device.type == other.first.weight.device.type == one_rank
    assert others.placement is Placement.GPU


def test_training_in_between_does_not_lose_the_way(one_rank: str, planned: list[str]) -> None:
    module = sharded(normed().to(one_rank))
    optimizer = adam(module.parameters())
    manager = PlacementManager(module, optimizer)

    def step() -> None:
        normed_loss(module, [x.to(one_rank) for x in normed_batch()]).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    travelled(manager, planned)
    step()
    planned.clear()
    manager.offload()
    manager.onload()
    assert planned == []


def test_a_module_that_is_taken_out_is_not_kept(one_rank: str, planned: list[str]) -> None:
    module = Shared().to(one_rank)
    manager = PlacementManager(module)
    travelled(manager, planned)
    child, weight = weakref.ref(module.child), weakref.ref(module.child.weight)
    del module.child
    gc.collect()
    assert child() is None
    assert weight() is None
    assert manager.placements[Component.PARAMS].value == "gpu"


@pytest.mark.parametrize("enabled", [True, False])
def test_no_garbage_is_collected_in_the_middle_of_a_move(enabled: bool) -> None:
    collections: list[str] = []
    before = gc.get_threshold()
    gc.callbacks.append(lambda phase, info: collections.append(phase))
    (gc.enable if enabled else gc.disable)()
    gc.set_threshold(1)
    try:
        with undisturbed():
            collections.clear()
            made = [[object()] for _ in range(100)]
            assert collections == []
        assert gc.isenabled() is enabled
        made += [[object()] for _ in range(100)]
        assert bool(collections) is enabled
    finally:
        gc.callbacks.pop()
        gc.set_threshold(*before)
        gc.enable()
