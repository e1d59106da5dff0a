"""The compute device: which one it is, and how much room it has."""

from __future__ import annotations

import mmap
import os

import torch

from placement import torch_private
from placement.errors import NoAccelerator
from placement.tensors import with_index


def find_compute_device(asked: torch.device | str | None = None) -> torch.device:
    """The device to compute on, with its index.

    Args:
        asked: a device by name, or None for the accelerator that torch finds
            (``torch.accelerator``: cuda, xpu, npu, ...). The simulated accelerator is found like
            any other after ``placement.sim.enable()``, and never enabled from here.

    Raises:
        NoAccelerator: there is none, or not of the kind that was asked for.
    """
    found = torch.accelerator.current_accelerator(check_available=True)
    wanted = torch.device(asked) if asked is not None else found
    if found is None or wanted is None or wanted.type != found.type:
        raise NoAccelerator(
            asked="placing on " + (str(asked) if asked is not None else "the accelerator"),
            state=f"torch.accelerator finds {found.type if found else 'no accelerator'}",
            why="a placement is between the CPU and a compute device, and this one is not there",
            instead="run where the device is, or use the simulated accelerator (device 'sim'): "
            "from placement import sim; sim.enable()",
        )
    return with_index(wanted)


def free_bytes(device: torch.device) -> int | None:
    """Bytes that can still be allocated on ``device``, or None where torch can't tell.

    What the caching allocator holds unused counts as free, since it is handed out again.
    """
    if device.type == "cpu":
        return None
    try:
        free, _ = torch.accelerator.get_memory_info(device)
        allocated, reserved = torch_private.allocated_and_reserved_bytes(device)
    except (AttributeError, NotImplementedError, RuntimeError):
        return None  # a backend without the query
    return int(free) + reserved - allocated


def allocated_bytes(device: torch.device) -> int:
    """Bytes that tensors occupy on ``device``, as torch's allocator counts them."""
    return torch_private.allocated_and_reserved_bytes(device)[0]


def resident_bytes() -> int:
    """Resident memory of this process, in bytes; 0 where the system does not say."""
    try:
        statm = os.open("/proc/self/statm", os.O_RDONLY)  # a file object would double the time
    except OSError:
        return 0
    try:
        return int(os.read(statm, 256).split()[1]) * mmap.PAGESIZE
    finally:
        os.close(statm)
