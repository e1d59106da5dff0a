"""Whatever is wrapped how, a history of use leaves each tensor as a twin on the CPU has it.

Hypothesis draws a wrapper, a module with peculiar tensors, an optimizer, and a short history of
training, evaluating, saving, loading, exporting and moving. The twin is the same module, wrapped by
nothing and moved nowhere, that does the same arithmetic. After each step

- parameters, gradients, buffers and optimizer state have the twin's bits;
- each is on the device that the placement means, found by a look that shares no code with a census;
- parameters and buffers are the objects they were, with dtype, strides and offset as they were,
  in memory that is shared with whom it was, and pinned on the CPU if it was found so;
- the optimizer holds the parameters that it held, and state for those that the twin's has it for.

``test_properties.py`` is about the rules of contexts and about failures; this is about tensors.
Locally a run draws 200 other examples each time; with ``CI`` set it is the same 2,000. A failure
prints ``@reproduce_failure(...)``, which brings the example back.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from models import copied, load, local, state_dict_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import keystr, tree_leaves_with_path

from placement import IllegalTransition, Placement, PlacementManager, Trace, find_compute_device

EXAMPLES = 2000 if os.environ.get("CI") else 200

# What is drawn.


@dataclass(frozen=True)
class Case:
    """A module, how it is wrapped, and what trains it."""

    wrapper: str
    optimizer: str
    dtype: torch.dtype
    width: int
    tied: bool
    frozen: bool
    buffers: bool
    views: bool
    layout: str
    found_on_device: bool
    rest: Placement | None

    @property
    def managed(self) -> bool:
        return self.wrapper in ("FSDP2, offloaded", "FSDP2, offloaded, not pinned")

    @property
    def flat(self) -> bool:
        """Whether the wrapper registers one parameter in the place of all."""
        return self.wrapper == "FSDP1, flat"


class Part(nn.Module):
    """A place where parameters and buffers are registered."""


class Drawn(nn.Module):
    """Two small layers and, as drawn, tensors with peculiarities. Each value is a function of its
    place, so that a module and its twin begin alike."""

    def __init__(self, case: Case, device: torch.device) -> None:
        super().__init__()

        def numbers(*shape: int) -> torch.Tensor:
            count = torch.Size(shape).numel()
            return torch.linspace(-0.9, 0.7, count, dtype=case.dtype).view(shape).to(device)

        self.case = case
        self.body, self.head = Part(), Part()
        self.body.weight = nn.Parameter(numbers(case.width, 3))
        self.body.bias = nn.Parameter(numbers(case.width))
        self.head.weight = nn.Parameter(numbers(3, case.width))
        if case.tied:
            self.head.tied = self.body.weight
        if case.frozen:
            self.body.frozen = nn.Parameter(numbers(case.width) + 2, requires_grad=False)
        if case.views:
            slab = numbers(9)
            self.head.left = nn.Parameter(slab[:3])
            self.head.right = nn.Parameter(slab[3:].view(3, 2).t()[1])
        if case.buffers:
            self.register_buffer("passes", torch.zeros((), dtype=torch.int64).to(device))
            self.body.register_buffer("mean", numbers(3))
            self.head.register_buffer("same_mean", self.body.mean)
            self.head.register_buffer("scale", numbers(3) + 2, persistent=False)
        # A load writes into what is persistent, and torch refuses to write into an expanded tensor.
        self.head.register_buffer("kind", LAYOUTS[case.layout](numbers(4, 3)), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        body, head = self.body, self.head
        y = torch.tanh(x @ body.weight.t() + body.bias)
        if self.case.frozen:
            y = y * body.frozen
        y = y @ head.weight.t()
        if self.case.tied:
            y = (y @ head.tied.t()).sum(1, keepdim=True) + y
        if self.case.views:
            y = y * head.left + head.right
        if self.case.buffers:
            self.passes.add_(1)
            body.mean.mul_(0.5).add_(x.detach().mean(0), alpha=0.5)
            y = y * head.scale + head.same_mean
        return y + head.kind.sum()


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dense": lambda x: x,
    "transposed": lambda x: x.t(),
    "expanded": lambda x: x[:1].expand(5, 3),
    "with gaps": lambda x: x[1:, ::2],
    "empty": lambda x: x[:0],
    "one number": lambda x: x[1, 1].clone(),
}

Parameters = Iterable[nn.Parameter]


class Averaging(torch.optim.Optimizer):
    """A wrapper: an inner optimizer does the step, and the state has nested containers."""

    def __init__(self, parameters: Parameters) -> None:
        self.inner = torch.optim.AdamW(parameters, lr=0.1, foreach=False)
        super().__init__(self.inner.param_groups, {})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        self.inner.step()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    history = self.state[parameter].setdefault("history", [])
                    history[:] = [{"value": parameter.detach().clone()}, *history[:1]]

    def state_dict(self) -> dict[str, Any]:
        return {"outer": super().state_dict(), "inner": self.inner.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state["outer"])
        self.inner.load_state_dict(state["inner"])


OPTIMIZERS: dict[str, Callable[[Parameters], torch.optim.Optimizer] | None] = {
    "none": None,
    "without state": lambda p: torch.optim.SGD(p, lr=0.1, foreach=False),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=False),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, foreach=False, amsgrad=True),
    "adamw, foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "adamw, fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "wrapper": Averaging,
}


def fsdp1(module: nn.Module, use_orig_params: bool) -> nn.Module:
    device = find_compute_device()
    return FullyShardedDataParallel(module, device_id=device, use_orig_params=use_orig_params)


def fsdp2(module: Drawn, **options: Any) -> nn.Module:
    mesh = init_device_mesh(find_compute_device().type, (torch.distributed.get_world_size(),))
    return fully_shard(module, mesh=mesh, **options)


WRAPPERS: dict[str, Callable[[Drawn], nn.Module]] = {
    "plain": lambda module: module,
    "DDP": lambda module: DistributedDataParallel(module, broadcast_buffers=False),
    "FSDP1, original": lambda module: fsdp1(module, use_orig_params=True),
    "FSDP1, flat": lambda module: fsdp1(module, use_orig_params=False),
    "FSDP2": fsdp2,
    "FSDP2, kept after forward": lambda module: fsdp2(module, reshard_after_forward=False),
    "FSDP2, mixed precision": lambda module: fsdp2(
        module, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    ),
    "FSDP2, offloaded": lambda module: fsdp2(module, offload_policy=CPUOffloadPolicy()),
    "FSDP2, offloaded, not pinned": lambda module: fsdp2(
        module, offload_policy=CPUOffloadPolicy(pin_memory=False)
    ),
}


@st.composite
def cases(draw: st.DrawFn) -> Case:
    wrapper = draw(st.sampled_from(list(WRAPPERS)))
    by_hand = wrapper == "plain"
    mixed = wrapper == "FSDP2, mixed precision"
    managed = "offloaded" in wrapper
    return Case(
        wrapper=wrapper,
        optimizer=draw(st.sampled_from(list(OPTIMIZERS))),
        dtype=torch.float32
        if mixed
        else draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float64])),
        width=draw(st.sampled_from([5, 1, 7])),
        tied=draw(st.booleans()),
        frozen=wrapper != "FSDP1, flat" and draw(st.booleans()),  # it wants all or none trained
        buffers=draw(st.booleans()),
        views=wrapper in ("plain", "DDP") and draw(st.booleans()),  # FSDP gives each its memory
        layout=draw(st.sampled_from(list(LAYOUTS))),
        found_on_device=not by_hand or draw(st.booleans()),
        rest=None
        if managed
        else draw(
            st.sampled_from([None, Placement.CPU_MANUAL, Placement.CPU_MANUAL, Placement.GPU])
        ),
    )


# What is compared.


def plain_name(name: str) -> str:
    """A parameter's name without what wrappers put into it."""
    return name.replace("_fsdp_wrapped_module.", "").removeprefix("module.")


