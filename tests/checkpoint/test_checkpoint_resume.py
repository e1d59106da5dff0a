"""A resumed run is the run that was interrupted, bit for bit, whatever policy and ranks it has."""

from __future__ import annotations

import itertools
import random
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from models import (
    adam,
    assert_equal,
    normed,
    normed_batch,
    normed_engine,
    sharded,
    values,
    whereabouts,
)
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy
from torch.nn.parallel import DistributedDataParallel
from training import (
    checkpoints,
    decaying,
    dropping,
    dropping_engine,
    hybrid,
    one_dimension,
    plain_manager,
    stepped,
    tensor_parallel,
    whole_state,
)

from engine import FSDPEngine, Offload
from engine.fsdp_engine import StepResult
from placement import Checkpoints, PlacementManager, Trace
from placement.testing import Ranks

PAIRS = list(itertools.product(Offload, Offload))


def shared_directory() -> Path:
    paths = [tempfile.mkdtemp(prefix="checkpoints-") if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(paths)
    return Path(paths[0])


def own_part(step: int) -> list[torch.Tensor]:
    return [x.chunk(dist.get_world_size())[dist.get_rank()] for x in normed_batch(step)]


def train(engine: FSDPEngine, first: int, last: int) -> list[StepResult]:
    return [engine.train_batch(own_part(step)) for step in range(first, last)]


def draws() -> tuple[float, float, float]:
    """A number from each random generator."""
    device = torch.accelerator.current_accelerator()
    return random.random(), torch.rand(()).item(), torch.rand((), device=device).item()


# The same ranks: the run goes on as if nothing had happened.


def resumed_equals_uninterrupted(saved: Offload, loaded: Offload, blocking: bool) -> None:
    directory = shared_directory()
    torch.manual_seed(7 + dist.get_rank())
    engine = dropping_engine(saved)
    train(engine, 0, 3)
    kept = checkpoints(directory, engine)
    kept.save(3, extras={"epoch": 1}, blocking=blocking)
    uninterrupted = train(engine, 3, 6)
    drawn = draws()
    kept.finish()

    torch.manual_seed(1234)
    resumed = dropping_engine(loaded)
    found = checkpoints(directory, resumed).load()
    assert (found.step, found.extras, found.random_state) == (3, {"epoch": 1}, True)
    assert train(resumed, 3, 6) == uninterrupted
    assert draws() == drawn
    assert resumed.scheduler is not None
    assert engine.scheduler is not None
    assert resumed.scheduler.state_dict() == engine.scheduler.state_dict()
    assert_equal(values(resumed.manager.census()), values(engine.manager.census()))


@pytest.mark.parametrize(("saved", "loaded"), PAIRS)
@pytest.mark.parametrize("blocking", [True, False], ids=["blocking", "not blocking"])
def test_a_resumed_run_equals_the_uninterrupted_one_for_every_pair_of_policies(
    on_ranks: Callable[..., None], saved: Offload, loaded: Offload, blocking: bool
) -> None:
    on_ranks(resumed_equals_uninterrupted, saved, loaded, blocking)


# Other ranks: the state is the same.


def saved_state(offload: Offload, directory: Path, blocking: bool) -> dict[str, torch.Tensor]:
    engine = dropping_engine(offload)
    train(engine, 0, 3)
    kept = checkpoints(directory, engine)
    kept.save(3, blocking=blocking)
    kept.finish()
    return whole_state(engine.manager)


def loaded_state(offload: Offload, directory: Path) -> dict[str, torch.Tensor]:
    engine = dropping_engine(offload)
    before = draws()
    torch.manual_seed(5)
    random.seed(5)
    expected = draws()
    torch.manual_seed(5)
    random.seed(5)
    found = checkpoints(directory, engine).load()
    assert found.step == 3
    assert not found.random_state
    assert draws() == expected != before
    assert engine.scheduler is not None
    assert engine.scheduler.last_epoch == 3
    state = whole_state(engine.manager)
    train(engine, 3, 4)
    return state


@pytest.mark.parametrize(("saved", "loaded"), PAIRS)
@pytest.mark.parametrize(
    ("writers", "readers"), [(1, 2), (2, 1), (2, 4), (4, 1)], ids=lambda n: f"{n}"
)
def test_the_state_is_the_same_on_another_number_of_ranks(
    ranks: Callable[[int], Ranks],
    tmp_path: Path,
    saved: Offload,
    loaded: Offload,
    writers: int,
    readers: int,
) -> None:
    written = ranks(writers).run(saved_state, saved, tmp_path, saved is loaded)
    for read in ranks(readers).run(loaded_state, loaded, tmp_path):
        assert_equal(read, written[0])


# Other wrappers.


def wrapped(how: str, device: str) -> PlacementManager:
    if how == "fsdp2":
        return dropping_engine(Offload.NONE).manager
    if how == "ddp":
        module = DistributedDataParallel(dropping().to(device))
        return PlacementManager(module, adam(module.parameters()), trace=Trace())
    if how == "compiled":
        module = torch.compile(dropping().to(device), backend="eager")
        return PlacementManager(module, adam(module.parameters()), trace=Trace())
    return plain_manager()


def same_but_for_wrappers(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        name.replace("module.", "").replace("_orig_mod.", ""): value
        for name, value in state.items()
    }


@pytest.mark.parametrize("saved", ["plain", "fsdp2", "ddp", "compiled"])
@pytest.mark.parametrize("loaded", ["plain", "fsdp2", "ddp", "compiled"])
def test_what_one_wrapper_saved_another_loads(
    one_rank: str, tmp_path: Path, saved: str, loaded: str
) -> None:
    first = stepped(wrapped(saved, one_rank))
    Checkpoints(tmp_path, first).save(1)
    second = wrapped(loaded, one_rank)
    Checkpoints(tmp_path, second).load()
    assert_equal(
        same_but_for_wrappers(whole_state(second)), same_but_for_wrappers(whole_state(first))
    )


# States that torch's own functions change on their way.


def test_saving_an_optimizer_that_took_no_step_leaves_it_so(one_rank: str, tmp_path: Path) -> None:
    engine = dropping_engine(Offload.NONE)
    checkpoints(tmp_path, engine).save(0)
    assert not engine.optimizer.state
    other = dropping_engine(Offload.NONE)
    train(other, 0, 1)
    checkpoints(tmp_path, other).load()
    assert not other.optimizer.state
    torch.manual_seed(3)
    expected = train(engine, 0, 2)
    torch.manual_seed(3)
    assert train(other, 0, 2) == expected


@pytest.mark.parametrize("shard", [False, True], ids=["plain", "fsdp2"])
def test_state_of_a_wider_dtype_than_its_parameter_stays_wide(
    one_rank: str, tmp_path: Path, shard: bool
) -> None:
    class Wide(torch.optim.Optimizer):
        """Sums gradients in float32, whatever the parameter's dtype."""

        def step(self, closure: None = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for parameter in group["params"]:
                    state = self.state[parameter]
                    state["sum"] = parameter.grad.float() / 3 + state.get("sum", 0)

    def managed() -> PlacementManager:
        module = dropping().bfloat16().to(one_rank)
        module = sharded(module) if shard else module
        return PlacementManager(module, Wide(module.parameters(), {}), trace=Trace())

    first, second = stepped(managed()), managed()
    Checkpoints(tmp_path, first).save(1)
    Checkpoints(tmp_path, second).load()
    assert_equal(whole_state(second), whole_state(first))


def test_a_parameter_that_never_had_a_gradient_has_no_state_after_a_load_either(
    one_rank: str, tmp_path: Path
) -> None:
    managers = [plain_manager(), plain_manager()]
    first, second = managers
    with first.training():
        module, optimizer = first.module, first.optimizer
        assert optimizer is not None
        module.first.weight.grad = torch.ones_like(module.first.weight)
        optimizer.step()
    Checkpoints(tmp_path, first).save(1)
    Checkpoints(tmp_path, second).load()
    assert second.optimizer is not None
    assert len(second.optimizer.state) == 1
    first.optimizer.zero_grad()  # type: ignore[union-attr]
    assert_equal(whole_state(second), whole_state(first))


def test_tied_parameters_and_extra_state_come_back(one_rank: str, tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4, bias=False)
            self.second = nn.Linear(4, 4, bias=False)
            self.second.weight = self.first.weight
            self.seen: dict[int, tuple[str, torch.Tensor]] = {}

        def get_extra_state(self) -> object:
            return self.seen

        def set_extra_state(self, state: object) -> None:
            self.seen = state  # type: ignore[assignment]

    first, second = stepped(plain_manager(Tied())), plain_manager(Tied())
    first.module.seen = {3: ("three", torch.arange(3))}  # type: ignore[assignment]
    Checkpoints(tmp_path, first).save(1)
    Checkpoints(tmp_path, second).load()
    assert_equal(whole_state(second), whole_state(first))
    text, tensor = second.module.seen[3]  # type: ignore[index]
    assert text == "three"
    assert torch.equal(tensor, torch.arange(3))


def test_extra_state_that_is_a_tensor_may_have_any_shape(one_rank: str, tmp_path: Path) -> None:
    class Counting(nn.Linear):
        seen = torch.zeros(0)

        def get_extra_state(self) -> torch.Tensor:
            return self.seen

        def set_extra_state(self, state: object) -> None:
            assert isinstance(state, torch.Tensor)
            self.seen = state

    first, second = plain_manager(Counting(2, 2)), plain_manager(Counting(2, 2))
    first.module.seen = torch.arange(5)
    Checkpoints(tmp_path, first).save(1)
    Checkpoints(tmp_path, second).load()
    assert torch.equal(second.module.seen, torch.arange(5))  # type: ignore[arg-type]


@pytest.mark.parametrize("offload", Offload)
def test_what_was_loaded_has_memory_of_its_own(
    one_rank: str, tmp_path: Path, offload: Offload
) -> None:
    engine = dropping_engine(offload)
    train(engine, 0, 1)
    checkpoints(tmp_path, engine).save(1, [torch.arange(3), torch.arange(4)])
    fresh = dropping_engine(offload)
    extras = checkpoints(tmp_path, fresh).load().extras
    file = tmp_path / "step-00000001" / "rank-00000.safetensors"
    with file.open("r+b") as open_file:  # the same file, whose pages a mapping would show
        open_file.write(bytes(file.stat().st_size))
    assert_equal(values(fresh.manager.census()), values(engine.manager.census()))
    assert torch.equal(extras[1], torch.arange(4))


def test_groups_with_tensors_for_options_come_back(one_rank: str, tmp_path: Path) -> None:
    def managed(rate: float) -> PlacementManager:
        module = dropping().to(one_rank)
        optimizer = torch.optim.AdamW(
            [
                {"params": [*module.second.parameters()], "weight_decay": 0.25},
                {"params": [*module.first.parameters()]},
            ],
            lr=torch.tensor(rate),
            capturable=False,
            foreach=False,
        )
        return PlacementManager(module, optimizer, trace=Trace())

    first, second = stepped(managed(0.1)), managed(0.2)
    Checkpoints(tmp_path, first).save(1)
    Checkpoints(tmp_path, second).load()
    assert second.optimizer is not None
    assert [group["weight_decay"] for group in second.optimizer.param_groups] == [0.25, 0.01]
    assert all(group["lr"] == torch.tensor(0.1) for group in second.optimizer.param_groups)
    assert_equal(whole_state(second), whole_state(first))


# What a save and a load leave alone.


@pytest.mark.parametrize("offload", Offload)
def test_a_load_takes_the_tensors_that_are_there(
    one_rank: str, tmp_path: Path, offload: Offload
) -> None:
    engine = normed_engine(offload)
    engine.train_batch(normed_batch(0))
    engine.save_checkpoint(tmp_path)
    places = whereabouts(engine.manager)
    tensors = [site.holding.tensor for site in engine.manager.census().sites]
    engine.load_checkpoint(tmp_path)
    assert whereabouts(engine.manager) == places
    after = [site.holding.tensor for site in engine.manager.census().sites]
    assert all(
        one is other for one, other in zip(tensors, after, strict=True)
    )  # so references to them hold, and no memory is taken


def test_a_checkpoint_of_one_step_is_found_among_others(one_rank: str, tmp_path: Path) -> None:
    manager = stepped(plain_manager())
    kept = Checkpoints(tmp_path, manager, scheduler=decaying(manager.optimizer))
    states = {}
    for step in (3, 20, 100):
        stepped(manager, step)
        kept.save(step)
        states[step] = whole_state(manager)
    assert kept.steps() == [3, 20, 100]
    for step, state in states.items():
        assert kept.load(step).step == step
        assert_equal(whole_state(manager), state)
    assert kept.load().step == 100


def test_a_module_with_no_optimizer_is_saved_and_loaded(one_rank: str, tmp_path: Path) -> None:
    first = PlacementManager(normed().to(one_rank), trace=Trace())
    Checkpoints(tmp_path, first).save(1)
    second = PlacementManager(normed().to(one_rank), trace=Trace())
    with torch.no_grad():
        second.module.first.weight.zero_()
    Checkpoints(tmp_path, second).load()
    assert_equal(whole_state(second), whole_state(first))


# Meshes of two dimensions.

Shard = Callable[[OffloadPolicy], nn.Module]


def adopted(shard: Shard, policy: OffloadPolicy) -> PlacementManager:
    module = shard(policy)
    return PlacementManager(module, adam(module.parameters()), trace=Trace(), verify="always")


def crosses_over(saved: Shard, loaded: Shard, policy: OffloadPolicy) -> None:
    directory = shared_directory()
    manager = stepped(adopted(saved, policy))
    Checkpoints(directory, manager).save(1)
    other = stepped(adopted(loaded, OffloadPolicy()), number=1)
    assert Checkpoints(directory, other).load().step == 1
    assert_equal(whole_state(other), whole_state(manager))


@pytest.mark.parametrize("policy", [OffloadPolicy(), CPUOffloadPolicy()], ids=["none", "policy"])
@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        (hybrid, hybrid),
        (tensor_parallel, tensor_parallel),
        (hybrid, tensor_parallel),
        (tensor_parallel, one_dimension),
        (one_dimension, hybrid),
    ],
)
def test_a_checkpoint_goes_from_one_mesh_to_another(
    ranks: Callable[[int], Ranks], saved: Shard, loaded: Shard, policy: OffloadPolicy
) -> None:
    ranks(4).run(crosses_over, saved, loaded, policy)
