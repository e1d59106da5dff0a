"""Further faults reported in public, G to S. The ids are those of reports.json."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import guards_g_to_s  # noqa: F401  (registers the guards)
import pytest
import torch
import torch.distributed as dist
from guards import in_ranks
from models import (
    adam,
    assert_equal,
    local,
    normed,
    normed_batch,
    normed_engine,
    normed_loss,
    policy,
    sharded,
    values,
    whereabouts,
)
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, OffloadPolicy

from engine import Offload
from placement import (
    AlreadyManaged,
    Census,
    Component,
    GroupPoisoned,
    IllegalTransition,
    Mode,
    Placement,
    PlacementDrift,
    PlacementHeld,
    PlacementMachine,
    PlacementManager,
    PutAway,
    RanksDisagree,
    Trace,
    Trigger,
    find_compute_device,
)
from placement.testing import Ranks
from placement.torch_private import default_store

field_report = pytest.mark.field_report


def device_types(module: nn.Module) -> set[str]:
    return {local(parameter).device.type for parameter in module.parameters()}


def allocated() -> int:
    return torch.accelerator.memory_allocated()


def flat() -> FullyShardedDataParallel:
    device = find_compute_device()
    return FullyShardedDataParallel(normed().to(device), device_id=device)


def train(module: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    normed_loss(module, [x.to(device) for x in normed_batch()]).backward()
    optimizer.step()
    optimizer.zero_grad()


# Host memory.


@field_report("G06", guard="a failed pinning is not the end")
def test_a_tensor_above_the_pinning_limit_is_offloaded_with_a_warning_that_says_so(
    one_rank: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty = torch.empty

    def limited(*args: int, pin_memory: bool = False, **kwargs: object) -> torch.Tensor:
        if pin_memory and args[0] > 64:  # stands for a limit of the driver's
            raise RuntimeError("out of memory")
        return empty(*args, pin_memory=pin_memory, **kwargs)  # type: ignore[call-overload,no-any-return]

    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(8, 8)).to(one_rank)
    before = values(PlacementManager(module).census())
    manager = PlacementManager(module)
    monkeypatch.setattr(torch, "empty", limited)
    with pytest.warns(UserWarning, match="4,096 bytes of host memory could not be pinned"):
        manager.offload()
    assert not any(parameter.is_pinned() for parameter in module.parameters())
    assert device_types(module) == {"cpu"}
    assert_equal(values(manager.census()), before)


@field_report("G03", guard="pinned memory is carved")
def test_pinned_memory_is_not_twice_what_is_offloaded(one_rank: str) -> None:
    module = nn.ParameterList(
        nn.Parameter(torch.zeros(1126, device=one_rank)) for _ in range(200)
    )  # a tenth above a power of two, where a block of its own takes nearly twice its bytes
    manager = PlacementManager(module)
    manager.offload()
    offloaded = sum(parameter.nbytes for parameter in module)
    assert offloaded <= manager.host_bytes <= 1.05 * offloaded


@field_report("G05", guard="host memory is let go on request")
def test_host_memory_is_kept_for_the_next_offload_and_given_back_on_request(one_rank: str) -> None:
    manager = PlacementManager(normed().to(one_rank))
    manager.offload()
    held = manager.host_bytes
    manager.onload()
    assert manager.host_bytes == held > 0
    assert manager.release_host_memory() == held
    assert manager.host_bytes == 0


@field_report("O04", guard="host copies are pinned before they are written")
def test_an_offload_copies_each_tensor_once_and_into_pinned_memory(one_rank: str) -> None:
    module = normed().to(one_rank)
    manager = PlacementManager(module)
    tensors = len(manager.census().sites)
    counted = copies_to_the_host(one_rank)
    manager.offload()
    assert all(site.holding.tensor.is_pinned() for site in manager.census().sites)
    if counted is not None:
        assert copies_to_the_host(one_rank) == counted + tensors


def copies_to_the_host(device: str) -> int | None:
    """How many there were; None where nobody counts them."""
    from placement import sim

    return sim.counters().device_to_host_copies if device == "sim" else None


@field_report("G07", guard="a storage is copied once")
def test_a_second_offload_copies_each_shared_storage_once_again(
    one_rank: str, trace: Trace
) -> None:
    module = nn.ModuleDict({"embedding": nn.Embedding(8, 4), "head": nn.Linear(4, 8, bias=False)})
    module.to(one_rank)
    module["head"].weight = nn.Parameter(module["embedding"].weight.detach())  # looks into it, too
    before = values(PlacementManager(module).census())
    manager = PlacementManager(module, trace=trace)
    for _ in range(2):
        manager.offload()
        assert trace.moves()[-1].bytes_to_host == module["embedding"].weight.nbytes
        assert all(site.holding.tensor.is_pinned() for site in manager.census().sites)
        assert_equal(values(manager.census()), before)
        manager.onload()
        assert trace.moves()[-1].bytes_to_device == module["embedding"].weight.nbytes


# Device memory.


class Reference(nn.Module):
    """A model in a reference cycle, which only the garbage collector would end."""

    def __init__(self) -> None:
        super().__init__()
        self.model = sharded(normed())
        self.wrapper = [self]


@field_report("H02", "H07", guard="bases of views move along")
def test_an_offloaded_reference_model_frees_its_memory_without_a_collection(one_rank: str) -> None:
    gc.collect()
    before = allocated()
    reference = Reference()
    held = list(reference.parameters())
    gc.collect()  # of what fully_shard left behind
    assert allocated() > before
    gc.disable()
    try:
        PlacementManager(reference).offload()
        assert allocated() == before
        assert {local(parameter).device.type for parameter in held} == {"cpu"}
        alive, held = weakref.ref(reference), []
        del reference
        assert alive() is not None  # the cycle keeps it, and none of the device's memory
    finally:
        gc.enable()


@field_report("H02", guard="leftovers are looked for")
def test_a_storage_that_a_view_looks_into_is_not_freed_under_it_but_reported(one_rank: str) -> None:
    module = normed().to(one_rank)
    view = module.second.weight.detach()[1:]
    expected = view.cpu()
    manager = PlacementManager(module)
    manager.offload()
    assert view.device.type == one_rank
    assert torch.equal(view.cpu(), expected)
    assert [leftover.name for leftover in manager.leftovers()] == ["second.weight"]


class Cached(nn.Linear):
    """Keeps its weight in a lower precision, under a key of a dict, beside a view of the weight."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.copies: dict[str, list[torch.Tensor]] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.copies:
            self.copies["low"] = [self.weight.detach().bfloat16(), self.weight.detach()[1:]]
        return nn.functional.linear(x, self.copies["low"][0].float(), self.bias)


