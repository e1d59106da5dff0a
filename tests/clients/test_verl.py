"""verl's own FSDP engines under a manager, beside the same engines without one.

Run by ``make test-clients``, which installs verl into an environment of its own.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

pytest.importorskip("verl", reason="verl is not installed; make test-clients runs this")

from verl_engines import (
    POLICIES,
    batch,
    built,
    exported,
    infer,
    infer_batch,
    train,
    train_batch,
)

from placement import (
    Component,
    ContradictoryOptions,
    IllegalTransition,
    OwnershipUnclear,
    Placement,
)
from placement.testing import Ranks

RanksOf = Callable[[int], Ranks]

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    **POLICIES,
    "parameters": {"param_offload": True},
    "optimizer": {"optimizer_offload": True},
    "bf16": {"param_offload": True, "optimizer_offload": True, "param_dtype": "bf16"},
    "every flag": {"param_offload": True, "optimizer_offload": True, "offload_policy": True},
    "fsdp": {"strategy": "fsdp"},
    "fsdp, manual": {"strategy": "fsdp", "param_offload": True, "optimizer_offload": True},
}
ON_DEVICE, BY_HAND, MANAGED = "gpu", "cpu_manual", "cpu_fsdp2_managed"
RESTS = {
    "none": (ON_DEVICE, ON_DEVICE),
    "manual": (BY_HAND, BY_HAND),
    "policy": (MANAGED, MANAGED),
    "parameters": (BY_HAND, ON_DEVICE),
    "optimizer": (ON_DEVICE, BY_HAND),
    "bf16": (BY_HAND, BY_HAND),
    "every flag": (MANAGED, MANAGED),
    "fsdp": (ON_DEVICE, ON_DEVICE),
    "fsdp, manual": (BY_HAND, BY_HAND),
}
"""Where the parameters and the optimizer's state are between operations."""

sizes = pytest.mark.parametrize("size", [1, 2], ids=["1 rank", "2 ranks"])


def look(engine: Any) -> Any:
    """What every call has to leave as it found it; the tensors are compared with the record."""
    engine.placement.verify()
    return engine.placement.placements, engine.mode, engine.module.training


def weights(engine: Any) -> dict[str, torch.Tensor]:
    """Every weight in full, read past verl's and our own export."""
    with engine.eval_mode():
        options = StateDictOptions(full_state_dict=True, cpu_offload=False)
        state = get_model_state_dict(engine.module, options=options)
        return {name: value.cpu() for name, value in state.items()}


def assert_same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert torch.equal(value, right[name]), name


# The whole lifecycle.


def whole_lifecycle(model: Path, name: str, checkpoint: str) -> None:
    engine = built(model, **CONFIGURATIONS[name])
    stock = built(model, stock=True, **CONFIGURATIONS[name])
    parameters, optimizer = RESTS[name]
    assert engine.placement.placement.value == parameters
    assert engine.placement.placements[Component.OPTIMIZER].value == optimizer
    found = look(engine)
    for step in range(2):
        assert train(engine, step) == train(stock, step)
        assert look(engine) == found
    assert torch.equal(infer(engine, 2), infer(stock, 2))
    assert look(engine) == found
    assert_same(exported(engine), weights(stock))
    assert look(engine) == found

    engine.save_checkpoint(checkpoint, global_step=2)
    assert look(engine) == found
    uninterrupted = [train(engine, step) for step in (2, 3)], weights(engine)
    engine.load_checkpoint(checkpoint)
    assert look(engine) == found
    resumed = [train(engine, step) for step in (2, 3)], weights(engine)
    assert resumed[0] == uninterrupted[0] == [train(stock, step) for step in (2, 3)]
    assert_same(resumed[1], uninterrupted[1])


@sizes
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_it_trains_saves_resumes_and_exports_what_the_stock_engine_does(
    ranks: RanksOf, size: int, name: str, tiny_model: Path, tmp_path: Path
) -> None:
    ranks(size).run(whole_lifecycle, tiny_model, name, str(tmp_path / "checkpoint"))


# Errors.


class Broken(Exception):
    pass


def breaks(*args: Any, **kwargs: Any) -> Any:
    raise Broken


def consume(engine: Any, rollout: Callable[[str, torch.Tensor], None]) -> None:
    for name, weight in engine.get_per_tensor_param()[0]:
        rollout(name, weight)


def everything_fails(model: Path, name: str, file: str, truncated: str) -> None:
    engine, undisturbed = (built(model, **CONFIGURATIONS[name]) for _ in range(2))
    assert train(engine, 0) == train(undisturbed, 0)
    found = look(engine)
    with pytest.raises(Broken), engine.train_mode():
        engine.train_batch(batch(1), breaks)  # after its forward pass
    assert look(engine) == found
    with pytest.raises(Broken), engine.eval_mode():
        engine.infer_batch(batch(1), breaks)
    assert look(engine) == found
    with pytest.raises(FileExistsError):
        engine.save_checkpoint(file)
    assert look(engine) == found
    with pytest.raises(EOFError):
        engine.load_checkpoint(truncated)
    assert look(engine) == found
    with pytest.raises(Broken):
        consume(engine, breaks)
    gc.collect()
    assert look(engine) == found
    assert train(engine, 2) == train(undisturbed, 2)


