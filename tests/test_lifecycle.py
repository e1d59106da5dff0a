"""The engine's operations leave the placement and the values they found, on one rank and on two."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from models import (
    adam,
    assert_equal,
    byte_batch,
    byte_engine,
    normed,
    normed_batch,
    normed_engine,
    normed_loss,
    values,
    whereabouts,
)
from torch import nn

from engine import FSDPEngine, Offload
from placement import Component, EventKind, Outcome, Placement, PlacementHeld, Trace

AT_REST = {
    Offload.NONE: Placement.GPU,
    Offload.MANUAL: Placement.CPU_MANUAL,
    Offload.POLICY: Placement.CPU_FSDP2_MANAGED,
}

Body = Callable[..., object]


def shared_directory() -> Path:
    """A new directory that all ranks know."""
    paths = [tempfile.mkdtemp(prefix="checkpoint-") if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(paths)
    return Path(paths[0])


def own_part(batch: list[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.chunk(dist.get_world_size())[dist.get_rank()] for tensor in batch]


# A save leaves what it found.


def save_leaves_what_it_found(offload: Offload, situation: str) -> None:
    engine = normed_engine(offload)
    engine.train_batch(own_part(normed_batch(0)))
    checkpoint = shared_directory() / "checkpoint"

    def save() -> None:
        accumulate_gradients(engine)
        found, before = whereabouts(engine.manager), values(engine.manager.census())
        placements = engine.manager.placements
        assert any(name.startswith("grad ") for name in found)
        assert any(name.startswith("buffer ") for name in found)
        assert any(name.startswith("optimizer ") for name in found)
        engine.save_checkpoint(checkpoint)
        assert engine.manager.placements == placements
        assert whereabouts(engine.manager) == found
        assert_equal(values(engine.manager.census()), before)
        engine.optimizer.zero_grad()

    if situation == "outside a mode":
        save()
        assert engine.manager.placement is AT_REST[offload]
    elif situation == "inside train_mode":
        with engine.train_mode():
            engine.train_batch(own_part(normed_batch(1)))
            save()
            engine.train_batch(own_part(normed_batch(2)))
    elif situation == "inside eval_mode":
        with engine.eval_mode():
            save()
    else:
        engine.manager.offload()
        save()
        assert engine.manager.placement is Placement.CPU_MANUAL
    engine.train_batch(own_part(normed_batch(3)))


def accumulate_gradients(engine: FSDPEngine) -> None:
    """Leave gradients behind, as a step that is split over two contexts does."""
    with engine.manager.training():
        device = engine.manager.device
        batch = [x.to(device) for x in own_part(normed_batch(9))]
        with torch.enable_grad():
            normed_loss(engine.module, batch).backward()


@pytest.mark.parametrize(
    ("offload", "situation"),
    [
        (offload, situation)
        for offload in Offload
        for situation in (
            "outside a mode",
            "inside train_mode",
            "inside eval_mode",
            "after an offload by hand",
        )
        if (offload, situation) != (Offload.POLICY, "after an offload by hand")  # refused: below
    ],
)
def test_a_save_leaves_the_placement_and_the_values_it_found(
    on_ranks: Callable[..., None], offload: Offload, situation: str
) -> None:
    on_ranks(save_leaves_what_it_found, offload, situation)


def test_a_save_under_the_manual_policy_moves_nothing(one_rank: str, tmp_path: Path) -> None:
    trace = Trace()
    engine = normed_engine(Offload.MANUAL, trace)
    engine.train_batch(normed_batch(0))
    known = len(trace.moves())
    engine.save_checkpoint(tmp_path / "checkpoint")
    assert trace.moves()[known:] == []
    saves = [(e.kind.value, e.source, e.dest) for e in trace if e.name == "save"]
    assert saves == [
        (kind, "cpu_manual", "cpu_manual") for kind in ("enter", "trigger", "operation")
    ]


# Training is the same wherever the model rests.


def training_equals_the_twin(offload: Offload) -> None:
    engine = normed_engine(offload)
    twin = normed()
    # BatchNorm sees this rank's part of the batch only, so the twin sees the same part twice.
    twin_optimizer = adam(twin.parameters())
    part = normed_batch(0)[0].chunk(2)[0]
    for step in range(4):
        result = engine.train_batch([part])
        loss = normed_loss(twin, [part])
        loss.backward()
        norm = nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
        twin_optimizer.step()
        twin_optimizer.zero_grad()
        assert result.loss == pytest.approx(loss.item(), rel=1e-5), step
        assert result.grad_norm == pytest.approx(norm.item(), rel=1e-5), step
        assert engine.manager.placement is AT_REST[offload]
    for name, buffer in twin.named_buffers():
        torch.testing.assert_close(dict(engine.module.named_buffers())[name].cpu(), buffer)


@pytest.mark.parametrize("offload", Offload)
def test_losses_and_gradient_norms_equal_those_of_a_plain_cpu_twin(
    on_ranks: Callable[..., None], offload: Offload
) -> None:
    on_ranks(training_equals_the_twin, offload)


def resumed_run_equals_uninterrupted(offload: Offload) -> None:
    checkpoint = shared_directory() / "checkpoint"
    engine = byte_engine(offload)
    for step in range(2):
        engine.train_batch(own_part(byte_batch(step)))
    engine.save_checkpoint(checkpoint)
    resumed = byte_engine(offload)
    resumed.load_checkpoint(checkpoint)
    assert resumed.steps == 2
    assert resumed.manager.placement is AT_REST[offload]
    assert_equal(values(engine.manager.census()), values(resumed.manager.census()))
    for step in range(2, 4):
        batch = own_part(byte_batch(step))
        assert engine.train_batch(batch) == resumed.train_batch(batch)
    assert_equal(values(engine.manager.census()), values(resumed.manager.census()))


@pytest.mark.parametrize("offload", Offload)
def test_a_resumed_run_equals_the_uninterrupted_one_to_the_bit(
    on_ranks: Callable[..., None], offload: Offload
) -> None:
    on_ranks(resumed_run_equals_uninterrupted, offload)


def tied_weights_stay_tied(offload: Offload) -> None:
    engine = byte_engine(offload)
    names = [name for name, _ in engine.module.named_parameters()]
    for step in range(2):
        engine.train_batch(own_part(byte_batch(step)))
        assert engine.module.head.weight is engine.module.embedding.weight
        assert [name for name, _ in engine.module.named_parameters()] == names


@pytest.mark.parametrize("offload", Offload)
def test_tied_weights_stay_tied(on_ranks: Callable[..., None], offload: Offload) -> None:
    on_ranks(tied_weights_stay_tied, offload)


# Contexts.


@pytest.mark.parametrize("offload", Offload)
@pytest.mark.parametrize("context", ["training", "evaluating", "saving", "loading", "exporting"])
def test_a_context_leaves_what_it_found_also_after_an_error(
    one_rank: str, offload: Offload, context: str
) -> None:
    engine = normed_engine(offload)
    engine.train_batch(normed_batch(0))
    found = whereabouts(engine.manager)
    enter = getattr(engine.manager, context)
    with enter():
        pass
    assert whereabouts(engine.manager) == found
    with pytest.raises(ZeroDivisionError), enter():
        raise ZeroDivisionError
    assert whereabouts(engine.manager) == found
    last = list(engine.manager.trace)[-1]
    assert (last.kind, last.outcome) == (EventKind.OPERATION, Outcome.FAILED)


def test_evaluating_leaves_the_optimizer_where_it_is(one_rank: str) -> None:
    engine = normed_engine(Offload.MANUAL)
    engine.train_batch(normed_batch(0))
    with engine.eval_mode():
        assert engine.manager.placement is Placement.GPU
        assert engine.manager.placements.get(Component.OPTIMIZER) is Placement.CPU_MANUAL
        engine.manager.verify()


def test_an_evaluation_inside_training_takes_nothing_from_it(one_rank: str) -> None:
    engine = normed_engine(Offload.MANUAL)
    with engine.train_mode():
        engine.train_batch(normed_batch(0))
        engine.eval_batch(normed_batch(1))
        assert engine.module.training
        engine.train_batch(normed_batch(2))
        assert engine.manager.placement is Placement.GPU
    assert engine.manager.placement is Placement.CPU_MANUAL


def test_a_move_by_hand_is_what_later_contexts_find_and_restore(one_rank: str) -> None:
    engine = normed_engine(Offload.NONE)
    engine.manager.offload()
    engine.train_batch(normed_batch(0))
    assert engine.manager.placement is Placement.CPU_MANUAL
    engine.manager.onload()
    engine.train_batch(normed_batch(1))
    assert engine.manager.placement is Placement.GPU


def test_moving_what_is_there_already_is_no_move(one_rank: str, trace: Trace) -> None:
    engine = normed_engine(Offload.NONE, trace)
    engine.manager.onload()
    engine.manager.onload()
    assert len(trace) == 0
    engine.manager.offload()
    known = len(trace)
    engine.manager.offload()
    assert len(trace) == known


def test_a_move_against_an_open_context_is_refused_with_its_call_site(one_rank: str) -> None:
    engine = normed_engine(Offload.NONE)
    with (
        engine.manager.training(),
        pytest.raises(PlacementHeld, match=r"train, entered at .*test_lifecycle\.py:\d+"),
    ):
        engine.manager.offload()
    engine.manager.offload()


def test_a_context_that_ends_out_of_order_takes_nothing_from_the_one_above(
    one_rank: str,
) -> None:
    manager = normed_engine(Offload.MANUAL).manager
    outer, inner = manager.evaluating(), manager.evaluating()
    outer.__enter__()
    inner.__enter__()
    outer.__exit__(None, None, None)
    assert manager.placement is Placement.GPU
    inner.__exit__(None, None, None)
    assert manager.placement is Placement.CPU_MANUAL


# Loading.


def load_puts_tensors_where_the_record_says(saved: Offload, loaded: Offload) -> None:
    checkpoint = shared_directory() / "checkpoint"
    engine = normed_engine(saved)
    engine.train_batch(normed_batch(0))  # the same on all ranks, and so BatchNorm's buffers
    engine.save_checkpoint(checkpoint)
    other = normed_engine(loaded)
    other.load_checkpoint(checkpoint)
    other.manager.verify()
    assert other.manager.placement is AT_REST[loaded]
    assert other.manager.placements.get(Component.OPTIMIZER) is AT_REST[loaded]
    assert_equal(values(engine.manager.census()), values(other.manager.census()))
    other.train_batch(own_part(normed_batch(1)))


@pytest.mark.parametrize("saved", Offload)
@pytest.mark.parametrize("loaded", Offload)
def test_a_load_ends_in_the_present_placement_whatever_was_saved(
    on_ranks: Callable[..., None], saved: Offload, loaded: Offload
) -> None:
    on_ranks(load_puts_tensors_where_the_record_says, saved, loaded)


def test_optimizer_state_installed_elsewhere_by_a_load_is_put_right(
    one_rank: str, trace: Trace
) -> None:
    engine = normed_engine(Offload.MANUAL, trace)
    engine.train_batch(normed_batch(0))
    found = whereabouts(engine.manager)
    with engine.manager.loading():
        for state in engine.optimizer.state.values():
            state["exp_avg"] = state["exp_avg"].to(one_rank)
    assert whereabouts(engine.manager) == found
    assert trace.moves()[-1].name == "load"
    engine.train_batch(normed_batch(1))
