"""Every kind of tensor moves exactly, or is refused by name before anything moves."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from placement import CannotMove, Placement, PlacementManager, ScatteredModule
from placement.testing import assert_round_trip

Make = Callable[[], torch.Tensor]


def complex_numbers() -> torch.Tensor:
    return torch.complex(torch.arange(12.0).view(3, 4), torch.ones(3, 4))


MOVED: dict[str, Make] = {
    "no element": lambda: torch.empty(0, 3),
    "no dimension": lambda: torch.tensor(3.0),
    "integer": lambda: torch.arange(5),
    "boolean": lambda: torch.tensor([True, False]),
    "unsigned 16": lambda: torch.arange(4).to(torch.uint16),
    "bfloat16": lambda: torch.arange(7.0).bfloat16(),
    "float8": lambda: torch.arange(6.0).to(torch.float8_e4m3fn),
    "float8 scale": lambda: torch.ones(3).to(torch.float8_e8m0fnu),
    "complex": complex_numbers,
    "conjugate": lambda: complex_numbers().conj(),
    "imaginary part": lambda: complex_numbers().imag,
    "imaginary part of a conjugate": lambda: complex_numbers().conj().imag,
    "transposed": lambda: torch.arange(12.0).view(3, 4).t(),
    "with gaps": lambda: torch.arange(24.0).view(4, 6)[1:, ::2],
    "expanded": lambda: torch.arange(3.0)[:, None].expand(3, 4),
    "channels last": lambda: (
        torch.arange(120.0).view(2, 3, 4, 5).to(memory_format=torch.channels_last)
    ),
    "overlapping": lambda: torch.arange(8.0).as_strided((3, 4), (2, 1)),
}


def a_layer_and(name: str, tensor: torch.Tensor) -> nn.Linear:
    """A module of which ``tensor`` is a buffer, beside two ordinary parameters."""
    module = nn.Linear(2, 2)
    module.register_buffer(name, tensor)
    return module


def marks(tensor: torch.Tensor) -> tuple[object, ...]:
    """What a move must leave beside the values."""
    return (
        tensor.dtype,
        tensor.shape,
        tensor.stride(),
        tensor.storage_offset(),
        tensor.untyped_storage().nbytes(),
        tensor.is_conj(),
        tensor.is_neg(),
    )


def values(tensor: torch.Tensor) -> list[object]:
    """What is read from ``tensor``, as Python's numbers."""
    there = tensor.detach().cpu()
    numbers: list[object] = (there if there.is_complex() else there.double()).tolist()
    return numbers


@pytest.mark.parametrize("kind", MOVED)
def test_it_comes_back_as_it_was(one_rank: str, kind: str) -> None:
    module = a_layer_and("kind", MOVED[kind]())
    tensor = module.kind
    before, contents = marks(tensor), values(tensor)
    manager = PlacementManager(module)
    for move, rests_on in [(manager.onload, one_rank), (manager.offload, "cpu")] * 2:
        move()
        assert module.kind is tensor
        assert tensor.device.type == rests_on
        assert marks(tensor) == before
        assert values(tensor) == contents
    assert not tensor.is_pinned(), "it was found in ordinary memory"


def test_a_parameter_that_is_a_lazy_conjugate_trains_the_same(one_rank: str) -> None:
    def one() -> nn.Module:
        module = nn.Module()
        module.weight = nn.Parameter(complex_numbers().conj())
        return module

    module, twin = one(), one()
    manager = PlacementManager(module)
    for each in (module, twin):
        with manager.training():
            (each.weight * (1 + 2j)).abs().square().sum().backward()
    assert module.weight.is_conj() is twin.weight.is_conj() is True
    assert torch.equal(module.weight.grad, twin.weight.grad)


# What can't be moved.


