"""A snapshot is a private copy, and restoring it brings every bit back, wherever tensors rest."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from exported_modules import ON_TWO_RANKS, Make, fsdp2, plain
from models import adam, assert_equal, values, whereabouts
from torch import nn

from placement import (
    Component,
    ForeignSnapshot,
    Kind,
    Placement,
    PlacementHeld,
    PlacementManager,
    Trace,
)
from placement.testing import Ranks


def step(manager: PlacementManager, number: int) -> float:
    generator = torch.Generator().manual_seed(number * dist.get_world_size() + dist.get_rank())
    tokens = torch.randint(0, 7, (4,), generator=generator)
    with manager.training():
        loss = manager.module(tokens.to(manager.device)).square().mean()
        loss.backward()
        assert manager.optimizer is not None
        manager.optimizer.step()
        manager.optimizer.zero_grad()
        return loss.item()


def everything(manager: PlacementManager) -> dict[str, torch.Tensor]:
    """Of all that a snapshot has; FSDP1's own views of a gradient come and go."""
    census = manager.census()
    kept = [site for site in census.sites if site.kind is not Kind.GRAD]
    return values(type(census)(kept))


def tensors(manager: PlacementManager) -> dict[str, int]:
    return {site.name: id(site.holding.tensor) for site in manager.census().sites}


def comes_back(make: Make, between: str) -> None:
    module = make()
    optimizer = adam(module.parameters())
    manager = PlacementManager(module, optimizer, trace=Trace())
    by_hand = manager.owner.managed is None
    if by_hand:
        manager.onload()
    step(manager, 0)
    expected = everything(manager)
    snapshot = manager.snapshot()
    straight_on = [step(manager, number) for number in (1, 2)]
    assert any(not torch.equal(expected[n], now) for n, now in everything(manager).items())
    optimizer.param_groups[0]["lr"] = 7.0
    if between == "offloaded" and by_hand:
        manager.offload()
    found, identities = whereabouts(manager), tensors(manager)
    manager.restore(snapshot)
    assert whereabouts(manager) == found
    assert_equal(everything(manager), expected)
    assert tensors(manager) == identities
    assert optimizer.param_groups[0]["lr"] == 1e-2
    assert [step(manager, number) for number in (1, 2)] == straight_on
    manager.restore(snapshot)  # it is private: two steps did not change it
    assert_equal(everything(manager), expected)


@pytest.mark.parametrize("between", ["as it was", "offloaded"])
@pytest.mark.parametrize("make", ON_TWO_RANKS)
def test_a_restored_module_trains_on_as_it_did(two_ranks: Ranks, make: Make, between: str) -> None:
    two_ranks.run(comes_back, make, between)


def test_state_that_came_after_the_snapshot_goes_and_state_that_went_comes_back(
    one_rank: str,
) -> None:
    module = fsdp2()
    optimizer = adam(module.parameters())
    manager = PlacementManager(module, optimizer, rest=Placement.CPU_MANUAL)
    before_the_first_step = manager.snapshot()
    step(manager, 0)
    expected = everything(manager)
    after = manager.snapshot()
    manager.restore(before_the_first_step)
    assert not optimizer.state
    assert not manager.census().of(Component.OPTIMIZER).sites
    manager.restore(after)
    assert_equal(everything(manager), expected)
    manager.verify()
    assert step(manager, 1) == pytest.approx(step_of_a_twin(2), rel=1e-5)


def step_of_a_twin(steps: int) -> float:
    module = fsdp2()
    manager = PlacementManager(module, adam(module.parameters()), rest=Placement.CPU_MANUAL)
    return [step(manager, number) for number in range(steps)][-1]


def test_a_snapshot_is_as_large_as_what_it_holds(one_rank: str) -> None:
    module = plain()
    snapshot = PlacementManager(module).snapshot()
    held = {id(t): t for t in (*module.parameters(), *module.buffers())}
    assert snapshot.nbytes == sum(tensor.nbytes for tensor in held.values())


def test_a_gradient_scaler_comes_back(one_rank: str) -> None:
    module = plain().to(one_rank)
    optimizer, scaler = adam(module.parameters()), torch.amp.GradScaler(one_rank)
    manager = PlacementManager(module, optimizer, scaler=scaler)
    scaler.scale(torch.ones((), device=one_rank))
    snapshot = manager.snapshot()
    found = scaler.get_scale()
    scaler.update(3.0)
    assert scaler.get_scale() == 3.0
    manager.restore(snapshot)
    assert scaler.get_scale() == found


def another_module(module: nn.Module) -> None:
    module.narrow = nn.Linear(6, 2, bias=False, device=module.narrow.weight.device)


def another_name(module: nn.Module) -> None:
    module.wide = module.narrow


def another_dtype(module: nn.Module) -> None:
    module.narrow.weight = nn.Parameter(module.narrow.weight.detach().bfloat16())


@pytest.mark.parametrize(
    ("change", "says"),
    [(another_module, r"narrow\.weight"), (another_name, "wide"), (another_dtype, "bfloat16")],
)
def test_a_snapshot_that_does_not_fit_is_refused_before_anything_is_written(
    one_rank: str, change: Callable[[nn.Module], None], says: str
) -> None:
    module = plain().to(one_rank)
    manager = PlacementManager(module)
    snapshot = manager.snapshot()
    with torch.no_grad():
        module.embedding.weight.fill_(5)
    change(module)
    with pytest.raises(ForeignSnapshot, match=says):
        manager.restore(snapshot)
    assert module.embedding.weight.eq(5).all()


def test_a_snapshot_of_a_module_without_its_optimizer_is_refused_for_both(one_rank: str) -> None:
    module = plain().to(one_rank)
    manager = PlacementManager(module)
    snapshot = manager.snapshot()
    manager.detach()
    together = PlacementManager(module, adam(module.parameters()))
    with pytest.raises(ForeignSnapshot, match="1 groups, and 0 in the snapshot"):
        together.restore(snapshot)


def test_nothing_is_restored_under_a_half_consumed_export(one_rank: str) -> None:
    manager = PlacementManager(plain())
    snapshot = manager.snapshot()
    generator = manager.export_weights()
    next(generator)
    with pytest.raises(PlacementHeld, match="export, entered at"):
        manager.restore(snapshot)
    assert len(dict(generator)) > 2
