"""A simulated accelerator: device ``sim``, on a machine that has only a CPU.

After :func:`enable`, ``torch.device("sim", 0)`` behaves as ``cuda:0`` would in the respects that
device placement is about: operations that mix devices raise, memory is accounted to the byte and
runs out, host memory can be pinned, host code that reads device memory faults, and
``dist.init_process_group("cpu:gloo,sim:simccl")`` gives collectives, so that FSDP2 runs unmodified.
The numbers are real: they are computed by the CPU's kernels. Copies that a GPU would make beside
the host, ``non_blocking=True`` from or to pinned memory, are made by a thread of their own, the
link, one after the other in the order of their issue. Beyond that time is not simulated.

What a real accelerator doesn't offer is offered here for tests: a capacity that can be set
(:func:`set_capacity`), copies that land as late as they may (:func:`delayed_copies`), failures at a
chosen point (:func:`failing`) and exact counts (:func:`counters`, :func:`pinned_bytes`).

Set ``OMP_NUM_THREADS=1`` (or call ``torch.set_num_threads(1)``): the ranks of a test share the
cores, and threads that outnumber them make everything slower and every measurement noisy. The
memory that a CPU kernel's additional threads allocate isn't accounted to the device, either.

Importing this package builds nothing and changes nothing in torch.

Torch-private names used here (seen in torch 2.13.0): ``torch._C._get_privateuse1_backend_name``,
``torch._register_device_module``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from types import ModuleType

import torch
from torch.utils.backend_registration import (
    generate_methods_for_privateuse1_backend,
    rename_privateuse1_backend,
)

from placement.sim.build import SimulatedAcceleratorUnavailable, load

__all__ = [
    "DEFAULT_CAPACITY",
    "DEVICE_TYPE",
    "POISON_BYTE",
    "Counters",
    "FailurePlan",
    "Seen",
    "SimulatedAcceleratorUnavailable",
    "capacity",
    "copies_are_delayed",
    "counters",
    "delayed_copies",
    "enable",
    "failing",
    "is_enabled",
    "pinned_bytes",
    "set_capacity",
    "set_delayed_copies",
]

DEVICE_TYPE = "sim"
DEFAULT_CAPACITY = 80 << 30
"""Bytes of memory of each device, until :func:`set_capacity` says otherwise."""
POISON_BYTE = 0xFF
"""What each byte of a delayed copy's target holds until it lands. In floating point that is NaN."""

_UNNAMED_BACKEND = "privateuseone"
_MOST_DEVICES = 16  # kMaxDevices in csrc/device.h
_enabled = False


def enable(devices: int = 8) -> None:
    """Give this process the device type ``sim``, for good. Calling it again changes nothing.

    The first call on a machine builds the C++ extension, which takes minutes.

    Args:
        devices: how many devices to simulate, 1 to 16. They share nothing but the host's memory.

    Raises:
        RuntimeError: the process has a real accelerator, or a device other than ``sim`` under the
            name that PyTorch keeps for one from outside (PrivateUse1).
        SimulatedAcceleratorUnavailable: the extension can't be built (a RuntimeError, too).
        ValueError: a number of devices below 1 or above 16.
    """
    global _enabled
    if _enabled:
        return
    if not 1 <= devices <= _MOST_DEVICES:
        raise ValueError(f"between 1 and {_MOST_DEVICES} devices can be simulated, not {devices}")
    _refuse_other_accelerators()
    native = load()
    rename_privateuse1_backend(DEVICE_TYPE)
    native.register_all(devices)
    from placement.sim import collectives, device_module

    torch._register_device_module(DEVICE_TYPE, device_module)
    generate_methods_for_privateuse1_backend(for_storage=True)
    collectives.register(DEVICE_TYPE)
    _enabled = True


def is_enabled() -> bool:
    """Return whether :func:`enable` has succeeded in this process."""
    return _enabled


