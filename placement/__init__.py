"""Where a training engine's tensors are, as explicit states with guarded transitions.

The public API is what this module lists; everything else may change.
"""

from placement.census import Census, Site
from placement.device import find_compute_device
from placement.errors import (
    AlreadyManaged,
    CannotMove,
    ContradictoryOptions,
    Detached,
    ForeignOptimizer,
    IllegalTransition,
    NoAccelerator,
    NotEnoughMemory,
    NothingToPlace,
    OwnershipChanged,
    OwnershipUnclear,
    PlacementDrift,
    PlacementError,
    PlacementHeld,
    ScatteredModule,
    TornPlacement,
)
from placement.machine import PlacementMachine
from placement.manager import PlacementManager
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

__version__ = "0.1.0"

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
    "ForeignOptimizer",
    "Holding",
    "Illegal",
    "IllegalTransition",
    "Integrity",
    "Kind",
    "Legal",
    "Mode",
    "NoAccelerator",
    "NotEnoughMemory",
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
    "ScatteredModule",
    "Site",
    "TornPlacement",
    "Trace",
    "Trigger",
    "find_compute_device",
    "owner_of",
    "register",
]
