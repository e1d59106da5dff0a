"""Optimizer state has a placement of its own, and each entry its rule."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import pytest
import torch
from models import Whereabouts, assert_equal, normed, normed_batch, normed_loss, values, whereabouts
from torch import nn

from placement import (
    CannotMove,
    Component,
    ForeignOptimizer,
    Placement,
    PlacementManager,
    ScatteredModule,
)

Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "adamw": torch.optim.AdamW,
    "adamw foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "adamw capturable": lambda p: torch.optim.AdamW(p, capturable=True),
    "amsgrad": lambda p: torch.optim.AdamW(p, amsgrad=True),
    "nadam": torch.optim.NAdam,
    "sgd without state": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd with momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "asgd": torch.optim.ASGD,
    "adafactor": torch.optim.Adafactor,
}


def step(module: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    device = next(module.parameters()).device
    normed_loss(module, [x.to(device) for x in normed_batch(number)]).backward()
    optimizer.step()
    optimizer.zero_grad()


def of_optimizer(found: Whereabouts) -> Whereabouts:
    return {name: where for name, where in found.items() if name.startswith("optimizer ")}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_entry_returns_to_the_device_it_was_found_on(one_rank: str, name: str) -> None:
    if name == "adamw capturable" and one_rank == "sim":
        pytest.skip("torch refuses capturable optimizers on devices that it does not know")
    twin = normed().to(one_rank)
    twin_optimizer = OPTIMIZERS[name](twin.parameters())
    module = normed().to(one_rank)
    optimizer = OPTIMIZERS[name](module.parameters())
    manager = PlacementManager(module, optimizer, verify="always")
    for number in range(3):
        with manager.training():
            step(module, optimizer, number)
        step(twin, twin_optimizer, number)
        found = whereabouts(manager)
        manager.offload()
        assert {device for device, _ in whereabouts(manager).values()} == {"cpu"}
        manager.onload()
        assert whereabouts(manager) == found
    expected = PlacementManager(twin, twin_optimizer).census()
    assert_equal(values(manager.census()), values(expected))


def test_a_step_counter_that_torch_keeps_on_the_host_stays_there(one_rank: str) -> None:
    module = normed().to(one_rank)
    optimizer = torch.optim.AdamW(module.parameters())
    step(module, optimizer, 0)
    manager = PlacementManager(module, optimizer)
    assert manager.placements.get(Component.OPTIMIZER) is Placement.GPU
    manager.offload()
    manager.onload()
    assert optimizer.state[module.second.weight]["step"].device.type == "cpu"
    assert optimizer.state[module.second.weight]["exp_avg"].device.type == one_rank


def test_a_step_counter_found_on_the_device_goes_back_to_it(one_rank: str) -> None:
    module = normed().to(one_rank)
    optimizer = torch.optim.AdamW(module.parameters())
    step(module, optimizer, 0)
    state = optimizer.state[module.second.weight]
    state["step"] = state["step"].to(one_rank)
    manager = PlacementManager(module, optimizer)
    manager.offload()
    assert state["step"].device.type == "cpu"
    manager.onload()
    assert state["step"].device.type == one_rank


def test_nested_state_is_found_and_moved(one_rank: str) -> None:
    module = nn.Linear(2, 2).to(one_rank)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    state = optimizer.state[module.weight]
    state["blocks"] = [{"q": torch.ones(3, device=one_rank)}, (torch.zeros(2, device=one_rank),)]
    manager = PlacementManager(module, optimizer)
    names = [site.name for site in manager.census().of(Component.OPTIMIZER).sites]
    assert names == ["weight/blocks/0/q", "weight/blocks/1/0"]
    manager.offload()
    assert state["blocks"][0]["q"].device.type == state["blocks"][1][0].device.type == "cpu"


def test_state_apart_from_its_parameters_is_a_placement_of_its_own(one_rank: str) -> None:
    module = normed().to(one_rank)
    optimizer = torch.optim.AdamW(module.parameters())
    step(module, optimizer, 0)
    for state in optimizer.state.values():
        for key in ("exp_avg", "exp_avg_sq"):
            state[key] = state[key].cpu()
    manager = PlacementManager(module, optimizer)
    assert manager.placement is Placement.GPU
    assert manager.placements.get(Component.OPTIMIZER) is Placement.CPU_MANUAL
    with manager.training():
        assert manager.placements.get(Component.OPTIMIZER) is Placement.GPU
        step(module, optimizer, 1)
    assert manager.placements.get(Component.OPTIMIZER) is Placement.CPU_MANUAL


def test_state_on_both_sides_is_refused_by_name(one_rank: str) -> None:
    module = normed().to(one_rank)
    optimizer = torch.optim.AdamW(module.parameters())
    step(module, optimizer, 0)
    state = optimizer.state[module.second.weight]
    state["exp_avg"] = state["exp_avg"].cpu()
    with pytest.raises(ScatteredModule) as caught:
        PlacementManager(module, optimizer)
    assert caught.value.tensors == ("second.weight/exp_avg (optimizer) on cpu",)


def test_an_optimizer_without_state_follows_its_parameters(one_rank: str) -> None:
    module = normed()
    optimizer = torch.optim.AdamW(module.parameters())
    manager = PlacementManager(module, optimizer)
    assert manager.placements.get(Component.OPTIMIZER) is Placement.CPU_MANUAL
    with manager.evaluating():
        assert manager.placements.get(Component.OPTIMIZER) is Placement.GPU
    assert manager.placements.get(Component.OPTIMIZER) is Placement.CPU_MANUAL


def test_a_wrapped_optimizer_over_foreign_parameters_is_refused(one_rank: str) -> None:
    class Wrapper(torch.optim.Optimizer):
        def __init__(self, module: nn.Module) -> None:
            super().__init__(module.parameters(), {})
            copies = [p.detach().clone().requires_grad_() for p in module.parameters()]
            self.by_name = {"masters": [torch.optim.SGD(copies, lr=0.1)]}

    module = normed().to(one_rank)
    with pytest.raises(ForeignOptimizer, match="SGD, group 0, parameter 0"):
        PlacementManager(module, Wrapper(module))


class SlowWeights(torch.optim.SGD):
    """In the manner of Lookahead: keeps a second copy of each parameter in an attribute, and points
    at the parameters from its state."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, lr=0.1, momentum=0.9)
        parameters = self.param_groups[0]["params"]
        self.slow = [parameter.detach().clone() for parameter in parameters]
        for parameter in parameters:
            self.state[parameter]["of"] = parameter

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        super().step()
        for slow, parameter in zip(self.slow, self.param_groups[0]["params"]):
            slow.lerp_(parameter, 0.5)
            parameter.copy_(slow)