class Look:
    """Every tensor of a module and its optimizer, by kind and name, found without a census."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        module: nn.Module,
        optimizer: torch.optim.Optimizer | None,
    ) -> None:
        self.parameters = {plain_name(name): p for name, p in parameters.items()}
        self.buffers = {
            plain_name(name): buffer
            for name, buffer in module.named_buffers(remove_duplicate=False)
        }
        self.gradients = {n: p.grad for n, p in self.parameters.items() if p.grad is not None}
        self.state = dict(state_of(optimizer, self.parameters)) if optimizer is not None else {}

    def everything(self) -> dict[str, torch.Tensor]:
        return {
            f"{kind} {name}": tensor
            for kind in ("parameters", "buffers", "gradients", "state")
            for name, tensor in getattr(self, kind).items()
        }


def state_of(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The optimizer's state, and its inner one's: entries of no other than ``parameters``."""
    names = {id(parameter): name for name, parameter in reversed(list(parameters.items()))}
    for parameter, state in optimizer.state.items():
        for path, value in tree_leaves_with_path(state):
            if isinstance(value, torch.Tensor):
                yield f"{names[id(parameter)]}{keystr(path)}", value
    if isinstance(optimizer, Averaging):
        for name, value in state_of(optimizer.inner, parameters):
            yield f"inner {name}", value


