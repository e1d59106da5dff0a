"""More faults reported in public, of the ids A to F, and what happens here instead."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import guards_a_to_f  # noqa: F401  (registers the guards)
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
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from engine import Offload
from placement import (
    Component,
    ContradictoryOptions,
    IllegalTransition,
    Placement,
    PlacementDrift,
    PlacementManager,
    Trace,
    find_compute_device,
)
from placement.testing import Ranks

field_report = pytest.mark.field_report


def backward(module: nn.Module, number: int = 0) -> float:
    """The loss of a batch, whose gradients are added to those that are there."""
    device = find_compute_device()
    loss = normed_loss(module, [x.to(device) for x in normed_batch(number)])
    loss.backward()
    return loss.item()


def devices(tensors: Any) -> set[str]:
    return {str(tensor.device) for tensor in tensors}


def trained_fsdp1() -> tuple[nn.Module, PlacementManager]:
    """An FSDP1 module and its optimizer after one step, offloaded by hand."""
    device = find_compute_device()
    module = FullyShardedDataParallel(normed().to(device), device_id=device, use_orig_params=True)
    optimizer = adam(module.parameters())
    backward(module)
    optimizer.step()
    optimizer.zero_grad()
    return module, PlacementManager(module, optimizer, rest=Placement.CPU_MANUAL)


@pytest.fixture
def transport(one_rank: str) -> Iterator[Callable[[torch.Tensor], None]]:
    """A broadcast whose backend has no support for tensors of the host."""
    backend = dist.get_default_backend_for_device(one_rank)
    group = dist.new_group([0], backend=backend)
    yield lambda tensor: dist.broadcast(tensor, 0, group=group)
    dist.destroy_process_group(group)


# Whose placement it is, and what an export hands over.


@field_report("A05", guard="exported shards are staged on the device")
def test_a_broadcast_of_weights_from_managed_shards_leaves_them_where_the_policy_wants_them(
    one_rank: str, transport: Callable[[torch.Tensor], None]
) -> None:
    engine = normed_engine(Offload.POLICY)
    engine.train_batch(normed_batch(0))
    found = whereabouts(engine.manager)

    def broadcast(until: int | None = None) -> None:
        with closing(engine.export_weights()) as weights:
            for number, (_, weight) in enumerate(weights):
                if number == until:
                    raise ConnectionError("the inference cluster is gone")
                transport(weight)

    broadcast()
    assert whereabouts(engine.manager) == found
    engine.eval_batch(normed_batch(0))
    with pytest.raises(ConnectionError):
        broadcast(until=2)
    assert whereabouts(engine.manager) == found
    engine.train_batch(normed_batch(1))


@field_report("A06", guard="exported shards are staged on the device")
def test_a_second_refit_finds_the_model_offloaded_and_works(
    one_rank: str, transport: Callable[[torch.Tensor], None]
) -> None:
    engine = normed_engine(Offload.MANUAL)
    engine.train_batch(normed_batch(0))
    refits = []
    for _ in range(2):
        refits.append(dict(engine.export_weights()))
        assert engine.manager.placement is Placement.CPU_MANUAL
    for weight in refits[1].values():
        transport(weight)
    assert_equal(*refits)


@field_report("A10", guard="exported shards are staged on the device")
def test_a_transport_of_the_device_is_handed_one_weight_of_the_device_at_a_time(
    one_rank: str, transport: Callable[[torch.Tensor], None]
) -> None:
    module = sharded(nn.Sequential(*(nn.Linear(64, 64) for _ in range(8))), policy())
    manager = PlacementManager(module)
    gc.collect()
    rest = torch.accelerator.memory_allocated()
    torch.accelerator.reset_peak_memory_stats()
    largest = 64 * 64 * 4
    for _, weight in manager.export_weights(bucket_bytes=largest):
        transport(weight)
        assert weight.device == manager.device
    kept_in_the_loop = largest
    assert torch.accelerator.max_memory_allocated() - rest <= largest + kept_in_the_loop
    assert devices(module.parameters()) == {"cpu"}


@field_report("A01", guard="a managed module refuses conversions")
def test_a_trainer_that_moves_every_module_to_the_device_is_refused_a_managed_one(
    one_rank: str,
) -> None:
    module = sharded(normed(), policy())
    manager = PlacementManager(module)
    found = whereabouts(manager)
    with pytest.raises(IllegalTransition, match="CPUOffloadPolicy owns these tensors"):
        nn.ModuleList([nn.Linear(2, 2), module]).to(one_rank)
    assert whereabouts(manager) == found
    backward(module)


@field_report("A08", guard="the end of a save or a load is a boundary")
def test_a_load_that_assigns_a_device_tensor_to_a_managed_module_is_refused_by_name(
    one_rank: str,
) -> None:
    module = sharded(normed(), policy())
    manager = PlacementManager(module)
    state = dict(module.state_dict())
    weight = state["second.weight"]
    state["second.weight"] = DTensor.from_local(
        weight.to_local().to(one_rank), weight.device_mesh, weight.placements
    )
    with pytest.raises(PlacementDrift) as caught, manager.loading():
        module.load_state_dict(state, assign=True)
    assert [line.split()[0] for line in caught.value.tensors] == ["second.weight"]


@field_report("A15", guard="a managed module is used where it rests")
def test_a_load_into_a_managed_module_takes_no_memory_of_the_device_and_the_run_goes_on(
    one_rank: str, tmp_path: Path
) -> None:
    saved = normed_engine(Offload.POLICY)
    saved.train_batch(normed_batch(0))
    saved.save_checkpoint(tmp_path / "checkpoint")
    engine = normed_engine(Offload.POLICY)
    found = whereabouts(saved.manager)
    gc.collect()
    before = torch.accelerator.memory_allocated()
    torch.accelerator.reset_peak_memory_stats()
    engine.load_checkpoint(tmp_path / "checkpoint")
    buffers = sum(buffer.nbytes for buffer in engine.module.buffers())
    assert torch.accelerator.max_memory_allocated() - before <= 2 * buffers + 512
    assert whereabouts(engine.manager) == found
    assert_equal(values(engine.manager.census()), values(saved.manager.census()))
    assert engine.train_batch(normed_batch(1)) == saved.train_batch(normed_batch(1))


# What a failure leaves, and what a save needs.


@field_report("B03", guard="the end of a save or a load is a boundary")
def test_a_callback_that_moves_live_parameters_in_place_is_met_when_the_save_ends(
    one_rank: str,
) -> None:
    module = normed().to(one_rank)
    manager = PlacementManager(module, verify="boundaries")

    def save_callback() -> None:
        for parameter in module.second.parameters():
            parameter.data = parameter.data.cpu()

    with pytest.raises(PlacementDrift, match=r"leaving save refused") as caught, manager.saving():
        save_callback()
    assert caught.value.tensors == ("second.weight (param) on cpu", "second.bias (param) on cpu")


@field_report("B03", guard="exported weights are owned")
def test_exported_weights_that_a_callback_moves_in_place_are_not_the_live_ones(
    one_rank: str,
) -> None:
    module = normed().to(one_rank)
    manager = PlacementManager(module)
    found, before = whereabouts(manager), values(manager.census())
    for _, weight in manager.export_weights():
        weight.zero_()
        weight.data = weight.data.cpu()
    assert whereabouts(manager) == found
    assert_equal(values(manager.census()), before)


@field_report("B06", guard="everything is copied before anything is swapped")
def test_an_onload_that_runs_out_of_memory_at_any_tensor_is_rolled_back_and_can_be_retried(
    one_rank: str,
) -> None:
    if one_rank != "sim":
        pytest.skip("fills the device at a chosen point, which only the simulated one can")
    from placement import sim

    manager = PlacementManager(sharded(normed()), rest=Placement.CPU_MANUAL)
    before = values(manager.census())
    for allocation in range(1, 6):
        with sim.failing(capacity=(allocation, 0)), pytest.raises(torch.OutOfMemoryError):
            manager.onload()
        assert manager.placement is Placement.CPU_MANUAL
        assert {where for where, _ in whereabouts(manager).values()} == {"cpu"}
    manager.onload()
    assert_equal(values(manager.census()), before)


@field_report("B07", guard="what a gathering owner needs is brought")
def test_weights_of_an_offloaded_module_are_saved_without_a_move_of_the_optimizer(
    one_rank: str,
) -> None:
    module, manager = trained_fsdp1()
    bias = module.second.bias.detach().clone()
    with manager.exporting():
        state = get_model_state_dict(module)
        assert manager.placement is Placement.GPU
        assert manager.placements.get(Component.OPTIMIZER) is Placement.CPU_MANUAL
        assert torch.equal(state["second.bias"].cpu(), bias)
    assert manager.placement is Placement.CPU_MANUAL


# Optimizer state.


@field_report("C03", guard="a load brings nothing to the device")
def test_a_resume_into_a_fresh_offloaded_optimizer_needs_no_memory_of_the_device(
    one_rank: str, tmp_path: Path
) -> None:
    saved = normed_engine(Offload.MANUAL)
    saved.train_batch(normed_batch(0))
    saved.save_checkpoint(tmp_path / "checkpoint")
    engine = normed_engine(Offload.MANUAL)
    assert not engine.optimizer.state
    gc.collect()
    before = torch.accelerator.memory_allocated()
    torch.accelerator.reset_peak_memory_stats()
    engine.load_checkpoint(tmp_path / "checkpoint")
    assert torch.accelerator.max_memory_allocated() == before
    assert {where for where, _ in whereabouts(engine.manager).values()} == {"cpu"}
    assert_equal(values(engine.manager.census()), values(saved.manager.census()))


class Hybrid(torch.optim.Optimizer):
    """Optimizers for some parameters each.

    Args:
        module: the module.
        lists_state: whether their state is found under its own name, too.
    """

    def __init__(self, module: nn.Module, *, lists_state: bool) -> None:
        super().__init__(module.parameters(), {})
        weights = [p for p in module.parameters() if p.ndim > 1]
        rest = [p for p in module.parameters() if p.ndim == 1]
        self.inner = [torch.optim.AdamW(weights), torch.optim.SGD(rest, momentum=0.9)]
        self.lists_state = lists_state

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for inner in self.inner:
            inner.step()
            for parameter, entries in inner.state.items() if self.lists_state else ():
                self.state[parameter] = dict(entries)


@field_report("C08", guard="state is looked for in wrapped optimizers")
def test_state_that_only_inner_optimizers_have_moves_as_any_other(
    one_rank: str, trace: Trace
) -> None:
    module = normed().to(one_rank)
    optimizer = Hybrid(module, lists_state=False)
    backward(module)
    optimizer.step()
    assert not optimizer.state
    manager = PlacementManager(module, optimizer, trace=trace)
    moments = [
        value
        for inner in optimizer.inner
        for entries in inner.state.values()
        for value in entries.values()
        if value.ndim
    ]
    before = values(manager.census())
    assert {"optimizer first.weight/exp_avg", "optimizer second.bias/momentum_buffer"} < set(before)
    manager.offload()
    assert devices(moments) == {"cpu"}
    assert_equal(values(manager.census()), before)
    manager.onload()
    assert devices(moments) == {f"{one_rank}:0"}
    backward(module)
    optimizer.step()


@field_report("C08", guard="tensors keep their identity")
def test_state_of_inner_optimizers_is_the_state_that_an_offload_moves(one_rank: str) -> None:
    module = normed().to(one_rank)
    optimizer = Hybrid(module, lists_state=True)
    backward(module)
    optimizer.step()
    PlacementManager(module, optimizer).offload()
    for inner in optimizer.inner:
        for parameter, entries in inner.state.items():
            for key, value in entries.items():
                assert value is optimizer.state[parameter][key]
                assert value.device.type == "cpu"


@field_report("C10", guard="what a gathering owner needs is brought")
def test_a_full_optimizer_state_dict_is_gathered_of_state_that_rests_on_the_cpu(
    one_rank: str,
) -> None:
    module, manager = trained_fsdp1()
    assert manager.optimizer is not None
    average = manager.optimizer.state[module.second.bias]["exp_avg"].clone()
    assert average.device.type == "cpu"
    with manager.saving():
        in_use = [s["exp_avg"] for s in manager.optimizer.state.values()]
        assert devices(in_use) == {f"{one_rank}:0"}
        options = StateDictOptions(full_state_dict=True)
        state = get_optimizer_state_dict(module, manager.optimizer, options=options)["state"]
    assert torch.equal(state["second.bias"]["exp_avg"].cpu(), average)
    assert devices(in_use) == {"cpu"}


@field_report("C11", guard="the compute device has the meshs type")
def test_optimizer_state_is_loaded_to_the_accelerator_of_the_mesh_whatever_its_type(
    one_rank: str,
) -> None:
    if one_rank == "cuda":
        pytest.skip("is about accelerators of other types")
    engine = normed_engine(Offload.NONE)
    engine.train_batch(normed_batch(0))
    with engine.manager.loading():  # of a file that was read to the host
        for state in engine.optimizer.state.values():
            for key in ("exp_avg", "exp_avg_sq"):
                state[key] = state[key].cpu()
    moments = [s[key] for s in engine.optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
    assert devices(moments) == {f"{one_rank}:0"}


@field_report("C15", guard="wrappers keep their global shape")
def test_a_round_trip_of_an_uneven_shard_of_optimizer_state_keeps_its_global_shape(
    one_rank: str,
) -> None:
    module = sharded(nn.Linear(4, 5))
    optimizer = adam(module.parameters())
    shard = torch.randn(3, 4, device=one_rank)  # the first of two shards of 5 rows
    mesh = init_device_mesh(one_rank, (1,))
    uneven = DTensor.from_local(
        shard, mesh, [Shard(0)], run_check=False, shape=torch.Size([5, 4]), stride=(4, 1)
    )
    optimizer.state[module.weight]["exp_avg"] = uneven
    manager = PlacementManager(module, optimizer)
    found, before = uneven._spec, shard.cpu()
    manager.offload()
    assert (uneven.device.type, uneven.shape, uneven._spec) == ("cpu", (5, 4), found)
    manager.onload()
    state = optimizer.state[module.weight]["exp_avg"]
    assert (state.device.type, state.shape, state.stride()) == (one_rank, (5, 4), (4, 1))
    assert (state._spec, state.to_local().shape) == (found, (3, 4))
    assert torch.equal(state.to_local().cpu(), before)


@field_report("C16", guard="tensors are matched with their own copies")
def test_weights_of_interleaved_groups_are_not_swapped_by_a_round_trip(one_rank: str) -> None:
    module = nn.Sequential(*(nn.Linear(3, 3) for _ in range(4))).to(one_rank)
    parameters = list(module.parameters())
    groups = [{"params": parameters[1::2]}, {"params": parameters[::2], "weight_decay": 0.1}]
    optimizer = torch.optim.AdamW(groups)
    module(torch.randn(2, 3, device=one_rank)).sum().backward()
    optimizer.step()
    manager = PlacementManager(module, optimizer)
    before = values(manager.census())
    for move in (manager.offload, manager.onload):
        move()
        assert_equal(values(manager.census()), before)


# Buffers.


@field_report("D05", guard="buffers of a managed module are placed")
def test_a_meta_module_is_initialised_with_parameters_on_the_host_and_buffers_on_the_device(
    one_rank: str,
) -> None:
    with torch.device("meta"):
        module = normed()
    module = sharded(module, policy())
    module.to_empty(device="cpu")
    manager = PlacementManager(module)
    for submodule in (module.first, module.norm, module.second):
        submodule.reset_parameters()
    assert devices(module.parameters()) == {"cpu"}
    assert devices(module.buffers()) == {f"{one_rank}:0"}
    assert torch.equal(module.norm.running_var.cpu(), torch.ones(5))
    with manager.training():
        backward(module)


@field_report("D06", guard="buffers move with the model")
def test_an_offload_reaches_the_registered_buffers_plain_and_wrapped(one_rank: str) -> None:
    mesh = init_device_mesh(one_rank, (1,))
    gc.collect()
    before = torch.accelerator.memory_allocated()
    module = nn.Linear(2, 2, device=one_rank)
    module.register_buffer("plain", torch.ones(100, device=one_rank))
    wrapped = distribute_tensor(torch.ones(100, device=one_rank), mesh, [Replicate()])
    module.register_buffer("wrapped", wrapped)
    PlacementManager(module).offload()
    assert devices(module.buffers()) == {"cpu"}
    assert module.wrapped.to_local().device.type == "cpu"
    gc.collect()
    assert torch.accelerator.memory_allocated() == before


class Container(nn.Module):
    """Owns a parameter, a buffer and another module."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((6,), 2.0))
        self.register_buffer("shift", torch.ones(6))
        self.inner = normed()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(x * self.scale + self.shift)
        return out


