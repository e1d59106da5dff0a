"""The simulated accelerator as one of verl's platforms.

verl chooses it by itself in a process that simulates already (``placement.sim.enable()``), or
because ``VERL_PLATFORM=sim`` asks for it, and then it is enabled here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry

from placement import sim


class SimulatedPlatform(PlatformBase):
    """What verl asks of an accelerator, answered by the simulated one."""

    device_name = sim.DEVICE_TYPE
    vendor_name = sim.DEVICE_TYPE

    @property
    def device_module(self) -> ModuleType:
        module: ModuleType = torch.get_device_module(sim.DEVICE_TYPE)
        return module

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return sim.is_enabled()

    def is_available(self) -> bool:
        sim.enable()  # asked only of the platform that was chosen
        return True

    # The device.

    def current_device(self) -> int:
        return torch.accelerator.current_device_index()

    def device_count(self) -> int:
        return torch.accelerator.device_count()

    def set_device(self, device_index: int) -> None:
        torch.accelerator.set_device_index(device_index)

    def synchronize(self, device_index: int | None = None) -> None:
        torch.accelerator.synchronize(device_index)

    def manual_seed(self, seed: int) -> None:
        self.device_module.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        self.device_module.manual_seed_all(seed)

    def empty_cache(self) -> None:
        torch.accelerator.empty_cache()

    def communication_backend_name(self) -> str:
        backend: str = torch.distributed.get_default_backend_for_device(sim.DEVICE_TYPE)
        return backend

    # What it has not.

    def set_allocator_settings(self, settings: str) -> None:
        """Do nothing: the allocator has no settings."""

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def visible_devices_envvar(self) -> str:
        return "SIM_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None:
        """Do nothing: there is no profiler."""

    def profiler_stop(self) -> None:
        """Do nothing: there is no profiler."""

    def ray_resource_name(self) -> str:
        return "SIM"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> Any:
        return None


def register_platform() -> None:
    """Make the simulated accelerator known to verl, under the name of its device type."""
    PlatformRegistry.register(platform=sim.DEVICE_TYPE)(SimulatedPlatform)
