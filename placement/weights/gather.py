"""Weights in full, gathered in buckets from wherever their shards rest.

How a weight is gathered. Its full tensor is allocated on the compute device, this rank's shard is
copied into its place there, and the other ranks' shards arrive beside it: by one all-gather in
place for a DTensor that is sharded on its first dimension (FSDP2, HSDP, column-parallel weights),
by a broadcast from each rank for the pieces of FSDP1's flat parameters. Nothing else is allocated,
and a shard is converted before it travels. Other DTensors (sharded on another dimension, or on two
mesh dimensions) are gathered by ``DTensor.full_tensor()``, which needs room for its steps.

What a bucket is. The weights whose gathers are under way at once: as many as fit in its bytes. The
next bucket begins when the consumer asks beyond this one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Shard as Sharded

from placement.owners.base import Resting
from placement.tensors import same_device
from placement.torch_private import FlatPiece, storage_address

Staged = Callable[[int], None]
"""Called with the bytes of each shard that was copied from the host to the compute device."""

_STEPS_OF_A_GENERAL_GATHER = 3
"""``DTensor.full_tensor()`` holds at once, of the full tensor's bytes: what an all-gather gave, the
pieces of it in order, and less than one for the shard and its padding."""


class Addition(Protocol):
    """Something that is added to a weight after it was gathered (a LoRA adapter)."""

    @property
    def parts(self) -> Mapping[str, Resting]:
        """What is gathered for it."""

    @property
    def nbytes(self) -> int:
        """Bytes on the device that computing it takes, beside its parts and the weight."""

    def add_to(self, whole: torch.Tensor, parts: Mapping[str, torch.Tensor]) -> None:
        """Add it to ``whole``, in place, from its gathered parts."""


@dataclass(frozen=True)
class Weight:
    """One weight that is to be exported.

    Attributes:
        name: what the consumer is to call it.
        resting: the weight as it rests.
        additions: what is added to it once it is gathered.
    """

    name: str
    resting: Resting
    additions: tuple[Addition, ...] = ()

    @property
    def shape(self) -> torch.Size:
        return self.resting.shape

    def dtype(self, asked: torch.dtype | None) -> torch.dtype:
        """Its dtype if ``asked`` is the one asked for."""
        return _target(self.resting, asked)

    def device_bytes(self, asked: torch.dtype | None) -> int:
        """The most bytes on the compute device that gathering it takes, its full tensor included.

        Args:
            asked: the dtype asked for, or None.
        """
        if not self.additions:
            return _device_bytes(self.resting, _target(self.resting, asked))
        own = _device_bytes(self.resting, _target(self.resting, None))
        converted = self.resting.shape.numel() * self.dtype(asked).itemsize
        most = max(
            addition.nbytes
            + sum(_device_bytes(part, _target(part, None)) for part in addition.parts.values())
            for addition in self.additions
        )
        return own + max(most, converted)


def gathered(
    weights: Sequence[Weight],
    device: torch.device,
    *,
    dtype: torch.dtype | None,
    bucket_bytes: int,
    staged: Staged,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Each of ``weights`` in full, on ``device``, by all ranks in step.

    Args:
        weights: what to gather, the same and in the same order on all ranks.
        device: the compute device.
        dtype: what floating-point weights are converted to; None leaves them.
        bucket_bytes: the most bytes on ``device`` that are taken at once, unless a single weight
            takes more.
        staged: called with the bytes of each shard that was copied from the host.

    Yields:
        Name and tensor. The tensor is the consumer's own: it shares its bytes with nothing.
    """
    for bucket in _buckets(weights, dtype, bucket_bytes):
        begun = [
            (weight, begin(weight.resting, device, None if weight.additions else dtype, staged))
            for weight in bucket
        ]
        begun.reverse()
        while begun:
            weight, under_way = begun.pop()
            whole = under_way.landed()
            del under_way  # what was handed out is not held here as well
            if weight.additions:
                _add(weight.additions, whole, device, staged)
                whole = whole.to(weight.dtype(dtype))
            yield weight.name, whole
            del whole


def _buckets(
    weights: Iterable[Weight], dtype: torch.dtype | None, bucket_bytes: int
) -> Iterator[list[Weight]]:
    bucket: list[Weight] = []
    room = bucket_bytes
    for weight in weights:
        needed = weight.device_bytes(dtype)
        if bucket and needed > room:
            yield bucket
            bucket, room = [], bucket_bytes
        bucket.append(weight)
        room -= needed
    if bucket:
        yield bucket


def _add(
    additions: Iterable[Addition], whole: torch.Tensor, device: torch.device, staged: Staged
) -> None:
    for addition in additions:
        begun = {n: begin(part, device, None, staged) for n, part in addition.parts.items()}
        addition.add_to(whole, {name: under_way.landed() for name, under_way in begun.items()})


# One tensor.


@dataclass
class UnderWay:
    """A full tensor, of which shards may still be on their way."""

    whole: torch.Tensor
    arriving: list[dist.Work] = field(default_factory=list)

    def landed(self) -> torch.Tensor:
        """The full tensor, once it may be read on the current stream."""
        while self.arriving:
            self.arriving.pop().wait()
        return self.whole