@field_report("D11", guard="buffers move with the model")
def test_a_container_with_buffers_of_its_own_is_offloaded_and_used_as_any_other(
    one_rank: str,
) -> None:
    (x,) = normed_batch()
    expected = Container().eval()(x)
    module = Container().eval()
    manager = PlacementManager(module)
    for _ in range(2):
        with manager.evaluating():
            torch.testing.assert_close(module(x.to(one_rank)).cpu(), expected)
        assert devices([module.scale, module.shift]) == {"cpu"}


def compiled(module: nn.Module) -> nn.Module:
    wrapper: nn.Module = torch.compile(module, backend="eager")
    return wrapper


def averaged(module: nn.Module) -> nn.Module:
    return DistributedDataParallel(module)


@field_report("D13", guard="names are without the parts of wrappers")
@pytest.mark.parametrize("wrap", [checkpoint_wrapper, compiled, averaged], ids=lambda w: w.__name__)
def test_a_routing_bias_under_a_wrapper_is_kept_and_exported_by_its_own_name_and_dtype(
    one_rank: str, wrap: Callable[[nn.Module], nn.Module]
) -> None:
    router = nn.Linear(4, 2, dtype=torch.bfloat16)
    router.register_buffer("expert_bias", torch.full((2,), 1 / 3))
    module = nn.Sequential(wrap(router.to(one_rank)))
    manager = PlacementManager(module, stays=["0.expert_bias"])
    exported = dict(manager.export_weights())
    assert exported.keys() == {"0.weight", "0.bias", "0.expert_bias"}
    assert exported["0.weight"].dtype is torch.bfloat16
    assert exported["0.expert_bias"].dtype is torch.float32
    assert torch.equal(exported["0.expert_bias"].cpu(), torch.full((2,), 1 / 3))
    manager.offload()
    on_device = {site.name for site in manager.census().sites if site.device.type == one_rank}
    assert on_device == {"0.expert_bias"}


