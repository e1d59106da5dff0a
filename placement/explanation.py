"""What is known about a module's placement, and what will go wrong with it.

For a person, or a test, that has no manager yet: everything is read from the tensors, nothing is
moved, and nothing is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from placement.census import Census, Site, take_census
from placement.device import find_compute_device
from placement.errors import NoAccelerator, PlacementError, ScatteredModule
from placement.leftovers import find_unregistered
from placement.optimizer import holdings_of, require_own_parameters
from placement.owners import Owner, owner_of
from placement.residence import CPU, Residence
from placement.states import TABLE, Component, Illegal, Placement, Trigger
from placement.tensors import Kind

_SHOWN = 5


@dataclass(frozen=True)
class Finding:
    """Something that will go wrong.

    Attributes:
        what: what was found.
        consequence: what it leads to.
        remedy: what to do.
        tensors: the tensors that show it, one line each.
    """

    what: str
    consequence: str
    remedy: str
    tensors: tuple[str, ...] = ()


@dataclass(frozen=True)
class Explanation:
    """What :func:`explain` found. ``str()`` of it is for reading.

    Attributes:
        owner: who owns the module's placement; None if that can't be told.
        placements: the placement that the tensors of each component show, without those that have
            no tensors; None if they show none.
        bytes_by_device: for each kind of tensor, bytes on each device, each storage once.
        legal: for each trigger the reason why it is illegal now, or None if it is legal; empty if
            the placement can't be told.
        findings: what will go wrong.
    """

    owner: str | None
    placements: dict[Component, Placement | None]
    bytes_by_device: dict[Kind, dict[str, int]]
    legal: dict[Trigger, str | None]
    findings: tuple[Finding, ...]

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield f"owner      {self.owner or 'unclear'}"
        for component, placement in self.placements.items():
            yield f"{component.value:<10} {placement.value if placement else 'in no placement'}"
        for kind, devices in self.bytes_by_device.items():
            where = ", ".join(f"{nbytes:,} bytes on {device}" for device, nbytes in devices.items())
            yield f"{kind.value:<10} {where or 'none'}"
        for trigger, why in self.legal.items():
            name = "staging" if trigger is Trigger.SAVE else f"{trigger.value}()"
            yield f"{name:<10} " + ("is legal" if why is None else f"no: {why}")
            if (instead := self._instead_of(trigger)) is not None:
                yield f"{'':<10} instead: {instead}"
        for finding in self.findings:
            yield ""
            yield f"FOUND      {finding.what}"
            for tensor in finding.tensors[:_SHOWN]:
                yield f"             {tensor}"
            if (hidden := len(finding.tensors) - _SHOWN) > 0:
                yield f"             ... and {hidden} more"
            yield f"  leads to {finding.consequence}"
            yield f"  remedy   {finding.remedy}"
        if not self.findings:
            yield "Nothing is amiss."

    def _instead_of(self, trigger: Trigger) -> str | None:
        placement = self.placements.get(Component.PARAMS)
        row = TABLE[placement, trigger] if placement is not None else None
        return row.instead if isinstance(row, Illegal) else None


def explain(module: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Explanation:
    """Who owns ``module``, where everything is, what is legal now and why the rest is not, and what
    will go wrong.

    Args:
        module: any module, with or without a manager.
        optimizer: its optimizer, to be looked at, too.
    """
    findings: list[Finding] = []
    try:
        owner: Owner | None = owner_of(module)
    except PlacementError as error:
        owner = None
        findings.append(_from_refusal(error, "no manager can adopt it"))
    census = _census(module, optimizer, owner)
    try:
        device = (owner.compute_device if owner else None) or find_compute_device()
    except NoAccelerator as error:
        return Explanation(
            owner.name if owner else None,
            {},
            _bytes(census),
            {},
            (*findings, _from_refusal(error, "there is nothing to place on")),
        )
    placements: dict[Component, Placement | None] = {}
    if owner is not None:
        residence = Residence(owner, device)
        for component in Component:
            if not census.of(component).sites:
                continue
            try:
                placements[component] = residence.read(census, component)
            except ScatteredModule as error:
                placements[component] = None
                findings.append(_from_refusal(error, "the first computation that meets both"))
        if optimizer is not None:
            findings += _foreign_parameters(optimizer, owner)
        findings += _missing_backends(owner)
        findings += _at_odds(census)
        findings += _managed_strays(owner, residence, census)
        findings += _apart(placements)
        findings += _broken_ties(module, owner)
        findings += _unregistered(module, census, device)
    params = placements.get(Component.PARAMS)
    return Explanation(
        owner.name if owner else None,
        placements,
        _bytes(census),
        {trigger: _why_not(params, trigger) for trigger in Trigger} if params else {},
        tuple(findings),
    )


def _why_not(placement: Placement, trigger: Trigger) -> str | None:
    row = TABLE[placement, trigger]
    return row.why if isinstance(row, Illegal) else None


def _census(
    module: nn.Module, optimizer: torch.optim.Optimizer | None, owner: Owner | None
) -> Census:
    if owner is None:
        return Census([])
    if optimizer is not None and any(_foreign_parameters(optimizer, owner)):
        optimizer = None  # its state can't be told by name
    return take_census(holdings_of(owner, optimizer))


def _bytes(census: Census) -> dict[Kind, dict[str, int]]:
    return {
        kind: Census([site for site in census.sites if site.kind is kind]).bytes_by_device()
        for kind in Kind
    }


def _foreign_parameters(optimizer: torch.optim.Optimizer, owner: Owner) -> Iterator[Finding]:
    try:
        require_own_parameters(optimizer, owner.parameters())
    except PlacementError as error:
        yield _from_refusal(error, "steps that change nothing in the module")


def _missing_backends(owner: Owner) -> Iterator[Finding]:
    try:
        owner.require_collectives()
    except PlacementError as error:
        yield _from_refusal(error, "a training step that clips gradients fails")


def _at_odds(census: Census) -> Iterator[Finding]:
    if odd := [site for site in census.sites if site.at_odds]:
        yield Finding(
            f"{len(odd)} tensors whose wrapper says another device than their bytes are on",
            "state_dict() fails with 'Attempted to set the storage of a tensor on device ...'",
            "do not move a module whose placement FSDP2 manages; build it again and load the last "
            "checkpoint",
            _lines(odd),
        )


def _managed_strays(owner: Owner, residence: Residence, census: Census) -> Iterator[Finding]:
    if (managed := owner.managed) is None:
        return
    strays = [site for site in residence.strays(census, managed) if not site.at_odds]
    buffers = [site for site in strays if site.kind is Kind.BUFFER and site.is_on(CPU)]
    others = [site for site in strays if site not in buffers]
    if buffers:
        yield Finding(
            f"{len(buffers)} buffers on the CPU, under a policy that computes on the device",
            "the next forward pass meets tensors of two devices",
            "make a PlacementManager, which puts them right, or move the buffers alone",
            _lines(buffers),
        )
    if others:
        yield Finding(
            f"{len(others)} tensors that FSDP2's policy keeps on the CPU are elsewhere",
            "lazy initialisation or the backward pass fails on their device",
            "do not move a module whose placement FSDP2 manages; build it again and load the last "
            "checkpoint",
            _lines(others),
        )


def _apart(placements: dict[Component, Placement | None]) -> Iterator[Finding]:
    params, optimizer = placements.get(Component.PARAMS), placements.get(Component.OPTIMIZER)
    if params is Placement.GPU and optimizer is Placement.CPU_MANUAL:
        yield Finding(
            "the optimizer's state is apart from its parameters",
            "optimizer.step() meets tensors of two devices",
            "step inside manager.training(), which brings it and puts it back",
        )


def _broken_ties(module: nn.Module, owner: Owner) -> Iterator[Finding]:
    """Ties that the module declares (as transformers' models do) and its parameters do not show."""
    declared = getattr(module, "_tied_weights_keys", None)
    pairs = declared.items() if isinstance(declared, dict) else ()
    parameters = owner.parameters()
    broken = [
        f"{one} and {other}"
        for one, other in pairs
        if one in parameters and other in parameters and parameters[one] is not parameters[other]
    ]
    if broken:
        yield Finding(
            f"{len(broken)} weights that the model declares tied are not",
            "they train apart, and a checkpoint has both",
            "tie them again (model.tie_weights()) before the module is sharded",
            tuple(broken),
        )


def _unregistered(module: nn.Module, census: Census, device: torch.device) -> Iterator[Finding]:
    registered = [*module.parameters(), *(site.holding.tensor for site in census.sites)]
    found = list(find_unregistered(module, registered, device))
    if found:
        yield Finding(
            f"{len(found)} tensors on the device are in plain attributes, neither parameters nor "
            "buffers",
            "an offload leaves them there, and nobody counts them",
            "register them (register_buffer(..., persistent=False)), or drop them before an "
            "offload and compute them again after it",
            tuple(f"{leftover.name}, {leftover.nbytes:,} bytes" for leftover in found),
        )


def _from_refusal(error: PlacementError, consequence: str) -> Finding:
    return Finding(f"{error.state}: {error.why}", consequence, error.instead, tuple(error.tensors))


def _lines(sites: Sequence[Site]) -> tuple[str, ...]:
    return tuple(str(site) for site in sites)
