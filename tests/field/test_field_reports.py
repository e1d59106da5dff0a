"""Faults reported in public, and what happens here instead. The ids are those of reports.json."""

from __future__ import annotations

import copy
import gc
from pathlib import Path

import pytest
import torch
from models import (
    adam,
    assert_equal,
    byte_engine,
    normed,
    normed_batch,
    normed_engine,
    normed_loss,
    policy,
    sharded,
    values,
    whereabouts,
)
from table import table
from torch import nn
from torch.distributed.fsdp import OffloadPolicy

from engine import Offload
from placement import (
    ContradictoryOptions,
    ForeignOptimizer,
    IllegalTransition,
    OwnershipUnclear,
    Placement,
    PlacementManager,
    ScatteredModule,
    Trace,
)

field_report = pytest.mark.field_report


def step(
    module: nn.Module, optimizer: torch.optim.Optimizer, device: str, number: int = 0
) -> float:
    loss = normed_loss(module, [x.to(device) for x in normed_batch(number)])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


# Whose placement it is.


@field_report("A01", "A02", "S01", guard="ownership is read from the module")
def test_a_save_and_an_export_under_the_policy_move_nothing_whatever_flags_an_engine_has(
    one_rank: str, trace: Trace, tmp_path: Path
) -> None:
    engine = normed_engine(Offload.POLICY, trace)
    engine.is_param_offload = True  # type: ignore[attr-defined]  # a flag that lies
    engine.train_batch(normed_batch(0))
    found = whereabouts(engine.manager)
    engine.save_checkpoint(tmp_path / "checkpoint")
    for _, weight in engine.export_weights():
        assert weight.device.type == one_rank
    assert engine.manager.placement is Placement.CPU_FSDP2_MANAGED
    assert whereabouts(engine.manager) == found
    assert trace.moves() == []


@field_report("A03", "A11", guard="the resting place is reached at once")
def test_policy_and_manual_offload_together_are_refused_at_construction(one_rank: str) -> None:
    with pytest.raises(ContradictoryOptions, match="offload_policy in fully_shard, or rest="):
        PlacementManager(sharded(normed(), policy()), rest=Placement.CPU_MANUAL)


@field_report("A12", guard="managed modules are not moved by hand")
def test_sleep_over_a_managed_and_a_manual_module_moves_the_manual_one_only(one_rank: str) -> None:
    managed = PlacementManager(sharded(normed(), policy()))
    manual = PlacementManager(sharded(normed()))
    manual.offload()
    with pytest.raises(IllegalTransition, match="CPUOffloadPolicy"):
        managed.offload()
    managed.verify()
    assert manual.placement is Placement.CPU_MANUAL


@field_report("A13", guard="unknown policies are refused")
def test_a_policy_of_an_unsupported_class_is_refused(one_rank: str) -> None:
    class Strange(OffloadPolicy):
        pass

    with pytest.raises(OwnershipUnclear, match="Strange"):
        PlacementManager(sharded(normed(), Strange()))


@field_report("A04", guard="gathered parameters are resharded first")
def test_an_offload_while_parameters_are_gathered_takes_the_shards(one_rank: str) -> None:
    module = sharded(normed())
    manager = PlacementManager(module)
    module.unshard()
    manager.offload()
    module.reshard()
    assert {parameter.device.type for parameter in module.parameters()} == {"cpu"}


# What a failure leaves.


@field_report("B01", "B04", guard="contexts put back what they found")
def test_a_failed_save_leaves_what_it_found_and_the_retry_works(
    one_rank: str, tmp_path: Path
) -> None:
    engine = normed_engine(Offload.MANUAL)
    engine.train_batch(normed_batch(0))
    assert engine.manager.placement is Placement.CPU_MANUAL
    in_the_way = tmp_path / "checkpoint"
    in_the_way.write_text("a file where a directory should be")
    found = whereabouts(engine.manager)
    with pytest.raises(BaseException, match="checkpoint"):  # torch's error is no Exception
        engine.save_checkpoint(in_the_way)
    assert whereabouts(engine.manager) == found
    in_the_way.unlink()
    engine.save_checkpoint(in_the_way)
    engine.train_batch(normed_batch(1))
    assert whereabouts(engine.manager) == found


@field_report("B05", "K03", guard="the resting place is reached at once")
def test_the_placement_is_defined_right_after_construction(one_rank: str) -> None:
    engine = normed_engine(Offload.MANUAL)
    assert engine.manager.placement is Placement.CPU_MANUAL
    assert {device for device, _ in whereabouts(engine.manager).values()} == {"cpu"}


# Optimizer state.


@field_report("C01", guard="training brings the optimizer")
def test_training_has_parameters_and_optimizer_state_on_one_device(one_rank: str) -> None:
    engine = normed_engine(Offload.MANUAL)
    engine.train_batch(normed_batch(0))
    with engine.manager.training():
        devices = {str(site.device) for site in engine.manager.census().sites if site.nbytes > 4}
        assert devices == {f"{one_rank}:0"}