def set_capacity(nbytes: int | None, device: int | str | torch.device | None = None) -> None:
    """Set how much memory a device has.

    Live and cached blocks count (``torch.sim.memory_reserved``), each rounded up to 512 bytes.
    Lowering the capacity releases cached blocks; live ones stay, even above it. An allocation
    beyond it raises ``torch.OutOfMemoryError``, after the cache was released and it was tried
    once more.

    Args:
        nbytes: the new capacity in bytes; None for the default, 80 GiB.
        device: which device; None for the current one.

    Raises:
        RuntimeError: the simulation is not enabled, or there is no such device.
    """
    native = _native()
    native.set_capacity(_index(device), DEFAULT_CAPACITY if nbytes is None else nbytes)


def capacity(device: int | str | torch.device | None = None) -> int:
    """Return the capacity of ``device`` (None: the current one) in bytes.

    Raises:
        RuntimeError: the simulation is not enabled, or there is no such device.
    """
    return int(_native().capacity(_index(device)))


def pinned_bytes() -> int:
    """Return how many bytes of host memory are pinned, exactly as requested, without rounding.

    Freed blocks that wait for reuse don't count; blocks that a delayed copy still uses do.

    Raises:
        RuntimeError: the simulation is not enabled.
    """
    return int(_native().pinned_bytes())


@dataclass(frozen=True)
class Counters:
    """How often things happened, in this process, on all devices together.

    The difference of two readings, ``later - earlier``, is a Counters, too. Sizes are in bytes and
    count each tensor's elements, whatever its layout.
    """

    allocations: int = 0
    """Blocks of device memory handed out, from the cache or not."""
    host_to_device_copies: int = 0
    host_to_device_bytes: int = 0
    device_to_host_copies: int = 0
    device_to_host_bytes: int = 0
    device_to_device_copies: int = 0
    device_to_device_bytes: int = 0
    collectives: int = 0
    """Collectives of backend simccl, point-to-point operations included."""
    fallback_operations: int = 0
    """Operators that ran as CPU kernels, which is all but those that only make views or copies."""
    out_resizes: int = 0
    """Arguments (mostly ``out=``) whose memory a CPU kernel replaced by a larger block."""

    def __sub__(self, earlier: Counters) -> Counters:
        """Return what happened between two readings."""
        names = [field.name for field in fields(self)]
        return Counters(**{name: getattr(self, name) - getattr(earlier, name) for name in names})


def counters() -> Counters:
    """Return the counts since the process started.

    Raises:
        RuntimeError: the simulation is not enabled.
    """
    return Counters(**_native().counters())


def set_delayed_copies(delayed: bool) -> None:
    """Switch delayed copies on or off; :func:`delayed_copies` is the same for a ``with`` block.

    Copies that are in flight stay so until they are waited for.

    Raises:
        RuntimeError: the simulation is not enabled.
    """
    _native().set_copies_delayed(delayed)


def copies_are_delayed() -> bool:
    """Return whether delayed copies are switched on.

    Raises:
        RuntimeError: the simulation is not enabled.
    """
    return bool(_native().copies_are_delayed())


@contextmanager
def delayed_copies() -> Iterator[None]:
    """Let each ``non_blocking=True`` copy from or to pinned memory land as late as it may.

    A real accelerator makes such a copy some time between its call and the next synchronisation.
    Here it is the latest moment, and the target holds poison until then (every byte is
    ``POISON_BYTE``, so floating-point values are NaN): a missing synchronisation fails every time.

    - Device to host: the values are those that the source has at the call. They land when the
      copy's stream, an event recorded after it, a stream that waited for such an event, or the
      device is synchronised, or a blocking copy or ``.item()`` runs on such a stream. An event's or
      stream's ``query()`` answers False once and lands the copy when asked again.
    - Host to device: the source is read when the copy lands, so it must not be overwritten before.
      It lands at the latest when an operation uses the target on the same stream, or on a stream
      that waited for it; an operation on another stream computes with poison.
    - A device tensor freed while a copy out of it is in flight on a stream other than the one it
      was allocated on spoils the copy (it lands as poison), unless ``record_stream`` named the
      copy's stream or the tensor's stream waited for the copy.

    Without it such copies are on the link, and land a moment after the call. Copies of memory that
    isn't pinned, or that change the dtype or the layout, are synchronous either way, as on CUDA.
    Kernels always run at once: races between them can't be shown.

    Raises:
        RuntimeError: the simulation is not enabled.
    """
    previous = copies_are_delayed()
    set_delayed_copies(True)
    try:
        yield
    finally:
        set_delayed_copies(previous)


