"""What the tests share. Where they run (``--placement-device``), and the ranks, come from our own
pytest plugin."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist

from placement import Trace
from placement.testing import Ranks
from placement.testing.ranks import join_group


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--every-point",
        action="store_true",
        help="let every point of the failure campaign fail on two ranks, too",
    )


@pytest.fixture(scope="session")
def device_type(placement_device: str) -> str:
    """Type of the compute device, ready to use in this process."""
    torch.set_num_threads(1)
    if placement_device == "sim":
        from placement import sim

        # A copy that is not waited for is read as poison: a missing wait fails every time.
        sim.set_delayed_copies(True)
    return placement_device


@pytest.fixture(scope="session")
def one_rank(device_type: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """This process as the only rank of a process group; the device type."""
    join_group(device_type, 0, 1, str(tmp_path_factory.mktemp("group") / "rendezvous"))
    yield device_type
    dist.destroy_process_group()


@pytest.fixture
def trace(placement_trace: Trace) -> Trace:
    return placement_trace


@pytest.fixture(scope="session")
def two_ranks(ranks: Callable[[int], Ranks]) -> Ranks:
    return ranks(2)


@pytest.fixture(scope="session")
def four_ranks(ranks: Callable[[int], Ranks]) -> Ranks:
    return ranks(4)


@pytest.fixture(params=[1, 2], ids=["1 rank", "2 ranks"])
def on_ranks(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Run a body on that many ranks: in this process, or in two others."""
    if request.param == 1:
        request.getfixturevalue("one_rank")
        return lambda body, *args: body(*args)
    ranks: Ranks = request.getfixturevalue("two_ranks")
    return lambda body, *args: ranks.run(body, *args)
