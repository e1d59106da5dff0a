"""Everything that is timed, in one process, so that verl is imported once."""

from __future__ import annotations

from bench import idle, transfers
from bench.common import Measured, report


def measure(device: str) -> dict[str, Measured]:
    # Transfers first: tens of thousands of weights, made and dropped, scatter over the heap what is
    # made next, and small tensors then take a tenth longer or more, ours and verl's.
    return transfers.measure(device) | idle.measure(device)


if __name__ == "__main__":
    report(measure)
