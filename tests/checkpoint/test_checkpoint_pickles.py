"""Opening a stranger's checkpoint runs nothing that is in it. torch's own reader would run it."""

from __future__ import annotations

import contextlib
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from damage import vouch_for
from torch.distributed.checkpoint import CheckpointException, FileSystemReader
from training import plain_manager, stepped, whole_state

from placement import CheckpointError, Checkpoints


class Hostile:
    """Makes a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.marker,)


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    return tmp_path / "was-executed"


def planted(marker: Path) -> bytes:
    return pickle.dumps(Hostile(marker))


@pytest.fixture(scope="module")
def ours(device_type: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("ours")
    Checkpoints(directory, stepped(plain_manager())).save(1, {"note": "one"})
    return directory


NAMES = ["manifest.json", "contents.json", "rank-00000.safetensors"]
STRANGE = [".metadata", "__0_0.distcp", "extras.pt", "data.pkl"]


def plant(checkpoint: Path, name: str, content: bytes, vouched: bool) -> None:
    (checkpoint / name).write_bytes(content)
    if vouched and name in NAMES[1:]:
        vouch_for(checkpoint, name)


@pytest.mark.parametrize("name", [*NAMES, *STRANGE])
@pytest.mark.parametrize("vouched", [False, True], ids=["planted", "vouched for"])
@pytest.mark.parametrize("form", ["pickle", "torch.save"])
def test_a_pickle_in_the_place_of_any_file_runs_nothing(
    ours: Path, tmp_path: Path, marker: Path, name: str, vouched: bool, form: str
) -> None:
    directory = tmp_path / "copy"
    shutil.copytree(ours, directory)
    if form == "pickle":
        content = planted(marker)
    else:
        torch.save(Hostile(marker), tmp_path / "saved")
        content = (tmp_path / "saved").read_bytes()
    plant(directory / "step-00000001", name, content, vouched)
    manager = stepped(plain_manager(), 4)
    kept = Checkpoints(directory, manager)
    before = whole_state(manager)
    if name in STRANGE:
        assert kept.load().extras == {"note": "one"}  # nobody asks for such a file
    else:
        with pytest.raises(CheckpointError, match=name):
            kept.load()
        assert whole_state(manager).keys() == before.keys()
    assert not marker.exists()


def test_pickles_in_all_files_at_once_and_as_latest_run_nothing(
    ours: Path, tmp_path: Path, marker: Path
) -> None:
    directory = tmp_path / "copy"
    shutil.copytree(ours, directory)
    for path in (directory / "step-00000001").iterdir():
        path.write_bytes(planted(marker))
    for step in (1, None):
        with pytest.raises(CheckpointError):
            Checkpoints(directory, plain_manager()).load(step)
    (directory / "latest").write_bytes(planted(marker))
    with pytest.raises(CheckpointError):
        Checkpoints(directory, plain_manager()).load()
    assert not marker.exists()


# The same would run under torch's reader.


def read_metadata(directory: Path, marker: Path) -> None:
    (directory / ".metadata").write_bytes(planted(marker))
    with contextlib.suppress(CheckpointException, Exception):
        FileSystemReader(directory).read_metadata()


def read_item(directory: Path, marker: Path) -> None:
    shutil.rmtree(directory)
    dcp.save({"extras": Hostile(marker)}, checkpoint_id=directory)
    dcp.load({"extras": None}, checkpoint_id=directory)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("read", [read_metadata, read_item])
def test_the_same_pickle_runs_under_torchs_own_reader(
    tmp_path: Path, marker: Path, read: Callable[[Path, Path], None]
) -> None:
    directory = tmp_path / "torchs"
    dcp.save({"weight": torch.zeros(2)}, checkpoint_id=directory)
    read(directory, marker)
    assert marker.exists()


def test_a_directory_of_torchs_is_refused_without_a_look_into_it(
    device_type: str, tmp_path: Path, marker: Path
) -> None:
    directory = tmp_path / "step-00000001"
    directory.mkdir()
    (directory / ".metadata").write_bytes(planted(marker))
    with pytest.raises(CheckpointError, match=r"placement convert --trust-pickle"):
        Checkpoints(tmp_path, plain_manager()).load()
    assert not marker.exists()
