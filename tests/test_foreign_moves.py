"""Moves that go past the manager: refused where they would break the module, else noticed."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable, Iterator

import pytest
import torch
from models import Normed, adam, normed, normed_batch, normed_loss, policy, sharded
from torch import nn

from placement import (
    AlreadyManaged,
    Component,
    Detached,
    EventKind,
    IllegalTransition,
    Placement,
    PlacementDrift,
    PlacementHeld,
    PlacementManager,
    Trace,
)
from placement.testing import Ranks

Move = Callable[[nn.Module, str], object]


class Parent(nn.Module):
    def __init__(self, child: nn.Module) -> None:
        super().__init__()
        self.child = child


def by_device_name(module: nn.Module, device: str) -> object:
    return getattr(module, device)()  # .cuda(), .xpu(), .sim()


TO_DEVICE: dict[str, Move] = {
    "module.to(device)": lambda module, device: module.to(device),
    "nn.Module.to(module, device)": lambda module, device: nn.Module.to(module, device),
    "module.<device>()": by_device_name,
    "a child's to": lambda module, device: module.first.to(device),
    "a parent's to": lambda module, device: Parent(module).to(device),
    "module.to_empty": lambda module, device: module.to_empty(device=device),
    "module.to(a tensor there)": lambda module, device: module.to(torch.zeros(1, device=device)),
    "module.to(device, dtype)": lambda module, device: module.to(device, torch.float64),
}
TO_CPU: dict[str, Move] = {
    "module.cpu()": lambda module, device: module.cpu(),
    "module.to(cpu)": lambda module, device: module.to("cpu"),
    "a buffer's module.cpu()": lambda module, device: module.norm.cpu(),
}


@pytest.mark.parametrize("how", [*TO_DEVICE, *TO_CPU])
@pytest.mark.parametrize("pin_memory", [True, False])
def test_a_managed_module_refuses_at_the_call(
    one_rank: str, trace: Trace, how: str, pin_memory: bool
) -> None:
    module = sharded(normed(), policy(pin_memory=pin_memory))
    manager = PlacementManager(module, trace=trace)
    with pytest.raises(IllegalTransition, match="CPUOffloadPolicy") as caught:
        (TO_DEVICE | TO_CPU)[how](module, one_rank)
    assert caught.value.asked.startswith("module.")
    manager.verify()
    (event,) = trace
    assert event.kind is EventKind.REFUSAL
    assert event.call_site.startswith(__file__)
    normed_loss(module, [x.to(one_rank) for x in normed_batch()]).backward()


@pytest.mark.parametrize("how", TO_DEVICE)
def test_elsewhere_it_is_let_through_recorded_and_met_as_drift(
    one_rank: str, trace: Trace, how: str
) -> None:
    module = normed()
    manager = PlacementManager(module, trace=trace)
    TO_DEVICE[how](module, one_rank)
    (event,) = trace
    assert event.kind is EventKind.FOREIGN
    assert event.call_site.startswith(__file__)
    assert module.first.weight.device.type == one_rank
    with pytest.raises(PlacementDrift, match=r"module\.\w+\(\) at .*test_foreign_moves\.py:\d+"):
        manager.evaluating().__enter__()
    with pytest.raises(PlacementDrift):
        manager.onload()


@pytest.mark.parametrize("shard", [False, True], ids=["plain", "fsdp2"])
def test_drift_can_be_adopted_instead(one_rank: str, trace: Trace, shard: bool) -> None:
    module = sharded(normed()) if shard else normed().to(one_rank)
    optimizer = adam(module.parameters())
    manager = PlacementManager(module, optimizer, on_drift="adopt", trace=trace)
    module.to("cpu")
    with manager.training():
        assert manager.placement is Placement.GPU
        normed_loss(module, [x.to(one_rank) for x in normed_batch()]).backward()
        optimizer.step()
    assert manager.placement is Placement.CPU_MANUAL
    adopted = [event for event in trace if event.kind is EventKind.ADOPTION]
    assert [(e.component, e.source, e.dest) for e in adopted] == [
        (component.value, "gpu", "cpu_manual") for component in Component
    ]
    manager.verify()


def test_drift_is_not_adopted_while_a_context_is_open(one_rank: str) -> None:
    module = normed().to(one_rank)
    manager = PlacementManager(module, on_drift="adopt")
    with pytest.raises(PlacementDrift), manager.evaluating():
        module.to("cpu")


def test_half_a_module_is_not_adopted(one_rank: str) -> None:
    module = normed().to(one_rank)
    manager = PlacementManager(module, on_drift="adopt")
    module.first.to("cpu")
    with pytest.raises(Exception, match=r"first\.weight \(param\) on cpu"):
        manager.evaluating().__enter__()


def test_a_move_inside_a_context_is_met_when_it_ends(one_rank: str) -> None:
    module = normed().to(one_rank)
    manager = PlacementManager(module)
    with pytest.raises(PlacementDrift), manager.evaluating():
        module.to("cpu")
    module.to(one_rank)
    with manager.evaluating():
        pass


def test_a_move_there_and_back_is_no_drift(one_rank: str) -> None:
    module = normed().to(one_rank)
    manager = PlacementManager(module)
    module.to("cpu")
    module.to(one_rank)
    with manager.training():
        pass


def test_a_move_to_where_it_is_leaves_no_event(one_rank: str, trace: Trace) -> None:
    module = normed().to(one_rank)
    manager = PlacementManager(module, trace=trace)
    module.to(one_rank)
    module.to(torch.device(one_rank, 0))
    assert len(trace) == 0
    del manager


def test_a_conversion_that_a_user_wrote_is_let_through_and_checked(
    one_rank: str, trace: Trace
) -> None:
    module = normed().to(one_rank)
    manager = PlacementManager(module, trace=trace)
    called = []

    def convert(tensor: torch.Tensor) -> torch.Tensor:
        called.append(tensor)
        return tensor

    module._apply(convert)
    assert len(called) == 8, "called for the module's tensors only, not to try it out"
    assert [event.kind for event in trace] == [EventKind.FOREIGN]
    with manager.training():
        pass


# What stays possible.


@pytest.mark.parametrize("managed", [False, True])
def test_dtype_casts_stay_possible(one_rank: str, managed: bool) -> None:
    module = sharded(normed(), policy()) if managed else normed().to(one_rank)
    manager = PlacementManager(module)
    module.double()
    module.to(torch.bfloat16)
    assert module.first.weight.dtype is torch.bfloat16
    manager.verify()


def test_a_deep_copy_does_not_carry_the_manager_along(one_rank: str) -> None:
    module = normed().to(one_rank)
    manager = PlacementManager(module, on_drift="raise")
    twin = copy.deepcopy(module)
    twin.to("cpu")
    manager.verify()
    assert twin.__dict__.keys() == normed().__dict__.keys()
    assert PlacementManager(twin).placement is Placement.CPU_MANUAL


def test_a_managed_module_can_be_pickled(one_rank: str) -> None:
    module = normed().to(one_rank)
    manager = PlacementManager(module)
    copied = pickle.loads(pickle.dumps(module.state_dict()))
    assert copied.keys() == module.state_dict().keys()
    assert pickle.loads(pickle.dumps(normed())).first.weight.shape == (5, 6)
    del manager


def test_another_module_on_meta_can_be_materialised(one_rank: str) -> None:
    manager = PlacementManager(normed().to(one_rank))
    with torch.device("meta"):
        other = Normed()
    assert other.to_empty(device=one_rank).first.weight.device.type == one_rank
    manager.verify()


# Leaving no trace.


def wrapper_lives_as_long_as_managers() -> None:
    gc.collect()
    found = nn.Module._apply
    assert found.__module__ == "torch.nn.modules.module"
    module = normed()
    first, second = PlacementManager(module), PlacementManager(normed())
    assert nn.Module._apply is not found
    first.detach()
    assert nn.Module._apply is not found
    del second
    gc.collect()
    assert nn.Module._apply is found


def test_the_wrapper_is_there_only_while_a_manager_lives(two_ranks: Ranks) -> None:
    two_ranks.run(wrapper_lives_as_long_as_managers)  # in a process without other managers


class Collecting(nn.Linear):
    """Collects garbage in the middle of a conversion, as Python may at any moment."""

    def modules(self) -> Iterator[nn.Module]:
        gc.collect()
        return super().modules()


def last_manager_is_collected_in_the_middle_of_a_move(device: str) -> None:
    gc.collect()
    found = nn.Module._apply
    gc.disable()
    try:
        cycle: list[object] = [PlacementManager(normed().to(device))]
        cycle.append(cycle)
        assert nn.Module._apply is not found
        del cycle
        moved = Collecting(2, 2).to(device)
    finally:
        gc.enable()
    assert nn.Module._apply is found
    assert moved.weight.device.type == device


def test_the_last_manager_may_be_collected_in_the_middle_of_a_move(
    two_ranks: Ranks, placement_device: str
) -> None:
    # In a process without other managers.
    two_ranks.run(last_manager_is_collected_in_the_middle_of_a_move, placement_device)


def test_a_detached_manager_refuses_and_lets_go(one_rank: str, trace: Trace) -> None:
    module = sharded(normed(), policy(pin_memory=False))
    manager = PlacementManager(module, trace=trace)
    attributes = set(module.__dict__)
    manager.detach()
    assert set(module.__dict__) == attributes
    module.to(one_rank)  # nobody objects any more
    with pytest.raises(Detached):
        manager.training().__enter__()
    with pytest.raises(Detached):
        manager.onload()


def test_detaching_inside_a_context_is_refused(one_rank: str) -> None:
    manager = PlacementManager(normed().to(one_rank))
    with manager.training(), pytest.raises(PlacementHeld, match="train"):
        manager.detach()
    manager.detach()


def test_two_managers_of_one_module_are_refused(one_rank: str) -> None:
    module = normed().to(one_rank)
    manager = PlacementManager(module)
    for other in (module, module.first, Parent(module)):
        with pytest.raises(AlreadyManaged):
            PlacementManager(other)
    manager.detach()
    PlacementManager(module)
