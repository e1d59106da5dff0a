"""How a placement changes: check, copy everything, then fire the machines.

All components that move together move as one. Everything that can be known is refused before the
first copy; every copy is made before the first pointer is swapped; the swaps of a component happen
inside its machine's transition, so the record changes exactly if they went through.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch.profiler import record_function

from placement.census import Census, Site
from placement.claims import Claim
from placement.device import allocated_bytes, resident_bytes
from placement.errors import PlacementError
from placement.interrupts import interrupts_held_back
from placement.journal import Journal
from placement.leftovers import Leftover, find_leftovers, find_unregistered
from placement.record import Record
from placement.residence import CPU
from placement.states import Component, Integrity, Placement, Trigger, trigger_between
from placement.tensors import has_its_bytes, parts
from placement.trace import RECOVERY, EventKind
from placement.transfer import Move, Moved, Transfer

_LOG = logging.getLogger("placement")


class Mover:
    """Moves what a record is of, as far as it has a claim to it, and keeps the record true."""

    def __init__(self, record: Record, claim: Claim, journal: Journal) -> None:
        self._record = record
        self._claim = claim
        self._journal = journal
        # Step counters that an offload took off the device, so that an onload takes back just
        # those. By name, since a load replaces the tensors.
        self._offloaded_scalars: set[str] = set()
        # What was found on the host in ordinary memory, and goes back to it.
        self._found_pageable: set[str] = set()
        # Storages of the last offload, for the question what of them is still alive.
        self._copied_away: dict[int, tuple[str, int]] = {}

    def bring(self, wanted: dict[Component, Placement], asked: str) -> None:
        """Bring each component to the placement wanted: all of them, or none.

        Raises:
            PlacementError: it was refused; nothing moved.
            TornPlacement: swapping failed half way.
            Exception: whatever a copy raised; nothing changed.
        """
        triggers = {
            component: trigger
            for component, placement in wanted.items()
            if (trigger := trigger_between(self._record[component], placement))
        }
        if not triggers:
            return
        census = self._record.check(asked)
        self._let_what_is_empty_follow(triggers, census)
        for component, trigger in triggers.items():
            if not self._record.machines[component].may(trigger):
                raise self._record.machines[component].refusal(trigger)
        self._claim.refuse_shared(asked, census)
        self._record.owner.settle()
        moves = [
            self._move(site, target)
            for component, trigger in triggers.items()
            for site in census.of(component).sites
            if (target := self._target(site, trigger)) is not None and not site.is_on(target)
        ]
        moving = {id(move.site) for move in moves}
        staying = [site for site in census.sites if id(site) not in moving]
        meter = _Meter(self._record.device)
        transfer = Transfer(moves, staying, asked=asked)
        if Trigger.OFFLOAD in triggers.values():
            self._copied_away = {}
        span = record_function(f"placement: {', '.join(t.value for t in set(triggers.values()))}")
        with span, interrupts_held_back() as deliver_interrupt:
            for component, trigger in triggers.items():
                self._stage(transfer, component, trigger, deliver_interrupt)
            for component, trigger in triggers.items():
                self._commit(transfer, component, trigger, meter)
            self._remember_what_was_found(moves)
            if Component.PARAMS in triggers:
                self._record.owner.moved(self._record[Component.PARAMS])
        if triggers.get(Component.PARAMS) is Trigger.OFFLOAD:
            self._notice_what_is_unregistered()

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
            transfer = Transfer(moves, asked=why)
            with interrupts_held_back() as deliver_interrupt:
                self._copy(transfer, component, why, deliver_interrupt)
                try:
                    transfer.commit(component)
                except BaseException:
                    self._record.machines[component].tear()
                    raise
            self._journal.moved(why, component, meter.add_to(transfer.release(component)))

    def recover(self) -> None:
        """Put every tensor of a torn component where the record says, and call it whole."""
        for component, machine in self._record.machines.items():
            if machine.integrity is Integrity.TORN:
                sites = self._record.census().of(component)
                strays = self._record.residence.strays(sites, machine.state)
                self.relocate(strays, RECOVERY)
                if not strays:  # the move failed before its first swap, or after its last
                    self._journal.moved(RECOVERY, component, Moved())
                machine.mend()

    def _stage(
        self,
        transfer: Transfer,
        component: Component,
        trigger: Trigger,
        between: Callable[[], None],
    ) -> None:
        try:
            self._copy(transfer, component, trigger.value, between)
        except BaseException as error:
            self._journal.triggered(component, trigger, self._record[component], failure=error)
            raise

    def _copy(
        self, transfer: Transfer, component: Component, name: str, between: Callable[[], None]
    ) -> None:
        if transfer.stage(component, between):
            self._journal.copying(EventKind.ISSUED, component, name)
            transfer.land(component)
            self._journal.copying(EventKind.LANDED, component, name)

    def _commit(
        self, transfer: Transfer, component: Component, trigger: Trigger, meter: _Meter
    ) -> None:
        """Fire one machine; its tensors are swapped inside the transition."""
        machine, source = self._record.machines[component], self._record[component]
        try:
            machine.fire(trigger, partial(transfer.commit, component))
        except PlacementError:
            raise
        except BaseException as error:
            for torn in self._record.machines.values():
                torn.tear()
            self._journal.triggered(component, trigger, source, failure=error)
            raise machine.refusal(trigger) from error
        sources = transfer.sources(component)
        moved = meter.add_to(transfer.release(component))
        self._journal.triggered(component, trigger, source, moved)
        if trigger is Trigger.OFFLOAD:
            self._notice_what_stayed(component, sources, moved)

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

    def _notice_what_stayed(
        self, component: Component, sources: dict[int, tuple[str, int]], moved: Moved
    ) -> None:
        self._copied_away |= sources
        if moved.device_bytes is None:
            return
        before, after = moved.device_bytes
        if (missing := moved.to_host - (before - after)) > 0:
            _LOG.warning(
                "%s bytes of the %s did not come back with its offload: something else looks into "
                "them; manager.leftovers() names it",
                f"{missing:,}",
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

    def _move(self, site: Site, target: torch.device) -> Move:
        if target == CPU:
            return Move(site, target, pinned=site.name not in self._found_pageable)
        # What has no storage can't be asked; the transfer will refuse it by name.
        pinned = all(p.is_pinned() for p in parts(site.holding.tensor) if has_its_bytes(p))
        return Move(site, target, pinned)

    def _remember_what_was_found(self, moves: Iterable[Move]) -> None:
        for site, target, pinned in moves:
            if target == CPU:
                if site.holding.host_scalar:
                    self._offloaded_scalars.add(site.name)
            else:
                self._offloaded_scalars.discard(site.name)
                if pinned:
                    self._found_pageable.discard(site.name)
                else:
                    self._found_pageable.add(site.name)

    def _let_what_is_empty_follow(self, triggers: dict[Component, Trigger], census: Census) -> None:
        """A component without tensors has its parameters' placement."""
        if (trigger := triggers.get(Component.PARAMS)) is None:
            return
        present = {site.kind.component for site in census.sites}
        for component, machine in self._record.machines.items():
            if component not in present and component not in triggers and machine.may(trigger):
                triggers[component] = trigger


class _Meter:
    """Memory of the device and of the process, from one reading to the next."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last = self._read()

    def add_to(self, moved: Moved) -> Moved:
        """``moved`` with the memory since the last reading, and now."""
        before, self._last = self._last, self._read()
        return replace(
            moved,
            device_bytes=(before[0], self._last[0]),
            host_bytes=(before[1], self._last[1]),
        )

    def _read(self) -> tuple[int, int]:
        return allocated_bytes(self._device), resident_bytes()
