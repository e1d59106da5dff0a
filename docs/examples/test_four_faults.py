"""Four faults that tests of a training engine should catch, and how little it takes.

Each fault is planted here, in plain torch, and the assertion that catches it is shown catching it.
In a test of your own only the lines inside ``pytest.raises`` remain. The fixtures come with
this project's ``testing`` extra (README); no GPU is needed.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

from placement import Placement, PlacementManager
from placement.testing import assert_placement, assert_round_trip


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(tokens))


@pytest.mark.usefixtures("process_group")
def test_catches_a_move_under_the_offload_policy(placement_device: str) -> None:
    model = fully_shard(Tied(), offload_policy=CPUOffloadPolicy())
    model.to(placement_device)
    with pytest.raises(AssertionError, match="its bytes are on cpu"):
        assert_placement(model, Placement.CPU_FSDP2_MANAGED)


def offload_that_loses_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.cpu()
        parameter.grad = None


def test_catches_a_lost_gradient(placement_device: str) -> None:
    model = Tied().to(placement_device)
    model(torch.arange(4, device=placement_device)).sum().backward()
    with pytest.raises(AssertionError, match=r"grad embedding\.weight: is gone"):
        with assert_round_trip(model):
            offload_that_loses_gradients(model)
            model.to(placement_device)


def offload_that_unties(model: nn.Module) -> None:
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(parameter.data.cpu()))


def test_catches_an_untied_weight(placement_device: str) -> None:
    model = Tied().to(placement_device)
    with pytest.raises(AssertionError, match="shares its bytes with others than before"):
        with assert_round_trip(model):
            offload_that_unties(model)
            model.to(placement_device)


def evaluate_without_putting_back(model: nn.Module, device: str) -> None:
    model.to(device)
    model(torch.arange(4, device=device))


def test_catches_a_context_that_does_not_restore(placement_device: str) -> None:
    model = Tied()
    with pytest.raises(AssertionError, match=r"device was cpu, is \w+:0"):
        with assert_round_trip(model):
            evaluate_without_putting_back(model, placement_device)


def test_the_manager_has_none_of_these_faults(placement_device: str) -> None:
    model = Tied()
    manager = PlacementManager(model)
    with assert_round_trip(model), manager.evaluating():
        model(torch.arange(4, device=placement_device))
    assert_placement(model, Placement.CPU_MANUAL)
