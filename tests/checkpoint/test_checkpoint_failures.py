"""Each file operation of a save fails, in each way that a file system has.

The points are enumerated: a save in which nothing fails counts them. After each failure the
checkpoint before is whole, the placement is the one that was found, and the next save works and
leaves nothing lying about.
"""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest
import torch
from file_faults import CHANGING, failing_files
from models import assert_equal, values, whereabouts
from torch.distributed.fsdp import FullyShardedDataParallel
from training import checkpoints, dropping, dropping_engine, plain_manager, stepped, whole_state

from engine import FSDPEngine, Offload
from placement import (
    CannotSave,
    CheckpointFailed,
    Checkpoints,
    ContradictoryOptions,
    NoCheckpoint,
    PlacementManager,
    Trace,
    find_compute_device,
)


def engine_after(step: int, offload: Offload) -> FSDPEngine:
    engine = dropping_engine(offload)
    stepped(engine.manager, step)
    return engine


def hidden(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir() if path.name.startswith(".")]


class Campaign:
    """Saves that fail, over a directory with a checkpoint of step 1."""

    def __init__(self, root: Path, offload: Offload, blocking: bool) -> None:
        self.before = root / "before"
        self.directory = root / "directory"
        self.blocking = blocking
        self.old = engine_after(1, offload)
        self.new = engine_after(2, offload)
        self.reader = dropping_engine(offload)
        checkpoints(self.before, self.old).save(1)

    def prepare(self) -> Checkpoints:
        shutil.rmtree(self.directory, ignore_errors=True)
        shutil.copytree(self.before, self.directory)
        (self.directory / ".step-00000007.writing-00c0ffee").mkdir()  # of a save that was killed
        return Checkpoints(
            self.directory, self.new.manager, scheduler=self.new.scheduler, max_to_keep=1
        )

    def operations(self) -> list[str]:
        kept = self.prepare()
        with failing_files() as plan:
            self.save(kept, 2)
        assert kept.steps() == [2]
        assert hidden(self.directory) == []
        return plan.seen

    def save(self, kept: Checkpoints, step: int) -> None:
        kept.save(step, blocking=self.blocking)
        kept.finish()

    def fail(self, number: int, error: int, lasting: bool) -> bool:
        """Let operation ``number`` fail; whether the save did."""
        kept = self.prepare()
        places, found = whereabouts(self.new.manager), values(self.new.manager.census())
        raised = ""
        with failing_files(number, error, lasting=lasting) as plan:
            try:
                self.save(kept, 2)
            except CheckpointFailed as failure:
                raised = str(failure)
        assert plan.fired
        failed = bool(raised)
        assert not failed or f"planned: {os.strerror(error)}" in raised
        assert whereabouts(self.new.manager) == places
        assert_equal(values(self.new.manager.census()), found)
        self.new.manager.verify()
        latest = self.require_whole(kept)
        if failed and not lasting:  # what failed is no checkpoint, unless it is the latest already
            assert kept.steps() == ([1] if latest == 1 else [1, 2])
        self.save(kept, 3)
        assert kept.steps() == [3]
        assert hidden(self.directory) == []
        self.require(None, self.new)
        return failed

    def require_whole(self, kept: Checkpoints) -> int:
        """Every step that is there, and the latest, is what was saved. Which is the latest."""
        steps = kept.steps()
        assert steps in ([1], [1, 2], [2])
        for step in steps:
            self.require(step, {1: self.old, 2: self.new}[step])
        latest = checkpoints(self.directory, self.reader).load().step
        assert latest in steps
        return latest

    def require(self, step: int | None, expected: FSDPEngine) -> None:
        checkpoints(self.directory, self.reader).load(step)
        assert_equal(values(self.reader.manager.census()), values(expected.manager.census()))


