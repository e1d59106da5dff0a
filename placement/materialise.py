"""Memory for a module that was made on the meta device, and a proof that all of it got values.

A module that is too large to be made on every rank is made without memory, sharded, given memory,
and loaded. Each step has its way to go wrong without a word: memory on the device where FSDP2 wants
the host, tied weights that come apart because each name gets memory of its own, a buffer that is in
no checkpoint and keeps what was in its memory before
(https://github.com/huggingface/transformers/pull/45903).

Floating-point memory is filled with NaN before it is handed out, so whether somebody wrote to it is
read from the values. For integers torch's version counter is asked.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from placement.census import take_census
from placement.device import find_compute_device
from placement.errors import NotMaterialised
from placement.names import canonical_names
from placement.owners import Owner, owner_of
from placement.residence import Residence, require_possible
from placement.states import Placement
from placement.tensors import Holding, parts
from placement.torch_private import convert_tensors, version_of


@contextmanager
def materialising(module: nn.Module, rest: Placement | None = None) -> Iterator[None]:
    """A context in which the meta tensors of ``module`` have memory where they belong, and which
    ends well only if all of them were given values there.

    Tensors that have memory already are left as they are, so a buffer that was computed when the
    module was made keeps its values. Tied tensors stay tied. Inside it, load a state dict,
    initialise the layers, or both. Make the optimizer and the manager after it: a plain module's
    parameters are other objects then.

    Args:
        module: the module, sharded if it is to be.
        rest: where it is to rest. None: where its owner keeps it, or else on the compute device.

    Raises:
        ContradictoryOptions: ``rest`` does not agree with the module's owner.
        NotMaterialised: when it ends. Nobody wrote to a tensor, tied tensors came apart, or the
            load put a tensor on another device.
        NoAccelerator, OwnershipUnclear: as for :class:`~placement.manager.PlacementManager`.
    """
    owner = owner_of(module)
    residence = Residence(owner, find_compute_device(owner.compute_device))
    placement = rest or owner.managed or Placement.GPU
    require_possible(owner, placement)
    ties = _ties(module)
    given = _give_memory(owner, residence, placement)
    _tie_again(ties)
    handed_out = _handed_out(owner_of(module), given)
    yield
    _refuse(
        "nobody wrote to them: they have no values (a buffer that is in no state dict, perhaps)",
        _unwritten(module, handed_out),
        "load them, or compute them anew, before the context ends",
    )
    _refuse(
        "they were one tensor, and would train apart",
        _apart(ties),
        "load without assign=True, or tie them again before the context ends",
    )
    strays = residence.strays(take_census(owner_of(module).holdings()), placement)
    _refuse(
        f"in {placement.value} they belong elsewhere: the load put them where the file, or the "
        "loader, wanted them",
        [str(site) for site in strays],
        "load without assign=True, so that values are copied to where the tensors are",
    )


@dataclass(frozen=True)
class _Slot:
    """A place where a tensor is registered."""

    module: nn.Module
    attribute: str
    name: str

    @property
    def tensor(self) -> torch.Tensor:
        tensor: torch.Tensor = getattr(self.module, self.attribute)
        return tensor


@dataclass(frozen=True)
class _HandedOut:
    """A tensor as it was when it had got memory."""

    holding: Holding
    version: int

    @property
    def unwritten(self) -> bool:
        tensor = self.holding.tensor
        if not _can_show_nan(tensor):
            return version_of(tensor) == self.version
        return all(bool(part.isnan().all()) for part in parts(tensor) if part.numel() > 0)


def _ties(module: nn.Module) -> list[list[_Slot]]:
    """Places that have one tensor, for each that is registered in several."""
    canonical = canonical_names(module)
    slots: dict[int, list[_Slot]] = {}
    for prefix, submodule in module.named_modules():
        for registered in (submodule.named_parameters, submodule.named_buffers):
            for attribute, tensor in registered(recurse=False, remove_duplicate=False):
                name = canonical(f"{prefix}.{attribute}".removeprefix("."))
                slots.setdefault(id(tensor), []).append(_Slot(submodule, attribute, name))
    return [tied for tied in slots.values() if len(tied) > 1]


def _give_memory(owner: Owner, residence: Residence, placement: Placement) -> set[str]:
    """Give every meta tensor memory; the names of those that got it."""
    without = {h.name: h for h in owner.holdings() if h.tensor.is_meta and not h.detail}
    targets = {id(h.tensor): residence.of(h, placement) for h in without.values()}
    given: dict[int, torch.Tensor] = {}

    def with_memory(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_meta:
            return tensor
        if id(tensor) not in given:  # a tied one comes once for each of its names
            given[id(tensor)] = torch.empty_like(tensor, device=targets[id(tensor)])
        return given[id(tensor)]

    convert_tensors(owner.module, with_memory)
    return set(without)


def _tie_again(ties: list[list[_Slot]]) -> None:
    for first, *others in ties:
        for other in others:
            if other.tensor is not first.tensor:
                setattr(other.module, other.attribute, first.tensor)


def _handed_out(owner: Owner, given: set[str]) -> list[_HandedOut]:
    """What was given memory, with nothing in it that could be taken for values."""
    holdings = [holding for holding in owner.holdings() if holding.name in given]
    with torch.no_grad():
        for holding in holdings:
            if _can_show_nan(holding.tensor):
                for part in parts(holding.tensor):
                    part.fill_(math.nan)
    return [_HandedOut(holding, version_of(holding.tensor)) for holding in holdings]


def _can_show_nan(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dtype.itemsize > 1


def _unwritten(module: nn.Module, handed_out: list[_HandedOut]) -> list[str]:
    """What was handed out, is still in use, and has no values."""
    in_use = {id(holding.tensor) for holding in owner_of(module).holdings()}
    return [
        f"{out.holding.name} ({out.holding.kind.value})"
        for out in handed_out
        if id(out.holding.tensor) in in_use and out.unwritten
    ]


def _apart(ties: list[list[_Slot]]) -> list[str]:
    return [
        " and ".join(slot.name for slot in tied)
        for tied in ties
        if any(slot.tensor is not tied[0].tensor for slot in tied)
    ]


def _refuse(why: str, tensors: list[str], instead: str) -> None:
    if tensors:
        raise NotMaterialised(
            asked="the end of materialising()",
            state=f"{len(tensors)} of its tensors are not as a module's have to be",
            why=why,
            tensors=tensors,
            instead=instead,
        )