@field_report("H03", guard="tensors in plain attributes are named")
def test_a_cache_of_weights_that_an_offload_does_not_know_is_named(
    one_rank: str, caplog: pytest.LogCaptureFixture
) -> None:
    module = nn.Sequential(Cached(), nn.Linear(8, 8)).to(one_rank)
    manager = PlacementManager(module)
    module(torch.ones(1, 8, device=one_rank))
    module[0].copies["low"].pop()  # the view would keep the weight
    with caplog.at_level("WARNING"):
        manager.offload()
    assert "128 bytes in plain attributes of the module stay on the device: 0.copies/low/0" in (
        caplog.text
    )
    (cache,) = manager.leftovers()
    assert (cache.name, cache.nbytes) == ("0.copies/low/0", 128)
    module[0].copies.clear()
    assert manager.leftovers() == []


@field_report("H08", guard="contexts put back what they found")
def test_nothing_of_the_student_is_resident_while_the_teacher_runs(one_rank: str) -> None:
    gc.collect()
    found = allocated()
    teacher = PlacementManager(sharded(normed()), rest=Placement.CPU_MANUAL)
    module = sharded(normed())
    optimizer = adam(module.parameters())
    student = PlacementManager(module, optimizer, rest=Placement.CPU_MANUAL)
    for _ in range(2):
        with student.training():
            train(module, optimizer, student.device)
        gc.collect()
        assert allocated() == found
        with teacher.evaluating():
            assert set(student.census().bytes_by_device()) == {"cpu"}
            assert teacher.placement is Placement.GPU


def peak_of_a_step(module: nn.Module, manager: PlacementManager) -> int:
    """Device memory that the second step took at most, with the module's own."""
    optimizer = manager.optimizer
    assert optimizer is not None
    for _ in range(2):
        gc.collect()
        torch.accelerator.reset_peak_memory_stats()
        with manager.training():
            train(module, optimizer, manager.device)
    return torch.accelerator.max_memory_allocated()


