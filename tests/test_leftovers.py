"""Memory that does not come back after an offload is noticed, and named with what holds it."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator

import pytest
import torch
from models import normed, normed_batch, normed_loss, sharded
from torch import nn

from placement import PlacementManager, explain
from placement.testing import SimulatedAccelerator

pytestmark = pytest.mark.usefixtures("sim_accelerator")  # it counts memory exactly


@pytest.fixture(params=[False, True], ids=["plain", "fsdp2"])
def module(request: pytest.FixtureRequest, one_rank: str) -> nn.Module:
    return sharded(normed()) if request.param else normed().to(one_rank)


def test_where_nothing_stays_nothing_is_said(
    module: nn.Module, caplog: pytest.LogCaptureFixture
) -> None:
    manager = PlacementManager(module)
    with caplog.at_level(logging.WARNING):
        manager.offload()
    assert not caplog.records
    assert manager.leftovers() == []


def hold_state_dict(module: nn.Module) -> object:
    return module.state_dict()


def hold_view(module: nn.Module) -> object:
    return [module.second.bias.detach()]


def hold_generator(module: nn.Module) -> object:
    def weights() -> Iterator[torch.Tensor]:
        held = module.second.bias.detach()
        yield held
        yield held

    generator = weights()
    next(generator)
    return generator


@pytest.mark.parametrize(
    ("hold", "holder"),
    [
        (hold_state_dict, "a OrderedDict under 'second.bias'"),
        (hold_view, "a list of 1"),
        (hold_generator, "the generator hold_generator.<locals>.weights"),
    ],
)
def test_what_stays_is_named_with_its_holder(
    module: nn.Module,
    caplog: pytest.LogCaptureFixture,
    hold: Callable[[nn.Module], object],
    holder: str,
) -> None:
    held = hold(module)
    manager = PlacementManager(module)
    with caplog.at_level(logging.WARNING):
        manager.offload()
    assert "did not come back" in caplog.records[0].getMessage()
    found = {leftover.name: leftover for leftover in manager.leftovers()}
    assert holder in found["second.bias"].holders
    assert found["second.bias"].nbytes == 12
    assert "second.bias, 12 bytes, held by" in str(found["second.bias"])
    del held
    gc.collect()
    assert manager.leftovers() == []


def test_a_graph_that_waits_for_its_backward_is_noticed(
    sim_accelerator: SimulatedAccelerator, one_rank: str, caplog: pytest.LogCaptureFixture
) -> None:
    module = normed().to(one_rank)
    manager = PlacementManager(module)
    loss = normed_loss(module, [x.to(one_rank) for x in normed_batch()])
    with caplog.at_level(logging.WARNING):
        manager.offload()
    assert "did not come back" in caplog.records[0].getMessage()
    del loss


def test_a_view_of_a_weight_in_a_plain_attribute_is_the_weights(module: nn.Module) -> None:
    module.second.seen = [module.second.weight.detach()]
    module.second.scratch = torch.ones(4, device=module.second.weight.device)
    found = [finding for finding in explain(module).findings if "plain attributes" in finding.what]
    assert [finding.tensors for finding in found] == [("second.scratch, 16 bytes",)]


def test_parameters_that_are_gathered_are_in_no_plain_attribute(one_rank: str) -> None:
    module = sharded(normed())
    module.unshard()
    assert explain(module).findings == ()