def test_what_an_optimizer_keeps_beside_its_state_moves_with_it(one_rank: str) -> None:
    module, twin = normed().to(one_rank), normed()
    optimizer, twin_optimizer = SlowWeights(module.parameters()), SlowWeights(twin.parameters())
    manager = PlacementManager(module, optimizer, verify="always")
    for number in range(3):
        with manager.training():
            step(module, optimizer, number)
        step(twin, twin_optimizer, number)
        manager.offload()
        assert {slow.device.type for slow in optimizer.slow} == {"cpu"}
        if number:
            manager.onload()
    for slow, expected in zip(optimizer.slow, twin_optimizer.slow):
        assert slow.device.type == one_rank
        assert torch.equal(slow.cpu(), expected)


def test_a_parameter_that_the_state_points_at_moves_with_the_module_alone(one_rank: str) -> None:
    module = normed()
    optimizer = SlowWeights(module.parameters())
    manager = PlacementManager(module, optimizer, verify="always")
    with manager.evaluating():
        assert module.second.weight.device.type == one_rank
        assert optimizer.state[module.second.weight]["of"] is module.second.weight
        assert {slow.device.type for slow in optimizer.slow} == {"cpu"}
    assert module.second.weight.device.type == "cpu"


def test_state_in_the_memory_of_a_parameter_stays_in_it(one_rank: str) -> None:
    module = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    optimizer.state[module.weight]["view"] = module.weight.detach().view(-1)
    manager = PlacementManager(module, optimizer)
    with pytest.raises(CannotMove, match="share their storage"):
        manager.evaluating().__enter__()  # the module alone
    manager.onload()
    view = optimizer.state[module.weight]["view"]
    assert view.untyped_storage().data_ptr() == module.weight.untyped_storage().data_ptr()
    assert view.device.type == one_rank


@dataclass
class Moments:
    """State as an object instead of a dict."""

    first: torch.Tensor


def test_state_in_an_object_is_found_and_moved(one_rank: str) -> None:
    module = nn.Linear(2, 2).to(one_rank)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    optimizer.state[module.weight]["moments"] = Moments(torch.ones(2, device=one_rank))
    manager = PlacementManager(module, optimizer)
    manager.offload()
    assert optimizer.state[module.weight]["moments"].first.device.type == "cpu"
