"""``placement convert``: torch's checkpoints become ours, if who wrote them is trusted."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from models import assert_equal
from torch.distributed.checkpoint.state_dict import get_state_dict
from training import plain_manager, stepped, whole_state
from typer.testing import CliRunner, Result

from engine import Offload
from placement import CheckpointError, Checkpoints, PlacementManager
from placement.checkpoint import convert
from placement.cli import app
from placement.testing import Ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def command(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["convert", *map(str, arguments)])


def torchs(manager: PlacementManager, directory: Path, **more: Any) -> None:
    """Save as engines do with torch's own functions."""
    assert manager.optimizer is not None
    model, optimizer = get_state_dict(manager.module, manager.optimizer)
    dcp.save({"model": model, "optimizer": optimizer, **more}, checkpoint_id=directory)


def test_a_converted_checkpoint_loads_exactly(device_type: str, tmp_path: Path) -> None:
    first = stepped(plain_manager())
    data = {"place": torch.arange(3), "seen": [{"file": "a", "at": (1, 2)}, {"file": "b"}]}
    torchs(first, tmp_path / "torchs", steps=12, data=data)
    result = command(tmp_path / "torchs", tmp_path / "ours", "--trust-pickle")
    assert result.exit_code == 0, result.output
    assert "added step 12" in result.output
    second = plain_manager()
    loaded = Checkpoints(tmp_path / "ours", second).load()
    assert_equal(whole_state(second), whole_state(first))
    assert (loaded.step, loaded.random_state) == (12, False)
    assert torch.equal(loaded.extras["data"].pop("place"), torch.arange(3))
    assert loaded.extras == {"data": {"seen": data["seen"]}}


def save_with_torch(directory: Path) -> dict[str, torch.Tensor]:
    from training import dropping_engine

    engine = dropping_engine(Offload.POLICY)
    engine.train_batch([torch.ones(4, 6)])
    with engine.manager.saving():
        torchs(engine.manager, directory)
    return whole_state(engine.manager)


def test_shards_of_several_ranks_are_converted(two_ranks: Ranks, tmp_path: Path) -> None:
    expected, _ = two_ranks.run(save_with_torch, tmp_path / "torchs")
    assert convert(tmp_path / "torchs", tmp_path / "ours", step=1) == 1
    manager = plain_manager()
    Checkpoints(tmp_path / "ours", manager).load()
    assert_equal(whole_state(manager), expected)


def test_without_trust_nothing_is_read(tmp_path: Path) -> None:
    marker, source = tmp_path / "was-executed", tmp_path / "torchs"

    class Hostile:
        def __reduce__(self) -> tuple[object, ...]:
            return Path.touch, (marker,)

    source.mkdir()
    (source / ".metadata").write_bytes(pickle.dumps(Hostile()))
    result = command(source, tmp_path / "ours", "--step", 1)
    assert result.exit_code == 2
    assert ".metadata" in result.output
    assert "--trust-pickle" in result.output
    assert not marker.exists()
    assert not (tmp_path / "ours").exists()
    command(source, tmp_path / "ours", "--step", 1, "--trust-pickle")
    assert marker.exists()  # what the option means


def test_what_can_not_be_converted_is_refused(device_type: str, tmp_path: Path) -> None:
    manager = stepped(plain_manager())
    torchs(manager, tmp_path / "no step")
    with pytest.raises(CheckpointError, match="no training step"):
        convert(tmp_path / "no step", tmp_path / "ours")
    dcp.save({"weights": torch.zeros(2), "step": 1}, checkpoint_id=tmp_path / "no model")
    with pytest.raises(CheckpointError, match="it has weights, and no model"):
        convert(tmp_path / "no model", tmp_path / "ours")
    torchs(manager, tmp_path / "objects", step=1, config=Path("of a class"))
    with pytest.raises(CheckpointError, match=r"extras/config: pathlib"):
        convert(tmp_path / "objects", tmp_path / "ours")
    (tmp_path / "nothing").mkdir()
    result = command(tmp_path / "nothing", tmp_path / "ours", "--trust-pickle")
    assert result.exit_code == 2
    assert "torch can't read it" in result.output
    assert not (tmp_path / "ours").exists()
