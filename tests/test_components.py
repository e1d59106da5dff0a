"""Parameters, gradients, buffers and optimizer state, moved apart and together."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from models import adam, assert_equal, normed, normed_batch, normed_loss, policy, sharded, values

from placement import (
    CannotMove,
    Component,
    ContradictoryOptions,
    IllegalTransition,
    Placement,
    PlacementHeld,
    PlacementManager,
    Trace,
)

GPU, CPU = Placement.GPU, Placement.CPU_MANUAL
PARAMS, GRADS, BUFFERS, OPTIMIZER = Component


def stepped(device: str, *, shard: bool, trace: Trace | None = None) -> PlacementManager:
    """A manager of a module on the device that has gradients, buffers and optimizer state."""
    module = sharded(normed()) if shard else normed().to(device)
    manager = PlacementManager(module, adam(module.parameters()), trace=trace)
    step(manager)
    return manager


def step(manager: PlacementManager, number: int = 0) -> None:
    with manager.training():
        manager.optimizer.zero_grad()
        loss = normed_loss(manager.module, [x.to(manager.device) for x in normed_batch(number)])
        loss.backward()
        manager.optimizer.step()


def devices(manager: PlacementManager) -> dict[Component, set[str]]:
    """Where the tensors of each component are, without step counters."""
    found: dict[Component, set[str]] = {component: set() for component in Component}
    for site in manager.census().sites:
        if not site.holding.host_scalar:
            found[site.kind.component] |= {device.type for device in site.rests_on}
    return found


def subsets() -> Iterator[tuple[Component, ...]]:
    for size in range(5):
        yield from itertools.combinations(Component, size)


@pytest.mark.parametrize("shard", [False, True], ids=["plain", "fsdp2"])
def test_any_subset_is_moved_alone_and_comes_back(one_rank: str, shard: bool) -> None:
    manager = stepped(one_rank, shard=shard)
    before = values(manager.census())
    for subset in subsets():
        manager.offload(include=[component.value for component in subset])
        for component in Component:
            gone = component in subset
            assert devices(manager)[component] == {"cpu" if gone else one_rank}, subset
            assert manager.placements[component] is (CPU if gone else GPU)
        manager.verify()
        assert_equal(values(manager.census()), before)
        manager.onload()
    step(manager, 1)
    untouched = stepped(one_rank, shard=shard)
    step(untouched, 1)
    assert_equal(values(manager.census()), values(untouched.census()))


@pytest.mark.parametrize("shard", [False, True], ids=["plain", "fsdp2"])
@pytest.mark.parametrize("asked", list(itertools.product([False, True], repeat=3)))
def test_to_takes_every_combination(
    one_rank: str, shard: bool, asked: tuple[bool, bool, bool]
) -> None:
    model, optimizer, grad = asked
    manager = stepped(one_rank, shard=shard)
    manager.to("cpu", model=model, optimizer=optimizer, grad=grad)
    expected = {PARAMS: model, GRADS: grad, BUFFERS: model, OPTIMIZER: optimizer}
    assert devices(manager) == {c: {"cpu" if gone else one_rank} for c, gone in expected.items()}
    manager.to(manager.device, model=model, optimizer=optimizer, grad=grad)
    assert devices(manager) == {component: {one_rank} for component in Component}


def test_to_needs_no_optimizer(one_rank: str) -> None:
    manager = PlacementManager(normed().to(one_rank))
    manager.to("cpu")
    assert set(manager.placements.values()) == {CPU}
    manager.to(one_rank)
    assert set(manager.placements.values()) == {GPU}


def test_to_a_device_that_is_none_of_the_two_is_refused(one_rank: str) -> None:
    manager = PlacementManager(normed().to(one_rank))
    with pytest.raises(ContradictoryOptions, match="meta"):
        manager.to("meta")
    assert manager.placement is GPU


@pytest.mark.parametrize("name", ["model", "optimizer"])
def test_a_component_that_is_not_there_is_refused(one_rank: str, name: str) -> None:
    manager = PlacementManager(normed().to(one_rank))
    with pytest.raises(ContradictoryOptions, match=name):
        manager.offload(include=["params", name])
    assert set(manager.placements.values()) == {GPU}


def test_no_component_of_a_managed_module_is_moved(one_rank: str) -> None:
    module = sharded(normed(), policy())
    manager = PlacementManager(module, adam(module.parameters()))
    for component in Component:
        with pytest.raises(IllegalTransition, match=component.value):
            manager.offload(include=[component])
    manager.to("cpu", model=False, optimizer=False, grad=False)  # asks for nothing


def test_what_a_context_holds_is_refused_and_the_rest_moves(one_rank: str) -> None:
    manager = stepped(one_rank, shard=True)
    with manager.evaluating():
        for component in (PARAMS, BUFFERS):
            with pytest.raises(PlacementHeld, match=component.value):
                manager.offload(include=[component])
        manager.offload(include=[GRADS, OPTIMIZER])
    assert manager.placements == {PARAMS: GPU, GRADS: GPU, BUFFERS: GPU, OPTIMIZER: GPU}


def test_an_evaluation_takes_neither_gradients_nor_optimizer_state(
    one_rank: str, trace: Trace
) -> None:
    manager = stepped(one_rank, shard=True, trace=trace)
    manager.offload()
    known = len(trace.moves())
    with manager.evaluating(), torch.no_grad():
        assert devices(manager)[GRADS] == devices(manager)[OPTIMIZER] == {"cpu"}
        normed_loss(manager.module, [x.to(manager.device) for x in normed_batch(1)])
    assert {event.component for event in trace.moves()[known:]} == {"params", "buffers"}


def test_gradients_parked_on_the_cpu_are_parked_again(one_rank: str) -> None:
    manager = stepped(one_rank, shard=True)
    manager.offload(include=["grads"])
    step(manager, 1)
    assert devices(manager)[GRADS] == {"cpu"}
    assert devices(manager)[PARAMS] == {one_rank}


def test_what_has_no_tensors_goes_where_the_parameters_go(one_rank: str) -> None:
    manager = stepped(one_rank, shard=True)
    manager.optimizer.zero_grad()
    manager.offload(include=["params"])
    assert manager.placements == {PARAMS: CPU, GRADS: CPU, BUFFERS: GPU, OPTIMIZER: GPU}


def test_a_module_is_adopted_with_its_gradients_elsewhere(one_rank: str) -> None:
    first = stepped(one_rank, shard=True)
    first.offload(include=["params"])
    first.detach()
    second = PlacementManager(first.module, first.optimizer)
    assert second.placements == {PARAMS: CPU, GRADS: GPU, BUFFERS: GPU, OPTIMIZER: GPU}


def test_components_that_share_bytes_are_not_parted(one_rank: str) -> None:
    module = normed().to(one_rank)
    module.register_buffer("alias", module.first.weight.detach())
    manager = PlacementManager(module)
    with pytest.raises(CannotMove, match="alias") as raised:
        manager.offload(include=["params"])
    assert "move all of their components together" in str(raised.value)
    manager.offload()
    assert module.alias.data_ptr() == module.first.weight.data_ptr()
