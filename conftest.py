"""Runs the code on the pages; ``docs/snippets.py`` says what counts as code."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from docs.snippets import pages

_PAGES = ("README.md", "CONTRIBUTING.md", "docs/*.md", "docs/how-to/*.md", "docs/reference/*.md")

pytest_collect_file = pages(*_PAGES).pytest()


@pytest.fixture(scope="module")
def process_group(
    placement_device: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """A process group of one rank, which FSDP2 needs."""
    made = not dist.is_initialized()
    if made:
        backend = f"cpu:gloo,{placement_device}:"
        backend += dist.get_default_backend_for_device(placement_device)
        rendezvous = tmp_path_factory.mktemp("group") / "rendezvous"
        dist.init_process_group(backend, init_method=f"file://{rendezvous}", rank=0, world_size=1)
    yield
    if made:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def page(
    placement_device: str, process_group: None, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The directory in which a page's commands run and its files lie."""
    if placement_device != "sim":
        pytest.skip("what the pages print is what they print on the simulated accelerator")
    return tmp_path_factory.mktemp("page")
