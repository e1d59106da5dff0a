"""Faults of verl's stock FSDP engine, each brought about, and the same on a managed engine.

Where a fault was reported in public, its test names the report. Those without one were found by
running the engine on the simulated accelerator. docs/clients.md lists them.
"""

from __future__ import annotations

import errno
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

pytest.importorskip("verl", reason="verl is not installed; make test-clients runs this")

from verl_engines import POLICIES, built, exported, infer, infer_batch, train, train_batch

from placement import (
    Component,
    ContradictoryOptions,
    IllegalTransition,
    NotEnoughMemory,
    Placement,
    PlacementHeld,
    RankLost,
    sim,
)
from placement.tensors import parts
from placement.testing import Ranks, RanksTimedOut

RanksOf = Callable[[int], Ranks]


def pair(model: Path, name: str, **options: Any) -> tuple[Any, Any]:
    """verl's own engine, and the managed one, after the same step."""
    stock = built(model, stock=True, **POLICIES[name], **options)
    managed = built(model, **POLICIES[name], **options)
    assert train(stock, 0) == train(managed, 0)
    return stock, managed


def devices(engine: Any) -> set[str]:
    """Where the bytes of the parameters are."""
    return {
        part.device.type
        for parameter in engine.module.parameters()
        for part in parts(parameter.detach())
    }


def gradients_on(module: nn.Module) -> set[str]:
    return {p.grad.device.type for p in module.parameters() if p.grad is not None}


# Moves under FSDP2's policy.


def move_under_the_policy(model: Path, checkpoint: str) -> None:
    stock, managed = pair(model, "policy")
    stock.to("sim")  # accepted in silence
    for call in (
        lambda: stock.module.state_dict(),
        lambda: stock.save_checkpoint(checkpoint),
        lambda: exported(stock),
    ):
        with pytest.raises(RuntimeError, match="storage of a tensor on device"):
            call()
    with pytest.raises(RuntimeError):
        train(stock, 1)

    with pytest.raises(IllegalTransition, match="CPUOffloadPolicy owns these tensors"):
        managed.to("sim")
    managed.save_checkpoint(checkpoint)
    exported(managed)
    train(managed, 1)


def test_a_move_under_the_policy_is_refused_where_stock_breaks_later(
    ranks: RanksOf, tiny_model: Path, tmp_path: Path
) -> None:
    """https://github.com/verl-project/verl/issues/5995"""
    ranks(1).run(move_under_the_policy, tiny_model, str(tmp_path / "checkpoint"))


def a_flag_is_missing(model: Path, checkpoint: str) -> None:
    stock, managed = pair(model, "policy")
    for engine in (stock, managed):
        engine._uses_fsdp2_cpu_offload_policy = False  # as where a constructor was not called
    with pytest.raises(RuntimeError, match="storage of a tensor on device"):
        stock.save_checkpoint(checkpoint)

    managed.save_checkpoint(checkpoint)
    assert managed.placement.verify()
    train(managed, 1)


def test_who_owns_the_parameters_is_read_from_them_where_stock_asks_a_flag(
    ranks: RanksOf, tiny_model: Path, tmp_path: Path
) -> None:
    """https://github.com/verl-project/verl/pull/6604, https://github.com/verl-project/verl/pull/7103"""
    ranks(1).run(a_flag_is_missing, tiny_model, str(tmp_path / "checkpoint"))


def buffers_after_a_base_export(model: Path) -> None:
    stock, managed = pair(model, "policy", lora_rank=4)
    for engine in (stock, managed):
        assert {buffer.device.type for buffer in engine.module.buffers()} == {"sim"}
        exported(engine, base_sync_done=False)
    assert {buffer.device.type for buffer in stock.module.buffers()} == {"cpu"}

    assert {buffer.device.type for buffer in managed.module.buffers()} == {"sim"}


def test_an_export_of_base_weights_leaves_the_buffers_where_stock_takes_them_away(
    ranks: RanksOf, tiny_model: Path
) -> None:
    ranks(1).run(buffers_after_a_base_export, tiny_model)