@sizes
@pytest.mark.parametrize("name", ["none", "manual", "policy", "fsdp, manual"])
def test_every_call_leaves_the_placement_that_it_found_when_it_fails(
    ranks: RanksOf, size: int, name: str, tiny_model: Path, tmp_path: Path
) -> None:
    file = tmp_path / "a file"
    file.touch()
    for rank in range(size):
        (tmp_path / f"model_world_size_{size}_rank_{rank}.pt").touch()
    ranks(size).run(everything_fails, tiny_model, name, str(file), str(tmp_path))


def dropped_exports(model: Path, name: str) -> None:
    engine = built(model, lora_rank=4, merge=True, **CONFIGURATIONS[name])
    undisturbed = built(model, lora_rank=4, merge=True, **CONFIGURATIONS[name])
    assert train(engine, 0) == train(undisturbed, 0)
    found = look(engine)
    exports = [engine.get_per_tensor_param, engine.get_per_tensor_param_shard]
    for export in exports:
        export()  # never begun
        assert look(engine) == found
        begun, _ = export()
        for _ in range(5):
            next(begun)
        begun.close()
        assert look(engine) == found
        dropped, _ = export()
        next(dropped)
        del dropped
        gc.collect()
        assert look(engine) == found
    assert train(engine, 1) == train(undisturbed, 1)


@sizes
@pytest.mark.parametrize("name", ["none", "manual", "policy"])
def test_an_export_that_is_dropped_leaves_no_trace(
    ranks: RanksOf, size: int, name: str, tiny_model: Path
) -> None:
    ranks(size).run(dropped_exports, tiny_model, name)


# Moves by hand, and modes that may not move.


def moves_by_hand(model: Path, name: str) -> None:
    engine = built(model, **CONFIGURATIONS[name])
    train(engine, 0)
    for part in ("model", "optimizer"):
        others = {"model": False, "optimizer": False, "grad": False} | {part: True}
        engine.to("cpu", **others)
        engine.placement.verify()
        engine.to("sim", **others)
    assert set(engine.placement.placements.values()) == {Placement.GPU}
    engine.to("cpu")
    assert set(engine.placement.placements.values()) == {Placement.CPU_MANUAL}
    for mode in (engine.train_mode, engine.eval_mode):
        with (
            pytest.raises(ContradictoryOptions, match="disable_auto_offload"),
            mode(disable_auto_offload=True),
        ):
            pass
    engine.to("sim")
    found = look(engine)
    with engine.train_mode(disable_auto_offload=True):
        train_batch(engine, 1)
    assert look(engine) == found
    assert set(found[0].values()) == {Placement.GPU}


@pytest.mark.parametrize("name", ["none", "manual", "fsdp, manual"])
def test_what_is_moved_by_hand_stays_there_and_a_mode_without_moves_needs_it_there(
    ranks: RanksOf, name: str, tiny_model: Path
) -> None:
    ranks(2).run(moves_by_hand, tiny_model, name)


def nested_modes(model: Path, name: str, checkpoint: str) -> None:
    engine, plain = (built(model, **CONFIGURATIONS[name]) for _ in range(2))
    found = look(engine)
    with engine.train_mode():
        first = train_batch(engine, 0)
        with engine.eval_mode():
            assert engine.mode == "eval"
            assert not engine.module.training
            evaluated = infer_batch(engine, 1)
        assert engine.mode == "train"
        assert engine.module.training
        engine.save_checkpoint(checkpoint, global_step=1)
        with engine.train_mode(disable_auto_offload=True):  # as verl's mini-batches do
            second = train_batch(engine, 2)
        third = train_batch(engine, 3)
    assert look(engine) == found
    assert first == train(plain, 0)
    assert torch.equal(evaluated, infer(plain, 1))
    assert [second, third] == [train(plain, 2), train(plain, 3)]


@pytest.mark.parametrize("name", ["none", "manual", "policy", "fsdp, manual"])
def test_modes_and_a_save_nest_in_a_training(
    ranks: RanksOf, name: str, tiny_model: Path, tmp_path: Path
) -> None:
    ranks(2).run(nested_modes, tiny_model, name, str(tmp_path / "checkpoint"))


# Adapters.


