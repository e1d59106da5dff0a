"""Where each tensor belongs in each placement, and which placement the tensors show.

This is the meaning of the three states in terms of devices. Adoption, verification and moves all
ask here, so that they can't disagree.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

import torch

from placement.census import Census, Site
from placement.errors import ContradictoryOptions, ScatteredModule
from placement.owners import Owner
from placement.states import Component, Placement, Trigger, destination
from placement.tensors import Holding

CPU = torch.device("cpu")


class Residence:
    """The rule for one module.

    Args:
        owner: who owns its placement.
        compute_device: the device that ``gpu`` stands for.
        stays: patterns of parameters and buffers that are meant to live where they are.
    """

    def __init__(
        self, owner: Owner, compute_device: torch.device, stays: Sequence[str] = ()
    ) -> None:
        self._owner = owner
        self._compute_device = compute_device
        self._stays = stays

    def of(self, holding: Holding, placement: Placement) -> torch.device | None:
        """The device on which ``holding`` belongs in ``placement``, or None where either is right
        (it was declared to stay, or it is a number that kernels read from either side)."""
        if self.stays(holding) or holding.host_scalar:
            return None
        if placement is self._owner.managed:
            return self._owner.belongs_on(holding, self._compute_device)
        return self._compute_device if placement is Placement.GPU else CPU

    def stays(self, holding: Holding) -> bool:
        return bool(self._stays) and any(fnmatchcase(holding.of, p) for p in self._stays)

    def strays(self, census: Census, placement: Placement) -> list[Site]:
        """The sites of ``census`` that are not where they belong in ``placement``, or whose
        wrapper and bytes disagree."""
        return [
            site
            for site in census.sites
            if not self.stays(site.holding)
            and (
                site.at_odds
                or ((device := self.of(site.holding, placement)) and not site.is_on(device))
            )
        ]

    def read(self, census: Census, component: Component) -> Placement | None:
        """The placement that the tensors of ``component`` show; None if it has no tensors.

        Under a managed policy that is the owner's placement, wherever the tensors are: whether
        they are where it wants them is a second question (:meth:`strays`).

        Raises:
            ScatteredModule: they show none: they lie on several devices, on a device that is
                neither the CPU nor the compute device, or wrapper and bytes disagree.
        """
        sites = census.of(component).sites
        if self._owner.managed is not None:
            return self._owner.managed if sites else None
        if not sites:
            return None
        amiss = {
            placement: self.strays(Census(sites), placement)
            for placement in (Placement.GPU, Placement.CPU_MANUAL)
        }
        for placement, strays in amiss.items():
            if not strays:
                return placement
        devices = sorted({str(site.device) for site in sites})
        raise ScatteredModule(
            asked="adopting the module",
            state=f"tensors of the {component.value} are on {', '.join(devices)}",
            why=f"a placement is one device for all, {self._compute_device} or cpu, and wrapper "
            "and bytes must agree",
            tensors=[str(site) for site in min(amiss.values(), key=len)],
            instead="move the module to one device first, or declare with stays= what is meant to "
            "live elsewhere",
        )

    def read_all(
        self, census: Census, components: Iterable[Component]
    ) -> dict[Component, Placement]:
        """The placement that the tensors of each of ``components`` show. One without tensors has
        its parameters' placement.

        Raises:
            ScatteredModule: see :meth:`read`.
        """
        params = self.read(census, Component.PARAMS)
        assert params is not None  # a module without parameters is not adopted
        return {component: self.read(census, component) or params for component in components}

    def require_stays_to_match(self, census: Census) -> None:
        """
        Raises:
            ContradictoryOptions: a pattern in ``stays`` matches no parameter and no buffer.
        """
        require_matches(self._stays, census, "stays=")


def require_matches(patterns: Sequence[str], census: Census, option: str) -> None:
    """Refuse a pattern that matches nothing: it is a typing error, or the model changed.

    Raises:
        ContradictoryOptions: one of ``patterns`` matches no parameter and no buffer.
    """
    names = {site.holding.of for site in census.sites}
    idle = [p for p in patterns if not any(fnmatchcase(name, p) for name in names)]
    if idle:
        raise ContradictoryOptions(
            asked="adopting the module",
            state=f"{option} names {', '.join(idle)}",
            why="no parameter or buffer has such a name",
            instead="name what is there, as the census has it: without the parts that wrappers "
            "put into names (module., _orig_mod., _checkpoint_wrapped_module.)",
        )


_BY_HAND = (destination(Trigger.ONLOAD), destination(Trigger.OFFLOAD))


def require_possible(owner: Owner, rest: Placement) -> None:
    """Refuse a resting place that ``owner`` does not allow.

    Raises:
        ContradictoryOptions: its policy keeps the module elsewhere, or no policy keeps it there.
    """
    managed = owner.managed
    if rest is managed or (managed is None and rest in _BY_HAND):
        return
    raise ContradictoryOptions(
        asked=f"rest={rest.value}",
        state=f"the module's owner is {owner.name}, "
        + ("with" if managed else "without")
        + " an offload policy",
        why=f"the policy keeps it in {managed.value}; resting elsewhere would take moves by hand"
        if managed
        else "no policy was applied that would keep it there",
        instead="choose one of the two: an offload_policy in fully_shard, or rest=",
    )
