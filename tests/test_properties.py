"""Any history of lifecycle calls, with failures in it, agrees with a simple model of the rules.

Hypothesis draws a module, how it is sharded and offloaded, an optimizer, and then a sequence of
moves, contexts (nested, and closed in any order), training steps, checkpoints, exports, moves past
the manager and injected failures. After each step

- the placements are those of the model below, which is written from the documented rules and shares
  no code with the manager;
- each tensor is on the device that the placement means, by a look of this test's own, and the
  manager's census agrees with its record;
- all values equal, bit for bit, those of a twin on the CPU that did the same steps and no moves;
- parameters are the same objects, and tensors share memory with those that they shared it with.

In the end all contexts are closed; then what was found first is there again, and the trace is a
legal history of the table.

Locally each run draws other examples; with ``CI`` set they are the same each time.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from models import copied, load, local, state_dict_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.utils._pytree import tree_map_only

from placement import (
    TABLE,
    AlreadyManaged,
    Component,
    EventKind,
    IllegalTransition,
    Kind,
    Legal,
    Outcome,
    Placement,
    PlacementDrift,
    PlacementHeld,
    PlacementManager,
    Trace,
    Trigger,
    find_compute_device,
)

GPU, CPU, MANAGED = Placement.GPU, Placement.CPU_MANUAL, Placement.CPU_FSDP2_MANAGED
PARAMS, GRADS, BUFFERS, OPTIMIZER = Component

EXAMPLES = 300
STEPS = 10

# The modules. Each is a small stack to which hypothesis adds peculiarities.

PLAIN = ("tied", "frozen", "buffers", "views", "mixed dtypes")
SHARDED = ("tied", "frozen", "buffers", "mixed dtypes")  # FSDP2 gives each shard its own memory


class Scale(nn.Module):
    """A factor of its own dtype, in a group of its own: FSDP2 wants one dtype in a group."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(3, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor.to(x.dtype)


class Drawn(nn.Module):
    def __init__(self, features: frozenset[str]) -> None:
        super().__init__()
        self.features = features
        self.first = nn.Linear(3, 4)
        self.second = nn.Linear(4, 3)
        if "tied" in features:
            self.third, self.fourth = nn.Linear(3, 3), nn.Linear(3, 3, bias=False)
            self.fourth.weight = self.third.weight
        if "frozen" in features:
            self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        if "buffers" in features:
            self.register_buffer("seen", torch.zeros(2))  # changed by each forward pass
            self.register_buffer("same_seen", self.seen)
            self.register_buffer("offset", torch.randn(3), persistent=False)
        if "views" in features:
            slab = torch.randn(9)
            self.left = nn.Parameter(slab[:3])
            self.right = nn.Parameter(slab[3:].view(3, 2).t()[1])
            self.register_buffer("counts", torch.zeros(2))
            self.register_buffer("last_count", self.counts[1:])
        if "mixed dtypes" in features:
            self.low, self.high = Scale(torch.bfloat16), Scale(torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.second(torch.tanh(self.first(x)))
        if "tied" in self.features:
            y = self.fourth(self.third(y))
        if "frozen" in self.features:
            y = y * self.frozen
        if "views" in self.features:
            y = y * self.left + self.right + self.last_count
            self.counts.add_(1)
        if "mixed dtypes" in self.features:
            y = self.high(self.low(y))
        if "buffers" in self.features:
            y = y + self.offset
            self.seen.add_(1)
        return y


def drawn(features: frozenset[str]) -> Drawn:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Drawn(features)


def shard(module: Drawn, policy: OffloadPolicy) -> Drawn:
    """Several groups: one a layer, one a dtype, and the root's, which may have no parameter."""
    mesh = init_device_mesh(find_compute_device().type, (1,))
    for child in module.modules():
        if child in (module.first, module.second) or isinstance(child, Scale):
            fully_shard(child, mesh=mesh, offload_policy=policy)
    return fully_shard(module, mesh=mesh, offload_policy=policy)


POLICIES: dict[str, Callable[[], OffloadPolicy]] = {
    "none": OffloadPolicy,
    "pinned": CPUOffloadPolicy,
    "not pinned": lambda: CPUOffloadPolicy(pin_memory=False),
}
KINDS = ["not sharded", "not sharded", "none", *POLICIES]

OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None] = {
    "none": None,
    "without state": lambda p: torch.optim.SGD(p, lr=0.1, foreach=False),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=False),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=False),
}

