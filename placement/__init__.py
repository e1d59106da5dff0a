"""Where a training engine's tensors are, as explicit states with guarded transitions.

The public API is what this module lists; everything else may change.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from placement.lazy import importing_on_first_use

if TYPE_CHECKING:
    from placement.census import Census, Site
    from placement.device import find_compute_device
    from placement.errors import (
        AlreadyManaged,
        CannotMove,
        ContradictoryOptions,
        Detached,
        ExportFailed,
        ForeignOptimizer,
        ForeignSnapshot,
        GroupPoisoned,
        IllegalTransition,
        MissingPackage,
        NoAccelerator,
        NotEnoughMemory,
        NothingToPlace,
        NotMaterialised,
        OwnershipChanged,
        OwnershipUnclear,
        PlacementDrift,
        PlacementError,
        PlacementHeld,
        PutAway,
        RankLost,
        RanksDisagree,
        ScatteredModule,
        TornPlacement,
        UnsupportedAdapter,
    )
    from placement.explain import Explanation, Finding, explain
    from placement.leftovers import Leftover
    from placement.machine import PlacementMachine
    from placement.manager import PlacementManager
    from placement.materialise import materialising
    from placement.owners import Owner, owner_of, register
    from placement.states import (
        TABLE,
        Component,
        Illegal,
        Integrity,
        Legal,
        Mode,
        Operation,
        Placement,
        Trigger,
    )
    from placement.tensors import Holding, Kind
    from placement.trace import Event, EventKind, Outcome, Trace
    from placement.weights import Shard, Snapshot

__version__ = "0.1.0"

_HOMES = {
    "AlreadyManaged": "placement.errors",
    "CannotMove": "placement.errors",
    "Census": "placement.census",
    "Component": "placement.states",
    "ContradictoryOptions": "placement.errors",
    "Detached": "placement.errors",
    "Event": "placement.trace",
    "EventKind": "placement.trace",
    "Explanation": "placement.explain",
    "Finding": "placement.explain",
    "ExportFailed": "placement.errors",
    "ForeignOptimizer": "placement.errors",
    "ForeignSnapshot": "placement.errors",
    "GroupPoisoned": "placement.errors",
    "Holding": "placement.tensors",
    "Illegal": "placement.states",
    "IllegalTransition": "placement.errors",
    "Integrity": "placement.states",
    "Kind": "placement.tensors",
    "Leftover": "placement.leftovers",
    "Legal": "placement.states",
    "MissingPackage": "placement.errors",
    "Mode": "placement.states",
    "NoAccelerator": "placement.errors",
    "NotEnoughMemory": "placement.errors",
    "NotMaterialised": "placement.errors",
    "NothingToPlace": "placement.errors",
    "Operation": "placement.states",
    "Outcome": "placement.trace",
    "Owner": "placement.owners",
    "OwnershipChanged": "placement.errors",
    "OwnershipUnclear": "placement.errors",
    "Placement": "placement.states",
    "PlacementDrift": "placement.errors",
    "PlacementError": "placement.errors",
    "PlacementHeld": "placement.errors",
    "PlacementMachine": "placement.machine",
    "PlacementManager": "placement.manager",
    "PutAway": "placement.errors",
    "RankLost": "placement.errors",
    "RanksDisagree": "placement.errors",
    "ScatteredModule": "placement.errors",
    "Shard": "placement.weights",
    "Site": "placement.census",
    "Snapshot": "placement.weights",
    "TABLE": "placement.states",
    "TornPlacement": "placement.errors",
    "Trace": "placement.trace",
    "Trigger": "placement.states",
    "UnsupportedAdapter": "placement.errors",
    "explain": "placement.explain",
    "find_compute_device": "placement.device",
    "materialising": "placement.materialise",
    "owner_of": "placement.owners",
    "register": "placement.owners",
}

__all__ = [
    "TABLE",
    "AlreadyManaged",
    "CannotMove",
    "Census",
    "Component",
    "ContradictoryOptions",
    "Detached",
    "Event",
    "EventKind",
    "Explanation",
    "ExportFailed",
    "Finding",
    "ForeignOptimizer",
    "ForeignSnapshot",
    "GroupPoisoned",
    "Holding",
    "Illegal",
    "IllegalTransition",
    "Integrity",
    "Kind",
    "Leftover",
    "Legal",
    "MissingPackage",
    "Mode",
    "NoAccelerator",
    "NotEnoughMemory",
    "NotMaterialised",
    "NothingToPlace",
    "Operation",
    "Outcome",
    "Owner",
    "OwnershipChanged",
    "OwnershipUnclear",
    "Placement",
    "PlacementDrift",
    "PlacementError",
    "PlacementHeld",
    "PlacementMachine",
    "PlacementManager",
    "PutAway",
    "RankLost",
    "RanksDisagree",
    "ScatteredModule",
    "Shard",
    "Site",
    "Snapshot",
    "TornPlacement",
    "Trace",
    "Trigger",
    "UnsupportedAdapter",
    "explain",
    "find_compute_device",
    "materialising",
    "owner_of",
    "register",
]


__getattr__ = importing_on_first_use(__name__, globals(), _HOMES)