@field_report("C02", "C12", "C13", guard="a load ends where the record says")
def test_a_load_does_not_change_where_optimizer_state_is(one_rank: str) -> None:
    engine = normed_engine(Offload.MANUAL)
    engine.train_batch(normed_batch(0))
    found = whereabouts(engine.manager)
    with engine.manager.loading():  # of a file whose tensors were on the device
        for state in engine.optimizer.state.values():
            for key in ("exp_avg", "exp_avg_sq"):
                state[key] = state[key].to(one_rank)
    assert whereabouts(engine.manager) == found


@field_report("C05", guard="step counters follow torchs rule")
def test_a_plain_step_counter_stays_on_the_host_through_a_round_trip(one_rank: str) -> None:
    module = normed().to(one_rank)
    optimizer = adam(module.parameters())
    step(module, optimizer, one_rank)
    manager = PlacementManager(module, optimizer)
    manager.offload()
    manager.onload()
    state = optimizer.state[module.second.weight]
    assert (state["step"].device.type, state["exp_avg"].device.type) == ("cpu", one_rank)


@field_report("C04", "C14", guard="nested optimizer state is found")
def test_custom_and_nested_optimizer_state_moves_too(one_rank: str) -> None:
    module = nn.Linear(2, 2).to(one_rank)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    optimizer.state[module.weight]["blocks"] = [{"q": torch.ones(3, device=one_rank)}]
    manager = PlacementManager(module, optimizer)
    manager.offload()
    assert optimizer.state[module.weight]["blocks"][0]["q"].device.type == "cpu"


@field_report("C09", guard="optimizer state is asked and not the groups")
def test_state_without_groups_is_moved_too(one_rank: str) -> None:
    module = nn.Linear(2, 2).to(one_rank)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    optimizer.state[module.weight]["momentum"] = torch.ones(2, 2, device=one_rank)
    optimizer.param_groups.clear()  # a wrapper that keeps groups elsewhere
    PlacementManager(module, optimizer).offload()
    assert optimizer.state[module.weight]["momentum"].device.type == "cpu"


# Buffers, gradients, ties.


@field_report("D01", "D02", "D04", "D07", guard="buffers of a managed module are placed")
def test_an_evaluation_before_any_training_finds_buffers_on_the_device(one_rank: str) -> None:
    module = sharded(normed(), policy())
    for buffer in module.buffers():
        buffer.data = buffer.data.cpu()
    manager = PlacementManager(module)
    with manager.evaluating(), torch.no_grad():
        module.eval()(normed_batch()[0].to(one_rank))


@field_report("E07", guard="gradients move with their parameters")
def test_no_gradient_stays_on_the_device_after_an_offload(one_rank: str) -> None:
    module = sharded(normed())
    normed_loss(module, [x.to(one_rank) for x in normed_batch()]).backward()
    PlacementManager(module).offload()
    assert {p.grad.device.type for p in module.parameters() if p.grad is not None} == {"cpu"}


@field_report("F01", "O03", guard="a storage is copied once")
def test_weights_that_share_a_storage_share_it_afterwards_and_are_copied_once(
    one_rank: str, trace: Trace
) -> None:
    module = nn.Module()
    module.embedding = nn.Parameter(torch.randn(8, 4, device=one_rank))
    module.head = nn.Parameter(module.embedding.detach().t())
    PlacementManager(module, trace=trace).offload()
    (event,) = trace.moves()
    assert event.bytes_to_host == module.embedding.nbytes
    module.embedding.data.fill_(3)
    assert torch.equal(module.head, torch.full((4, 8), 3.0))


@field_report("K01", guard="frozen parameters move")
def test_frozen_parameters_are_offloaded(one_rank: str) -> None:
    module = sharded(normed().requires_grad_(False))
    module.second.requires_grad_(True)
    PlacementManager(module).offload()
    assert {parameter.device.type for parameter in module.parameters()} == {"cpu"}


# Copies, memory, handed-out tensors.


@field_report("G01", "G02", guard="offloaded means landed")
def test_a_state_dict_right_after_an_offload_has_landed(one_rank: str) -> None:
    if one_rank != "sim":
        pytest.skip("lets copies land late, which only the simulated accelerator can")
    module = sharded(normed())
    before = {name: value.to_local().cpu() for name, value in module.named_parameters()}
    PlacementManager(module).offload()
    after = {name: value.to_local().clone() for name, value in module.named_parameters()}
    assert_equal(before, after)


@field_report("H04", "K06", guard="bases of views move along")
def test_an_offload_of_shards_frees_their_memory(one_rank: str) -> None:
    gc.collect()
    before = torch.accelerator.memory_allocated()
    manager = PlacementManager(sharded(normed()))
    manager.offload()
    gc.collect()
    assert torch.accelerator.memory_allocated() == before
    assert manager.placement is Placement.CPU_MANUAL


