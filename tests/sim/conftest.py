"""Enables the simulated accelerator for this folder's tests; without it they are skipped."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from placement import sim


@pytest.fixture(scope="session", autouse=True)
def enabled_simulation(device_type: str) -> None:
    if device_type != sim.DEVICE_TYPE:
        pytest.skip(f"tests of the simulated accelerator, and this run is on {device_type}")


@pytest.fixture(autouse=True)
def clean_devices(enabled_simulation: None) -> Iterator[None]:
    """Each test starts on device 0, with default capacities, nothing cached, nothing in flight,
    no garbage of an earlier test's (an exception's traceback holds tensors in a cycle), and prompt
    copies; the rest of the suite has delayed ones."""
    gc.collect()
    sim.set_delayed_copies(False)
    torch.sim.empty_cache()
    torch.accelerator.empty_host_cache()
    torch.sim.reset_peak_memory_stats(0)
    yield
    sim.set_delayed_copies(True)
    for index in range(torch.sim.device_count()):
        torch.sim.synchronize(index)
        sim.set_capacity(None, index)
    torch.sim.set_stream(torch.sim.default_stream(0))
