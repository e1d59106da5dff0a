"""The module that becomes ``torch.sim``: what generic torch code asks a device module for.

FSDP2, DTensor's random numbers, checkpoint utilities, autocast, ``torch.utils.data`` and DCP each
look functions up here by the names that ``torch.cuda`` has. A ``device`` argument is an index, a
``torch.device``, a string, or None for the current device; sizes are in bytes.

Importing this module loads the extension. ``placement.sim.enable()`` does it.

Torch-private names used here (seen in torch 2.13.0): none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from placement.sim.build import load

_native = load()
_NAME = "sim"

DeviceLike: TypeAlias = "int | str | torch.device | None"


def device_index(device: DeviceLike = None) -> int:
    """Return the index that ``device`` means; the current one if it names none."""
    if device is None:
        return current_device()
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return current_device() if index is None else int(index)


# ---- devices

_initialized = True  # without it torch.utils.checkpoint doesn't keep the device's random state


def is_available() -> bool:
    """Return True: the module exists only where the simulation was enabled."""
    return True


def is_initialized() -> bool:
    """Return True: there is nothing left to initialise."""
    return True


def init() -> None:
    """Do nothing: there is nothing left to initialise."""


def _lazy_init() -> None:
    """Do nothing: there is nothing left to initialise."""


def _is_in_bad_fork() -> bool:
    """Return False: memory of the simulation survives a fork."""
    return False


def device_count() -> int:
    """Return the number of simulated devices."""
    return int(_native.device_count())


def current_device() -> int:
    """Return the index of this thread's current device."""
    return int(_native.current_device())


def set_device(device: DeviceLike) -> None:
    """Make ``device`` this thread's current device. Raises RuntimeError if there is no such one."""
    _native.set_device(device_index(device))


@contextmanager
def device(device: DeviceLike) -> Iterator[None]:
    """Make ``device`` current inside the ``with`` block; None changes nothing."""
    previous = current_device()
    if device is not None:
        set_device(device)
    try:
        yield
    finally:
        _native.set_device(previous)


@dataclass(frozen=True)
class DeviceProperties:
    """What there is to say about a simulated device. ``total_memory`` is its capacity in bytes."""

    name: str
    total_memory: int
    multi_processor_count: int = 1


def get_device_properties(device: DeviceLike = None) -> DeviceProperties:
    """Return the properties of ``device``."""
    return DeviceProperties(get_device_name(device), int(_native.capacity(device_index(device))))


def get_device_name(device: DeviceLike = None) -> str:
    """Return the name of ``device``, the same for all."""
    return "simulated accelerator"


def get_device_capability(device: DeviceLike = None) -> tuple[int, int]:
    """Return a compute capability that switches no feature off."""
    return (9, 0)


# ---- streams and events


class Stream(torch.Stream):
    """A stream of a simulated device."""

    def __new__(cls, device: DeviceLike = None, priority: int = 0, **kwargs: Any) -> Stream:
        """Create a new stream on ``device``; ``priority`` has no effect."""
        on = torch.device(_NAME, device_index(device))
        return super().__new__(cls, device=on, priority=priority, **kwargs)


def Event(  # noqa: N802 (a function, because elapsed_time refuses subclasses of torch.Event)
    enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
) -> torch.Event:
    """Return an event of the simulated devices, not recorded yet. Its times are the host's."""
    return torch.Event(
        device=_NAME, enable_timing=enable_timing, blocking=blocking, interprocess=interprocess
    )


def current_stream(device: DeviceLike = None) -> torch.Stream:
    """Return this thread's current stream on ``device``."""
    return torch.accelerator.current_stream(device_index(device))


def default_stream(device: DeviceLike = None) -> torch.Stream:
    """Return the stream of ``device`` that is current until another one is set."""
    on = torch.device(_NAME, device_index(device))
    return torch.Stream(stream_id=0, device_index=on.index, device_type=_device_type())


def set_stream(stream: torch.Stream) -> None:
    """Make ``stream``, and its device, this thread's current one."""
    torch.accelerator.set_stream(stream)