# Gradients.


def gradients(module: nn.Module) -> dict[str, torch.Tensor]:
    return {n: p.grad.full_tensor().cpu() for n, p in module.named_parameters()}


@field_report("E01", guard="gradients move with their parameters")
def test_gradients_of_two_backward_passes_add_up_with_offload(one_rank: str) -> None:
    untouched = sharded(normed())
    backward(untouched, 0)
    backward(untouched, 1)
    for offload in (None, policy()):
        module = sharded(normed(), offload)
        manager = PlacementManager(module, rest=None if offload else Placement.CPU_MANUAL)
        for number in (0, 1):
            with manager.training():
                backward(module, number)
            assert devices(p.grad for p in module.parameters()) == {"cpu"}
        torch.testing.assert_close(gradients(module), gradients(untouched))


@field_report("E02", guard="unreduced gradients move along")
def test_micro_batches_that_are_reduced_at_the_last_only_accumulate_with_offload(
    one_rank: str,
) -> None:
    untouched = sharded(normed())
    for number in range(3):
        backward(untouched, number)
    gc.collect()
    before = torch.accelerator.memory_allocated()
    module = sharded(normed())
    manager = PlacementManager(module, rest=Placement.CPU_MANUAL, verify="always")
    for number in range(3):
        with manager.training():
            module.set_requires_gradient_sync(number == 2)
            backward(module, number)
        gc.collect()
        assert torch.accelerator.memory_allocated() == before
    torch.testing.assert_close(gradients(module), gradients(untouched))


