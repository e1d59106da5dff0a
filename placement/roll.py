"""Whether a module and its optimizer hold the same tensors as before.

Naming every tensor takes longer than moving a small one. But names, kinds and owners change only if
objects do. So everything that they are read from is called by *roll*: modules and their classes,
parameters, gradients, buffers, FSDP2's shards, optimizer state, and what wrappers wrap. If the roll
has the same objects in the same order as the last time, what was known of them still holds, and
only where they are has to be read anew.

A roll is remembered by the identities of its objects: a reference would keep dropped gradients
alive. An object that took a dead one's identity *and* its place in the roll is what the other was.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any, NamedTuple

import torch

from placement.census import Census, Site
from placement.optimizer import attributes_of, optimizers_in
from placement.owners import Owner
from placement.states import Component
from placement.tensors import Holding, Kind, has_storage, is_ordinary
from placement.torch_private import (
    address_of,
    is_dtensor,
    local_tensor,
    local_tensors,
    scaler_tensors,
)


class Unknown(Exception):
    """There is something of which a roll can't tell whether it changed."""


def call_roll(
    owner: Owner,
    optimizer: torch.optim.Optimizer | None,
    scaler: torch.amp.GradScaler | None,
) -> list[object]:
    """Everything that the holdings of a module, an optimizer and a scaler are read from.

    Raises:
        Unknown: it can't be told from the outside: another owner's secrets, nested state, a
            subclass that carries tensors.
    """
    if (roll := owner.roll()) is None:
        raise Unknown
    if optimizer is not None:
        for one in optimizers_in(optimizer):
            _call(one, roll)
    if scaler is not None:
        roll += scaler_tensors(scaler).values()
    return roll


def _call(optimizer: torch.optim.Optimizer, roll: list[object]) -> None:
    roll.append(optimizer)
    for group in optimizer.param_groups:
        roll += group["params"]
        roll += (group.get("capturable"), group.get("fused"))
    for parameter, entries in optimizer.state.items():
        roll.append(parameter)
        for entry in entries.values() if isinstance(entries, Mapping) else (entries,):
            if not isinstance(entry, _PLAIN):
                raise Unknown
            roll.append(entry)
    roll += (tensor for _, tensor in attributes_of(optimizer))


_PLAIN = (torch.Tensor, int, float, str, type(None))
"""Entries that are themselves all that there is of them."""


class _Known(NamedTuple):
    """What is known of the tensor at a place in the roll."""

    place: int
    of: str
    kind: Kind
    detail: str
    host_scalar: bool
    wraps: bool


class Acquaintance:
    """The last roll, and what is known of those on it.

    Args:
        roll: everything, in order.
        holdings: of the same moment.

    Raises:
        Unknown: a holding is not on the roll, or has bytes that a roll does not follow.
    """

    def __init__(self, roll: Sequence[object], holdings: Iterable[Holding]) -> None:
        places = {id(one): place for place, one in enumerate(roll)}
        self._known = [_learn(holding, places) for holding in holdings]
        self._wrappers = [known.place for known in self._known if known.wraps]
        self._of: dict[Component, tuple[list[int], list[int]]] = {}
        for known in self._known:
            standing, wrapping = self._of.setdefault(known.kind.component, ([], []))
            standing.append(known.place)
            if known.wraps:
                wrapping.append(known.place)
        self._roll = list(map(id, roll))
        self._inner = self._inner_of(roll)

    def meets(self, roll: Sequence[object]) -> bool:
        """Whether ``roll`` has the same objects, and they wrap the same tensors."""
        if self._roll != list(map(id, roll)):
            return False
        try:
            return self._inner == self._inner_of(roll)
        except AttributeError:  # one that wraps nothing took the identity of one that did
            return False

    def _inner_of(self, roll: Sequence[Any]) -> list[int]:
        return list(map(id, local_tensors([roll[place] for place in self._wrappers])))

    @property
    def components(self) -> Set[Component]:
        """Those that have tensors."""
        return self._of.keys()

    def devices(self, roll: Sequence[Any], component: Component) -> list[torch.device]:
        """Where the tensors of ``component`` are, and what they wrap, in a fixed order."""
        places, wrapping = self._of.get(component, ((), ()))
        inner = local_tensors([roll[place] for place in wrapping])
        return [roll[place].device for place in places] + [tensor.device for tensor in inner]

    def census(self, roll: Sequence[Any]) -> Census:
        """Where those on ``roll``, which it meets, are now."""
        seen: set[int] = set()
        sites = []
        for place, of, kind, detail, host_scalar, wraps in self._known:
            tensor = roll[place]
            part = local_tensor(tensor) if wraps else tensor
            storage = part.untyped_storage()
            nbytes = 0
            if (address := address_of(storage)) not in seen:
                seen.add(address)
                nbytes = storage.nbytes()
            holding = Holding(of, kind, tensor, detail, host_scalar)
            sites.append(Site(holding, tensor.device, (part.device,), nbytes))
        return Census(sites)


def _learn(holding: Holding, places: Mapping[int, int]) -> _Known:
    of, kind, tensor, detail, host_scalar = holding
    wraps = is_dtensor(tensor)
    part = local_tensor(tensor) if wraps else tensor
    if id(tensor) not in places or not is_ordinary(part) or not has_storage(part):
        raise Unknown
    return _Known(places[id(tensor)], of, kind, detail, host_scalar, wraps)
