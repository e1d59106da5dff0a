"""The record of where one module is, and its comparison with where it really is.

A record is one machine a component. It is read from the tensors when the module is adopted, changed
only by a machine's transition, and checked against a census whenever something depends on it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence, Set
from functools import partial
from typing import Any

import torch
from torch import nn

from placement.census import Census, take_census
from placement.device import find_compute_device
from placement.errors import (
    ContradictoryOptions,
    NothingToPlace,
    OwnershipChanged,
    PlacementDrift,
    ScatteredModule,
)
from placement.machine import PlacementMachine
from placement.optimizer import holdings_of, require_own_parameters
from placement.owners import Owner, owner_of
from placement.residence import CPU, Residence
from placement.roll import Acquaintance, Unknown, call_roll
from placement.states import Component, Placement


class Record:
    """The placement of one module and its optimizer, adopted as they are found.

    Args:
        module: the module.
        optimizer: its optimizer, if it has one.
        scaler: the gradient scaler used with the optimizer, if there is one.
        device: the compute device asked for; None for the owner's, or the one torch finds.
        stays: patterns of what is meant to live where it is.

    Attributes:
        last_foreign: the last call that moved tensors past the manager, with its call site; an
            error about drift names it.
        owner: who owns the module's placement.
        device: the compute device, with its index.
        residence: where each tensor belongs.
        machines: one machine a component.

    Raises:
        PlacementError: as :class:`~placement.manager.PlacementManager` lists.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        scaler: torch.amp.GradScaler | None,
        *,
        device: torch.device | str | None,
        stays: Sequence[str],
    ) -> None:
        self.module = module
        self.optimizer = optimizer
        self.scaler = scaler
        self.owner = owner_of(module)
        self.owner.require_collectives()
        self.device = _agreed_device(self.owner, device)
        self.residence = Residence(self.owner, self.device, stays)
        parameters = self.owner.parameters()
        if not parameters:
            raise NothingToPlace(
                asked="adopting the module",
                state=f"{type(module).__name__} has no parameters",
                why="there is nothing whose placement could be managed",
                instead="pass the module that holds the parameters",
            )
        if optimizer is not None:
            require_own_parameters(optimizer, parameters)
        self.last_foreign: str | None = None
        self._known: Acquaintance | None = None
        self.machines = self._adopt()

    def __getitem__(self, component: Component) -> Placement:
        return self.machines[component].state

    @property
    def components(self) -> list[Component]:
        """What there is: without an optimizer, all but its state."""
        return [c for c in Component if c is not Component.OPTIMIZER or self.optimizer is not None]

    def placements(self) -> dict[Component, Placement]:
        """What the record says now."""
        return {component: machine.state for component, machine in self.machines.items()}

    def census(self) -> Census:
        """Where everything really is, now."""
        if self._known is not None and (everyone := self._meet(self._known)) is not None:
            return self._known.census(everyone)
        return take_census(holdings_of(self.owner, self.optimizer, self.scaler))

    def _roll(self) -> list[object] | None:
        """Everything that there is, in order; None if it can't be told so."""
        with contextlib.suppress(Unknown):
            return call_roll(self.owner, self.optimizer, self.scaler)
        return None

    def _meet(self, known: Acquaintance) -> list[Any] | None:
        """Everyone there is, if ``known`` knows them."""
        roll = self._roll()
        return known.meet(roll) if roll is not None else None

    def require_whole(self, asked: str) -> None:
        """
        Raises:
            TornPlacement: an earlier move left a component in two places.
        """
        for machine in self.machines.values():
            machine.require_whole(asked)

    def check(self, asked: str) -> Census:
        """A census that agrees with the record.

        Raises:
            TornPlacement: an earlier move left a component in two places.
            OwnershipChanged: the wrapping or the policy is not what was adopted.
            ForeignOptimizer: the optimizer's parameters are no longer the module's.
            PlacementDrift: a tensor is not where the record says.
        """
        self.require_whole(asked)
        everyone, census = self._census_of_what_was_adopted(asked)
        for component, placement in self.placements().items():
            strays = self.residence.strays(census.of(component), placement)
            if strays:
                raise PlacementDrift(
                    asked=asked,
                    state=f"the record has the {component.value} in {placement.value}",
                    why=f"{len(strays)} of its tensors are elsewhere: "
                    + (self.last_foreign or "something")
                    + " moved them without the manager",
                    tensors=[str(site) for site in strays],
                    instead="put them back, or let the manager take over what it finds, with "
                    "on_drift='adopt'; move through manager.onload() and manager.offload() only",
                )
        if everyone is not None and self._known is not None:
            for component, placement in self.placements().items():
                if not self._known.remembers(component, placement):
                    self._known.remember(component, placement, everyone)
        return census

    def everyone_if_they_agree(self, asked: str) -> list[Any] | None:
        """Everyone there is (:class:`~placement.roll.Acquaintance`), if all are the same objects as
        when the record was last checked, and look as they were found in the same placement; None if
        only :meth:`check` can tell.

        Raises:
            TornPlacement: an earlier move left a component in two places.
        """
        self.require_whole(asked)
        known = self._known
        if known is None or (everyone := self._meet(known)) is None:
            return None
        for component, placement in self.placements().items():
            if not known.recognises(component, placement, everyone):
                return None
        return everyone

    def everyone_moved(self, components: Iterable[Component]) -> list[Any] | None:
        """Everyone there is, just after ``components`` moved, if all are the same objects. How they
        look now is what they are expected to look like in their new placement."""
        known = self._known
        if known is None or (everyone := self._meet(known)) is None:
            return None
        for component in components:
            known.remember(component, self[component], everyone)
        return everyone

    @property
    def acquaintance(self) -> Acquaintance | None:
        """What is known of everyone since the record was last checked."""
        return self._known

    @property
    def components_with_tensors(self) -> Set[Component]:
        """As of the last check."""
        return self._known.components if self._known is not None else frozenset()

    def _census_of_what_was_adopted(self, asked: str) -> tuple[list[Any] | None, Census]:
        """Everyone there is, if that can be told, and a census, after ownership was looked at;
        that can be left out if all are who they were and look as they did.

        Raises:
            OwnershipChanged, ForeignOptimizer: as :meth:`check`.
        """
        roll, known = self._roll(), self._known
        everyone = known.meet(roll) if known is not None and roll is not None else None
        if (
            known is not None
            and everyone is not None
            and not self._changed_their_looks(known, everyone)
        ):
            return everyone, known.census(everyone)
        self._known = None
        self._require_what_was_adopted(asked)
        holdings = list(holdings_of(self.owner, self.optimizer, self.scaler))
        if roll is not None:
            with contextlib.suppress(Unknown):
                self._known = Acquaintance(roll, holdings)
        everyone = self._known.meet(roll) if roll is not None and self._known is not None else None
        return everyone, take_census(holdings)

    def _changed_their_looks(self, known: Acquaintance, everyone: Sequence[Any]) -> bool:
        """Whether any of everyone looks otherwise than when it was seen in the same placement."""
        return any(
            known.remembers(component, placement)
            and not known.recognises(component, placement, everyone)
            for component, placement in self.placements().items()
        )

    def _require_what_was_adopted(self, asked: str) -> None:
        owner = owner_of(self.module)
        if (type(owner), owner.fingerprint()) != (type(self.owner), self.owner.fingerprint()):
            raise OwnershipChanged(
                asked=asked,
                state=f"the module was adopted as {self.owner.name} and is {owner.name} now",
                why="it was wrapped, or its offload policy changed, after the manager adopted it: "
                "the record is of another module",
                instead="make the manager after the module is wrapped",
            )
        if self.optimizer is not None:
            require_own_parameters(self.optimizer, self.owner.parameters())

    def adopt_anew(self) -> dict[Component, Placement]:
        """Read every placement from the tensors again.

        Returns:
            The components whose placement is another one now, with what it was.

        Raises:
            PlacementError: what is there can't be adopted; the record is as it was.
        """
        before, machines = self.placements(), self._adopt()
        self.machines.update(machines)
        return {
            component: placement
            for component, placement in before.items()
            if placement is not self[component]
        }

    def _adopt(self) -> dict[Component, PlacementMachine]:
        return {
            component: PlacementMachine(
                component, placement, evidence=partial(self._evidence, component)
            )
            for component, placement in self._read().items()
        }

    def _read(self) -> dict[Component, Placement]:
        """The placement that each component's tensors show."""
        census = self.census()
        self.residence.require_stays_to_match(census)
        self._require_the_owner_to_have_what_it_manages(census)
        return self.residence.read_all(census, self.components)

    def _require_the_owner_to_have_what_it_manages(self, census: Census) -> None:
        """Refuse a managed module whose tensors were moved by hand before it was adopted.

        What the owner leaves to others (buffers) may still be on the CPU: the manager brings it.
        """
        if (managed := self.owner.managed) is None:
            return
        amiss = [
            site
            for site in self.residence.strays(census, managed)
            if self.residence.of(site.holding, managed) != self.device or not site.is_on(CPU)
        ]
        if amiss:
            raise ScatteredModule(
                asked="adopting the module",
                state=f"{self.owner.name} keeps it in {managed.value}, but {len(amiss)} tensors "
                "are elsewhere",
                why="they were moved by hand under a policy that owns them; the next state_dict() "
                "or backward would fail",
                tensors=[str(site) for site in amiss],
                instead="do not move a sharded module that has an offload_policy; make it again",
            )

    def _evidence(self, component: Component) -> list[str]:
        return [str(site) for site in self.census().of(component).sites]


def _agreed_device(owner: Owner, asked: torch.device | str | None) -> torch.device:
    device = find_compute_device(asked if asked is not None else owner.compute_device)
    if owner.compute_device is not None and device != owner.compute_device:
        raise ContradictoryOptions(
            asked=f"device={asked}",
            state=f"{owner.name} computes on {owner.compute_device}",
            why="the module was sharded for another device than it is to be placed on",
            instead="leave device= out, or shard the module on a mesh of that device",
        )
    return device