@field_report("E04", guard="offloaded means landed")
def test_gradients_whose_memory_is_used_again_right_after_an_offload_are_whole_on_the_host(
    one_rank: str,
) -> None:
    module = sharded(normed())
    backward(module)
    before = {name: local(p.grad).cpu() for name, p in module.named_parameters()}
    manager = PlacementManager(module)
    manager.offload()
    in_their_place = [torch.full_like(value, 7, device=one_rank) for value in before.values()]
    after = {name: local(p.grad).clone() for name, p in module.named_parameters()}
    assert_equal(after, before)
    assert devices(in_their_place) == {f"{one_rank}:0"}


@field_report("E05", guard="training brings the optimizer")
def test_with_offload_every_loss_of_a_run_with_micro_batches_and_clipping_is_the_same(
    one_rank: str,
) -> None:
    losses = []
    for offload in Offload:
        engine = normed_engine(offload)
        run = []
        for number in range(4):
            for micro in range(2):
                with engine.train_mode():
                    run.append(backward(engine.module, 2 * number + micro))
            with engine.train_mode():
                nn.utils.clip_grad_norm_(engine.module.parameters(), 0.1)
                engine.optimizer.step()
                engine.optimizer.zero_grad()
        losses.append(run)
    untouched, *offloaded = losses
    for run in offloaded:
        assert run == pytest.approx(untouched, rel=1e-5)