class FlatTwin:
    """The twin's parameters in the memory of one, as FSDP1 keeps them: a kernel may round the last
    elements of a tensor otherwise than the others, so it must get the same tensor."""

    def __init__(self, twin: nn.Module) -> None:
        self.parts = list(twin.parameters())
        self.whole = nn.Parameter(torch.cat([part.detach().flatten() for part in self.parts]))
        sizes = [part.numel() for part in self.parts]
        for part, run in zip(self.parts, self.whole.detach().split(sizes)):
            part.data = run.view(part.shape)

    def collect_gradients(self) -> None:
        gradients = [part.grad for part in self.parts if part.grad is not None]
        self.whole.grad = torch.cat([g.flatten() for g in gradients]) if gradients else None

    def names(self) -> dict[str, nn.Parameter]:
        self.collect_gradients()
        return {"_flat_param": self.whole}


def assert_same_bits(name: str, one: torch.Tensor, other: torch.Tensor) -> None:
    one, other = local(one.detach()).cpu(), local(other.detach()).cpu()
    assert (one.dtype, one.shape) == (other.dtype, other.shape), name
    assert torch.equal(
        one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8)
    ), f"{name}: {one} is not {other}"


def facts(look: Look) -> dict[str, object]:
    """What no step may change, with storages told apart by their users."""
    users: dict[int, int] = {}
    return {
        f"{type(tensor).__name__} {name}": (
            id(tensor),
            part.dtype,
            part.shape,
            part.stride(),
            part.storage_offset(),
            tensor.requires_grad,
            users.setdefault(part.untyped_storage().data_ptr(), len(users)) if part.numel() else 0,
        )
        for name, tensor in [*look.parameters.items(), *look.buffers.items()]
        for part in [local(tensor.detach())]
    }


# The history.