@pytest.mark.parametrize("blocking", [True, False], ids=["blocking", "not blocking"])
@pytest.mark.parametrize(
    ("error", "lasting"),
    [
        pytest.param(errno.ENOSPC, False, id="full once"),
        pytest.param(errno.ENOSPC, True, id="full from then on"),
        pytest.param(errno.EIO, False, id="input/output error"),
        pytest.param(errno.EROFS, True, id="read-only from then on"),
        pytest.param(errno.EACCES, False, id="not permitted"),
    ],
)
def test_a_save_that_fails_at_any_operation_leaves_the_checkpoint_before(
    one_rank: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    error: int,
    blocking: bool,
    lasting: bool,
) -> None:
    campaign = Campaign(tmp_path, Offload.MANUAL, blocking)
    operations = campaign.operations()
    assert {seen.split()[0] for seen in operations} >= set(CHANGING)
    failed = [campaign.fail(number, error, lasting) for number in range(1, len(operations) + 1)]
    with capsys.disabled():
        print(f" {len(failed)} operations failed, {failed.count(False)} absorbed", end="")
    absorbed = [seen for seen, raised in zip(operations, failed, strict=True) if not raised]
    # What only tidies up may fail: the next save does it.
    published = max(n for n, seen in enumerate(operations) if seen.startswith("replace"))
    tidying = operations[published + 3 :] + [s for s in operations if "c0ffee" in s]
    assert set(absorbed) <= set(tidying) | {s for s in absorbed if s.startswith("rmdir")}


def test_every_operation_of_a_load_can_fail_and_nothing_is_changed(
    one_rank: str, tmp_path: Path
) -> None:
    checkpoints(tmp_path, engine_after(1, Offload.NONE)).save(1)
    engine = engine_after(2, Offload.NONE)
    found = values(engine.manager.census())
    kept = checkpoints(tmp_path, engine)
    with failing_files() as plan:
        kept.load()
    for number in range(1, len(plan.seen) + 1):
        engine = engine_after(2, Offload.NONE)
        with failing_files(number, errno.EIO):
            with pytest.raises(Exception, match=r"planned|can't be read"):
                checkpoints(tmp_path, engine).load()
        assert_equal(values(engine.manager.census()), found)


def test_everything_is_on_the_disk_before_it_gets_its_name(
    device_type: str, tmp_path: Path
) -> None:
    kept = Checkpoints(tmp_path / "new", plain_manager())
    with failing_files() as plan:
        kept.save(1)
    seen = [line.replace(str(tmp_path), "") for line in plan.seen]
    draft = next(line.split()[1] for line in seen if line.startswith("rename"))

    def when(operation: str, of: str, after: int = 0) -> int:
        return seen.index(f"{operation} {of}", after)

    published = when("rename", draft)
    for name in ("rank-00000.safetensors", "contents.json", "manifest.json"):
        last_write = max(n for n, line in enumerate(seen) if line == f"write {draft}/{name}")
        assert last_write < when("fsync", f"{draft}/{name}") < when("fsync", draft) < published
    assert when("write", f"{draft}/contents.json") < when("write", f"{draft}/manifest.json")
    latest = max(n for n, line in enumerate(seen) if line.startswith("replace"))
    unfinished = seen[latest].split()[1]
    assert published < when("fsync", "/new", published) < when("write", unfinished)
    assert when("fsync", unfinished) < latest < when("fsync", "/new", latest)
    assert when("mkdir", "/new") < when("fsync", "")  # the directory above has its name


@pytest.mark.parametrize("step", [-1, 1.0, True, "1"])
def test_a_step_that_is_no_number_is_refused(
    device_type: str, tmp_path: Path, step: object
) -> None:
    with pytest.raises(CannotSave, match="its step is"):
        Checkpoints(tmp_path / "none", plain_manager()).save(step)  # type: ignore[arg-type]
    assert not (tmp_path / "none").exists()


def test_keeping_none_is_refused(device_type: str, tmp_path: Path) -> None:
    with pytest.raises(ContradictoryOptions, match="max_to_keep=0"):
        Checkpoints(tmp_path, plain_manager(), max_to_keep=0)


