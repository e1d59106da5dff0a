"""Weights in full, one at a time, from wherever the shards rest."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from placement.names import canonical_names

Tied = Literal["once", "both"]


def full_tensors(
    module: nn.Module,
    device: torch.device,
    *,
    tied: Tied,
    staged: Callable[[int], None],
) -> Iterator[tuple[str, torch.Tensor]]:
    """The entries of ``module``'s state dict in full, on ``device``.

    Each is gathered when it is asked for, by all ranks together and in the same order, and is the
    consumer's own: it shares no bytes with the module. Of the module only one shard at a time is
    copied to ``device``; the module itself is not moved.

    Args:
        module: the module; parameters that are DTensors are gathered.
        device: the compute device.
        tied: whether a parameter under two names is yielded under the first only, or both.
        staged: called with the bytes of each shard that was copied to ``device``.

    Yields:
        Name, without the parts of wrappers, and tensor. Entries that are no tensors (extra state)
        are not weights, and left out.
    """
    canonical = canonical_names(module)
    seen: set[int] = set()
    for name, value in module.state_dict(keep_vars=True).items():
        if not isinstance(value, torch.Tensor) or (tied == "once" and id(value) in seen):
            continue
        seen.add(id(value))
        yield canonical(name), _full(value.detach(), device, staged)


def _full(value: torch.Tensor, device: torch.device, staged: Callable[[int], None]) -> torch.Tensor:
    local = value.to_local() if isinstance(value, DTensor) else value
    if local.device != device:
        there = local.to(device)
        staged(there.nbytes)
    else:
        there = local
    if isinstance(value, DTensor):
        sharded = DTensor.from_local(
            there,
            value.device_mesh,
            value.placements,
            run_check=False,
            shape=value.shape,
            stride=value.stride(),
        )
        full = sharded.full_tensor()
    else:
        full = there
    # On one rank, or of a replicated tensor, gathering may give the shard itself.
    if full.untyped_storage().data_ptr() == local.untyped_storage().data_ptr():
        full = full.clone()
    return full
