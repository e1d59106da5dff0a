"""How a placement changes: check, copy everything, swap, then fire the machines.

All components that move together move as one. Everything that can be known is refused before the
first copy; tensors are swapped while the copies are made; the machines are fired when all copies
have landed, so the record changes exactly if the move went through. If anything fails before, all
tensors are swapped back.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import torch

from placement.census import Site
from placement.claims import Claim
from placement.device import allocated_bytes, resident_bytes
from placement.journal import Journal
from placement.leftovers import Leftover, find_leftovers, find_unregistered
from placement.record import Record
from placement.residence import CPU
from placement.routes import Retracing, Route, learn, retrace
from placement.slabs import Slabs
from placement.states import Component, Integrity, Placement, Trigger, trigger_between
from placement.tensors import has_its_bytes, parts
from placement.torch_private import Span
from placement.trace import RECOVERY, EventKind
from placement.transfer import Lane, Move, Moved, Transfer
from placement.twins import Twins
from placement.undisturbed import undisturbed

_LOG = logging.getLogger("placement")


class Mover:
    """Moves what a record is of, as far as it has a claim to it, and keeps the record true."""

    def __init__(
        self,
        record: Record,
        claim: Claim,
        journal: Journal,
        *,
        unchanged: Sequence[str],
        trust: bool,
    ) -> None:
        self._record = record
        self._claim = claim
        self._journal = journal
        self._unchanged = unchanged
        # Step counters that an offload took off the device, so that an onload takes back just
        # those. By name, since a load replaces the tensors.
        self._offloaded_scalars: set[str] = set()
        # What was found on the host in ordinary memory, and goes back to it.
        self._found_pageable: set[str] = set()
        self._lane = Lane(record.device)
        self._slabs = Slabs()
        self._twins = {component: Twins(self._slabs, trust=trust) for component in Component}
        self._routes: dict[Component, Route] = {}
        # Bytes that the last offload of the parameters left on the device.
        self._left_by_an_offload = 0
        # Storages of the last offload that somebody else looks into.
        self._copied_away: dict[int, tuple[str, int]] = {}

    def bring(
        self,
        wanted: dict[Component, Placement],
        asked: str,
        unchanged: frozenset[Component] = frozenset(),
    ) -> list[str]:
        """Bring each component to the placement wanted: all of them, or none.

        Args:
            wanted: the components and where they are to be.
            asked: the call this is for, as errors name it.
            unchanged: components that are declared to keep their values on the device.

        Returns:
            Names of tensors that were declared unchanged and were changed. They moved all the same.

        Raises:
            PlacementError: it was refused; nothing moved.
            TornPlacement: it failed, and swapping back failed, too.
            Exception: whatever a copy or a swap raised; everything is as it was.
        """
        if all(self._record[component] is place for component, place in wanted.items()):
            return []  # most contexts are entered and left so: nothing more is to be spent on it
        with undisturbed() as deliver_interrupt:
            begun = self.begin(wanted, asked, unchanged, deliver_interrupt)
            return self.complete(begun) if begun is not None else []

    def begin(
        self,
        wanted: dict[Component, Placement],
        asked: str,
        unchanged: frozenset[Component] = frozenset(),
        between: Callable[[], None] = lambda: None,
    ) -> Begun | None:
        """Do all of :meth:`bring` that comes before the wait for the copies. Until it is completed
        the record and the tensors are as they were.

        Args:
            between: called between copies; may raise.

        Returns:
            What :meth:`complete` takes; None if nothing is to be moved.
        """
        triggers = {
            component: trigger
            for component, placement in wanted.items()
            if (trigger := trigger_between(self._record[component], placement))
        }
        if not triggers:
            return None
        if not unchanged & triggers.keys() and not self._unchanged:
            begun = self._begin_on_known_routes(triggers, wanted, asked, between)
            if begun is not None:
                return begun
        census = self._record.check(asked)
        self._let_what_is_empty_follow(triggers, wanted, {s.kind.component for s in census.sites})
        for component, trigger in triggers.items():
            if not self._record.machines[component].may(trigger):
                raise self._record.machines[component].refusal(trigger)
        self._record.owner.settle()
        moves = [
            self._move(site, target, declared=component in unchanged)
            for component, trigger in triggers.items()
            for site in census.of(component).sites
            if (target := self._target(site, trigger)) is not None and not site.is_on(target)
        ]
        moving = {id(move.site) for move in moves}
        staying = [site for site in census.sites if id(site) not in moving]
        meter = _Meter(self._record.device)
        transfer = Transfer(moves, staying, twins=self._twins, lane=self._lane, asked=asked)
        if transfer.watched:
            self._claim.refuse_shared(asked, census)
        for component in triggers:
            self._give_up_route(component)
        begun = Begun(asked, triggers, moves, transfer, meter)
        with self._abandoned_on_failure(transfer, asked), begun.span():
            for component, trigger in triggers.items():
                with self._failures(component, trigger):
                    if transfer.stage(component, between):
                        self._journal.copying(EventKind.ISSUED, component, trigger.value)
        return begun

    def _begin_on_known_routes(
        self,
        triggers: dict[Component, Trigger],
        wanted: Mapping[Component, Placement],
        asked: str,
        between: Callable[[], None],
    ) -> Begun | None:
        """Begin a move that is the way back of the last one, without planning it; None if it is
        not."""
        triggers, present = dict(triggers), self._record.components_with_tensors
        self._let_what_is_empty_follow(triggers, wanted, present)
        routes = {c: self._routes.get(c) for c in triggers if c in present}
        now = self._record.acquaintance
        known = {
            c: route for c, route in routes.items() if route is not None and route.known is now
        }
        if not known or len(known) < len(routes):
            return None
        meter = _Meter(self._record.device)
        if (transfer := retrace(known, self._lane)) is None:
            return None
        begun = Begun(asked, triggers, (), transfer, meter)
        self.expect_changes(triggers)
        with self._abandoned_on_failure(transfer, asked), begun.span():
            if not self._set_out(begun, transfer, between):
                transfer.abandon()
                return None
            self._record.owner.settle()
        for component, trigger in triggers.items():
            if transfer.copies(component):
                self._journal.copying(EventKind.ISSUED, component, trigger.value)
        return begun

    def _set_out(self, begun: Begun, transfer: Retracing, between: Callable[[], None]) -> bool:
        """Begin to copy along known routes, and find out beside it if they lead there still."""
        for component, trigger in begun.triggers.items():
            with self._failures(component, trigger):
                if not transfer.set_out(component, between):
                    return False
        if (everyone := self._record.everyone_if_they_agree(begun.asked)) is None:
            return False
        for component, trigger in begun.triggers.items():
            with self._failures(component, trigger):
                if not transfer.go_on(component, everyone):
                    return False
        return True

    def _give_up_route(self, component: Component) -> None:
        """Plan the next move of ``component`` anew, with the memory that its route kept."""
        if (route := self._routes.pop(component, None)) is not None:
            self._twins[component].take(route.identities, route.others)

    def _learn_routes(self, begun: Begun) -> None:
        """Remember the way that was gone, for the way back."""
        if not isinstance(begun.transfer, Transfer):
            return
        if (everyone := self._record.everyone_moved(begun.triggers)) is None:
            return
        known = self._record.acquaintance
        for component in begun.triggers:
            route = learn(begun.transfer.part(component), known, everyone, self._twins[component])
            if route is not None:
                self._routes[component] = route
                self._twins[component].keep_only(())  # the route has them now

    def complete(self, begun: Begun) -> list[str]:
        """Make a move that was begun.

        Returns, raises: as :meth:`bring` does.
        """
        broken: list[str] = []
        with begun.span():
            self._swap_and_land(begun)
            if Trigger.OFFLOAD in begun.triggers.values():
                self._copied_away = {}
            sources = self._record.placements()
            for component, trigger in begun.triggers.items():
                self._record.machines[component].fire(trigger)
            for component, trigger in begun.triggers.items():
                broken += self._conclude(begun, component, trigger, sources[component]).broken
            self._remember_what_was_found(begun.moves)
            self._learn_routes(begun)
            if Component.PARAMS in begun.triggers:
                self._record.owner.moved(self._record[Component.PARAMS])
        if begun.triggers.get(Component.PARAMS) is Trigger.OFFLOAD:
            # A walk over all attributes takes as long as moving small tensors does, so it is made
            # when there may be something new.
            if (left := allocated_bytes(self._record.device)) > self._left_by_an_offload:
                self._notice_what_is_unregistered()
            self._left_by_an_offload = left
        return broken

    def expect_changes(self, components: Iterable[Component]) -> None:
        """Of these components, nothing that is on the device counts as unchanged any more."""
        for component in components:
            self._twins[component].revoke()

    def release_host_memory(self) -> int:
        """Let go of the host memory that is kept for moves to come and in which no tensor rests.

        Returns:
            Its bytes.
        """
        for component, placement in self._record.placements().items():
            if placement is Placement.GPU:
                self._routes.pop(component, None)
                self._twins[component].keep_only(())
        return self._slabs.release()

    @property
    def host_bytes(self) -> int:
        """Bytes of pinned memory that are kept for moves, in use or not."""
        return self._slabs.nbytes

    def fire(self, component: Component, trigger: Trigger) -> None:
        """Fire a trigger that moves nothing."""
        machine, source = self._record.machines[component], self._record[component]
        machine.fire(trigger)
        self._journal.triggered(component, trigger, source)

    def relocate(self, strays: Iterable[Site], why: str) -> None:
        """Put tensors where they belong in the placement that their component has anyway."""
        for component, placement in self._record.placements().items():
            moves = [
                self._move(site, target)
                for site in strays
                if site.kind.component is component
                and (target := self._record.residence.of(site.holding, placement)) is not None
            ]
            if not moves:
                continue
            meter = _Meter(self._record.device)
            self._give_up_route(component)
            transfer = Transfer(moves, twins=self._twins, lane=self._lane, asked=why)
            with undisturbed() as deliver_interrupt, self._abandoned_on_failure(transfer, why):
                if transfer.stage(component, deliver_interrupt):
                    self._journal.copying(EventKind.ISSUED, component, why)
                transfer.swap(component)
                if transfer.land(component):
                    self._journal.copying(EventKind.LANDED, component, why)
            self._journal.moved(why, component, meter.add_to(transfer.release(component)))

    def recover(self) -> None:
        """Put every tensor of a torn component where the record says, and call it whole."""
        for component, machine in self._record.machines.items():
            if machine.integrity is Integrity.TORN:
                sites = self._record.census().of(component)
                strays = self._record.residence.strays(sites, machine.state)
                self.relocate(strays, RECOVERY)
                if not strays:  # all had been swapped back when it failed
                    self._journal.moved(RECOVERY, component, Moved())
                machine.mend()

    @contextmanager
    def _failures(self, component: Component, trigger: Trigger) -> Iterator[None]:
        """Record a move that fails before it is made."""
        try:
            yield
        except BaseException as error:
            self._journal.triggered(component, trigger, self._record[component], failure=error)
            raise

    @contextmanager
    def _abandoned_on_failure(self, transfer: Transfer | Retracing, asked: str) -> Iterator[None]:
        """Take a move back that fails. If that fails, too, everything is torn."""
        try:
            yield
        except BaseException:
            try:
                transfer.abandon()
            except BaseException as error:
                for machine in self._record.machines.values():
                    machine.tear()
                raise machine.torn(asked) from error
            raise

    def _swap_and_land(self, begun: Begun) -> None:
        """Swap the tensors while they are copied, and wait for the copies."""
        with self._abandoned_on_failure(begun.transfer, begun.asked):
            for component, trigger in begun.triggers.items():
                with self._failures(component, trigger):
                    begun.transfer.swap(component)
            for component, trigger in begun.triggers.items():
                with self._failures(component, trigger):
                    if begun.transfer.land(component):
                        self._journal.copying(EventKind.LANDED, component, trigger.value)

    def _conclude(
        self, begun: Begun, component: Component, trigger: Trigger, source: Placement
    ) -> Moved:
        """Release what a component left, and tell that it has moved."""
        moved = begun.meter.add_to(begun.transfer.release(component))
        self._journal.triggered(component, trigger, source, moved)
        if trigger is Trigger.OFFLOAD:
            self._notice_what_stayed(component, moved)
        return moved

    def leftovers(self) -> list[Leftover]:
        """What the last offload copied away and that is still alive on the device, and what it did
        not move because it is in plain attributes."""
        alive = find_leftovers(self._copied_away, self._record.device)
        return [*alive, *self._unregistered()]

    def _unregistered(self) -> Iterator[Leftover]:
        record = self._record

        def registered() -> Iterator[torch.Tensor]:
            for site in record.census().sites:
                yield site.holding.tensor

        return find_unregistered(record.module, registered(), record.device)

    def _notice_what_stayed(self, component: Component, moved: Moved) -> None:
        self._copied_away |= moved.still_held
        if moved.still_held:
            _LOG.warning(
                "%s bytes of the %s did not come back with its offload: something else looks into "
                "them; manager.leftovers() names it",
                f"{sum(nbytes for _, nbytes in moved.still_held.values()):,}",
                component.value,
            )

    def _notice_what_is_unregistered(self) -> None:
        if unregistered := list(self._unregistered()):
            _LOG.warning(
                "%s bytes in plain attributes of the module stay on the device: %s; register them "
                "as buffers, which are moved, or drop them before the offload",
                f"{sum(leftover.nbytes for leftover in unregistered):,}",
                ", ".join(leftover.name for leftover in unregistered),
            )

    def _target(self, site: Site, trigger: Trigger) -> torch.device | None:
        """Where ``trigger`` sends ``site``; None leaves it where it is."""
        if self._record.residence.stays(site.holding):
            return None
        if trigger is Trigger.OFFLOAD:
            return CPU
        if site.holding.host_scalar and site.name not in self._offloaded_scalars:
            return None
        return self._record.device

    def _move(self, site: Site, target: torch.device, *, declared: bool = False) -> Move:
        if self._unchanged and not declared:
            declared = any(fnmatchcase(site.holding.of, p) for p in self._unchanged)
        if target.type == "cpu":
            pinned = not self._found_pageable or site.name not in self._found_pageable
            return Move(site, target, pinned, declared)
        # What has no storage can't be asked; the transfer will refuse it by name.
        pinned = all(p.is_pinned() for p in parts(site.holding.tensor) if has_its_bytes(p))
        return Move(site, target, pinned, declared)

    def _remember_what_was_found(self, moves: Iterable[Move]) -> None:
        for site, target, pinned, _ in moves:
            if target.type == "cpu":
                if site.holding.host_scalar:
                    self._offloaded_scalars.add(site.name)
                continue
            if site.holding.host_scalar:
                self._offloaded_scalars.discard(site.name)
            if not pinned:
                self._found_pageable.add(site.name)
            elif self._found_pageable:
                self._found_pageable.discard(site.name)

    def _let_what_is_empty_follow(
        self,
        triggers: dict[Component, Trigger],
        wanted: Mapping[Component, Placement],
        present: Set[Component],
    ) -> None:
        """A component without tensors goes where its parameters go, unless it is wanted
        elsewhere."""
        if (trigger := triggers.get(Component.PARAMS)) is None:
            return
        for component, machine in self._record.machines.items():
            if component not in present and component not in wanted and machine.may(trigger):
                triggers[component] = trigger


@dataclass(frozen=True)
class Begun:
    """A move whose copies are under way.

    Attributes:
        asked: the call this is for, as errors name it.
        triggers: what will be fired, by component.
        moves: what is moved for it.
    """

    asked: str
    triggers: Mapping[Component, Trigger]
    moves: Sequence[Move]
    transfer: Transfer | Retracing
    meter: _Meter

    def span(self) -> Span:
        """A span of the profiler's."""
        names = {trigger.value for trigger in self.triggers.values()}
        return Span(f"placement: {', '.join(names)}")


class _Meter:
    """Memory of the device and of the process, from one reading to the next."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last = self._read()

    def add_to(self, moved: Moved) -> Moved:
        """``moved`` with the memory since the last reading, and now."""
        before = self._last
        if moved.to_device or moved.to_host or moved.unchanged:  # reading takes its time, too
            self._last = self._read()
        return replace(
            moved,
            device_bytes=(before[0], self._last[0]),
            host_bytes=(before[1], self._last[1]),
        )

    def _read(self) -> tuple[int, int]:
        return allocated_bytes(self._device), resident_bytes()