# The rules, as documented.

NEEDS: dict[str, set[Component]] = {
    "train": {PARAMS, GRADS, BUFFERS, OPTIMIZER},
    "evaluate": {PARAMS, BUFFERS},
    "save": set(),
    "load": set(),
    "export": set(),
}
HELD = {
    "train": set(Component),
    "evaluate": {PARAMS, BUFFERS},
    "save": set(Component),
    "load": set(Component),
    "export": {PARAMS, BUFFERS},
}
NOT_INSIDE = {
    "train": {"save", "load", "export"},
    "evaluate": {"load"},
    "save": {"load"},
    "load": {"save", "export"},
    "export": {"load"},
}


@dataclass(eq=False)
class Open:
    """An open context: what it is for, what holds it open, and what it will put back."""

    operation: str
    generator: Generator[Any]
    found: dict[Component, Placement]


Failure = tuple[str, int]

FAILURES = st.one_of(
    st.none(),
    st.tuples(st.sampled_from(["copy", "allocation"]), st.integers(1, 8)),
)


class History:
    """One manager, its twin on the CPU, and the model of what it should do.

    Args:
        data: where modules, steps and failures are drawn from.
    """

    def __init__(self, data: st.DataObject) -> None:
        self.draw = data.draw
        policy = self.draw(st.sampled_from(KINDS), label="policy")
        sharded = policy in POLICIES
        optimizer = self.draw(st.sampled_from(list(OPTIMIZERS)), label="optimizer")
        rest = self.draw(st.sampled_from([None, CPU, CPU, GPU]), label="rest")
        on_drift = self.draw(st.sampled_from(["raise", "adopt"]), label="on_drift")
        verify = self.draw(st.sampled_from(["boundaries", "always"]), label="verify")
        possible = SHARDED if sharded else PLAIN
        features = frozenset(f for f in possible if self.draw(st.booleans(), label=f))
        self.device = find_compute_device()
        self.managed = policy in ("pinned", "not pinned")
        self.sharded = sharded
        self.adopts = on_drift == "adopt"
        self.module, self.twin = drawn(features), drawn(features)
        if sharded:
            shard(self.module, POLICIES[policy]())
        make = OPTIMIZERS[optimizer]
        self.optimizer = make(self.module.parameters()) if make else None
        self.twin_optimizer = make(self.twin.parameters()) if make else None
        self.keeps_state = optimizer in ("momentum", "adamw")
        self.has_state = False
        self.trace = Trace()
        self.manager = PlacementManager(
            self.module,
            self.optimizer,
            rest=None if self.managed else rest,
            on_drift=on_drift,
            verify=verify,
            trace=self.trace,
        )
        components = [c for c in Component if make or c is not OPTIMIZER]
        found = MANAGED if self.managed else GPU if sharded else CPU
        self.adopted = dict.fromkeys(components, found)
        self.at = dict.fromkeys(components, found if self.managed else rest or found)
        self.home = dict(self.at)
        self.open: list[Open] = []
        self.batches = 0
        self.checkpoint: list[Any] | None = None
        self.facts = facts(self.manager)
        if self.draw(st.booleans(), label="trained"):
            with self.manager.training():
                self.train_step()

    # The steps.

    def possible(self) -> list[Callable[[], None]]:
        """The steps to choose from now, the likely ones several times. An example is made simpler
        by choosing the first."""
        steps = [self.do_nothing] + [self.move_by_hand] * 3 + [self.enter] * 6
        steps += [self.save, self.load, self.make_a_second_manager]
        if self.open:
            steps += [self.leave] * 5 + [self.detach_inside_a_context]
        if self.is_open("train", "evaluate") and not self.is_open("load"):
            steps += [self.evaluate] * 5
        if self.is_open("train") and not self.is_open("save", "load", "export"):
            steps += [self.train_step] * 10 + [self.break_off_a_forward_pass]
        if self.is_open("export"):
            steps += [self.take_the_next_weight] * 3
        elif len({self.at[c] for c in (PARAMS, GRADS, BUFFERS) if c not in self.empty()}) == 1:
            # module.to() moves them all, and gives the module other buffers than those that an
            # export has begun on.
            steps += [self.move_past_the_manager]
        return steps

    def go_on(self) -> None:
        """Take a step, and check what holds after each."""
        names = [step.__name__ for step in self.possible()]
        getattr(self, self.draw(st.sampled_from(names), label="step"))()
        self.check()

    def do_nothing(self) -> None:
        pass

    def check(self) -> None:
        assert self.placements() == self.at
        self.the_tensors_are_where_the_placements_say()
        self.the_values_are_those_of_the_twin()
        assert facts(self.manager) == self.facts, "identity, layout or sharing changed"

    def finish(self) -> None:
        """End all contexts, and look at the trace."""
        while self.open:
            self.end_context(self.open[-1], "end", None)
            self.check()
        require_legal(self.trace, self.adopted, self.at)

    # The model.

    def moves(self, wanted: dict[Component, Placement]) -> dict[Component, Placement]:
        """What changes its placement if ``wanted`` is brought about."""
        moving = {c: dest for c, dest in wanted.items() if self.at[c] is not dest}
        if PARAMS in moving:
            along = (self.empty() & self.at.keys()) - wanted.keys()
            moving |= dict.fromkeys(along, moving[PARAMS])
        return moving

    def empty(self) -> set[Component]:
        """The components without tensors, which go where the parameters go."""
        tensors: dict[Component, bool] = {
            PARAMS: True,
            GRADS: any(p.grad is not None for p in self.twin.parameters()),
            BUFFERS: any(True for _ in self.twin.buffers()),
            OPTIMIZER: self.has_state,
        }
        return {component for component, has_some in tensors.items() if not has_some}

    def refused(self, operation: str) -> bool:
        return any(context.operation in NOT_INSIDE[operation] for context in self.open)

    def is_open(self, *operations: str) -> bool:
        return any(context.operation in operations for context in self.open)

    def restored_by(self, context: Open) -> dict[Component, Placement]:
        """What changes its placement when ``context`` ends."""
        if context is not self.open[-1]:
            return {}  # the one above it will
        needed: set[Component] = set()
        for other in self.open[:-1]:
            needed |= NEEDS[other.operation]
        return self.moves({c: p for c, p in context.found.items() if c not in needed})

    def forget(self, context: Open) -> None:
        index = self.open.index(context)
        del self.open[index]
        if index < len(self.open):
            self.open[index].found = context.found

    # Failures.

    def attempt(
        self, action: Callable[[], object], failure: Failure | None
    ) -> tuple[Exception | None, bool]:
        """What ``action`` raised, and whether the failure that was planned for it happened."""
        from placement import sim

        error: Exception | None = None
        plan = sim.failing(**{failure[0]: failure[1]}) if failure else nullcontext()  # type: ignore
        with plan as planned:
            try:
                action()
            except Exception as raised:
                error = raised
        fired = planned is not None and planned.fired
        assert not fired or error is None or is_planned(error), repr(error)
        return error, fired

    # Moves by hand.

    def move_by_hand(self) -> None:
        onload = self.draw(st.booleans(), label="onload")
        failure = self.draw(FAILURES, label="failure")
        dest = GPU if onload else CPU
        include = self.draw(st.none() | st.sets(st.sampled_from(list(self.at))), label="include")
        wanted = {c: dest for c in self.at if include is None or c in include}
        held = {c for context in self.open for c in HELD[context.operation]}
        move = self.manager.onload if onload else self.manager.offload
        error, fired = self.attempt(lambda: move(include=include), failure)
        if self.managed and wanted:
            assert isinstance(error, IllegalTransition)
        elif held & {c for c in wanted if self.at[c] is not dest}:
            assert isinstance(error, PlacementHeld)
        elif fired:
            assert error is not None
        else:
            assert error is None
            self.at.update(self.moves(wanted))

    # Contexts.

    def enter(self) -> None:
        operation = self.draw(st.sampled_from(["train", "evaluate", *NEEDS]), label="operation")
        failure = self.draw(FAILURES, label="failure")
        generator = self.context(operation)
        error, fired = self.attempt(lambda: next(generator), failure)
        if self.refused(operation):
            assert isinstance(error, PlacementHeld)
        elif fired and error is None:
            # There was no room for a digest: what was brought will be copied on its way back.
            assert failure is not None
            assert (operation, failure[0]) == ("evaluate", "allocation")
            self.opened(operation, generator)
        elif not fired:
            assert error is None, repr(error)
            self.opened(operation, generator)

    def opened(self, operation: str, generator: Generator[Any]) -> None:
        if not self.open:
            self.home = dict(self.at)
        self.open.append(Open(operation, generator, dict(self.at)))
        if not self.managed:
            needs = NEEDS[operation] & self.at.keys()
            self.at.update(self.moves(dict.fromkeys(needs, GPU)))

    def context(self, operation: str) -> Generator[Any]:
        """A generator that holds a context open; of an export, its own."""
        if operation == "export":
            return self.export()
        enter = {
            "train": self.manager.training,
            "evaluate": self.manager.evaluating,
            "save": self.manager.saving,
            "load": self.manager.loading,
        }
        return held_open(enter[operation]())

    def export(self) -> Generator[None]:
        """Compare each weight, when it comes, with the twin's as it is then."""
        with closing(self.manager.export_weights(tied="both", bucket_bytes=1)) as weights:
            for name, weight in weights:
                assert weight.device == self.device
                assert_same(name, weight, self.twin.state_dict()[name])
                weight.zero_()  # it is the consumer's own
                yield

    def take_the_next_weight(self) -> None:
        exports = [context for context in self.open if context.operation == "export"]
        context = exports[-1]
        restored = self.restored_by(context)
        try:
            next(context.generator)
        except StopIteration:
            self.forget(context)
            self.at.update(restored)

    def leave(self) -> None:
        """End a context, the innermost or another: with success, an error, or for no reason."""
        depth = self.draw(st.sampled_from([1, 1, 2, 3]), label="depth")
        how = self.draw(st.sampled_from(sorted(ENDS)), label="how")
        failure = self.draw(FAILURES, label="failure")
        self.end_context(self.open[-min(depth, len(self.open))], how, failure)

    def end_context(self, context: Open, how: str, failure: Failure | None) -> None:
        restored = self.restored_by(context)
        error, fired = self.attempt(partial(ENDS[how], context), failure)
        assert error is None or fired, repr(error)
        self.forget(context)
        after = {**self.at, **restored}
        if not fired:
            self.at = after
        else:
            # A way back that fails is told unless the caller is told of something else already.
            # It is whole or did not happen. (An export may also have failed before it.)
            assert self.placements() in (self.at, after)
            assert error is not None or how != "end" or self.placements() == after
            self.at = self.placements()
        if not self.open and not fired:
            assert self.at == self.home

    def placements(self) -> dict[Component, Placement]:
        return self.manager.placements

    # What is done in them.

    def batch(self) -> torch.Tensor:
        self.batches += 1
        return torch.randn(2, 3, generator=torch.Generator().manual_seed(self.batches))

    def train_step(self) -> None:
        keep_gradients = self.draw(st.booleans(), label="keep_gradients")
        x = self.batch()
        losses = []
        for module, optimizer, inputs in (
            (self.module, self.optimizer, x.to(self.device)),
            (self.twin, self.twin_optimizer, x),
        ):
            loss = module(inputs).square().mean()
            loss.backward()
            if optimizer is not None:
                optimizer.step()
            if not keep_gradients:
                module.zero_grad()
            losses.append(loss.detach())
        assert_same("loss", *losses)
        self.has_state = self.keeps_state

    def evaluate(self) -> None:
        x = self.batch()
        with torch.no_grad():
            assert_same("output", self.module(x.to(self.device)), self.twin(x))

    def break_off_a_forward_pass(self) -> None:
        """The error leaves the innermost context."""

        def fail(*_: object) -> None:
            raise ZeroDivisionError

        hook = self.module.second.register_forward_pre_hook(fail)
        with pytest.raises(ZeroDivisionError):
            self.module(self.batch().to(self.device))
        hook.remove()
        self.end_context(self.open[-1], "throw", None)

    def save(self) -> None:
        if self.refused("save"):
            return
        with self.manager.saving():
            saved = self.module.state_dict()
            expected = self.twin.state_dict()
            assert saved.keys() == expected.keys()
            for name, value in saved.items():
                assert_same(name, value, expected[name])
            self.checkpoint = copied([self.module.state_dict(), state_dict_of(self.optimizer)])
        twins = copied([self.twin.state_dict(), state_dict_of(self.twin_optimizer)])
        self.twin_checkpoint, self.checkpoint_has_state = twins, self.has_state

    def load(self) -> None:
        if self.checkpoint is None:
            self.save()
        if self.checkpoint is None or self.refused("load"):
            return
        elsewhere = self.device if self.at.get(OPTIMIZER) is CPU else torch.device("cpu")
        with self.manager.loading():
            load(self.module, self.optimizer, *self.checkpoint)
            if self.optimizer is not None and not self.managed and self.draw(st.booleans()):
                for state in self.optimizer.state.values():
                    state.update(tree_map_only(torch.Tensor, lambda x: x.to(elsewhere), state))
        load(self.twin, self.twin_optimizer, *self.twin_checkpoint)
        self.has_state = self.checkpoint_has_state

    # What is refused, or goes past the manager.

    def make_a_second_manager(self) -> None:
        with pytest.raises(AlreadyManaged):
            PlacementManager(self.module)

    def detach_inside_a_context(self) -> None:
        with pytest.raises(PlacementHeld):
            self.manager.detach()

    def move_past_the_manager(self) -> None:
        home = torch.device("cpu") if self.at[PARAMS] is CPU else self.device
        other = self.device if self.at[PARAMS] is CPU else torch.device("cpu")
        if self.managed:
            for device in (self.device, torch.device("cpu")):
                with pytest.raises(IllegalTransition):
                    self.module.to(device)
            return
        self.module.to(other)
        with pytest.raises(PlacementDrift):
            self.manager.verify()
        if self.adopts and not self.open:
            with self.manager.evaluating():
                pass
            # module.to() took the gradients and buffers along; the optimizer's state stayed.
            gone = {PARAMS, GRADS, BUFFERS} | (self.empty() & self.at.keys())
            self.at |= dict.fromkeys(gone, GPU if other == self.device else CPU)
        else:
            if not self.refused("evaluate"):
                with pytest.raises(PlacementDrift):
                    self.manager.evaluating().__enter__()
            self.module.to(home)
        # torch gave each parameter and each registered buffer memory of its own.
        self.twin._apply(torch.clone)
        self.facts = facts(self.manager)

    # What holds after each step.

    def the_tensors_are_where_the_placements_say(self) -> None:
        census = self.manager.verify()
        if not self.managed:  # FSDP2's policy leaves gathered parameters behind for a while
            for component, tensors in (
                (PARAMS, self.module.parameters()),
                (BUFFERS, self.module.buffers()),
            ):
                expected = self.device.type if self.at[component] is GPU else "cpu"
                assert all(tensor.device.type == expected for tensor in tensors)
        for site in census.sites:
            if not site.holding.host_scalar:
                placement = self.at[site.kind.component]
                on_device = placement is GPU or (placement is MANAGED and site.kind is Kind.BUFFER)
                expected = self.device.type if on_device else "cpu"
                assert site.device.type == expected, site
                assert local(site.holding.tensor).device.type == expected, site

    def the_values_are_those_of_the_twin(self) -> None:
        found = {
            f"{site.kind.value} {site.name}": site.holding.tensor
            for site in self.manager.census().sites
            if not site.holding.detail.startswith(" (")  # the padded shard, of the same memory
        }
        expected = named(self.twin, self.twin_optimizer)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert_same(name, found[name], value)


