"""For tests: run a function on several local ranks."""

from placement.testing.ranks import RankFailed, Ranks, RanksTimedOut

__all__ = ["RankFailed", "Ranks", "RanksTimedOut"]