class Opaque(torch.Tensor):
    """A wrapper that tells nobody what it is made of."""

    @staticmethod
    def __new__(cls, hidden: torch.Tensor) -> Opaque:
        return torch.Tensor._make_wrapper_subclass(cls, hidden.shape, dtype=hidden.dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(func)


def freed() -> torch.Tensor:
    tensor = torch.ones(3)
    tensor.untyped_storage().resize_(0)
    return tensor


REFUSED: dict[str, Make] = {
    "sparse, coordinates": lambda: torch.eye(3).to_sparse(),
    "sparse, rows": lambda: torch.eye(3).to_sparse_csr(),
    "nested, strided": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "nested, jagged": lambda: torch.nested.nested_tensor(
        [torch.ones(2), torch.ones(3)], layout=torch.jagged
    ),
    "quantized by torch": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    "of another library's layout": lambda: torch.ones(3, 3).to_mkldnn(),
    "freed": freed,
    "opaque": lambda: Opaque(torch.ones(3)),
}


@pytest.mark.filterwarnings("ignore:.*(quantize|Sparse CSR|prototype).*:UserWarning")
@pytest.mark.parametrize("kind", REFUSED)
def test_it_is_refused_by_name_before_anything_moves(one_rank: str, kind: str) -> None:
    module = a_layer_and("kind", REFUSED[kind]())
    manager = PlacementManager(module, verify="always")
    with pytest.raises(CannotMove) as caught:
        manager.onload()
    assert caught.value.tensors == ("kind (buffer) on cpu",)
    assert {parameter.device.type for parameter in module.parameters()} == {"cpu"}
    assert manager.placement is Placement.CPU_MANUAL
    manager.verify()


def test_a_lazy_parameter_is_refused_until_it_has_a_shape(one_rank: str) -> None:
    module = nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 1))
    manager = PlacementManager(module)
    with pytest.raises(CannotMove, match=r"0.weight \(param\)"):
        manager.onload()
    module(torch.ones(2, 5))
    manager.onload()
    assert module[0].weight.device.type == one_rank


@pytest.mark.parametrize("kind", ["parameter", "buffer", "part of a wrapper"])
def test_a_meta_tensor_is_refused_by_name_at_adoption(one_rank: str, kind: str) -> None:
    meta = torch.empty(2, 2, device="meta")
    module = nn.Linear(2, 2)
    if kind == "parameter":
        module.kind = nn.Parameter(meta)
    else:
        tensor = TwoTensor(meta, torch.empty(2, 2, device="meta")) if "wrapper" in kind else meta
        module.register_buffer("kind", tensor)
    with pytest.raises(ScatteredModule, match=r"kind \(\w+\) on meta"):
        PlacementManager(module)
    manager = PlacementManager(module, stays=["kind"])
    manager.onload()
    assert module.weight.device.type == one_rank
    assert module.kind.is_meta


def test_a_sparse_gradient_is_refused_by_name_and_moves_no_parameter(one_rank: str) -> None:
    module = nn.Embedding(5, 2, sparse=True)
    manager = PlacementManager(module)
    module(torch.tensor([1, 3])).sum().backward()
    with pytest.raises(CannotMove, match=r"weight \(grad\)"):
        manager.onload()
    assert module.weight.device.type == "cpu"
    module.zero_grad()
    manager.onload()


# Quantized weights, as libraries build them. The real ones: tests/clients/test_quantized.py.


@dataclass
class QuantState:
    """As bitsandbytes keeps beside a 4-bit weight: statistics, and statistics of those."""

    absmax: torch.Tensor
    code: torch.Tensor
    state2: QuantState | None = None


class Weight4bit(nn.Parameter):
    """Packed bytes that carry a ``quant_state`` and, as bitsandbytes' do, their layer."""

    quant_state: QuantState
    module: nn.Module


class Weight8bit(nn.Parameter):
    """Bytes whose scale is an attribute, until the layer takes it into a state of its own."""

    CB: torch.Tensor | None
    SCB: torch.Tensor | None


