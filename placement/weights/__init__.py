"""Weights on their way out of a training module: in full, as shards, in files, and back again."""

from __future__ import annotations

from placement.weights.gather import Weight, gathered
from placement.weights.naming import Names, named
from placement.weights.plan import Adapters, Tied, planned
from placement.weights.pretrained import write_adapter, write_pretrained
from placement.weights.shards import Shard, shards_of
from placement.weights.snapshot import Snapshot, restore, take_snapshot

__all__ = [
    "Adapters",
    "Names",
    "Shard",
    "Snapshot",
    "Tied",
    "Weight",
    "gathered",
    "named",
    "planned",
    "restore",
    "shards_of",
    "take_snapshot",
    "write_adapter",
    "write_pretrained",
]