def begin(
    resting: Resting, device: torch.device, dtype: torch.dtype | None, staged: Staged
) -> UnderWay:
    """Begin to gather one tensor on ``device``, by all ranks that share it.

    Args:
        resting: the tensor as it rests.
        device: the compute device.
        dtype: what it is converted to if it holds floating-point numbers.
        staged: called with the bytes that were copied from the host.
    """
    target = _target(resting, dtype)
    if isinstance(resting, FlatPiece):
        return _from_runs(resting, device, target, staged)
    value = resting.detach()
    if not isinstance(value, DTensor):
        return UnderWay(_copied(value, device, target, staged))
    local = value.to_local()
    if (dimension := _rows_over(value)) is not None:
        return _from_rows(value, dimension, device, target, staged)
    if all(isinstance(placement, Replicate) for placement in value.placements):
        return UnderWay(_copied(local, device, target, staged))
    sharded = DTensor.from_local(
        _copied(local, device, target, staged),
        value.device_mesh,
        value.placements,
        run_check=False,
        shape=value.shape,
        stride=value.stride(),
    )
    whole = sharded.full_tensor()
    if storage_address(whole) == storage_address(sharded.to_local()):
        return UnderWay(whole)  # a mesh of one rank; the shard was copied already
    return UnderWay(whole.contiguous())


def _from_rows(
    value: DTensor, dimension: int, device: torch.device, dtype: torch.dtype, staged: Staged
) -> UnderWay:
    """Gather rows. Each rank but the last ones holds as many; they are padded, at the end."""
    ranks = value.device_mesh.size(dimension)
    rows = math.ceil(value.shape[0] / ranks)
    padded = torch.empty((ranks * rows, *value.shape[1:]), dtype=dtype, device=device)
    first = value.device_mesh.get_local_rank(dimension) * rows
    mine = padded[first : first + rows]
    local = value.to_local()
    _fill(mine[: local.shape[0]], local, staged)
    whole = padded[: value.shape[0]]
    if ranks == 1 or whole.numel() == 0:
        return UnderWay(whole)
    group = value.device_mesh.get_group(dimension)
    arriving = dist.all_gather_into_tensor(padded, mine, group=group, async_op=True)
    return UnderWay(whole, [arriving] if arriving is not None else [])


def _from_runs(
    piece: FlatPiece, device: torch.device, dtype: torch.dtype, staged: Staged
) -> UnderWay:
    flat = torch.empty(piece.shape.numel(), dtype=dtype, device=device)
    start, stop = piece.mine
    _fill(flat[start:stop], piece.local, staged)
    whole = flat.as_strided(piece.shape, piece.stride)
    if len(piece.runs) == 1:
        return UnderWay(whole)
    arriving = [
        dist.broadcast(flat[start:stop], group=piece.group, group_src=rank, async_op=True)
        for rank, (start, stop) in enumerate(piece.runs)
        if start < stop
    ]
    return UnderWay(whole, [work for work in arriving if work is not None])


def _copied(
    local: torch.Tensor, device: torch.device, dtype: torch.dtype, staged: Staged
) -> torch.Tensor:
    """A tensor of its own on ``device``."""
    if same_device(local.device, device):
        return local.to(dtype, copy=True)
    converted = local.to(dtype)
    staged(converted.nbytes)
    return converted.to(device)


def _fill(place: torch.Tensor, local: torch.Tensor, staged: Staged) -> None:
    if not same_device(local.device, place.device):
        local = local.to(place.dtype)  # where it rests: less travels, and the device needs no room
        staged(local.nbytes)
    place.copy_(local)


def _rows_over(value: DTensor) -> int | None:
    """The mesh dimension over which the first dimension of ``value`` is sharded, if nothing else
    is; None otherwise."""
    sharded = [
        dimension
        for dimension, placement in enumerate(value.placements)
        if not isinstance(placement, Replicate)
    ]
    if len(sharded) != 1:
        return None
    placement = value.placements[sharded[0]]
    by_rows = type(placement) is Sharded and placement.dim == 0
    return sharded[0] if by_rows else None


def _target(resting: Resting, asked: torch.dtype | None) -> torch.dtype:
    found = resting.local.dtype if isinstance(resting, FlatPiece) else resting.dtype
    return asked if asked is not None and found.is_floating_point else found


def _device_bytes(resting: Resting, dtype: torch.dtype) -> int:
    elements = resting.shape.numel()
    if isinstance(resting, DTensor):
        if (dimension := _rows_over(resting)) is not None:
            ranks = resting.device_mesh.size(dimension)
            padded = ranks * math.ceil(resting.shape[0] / ranks)
            elements = torch.Size((padded, *resting.shape[1:])).numel()
        elif not all(isinstance(placement, Replicate) for placement in resting.placements):
            elements *= _STEPS_OF_A_GENERAL_GATHER
    return elements * dtype.itemsize