def held_open(context: AbstractContextManager[object]) -> Generator[None]:
    with context:
        yield


def end_well(context: Open) -> None:
    for _ in context.generator:
        pass


def close(context: Open) -> None:
    context.generator.close()


def throw(context: Open) -> None:
    with pytest.raises(ZeroDivisionError):
        context.generator.throw(ZeroDivisionError)


def drop(context: Open) -> None:
    del context.generator
    gc.collect(0)


ENDS = {"end": end_well, "close": close, "throw": throw, "drop": drop}


def is_planned(error: BaseException) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "planned" in str(error)


def assert_same(name: str, one: torch.Tensor, other: torch.Tensor) -> None:
    """The same dtype and bits, wherever they are."""
    one, other = local(one.detach()).cpu(), local(other.detach()).cpu()
    assert one.dtype is other.dtype, name
    assert torch.equal(one, other), f"{name}: {one} is not {other}"


def named(module: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, torch.Tensor]:
    """Every tensor of a module that nobody placed, named as a census names it."""
    tensors: dict[str, torch.Tensor] = {}
    first_name: dict[int, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        first_name.setdefault(id(parameter), name)
        tensors[f"param {name}"] = parameter
        if parameter.grad is not None:
            tensors[f"grad {name}"] = parameter.grad
    for name, buffer in module.named_buffers(remove_duplicate=False):
        tensors[f"buffer {name}"] = buffer
    for parameter, state in optimizer.state.items() if optimizer is not None else ():
        for key, value in state.items():
            if value is not None:
                tensors[f"optimizer {first_name[id(parameter)]}/{key}"] = value
    return tensors


def facts(manager: PlacementManager) -> dict[str, object]:
    """Identity and layout of parameters and buffers, with storages told apart by their users."""
    storages: dict[int, int] = {}
    found: dict[str, object] = {}
    for site in manager.census().sites:
        if site.kind in (Kind.PARAM, Kind.BUFFER):
            part = local(site.holding.tensor.detach())
            found[f"{site.kind.value} {site.name}"] = (
                id(site.holding.tensor),
                part.dtype,
                part.shape,
                part.stride(),
                part.storage_offset(),
                site.holding.tensor.requires_grad,
                storages.setdefault(part.untyped_storage().data_ptr(), len(storages)),
            )
    return found


def require_legal(
    trace: Trace, adopted: dict[Component, Placement], left: dict[Component, Placement]
) -> None:
    """Each event follows from the one before it and the table, and all contexts were ended."""
    at = {component.value: placement.value for component, placement in adopted.items()}
    begun, ended = [], []
    for event in trace:
        if event.kind is EventKind.ENTER:
            begun.append(event.lease)
        elif event.kind is EventKind.OPERATION:
            ended.append(event.lease)
        elif event.kind in (EventKind.TRIGGER, EventKind.ADOPTION):
            assert event.component is not None
            assert event.source == at[event.component], event
            if event.kind is EventKind.TRIGGER and event.outcome is Outcome.OK:
                row = TABLE[Placement(event.source), Trigger(event.name)]
                assert isinstance(row, Legal), event
                assert row.dest.value == event.dest, event
            elif event.kind is EventKind.TRIGGER:
                assert event.dest == event.source, event
            at[event.component] = event.dest
    assert at == {component.value: placement.value for component, placement in left.items()}
    assert sorted(begun) == sorted(ended)
    assert len(set(begun)) == len(begun)


@settings(
    max_examples=EXAMPLES,
    derandomize=bool(os.environ.get("CI")),
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(data=st.data())
def test_any_history_agrees_with_the_model(one_rank: str, data: st.DataObject) -> None:
    if one_rank != "sim":
        pytest.skip("makes chosen events fail, which only the simulated accelerator can")
    history = History(data)
    try:
        history.check()
        for _ in range(STEPS):
            history.go_on()
        history.finish()
    finally:  # hypothesis gives an example up when it grows too long
        for context in reversed(history.open):
            context.generator.close()
