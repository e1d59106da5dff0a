"""Where the tests run is decided here: ``--device``, else what torch finds, else simulated."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from placement import Trace
from placement.testing import Ranks
from placement.testing.ranks import join_group


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device",
        default="",
        help="compute device type; by default the accelerator that torch finds, else sim",
    )


def pytest_report_header(config: pytest.Config) -> str:
    return f"compute device: {_device_type(config)}"


def _device_type(config: pytest.Config) -> str:
    if asked := config.getoption("--device"):
        return str(asked)
    found = torch.accelerator.current_accelerator(check_available=True)
    return found.type if found is not None else "sim"


@pytest.fixture(scope="session")
def device_type(pytestconfig: pytest.Config) -> str:
    """Type of the compute device, ready to use in this process."""
    device = _device_type(pytestconfig)
    torch.set_num_threads(1)
    if device == "sim":
        from placement import sim

        # A copy that is not waited for is read as poison: a missing wait fails every time.
        sim.enable()
        sim.set_delayed_copies(True)
    return device


@pytest.fixture(scope="session")
def one_rank(device_type: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """This process as the only rank of a process group; the device type."""
    join_group(device_type, 0, 1, str(tmp_path_factory.mktemp("group") / "rendezvous"))
    yield device_type
    dist.destroy_process_group()


@pytest.fixture
def trace() -> Trace:
    return Trace()


@pytest.fixture(scope="session")
def two_ranks(device_type: str) -> Iterator[Ranks]:
    yield from _ranks(2, device_type)


@pytest.fixture(scope="session")
def four_ranks(device_type: str) -> Iterator[Ranks]:
    yield from _ranks(4, device_type)


def _ranks(size: int, device_type: str) -> Iterator[Ranks]:
    if device_type != "sim" and torch.accelerator.device_count() < size:
        pytest.skip(f"needs {size} devices, this machine has {torch.accelerator.device_count()}")
    ranks = Ranks(size, device_type, delayed_copies=device_type == "sim")
    yield ranks
    ranks.close()