def adapters(model: Path, name: str, merge: bool) -> None:
    config = CONFIGURATIONS[name] | {"lora_rank": 4, "merge": merge}
    engine, stock = built(model, **config), built(model, stock=True, **config)
    found = look(engine)
    assert [train(engine, step) for step in (0, 1)] == [train(stock, step) for step in (0, 1)]
    assert_same(exported(engine), exported(stock))
    if merge:
        assert engine.get_per_tensor_param()[1] is None
    else:
        if name.startswith("fsdp"):  # stock exports nothing, see test_verl_faults.py
            with pytest.raises(ContradictoryOptions, match="peft finds no weights"):
                exported(engine, base_sync_done=True)
        else:
            assert_same(exported(engine, base_sync_done=True), exported(stock, base_sync_done=True))
        ours, theirs = (each.get_per_tensor_param()[1] for each in (engine, stock))
        assert ours == theirs
        assert ours["r"] == 4
    assert look(engine) == found
    assert train(engine, 2) == train(stock, 2)


@sizes
@pytest.mark.parametrize("merge", [False, True], ids=["apart", "merged"])
@pytest.mark.parametrize("name", ["none", "manual", "policy", "fsdp, manual"])
def test_an_adapter_is_exported_apart_and_merged(
    ranks: RanksOf, size: int, name: str, merge: bool, tiny_model: Path
) -> None:
    ranks(size).run(adapters, tiny_model, name, merge)


def quantized_adapter(model: Path) -> None:
    engine = built(model, lora_rank=4)
    engine._qat_enabled = True
    with pytest.raises(ContradictoryOptions, match="quantization-aware"):
        engine.get_per_tensor_param()


def test_base_weights_that_verl_would_quantize_are_not_exported_as_they_are(
    ranks: RanksOf, tiny_model: Path
) -> None:
    ranks(1).run(quantized_adapter, tiny_model)


# Shards.


def shards(model: Path, name: str) -> None:
    engine = built(model, **CONFIGURATIONS[name])
    stock = built(model, stock=True, **CONFIGURATIONS[name])
    found = look(engine)
    for each in (engine, stock):
        train(each, 0)
        each.prime_delta_snapshots()
    ours, theirs = (
        {shard_name: shard.cpu() for shard_name, shard, _ in each.get_per_tensor_param_shard()[0]}
        for each in (engine, stock)
    )
    assert_same(ours, theirs)
    for each in (engine, stock):
        train(each, 1)
    changed = [list(each.get_per_tensor_param_delta_shard()[0]) for each in (engine, stock)]
    assert [entry[0] for entry in changed[0]] == [entry[0] for entry in changed[1]]
    assert all(torch.equal(mine[4], his[4]) for mine, his in zip(*changed))
    assert sum(len(entry[4]) for entry in changed[0]) > 0
    assert look(engine) == found


@sizes
@pytest.mark.parametrize("name", ["none", "manual", "policy"])
def test_shards_and_what_changed_in_them_are_exported(
    ranks: RanksOf, size: int, name: str, tiny_model: Path
) -> None:
    ranks(size).run(shards, tiny_model, name)


# Other kinds of model.


def square_of_values(config: Any, model_output: Any, data: Any, dp_group: Any = None) -> Any:
    return model_output["values"].values().square().mean(), {}


def value_model(model: Path, name: str) -> None:
    engine, stock = (
        built(model, model_type="value_model", stock=stock, **CONFIGURATIONS[name])
        for stock in (False, True)
    )
    found = look(engine)
    outputs = []
    for each in (engine, stock):
        with each.train_mode():
            out = each.train_batch(batch(0), lambda **kwargs: square_of_values(None, **kwargs))
            outputs.append((out["loss"], out["metrics"]["grad_norm"]))
        with each.eval_mode():
            values = each.infer_batch(batch(1), None)["model_output"]["values"]
            outputs[-1] += (values.values().cpu().tolist(),)
    assert outputs[0] == outputs[1]
    assert look(engine) == found


@pytest.mark.parametrize("name", ["none", "manual", "policy"])
def test_a_value_model_trains_as_the_stock_engine_does(
    ranks: RanksOf, name: str, tiny_model: Path
) -> None:
    ranks(2).run(value_model, tiny_model, name)


def reference_model(model: Path) -> None:
    engine = built(model, forward_only=True)
    stock = built(model, stock=True, forward_only=True)
    found = look(engine)
    assert engine.placement.placement is Placement.CPU_FSDP2_MANAGED
    assert torch.equal(infer(engine, 0), infer(stock, 0))
    assert_same(exported(engine), exported(stock))
    with pytest.raises(IllegalTransition, match="CPUOffloadPolicy"):
        engine.to("sim")
    assert look(engine) == found


@sizes
def test_a_reference_model_is_fsdp2s_to_move(ranks: RanksOf, size: int, tiny_model: Path) -> None:
    ranks(size).run(reference_model, tiny_model)


def reference_model_of_fsdp1(model: Path) -> None:
    with pytest.raises(OwnershipUnclear, match="FSDP1's CPUOffload"):
        built(model, strategy="fsdp", forward_only=True)


def test_a_reference_model_under_fsdp1_is_refused_when_it_is_built(
    ranks: RanksOf, tiny_model: Path
) -> None:
    ranks(1).run(reference_model_of_fsdp1, tiny_model)
