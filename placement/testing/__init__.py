"""For tests: assertions about placement, and local ranks. Fixtures come with the pytest plugin."""

from __future__ import annotations

from typing import TYPE_CHECKING

from placement.lazy import importing_on_first_use

if TYPE_CHECKING:
    from placement.testing.accelerator import SimulatedAccelerator
    from placement.testing.assertions import (
        assert_legal,
        assert_no_moves,
        assert_placement,
        assert_ranks_agree,
        assert_round_trip,
        assert_trace,
    )
    from placement.testing.ranks import RankFailed, Ranks, RanksTimedOut

_HOMES = {
    "RankFailed": "placement.testing.ranks",
    "Ranks": "placement.testing.ranks",
    "RanksTimedOut": "placement.testing.ranks",
    "SimulatedAccelerator": "placement.testing.accelerator",
    "assert_legal": "placement.testing.assertions",
    "assert_no_moves": "placement.testing.assertions",
    "assert_placement": "placement.testing.assertions",
    "assert_ranks_agree": "placement.testing.assertions",
    "assert_round_trip": "placement.testing.assertions",
    "assert_trace": "placement.testing.assertions",
}

__all__ = [
    "RankFailed",
    "Ranks",
    "RanksTimedOut",
    "SimulatedAccelerator",
    "assert_legal",
    "assert_no_moves",
    "assert_placement",
    "assert_ranks_agree",
    "assert_round_trip",
    "assert_trace",
]

__getattr__ = importing_on_first_use(__name__, globals(), _HOMES)