class Layer4bit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        weight = torch.arange(4, dtype=torch.uint8)
        self.weight = torch.Tensor._make_subclass(Weight4bit, weight, False)
        nested = QuantState(torch.tensor([2.0]), torch.arange(3.0))
        self.weight.quant_state = QuantState(torch.tensor([3.0]), torch.arange(2.0), nested)
        self.weight.module = self
        self.quant_state = self.weight.quant_state
        self.bias = nn.Parameter(torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = self.quant_state
        assert state.state2 is not None
        scale = state.absmax * state.state2.absmax + state.code.sum() + state.state2.code.sum()
        return x * (self.weight.float() * scale) + self.bias


class LayerState:
    """As bitsandbytes' MatmulLtState, a plain object of the layer's."""

    CB: torch.Tensor | None = None
    SCB: torch.Tensor | None = None


class Layer8bit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        weight = torch.arange(4, dtype=torch.int8)
        self.weight = torch.Tensor._make_subclass(Weight8bit, weight, False)
        self.weight.CB, self.weight.SCB = self.weight.data, torch.tensor([0.5])
        self.state = LayerState()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.weight.CB is not None:
            self.state.CB, self.weight.CB = self.weight.CB, None
            self.state.SCB, self.weight.SCB = self.weight.SCB, None
        assert self.state.CB is not None
        assert self.state.SCB is not None
        return x * self.state.CB.float() * self.state.SCB + self.weight.float()


class Quantized(torch.Tensor):
    """In the manner of torchao and quanto: a wrapper of bytes and scale that tells torch so."""

    @staticmethod
    def __new__(cls, data: torch.Tensor, scale: torch.Tensor) -> Quantized:
        device = data.device
        return torch.Tensor._make_wrapper_subclass(
            cls, data.shape, dtype=torch.float32, device=device
        )

    def __init__(self, data: torch.Tensor, scale: torch.Tensor) -> None:
        self.bytes, self.scale = data, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["bytes", "scale"], None

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, torch.Tensor], context: None, size: object, stride: object
    ) -> Quantized:
        return cls(inner["bytes"], inner["scale"])

    def dequantized(self) -> torch.Tensor:
        data = self.bytes.dequantized() if isinstance(self.bytes, Quantized) else self.bytes.float()
        return data * self.scale

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].bytes, args[0].scale)
        raise NotImplementedError(func)


class WrappedLayer(nn.Module):
    def __init__(self, nested: bool) -> None:
        super().__init__()
        data = torch.arange(4, dtype=torch.int8)
        weight = Quantized(data, torch.tensor([0.5]))
        if nested:
            weight = Quantized(weight, torch.tensor([3.0]))
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight.dequantized()


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "as bitsandbytes' 4 bits": Layer4bit,
    "as bitsandbytes' 8 bits": Layer8bit,
    "as torchao's": lambda: WrappedLayer(nested=False),
    "as torchao's, nested": lambda: WrappedLayer(nested=True),
}


@pytest.mark.parametrize("used", [False, True], ids=["new", "used"])
@pytest.mark.parametrize("kind", LAYERS)
def test_a_quantized_layer_computes_the_same_wherever_it_was(
    one_rank: str, kind: str, used: bool
) -> None:
    module, twin = LAYERS[kind](), LAYERS[kind]()
    x = torch.tensor([1.0, 2.0, 3.0, 4.0])
    if used:
        module(x)  # bitsandbytes' layer takes the scale from its weight
    expected = twin(x)
    manager = PlacementManager(module, verify="always")
    for _ in range(2):
        # An unused layer changes in its first pass, for reasons of its own.
        with assert_round_trip(module) if used else nullcontext():
            with manager.evaluating():
                devices = {site.device.type for site in manager.census().sites}
                assert devices == {one_rank}
                assert torch.equal(module(x.to(one_rank)).cpu(), expected)
        assert {site.device.type for site in manager.census().sites} == {"cpu"}
        assert torch.equal(module(x), expected)


def test_what_a_quantized_weight_carries_is_freed_on_the_device(one_rank: str) -> None:
    for kind, make in LAYERS.items():
        manager = PlacementManager(make())
        gc.collect()
        before = torch.accelerator.memory_allocated()
        manager.onload()
        manager.module(torch.ones(4, device=one_rank))
        assert torch.accelerator.memory_allocated() > before
        manager.offload()
        assert torch.accelerator.memory_allocated() == before, kind


def test_what_a_weight_carries_elsewhere_is_named_at_adoption(one_rank: str) -> None:
    module = Layer4bit()
    module.quant_state.absmax = module.quant_state.absmax.to(one_rank)
    with pytest.raises(ScatteredModule, match=r"weight/quant_state/absmax \(param\) on"):
        PlacementManager(module)


def test_two_weights_may_carry_one_table(one_rank: str) -> None:
    module = nn.ModuleList([Layer4bit(), Layer4bit()])
    one, other = (layer.quant_state for layer in module)
    other.code = one.code
    manager = PlacementManager(module)
    manager.onload()
    assert other.code is one.code
    assert one.code.device.type == one_rank