@contextmanager
def stream(stream: torch.Stream | None) -> Iterator[None]:
    """Make ``stream`` current inside the ``with`` block; None changes nothing."""
    if stream is None:
        yield
    else:
        with stream:
            yield


def synchronize(device: DeviceLike = None) -> None:
    """Wait for everything on ``device``: all its delayed copies land."""
    _native.synchronize(device_index(device))


def _device_type() -> int:
    return torch.accelerator.current_stream().device_type


# ---- memory


def memory_allocated(device: DeviceLike = None) -> int:
    """Return the bytes of live device memory, exactly as requested, without rounding."""
    return torch.accelerator.memory_allocated(device_index(device))


def max_memory_allocated(device: DeviceLike = None) -> int:
    """Return the peak of ``memory_allocated`` since the last reset.

    The temporaries of the CPU kernels count; those of a real device's kernels differ.
    """
    return torch.accelerator.max_memory_allocated(device_index(device))


def memory_reserved(device: DeviceLike = None) -> int:
    """Return the bytes that live and cached blocks take, which the capacity limits."""
    return torch.accelerator.memory_reserved(device_index(device))


def max_memory_reserved(device: DeviceLike = None) -> int:
    """Return the peak of ``memory_reserved`` since the last reset."""
    return torch.accelerator.max_memory_reserved(device_index(device))


def memory_stats(device: DeviceLike = None) -> dict[str, Any]:
    """Return all statistics of the allocator, by the names that CUDA's has."""
    return torch.accelerator.memory_stats(device_index(device))


def reset_peak_memory_stats(device: DeviceLike = None) -> None:
    """Start the peaks again from the present values."""
    torch.accelerator.reset_peak_memory_stats(device_index(device))


def reset_accumulated_memory_stats(device: DeviceLike = None) -> None:
    """Start the totals of ``memory_stats`` again from zero."""
    torch.accelerator.reset_accumulated_memory_stats(device_index(device))


def mem_get_info(device: DeviceLike = None) -> tuple[int, int]:
    """Return (free, total): what is not reserved, and the capacity, in bytes."""
    free, total = _native.free_and_total(device_index(device))
    return int(free), int(total)


def empty_cache() -> None:
    """Release the cached blocks of all devices."""
    torch.accelerator.empty_cache()


# ---- random numbers
#
# A state is a uint8 tensor of 16 elements, seed and offset, as a CUDA generator's is.


def manual_seed(seed: int) -> None:
    """Seed the generator of the current device."""
    _native.default_generator(current_device()).manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    """Seed the generators of all devices; ``torch.manual_seed`` calls this."""
    for index in range(device_count()):
        _native.default_generator(index).manual_seed(seed)


def seed() -> None:
    """Seed the generator of the current device with a random number."""
    _native.default_generator(current_device()).seed()


def initial_seed() -> int:
    """Return the seed of the current device's generator."""
    return int(_native.default_generator(current_device()).initial_seed())


def get_rng_state(device: DeviceLike = None) -> torch.Tensor:
    """Return the state of the generator of ``device``, a CPU tensor."""
    state: torch.Tensor = _native.default_generator(device_index(device)).get_state()
    return state


def set_rng_state(new_state: torch.Tensor, device: DeviceLike = None) -> None:
    """Set the state of the generator of ``device``. Raises RuntimeError if it is no such state."""
    _native.default_generator(device_index(device)).set_state(new_state.cpu())


def get_rng_state_all() -> list[torch.Tensor]:
    """Return the states of the generators of all devices, in order."""
    return [get_rng_state(index) for index in range(device_count())]


def set_rng_state_all(new_states: Iterable[torch.Tensor]) -> None:
    """Set the states of the generators of all devices, in order."""
    for index, state in enumerate(new_states):
        set_rng_state(state, index)


default_generators: tuple[torch.Generator, ...] = tuple(
    _native.default_generator(index) for index in range(device_count())
)


# ---- precision


def get_amp_supported_dtype() -> list[torch.dtype]:
    """Return the dtypes that ``torch.autocast("sim")`` may cast to."""
    return [torch.bfloat16, torch.float16, torch.float32]


def is_bf16_supported(including_emulation: bool = True) -> bool:
    """Return True: the CPU kernels know bfloat16."""
    return True
