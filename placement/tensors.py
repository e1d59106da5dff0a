"""What a tensor is to placement: a name, a kind, and the storages its bytes lie in.

A tensor's bytes lie in *storages*, which may be shared: tied parameters, a buffer in two modules,
an FSDP2 shard that is a view of its padded shard. A move therefore never moves a tensor, it moves
storages, and every tensor that looks into one follows it (``placement/transfer.py``). A wrapper (a
DTensor, a quantized weight) has no bytes of its own: it has *parts* that have.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from placement.states import Component
from placement.torch_private import inner_tensors


class Kind(enum.Enum):
    """What a tensor is in a training module."""

    PARAM = "param"
    GRAD = "grad"
    BUFFER = "buffer"
    OPTIMIZER = "optimizer"

    @property
    def component(self) -> Component:
        return _COMPONENTS[self]


_COMPONENTS = {
    Kind.PARAM: Component.PARAMS,
    Kind.GRAD: Component.GRADS,
    Kind.BUFFER: Component.BUFFERS,
    Kind.OPTIMIZER: Component.OPTIMIZER,
}


@dataclass(frozen=True)
class Holding:
    """One tensor that an owner or an optimizer holds.

    Attributes:
        of: the parameter or buffer it is, or belongs to: fully qualified, as ``named_parameters``
            has it, without the parts of wrappers (:mod:`placement.names`).
        kind: what it is.
        tensor: the tensor itself.
        detail: what tells it from others of the same parameter, for example ``/exp_avg``.
        host_scalar: a single number of the optimizer that torch keeps on the host by its own
            rule (a step counter that is neither ``capturable`` nor ``fused``). A kernel reads it
            from either side, so either is right.
    """

    of: str
    kind: Kind
    tensor: torch.Tensor
    detail: str = ""
    host_scalar: bool = False

    @property
    def name(self) -> str:
        return self.of + self.detail


def parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors that hold ``tensor``'s bytes: itself, or what it wraps, however deep."""
    if inner := inner_tensors(tensor):
        for value in inner.values():
            yield from parts(value)
    else:
        yield tensor


def tensors_in(value: object, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in nested mappings, lists and tuples, each with its path (``/exp_avg/0``)."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from tensors_in(inner, f"{path}/{key}")
    elif isinstance(value, (list, tuple)):
        for index, inner in enumerate(value):
            yield from tensors_in(inner, f"{path}/{index}")


def has_storage(part: torch.Tensor) -> bool:
    """Whether ``part`` is a view of one block of bytes, so that it can be moved exactly."""
    return part.layout is torch.strided and part.device.type != "meta"


def carried_along(part: torch.Tensor) -> list[str]:
    """Names of tensors that a subclass keeps as ordinary attributes (the scale of a quantized
    weight), without telling torch of them: nobody but the subclass knows that they belong to it."""
    if type(part) in (torch.Tensor, torch.nn.Parameter):
        return []
    return [name for name, value in vars(part).items() if isinstance(value, torch.Tensor)]


def same_device(one: torch.device, other: torch.device) -> bool:
    """Whether two devices are one, where a device without an index means the current one.

    The CPU has no index that matters (``cpu`` and ``cpu:0`` are one).
    """
    if one == other:
        return True
    if one.type != other.type or one.type == "cpu":
        return one.type == other.type
    return with_index(one) == with_index(other)


def with_index(device: torch.device) -> torch.device:
    """``device`` with the current device's index if it has none."""
    if ":" in str(device):  # torch types the index as never missing
        return device
    return torch.device(device.type, torch.accelerator.current_device_index())
