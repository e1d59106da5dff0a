"""The simulated accelerator as a test wants it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from placement import sim


class SimulatedAccelerator:
    """What the ``sim_accelerator`` fixture yields."""

    @property
    def device(self) -> torch.device:
        """The device to put tensors on."""
        return torch.device(sim.DEVICE_TYPE, 0)

    @contextmanager
    def fresh(self) -> Iterator[None]:
        """Delayed copies, and the default capacity; both as found afterwards."""
        gc.collect()
        torch.accelerator.empty_cache()
        delayed = sim.copies_are_delayed()
        sim.set_delayed_copies(True)
        try:
            yield
        finally:
            torch.accelerator.synchronize()
            sim.set_delayed_copies(delayed)
            sim.set_capacity(None)

    def set_free(self, nbytes: int) -> None:
        """Lower the capacity so that ``nbytes`` can still be allocated (blocks are rounded up to
        512 bytes)."""
        torch.accelerator.empty_cache()
        sim.set_capacity(torch.accelerator.memory_reserved() + nbytes)

    def set_capacity(self, nbytes: int | None) -> None:
        """Set the capacity in bytes; None for the default."""
        sim.set_capacity(nbytes)

    def failing(
        self,
        *,
        allocation: int | None = None,
        copy: int | None = None,
        collective: int | None = None,
    ) -> AbstractContextManager[sim.FailurePlan]:
        """Let the n-th allocation, copy or collective of the block fail; with no argument count
        them. See :func:`placement.sim.failing`."""
        return sim.failing(allocation=allocation, copy=copy, collective=collective)

    def counters(self) -> sim.Counters:
        """Copies, bytes and allocations so far; the difference of two is what came between."""
        return sim.counters()

    def allocated_bytes(self) -> int:
        """Bytes that tensors occupy on the device, exactly."""
        return torch.accelerator.memory_allocated()