@field_report("K05", guard="a storage is copied once")
def test_offload_takes_no_more_device_memory_when_most_parameters_are_frozen(
    one_rank: str,
) -> None:
    device = find_compute_device()
    peaks = []
    for rest in (Placement.GPU, Placement.CPU_MANUAL):
        gc.collect()
        found = allocated()
        module = normed(hidden=256)
        module.first.requires_grad_(False)
        module = FullyShardedDataParallel(module.to(device), device_id=device, use_orig_params=True)
        optimizer = adam(p for p in module.parameters() if p.requires_grad)
        manager = PlacementManager(module, optimizer, rest=rest)
        peaks.append(peak_of_a_step(module, manager) - found)
        del module, optimizer, manager
    resident, offloaded = peaks
    assert offloaded <= resident


# Adapters and export.


def bytes_by_device(manager: PlacementManager, *, trainable: bool) -> dict[str, int]:
    sites = manager.census().of(Component.PARAMS).sites
    return Census(
        [site for site in sites if site.holding.tensor.requires_grad is trainable]
    ).bytes_by_device()


@field_report("I06", guard="trainable parameters move")
def test_adapters_are_offloaded_with_their_frozen_base_and_can_be_counted_apart(
    one_rank: str,
) -> None:
    gc.collect()
    found = allocated()
    module = nn.ModuleDict({"base": nn.Linear(16, 16, bias=False), "adapter": nn.Linear(16, 2)})
    module["base"].requires_grad_(False)
    module["adapter"].register_buffer("scale", torch.ones(2))
    manager = PlacementManager(module.to(one_rank))
    assert bytes_by_device(manager, trainable=True) == {f"{one_rank}:0": (16 * 2 + 2) * 4}
    assert bytes_by_device(manager, trainable=False) == {f"{one_rank}:0": 16 * 16 * 4}
    manager.offload()
    assert bytes_by_device(manager, trainable=True) == {"cpu": (16 * 2 + 2) * 4}
    assert bytes_by_device(manager, trainable=False) == {"cpu": 16 * 16 * 4}
    gc.collect()
    assert allocated() == found


@field_report("I01", guard="exported weights are owned")
def test_weights_exported_while_an_adapter_is_merged_keep_it_after_the_merge(one_rank: str) -> None:
    module = sharded(normed())
    manager = PlacementManager(module)
    base = local(module.second.weight).detach().cpu()

    @contextmanager
    def merged() -> Iterator[None]:
        with torch.no_grad():
            module.second.weight.add_(1)
            yield
            module.second.weight.sub_(1)

    with merged():
        exported = dict(manager.export_weights())
    assert torch.allclose(local(module.second.weight).cpu(), base)
    assert torch.allclose(exported["second.weight"].cpu(), base + 1)


@field_report("I03", guard="meta tensors are no placement")
def test_a_checkpoint_of_a_model_with_a_placeholder_in_it_is_refused(one_rank: str) -> None:
    module = normed().to(one_rank)
    manager = PlacementManager(module)
    module.second.weight = nn.Parameter(torch.empty(3, 5, device="meta"))
    with (
        pytest.raises(PlacementDrift, match=r"second\.weight \(param\) on meta"),
        manager.saving(),
    ):
        module.state_dict()


@field_report("I04", guard="what is declared to stay stays")
def test_an_adapter_that_is_parked_stays_parked_when_another_is_added(one_rank: str) -> None:
    adapters = nn.ModuleDict({"active": nn.Linear(2, 2), "parked": nn.Linear(2, 2)})
    manager = PlacementManager(adapters, stays=["parked.*"])
    adapters["third"] = nn.Linear(2, 2)
    manager.onload()
    places = {name: device_types(adapter) for name, adapter in adapters.items()}
    assert places == {"active": {one_rank}, "parked": {"cpu"}, "third": {one_rank}}


@field_report("M04", guard="an export stages each shard")
def test_an_export_of_an_offloaded_actor_reads_the_copy_on_the_host(
    one_rank: str, trace: Trace
) -> None:
    engine = normed_engine(Offload.MANUAL, trace)
    engine.train_batch(normed_batch(0))
    expected = {n: local(p).detach().clone() for n, p in engine.module.named_parameters()}
    moved = trace.moves()
    for _ in range(2):  # the second time nothing has changed
        exported = dict(engine.export_weights())
        assert {weight.device.type for weight in exported.values()} == {one_rank}
        assert_equal({name: exported[name].cpu() for name in expected}, expected)
    assert engine.manager.placement is Placement.CPU_MANUAL
    assert trace.moves() == moved