def test_fsdp1_is_refused_by_name(one_rank: str, tmp_path: Path) -> None:
    Checkpoints(tmp_path / "plain", plain_manager()).save(1)
    device = find_compute_device()
    manager = plain_manager(FullyShardedDataParallel(dropping().to(device), device_id=device))
    with pytest.raises(CannotSave, match="FSDP1"):
        Checkpoints(tmp_path / "none", manager).save(1)
    with pytest.raises(CannotSave, match="FSDP1"):
        Checkpoints(tmp_path / "plain", manager).load()
    assert not (tmp_path / "none").exists()


def test_an_optimizer_that_wraps_others_is_refused(device_type: str, tmp_path: Path) -> None:
    class Wrapper(torch.optim.Optimizer):
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            super().__init__(inner.param_groups, {})
            self.inner = inner

    module = dropping().to(device_type)
    optimizer = Wrapper(torch.optim.AdamW(module.parameters()))
    manager = PlacementManager(module, optimizer, trace=Trace())
    with pytest.raises(CannotSave, match=r"Wrapper wraps torch\.optim\.adamw\.AdamW"):
        Checkpoints(tmp_path / "none", manager).save(1)
    assert not (tmp_path / "none").exists()


def test_the_oldest_go_after_the_new_one_is_whole(device_type: str, tmp_path: Path) -> None:
    kept = Checkpoints(tmp_path, plain_manager(), max_to_keep=2)
    there = []
    for step in range(1, 5):
        with failing_files() as plan:
            kept.save(step)
        there.append(kept.steps())
        publishing = [n for n, s in enumerate(plan.seen) if s.startswith("replace")]
        removing = [n for n, s in enumerate(plan.seen) if s.startswith(("unlink", "rmdir"))]
        assert all(n > publishing[-1] for n in removing)
    assert there == [[1], [1, 2], [2, 3], [3, 4]]


def test_a_step_that_is_saved_again_replaces_the_first(device_type: str, tmp_path: Path) -> None:
    manager = plain_manager()
    kept = Checkpoints(tmp_path, manager)
    for number in range(3):
        stepped(manager, number)
        kept.save(7, extras=number)
        kept.save(9)
        kept.save(7, extras=number)
    assert kept.steps() == [7, 9]
    assert kept.load(7).extras == 2
    assert kept.load().step == 7
    assert len([path for path in tmp_path.iterdir() if path.is_dir()]) == 2


def test_only_our_own_left_overs_are_removed(device_type: str, tmp_path: Path) -> None:
    theirs = [".hidden", "notes.txt", ".step-1.writing-00000000", "step-00000003.old"]
    ours = [
        ".step-00000003.writing-0123abcd",
        ".step-00000003.1.removing-0123abcd",
        ".latest.writing-0123abcd",
    ]
    for name in theirs + ours:
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    Checkpoints(tmp_path, plain_manager()).save(1)
    found = {path.name for path in tmp_path.iterdir()}
    assert found == {*theirs, "latest", "step-00000001"}


def test_without_a_latest_the_highest_step_is_the_latest(device_type: str, tmp_path: Path) -> None:
    kept = Checkpoints(tmp_path, plain_manager())
    with pytest.raises(NoCheckpoint, match="has checkpoints of these steps: none"):
        kept.load()
    kept.save(1)
    kept.save(2)
    (tmp_path / "latest").unlink()  # as after a kill between the first renaming and it
    assert kept.load().step == 2


def test_a_step_that_is_not_there_is_refused_with_those_that_are(
    device_type: str, tmp_path: Path
) -> None:
    kept = Checkpoints(tmp_path, plain_manager())
    kept.save(3)
    kept.save(5)
    with pytest.raises(NoCheckpoint, match=r"of these steps: 3, 5\n.*none of step 4"):
        kept.load(4)


def test_a_save_is_refused_before_it_writes_anything(device_type: str, tmp_path: Path) -> None:
    manager = stepped(plain_manager())
    kept = Checkpoints(tmp_path / "new", manager)
    before = whole_state(manager)
    for extras in (object(), {"a": {1: lambda: None}}):
        with failing_files() as plan:
            with pytest.raises(Exception, match=r"extras"):
                kept.save(1, extras)
        assert plan.seen == []
    assert not (tmp_path / "new").exists()
    assert_equal(whole_state(manager), before)