class History:
    """A module with its manager, and the twin that neither is wrapped nor moves."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.device = find_compute_device()
        cpu = torch.device("cpu")
        self.module = WRAPPERS[case.wrapper](
            Drawn(case, self.device if case.found_on_device else cpu)
        )
        self.twin = Drawn(case, cpu)
        make = OPTIMIZERS[case.optimizer]
        self.optimizer = make(self.module.parameters()) if make else None
        self.flat_twin = FlatTwin(self.twin) if case.flat else None
        own = [self.flat_twin.whole] if self.flat_twin is not None else self.twin.parameters()
        self.twin_optimizer = make(own) if make else None
        self.batches = 0
        self.checkpoint: tuple[Any, Any] | None = None
        self.pageable = {
            name for name, tensor in self.rests_on_cpu() if not local(tensor).is_pinned()
        }
        self.manager = PlacementManager(
            self.module, self.optimizer, rest=case.rest, verify="always", trace=Trace()
        )
        found = Placement.GPU if case.found_on_device else Placement.CPU_MANUAL
        self.home = Placement.CPU_FSDP2_MANAGED if case.managed else case.rest or found
        self.groups = self.optimized()
        self.facts = facts(self.look())

    def look(self) -> Look:
        # FSDP2 registers gathered parameters for a while; its owner knows those that rest.
        owner = self.manager.owner
        wrapped = self.case.wrapper.startswith("FSDP2")
        parameters = (
            owner.parameters()
            if wrapped
            else dict(self.module.named_parameters(remove_duplicate=False))
        )
        return Look(parameters, self.module, self.optimizer)

    def twins_parameters(self) -> dict[str, nn.Parameter]:
        if self.flat_twin is not None:
            return self.flat_twin.names()
        return dict(self.twin.named_parameters(remove_duplicate=False))

    def rests_on_cpu(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in [
            *self.module.named_parameters(remove_duplicate=False),
            *self.module.named_buffers(remove_duplicate=False),
        ]:
            if tensor.device.type == "cpu":
                yield plain_name(name), tensor

    def optimized(self) -> list[list[int]]:
        groups = self.optimizer.param_groups if self.optimizer is not None else []
        return [[id(parameter) for parameter in group["params"]] for group in groups]

    # What holds after each step, and in the contexts.

    def check(self) -> None:
        assert self.manager.placement is self.home
        look = self.look()
        self.the_bits_are_the_twins(look)
        self.all_are_on(look, self.home, self.home)
        assert facts(look) == self.facts, "identity, layout or sharing changed"
        assert self.optimized() == self.groups, "the optimizer holds other parameters"
        if self.home is Placement.CPU_MANUAL:
            for name, tensor in [*look.parameters.items(), *look.buffers.items()]:
                part = local(tensor.detach())
                if part.numel():
                    assert part.is_pinned() is (name not in self.pageable), name

    def the_bits_are_the_twins(self, look: Look) -> None:
        expected = Look(self.twins_parameters(), self.twin, self.twin_optimizer).everything()
        found = look.everything()
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert_same_bits(name, found[name], value)

    def all_are_on(self, look: Look, model: Placement, optimizer: Placement) -> None:
        on_cpu = (Placement.CPU_MANUAL, Placement.CPU_FSDP2_MANAGED)
        model_on = "cpu" if model in on_cpu else self.device.type
        buffers_on = "cpu" if model is Placement.CPU_MANUAL else self.device.type
        state_on = "cpu" if optimizer in on_cpu else self.device.type
        for kind, expected in (
            ("parameters", model_on),
            ("gradients", model_on),
            ("buffers", buffers_on),
            ("state", state_on),
        ):
            for name, tensor in getattr(look, kind).items():
                if kind == "state" and tensor.ndim == 0 and self.case.optimizer != "adamw, fused":
                    continue  # torch's step counters, which stay on the CPU
                where = tensor.device.type, local(tensor.detach()).device.type
                assert where == (expected, expected), f"{kind} {name} is on {where}"

    # The arithmetic, done twice.

    def batch(self) -> torch.Tensor:
        self.batches += 1
        return torch.linspace(-1.0, 0.1 * self.batches, 6, dtype=self.case.dtype).view(2, 3)

    def outputs(self) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.batch()
        return self.module(x.to(self.device)), self.twin_output(x)

    def twin_output(self, x: torch.Tensor) -> torch.Tensor:
        if self.case.wrapper != "FSDP2, mixed precision":
            return self.twin(x)
        low = {name: p.to(torch.bfloat16) for name, p in self.twin.named_parameters()}
        return functional_call(self.twin, low, (x.to(torch.bfloat16),))

    def backward(self) -> None:
        for output in self.outputs():
            output.square().mean().backward()

    def step(self) -> None:
        if self.flat_twin is not None:
            self.flat_twin.collect_gradients()
        for optimizer in (self.optimizer, self.twin_optimizer):
            if optimizer is not None:
                optimizer.step()

    def forget_gradients(self, set_to_none: bool) -> None:
        for module in (self.module, self.twin):
            module.zero_grad(set_to_none)

    def compare_outputs(self) -> None:
        with torch.no_grad():
            found, expected = self.outputs()
        assert_same_bits("output", found, expected)

    # The steps that are drawn.

    def train(self) -> None:
        with self.manager.training():
            self.backward()
            self.step()
            if not self.case.managed:
                self.all_are_on(self.look(), Placement.GPU, Placement.GPU)

    def train_and_forget_gradients(self) -> None:
        self.train()
        self.forget_gradients(set_to_none=True)

    def clear_gradients(self) -> None:
        with self.manager.training():
            self.backward()
            self.forget_gradients(set_to_none=False)

    def accumulate(self) -> None:
        with self.manager.training():
            self.backward()

    def evaluate(self) -> None:
        with self.manager.evaluating():
            self.compare_outputs()

    def nest(self) -> None:
        with ExitStack() as contexts:
            contexts.enter_context(self.manager.evaluating())
            contexts.enter_context(self.manager.training())
            self.backward()
            with self.manager.evaluating():
                self.compare_outputs()
            self.step()

    def fail_after_a_forward_pass(self) -> None:
        self.fail_after(self.outputs)

    def fail_after_a_backward_pass(self) -> None:
        self.fail_after(self.backward)

    def fail_after(self, what: Callable[[], object]) -> None:
        with suppress(ZeroDivisionError), self.manager.training():
            what()
            raise ZeroDivisionError

    def save(self) -> None:
        with self.manager.saving():
            saved = self.module.state_dict()
            expected = self.twin.state_dict()
            assert {plain_name(name) for name in saved} == expected.keys()
            for name, value in saved.items():
                assert_same_bits(name, value, expected[plain_name(name)])
            mine = copied([saved, state_dict_of(self.optimizer)])
        self.checkpoint = mine, copied([expected, state_dict_of(self.twin_optimizer)])

    def load(self) -> None:
        if self.checkpoint is None:
            return self.save()
        mine, twins = self.checkpoint
        with self.manager.loading():
            load(self.module, self.optimizer, *copied(mine))
        load(self.twin, self.twin_optimizer, *copied(twins))

    def export(self) -> None:
        expected = self.twin.state_dict()
        exported = {plain_name(n): weight for n, weight in self.manager.export_weights(tied="both")}
        assert exported.keys() == expected.keys()
        for name, weight in exported.items():
            assert weight.device == self.device
            assert_same_bits(name, weight, expected[name])
            weight.zero_()  # it is the consumer's own

    def onload(self) -> None:
        self.move(self.manager.onload, Placement.GPU)

    def offload(self) -> None:
        self.move(self.manager.offload, Placement.CPU_MANUAL)

    def move(self, move: Callable[[], None], there: Placement) -> None:
        if self.case.managed:
            with pytest.raises(IllegalTransition):
                move()
        else:
            move()
            self.home = there


STEPS = st.sampled_from(
    [
        History.train,
        History.train,
        History.onload,
        History.offload,
        History.train_and_forget_gradients,
        History.accumulate,
        History.clear_gradients,
        History.evaluate,
        History.nest,
        History.fail_after_a_forward_pass,
        History.fail_after_a_backward_pass,
        History.save,
        History.load,
        History.export,
    ]
)


@pytest.mark.filterwarnings("ignore:.*broadcast_buffers:FutureWarning")
@settings(
    max_examples=EXAMPLES,
    derandomize=bool(os.environ.get("CI")),
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(case=cases(), steps=st.lists(STEPS, min_size=1, max_size=8))
def test_every_tensor_is_as_the_twin_has_it(
    one_rank: str, case: Case, steps: list[Callable[[History], None]]
) -> None:
    history = History(case)
    history.check()
    for step in steps:
        step(history)
        history.check()
