"""A process group of one rank, which FSDP2 needs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist


@pytest.fixture
def process_group(placement_device: str, tmp_path: Path) -> Iterator[None]:
    made = not dist.is_initialized()
    if made:
        backend = f"cpu:gloo,{placement_device}:"
        backend += dist.get_default_backend_for_device(placement_device)
        rendezvous = f"file://{tmp_path / 'rendezvous'}"
        dist.init_process_group(backend, init_method=rendezvous, rank=0, world_size=1)
    yield
    if made:
        dist.destroy_process_group()
