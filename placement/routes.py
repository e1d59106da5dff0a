"""A move that was made before, made again the other way round.

Small tensors take longer to plan for than to copy. A *route* is the plan of a component's last
move: which tensors share which storage, and what each points at on the other side. As long as the
roll is the same (``placement/roll.py``) and every tensor is as that move left it, the way back is
known, and takes a few operations a tensor. Where anything differs the route is given up, and the
move is planned anew (``placement/transfer.py``).

A route holds no tensor that moves, only where on the roll it stands, so that dropped gradients are
not kept alive.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from placement.device import free_bytes
from placement.states import Component
from placement.torch_private import (
    address_of,
    addresses_of,
    holders_of,
    is_dtensor,
    local_tensors,
    storage_address,
    view_bases,
)
from placement.transfer import BUCKET, Lane, Moved, Part, covers
from placement.twins import Twins

_Layouts = tuple[list[torch.Size], list[tuple[int, ...]], list[torch.dtype]]


@dataclass
class Route:
    """The way back of one component.

    Attributes:
        known: what the roll was when places on it were noted; another one has others there.
        here: the device that it is on.
        there: the one that it came from.
        standing: for each way of reaching a tensor from one on the roll, the places of those that
            are reached so. Together they are the *leaves*, in this order.
        identities, layouts: of the leaves.
        others: what each leaf points at on the other side.
        names, sizes, addresses, holders: of each storage: of its first tensor; in bytes; where it
            is now; how many leaves look into it.
        wholes: for each storage a leaf that looks into all of it.
        wrapping: places of the wrappers.
        likes_here, likes_there: for each wrapper one like it on either side.
    """

    known: object
    here: torch.device
    there: torch.device
    standing: tuple[list[int], ...]
    identities: list[int]
    layouts: _Layouts
    others: list[torch.Tensor]
    names: list[str]
    sizes: list[int]
    addresses: list[int]
    holders: list[int]
    wholes: list[int]
    wrapping: list[int]
    likes_here: list[torch.Tensor]
    likes_there: list[torch.Tensor]

    def leaves(self, roll: Sequence[Any]) -> list[Any]:
        """The tensors with bytes, from where they stand on the roll."""
        found: list[Any] = []
        for reach, places in zip(_REACHES, self.standing, strict=True):
            found += reach([roll[place] for place in places])
        return found


def _themselves(tensors: list[Any]) -> list[Any]:
    return tensors


def _bases_of_locals(tensors: list[Any]) -> list[Any]:
    return view_bases(local_tensors(tensors))


_REACHES: tuple[Callable[[list[Any]], Sequence[Any]], ...] = (
    _themselves,
    local_tensors,
    view_bases,
    _bases_of_locals,
)
"""The ways from tensors on the roll to those that have bytes."""


def learn(part: Part, known: object, roll: Sequence[object], twins: Twins) -> Route | None:
    """The way back from what ``part`` did; None if it has to be planned anew."""
    if not part.storages or part.moved.still_held:
        return None
    if not all(is_dtensor(wrapper.tensor) for wrapper in part.wrappers):
        return None
    reached = _reached(roll)
    standing: tuple[list[int], ...] = tuple([] for _ in _REACHES)
    tensors: list[tuple[int, torch.Tensor]] = []  # with the number of their storage
    for number, storage in enumerate(part.storages):
        for tensor in storage.tensors:
            if id(tensor) not in reached:
                return None
            tensors.append((number, tensor))
    order = sorted(range(len(tensors)), key=lambda i: reached[id(tensors[i][1])])
    for index in order:
        way, place = reached[id(tensors[index][1])]
        standing[way].append(place)
    leaves = [tensors[index][1] for index in order]
    numbers = [tensors[index][0] for index in order]
    others = [twins.kept(leaf) for leaf in leaves]
    wholes: dict[int, int] = {}
    for index, (number, leaf) in enumerate(zip(numbers, leaves, strict=True)):
        if covers(leaf, part.storages[number].nbytes):
            wholes.setdefault(number, index)
    here, there = part.storages[0].target, part.storages[0].before_device
    on_host = leaves if here.type == "cpu" else others
    if (
        len(wholes) < len(part.storages)
        or any(other is None for other in others)
        or any(s.target != here or s.before_device != there for s in part.storages)
        or not all(tensor is not None and twins.in_slab(tensor) for tensor in on_host)
    ):
        return None
    places = {id(one): place for place, one in enumerate(roll)}
    storages = part.storages
    return Route(
        known=known,
        here=here,
        there=there,
        standing=standing,
        identities=list(map(id, leaves)),
        layouts=_layouts(leaves),
        others=[other for other in others if other is not None],
        names=[storage.name for storage in storages],
        sizes=[storage.nbytes for storage in storages],
        addresses=[storage_address(leaves[wholes[n]]) for n in range(len(storages))],
        holders=[len(storage.tensors) for storage in storages],
        wholes=[wholes[n] for n in range(len(storages))],
        wrapping=[places[id(wrapper.tensor)] for wrapper in part.wrappers],
        likes_here=[wrapper.like for wrapper in part.wrappers],
        likes_there=[twins.wrapper(w.tensor, w.inner, there) for w in part.wrappers],
    )


def _reached(roll: Sequence[object]) -> dict[int, tuple[int, int]]:
    """The tensors with bytes that can be reached from the roll, and how: way and place."""
    reached: dict[int, tuple[int, int]] = {}
    for place, one in enumerate(roll):
        if not isinstance(one, torch.Tensor):
            continue
        first = 1 if is_dtensor(one) else 0
        for way in (first, first + 2):
            if (leaf := _REACHES[way]([one])[0]) is not None:
                reached.setdefault(id(leaf), (way, place))
    return reached


def _layouts(tensors: Sequence[torch.Tensor]) -> _Layouts:
    return (
        list(map(torch.Tensor.size, tensors)),
        list(map(torch.Tensor.stride, tensors)),
        [tensor.dtype for tensor in tensors],
    )


@dataclass
class _Journey:
    """A route that is being taken."""

    route: Route
    leaves: list[torch.Tensor]
    wrappers: list[torch.Tensor]
    here: list[torch.UntypedStorage]
    there: list[torch.UntypedStorage]
    before: list[torch.Tensor] = field(default_factory=list)
    copies: list[torch.Event] = field(default_factory=list)
    moved: Moved = field(default_factory=Moved)
    committed: bool = False


class Retracing:
    """Components that go back the way they came. Used as a
    :class:`~placement.transfer.Transfer` is."""

    def __init__(self, journeys: Mapping[Component, _Journey], lane: Lane) -> None:
        self._journeys = journeys
        self._lane = lane

    def stage(self, component: Component, between: Callable[[], None]) -> bool:
        """Begin to copy everything of ``component``; whether there was anything."""
        if (journey := self._journeys.get(component)) is None:
            return False
        started, route = time.monotonic(), journey.route
        if route.there.type != "cpu":
            for storage, size in zip(journey.there, route.sizes, strict=True):
                storage.resize_(size)
        journey.before = [leaf.data for leaf in journey.leaves]
        pairs, nbytes = [], 0
        for whole, size in zip(route.wholes, route.sizes, strict=True):
            pairs.append((route.others[whole], journey.leaves[whole]))
            nbytes += size
            if nbytes >= BUCKET:
                between()
                journey.copies.append(self._lane.copy(pairs))
                pairs, nbytes = [], 0
        if pairs:
            between()
            journey.copies.append(self._lane.copy(pairs))
        if route.there.type == "cpu":
            journey.moved.to_host = sum(route.sizes)
        else:
            journey.moved.to_device = sum(route.sizes)
        journey.moved.seconds += time.monotonic() - started
        return True

    def land(self, component: Component) -> bool:
        """Wait for the copies of ``component``; whether there were any."""
        if (journey := self._journeys.get(component)) is None:
            return False
        started = time.monotonic()
        for copy in journey.copies:
            copy.synchronize()
        journey.moved.seconds += time.monotonic() - started
        return True

    def commit(self, component: Component) -> None:
        """Point the tensors of ``component`` at what they point at on the other side."""
        if (journey := self._journeys.get(component)) is None:
            return
        started, journey.committed = time.monotonic(), True
        with torch.no_grad():
            for leaf, other in zip(journey.leaves, journey.route.others, strict=True):
                leaf.data = other
            for wrapper, like in zip(journey.wrappers, journey.route.likes_there, strict=True):
                wrapper.data = like
        journey.moved.seconds += time.monotonic() - started

    def release(self, component: Component) -> Moved:
        """Free what the tensors pointed at, turn the route round, and say what moving cost."""
        if (journey := self._journeys.get(component)) is None:
            return Moved()
        route, moved = journey.route, journey.moved
        route.addresses = addresses_of(journey.there)
        route.others, journey.leaves = journey.before, []
        if route.here.type != "cpu":
            for number, holders in enumerate(holders_of(journey.here)):
                storage = journey.here[number]
                if holders == route.holders[number]:
                    storage.resize_(0)
                else:
                    held = route.names[number], route.sizes[number]
                    moved.still_held[address_of(storage)] = held
        if moved.still_held:  # let go of it
            route.identities, route.others, journey.before = [], [], []
        route.here, route.there = route.there, route.here
        route.likes_here, route.likes_there = route.likes_there, route.likes_here
        return moved

    def abandon(self) -> None:
        """Let go of what was staged and not committed."""
        for journey in self._journeys.values():
            if not journey.committed:
                for copy in journey.copies:
                    copy.synchronize()
                if journey.route.there.type != "cpu":
                    for storage in journey.there:
                        storage.resize_(0)


def retrace(
    routes: Mapping[Component, Route],
    roll: Sequence[Any],
    lane: Lane,
) -> Retracing | None:
    """A move that goes back along ``routes``; None if something on one of them has changed."""
    journeys = {}
    for component, route in routes.items():
        if (journey := _set_out(route, roll)) is None:
            return None
        journeys[component] = journey
    for target in {route.there for route in routes.values()}:
        need = sum(sum(route.sizes) for route in routes.values() if route.there == target)
        free = free_bytes(target)
        if free is not None and need > free:
            return None
    return Retracing(journeys, lane)


def _set_out(route: Route, roll: Sequence[Any]) -> _Journey | None:
    """The way back, if the leaves are the same, as the last move left them, and nobody else looks
    into their memory on either side."""
    leaves = route.leaves(roll)
    if route.identities != list(map(id, leaves)) or route.layouts != _layouts(leaves):
        return None
    here = [leaves[whole].untyped_storage() for whole in route.wholes]
    if addresses_of(here) != route.addresses:
        return None
    there = [route.others[whole].untyped_storage() for whole in route.wholes]
    if holders_of(here) != route.holders or holders_of(there) != route.holders:
        return None
    return _Journey(route, leaves, [roll[place] for place in route.wrapping], here, there)