@field_report("N07", guard="an export stages each shard")
def test_an_export_needs_no_evaluation_before_it(one_rank: str) -> None:
    def first_export(*, evaluate: bool) -> dict[str, torch.Tensor]:
        engine = normed_engine(Offload.MANUAL)
        if evaluate:
            engine.eval_batch(normed_batch(0))
        return dict(engine.export_weights())

    straight = first_export(evaluate=False)
    assert {weight.device.type for weight in straight.values()} == {one_rank}
    assert_equal(straight, first_export(evaluate=True))


@field_report("O05", guard="flat parameters are exported where they rest")
def test_an_export_of_flat_parameters_moves_nothing(one_rank: str, trace: Trace) -> None:
    module = flat()
    manager = PlacementManager(module, rest=Placement.CPU_MANUAL, trace=trace)
    before = len(trace.moves())
    assert len(list(manager.export_weights())) > 2
    assert trace.moves()[before:] == []


# Snapshots.


@field_report("M03", guard="flat parameters are brought for their state dict")
def test_a_snapshot_of_an_offloaded_flat_parameter_is_whole_and_can_be_restored(
    one_rank: str,
) -> None:
    module = flat()
    manager = PlacementManager(module, rest=Placement.CPU_MANUAL)
    with manager.saving():
        snapshot = {name: value.cpu() for name, value in module.state_dict().items()}
    assert_equal(snapshot, dict(normed().state_dict()))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    with manager.loading():
        module.load_state_dict(snapshot)
    assert device_types(module) == {"cpu"}
    with manager.saving():
        restored = {name: value.cpu() for name, value in module.state_dict().items()}
    assert_equal(restored, snapshot)


@field_report("N03", guard="flat parameters are brought for their state dict")
def test_a_save_while_the_trainer_sleeps_wakes_it_for_the_save_only(one_rank: str) -> None:
    module = flat()
    optimizer = adam(module.parameters())
    manager = PlacementManager(module, optimizer)
    train(module, optimizer, manager.device)
    manager.offload()
    asleep = whereabouts(manager)
    with manager.saving() as mode:
        module.state_dict()
        FullyShardedDataParallel.optim_state_dict(module, optimizer)
        assert mode is Mode.STAGED
    assert whereabouts(manager) == asleep


@field_report("O06", guard="loading brings nothing")
def test_a_load_into_offloaded_state_takes_no_detour_over_the_device(
    one_rank: str, trace: Trace, tmp_path: Path
) -> None:
    engine = normed_engine(Offload.MANUAL, trace)
    engine.train_batch(normed_batch(0))
    engine.save_checkpoint(tmp_path)
    saved = values(engine.manager.census())
    engine.train_batch(normed_batch(1))
    before = trace.moves()
    engine.load_checkpoint(tmp_path)
    assert trace.moves() == before
    assert_equal(values(engine.manager.census()), saved)


# Ranks.


def some_have_not_moved() -> None:
    module = sharded(normed())
    manager = PlacementManager(module, deadline=20.0)
    if dist.get_rank() == 0:
        manager.offload()
    with pytest.raises(RanksDisagree) as raised, manager.exporting():
        pass
    assert raised.value.said["params"] == {"cpu_manual": [0], "gpu": [1]}


@field_report("J03", guard="ranks meet before a collective operation")
def test_a_phase_does_not_begin_before_all_ranks_have_moved(
    two_ranks: Ranks, request: pytest.FixtureRequest
) -> None:
    in_ranks(two_ranks, request, some_have_not_moved)


def others_have_offloaded() -> None:
    """Rank 1 is slow: it offloads once rank 0 is on its way, or does not come."""
    store = default_store()
    gc.collect()
    at_rest = allocated()
    manager = PlacementManager(sharded(normed()), deadline=20.0)
    if dist.get_rank() == 1:
        with suppress(RuntimeError):  # which rank 0 has only if it did not wait for this one
            store.wait(["rank 0 looked"], timedelta(seconds=1))
    manager.offload()
    assert allocated() == at_rest
    store.set(f"rank {dist.get_rank()} is free", "")
    with manager.exporting():  # the next phase, which needs the memory of all ranks
        free = [store.check([f"rank {rank} is free"]) for rank in range(2)]
        if dist.get_rank() == 0:
            store.set("rank 0 looked", "")
        assert free == [True, True]


