"""Whether a module and its optimizer hold the same tensors as before.

Naming every tensor takes longer than moving a small one. But names, kinds and owners change only if
objects do. So everything that they are read from is called by *roll*: modules and their classes,
parameters, gradients, buffers, FSDP2's shards, optimizer state, and what wrappers wrap. If the roll
has the same objects in the same order as the last time, what was known of them still holds, and
only where they are and how they look has to be read anew.

A roll is remembered by the identities of its objects: a reference would keep dropped gradients
alive. An object that took a dead one's identity *and* its place in the roll is what the other was.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from typing import Any, NamedTuple

import torch

from placement.census import Census, Site
from placement.optimizer import attributes_of, optimizers_in
from placement.owners import Owner
from placement.states import Component, Placement
from placement.tensors import Holding, Kind, has_storage, is_ordinary
from placement.torch_private import (
    Likeness,
    address_of,
    is_dtensor,
    local_tensors,
    scaler_tensors,
    view_base,
    view_bases,
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
    roll += optimizer.state
    entries: list[object] = []
    for of_one in optimizer.state.values():
        entries += of_one.values() if isinstance(of_one, dict) else (of_one,)
    if not all(issubclass(kind, _PLAIN) for kind in set(map(type, entries))):
        raise Unknown
    roll += entries
    roll += (tensor for _, tensor in attributes_of(optimizer))


_PLAIN = (torch.Tensor, int, float, str, type(None))
"""Entries that are themselves all that there is of them."""


class _Known(NamedTuple):
    """What is known of a tensor: its place among everyone, that of what has its bytes, which is
    another one if it is a wrapper, and what a holding says of it."""

    place: int
    part: int
    of: str
    kind: Kind
    detail: str
    host_scalar: bool


class Acquaintance:
    """The last roll, and what is known of those on it.

    *Everyone* is those on the roll, what the wrappers among them wrap, and what any of these are
    views of: all whose bytes may move, each at a place of its own.

    Args:
        roll: everything, in order.
        holdings: of the same moment.

    Raises:
        Unknown: a holding is not on the roll, or has bytes that a roll does not follow.
    """

    def __init__(self, roll: Sequence[object], holdings: Iterable[Holding]) -> None:
        places = {id(one): place for place, one in enumerate(roll)}
        holdings = list(holdings)
        if any(id(holding.tensor) not in places for holding in holdings):
            raise Unknown
        self._wrappers = sorted(
            {places[id(holding.tensor)] for holding in holdings if is_dtensor(holding.tensor)}
        )
        parts = {place: len(roll) + number for number, place in enumerate(self._wrappers)}
        self._known = []
        for of, kind, tensor, detail, host_scalar in holdings:
            place = places[id(tensor)]
            part = parts.get(place, place)
            self._known.append(_Known(place, part, of, kind, detail, host_scalar))
        those: list[Any] = [*roll, *self._wrapped(roll)]
        with_bytes = sorted({known.part for known in self._known})
        if not all(is_ordinary(those[place]) and has_storage(those[place]) for place in with_bytes):
            raise Unknown
        # One for each base: a view has its base for good.
        views = {
            id(base): place for place in with_bytes if (base := view_base(those[place])) is not None
        }
        self._views = list(views.values())
        everyone = self._everyone(roll)
        self._identities = list(map(id, everyone))
        self._of: dict[Component, list[int]] = {}
        for component in {known.kind.component for known in self._known}:
            own = [known for known in self._known if known.kind.component is component]
            held = [place for known in own for place in (known.place, known.part)]
            # Each once, also what is held under two names or reached in two ways.
            self._of[component] = list({id(everyone[place]): place for place in held}.values())
        self._looks: dict[tuple[Component, Placement], Likeness] = {}

    def meet(self, roll: Sequence[object]) -> list[Any] | None:
        """Everyone, if all are the same objects; else None."""
        if len(roll) + len(self._wrappers) + len(self._views) != len(self._identities):
            return None
        try:
            everyone = self._everyone(roll)
        except AttributeError:  # at the place of a tensor is something else
            return None
        return everyone if self._identities == list(map(id, everyone)) else None

    def _everyone(self, roll: Sequence[Any]) -> list[Any]:
        those = [*roll, *self._wrapped(roll)]
        return those + view_bases([those[place] for place in self._views])

    def _wrapped(self, roll: Sequence[Any]) -> list[torch.Tensor]:
        return local_tensors([roll[place] for place in self._wrappers])

    @property
    def components(self) -> Set[Component]:
        """Those that have tensors."""
        return self._of.keys()

    def remember(self, component: Component, placement: Placement, everyone: Sequence[Any]) -> None:
        """Remember how the tensors of ``component`` look in ``placement``, and where they are."""
        self._looks[component, placement] = Likeness(self._tensors(component, everyone))

    def remembers(self, component: Component, placement: Placement) -> bool:
        """Whether ``component`` was seen in ``placement``."""
        return (component, placement) in self._looks

    def recognises(
        self, component: Component, placement: Placement, everyone: Sequence[Any]
    ) -> bool:
        """Whether the tensors of ``component`` look as they did in ``placement``."""
        looks = self._looks.get((component, placement))
        return looks is not None and looks.is_that_of(self._tensors(component, everyone))

    def _tensors(self, component: Component, everyone: Sequence[Any]) -> list[torch.Tensor]:
        return [everyone[place] for place in self._of.get(component, ())]

    def census(self, everyone: Sequence[Any]) -> Census:
        """Where everyone is now."""
        seen: set[int] = set()
        sites = []
        for place, part_place, of, kind, detail, host_scalar in self._known:
            tensor, part = everyone[place], everyone[part_place]
            storage = part.untyped_storage()
            nbytes = 0
            if (address := address_of(storage)) not in seen:
                seen.add(address)
                nbytes = storage.nbytes()
            holding = Holding(of, kind, tensor, detail, host_scalar)
            sites.append(Site(holding, tensor.device, (part.device,), nbytes))
        return Census(sites)