@field_report("M05", "I05", guard="exported weights are owned")
def test_an_exported_weight_is_no_view_of_what_training_changes(one_rank: str) -> None:
    engine = byte_engine(Offload.NONE)
    exported = dict(engine.export_weights())
    kept = copy.deepcopy(exported)
    with engine.manager.training(), torch.no_grad():
        for parameter in engine.module.parameters():
            parameter.add_(1)
    for name, weight in exported.items():
        assert torch.equal(weight, kept[name]), name


# Lifecycle.


@field_report("N02", "N09", guard="moving what is there is no move")
def test_a_second_offload_without_an_onload_is_no_move(one_rank: str, trace: Trace) -> None:
    manager = PlacementManager(normed().to(one_rank), trace=trace)
    manager.offload()
    manager.offload()
    assert [event.component for event in trace.moves()] == ["params", "buffers"]


@field_report("N10", "L04", guard="an inner context takes nothing from an outer")
def test_nested_contexts_are_a_stack(one_rank: str) -> None:
    manager = PlacementManager(normed())
    with manager.evaluating():
        with manager.evaluating():
            pass
        assert manager.placement is Placement.GPU
    assert manager.placement is Placement.CPU_MANUAL


@field_report("Q02", guard="optimizers hold the sharded parameters")
def test_an_optimizer_made_after_a_forward_that_left_parameters_gathered_is_refused(
    one_rank: str,
) -> None:
    module = sharded(normed())
    module.unshard()
    optimizer = adam(module.parameters())
    with pytest.raises(ForeignOptimizer, match="while parameters are gathered"):
        PlacementManager(module, optimizer)


@field_report("L01", "L02", guard="meta tensors are no placement")
def test_left_over_meta_tensors_are_named(one_rank: str) -> None:
    module = normed().to(one_rank)
    module.second.bias = nn.Parameter(torch.empty(3, device="meta"))
    with pytest.raises(ScatteredModule, match=r"second\.bias \(param\) on meta"):
        PlacementManager(module)


@field_report("I07", guard="a context knows the compute device")
def test_inputs_go_to_the_compute_device_and_not_to_where_parameters_rest(one_rank: str) -> None:
    module = sharded(normed(), policy())
    manager = PlacementManager(module)
    assert next(module.parameters()).device.type == "cpu"
    assert manager.device == torch.device(one_rank, 0)
    with manager.training():
        module(normed_batch()[0].to(manager.device)).sum().backward()


@field_report("O02", guard="an idle context moves nothing")
def test_without_offload_a_hundred_contexts_move_and_collect_nothing(
    one_rank: str, trace: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = PlacementManager(normed().to(one_rank), trace=trace)
    collected: list[int] = []
    monkeypatch.setattr(gc, "collect", lambda *_: collected.append(1))
    for _ in range(100):
        with manager.training():
            pass
    assert trace.moves() == []
    assert not collected


@field_report("Q03", guard="bases of views move along")
def test_the_global_swap_flag_is_respected_and_not_needed(one_rank: str) -> None:
    found = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        module = sharded(normed())
        loss = normed_loss(module, [x.to(one_rank) for x in normed_batch()])  # holds references
        manager = PlacementManager(module)
        before = values(manager.census())
        manager.offload()
        assert manager.leftovers() == []
        manager.onload()
        assert_equal(values(manager.census()), before)
        assert torch.__future__.get_swap_module_params_on_conversion() is True
        del loss
    finally:
        torch.__future__.set_swap_module_params_on_conversion(found)


# Options, and subclasses.


class Scaled(torch.Tensor):
    """A weight whose scale is an ordinary attribute, as quantized weights have."""


@field_report("P02", guard="tensors that subclasses carry are held with them")
def test_the_scale_of_a_quantized_weight_moves_with_it(one_rank: str) -> None:
    weight = torch.ones(2, 2, device=one_rank).as_subclass(Scaled)
    weight.scale = torch.full((2,), 3.0, device=one_rank)
    scale = weight.scale
    module = nn.Module()
    module.register_buffer("weight", weight)
    module.plain = nn.Parameter(torch.ones(2, device=one_rank))
    manager = PlacementManager(module)
    manager.offload()
    assert module.weight.device.type == scale.device.type == "cpu"
    assert module.weight.scale is scale
    assert torch.equal(scale, torch.full((2,), 3.0))
    manager.onload()
    assert module.weight.device == module.weight.scale.device == module.plain.device


@field_report("S02", guard="unknown options are refused")
def test_a_misspelt_option_is_refused_rather_than_silently_off(one_rank: str) -> None:
    module = normed().to(one_rank)
    for options in ({"on_drift": "adpot"}, {"verify": "allways"}):
        with pytest.raises(ContradictoryOptions, match=next(iter(options.values()))):
            PlacementManager(module, **options)
    with pytest.raises(ContradictoryOptions, match="bth"):
        next(PlacementManager(module).export_weights(tied="bth"))


def test_the_table_in_the_docs_is_up_to_date() -> None:
    page = Path(__file__).parents[2] / "docs" / "field-reports.md"
    assert page.read_text(encoding="utf-8") == table(), "python tests/field/table.py writes it anew"
