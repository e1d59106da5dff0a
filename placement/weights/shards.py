"""Each rank's own part of the weights, with what is needed to put the parts together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement as Layout

from placement.owners import Owner
from placement.owners.base import Resting
from placement.torch_private import FlatPiece, offset_in_whole
from placement.weights.naming import Names, named
from placement.weights.plan import resting_weights


@dataclass(frozen=True)
class Shard:
    """One rank's part of one weight.

    Attributes:
        name: of the weight, without wrappers.
        tensor: the elements that this rank holds, where they rest. It *shares its bytes with the
            module*: what training changes, it shows. It has no elements on a rank that holds none.
        shape: of the whole weight.
        offset: where ``tensor`` begins in the whole, one number a dimension. With ``flattened`` it
            is one number, in elements of the flattened weight.
        flattened: whether ``tensor`` is a run of the flattened weight (FSDP1), not a block of it.
        mesh: of a DTensor, the ranks that share the weight; None if it is whole here, or flattened.
        layout: of a DTensor, how each dimension of ``mesh`` shards or repeats it.
    """

    name: str
    tensor: torch.Tensor
    shape: torch.Size
    offset: tuple[int, ...]
    flattened: bool = False
    mesh: DeviceMesh | None = None
    layout: tuple[Layout, ...] = ()


def shards_of(owner: Owner, *, names: Names | None) -> Iterator[Shard]:
    """This rank's part of each weight, in the order of the state dict, copied nowhere.

    Raises:
        ContradictoryOptions: ``names`` does not fit the weights.
    """
    found = resting_weights(owner)
    called = named(list(found), names)
    for name, resting in found.items():
        yield _shard(called[name], resting)


def _shard(name: str, resting: Resting) -> Shard:
    if isinstance(resting, FlatPiece):
        start, _ = resting.mine
        return Shard(name, resting.local, resting.shape, (start,), flattened=True)
    value = resting.detach()
    if isinstance(value, DTensor):
        return Shard(
            name,
            value.to_local(),
            value.shape,
            offset_in_whole(value),
            mesh=value.device_mesh,
            layout=value.placements,
        )
    return Shard(name, value, value.shape, (0,) * value.ndim)
