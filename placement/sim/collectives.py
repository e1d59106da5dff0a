"""Process group backend ``simccl``: collectives on tensors of the simulated accelerator.

``dist.init_process_group("cpu:gloo,sim:simccl")`` makes a group for both kinds of tensors. The work
is done by a gloo group of its own, on aliases of the device tensors; ``csrc/collectives.cpp`` says
how.

Torch-private names used here (seen in torch 2.13.0): ``dist.Backend._plugins``.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

from placement.sim.build import load

__all__ = ["BACKEND_NAME", "register"]

BACKEND_NAME = "simccl"


def register(device_type: str) -> None:
    """Make ``simccl`` known to ``torch.distributed``, and the default for ``device_type``."""
    dist.Backend.register_backend(BACKEND_NAME, _create, devices=[device_type])
    # torch files the backend under its name in capitals, but looks for the first one by the name
    # that init_process_group was given when it chooses a group's default backend. Without one it
    # warns ("No backend of type 0") when the group is destroyed.
    plugins = dist.Backend._plugins
    dist.Backend._plugins = {BACKEND_NAME: plugins[BACKEND_NAME.upper()], **plugins}


def _create(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    return load().make_simccl(dist.ProcessGroupGloo(store, rank, size, timeout))
