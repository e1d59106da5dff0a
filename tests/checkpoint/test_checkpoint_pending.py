"""Saves that do not block: a private copy is written while training and moves go on."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from file_faults import failing_files
from models import assert_equal, values
from training import checkpoints, dropping_engine, plain_manager, stepped, whole_state

from engine import Offload
from placement import CheckpointFailed, Checkpoints, Placement
from placement.checkpoint import files
from placement.testing import Ranks

PATIENCE = 60.0
"""Seconds after which a test fails that waits for a thread."""


@contextmanager
def writers_held_back() -> Iterator[threading.Event]:
    """Let the threads of pending saves open no file before the event that this yields is set."""
    go = threading.Event()

    class Waiting:
        def __getattr__(self, name: str) -> Any:
            return self._open if name == "open" else getattr(os, name)

        def _open(self, path: Path, *args: Any) -> int:
            if threading.current_thread() is not threading.main_thread():
                assert go.wait(PATIENCE)
            return os.open(path, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "os", Waiting())
        try:
            yield go
        finally:
            go.set()


def until(done: Any) -> None:
    """Wait until ``done()``, without a call that would make it so."""
    ends = time.monotonic() + PATIENCE
    while not done():
        assert time.monotonic() < ends
        time.sleep(0.005)


@pytest.mark.parametrize("offload", Offload)
def test_training_and_moves_go_on_and_the_copy_is_private(
    one_rank: str, tmp_path: Path, offload: Offload
) -> None:
    engine = dropping_engine(offload)
    engine.train_batch([torch.ones(8, 6)])
    kept = checkpoints(tmp_path, engine)
    saved = values(engine.manager.census())
    place = torch.arange(4.0)
    with writers_held_back() as go:
        kept.save(1, {"place": place}, blocking=False)
        assert kept.steps() == []
        engine.train_batch([torch.ones(8, 6)])
        place += 1
        if offload is not Offload.POLICY:
            engine.manager.onload()
            engine.manager.offload()
            assert engine.manager.placement is Placement.CPU_MANUAL
        go.set()
        kept.finish()
    other = dropping_engine(offload)
    extras = checkpoints(tmp_path, other).load().extras
    assert_equal(values(other.manager.census()), saved)
    assert torch.equal(extras["place"], torch.arange(4.0))


def test_latest_changes_without_a_further_call(device_type: str, tmp_path: Path) -> None:
    kept = Checkpoints(tmp_path, plain_manager())
    kept.save(1, blocking=False)
    until(lambda: (tmp_path / "latest").exists())
    assert Checkpoints(tmp_path, plain_manager()).load().step == 1
    kept.finish()


def test_a_second_save_and_a_load_wait_for_the_first(device_type: str, tmp_path: Path) -> None:
    manager = stepped(plain_manager())
    kept = Checkpoints(tmp_path, manager)
    first = whole_state(manager)
    with writers_held_back() as go:
        kept.save(1, blocking=False)
        stepped(manager, 1)
        threading.Timer(0.1, go.set).start()
        kept.save(2, blocking=False)
        assert kept.steps() in ([1], [1, 2])
    stepped(manager, 2)
    assert kept.load().step == 2
    assert kept.load(1).step == 1
    assert_equal(whole_state(manager), first)


def test_leaving_the_context_waits(device_type: str, tmp_path: Path) -> None:
    with writers_held_back() as go:
        with Checkpoints(tmp_path, plain_manager()) as kept:
            kept.save(1, blocking=False)
            threading.Timer(0.1, go.set).start()
        assert kept.steps() == [1]


def test_finishing_when_nothing_is_under_way_does_nothing(device_type: str, tmp_path: Path) -> None:
    manager = plain_manager()
    kept = Checkpoints(tmp_path, manager)
    kept.finish()
    assert not list(manager.trace)[2:]
    kept.save(1, blocking=False)
    kept.finish()
    kept.finish()


# Errors.


@pytest.mark.parametrize("call", ["finish", "save", "load"])
def test_the_writers_error_comes_at_the_next_call_and_only_there(
    device_type: str, tmp_path: Path, call: str
) -> None:
    manager = stepped(plain_manager())
    kept = Checkpoints(tmp_path, manager)
    kept.save(1)
    found = whole_state(manager)
    with failing_files() as counted:
        kept.save(2)
    writes = [n for n, seen in enumerate(counted.seen, 1) if seen.startswith("write")]
    with failing_files(writes[0], errno.ENOSPC) as plan:
        kept.save(3, blocking=False)
        until(lambda: plan.fired)
        with pytest.raises(CheckpointFailed, match=r"step 3 refused: rank 0 of 1: .*No space left"):
            {"finish": kept.finish, "save": lambda: kept.save(4), "load": kept.load}[call]()
    assert_equal(whole_state(manager), found)
    assert kept.steps() == [1, 2]
    assert not [path for path in tmp_path.iterdir() if "writing" in path.name]
    kept.finish()
    kept.save(4, blocking=False)
    assert kept.load().step == 4


def one_rank_fails(number: int) -> list[str]:
    """Let one file operation of rank 1's thread fail; what the calls raised on this rank."""
    paths = [tempfile.mkdtemp(prefix="checkpoints-") if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(paths)
    engine = dropping_engine(Offload.NONE)
    engine.train_batch([torch.ones(4, 6)])
    kept = checkpoints(Path(paths[0]), engine)
    kept.save(1)
    raised = []
    for finish in (kept.finish, lambda: kept.save(9)):
        with failing_files(number if dist.get_rank() == 1 else None, errno.EIO):
            kept.save(2, blocking=False)
            with pytest.raises(CheckpointFailed) as caught:
                finish()
        raised.append(str(caught.value))
        assert kept.steps() == [1]
    kept.save(3, blocking=False)  # the group is not poisoned, and nothing is left over
    kept.finish()
    assert kept.steps() == [1, 3]
    assert kept.load().step == 3
    dist.barrier()
    hidden = [path.name for path in Path(paths[0]).iterdir() if path.name.startswith(".")]
    assert hidden == []
    return raised


@pytest.mark.parametrize("number", range(1, 5))
def test_an_error_of_one_rank_is_raised_on_all_and_none_waits_for_ever(
    two_ranks: Ranks, number: int
) -> None:
    first, second = two_ranks.run(one_rank_fails, number)
    assert first == second
    assert all("rank 1 of 2: " in error and "Input/output error" in error for error in first)


def latest_of_two_ranks() -> None:
    paths = [tempfile.mkdtemp(prefix="checkpoints-") if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(paths)
    engine = dropping_engine(Offload.MANUAL)
    kept = checkpoints(Path(paths[0]), engine)
    kept.save(1, blocking=False)
    until(lambda: (Path(paths[0]) / "latest").exists())
    dist.barrier()
    assert not [p for p in (Path(paths[0]) / "step-00000001").iterdir() if p.suffix == ".written"]
    kept.finish()


def test_latest_changes_when_the_last_rank_has_written(two_ranks: Ranks) -> None:
    two_ranks.run(latest_of_two_ranks)


# The end of the process.

SCRIPT = """
import sys, torch
from placement import Checkpoints, PlacementManager, sim
sim.enable()
module = torch.nn.Linear(64, 64).to("sim")
torch.nn.init.constant_(module.weight, 3.0)
kept = Checkpoints(sys.argv[1], PlacementManager(module))
kept.save(1, blocking=False)
torch.nn.init.constant_(module.weight, 4.0)
{end}
"""


@pytest.mark.parametrize("end", ["", "raise SystemExit(3)", "1 / 0"])
def test_an_interpreter_that_ends_writes_what_is_under_way(
    device_type: str, tmp_path: Path, end: str
) -> None:
    if device_type != "sim":
        pytest.skip("the script runs on the simulated accelerator")
    subprocess.run(
        [sys.executable, "-c", SCRIPT.format(end=end), str(tmp_path)],
        capture_output=True,
        timeout=PATIENCE,
        check=False,
    )
    manager = plain_manager(torch.nn.Linear(64, 64))
    manager.optimizer = None
    Checkpoints(tmp_path, manager).load()
    assert torch.equal(manager.module.weight.cpu(), torch.full((64, 64), 3.0))
