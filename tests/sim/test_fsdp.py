"""Real FSDP on the simulation: losses and gradient norms are those of a plain CPU model.

The norms matter: AdamW hides a wrong scale of the gradients from the losses.
"""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tiny_model import (
    cpu_twin_steps,
    make_model,
    make_optimizer,
    make_tokens,
    put_buffers_on,
    shard,
    train_step,
)
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffload,
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
)
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from placement import sim
from placement.testing import Ranks

STEPS = 3
ISSUE_5995 = (
    'Attempted to set the storage of a tensor on device "cpu" to a storage on different device '
    '"sim:{rank}".'
)


def own_device() -> torch.device:
    return torch.device("sim", torch.sim.current_device())


def flat_mesh() -> DeviceMesh:
    return init_device_mesh("sim", (dist.get_world_size(),))


def sharded_model(**policies: Any) -> nn.Module:
    return shard(make_model().to(own_device()), flat_mesh(), **policies)


def offloaded_model(pin_memory: bool) -> nn.Module:
    return sharded_model(offload_policy=CPUOffloadPolicy(pin_memory=pin_memory))


def steps_of(model: nn.Module, count: int = STEPS) -> list[tuple[float, float]]:
    optimizer = make_optimizer(model)
    tokens = make_tokens().to(own_device())
    return [train_step(model, optimizer, tokens) for _ in range(count)]


def move_state(optimizer: torch.optim.Optimizer, device: torch.device | str) -> None:
    for state in optimizer.state.values():
        state.update({k: v.to(device) for k, v in state.items() if k != "step"})


def locals_of(model: nn.Module) -> list[torch.Tensor]:
    return [p.to_local() if isinstance(p, DTensor) else p.data for p in model.parameters()]


def assert_trains_like_the_twin(
    results: list[list[tuple[float, float]]], tolerance: float = 1e-4, steps: int = STEPS
) -> None:
    expected = cpu_twin_steps(steps)
    for steps_of_rank in results:
        for (loss, norm), (expected_loss, expected_norm) in zip(
            steps_of_rank, expected, strict=True
        ):
            assert loss == pytest.approx(expected_loss, rel=tolerance)
            assert norm == pytest.approx(expected_norm, rel=tolerance)


# ---- training


def train_sharded() -> list[tuple[float, float]]:
    return steps_of(sharded_model())


def test_fsdp2_trains_like_the_cpu(two_ranks: Ranks) -> None:
    assert_trains_like_the_twin(two_ranks.run(train_sharded))


def train_offloaded(pin_memory: bool, delayed: bool) -> dict[str, Any]:
    pinned_before = sim.pinned_bytes()
    model = offloaded_model(pin_memory)
    held = sim.pinned_bytes() - pinned_before
    sim.set_delayed_copies(delayed)
    steps = steps_of(model)
    return {
        "steps": steps,
        "parameters": {local.device.type for local in locals_of(model)},
        "are pinned": {local.is_pinned() for local in locals_of(model)},
        "pinned bytes": held,
        # with the padding that makes shards equally large
        "shard bytes": sum(local.untyped_storage().nbytes() for local in locals_of(model)),
    }


@pytest.mark.parametrize("delayed", [False, True], ids=["prompt", "delayed"])
@pytest.mark.parametrize("pin_memory", [False, True], ids=["pageable", "pinned"])
def test_fsdp2_with_cpu_offload_trains_like_the_cpu(
    two_ranks: Ranks, pin_memory: bool, delayed: bool
) -> None:
    results = two_ranks.run(train_offloaded, pin_memory, delayed)
    assert_trains_like_the_twin([result["steps"] for result in results])
    for result in results:
        assert result["parameters"] == {"cpu"}
        assert result["are pinned"] == {pin_memory}
        assert result["pinned bytes"] == (result["shard bytes"] if pin_memory else 0)


def train_without_waiting_for_gradients(forgets: bool) -> bool:
    """Return whether all parameters are finite after a step of an FSDP2 that forgets to wait."""
    model = offloaded_model(pin_memory=True)
    optimizer = make_optimizer(model)
    nothing = property(lambda self: None, lambda self, event: None)
    with sim.delayed_copies(), pytest.MonkeyPatch.context() as patch:
        if forgets:
            patch.setattr(FSDPParam, "grad_offload_event", nothing, raising=False)
        model(make_tokens().to(own_device())).sum().backward()
        optimizer.step()
    return all(local.isfinite().all().item() for local in locals_of(model))


@pytest.mark.parametrize("forgets", [False, True])
def test_an_fsdp2_that_forgot_to_wait_for_its_gradients_would_train_on_poison(
    two_ranks: Ranks, forgets: bool
) -> None:
    assert two_ranks.run(train_without_waiting_for_gradients, forgets) == [not forgets] * 2


def train_hybrid() -> list[tuple[float, float]]:
    mesh = init_device_mesh("sim", (2, 2), mesh_dim_names=("replicate", "shard"))
    return steps_of(shard(make_model().to(own_device()), mesh))


def test_hybrid_sharding_on_four_ranks_trains_like_the_cpu(four_ranks: Ranks) -> None:
    assert_trains_like_the_twin(four_ranks.run(train_hybrid))


