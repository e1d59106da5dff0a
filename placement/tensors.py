"""What a tensor is to placement: a name, a kind, and the storages its bytes lie in.

A tensor's bytes lie in *storages*, which may be shared: tied parameters, a buffer in two modules,
an FSDP2 shard that is a view of its padded shard. A move therefore never moves a tensor, it moves
storages, and every tensor that looks into one follows it (``placement/transfer.py``). A wrapper (a
DTensor, a quantized weight) has no bytes of its own: it has *parts* that have.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

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


class Holding(NamedTuple):
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


def has_storage(part: torch.Tensor) -> bool:
    """Whether ``part`` is a view of one block of bytes.

    A meta tensor and a lazy parameter have none, a sparse or nested tensor has several, and one of
    torch's own quantized dtypes keeps a part of its value (the quantizer) beside them.
    """
    return part.layout is torch.strided and not (
        part.is_meta or part.is_quantized or part.is_nested or is_lazy(part)
    )


def has_its_bytes(part: torch.Tensor) -> bool:
    """Whether ``part`` can be moved exactly: it has a storage, and the storage has memory. Nobody
    freed it (``untyped_storage().resize_(0)``), and ``part`` is no wrapper that hides its bytes."""
    if not has_storage(part):
        return False
    if part.numel() == 0:
        return True
    if is_ordinary(part):
        return part.untyped_storage().nbytes() > 0
    try:
        return part.untyped_storage().data_ptr() != 0
    except RuntimeError:  # "an invalid python storage": it has a size and no memory
        return False


def is_ordinary(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is of one of torch's two everyday classes, not of somebody's subclass."""
    return type(tensor) in _ORDINARY


_ORDINARY = (torch.Tensor, nn.Parameter)


def carried_along(tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that a subclass keeps as attributes of its own, each with its path below it.

    The scale of a quantized weight is one, or the statistics in the ``quant_state`` of
    bitsandbytes' ``Params4bit``
    (https://github.com/bitsandbytes-foundation/bitsandbytes/blob/main/bitsandbytes/nn/modules.py).
    No protocol tells torch of them, and without them the weight is of no use.
    """
    if is_ordinary(tensor):
        return
    inner = inner_tensors(tensor)
    for name, value in inner.items():
        for path, carried in carried_along(value):
            yield f"/{name}{path}", carried
    if not isinstance(tensor, DTensor):  # its attributes are torch's own
        for name, attribute in vars(tensor).items():
            if name not in inner:
                yield from tensors_in(attribute, f"/{name}")


def tensors_in(
    value: object, path: str = "", entered: set[int] | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in nested containers and in the attributes of objects there, each once, with its
    path (``/exp_avg/0``).

    Modules are not entered, what they hold is theirs; nor are torch's own objects (a device mesh).

    Args:
        value: what to look into.
        path: the path of ``value`` itself.
        entered: ids of what was seen already.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return
    entered = set() if entered is None else entered
    if id(value) in entered:
        return
    entered.add(id(value))
    if isinstance(value, torch.Tensor):
        yield path, value
    else:
        for name, inner in _contents(value):
            yield from tensors_in(inner, f"{path}/{name}", entered)


def _contents(value: object) -> Iterable[tuple[object, object]]:
    """What a container holds by key or index, or an object by the name of its attribute."""
    if isinstance(value, Mapping):
        # A tensor is a possible key and a poor name.
        keys = [key if isinstance(key, (str, int)) else n for n, key in enumerate(value)]
        return zip(keys, value.values(), strict=True)
    if isinstance(value, (list, tuple)):
        return enumerate(value)
    of_torch = type(value).__module__.split(".")[0] == "torch"
    if of_torch or isinstance(value, (nn.Module, torch.optim.Optimizer)) or callable(value):
        return ()
    slots = [name for name in getattr(type(value), "__slots__", ()) if hasattr(value, name)]
    attributes = [(name, getattr(value, name)) for name in slots]
    return [*getattr(value, "__dict__", {}).items(), *attributes]


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