@field_report("J02", guard="ranks meet before a collective operation")
def test_the_next_phase_begins_when_the_memory_of_all_ranks_is_free(
    two_ranks: Ranks, request: pytest.FixtureRequest
) -> None:
    in_ranks(two_ranks, request, others_have_offloaded)


def some_lack_state() -> None:
    module = sharded(normed())
    optimizer = adam(module.parameters())
    manager = PlacementManager(module, optimizer, deadline=20.0)
    train(module, optimizer, manager.device)
    with manager.saving():
        get_optimizer_state_dict(module, optimizer)
    if dist.get_rank() == 1:
        del optimizer.state[module.second.weight]["exp_avg_sq"]
    with pytest.raises(RanksDisagree) as raised, manager.saving():
        get_optimizer_state_dict(module, optimizer)
    ((fact, said),) = raised.value.said.items()
    assert fact == "the optimizer's state"
    others = "first.weight, norm.bias, norm.weight and 1 more: exp_avg, exp_avg_sq, step in"
    for differs, ranks in said.items():
        assert ("second.weight: exp_avg, step in group 0 of AdamW 0" in differs) == (ranks == [1])
        assert others in differs or ranks == [0]
    optimizer.state.clear()
    with manager.saving():
        get_optimizer_state_dict(module, optimizer)
    optimizer.param_groups[0][f"only on rank {dist.get_rank()}"] = True
    with pytest.raises(RanksDisagree, match=r"5 parameters with .* only on rank 1,"):
        with manager.saving():
            pass


@field_report("J06", guard="ranks compare what their optimizers hold")
def test_ranks_whose_optimizers_hold_different_entries_are_refused_a_save_together(
    two_ranks: Ranks, request: pytest.FixtureRequest
) -> None:
    in_ranks(two_ranks, request, some_lack_state)


def some_save() -> None:
    manager = PlacementManager(sharded(normed()), deadline=20.0)
    context = manager.saving() if dist.get_rank() == 0 else manager.exporting()
    with pytest.raises(RanksDisagree) as raised, context:
        pass
    assert raised.value.said == {"operation": {"save": [0], "export": [1]}}


@field_report("J07", guard="ranks meet before a collective operation")
def test_a_save_that_only_some_ranks_decide_on_is_refused_on_all(
    two_ranks: Ranks, request: pytest.FixtureRequest
) -> None:
    in_ranks(two_ranks, request, some_save)


def exports_without_updates() -> None:
    module = sharded(normed())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    manager = PlacementManager(module, optimizer, rest=Placement.CPU_MANUAL)
    whole = {name: parameter.detach() for name, parameter in normed().named_parameters()}
    for _ in range(3):
        with manager.training():
            train(module, optimizer, manager.device)
        exported = dict(manager.export_weights())
        assert_equal({name: exported[name].cpu() for name in whole}, whole)


@field_report("J08", guard="an export gathers the shards")
def test_exported_weights_of_two_shards_do_not_change_at_a_zero_learning_rate(
    two_ranks: Ranks, request: pytest.FixtureRequest
) -> None:
    in_ranks(two_ranks, request, exports_without_updates)


def is_blocked_in_its_sender() -> None:
    """Rank 0's transport blocks after the first weight; rank 1 can't run ahead of it by more than
    the bucket that they gathered together."""
    module = sharded(nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))))
    manager = PlacementManager(module, deadline=2.0)
    store = default_store()
    taken: list[str] = []

    def send(name: str) -> None:
        taken.append(name)
        if dist.get_rank() == 0:
            store.wait(["rank 1 gave up"], timedelta(seconds=12))

    def send_all() -> None:
        for name, _ in manager.export_weights(bucket_bytes=1):  # one weight at a time
            send(name)

    with pytest.raises(Exception) as caught:  # noqa: PT011  (rank 0 meets another than rank 1)
        send_all()
    if dist.get_rank() == 1:
        assert len(taken) <= 2  # of 8
        store.set("rank 1 gave up", "")
    assert "Wait timeout" not in str(caught.value)
    with pytest.raises(GroupPoisoned):
        next(manager.export_weights())


@pytest.mark.timed
@field_report("J05", guard="collectives of an export wait no longer than the deadline")
def test_ranks_do_not_run_ahead_of_one_that_is_blocked_in_its_sender(
    two_ranks: Ranks, request: pytest.FixtureRequest
) -> None:
    in_ranks(two_ranks, request, is_blocked_in_its_sender)