def train_ddp() -> list[tuple[float, float]]:
    return steps_of(DistributedDataParallel(make_model().to(own_device())))


def test_ddp_trains_like_the_cpu(two_ranks: Ranks) -> None:
    assert_trains_like_the_twin(two_ranks.run(train_ddp))


def train_fsdp1(cpu_offload: bool) -> list[tuple[float, float]]:
    model = FullyShardedDataParallel(
        make_model(),
        device_id=own_device(),
        cpu_offload=CPUOffload(cpu_offload),
        use_orig_params=True,
        device_mesh=flat_mesh(),
    )
    optimizer = make_optimizer(model)
    tokens = make_tokens().to(own_device())
    steps = []
    for _ in range(STEPS):
        logits = model(tokens)
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        norm = model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        steps.append((loss.item(), norm.item()))
    return steps


@pytest.mark.parametrize("cpu_offload", [False, True], ids=["on device", "offloaded"])
def test_fsdp1_trains_like_the_cpu(two_ranks: Ranks, cpu_offload: bool) -> None:
    assert_trains_like_the_twin(two_ranks.run(train_fsdp1, cpu_offload))


def train_in_bfloat16() -> list[tuple[float, float]]:
    return steps_of(sharded_model(mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32)))


def test_mixed_precision_trains_close_to_the_cpu(two_ranks: Ranks) -> None:
    assert_trains_like_the_twin(two_ranks.run(train_in_bfloat16), tolerance=2e-2)


def norm_with_divide_factor() -> float:
    model = sharded_model()
    for block in model.blocks:
        block.set_gradient_divide_factor(3.0)
    model.set_gradient_divide_factor(3.0)
    return steps_of(model, 1)[0][1]


def test_a_gradient_divide_factor_scales_the_norm(two_ranks: Ranks) -> None:
    expected = cpu_twin_steps(1)[0][1] * 2 / 3  # the sum over two ranks, divided by three
    assert two_ranks.run(norm_with_divide_factor) == [pytest.approx(expected, rel=1e-4)] * 2


