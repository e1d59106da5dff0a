"""The pytest plugin: fixtures for tests about placement, on any machine.

It is loaded in every test run of an environment that has torch-placement, so importing it must cost
next to nothing: torch is imported when a fixture is used.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from placement.testing.accelerator import SimulatedAccelerator
    from placement.testing.ranks import Ranks
    from placement.trace import Trace

OPTION = "--placement-device"


def pytest_addoption(parser: pytest.Parser) -> None:
    """The option that says where tests about placement run."""
    parser.getgroup("placement").addoption(
        OPTION,
        default="",
        metavar="TYPE",
        help="compute device of tests about placement: cuda, sim, ...; by default the accelerator "
        "that torch finds, else the simulated one",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Managers check every context against the tensors under test, in rank processes, too."""
    os.environ.setdefault("TORCH_PLACEMENT_VERIFY", "always")


@pytest.fixture(scope="session")
def placement_device(pytestconfig: pytest.Config) -> str:
    """Type of the compute device, ready to use in this process."""
    import torch

    asked = str(pytestconfig.getoption(OPTION))
    found = torch.accelerator.current_accelerator(check_available=True)
    device = asked or (found.type if found is not None else "sim")
    if device == "sim":
        from placement import sim

        sim.enable()
    return device


@pytest.fixture
def placement_trace() -> Iterator[Trace]:
    """An empty trace, into which every manager of the test records unless it is given another."""
    from placement.trace import Trace, use_process_trace

    trace = Trace()
    found = use_process_trace(trace)
    yield trace
    use_process_trace(found)


@pytest.fixture
def sim_accelerator(placement_device: str) -> Iterator[SimulatedAccelerator]:
    """The simulated accelerator, empty and with delayed copies; what a test changes is put back.

    Skips the test where a real accelerator is in use: a process can have one only.
    """
    if placement_device != "sim":
        pytest.skip(f"needs the simulated accelerator, and this run is on {placement_device}")
    from placement.testing.accelerator import SimulatedAccelerator

    accelerator = SimulatedAccelerator()
    with accelerator.fresh():
        yield accelerator


@pytest.fixture(scope="session")
def ranks(placement_device: str) -> Iterator[Callable[[int], Ranks]]:
    """``ranks(2).run(body, *args)`` runs an importable function on 2 local ranks, and returns what
    it returned on each. A failure on any rank fails the test with that rank's traceback.

    The processes stay for the session, so only the first test of each size pays for starting them.
    """
    import torch

    from placement.testing.ranks import Ranks

    pools: dict[int, Ranks] = {}

    def of(size: int) -> Ranks:
        if placement_device != "sim" and torch.accelerator.device_count() < size:
            there = torch.accelerator.device_count()
            pytest.skip(f"needs {size} devices of type {placement_device}, and there are {there}")
        if size not in pools:
            pools[size] = Ranks(size, placement_device, delayed_copies=placement_device == "sim")
        return pools[size]

    yield of
    for pool in pools.values():
        pool.close()
