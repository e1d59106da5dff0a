"""No memory is moved by two managers."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from models import normed, sharded
from torch import nn

from placement import AlreadyManaged, Placement, PlacementManager

Pair = tuple[nn.Module, nn.Module]


class Headed(nn.Module):
    """A head of its own, over a trunk that may be somebody else's, too."""

    def __init__(self, trunk: nn.Parameter) -> None:
        super().__init__()
        self.trunk = trunk
        self.head = nn.Linear(3, 1)


def actor_and_critic() -> Pair:
    trunk = nn.Parameter(torch.ones(3))
    return Headed(trunk), Headed(trunk)


def views_of_one_slab() -> Pair:
    slab = torch.ones(8)
    return Headed(nn.Parameter(slab[:3])), Headed(nn.Parameter(slab[4:7]))


def detached() -> Pair:
    actor, _ = actor_and_critic()
    return actor, Headed(nn.Parameter(actor.trunk.detach()))


def one_buffer() -> Pair:
    actor, critic = normed(), normed()
    critic.norm.running_mean = actor.norm.running_mean
    return actor, critic


def inside_a_wrapper() -> Pair:
    from torch.testing._internal.two_tensor import TwoTensor

    actor, critic = normed(), normed()
    shared = torch.ones(3)
    actor.register_buffer("pair", TwoTensor(shared, torch.zeros(3)))
    critic.register_buffer("single", shared)
    return actor, critic


def loaded_from_one_state_dict() -> Pair:
    actor, critic = normed(), normed()
    critic.load_state_dict(actor.state_dict(), assign=True)
    return actor, critic


@pytest.mark.parametrize(
    "make",
    [
        actor_and_critic,
        views_of_one_slab,
        detached,
        one_buffer,
        inside_a_wrapper,
        loaded_from_one_state_dict,
    ],
)
def test_two_managers_over_one_storage_are_refused_at_adoption(
    one_rank: str, make: Callable[[], Pair]
) -> None:
    actor, critic = make()
    manager = PlacementManager(actor)
    with pytest.raises(AlreadyManaged) as caught:
        PlacementManager(critic)
    assert type(actor).__name__ in caught.value.state
    assert any("which is the other's" in line for line in caught.value.tensors)
    manager.onload()  # the refusal left nothing behind
    assert {p.device.type for p in actor.parameters()} == {one_rank}


def test_both_modules_in_one_manager_stay_shared(one_rank: str) -> None:
    actor, critic = views_of_one_slab()
    manager = PlacementManager(nn.ModuleDict({"actor": actor, "critic": critic}))
    manager.onload()
    storages = {m.trunk.untyped_storage().data_ptr() for m in (actor, critic)}
    assert len(storages) == 1
    assert actor.trunk.device.type == one_rank


def test_a_claim_ends_with_detach_and_with_the_manager(one_rank: str) -> None:
    actor, critic = actor_and_critic()
    first = PlacementManager(actor)
    first.detach()
    second = PlacementManager(critic)
    gc.collect()
    gc.disable()  # it must not take a garbage collection
    try:
        del second
        PlacementManager(actor)
    finally:
        gc.enable()


def test_a_refused_manager_claims_nothing(one_rank: str) -> None:
    actor, critic = actor_and_critic()
    other = normed()
    manager = PlacementManager(other)
    both = nn.ModuleList([critic, other.first])
    with pytest.raises(AlreadyManaged):
        PlacementManager(both)
    PlacementManager(actor)
    manager.onload()


def test_memory_that_came_to_be_shared_later_is_refused_at_the_move(one_rank: str) -> None:
    actor, critic = normed(), normed()
    one, other = PlacementManager(actor), PlacementManager(critic)
    critic.load_state_dict(actor.state_dict(), assign=True)
    for manager in (one, other):
        with pytest.raises(AlreadyManaged, match=r"first.weight \(param\) on cpu"):
            manager.onload()
        assert manager.placement is Placement.CPU_MANUAL
    assert {p.device.type for p in [*actor.parameters(), *critic.parameters()]} == {"cpu"}
    critic.load_state_dict(normed().state_dict(), assign=True)
    one.onload()
    other.onload()


def test_a_parameter_that_one_of_them_leaves_alone_may_be_shared(one_rank: str) -> None:
    actor, critic = actor_and_critic()
    moves_it = PlacementManager(actor)
    leaves_it = PlacementManager(critic, stays=["trunk"])
    moves_it.onload()
    assert critic.trunk is actor.trunk
    assert critic.trunk.device.type == one_rank
    leaves_it.onload()
    moves_it.offload()
    assert critic.trunk.device.type == "cpu"
    assert critic.head.weight.device.type == one_rank


def test_a_view_that_one_of_them_leaves_alone_would_be_parted(one_rank: str) -> None:
    actor, critic = views_of_one_slab()
    manager = PlacementManager(actor)
    with pytest.raises(AlreadyManaged, match="is a view"):
        PlacementManager(critic, stays=["trunk"])
    manager.detach()
    leaves_it = PlacementManager(critic, stays=["trunk"])
    with pytest.raises(AlreadyManaged, match="is a view"):
        PlacementManager(actor)
    PlacementManager(actor, stays=["trunk"]).onload()  # nobody moves it
    leaves_it.onload()


def test_an_address_that_is_used_again_is_not_taken_for_shared(one_rank: str) -> None:
    managers = []
    for _ in range(20):  # each move frees storages, whose addresses the next module gets
        managers.append(PlacementManager(normed()))
        for manager in managers:
            manager.onload()
            manager.offload()


def test_shards_of_two_modules_are_not_shared(one_rank: str) -> None:
    actor, critic = sharded(normed()), sharded(normed())
    one, other = PlacementManager(actor), PlacementManager(critic)
    one.offload()
    other.offload()