def clips_without_a_backend_for_the_host() -> None:
    device = find_compute_device()
    backend = dist.get_default_backend_for_device(device)
    group = dist.new_group(backend=backend)
    mesh = DeviceMesh.from_group(group, device.type, mesh_dim_names=("device only",))
    module = fully_shard(normed(), mesh=mesh, offload_policy=policy())
    backward(module)
    with pytest.raises(RuntimeError):  # torch's own words, after the first backward pass
        nn.utils.clip_grad_norm_(module.parameters(), 0.1).full_tensor()
    module = fully_shard(normed(), mesh=mesh, offload_policy=policy())
    with pytest.raises(ContradictoryOptions, match=f"no backend for the CPU: {device.type}:"):
        PlacementManager(module)
    untouched = fully_shard(normed().to(device), mesh=mesh)  # gradients on the device
    PlacementManager(untouched)
    backward(untouched)
    nn.utils.clip_grad_norm_(untouched.parameters(), 0.1)


@field_report("E06", guard="gradients on the host need a backend for it")
def test_clipping_under_the_policy_without_a_backend_for_the_host_is_refused_at_adoption(
    two_ranks: Ranks, request: pytest.FixtureRequest
) -> None:
    in_ranks(two_ranks, request, clips_without_a_backend_for_the_host)


# Ties.


@field_report("F04", guard="tensors are read anew for each move")
def test_untying_an_offloaded_head_unties_it(one_rank: str) -> None:
    module = nn.ModuleDict({"embedding": nn.Embedding(8, 4), "head": nn.Linear(4, 8, bias=False)})
    module["head"].weight = module["embedding"].weight
    manager = PlacementManager(module.to(one_rank))
    manager.offload()
    module["head"].weight = nn.Parameter(module["embedding"].weight.detach().clone())
    manager.onload()
    with torch.no_grad():
        module["head"].weight.zero_()
    exported = dict(manager.export_weights())
    assert devices(module.parameters()) == {f"{one_rank}:0"}
    assert exported["head.weight"].count_nonzero() == 0
    assert exported["embedding.weight"].count_nonzero() == 32
