"""A move that was made before, made again the other way round.

Small tensors take longer to plan for than to copy. A *route* is the plan of a component's last
move: which tensors share which storage, and what each points at on the other side. As long as the
roll is the same (``placement/roll.py``) and every tensor is as that move left it, the way back is
known, and takes a few operations a tensor. Where anything differs the route is given up, and the
move is planned anew (``placement/transfer.py``).

A route holds no tensor that moves, only its place among everyone on the roll and what they wrap, so
that dropped gradients are not kept alive.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch

from placement.device import free_bytes
from placement.states import Component
from placement.torch_private import (
    Likeness,
    addresses_of,
    holders_at,
    is_dtensor,
    plain_attributes,
    storage_address,
)
from placement.transfer import Lane, Moved, Part, buckets, covers, point
from placement.twins import Twins, layout_of

FIRST_STRETCH = 4 * 2**20
"""Bytes that are copied by the first call; few, so that the link has something to do soon."""


@dataclass
class Route:
    """The way back of one component.

    Its *leaves* are the tensors with bytes, and its *aliases* what these point at on the other
    side: one for all leaves that look the same and share a storage, as a shard without padding and
    its base do.

    Attributes:
        known: what the places were noted on; another acquaintance has others there.
        here: the device that it is on.
        there: the one that it came from.
        places, identities: of the leaves.
        numbers: for each leaf, the number of its storage.
        aliased: for each leaf, the index of its alias.
        aliases: what the leaves point at on the other side.
        originals: for each alias, a leaf that it is for.
        own: on the host, what the leaves point at themselves, by alias: kept from one time to the
            next, as the memory is. Empty on the device, where an alias would keep the memory of a
            tensor that somebody drops.
        wholes: for each storage, a leaf that looks into all of it.
        departing: those leaves, which are not kept alive; known once the component was on the
            device, as are
        looks: how those of each stretch look there.
        fragments: leaves that look into a part of theirs only, with their offsets in elements. Of
            the others, their looks say that it is 0.
        names, sizes: of each storage: of its first tensor; in bytes.
        leaf_counts, alias_counts: of each storage, how many look into it.
        addresses: where each storage is now.
        storages, their_addresses: those that the aliases look into.
        wrapping: places of the wrappers.
        likes_here, likes_there: for each wrapper one like it on either side.
    """

    known: object
    here: torch.device
    there: torch.device
    places: list[int]
    identities: list[int]
    numbers: list[int]
    aliased: list[int]
    aliases: list[torch.Tensor]
    originals: list[int]
    own: list[torch.Tensor]
    wholes: list[int]
    departing: list[weakref.ref[torch.Tensor]]
    looks: list[Likeness]
    fragments: dict[int, int]
    names: list[str]
    sizes: list[int]
    leaf_counts: list[int]
    alias_counts: list[int]
    addresses: list[int]
    storages: list[torch.UntypedStorage]
    their_addresses: list[int]
    wrapping: list[int]
    likes_here: list[torch.Tensor]
    likes_there: list[torch.Tensor]

    def keeps_to_itself(self) -> bool:
        """Whether nobody but the aliases, and the leaves that they are for, looks into the memory
        that the route keeps."""
        if holders_at(self.their_addresses) != self.alias_counts:
            return False
        if not self.own:
            return True
        here = list(map(operator.add, self.leaf_counts, self.alias_counts))
        return holders_at(self.addresses) == here

    @property
    def stretches(self) -> Iterator[slice]:
        """The storages, in runs that are copied by one call each."""
        return buckets(self.sizes, first=FIRST_STRETCH)

    def arrived(self, leaves: Sequence[torch.Tensor]) -> None:
        """Remember from what it is to be copied back, if the leaves are on the device."""
        if self.here.type != "cpu" and not self.looks:
            wholes = [leaves[whole] for whole in self.wholes]
            self.departing = list(map(weakref.ref, wholes))
            self.looks = [Likeness(wholes[stretch]) for stretch in self.stretches]

    def sources(self, number: int, stretch: slice) -> list[torch.Tensor] | None:
        """For each storage of a stretch a tensor to copy from as if it were all of it; None if that
        can't be done with one of those on the device any more.

        Whether these are the leaves still, and look into these storages, is to be found out.
        """
        if self.own:
            return [self.own[self.aliased[whole]] for whole in self.wholes[stretch]]
        departing = self.departing[stretch]
        found = [leaf for ref in departing if (leaf := ref()) is not None]
        if len(found) < len(departing) or not self.looks[number].is_that_of(found):
            return None
        with plain_attributes():
            sizes = [leaf.untyped_storage().nbytes() for leaf in found]
        return found if sizes == self.sizes[stretch] else None  # somebody may have freed one

    @property
    def others(self) -> list[torch.Tensor]:
        """What each leaf points at on the other side, as a tensor of its own."""
        return [
            self.aliases[alias] if self.originals[alias] == index else self.aliases[alias].data
            for index, alias in enumerate(self.aliased)
        ]


def learn(part: Part, known: object, everyone: Sequence[object], twins: Twins) -> Route | None:
    """The way back from what ``part`` did; None if it has to be planned anew.

    Args:
        part: of a move that was just made.
        known: the acquaintance with ``everyone``.
        everyone: all whose bytes may move, and their wrappers.
        twins: of the component.
    """
    if not part.storages or part.moved.still_held:
        return None
    if not all(is_dtensor(wrapper.tensor) for wrapper in part.wrappers):
        return None
    here, there = part.storages[0].target, part.storages[0].before_device
    if any(s.target != here or s.before_device != there for s in part.storages):
        return None
    places = {id(one): place for place, one in enumerate(everyone)}
    leaves: list[torch.Tensor] = []
    numbers: list[int] = []
    aliased: list[int] = []
    aliases: list[torch.Tensor] = []
    originals: list[int] = []
    wholes: list[int] = []
    fragments: dict[int, int] = {}
    alias_counts: list[int] = []
    for number, storage in enumerate(part.storages):
        alias_of: dict[object, int] = {}
        covering: list[int] = []
        for tensor in storage.tensors:
            other = twins.kept(tensor)
            if id(tensor) not in places or other is None:
                return None
            if not twins.in_slab(tensor if here.type == "cpu" else other):
                return None
            if covers(tensor, storage.nbytes):
                covering.append(len(leaves))
            else:
                fragments[len(leaves)] = int(tensor.storage_offset())
            alias = alias_of.setdefault(layout_of(tensor), len(aliases))
            if alias == len(aliases):
                aliases.append(other)
                originals.append(len(leaves))
            leaves.append(tensor)
            numbers.append(number)
            aliased.append(alias)
        if not covering:
            return None
        wholes.append(covering[0])
        alias_counts.append(len(alias_of))
    storages = [aliases[aliased[whole]].untyped_storage() for whole in wholes]
    route = Route(
        known=known,
        here=here,
        there=there,
        places=[places[id(leaf)] for leaf in leaves],
        identities=list(map(id, leaves)),
        numbers=numbers,
        aliased=aliased,
        aliases=aliases,
        originals=originals,
        own=[leaves[original].data for original in originals] if here.type == "cpu" else [],
        wholes=wholes,
        departing=[],
        looks=[],
        fragments=fragments,
        names=[storage.name for storage in part.storages],
        sizes=[storage.nbytes for storage in part.storages],
        leaf_counts=[len(storage.tensors) for storage in part.storages],
        alias_counts=alias_counts,
        addresses=[storage_address(leaves[whole]) for whole in wholes],
        storages=storages,
        their_addresses=addresses_of(storages),
        wrapping=[places[id(wrapper.tensor)] for wrapper in part.wrappers],
        likes_here=[wrapper.like for wrapper in part.wrappers],
        likes_there=[twins.wrapper(w.tensor, w.inner, there) for w in part.wrappers],
    )
    route.arrived(leaves)
    return route


@dataclass
class Journey:
    """A route that is being taken."""

    route: Route
    leaves: list[torch.Tensor] = field(default_factory=list)
    wrappers: list[torch.Tensor] = field(default_factory=list)
    here: list[torch.UntypedStorage] = field(default_factory=list)
    before: list[torch.Tensor] = field(default_factory=list)
    copies: list[torch.Event] = field(default_factory=list)
    moved: Moved = field(default_factory=Moved)
    swapped: bool = False
    released: bool = False

    def set_out(self, lane: Lane, between: Callable[[], None]) -> bool:
        """Begin to copy; whether that can be done with all of the storages."""
        route, to_device = self.route, self.route.there.type != "cpu"
        for number, stretch in enumerate(route.stretches):
            between()
            if (sources := route.sources(number, stretch)) is None:
                return False
            if to_device:
                for storage, size in zip(route.storages[stretch], route.sizes[stretch]):
                    storage.resize_(size)
            targets = [route.aliases[route.aliased[whole]] for whole in route.wholes[stretch]]
            self.copies.append(lane.copy(targets, sources))
        if to_device:
            self.moved.to_device = sum(route.sizes)
        else:
            self.moved.to_host = sum(route.sizes)
        return True

    def meet(self, everyone: Sequence[Any]) -> None:
        """Take the leaves and the wrappers from everyone."""
        self.leaves = [everyone[place] for place in self.route.places]
        self.wrappers = [everyone[place] for place in self.route.wrapping]

    def leaves_stayed(self) -> bool:
        """Whether the leaves look into the same memory as the last move left them with, and nobody
        else looks into it. Of memory that the route keeps the second has been asked already."""
        route = self.route
        storages = [leaf.untyped_storage() for leaf in self.leaves]
        if addresses_of(storages) != [route.addresses[number] for number in route.numbers]:
            return False
        if any(self.leaves[i].storage_offset() != offset for i, offset in route.fragments.items()):
            return False
        if not route.own and holders_at(route.addresses) != route.leaf_counts:
            return False
        self.here = [storages[whole] for whole in route.wholes]
        self.before = route.own or [self.leaves[original].data for original in route.originals]
        return True

    def swaps(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Each tensor with the one that it is to be pointed at, inner ones before their wrapper."""
        others = [self.route.aliases[alias] for alias in self.route.aliased]
        return chain(
            zip(self.leaves, others, strict=True),
            zip(self.wrappers, self.route.likes_there, strict=True),
        )

    def swaps_back(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Each tensor with what it pointed at before, in the same order."""
        before = [self.before[alias] for alias in self.route.aliased]
        return chain(
            zip(self.leaves, before, strict=True),
            zip(self.wrappers, self.route.likes_here, strict=True),
        )


class Retracing:
    """Components that go back the way they came. Used as a
    :class:`~placement.transfer.Transfer` is, but begun in two steps: copies are begun as soon as
    they can be made, and whether the way is still the same is found out beside them. What they are
    copied into is nobody's until then.
    """

    def __init__(self, routes: Mapping[Component, Route], lane: Lane) -> None:
        self._journeys = {component: Journey(route) for component, route in routes.items()}
        self._lane = lane

    def set_out(self, component: Component, between: Callable[[], None]) -> bool:
        """Begin to copy ``component``; whether that can be done without planning it anew."""
        if (journey := self._journeys.get(component)) is None:
            return True
        with torch.no_grad(), journey.moved.timed():
            return journey.set_out(self._lane, between)

    def go_on(self, component: Component, everyone: Sequence[Any]) -> bool:
        """Whether the leaves are still on this way.

        Args:
            everyone: those whom the routes know, found to look as they did when they came here.
        """
        if (journey := self._journeys.get(component)) is None:
            return True
        with torch.no_grad(), journey.moved.timed():
            journey.meet(everyone)
            return journey.leaves_stayed()

    def copies(self, component: Component) -> bool:
        """Whether something of ``component`` is copied."""
        return component in self._journeys

    def swap(self, component: Component) -> None:
        """Point the tensors of ``component`` at what they point at on the other side."""
        if (journey := self._journeys.get(component)) is None:
            return
        journey.swapped = True
        with plain_attributes(), journey.moved.timed():
            point(journey.swaps())

    def land(self, component: Component) -> bool:
        """Wait for the copies of ``component``; whether there were any."""
        if (journey := self._journeys.get(component)) is None:
            return False
        with journey.moved.timed():
            for copy in journey.copies:
                copy.synchronize()
        return True

    def release(self, component: Component) -> Moved:
        """Free what the tensors pointed at, turn the route round, and say what moving cost."""
        if (journey := self._journeys.get(component)) is None:
            return Moved()
        journey.released = True
        route, moved = journey.route, journey.moved
        route.addresses, route.their_addresses = route.their_addresses, route.addresses
        own = route.aliases if route.there.type == "cpu" else []
        route.aliases, route.own, route.storages = journey.before, own, journey.here
        if route.here.type != "cpu":
            left = route.their_addresses
            for number, holders in enumerate(holders_at(left)):
                if holders == route.alias_counts[number]:
                    route.storages[number].resize_(0)
                else:
                    moved.still_held[left[number]] = route.names[number], route.sizes[number]
        if moved.still_held:  # let go of it, and with it of the route
            route.known = None
            route.aliases, route.own, route.storages = [], [], []
            route.identities, route.aliased = [], []
        route.here, route.there = route.there, route.here
        route.likes_here, route.likes_there = route.likes_there, route.likes_here
        route.arrived(journey.leaves)
        journey.leaves, journey.wrappers, journey.before = [], [], []
        return moved

    def abandon(self) -> None:
        """Point the tensors at what they pointed at before, and let go of what was staged.

        An exception from here means that some may not have been pointed back: they are torn.
        """
        begun = [journey for journey in self._journeys.values() if not journey.released]
        for journey in begun:
            if journey.swapped:
                point(journey.swaps_back())
        for journey in begun:
            for copy in journey.copies:
                copy.synchronize()
            if journey.route.there.type != "cpu":
                for storage in journey.route.storages:
                    storage.resize_(0)


def retrace(routes: Mapping[Component, Route], lane: Lane) -> Retracing | None:
    """A move that goes back along ``routes``; None if somebody else looks into memory that they
    keep, or if it does not fit on the other side.

    Args:
        routes: of the components that move.
        lane: the stream to copy on.
    """
    if not all(route.keeps_to_itself() for route in routes.values()):
        return None
    for target in {route.there for route in routes.values()}:
        need = sum(sum(route.sizes) for route in routes.values() if route.there == target)
        free = free_bytes(target)
        if free is not None and need > free:
            return None
    return Retracing(routes, lane)