@dataclass(frozen=True)
class Seen:
    """How many events of each kind a failure plan has seen since it was entered."""

    allocations: int = 0
    copies: int = 0
    collectives: int = 0


class FailurePlan:
    """What :func:`failing` yields: what has happened under the plan so far.

    After the ``with`` block it keeps the last values.
    """

    def __init__(self, native: ModuleType) -> None:
        self._native: ModuleType | None = native
        self._seen = Seen()
        self._fired = False

    @property
    def seen(self) -> Seen:
        """The events counted so far, the failed one included."""
        self._read()
        return self._seen

    @property
    def fired(self) -> bool:
        """Whether the planned failure has happened, or the planned capacity has come into force."""
        self._read()
        return self._fired

    def _read(self) -> None:
        if self._native is not None:
            allocations, copies, collectives, fired = self._native.failure_report()
            self._seen = Seen(allocations, copies, collectives)
            self._fired = fired

    def _close(self) -> None:
        self._read()
        self._native = None


@contextmanager
def failing(
    *,
    allocation: int | None = None,
    copy: int | None = None,
    collective: int | None = None,
    capacity: tuple[int, int] | None = None,
) -> Iterator[FailurePlan]:
    """Let one chosen event fail, once; all others go on normally. Events count from 1, from entry.

    With no argument nothing fails, and the plan only counts: run once to learn how many points
    there are, then once for each of them. Plans are the whole process's, and don't nest.

    Args:
        allocation: this allocation of device memory raises ``torch.OutOfMemoryError``. CPU kernels
            allocate their results and temporaries on the device, too, so these count.
        copy: this copy (host to device, back, or between devices) raises RuntimeError, "sim: copy
            failed (planned) ...", and moves nothing.
        collective: this collective raises RuntimeError, "sim: collective failed (planned) ...", in
            this process, before it talks to the others (they wait, until the group's timeout).
        capacity: (n, bytes): from the n-th allocation on, to the end of the block, each device has
            at most this much memory.

    Raises:
        RuntimeError: the simulation is not enabled, or a plan is active.
        ValueError: a number below 1.
    """
    numbers = (allocation, copy, collective, capacity[0] if capacity else None)
    if any(number is not None and number < 1 for number in numbers):
        raise ValueError("events are counted from 1")
    native = _native()
    native.set_failure_plan(allocation, copy, collective, capacity)
    plan = FailurePlan(native)
    try:
        yield plan
    finally:
        plan._close()
        native.clear_failure_plan()


def _native() -> ModuleType:
    if not _enabled:
        raise RuntimeError(
            "the simulated accelerator isn't enabled: call placement.sim.enable() first"
        )
    return load()


def _index(device: int | str | torch.device | None) -> int:
    from placement.sim.device_module import device_index

    return device_index(device)


def _refuse_other_accelerators() -> None:
    name = torch._C._get_privateuse1_backend_name()
    if name != _UNNAMED_BACKEND:
        raise RuntimeError(
            "the simulated accelerator needs PyTorch's PrivateUse1 device, which this process "
            f"uses for {name!r}: use another process"
        )
    if torch.accelerator.is_available():
        raise RuntimeError(
            f"this process has a real accelerator ({torch.accelerator.current_accelerator()}), and "
            f"PyTorch can't tell two apart: hide it (e.g. CUDA_VISIBLE_DEVICES=) or don't simulate"
        )