@field_report("J04", guard="a phase of another thread is refused")
def test_a_phase_that_a_controller_does_not_wait_for_is_met_by_the_next(one_rank: str) -> None:
    manager = PlacementManager(normed().to(one_rank))
    begun, may_end = threading.Event(), threading.Event()

    def evaluate() -> None:
        with manager.evaluating():
            begun.set()
            assert may_end.wait(60)

    with ThreadPoolExecutor(1) as remote:
        pending = remote.submit(evaluate)
        assert begun.wait(60)
        try:
            for ask in (manager.offload, lambda: manager.evaluating().__enter__()):
                with pytest.raises(PlacementHeld, match="another thread is in a context"):
                    ask()
        finally:
            may_end.set()
        pending.result(60)
    manager.offload()
    assert device_types(manager.module) == {"cpu"}


# Lifecycle.


@field_report("K02", guard="an idle context moves nothing")
def test_a_reference_model_that_fits_is_not_offloaded_because_the_actor_is(
    one_rank: str, trace: Trace
) -> None:
    actor = PlacementManager(sharded(normed()), rest=Placement.CPU_MANUAL, trace=trace)
    reference = PlacementManager(sharded(normed()), rest=Placement.GPU, trace=trace)
    before = trace.moves()
    for number in range(3):
        with reference.evaluating(), torch.no_grad():
            reference.module(normed_batch(number)[0].to(reference.device))
    assert trace.moves() == before
    assert (actor.placement, reference.placement) == (Placement.CPU_MANUAL, Placement.GPU)


@field_report("N04", guard="a trigger out of order is refused")
def test_a_second_pause_and_a_resume_without_a_pause_are_refused_alike(one_rank: str) -> None:
    asleep = PlacementMachine(Component.PARAMS, Placement.CPU_MANUAL)
    awake = PlacementMachine(Component.OPTIMIZER, Placement.GPU)
    with pytest.raises(IllegalTransition, match=r"offload\(\) refused: .* params in cpu_manual"):
        asleep.fire(Trigger.OFFLOAD)
    with pytest.raises(IllegalTransition, match=r"onload\(\) refused: .* optimizer in gpu"):
        awake.fire(Trigger.ONLOAD)


@field_report("N08", guard="contexts put back what they found")
def test_each_epoch_of_two_models_makes_the_same_transitions(one_rank: str, trace: Trace) -> None:
    module = sharded(normed())
    optimizer = adam(module.parameters())
    actor = PlacementManager(module, optimizer, rest=Placement.CPU_MANUAL, trace=trace)
    critic = PlacementManager(sharded(normed()), rest=Placement.CPU_MANUAL, trace=trace)

    def epoch() -> list[tuple[str | None, str, str | None]]:
        before = len(trace.moves())
        with critic.evaluating():
            assert actor.placement is Placement.CPU_MANUAL
        with actor.training():
            assert critic.placement is Placement.CPU_MANUAL
            train(module, optimizer, actor.device)
        return [(event.component, event.name, event.phase) for event in trace.moves()[before:]]

    there_and_back = [
        (component, name, "evaluate")
        for name in ("onload", "offload")
        for component in ("params", "buffers")
    ] + [
        (component, name, "train")
        for name in ("onload", "offload")
        for component in ("params", "buffers", "optimizer")
    ]
    epoch()  # makes the optimizer's state
    assert [epoch(), epoch()] == [there_and_back, there_and_back]


@field_report("O01", guard="an inner context takes nothing from an outer")
def test_steps_inside_one_context_pay_for_one_onload_and_one_offload(
    one_rank: str, trace: Trace
) -> None:
    engine = normed_engine(Offload.MANUAL, trace)
    before = len(trace.moves())
    with engine.train_mode():
        for number in range(3):
            engine.train_batch(normed_batch(number))
    paid = trace.moves()[before:]
    assert [(event.component, event.name) for event in paid] == [
        ("params", "onload"),
        ("buffers", "onload"),
        ("params", "offload"),
        ("buffers", "offload"),
        ("optimizer", "offload"),  # made by the first of the steps
    ]
    assert all(event.seconds > 0 for event in paid if event.bytes_to_host or event.bytes_to_device)


def says(error: PutAway) -> tuple[str, str, bool]:
    return error.asked, error.state, "manager.training()" in error.instead


