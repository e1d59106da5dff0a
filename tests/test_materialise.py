"""A module made on the meta device gets memory where it belongs, and values everywhere."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from models import Normed, local, normed, policy, sharded
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from placement import (
    NotMaterialised,
    Placement,
    PlacementManager,
    find_compute_device,
    materialising,
)
from placement.testing import Ranks

Shard = Callable[[nn.Module], nn.Module]


def whole(module: nn.Module) -> nn.Module:
    return module


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return Normed()


def load(module: nn.Module) -> None:
    loaded = {}
    for name, target in module.state_dict().items():
        value = normed().state_dict()[name].to(find_compute_device())
        if isinstance(target, DTensor):
            value = distribute_tensor(value, target.device_mesh, target.placements)
        loaded[name] = value
    module.load_state_dict(loaded)


def initialise(module: nn.Module) -> None:
    for submodule in (module.first, module.norm, module.second):
        submodule.reset_parameters()


@pytest.mark.parametrize("fill", [load, initialise])
@pytest.mark.parametrize("shard", [whole, sharded, lambda module: sharded(module, policy())])
def test_a_module_that_is_loaded_or_initialised_is_whole(
    one_rank: str, shard: Shard, fill: Callable[[nn.Module], None]
) -> None:
    module = shard(on_meta())
    with materialising(module):
        fill(module)
    manager = PlacementManager(module)
    assert manager.placement is (manager.owner.managed or Placement.GPU)
    assert not any(local(tensor).isnan().any() for tensor in module.state_dict().values())


def test_what_has_memory_already_keeps_its_values_and_its_identity(one_rank: str) -> None:
    module = on_meta()
    module.norm = nn.BatchNorm1d(5, device=one_rank)
    module.norm.running_mean.fill_(3)
    found = module.norm.weight
    with materialising(module):
        module.first.reset_parameters()
        module.second.reset_parameters()
    assert module.norm.weight is found
    assert torch.equal(module.norm.running_mean.cpu(), torch.full((5,), 3.0))


def copy_all_but(module: nn.Module, left_out: str) -> None:
    with torch.no_grad():
        for name, value in normed().state_dict().items():
            if name != left_out:
                module.state_dict(keep_vars=True)[name].copy_(value)


def test_a_counter_that_nobody_set_is_named(one_rank: str) -> None:
    module = on_meta()
    with pytest.raises(NotMaterialised, match=r"norm\.num_batches_tracked \(buffer\)"):
        with materialising(module):
            copy_all_but(module, "norm.num_batches_tracked")


def test_an_assigned_tensor_of_another_device_is_named(one_rank: str) -> None:
    module = on_meta()
    state = {name: value.to(one_rank) for name, value in normed().state_dict().items()}
    state["second.bias"] = state["second.bias"].cpu()
    with pytest.raises(NotMaterialised, match=r"second\.bias \(param\) on cpu"):
        with materialising(module):
            module.load_state_dict(state, assign=True)


def test_an_exception_in_the_body_is_the_one_that_propagates(one_rank: str) -> None:
    with pytest.raises(ZeroDivisionError), materialising(on_meta()):
        raise ZeroDivisionError


@pytest.mark.parametrize("shard", [whole, sharded])
def test_shared_parameters_and_buffers_stay_shared(one_rank: str, shard: Shard) -> None:
    module = on_meta()
    module.third = nn.Linear(5, 3, device="meta")
    module.third.weight = module.second.weight
    module.third.register_buffer("mean", module.norm.running_mean)
    module = shard(module)
    with materialising(module):
        initialise(module)
        nn.init.zeros_(module.third.bias)
    assert module.third.weight is module.second.weight
    assert module.third.mean is module.norm.running_mean


def uneven_shards_are_whole() -> None:
    for offload in (None, policy()):
        module = sharded(on_meta(), offload)
        with materialising(module):
            load(module)
        manager = PlacementManager(module)
        exported = dict(manager.export_weights())
        for name, value in normed().state_dict().items():
            assert torch.equal(exported[name].cpu(), value), name
        with manager.evaluating(), torch.no_grad():
            out = module(torch.ones(8, 6, device=manager.device))
        torch.testing.assert_close(out.cpu(), normed()(torch.ones(8, 6)))


def test_padding_of_uneven_shards_is_no_value_that_somebody_must_write(two_ranks: Ranks) -> None:
    two_ranks.run(uneven_shards_are_whole)
