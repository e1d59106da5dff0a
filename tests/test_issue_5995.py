"""A move by hand under CPUOffloadPolicy, in plain torch and through the manager.

https://github.com/verl-project/verl/issues/5995
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from models import adam, normed, normed_batch, normed_engine, normed_loss, policy, sharded

from engine import Offload
from placement import EventKind, IllegalTransition, Placement, PlacementManager, Trace


def test_plain_torch_accepts_the_move_and_crashes_in_state_dict(one_rank: str) -> None:
    module = sharded(normed(), policy(pin_memory=True))
    module.to(one_rank)  # accepted in silence
    parameter = next(module.parameters())
    assert parameter.device.type == one_rank
    assert parameter.to_local().device.type == "cpu"
    message = (
        'Attempted to set the storage of a tensor on device "cpu" to a storage on different '
        f'device "{one_rank}:0"'
    )
    with pytest.raises(RuntimeError, match=re.escape(message)):
        module.state_dict()


def test_plain_torch_without_pinning_fails_only_in_backward(one_rank: str) -> None:
    module = sharded(normed(), policy(pin_memory=False))
    normed_loss(module, [x.to(one_rank) for x in normed_batch()]).backward()
    module.to(one_rank)
    module.state_dict()  # nothing complains
    with pytest.raises(RuntimeError):
        normed_loss(module, [x.to(one_rank) for x in normed_batch()]).backward()


def test_the_manager_refuses_the_move_at_the_call_and_says_why(one_rank: str, trace: Trace) -> None:
    module = sharded(normed(), policy())
    manager = PlacementManager(module, adam(module.parameters()), trace=trace)
    with pytest.raises(IllegalTransition, match="CPUOffloadPolicy owns these tensors") as caught:
        manager.onload()
    assert caught.value.asked == "onload()"
    assert "cpu_fsdp2_managed" in caught.value.state
    assert "first.weight (param) on cpu" in caught.value.tensors
    assert "without an offload_policy" in caught.value.instead
    assert [event.kind for event in trace] == [EventKind.REFUSAL]
    module.state_dict()  # nothing was moved, so nothing is broken


@pytest.mark.parametrize("phase", ["before training", "after a step", "inside train_mode"])
def test_save_and_the_next_step_work_with_one_operation_and_no_move(
    one_rank: str, trace: Trace, tmp_path: Path, phase: str
) -> None:
    engine = normed_engine(Offload.POLICY, trace)
    assert engine.manager.placement is Placement.CPU_FSDP2_MANAGED
    if phase != "before training":
        engine.train_batch(normed_batch(0))
    known = len(trace)
    if phase == "inside train_mode":
        with engine.train_mode():
            engine.save_checkpoint(tmp_path / "checkpoint")
            saved = [event for event in list(trace)[known:] if event.name == "save"]
            engine.train_batch(normed_batch(1))
    else:
        engine.save_checkpoint(tmp_path / "checkpoint")
        saved = [event for event in list(trace)[known:] if event.name == "save"]
        engine.train_batch(normed_batch(1))
    operations = [event for event in saved if event.kind is EventKind.OPERATION]
    assert [(event.mode, event.source, event.dest) for event in operations] == [
        ("in_place", "cpu_fsdp2_managed", "cpu_fsdp2_managed")
    ]
    assert not [event for event in saved if event.kind is EventKind.TRIGGER]
    assert trace.moves() == []
    assert torch.isfinite(torch.tensor(engine.train_batch(normed_batch(2)).loss))