def tensor_parallel_difference() -> float:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)).to(own_device())
    x = torch.ones(2, 8, device=own_device())
    expected = model(x)
    parallelize_module(model, flat_mesh(), {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return (model(x) - expected).abs().max().item()


def test_tensor_parallelism_changes_no_values(two_ranks: Ranks) -> None:
    assert max(two_ranks.run(tensor_parallel_difference)) < 1e-6


# ---- moving


def move_there_and_back() -> dict[str, Any]:
    gc.collect()
    base = torch.sim.memory_allocated()
    model = sharded_model()
    parameters = list(model.parameters())
    optimizer = make_optimizer(model)
    tokens = make_tokens().to(own_device())
    steps = [train_step(model, optimizer, tokens)]

    model.to("cpu")
    move_state(optimizer, "cpu")
    away = torch.sim.memory_allocated() - base - tokens.nbytes
    message = ""
    try:
        model(tokens)
    except RuntimeError as error:
        message = str(error)
    state_devices = {value.device.type for value in model.state_dict().values()}

    model.to(own_device())
    move_state(optimizer, own_device())
    steps += [train_step(model, optimizer, tokens) for _ in range(STEPS - 1)]
    same = all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    return {
        "steps": steps,
        "bytes left on the device": away,
        "error while away": message,
        "state dict while away": state_devices,
        "same parameters": same,
    }


def test_a_model_moved_to_the_cpu_and_back_trains_on(two_ranks: Ranks) -> None:
    results = two_ranks.run(move_there_and_back)
    assert_trains_like_the_twin([result["steps"] for result in results])
    for result in results:
        assert result["bytes left on the device"] == 0
        assert "Expected all tensors to be on the same device" in result["error while away"]
        assert result["state dict while away"] == {"cpu"}
        assert result["same parameters"]


def error_of_issue_5995(pin_memory: bool, steps_before: int) -> str:
    model = offloaded_model(pin_memory)
    steps_of(model, steps_before)
    model.to(own_device())
    try:
        model.state_dict()
    except RuntimeError as error:
        return str(error)
    return "nothing was raised"


@pytest.mark.parametrize("steps_before", [0, 1], ids=["before training", "after a step"])
def test_moving_an_offloaded_model_breaks_its_state_dict_as_in_verl_issue_5995(
    two_ranks: Ranks, steps_before: int
) -> None:
    """https://github.com/volcengine/verl/issues/5995"""
    for rank, message in enumerate(two_ranks.run(error_of_issue_5995, True, steps_before)):
        assert message.startswith(ISSUE_5995.format(rank=rank))


def recover_after_issue_5995() -> tuple[set[str], float]:
    model = offloaded_model(pin_memory=True)
    model.to(own_device())
    model.to("cpu")
    put_buffers_on(model, own_device())  # model.to() moved them along
    devices = {value.device.type for value in model.state_dict().values()}
    return devices, steps_of(model, 1)[0][1]


def test_moving_the_model_back_and_its_buffers_to_the_device_recovers(two_ranks: Ranks) -> None:
    expected = cpu_twin_steps(1)[0][1]
    for devices, norm in two_ranks.run(recover_after_issue_5995):
        assert devices == {"cpu", "sim"}
        assert norm == pytest.approx(expected, rel=1e-4)


def gradient_error_after_moving() -> str:
    model = offloaded_model(pin_memory=False)
    steps_of(model, 1)
    model.to(own_device())
    model.state_dict()  # silently succeeds where nothing is pinned
    try:
        steps_of(model, 1)
    except RuntimeError as error:
        return str(error)
    return "nothing was raised"


def test_moving_an_offloaded_model_without_pinning_breaks_its_backward_pass(
    two_ranks: Ranks,
) -> None:
    for message in two_ranks.run(gradient_error_after_moving):
        assert "gradient with device type 'cpu' to a tensor with device type 'sim'" in message


def error_of_a_fresh_model_moved() -> str:
    model = offloaded_model(pin_memory=True)
    model.to(own_device())
    try:
        model(make_tokens().to(own_device()))
    except RuntimeError as error:
        return str(error)
    return "nothing was raised"


def test_fsdp2_refuses_to_offload_a_model_that_is_on_the_device(two_ranks: Ranks) -> None:
    for message in two_ranks.run(error_of_a_fresh_model_moved):
        assert "should be materialized on CPU when enabling CPU offloading" in message


def error_when_memory_runs_out() -> tuple[str, float]:
    model = sharded_model()
    optimizer = make_optimizer(model)
    tokens = make_tokens().to(own_device())
    train_step(model, optimizer, tokens)
    torch.sim.empty_cache()
    sim.set_capacity(torch.sim.memory_reserved() + 20_000)
    try:
        train_step(model, optimizer, tokens)
        message = "nothing was raised"
    except torch.OutOfMemoryError as error:
        message = str(error)
    finally:
        sim.set_capacity(None)
    return message, model.head.weight.full_tensor().isfinite().all().item()


def test_memory_runs_out_inside_fsdp(two_ranks: Ranks) -> None:
    for message, is_finite in two_ranks.run(error_when_memory_runs_out):
        assert message.startswith("sim out of memory. Tried to allocate")
        assert is_finite


# ---- initialising, saving, loading


def initialise_on_meta() -> tuple[bool, float]:
    with torch.device("meta"):
        model = make_model()
    shard(model, flat_mesh())
    model.to_empty(device=own_device())
    torch.manual_seed(1)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02)
    full = model.head.weight.full_tensor()
    halves_differ = not torch.equal(full[:31], full[30:])
    return halves_differ, full.std().item()


def test_a_model_made_on_meta_is_initialised_on_the_device(two_ranks: Ranks) -> None:
    for halves_differ, deviation in two_ranks.run(initialise_on_meta):
        assert halves_differ
        assert deviation == pytest.approx(0.02, rel=0.1)


def load_from_rank_zero() -> float:
    reference = make_model()
    with torch.device("meta"):
        model = make_model()
    shard(model, flat_mesh(), offload_policy=CPUOffloadPolicy(pin_memory=False))
    model.to_empty(device="cpu")
    set_model_state_dict(
        model,
        reference.state_dict() if dist.get_rank() == 0 else {},
        options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, cpu_offload=True),
    )
    put_buffers_on(model, own_device())
    tokens = make_tokens()
    return (model(tokens.to(own_device())).cpu() - reference(tokens)).abs().max().item()


def test_an_offloaded_model_loads_what_rank_zero_broadcasts(two_ranks: Ranks) -> None:
    assert max(two_ranks.run(load_from_rank_zero)) < 1e-5


def save_spoil_and_load(kind: str, folder: Path) -> dict[str, Any]:
    model = offloaded_model(kind == "pinned") if kind != "on device" else sharded_model()
    optimizer = make_optimizer(model)
    tokens = make_tokens().to(own_device())
    train_step(model, optimizer, tokens)
    saved = [local.clone() for local in locals_of(model)]

    model_state, optimizer_state = get_state_dict(model, optimizer)
    devices = {value.device.type for value in model_state.values()}
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()

    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    loaded = locals_of(model)
    full, _ = get_state_dict(
        model, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
    return {
        "devices": devices,
        "restored": all(torch.equal(a, b) for a, b in zip(saved, loaded, strict=True)),
        "full devices": {value.device.type for value in full.values()},
        "next step": train_step(model, optimizer, tokens),
    }


@pytest.mark.parametrize("kind", ["on device", "pageable", "pinned"])
def test_a_checkpoint_restores_the_model(two_ranks: Ranks, kind: str, tmp_path: Path) -> None:
    expected = cpu_twin_steps(2)[1]
    for rank, result in enumerate(two_ranks.run(save_spoil_and_load, kind, tmp_path)):
        # the buffers stay on the device under an offload policy
        assert result["devices"] == ({"sim"} if kind == "on device" else {"cpu", "sim"})
        assert result["restored"]
        assert result["full devices"] == ({"cpu"} if rank == 0 else set())
        assert result["next step"] == pytest.approx(expected, rel=1e-3)
