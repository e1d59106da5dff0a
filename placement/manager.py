"""The front door: one manager for one module and its optimizer.

The manager asks the owner who may move the module, takes a census of where everything is, keeps
one machine a component as the record, and moves tensors only inside a transition of that machine.
Its contexts make sure of what an operation needs, and leave the placement that they found.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Literal

import torch
from torch import nn

from placement.census import Census, Site, take_census
from placement.device import find_compute_device
from placement.errors import (
    ContradictoryOptions,
    NothingToPlace,
    OwnershipChanged,
    PlacementDrift,
    PlacementError,
    ScatteredModule,
)
from placement.leases import Lease, Leases
from placement.machine import PlacementMachine
from placement.optimizer import optimizer_holdings, require_own_parameters
from placement.owners import Owner, owner_of
from placement.residence import CPU, Residence
from placement.states import (
    COMPUTES_WITH,
    HOLDS,
    Component,
    Mode,
    Operation,
    Placement,
    Trigger,
    trigger_between,
)
from placement.tensors import Holding
from placement.trace import EventKind, Outcome, Trace, call_site
from placement.transfer import Moved, Transfer

_LOG = logging.getLogger(__name__)


class PlacementManager:
    """Guards where a module's tensors are.

    Args:
        module: the module, already sharded. It is adopted as it is found; who owns its placement
            and where it lies are read from it.
        optimizer: its optimizer, over the module's own parameters.
        device: the compute device. By default the one that the module's owner computes on, else
            the accelerator that torch finds.
        stays: names or ``fnmatch`` patterns of parameters and buffers that are meant to live where
            they are. They are never moved, nor are their gradients and optimizer state.
        rest: where the module is to rest between operations; it is brought there at once. None
            leaves it as it was found.
        verify: when the census is compared with the record. ``"boundaries"``: before anything
            moves, at save, load and export, and on :meth:`verify`. ``"always"``: at the beginning
            of every context too, which walks over all tensors.
        trace: where events go; by default a trace of the manager's own.

    Raises:
        NoAccelerator: there is no compute device.
        NothingToPlace: the module has no parameters.
        OwnershipUnclear: who may move the module can't be told.
        ScatteredModule: it lies on several devices and ``stays`` does not say so.
        ForeignOptimizer: the optimizer updates other tensors than the module's parameters.
        ContradictoryOptions: ``rest`` or ``device`` does not agree with the module's owner, or a
            pattern in ``stays`` matches nothing.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        device: torch.device | str | None = None,
        stays: Iterable[str] = (),
        rest: Placement | None = None,
        verify: Literal["boundaries", "always"] = "boundaries",
        trace: Trace | None = None,
    ) -> None:
        self.module = module
        self.optimizer = optimizer
        self.trace = trace if trace is not None else Trace()
        self._owner = owner_of(module)
        self.device = _agreed_device(self._owner, device)
        self._residence = Residence(self._owner, self.device, tuple(stays))
        self._verify_always = verify == "always"
        self._leases = Leases()
        self._lock = threading.RLock()
        # Step counters that an offload took off the device, so that an onload takes just those
        # back. By name, since a load replaces the tensors.
        self._offloaded_scalars: set[str] = set()
        self._machines = self._adopt()
        self._place_what_the_owner_leaves_to_us()
        if rest is not None:
            self._come_to_rest(rest)

    # What is, and what may be done.

    @property
    def placement(self) -> Placement:
        """Where the record says that the model is."""
        return self._machines[Component.MODEL].state

    @property
    def optimizer_placement(self) -> Placement | None:
        """Where the record says that the optimizer's state is; None without an optimizer."""
        machine = self._machines.get(Component.OPTIMIZER)
        return machine.state if machine is not None else None

    @property
    def owner(self) -> Owner:
        """Who owns the module's placement, as read from the module."""
        return self._owner

    def may(self, trigger: Trigger) -> bool:
        """Whether the model's machine accepts ``trigger`` now."""
        return self._machines[Component.MODEL].may(trigger)

    def may_save(self) -> bool:
        """Whether parameters may be staged by hand for a checkpoint. :meth:`saving` works
        regardless: where they may not, it writes from where the shards are."""
        return self.may(Trigger.SAVE)

    def census(self) -> Census:
        """Where every parameter, gradient, buffer and optimizer tensor really is, now."""
        return take_census(self._holdings())

    def verify(self) -> Census:
        """Compare the record with the tensors.

        Returns:
            The census that agreed.

        Raises:
            OwnershipChanged: the wrapping or the policy is not what was adopted.
            ForeignOptimizer: the optimizer's parameters are no longer the module's.
            PlacementDrift: a tensor is not where the record says.
        """
        with self._recording_refusals("verify"), self._lock:
            return self._checked("verify()")

    # Moves by hand.

    def onload(self) -> None:
        """Bring the model and the optimizer's state to the compute device.

        What is there already is left in peace. The placement this leaves is the one that later
        contexts find and restore.

        Raises:
            IllegalTransition: the module's placement is not for hands to change.
            PlacementHeld: an open context works with the tensors where they are.
            PlacementDrift: the tensors are not where the record says.
            NotEnoughMemory: they would not fit.
            CannotMove: one of them could not come back as it was.
        """
        self._move_by_hand(Trigger.ONLOAD, Placement.GPU)

    def offload(self) -> None:
        """Put the model and the optimizer's state on the CPU. Raises as :meth:`onload` does."""
        self._move_by_hand(Trigger.OFFLOAD, Placement.CPU_MANUAL)

    def _move_by_hand(self, trigger: Trigger, dest: Placement) -> None:
        with self._recording_refusals(trigger.value), self._lock:
            asked = f"{trigger.value}()"
            self._leases.refuse_other_threads(asked)
            wanted = {c: dest for c, machine in self._machines.items() if machine.state is not dest}
            for component in wanted:
                if not self._machines[component].may(trigger):
                    raise self._machines[component].refusal(trigger)
                self._leases.refuse_move(component, asked)
            self._bring(wanted, asked)

    # Contexts.

    def training(self) -> AbstractContextManager[Mode]:
        """A context in which the model and the optimizer's state are on the compute device, or
        where FSDP2's policy wants them."""
        return self._operating(Operation.TRAIN)

    def evaluating(self) -> AbstractContextManager[Mode]:
        """A context in which the model is on the compute device, or where FSDP2's policy wants
        it. The optimizer's state stays where it is."""
        return self._operating(Operation.EVALUATE)

    def saving(self) -> AbstractContextManager[Mode]:
        """A context in which the state dicts can be read for a checkpoint, from every placement.

        It moves nothing unless the owner needs it (FSDP1 gathers on the compute device), and
        yields how it got at the parameters.
        """
        return self._operating(Operation.SAVE)

    def loading(self) -> AbstractContextManager[Mode]:
        """A context in which the state dicts can be loaded, in every placement. What a load
        installed on another device than the record's is put right on the way out."""
        return self._operating(Operation.LOAD)

    def exporting(self) -> AbstractContextManager[Mode]:
        """A context in which weights can be read one at a time, in every placement."""
        return self._operating(Operation.EXPORT)

    @contextmanager
    def _operating(self, operation: Operation) -> Iterator[Mode]:
        """Make sure of what ``operation`` needs; restore what was found, whatever happens.

        An exception in the body is the one that propagates. If the restoring move fails after it,
        the record stays true (a move is whole or did not happen), the trace has the failure, and
        a note on the exception tells of it.
        """
        started = time.monotonic()
        entered_at = call_site()
        before = self.placement
        with self._recording_refusals(operation.value):
            lease, mode = self._enter(operation, entered_at)
        failure: BaseException | None = None
        try:
            yield mode
            if operation is Operation.LOAD:
                self._put_right_what_was_loaded()
        except BaseException as error:
            failure = error
            raise
        finally:
            try:
                self._leave(lease)
            except Exception as restoring:
                if failure is None:
                    failure = restoring
                    raise
                _tell(failure, restoring)
            finally:
                self.trace.record(
                    module=type(self.module).__name__,
                    component=None,
                    kind=EventKind.OPERATION,
                    name=operation.value,
                    source=before.value,
                    dest=self.placement.value,
                    mode=mode.value,
                    seconds=time.monotonic() - started,
                    call_site=entered_at,
                    outcome=Outcome.OK if failure is None else Outcome.FAILED,
                    detail="" if failure is None else _one_line(failure),
                )

    def _enter(self, operation: Operation, entered_at: str) -> tuple[Lease, Mode]:
        with self._lock:
            asked = f"a context for {operation.value}"
            self._leases.refuse_other_threads(asked)
            needs = COMPUTES_WITH[operation]
            if self._verify_always or not needs:
                self._checked(asked)
            staged = operation in self._owner.stages and self.placement is Placement.CPU_MANUAL
            if staged:
                needs = frozenset({Component.MODEL})
            if self._owner.managed is not None:
                needs = frozenset()  # the owner brings what it needs, when it needs it
            lease = Lease(operation, needs, HOLDS[operation], self._record(), entered_at)
            self._leases.begin(lease)
            try:
                self._bring({c: Placement.GPU for c in self._machines if c in needs}, asked)
                if operation is Operation.SAVE and self.may_save():
                    self._fire(Component.MODEL, Trigger.SAVE, Moved())
            except BaseException:
                self._leave(lease)
                raise
            return lease, Mode.STAGED if staged else Mode.IN_PLACE

    def _leave(self, lease: Lease) -> None:
        with self._recording_refusals(f"leaving {lease.operation.value}"), self._lock:
            self._bring(self._leases.end(lease), asked=f"leaving {lease.operation.value}")

    # Adoption.

    def _adopt(self) -> dict[Component, PlacementMachine]:
        """Read the placement of each component from its tensors."""
        parameters = self._owner.parameters()
        if not parameters:
            raise NothingToPlace(
                asked="adopting the module",
                state=f"{type(self.module).__name__} has no parameters",
                why="there is nothing whose placement could be managed",
                instead="pass the module that holds the parameters",
            )
        if self.optimizer is not None:
            require_own_parameters(self.optimizer, parameters)
        census = self.census()
        self._residence.require_stays_to_match(census)
        initial = {Component.MODEL: self._residence.read(census, Component.MODEL)}
        if self.optimizer is not None:
            initial[Component.OPTIMIZER] = (
                self._residence.read(census, Component.OPTIMIZER) or initial[Component.MODEL]
            )
        return {
            component: PlacementMachine(
                component, placement, evidence=partial(self._evidence, component)
            )
            for component, placement in initial.items()
            if placement is not None
        }

    def _place_what_the_owner_leaves_to_us(self) -> None:
        """Under a managed policy, put buffers and ignored parameters on the compute device.

        The forward pass reads them there, and FSDP2 does not move them. What FSDP2 does own must
        be where it wants it already.
        """
        if (managed := self._owner.managed) is None:
            return
        strays = self._residence.strays(self.census(), managed)
        amiss = [
            site
            for site in strays
            if self._residence.of(site.holding, managed) != self.device or not site.is_on(CPU)
        ]
        if amiss:
            raise ScatteredModule(
                asked="adopting the module",
                state=f"{self._owner.name} keeps it in {managed.value}, but {len(amiss)} tensors "
                "are elsewhere",
                why="they were moved by hand under a policy that owns them; the next state_dict() "
                "or backward would fail",
                tensors=[str(site) for site in amiss],
                instead="do not move a sharded module with an offload_policy; make it again",
            )
        self._relocate(strays, managed, "adopt")

    def _come_to_rest(self, rest: Placement) -> None:
        managed = self._owner.managed
        if rest is not (managed or rest) or (managed is None and rest not in _BY_HAND):
            raise ContradictoryOptions(
                asked=f"rest={rest.value}",
                state=f"the module's owner is {self._owner.name}"
                + (", which manages its placement" if managed else ", without an offload policy"),
                why=(
                    f"FSDP2's CPUOffloadPolicy keeps it in {managed.value}; resting elsewhere "
                    "would take moves by hand"
                    if managed
                    else "no policy was applied that would keep it there"
                ),
                instead="choose one of the two: an offload_policy in fully_shard, or rest=",
            )
        wanted = {c: rest for c, machine in self._machines.items() if machine.state is not rest}
        with self._recording_refusals("rest"):
            self._bring(wanted, asked=f"rest={rest.value}")

    # Checks.

    def _checked(self, asked: str) -> Census:
        """A census that agrees with the record, or an error that says where it does not."""
        owner = owner_of(self.module)
        if (type(owner), owner.fingerprint()) != (type(self._owner), self._owner.fingerprint()):
            raise OwnershipChanged(
                asked=asked,
                state=f"the module was adopted as {self._owner.name} and is {owner.name} now",
                why="it was wrapped or its offload policy changed after the manager adopted it, so "
                "the record is of another module",
                instead="make the manager after the module is wrapped",
            )
        if self.optimizer is not None:
            require_own_parameters(self.optimizer, self._owner.parameters())
        census = self.census()
        for component, machine in self._machines.items():
            strays = self._residence.strays(census.of(component), machine.state)
            if strays:
                raise PlacementDrift(
                    asked=asked,
                    state=f"the record says that the {component.value} is in {machine.state.value}",
                    why=f"{len(strays)} of its tensors are elsewhere: something moved them without "
                    "the manager",
                    tensors=[str(site) for site in strays],
                    instead="move through manager.onload() and manager.offload() only",
                )
        return census

    # Moves.

    def _bring(self, wanted: dict[Component, Placement], asked: str) -> None:
        """Bring each component to the placement wanted, all of them or none."""
        triggers = {
            component: trigger
            for component, placement in wanted.items()
            if (trigger := trigger_between(self._machines[component].state, placement))
        }
        if not triggers:
            return
        census = self._checked(asked)
        self._let_an_empty_optimizer_follow(triggers, census)
        for component, trigger in triggers.items():
            if not self._machines[component].may(trigger):
                raise self._machines[component].refusal(trigger)
        self._owner.settle()
        moves = [
            (site, target)
            for component, trigger in triggers.items()
            for site in census.of(component).sites
            if (target := self._target(site, trigger)) is not None and not site.is_on(target)
        ]
        moving = {id(site) for site, _ in moves}
        staying = [site for site in census.sites if id(site) not in moving]
        transfer = Transfer(moves, staying, asked=asked)
        seconds = {}
        for component, trigger in triggers.items():
            started = time.monotonic()
            try:
                transfer.stage(component)
            except BaseException as error:
                self._record_trigger(component, trigger, Moved(), failure=error)
                raise
            seconds[component] = time.monotonic() - started
        for component, trigger in triggers.items():
            self._fire(
                component,
                trigger,
                transfer.moved(component),
                seconds=seconds[component],
                commit=partial(transfer.commit, component),
            )
        transfer.release()
        self._remember_offloaded_scalars(moves)

    def _target(self, site: Site, trigger: Trigger) -> torch.device | None:
        """Where ``trigger`` sends ``site``; None leaves it where it is."""
        if self._residence.stays(site.holding):
            return None
        if trigger is Trigger.OFFLOAD:
            return CPU
        if site.holding.host_scalar and site.name not in self._offloaded_scalars:
            return None
        return self.device

    def _remember_offloaded_scalars(self, moves: list[tuple[Site, torch.device]]) -> None:
        for site, target in moves:
            if site.holding.host_scalar:
                if target == CPU:
                    self._offloaded_scalars.add(site.name)
                else:
                    self._offloaded_scalars.discard(site.name)

    def _let_an_empty_optimizer_follow(
        self, triggers: dict[Component, Trigger], census: Census
    ) -> None:
        """An optimizer without state yet has its parameters' placement."""
        if Component.OPTIMIZER not in self._machines or Component.MODEL not in triggers:
            return
        if not census.of(Component.OPTIMIZER).sites:
            trigger = triggers[Component.MODEL]
            if self._machines[Component.OPTIMIZER].may(trigger):
                triggers[Component.OPTIMIZER] = trigger

    def _fire(
        self,
        component: Component,
        trigger: Trigger,
        moved: Moved,
        *,
        seconds: float = 0.0,
        commit: partial[None] | None = None,
    ) -> None:
        """Fire one machine's trigger; its commit runs inside the transition.

        Raises:
            TornPlacement: the commit failed, so that some tensors were swapped and others not.
        """
        machine, source = self._machines[component], self._machines[component].state
        started = time.monotonic()
        try:
            machine.fire(trigger, commit)
        except PlacementError:
            raise
        except BaseException as error:
            for torn in self._machines.values():
                torn.tear()
            self._record_trigger(component, trigger, moved, failure=error)
            raise machine.refusal(trigger) from error
        self._record_trigger(
            component,
            trigger,
            moved,
            source=source,
            seconds=seconds + time.monotonic() - started,
        )

    def _relocate(self, strays: list[Site], placement: Placement, why: str) -> None:
        """Put tensors where they belong in the placement that their component has anyway."""
        moves = [
            (site, target)
            for site in strays
            if (target := self._residence.of(site.holding, placement)) is not None
        ]
        if not moves:
            return
        started = time.monotonic()
        transfer = Transfer(moves, asked=why)
        for component in Component:
            transfer.stage(component)
        for component in Component:
            transfer.commit(component)
        moved = [transfer.moved(component) for component in Component]
        transfer.release()
        self.trace.record(
            module=type(self.module).__name__,
            component=None,
            kind=EventKind.MOVE,
            name=why,
            source=placement.value,
            dest=placement.value,
            bytes_to_device=sum(m.to_device for m in moved),
            bytes_to_host=sum(m.to_host for m in moved),
            seconds=time.monotonic() - started,
            call_site=call_site(),
        )

    def _put_right_what_was_loaded(self) -> None:
        """After a load every tensor is where the record says, whatever the file said."""
        if self._owner.managed is not None:
            self._checked("loading()")
            return
        census = self.census()
        for component, machine in self._machines.items():
            strays = self._residence.strays(census.of(component), machine.state)
            self._relocate(strays, machine.state, "load")

    # What the above is made of.

    def _holdings(self) -> Iterator[Holding]:
        yield from self._owner.holdings()
        if self.optimizer is not None:
            yield from optimizer_holdings(self.optimizer, self._owner.parameters())

    def _record(self) -> dict[Component, Placement]:
        return {component: machine.state for component, machine in self._machines.items()}

    def _evidence(self, component: Component) -> list[str]:
        return [str(site) for site in self.census().of(component).sites]

    def _record_trigger(
        self,
        component: Component,
        trigger: Trigger,
        moved: Moved,
        *,
        source: Placement | None = None,
        seconds: float = 0.0,
        failure: BaseException | None = None,
    ) -> None:
        state = self._machines[component].state
        self.trace.record(
            module=type(self.module).__name__,
            component=component.value,
            kind=EventKind.TRIGGER,
            name=trigger.value,
            source=(source or state).value,
            dest=state.value,
            bytes_to_device=moved.to_device,
            bytes_to_host=moved.to_host,
            seconds=seconds,
            call_site=call_site(),
            outcome=Outcome.OK if failure is None else Outcome.FAILED,
            detail="" if failure is None else _one_line(failure),
        )

    @contextmanager
    def _recording_refusals(self, name: str) -> Iterator[None]:
        try:
            yield
        except PlacementError as error:
            placement = self.placement.value
            self.trace.record(
                module=type(self.module).__name__,
                component=None,
                kind=EventKind.REFUSAL,
                name=name,
                source=placement,
                dest=placement,
                call_site=call_site(),
                outcome=Outcome.REFUSED,
                detail=_one_line(error),
            )
            raise


_BY_HAND = (Placement.GPU, Placement.CPU_MANUAL)


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


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _tell(failure: BaseException, restoring: Exception) -> None:
    """Add to an exception that is on its way that the placement could not be restored."""
    _LOG.error("the placement found could not be restored: %s", _one_line(restoring))
    if hasattr(failure, "add_note"):  # Python 3.11
        failure.add_note(f"The placement found could not be restored: {restoring}")
