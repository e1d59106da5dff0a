"""A tensor has one name, whatever its module is wrapped in."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from models import normed
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from placement import ContradictoryOptions, PlacementManager, find_compute_device

NAMES = {
    *("first.weight", "norm.weight", "norm.bias", "second.weight", "second.bias"),
    *("norm.running_mean", "norm.running_var", "norm.num_batches_tracked"),
}


def compiled(module: nn.Module) -> nn.Module:
    wrapper: nn.Module = torch.compile(module, backend="eager")
    return wrapper


def averaged(module: nn.Module) -> nn.Module:
    return DistributedDataParallel(module)


def flattened(module: nn.Module) -> nn.Module:
    device = find_compute_device()
    return FullyShardedDataParallel(module, device_id=device, use_orig_params=True)


def inside_out(module: nn.Module) -> nn.Module:
    module.second = compiled(checkpoint_wrapper(module.second))
    return compiled(averaged(compiled(module)))


@pytest.mark.parametrize(
    "wrap",
    [compiled, averaged, flattened, checkpoint_wrapper, inside_out],
    ids=lambda w: w.__name__,
)
def test_census_and_export_agree_on_names_under_every_wrapper(
    one_rank: str, wrap: Callable[[nn.Module], nn.Module]
) -> None:
    manager = PlacementManager(wrap(normed().to(one_rank)))
    in_census = {site.holding.of for site in manager.census().sites}
    assert in_census - {"_flat_param"} == NAMES
    assert {name for name, _ in manager.export_weights()} == NAMES


def test_a_part_that_is_called_module_keeps_its_name(one_rank: str) -> None:
    own = nn.ModuleDict({"module": nn.ModuleDict({"module": nn.Linear(2, 2)})})
    for module in (own.to(one_rank), averaged(own)):
        manager = PlacementManager(module)
        assert {name for name, _ in manager.export_weights()} == {
            "module.module.weight",
            "module.module.bias",
        }
        manager.detach()


def test_a_pattern_with_the_parts_of_wrappers_is_refused_with_a_hint(one_rank: str) -> None:
    with pytest.raises(ContradictoryOptions, match="without the parts that wrappers put"):
        PlacementManager(averaged(normed().to(one_rank)), stays=["module.first.weight"])
