"""Everything that is timed, in one process, so that verl is imported once."""

from __future__ import annotations

from bench import idle, transfers
from bench.common import Measured, report


def measure(device: str) -> dict[str, Measured]:
    return idle.measure(device) | transfers.measure(device)


if __name__ == "__main__":
    report(measure)
