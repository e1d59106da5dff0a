"""Where everything really is, read from the tensors.

A census is a look, never a record: it is taken anew whenever the truth is needed, and compared
with what the machines say. It looks at both faces of a wrapper, because they can disagree: a
DTensor that says ``cuda`` around a CPU shard is what makes ``state_dict()`` fail in
https://github.com/verl-project/verl/issues/5995.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from placement.states import Component
from placement.tensors import Holding, Kind, has_storage, parts, same_device
from placement.torch_private import storage_address


class Site(NamedTuple):
    """One tensor and where it is.

    Attributes:
        holding: the tensor, its name and kind.
        device: what the tensor itself says; of a wrapper, what the wrapper says.
        rests_on: where its bytes are, one device a part; the same as ``device`` for most.
        nbytes: bytes of the storages that this site is the first in its census to look into, so
            that a sum counts each storage once.
    """

    holding: Holding
    device: torch.device
    rests_on: tuple[torch.device, ...]
    nbytes: int

    @property
    def name(self) -> str:
        return self.holding.name

    @property
    def kind(self) -> Kind:
        return self.holding.kind

    @property
    def at_odds(self) -> bool:
        """Whether the wrapper says one device and its bytes are on another."""
        device, places = self.device, self.rests_on
        if len(places) == 1 and places[0] == device:
            return False  # nearly always, and looked at for every tensor of every move
        return any(not same_device(where, device) for where in places)

    def is_on(self, device: torch.device) -> bool:
        """Whether the tensor is on ``device``, wrapper and bytes alike."""
        return same_device(self.device, device) and not self.at_odds

    def __str__(self) -> str:
        if self.at_odds:
            where = f"says {self.device}, but its bytes are on {self.rests_on[0]}"
        else:
            where = f"on {self.device}"
        return f"{self.name} ({self.kind.value}) {where}"


@dataclass(frozen=True)
class Census:
    """The sites of one module and its optimizer at one moment."""

    sites: Sequence[Site]

    def of(self, *components: Component) -> Census:
        """The part of it that belongs to the given components."""
        return Census([site for c in components for site in self._by_component.get(c, ())])

    @cached_property
    def _by_component(self) -> Mapping[Component, Sequence[Site]]:
        found: defaultdict[Component, list[Site]] = defaultdict(list)
        for site in self.sites:
            found[site.holding.kind.component].append(site)
        return found

    def bytes_by_device(self) -> dict[str, int]:
        """Bytes on each device, each storage counted once. Wrappers are not asked, bytes are."""
        total: Counter[str] = Counter()
        for site in self.sites:
            for device in set(site.rests_on):
                total[str(device)] += site.nbytes
        return dict(total)


def take_census(holdings: Iterable[Holding]) -> Census:
    """Look where each of ``holdings`` is."""
    seen: set[int] = set()
    sites = []
    for holding in holdings:
        devices, nbytes = [], 0
        for part in parts(holding.tensor):
            devices.append(part.device)
            if has_storage(part) and (key := storage_address(part)) not in seen:
                seen.add(key)
                nbytes += part.untyped_storage().nbytes()
        sites.append(Site(holding, holding.tensor.device, tuple(devices), nbytes))
    return Census(sites)