# Saves.


def save_inside_a_training(model: Path, checkpoint: str) -> None:
    stock, managed = pair(model, "manual")
    with stock.train_mode():
        train_batch(stock, 1)
        stock.save_checkpoint(checkpoint)
        assert devices(stock) == {"cpu"}
        with pytest.raises(RuntimeError):
            train_batch(stock, 2)

    with managed.train_mode():
        train_batch(managed, 1)
        managed.save_checkpoint(checkpoint)
        assert devices(managed) == {"sim"}
        train_batch(managed, 2)


def test_a_save_leaves_a_training_alone_where_stock_takes_its_model_away(
    ranks: RanksOf, tiny_model: Path, tmp_path: Path
) -> None:
    ranks(1).run(save_inside_a_training, tiny_model, str(tmp_path / "checkpoint"))


def save_after_a_move_by_hand(model: Path, checkpoint: str) -> None:
    stock, managed = pair(model, "none")
    for engine in (stock, managed):
        engine.to("cpu")
        engine.save_checkpoint(checkpoint)
    assert devices(stock) == {"sim"}

    assert devices(managed) == {"cpu"}
    assert set(managed.placement.placements.values()) == {Placement.CPU_MANUAL}


def test_a_save_leaves_parameters_on_the_host_where_stock_brings_them_to_the_device(
    ranks: RanksOf, tiny_model: Path, tmp_path: Path
) -> None:
    """https://github.com/verl-project/verl/pull/4799"""
    ranks(1).run(save_after_a_move_by_hand, tiny_model, str(tmp_path / "checkpoint"))


@contextmanager
def full_disk() -> Iterator[None]:
    """Files written by torch find no space left."""

    def no_space(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "save", no_space)
        yield


def save_to_a_full_disk(model: Path, checkpoint: str) -> None:
    stock, managed = pair(model, "manual")
    for engine in (stock, managed):
        with full_disk(), pytest.raises(OSError, match="No space left"):
            engine.save_checkpoint(checkpoint)
    assert devices(stock) == {"sim"}

    assert devices(managed) == {"cpu"}
    assert train(managed, 1) == train(stock, 1)


def test_a_save_that_fails_leaves_nothing_on_the_device_where_stock_leaves_everything(
    ranks: RanksOf, tiny_model: Path, tmp_path: Path
) -> None:
    ranks(1).run(save_to_a_full_disk, tiny_model, str(tmp_path / "checkpoint"))


# Modes.


def evaluation_inside_a_training(model: Path, name: str) -> None:
    stock, managed = pair(model, name)
    with stock.train_mode():
        train_batch(stock, 1)
        with stock.eval_mode():
            infer_batch(stock, 2)
        assert stock.mode is None
        assert not stock.module.training
        if name == "manual":
            with pytest.raises(RuntimeError):
                train_batch(stock, 3)

    with managed.train_mode():
        train_batch(managed, 1)
        with managed.eval_mode():
            infer_batch(managed, 2)
        assert managed.mode == "train"
        assert managed.module.training
        train_batch(managed, 3)


@pytest.mark.parametrize("name", POLICIES)
def test_an_evaluation_inside_a_training_ends_itself_where_stock_ends_both(
    ranks: RanksOf, name: str, tiny_model: Path
) -> None:
    ranks(1).run(evaluation_inside_a_training, tiny_model, name)


def a_mode_that_may_not_move(model: Path) -> None:
    stock, managed = pair(model, "manual")
    with stock.train_mode(disable_auto_offload=True), pytest.raises(RuntimeError):
        train_batch(stock, 1)  # inside a matrix product

    with (
        pytest.raises(ContradictoryOptions, match=r"params, .*rest in cpu_manual"),
        managed.train_mode(disable_auto_offload=True),
    ):
        pass


def test_a_training_that_may_not_move_is_refused_where_stock_fails_inside_it(
    ranks: RanksOf, tiny_model: Path
) -> None:
    ranks(1).run(a_mode_that_may_not_move, tiny_model)