@field_report("N06", guard="computing with what is put away is refused")
def test_an_offloaded_policy_that_nobody_prepared_says_what_is_missing(one_rank: str) -> None:
    module = sharded(normed())
    optimizer = adam(module.parameters())
    manager = PlacementManager(module, optimizer)
    train(module, optimizer, manager.device)
    manager.offload()
    with pytest.raises(PutAway) as forward:
        train(module, optimizer, manager.device)
    asleep = "the record has the params in cpu_manual, the buffers in cpu_manual"
    assert says(forward.value) == ("a forward pass", asleep, True)
    with manager.evaluating():
        normed_loss(module, [x.to(manager.device) for x in normed_batch()]).backward()
        with pytest.raises(PutAway) as update:
            optimizer.step()
    apart = "the record has the params in gpu, the grads in gpu, the optimizer in cpu_manual"
    assert says(update.value) == ("optimizer.step()", apart, True)


@field_report("K04", guard="computing with what is put away is refused")
def test_a_reference_model_that_nobody_prepared_says_so(one_rank: str) -> None:
    actor = PlacementManager(normed().to(one_rank))
    reference = PlacementManager(normed())  # left where it was loaded
    (x,) = normed_batch()
    with actor.evaluating(), torch.no_grad():
        actor.module(x.to(actor.device))
        with pytest.raises(PutAway, match=r"manager\.evaluating\(\)") as refused:
            reference.module(x.to(actor.device))
        asleep = "the record has the params in cpu_manual, the buffers in cpu_manual"
        assert refused.value.state == asleep
        with reference.evaluating():
            assert reference.module(x.to(actor.device)).device == actor.device


# Compiled modules.


@field_report("R02", guard="a module has one manager")
def test_a_compiled_module_and_its_original_are_one_module(one_rank: str) -> None:
    module = normed().to(one_rank)
    manager = PlacementManager(module)
    with pytest.raises(AlreadyManaged):
        PlacementManager(torch.compile(module, backend="eager"))
    assert manager.module is module


@field_report("R02", guard="evaluating brings the model")
def test_a_compiled_module_is_moved_outside_of_its_one_whole_graph(one_rank: str) -> None:
    torch._dynamo.reset()
    module = normed().to(one_rank).eval()
    batch = normed_batch()[0].to(one_rank)
    with torch.no_grad():
        expected = module(batch)
        compiled = torch.compile(module, backend="eager", fullgraph=True)
        manager = PlacementManager(module, rest=Placement.CPU_MANUAL)
        for _ in range(2):
            with manager.evaluating():
                assert torch.equal(compiled(batch), expected)
            assert device_types(module) == {"cpu"}


@field_report("R03", guard="buffers of a managed module are placed")
def test_a_validation_between_training_steps_finds_buffers_that_were_moved_by_hand(
    one_rank: str,
) -> None:
    module = sharded(normed(), policy())
    module.cpu()  # "the policy wants it there": its parameters, not its buffers
    optimizer = adam(module.parameters())
    manager = PlacementManager(module, optimizer)
    with manager.training():
        train(module, optimizer, manager.device)
    trained = whereabouts(manager)
    with manager.evaluating(), torch.no_grad():
        module.eval()(normed_batch()[0].to(manager.device))
    with manager.training():
        train(module.train(), optimizer, manager.device)
    assert whereabouts(manager) == trained
    assert device_types(module) == {"cpu"}
    assert {buffer.device.type for buffer in module.buffers()} == {one_rank}


# Options.


@field_report("S03", guard="a policy is read from its class")
def test_an_offload_policy_that_means_none_does_not_forbid_an_offload(one_rank: str) -> None:
    module = sharded(normed(), OffloadPolicy())
    manager = PlacementManager(module)
    manager.offload()
    assert manager.placement is Placement.CPU_MANUAL
    assert device_types(module) == {"cpu"}


@field_report("S04", guard="the device is kept with its index")
def test_a_second_onload_goes_to_the_device_that_was_chosen(one_rank: str) -> None:
    if torch.accelerator.device_count() < 2:
        pytest.skip("needs a device that is not the default one")
    chosen = torch.device(one_rank, 1)
    module = nn.Linear(2, 2).to(chosen)
    manager = PlacementManager(module, device=chosen)
    for _ in range(2):
        manager.offload()
        assert device_types(module) == {"cpu"}
        manager.onload()
        assert {parameter.device for parameter in module.parameters()} == {chosen}
