"""An engine as many are, and a manager put under it without a change to its class.

The engine trains with FSDP2 and offloads by hand between operations. Each of its methods decides
for itself what to move there and back; the first half of this page shows where that goes wrong. In
the second half one line attaches a manager, and the same calls go right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

from placement import IllegalTransition, Placement, PlacementManager


class Engine:
    """Somebody's engine. It is not changed on this page."""

    def __init__(self, device: str, policy: OffloadPolicy) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
        self.model = fully_shard(model, offload_policy=policy)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.device = device

    def to(self, device: str) -> None:
        self.model.to(device)
        for state in self.optimizer.state.values():
            for name, value in state.items():
                state[name] = value.to(device)

    @contextmanager
    def train_mode(self) -> Iterator[None]:
        self.to(self.device)
        self.model.train()
        yield
        self.to("cpu")

    @contextmanager
    def eval_mode(self) -> Iterator[None]:
        self.to(self.device)
        self.model.eval()
        with torch.no_grad():
            yield
        self.to("cpu")

    def step(self, seed: int) -> float:
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed)).to(self.device)
        loss = self.model(x).square().mean()
        if self.model.training:
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return float(loss.detach())

    def save_checkpoint(self, path: Path) -> None:
        self.to(self.device)
        torch.save({"model": self.model.state_dict(), "step": 1}, path)
        self.to("cpu")

    def load_checkpoint(self, path: Path) -> None:
        self.model.load_state_dict(torch.load(path, weights_only=False)["model"])

    def export_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        self.to(self.device)
        for name, weight in self.model.named_parameters():
            yield name, weight.full_tensor().detach().clone()
        self.to("cpu")


def where(engine: Engine) -> set[str]:
    return {parameter.to_local().device.type for parameter in engine.model.parameters()}


@pytest.fixture
def make(process_group: None, placement_device: str) -> Callable[[OffloadPolicy], Engine]:
    def engine(policy: OffloadPolicy) -> Engine:
        return Engine(placement_device, policy)

    return engine


class Interrupted(Exception):
    """Something in an operation fails."""


# As it is.


def test_a_save_inside_a_training_takes_its_model_away(
    make: Callable[[OffloadPolicy], Engine], tmp_path: Path
) -> None:
    engine = make(OffloadPolicy())
    with engine.train_mode():
        engine.step(0)
        engine.save_checkpoint(tmp_path / "checkpoint")
        assert where(engine) == {"cpu"}
        with pytest.raises(RuntimeError):
            engine.step(1)


def test_an_error_leaves_everything_on_the_device(
    make: Callable[[OffloadPolicy], Engine], placement_device: str
) -> None:
    engine = make(OffloadPolicy())
    with pytest.raises(Interrupted), engine.eval_mode():
        raise Interrupted
    assert where(engine) == {placement_device}


def test_under_the_policy_the_first_save_fails_far_from_the_move(
    make: Callable[[OffloadPolicy], Engine], tmp_path: Path
) -> None:
    engine = make(CPUOffloadPolicy())
    with pytest.raises(RuntimeError, match="storage of a tensor on device"):
        engine.save_checkpoint(tmp_path / "checkpoint")


# With a manager under it.


def managed(engine: Engine, rest: Placement | None) -> PlacementManager:
    manager = PlacementManager(engine.model, engine.optimizer, rest=rest)
    manager.attach(engine, export=["export_weights"])
    return manager


@pytest.mark.parametrize(
    ("policy", "rest"),
    [(OffloadPolicy(), Placement.CPU_MANUAL), (CPUOffloadPolicy(), None)],
    ids=["by hand", "policy"],
)
def test_every_call_leaves_what_it_found(
    make: Callable[[OffloadPolicy], Engine],
    tmp_path: Path,
    policy: OffloadPolicy,
    rest: Placement | None,
) -> None:
    engine = make(policy)
    manager = managed(engine, rest)
    found = manager.placements

    with engine.train_mode():
        engine.step(0)
        engine.save_checkpoint(tmp_path / "checkpoint")  # leaves the training alone
        with engine.eval_mode():
            engine.step(1)
        engine.model.train()
        uninterrupted = engine.step(2)
    assert manager.placements == found

    with pytest.raises(Interrupted), engine.eval_mode():
        raise Interrupted
    weights = engine.export_weights()
    next(weights)
    weights.close()
    assert manager.placements == found

    fresh = make(policy)
    managed(fresh, rest)
    fresh.load_checkpoint(tmp_path / "checkpoint")
    with fresh.eval_mode():
        assert fresh.step(2) == uninterrupted


def test_a_move_by_hand_is_guarded_too(
    make: Callable[[OffloadPolicy], Engine], placement_device: str
) -> None:
    engine = make(OffloadPolicy())
    manager = managed(engine, Placement.CPU_MANUAL)
    engine.to(placement_device)
    assert manager.placement is Placement.GPU

    engine = make(CPUOffloadPolicy())
    managed(engine, None)
    with pytest.raises(IllegalTransition, match="CPUOffloadPolicy owns these tensors"):
        engine.to(placement_device)