def memory_runs_out(model: Path) -> None:
    stock, managed = pair(model, "manual")
    for engine in (stock, managed):
        gc.collect()
        torch.accelerator.empty_cache()
        before = torch.accelerator.memory_allocated()
        room = sum(p.numel() * p.element_size() for p in engine.module.parameters()) // 2
        sim.set_capacity(before + room)
        try:
            refusal = (torch.OutOfMemoryError, NotEnoughMemory)
            with pytest.raises(refusal), engine.train_mode():
                pass
        finally:
            sim.set_capacity(None)
        left = torch.accelerator.memory_allocated() - before
        if engine is stock:
            assert devices(engine) == {"cpu", "sim"}
            assert left > 0
        else:
            assert devices(engine) == {"cpu"}
            assert left == 0
            assert engine.mode is None
        engine.to("cpu")


def test_a_model_that_does_not_fit_stays_whole_where_stock_leaves_it_on_two_devices(
    ranks: RanksOf, tiny_model: Path
) -> None:
    ranks(1).run(memory_runs_out, tiny_model)


# Moves by hand.


def move_of_the_optimizer_alone(model: Path) -> None:
    stock, managed = pair(model, "none")
    with pytest.raises(AssertionError, match="Gradient buffers"):
        stock.to("cpu", model=False)

    managed.to("cpu", model=False)
    assert managed.placement.placement is Placement.GPU
    assert managed.placement.placements.get(Component.OPTIMIZER) is Placement.CPU_MANUAL
    train(managed, 1)


def test_the_optimizer_moves_alone_where_stock_asserts(ranks: RanksOf, tiny_model: Path) -> None:
    ranks(1).run(move_of_the_optimizer_alone, tiny_model)


def host_reads_after_an_offload(model: Path) -> None:
    stock, managed = pair(model, "none")
    for engine in (stock, managed):
        torch.accelerator.synchronize()
        engine.to("cpu")
        local = [p.detach().to_local().clone() for p in engine.module.parameters()]
        finite = all(bool(value.isfinite().all()) for value in local)
        assert finite is (engine is managed)


def test_what_was_offloaded_can_be_read_where_stocks_copies_have_not_landed(
    ranks: RanksOf, tiny_model: Path
) -> None:
    ranks(1).run(host_reads_after_an_offload, tiny_model)


def gradients_of_fsdp1(model: Path) -> None:
    for stock in (True, False):
        engine = built(model, stock=stock, strategy="fsdp")
        with engine.train_mode(zero_grad_on_exit=False):
            train_batch(engine, 0)
        assert gradients_on(engine.module) == {"sim"}
        engine.to("cpu")
        assert gradients_on(engine.module) == ({"sim"} if stock else {"cpu"})


def test_gradients_move_with_an_fsdp1_model_where_stock_leaves_them(
    ranks: RanksOf, tiny_model: Path
) -> None:
    ranks(2).run(gradients_of_fsdp1, tiny_model)


# Loads.


def load_while_offloaded(model: Path, checkpoint: str) -> None:
    stock, managed = pair(model, "manual")
    peaks = []
    for number, engine in enumerate((stock, managed)):
        engine.save_checkpoint(f"{checkpoint}{number}")
        gc.collect()
        before = torch.accelerator.memory_allocated()
        torch.accelerator.reset_peak_memory_stats()
        engine.load_checkpoint(f"{checkpoint}{number}")
        peaks.append(torch.accelerator.max_memory_allocated() - before)
    assert peaks[0] > 0
    assert peaks[1] == 0


def test_a_load_while_offloaded_takes_no_device_memory_where_stock_needs_room_for_the_model(
    ranks: RanksOf, tiny_model: Path, tmp_path: Path
) -> None:
    """https://github.com/verl-project/verl/pull/7286"""
    ranks(1).run(load_while_offloaded, tiny_model, str(tmp_path / "checkpoint"))


# Exports.


def weights_that_are_kept(model: Path) -> None:
    stock, managed = pair(model, "none")
    for engine in (stock, managed):
        kept = dict(engine.get_per_tensor_param()[0])
        before = {name: weight.detach().cpu().clone() for name, weight in kept.items()}
        train(engine, 1)
        same = all(
            torch.equal(weight.detach().cpu(), before[name]) for name, weight in kept.items()
        )
        assert same is (engine is managed)


def test_exported_weights_are_the_consumers_where_stocks_change_with_the_next_step(
    ranks: RanksOf, tiny_model: Path
) -> None:
    """https://github.com/verl-project/verl/pull/7139"""
    ranks(1).run(weights_that_are_kept, tiny_model)


def training_while_weights_are_read(model: Path) -> None:
    stock, managed = pair(model, "none")
    name, fresh = "lm_head.weight", exported(stock)["lm_head.weight"]
    reading, _ = stock.get_per_tensor_param()
    next(reading)
    train(stock, 1)
    assert not torch.equal(dict(reading)[name].detach().cpu(), fresh)  # of two steps at once

    reading, _ = managed.get_per_tensor_param()
    next(reading)
    with pytest.raises(PlacementHeld, match=r"context is open \(export"):
        train(managed, 1)
    assert torch.equal(dict(reading)[name].detach().cpu(), fresh)
    train(managed, 1)


def test_training_is_refused_while_weights_are_read_where_stock_mixes_two_steps(
    ranks: RanksOf, tiny_model: Path
) -> None:
    ranks(1).run(training_while_weights_are_read, tiny_model)


def merged_export_that_is_never_read(model: Path) -> None:
    stock, managed = pair(model, "manual", lora_rank=4, merge=True)
    for engine in (stock, managed):
        engine.get_per_tensor_param()
        gc.collect()
    assert devices(stock) == {"sim"}

    assert devices(managed) == {"cpu"}
    assert torch.equal(infer(stock, 1), infer(managed, 1))


def test_an_export_that_is_never_read_moves_nothing_where_stock_leaves_the_model_on_the_device(
    ranks: RanksOf, tiny_model: Path
) -> None:
    ranks(1).run(merged_export_that_is_never_read, tiny_model)


def adapter_of_fsdp1(model: Path) -> None:
    stock = built(model, stock=True, strategy="fsdp", lora_rank=4)
    assert exported(stock, base_sync_done=True) == {}  # the rollout goes on with the base alone

    managed = built(model, strategy="fsdp", lora_rank=4)
    with pytest.raises(ContradictoryOptions, match="peft finds no weights"):
        exported(managed, base_sync_done=True)


def test_an_adapter_that_peft_does_not_find_is_refused_where_stock_exports_nothing(
    ranks: RanksOf, tiny_model: Path
) -> None:
    ranks(1).run(adapter_of_fsdp1, tiny_model)


# Ranks. The last test: it ends the processes of both.


def one_rank_fails_to_save(model: Path, stock: bool, checkpoint: str) -> None:
    engine = built(model, stock=stock, param_offload=True, deadline=4.0)
    if dist.get_rank() == 1:
        with full_disk(), pytest.raises(OSError, match="No space left"):
            engine.save_checkpoint(checkpoint)
    else:
        with pytest.raises((RankLost, RuntimeError)):
            engine.save_checkpoint(checkpoint)
        assert devices(engine) == {"cpu"}


def test_ranks_do_not_wait_for_one_that_failed_to_save_where_stock_waits_for_ever(
    ranks: RanksOf, tiny_model: Path, tmp_path: Path
) -> None:
    ranks(2).run(one_rank_fails_to_save, tiny_model, False, str(tmp_path / "managed"))
    with pytest.raises(RanksTimedOut, match=r"ranks \[0\] of 2 had not finished"):
        ranks(2).run(
            one_rank_fails_to_save, tiny_model, True, str(tmp_path / "stock"), deadline=25.0
        )
