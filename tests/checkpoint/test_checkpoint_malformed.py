"""Checkpoints that are damaged, forged, foreign or of something else: each is refused with an error
that names the file, and nothing is changed."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from damage import (
    RANK_0,
    change_contents,
    change_header,
    change_manifest,
    cut,
    flip,
    vouch_for,
)
from models import adam, assert_equal
from torch import nn
from training import (
    checkpoints,
    decaying,
    dropping,
    dropping_engine,
    plain_manager,
    stepped,
    whole_state,
)

from engine import Offload
from placement import (
    CheckpointError,
    CheckpointMismatch,
    Checkpoints,
    DamagedCheckpoint,
    ForeignCheckpoint,
    NewerCheckpoint,
    NoCheckpoint,
    PlacementManager,
    Trace,
)
from placement.checkpoint.form import CONTENTS, MANIFEST
from placement.testing import Ranks

WEIGHT = "model/first.weight"
MOMENT = "optimizer/state/first.weight/exp_avg"


def chunk(contents: Any, name: str = WEIGHT) -> Any:
    return contents["tensors"][name]["chunks"][0]


def replace_with(path: Path, content: bytes) -> None:
    path.unlink()
    path.write_bytes(content)


def link_away(path: Path) -> None:
    path.rename(path.with_suffix(".real"))
    path.symlink_to(path.with_suffix(".real"))


def deeply_nested(checkpoint: Path) -> None:
    (checkpoint / CONTENTS).write_bytes(b"[" * 100_000 + b"]" * 100_000)
    vouch_for(checkpoint, CONTENTS)


def take_from_another_step(checkpoint: Path) -> None:
    shutil.copy(checkpoint.parent / "step-00000002" / RANK_0, checkpoint / RANK_0)


def rename_step(checkpoint: Path) -> None:
    shutil.rmtree(checkpoint)
    shutil.copytree(checkpoint.parent / "step-00000002", checkpoint)


def make_torchs(checkpoint: Path) -> None:
    shutil.rmtree(checkpoint)
    dcp.save({"model": {"first.weight": torch.zeros(7, 6)}}, checkpoint_id=checkpoint)


# What is done to the checkpoint of step 3, the error, and what it names.
DAMAGE: dict[str, tuple[Callable[[Path], object], type[CheckpointError], str]] = {
    "manifest missing": (lambda c: (c / MANIFEST).unlink(), DamagedCheckpoint, MANIFEST),
    "manifest empty": (lambda c: (c / MANIFEST).write_bytes(b""), DamagedCheckpoint, MANIFEST),
    "manifest cut off": (lambda c: cut(c / MANIFEST, 7), DamagedCheckpoint, MANIFEST),
    "manifest not JSON": (
        lambda c: (c / MANIFEST).write_bytes(b"\x80\x04N."),
        DamagedCheckpoint,
        MANIFEST,
    ),
    "manifest that is a pipe": (
        lambda c: ((c / MANIFEST).unlink(), os.mkfifo(c / MANIFEST)),
        DamagedCheckpoint,
        MANIFEST,
    ),
    "manifest of another format": (
        lambda c: change_manifest(c, lambda m: m.update(format="lightning"), seal=True),
        ForeignCheckpoint,
        MANIFEST,
    ),
    "manifest of a newer version": (
        lambda c: change_manifest(c, lambda m: m.update(version=2), seal=True),
        NewerCheckpoint,
        MANIFEST,
    ),
    "manifest of a newer version with more in it": (
        lambda c: change_manifest(c, lambda m: m.update(version=9, codec="zstd"), seal=False),
        NewerCheckpoint,
        MANIFEST,
    ),
    "manifest with a field that nobody knows": (
        lambda c: change_manifest(c, lambda m: m.update(hook="os.system"), seal=False),
        DamagedCheckpoint,
        MANIFEST,
    ),
    "manifest changed": (
        lambda c: change_manifest(c, lambda m: m.update(torch="1.0"), seal=False),
        DamagedCheckpoint,
        MANIFEST,
    ),
    "manifest with a negative size": (
        lambda c: change_manifest(c, lambda m: m["files"][RANK_0].update(bytes=-1), seal=False),
        DamagedCheckpoint,
        MANIFEST,
    ),
    "manifest with a way out": (
        lambda c: change_manifest(
            c, lambda m: m["files"].update({"../latest": m["files"][RANK_0]}), seal=True
        ),
        DamagedCheckpoint,
        MANIFEST,
    ),
    "manifest without a file": (
        lambda c: change_manifest(c, lambda m: m["files"].pop(RANK_0), seal=True),
        DamagedCheckpoint,
        MANIFEST,
    ),
    "manifest of more ranks": (
        lambda c: change_manifest(c, lambda m: m.update(world_size=2), seal=True),
        DamagedCheckpoint,
        MANIFEST,
    ),
    "another step's checkpoint": (rename_step, DamagedCheckpoint, MANIFEST),
    "contents missing": (lambda c: (c / CONTENTS).unlink(), DamagedCheckpoint, CONTENTS),
    "contents empty": (lambda c: (c / CONTENTS).write_bytes(b""), DamagedCheckpoint, CONTENTS),
    "contents cut off": (lambda c: cut(c / CONTENTS, 1), DamagedCheckpoint, CONTENTS),
    "contents with a bit flipped": (
        lambda c: flip(c / CONTENTS, 100),
        DamagedCheckpoint,
        CONTENTS,
    ),
    "contents nested without end": (deeply_nested, DamagedCheckpoint, CONTENTS),
    "contents with an unknown kind of value": (
        lambda c: change_contents(c, lambda d: d.update(extras={"$pickle": "gASVAA=="})),
        DamagedCheckpoint,
        CONTENTS,
    ),
    "contents without a tensor": (
        lambda c: change_contents(c, lambda d: d["tensors"].pop(WEIGHT)),
        DamagedCheckpoint,
        CONTENTS,
    ),
    "contents with chunks that overlap": (
        lambda c: change_contents(c, lambda d: d["tensors"][WEIGHT]["chunks"].append(chunk(d))),
        DamagedCheckpoint,
        CONTENTS,
    ),
    "contents with a chunk that sticks out": (
        lambda c: change_contents(c, lambda d: chunk(d).update(offsets=[1, 0])),
        DamagedCheckpoint,
        CONTENTS,
    ),
    "contents with a hole": (
        lambda c: change_contents(c, lambda d: chunk(d).update(sizes=[6, 6])),
        DamagedCheckpoint,
        CONTENTS,
    ),
    "contents with a chunk of other dimensions": (
        lambda c: change_contents(c, lambda d: chunk(d).update(sizes=[42], offsets=[0])),
        DamagedCheckpoint,
        CONTENTS,
    ),
    "contents that claim an enormous tensor": (
        lambda c: change_contents(
            c,
            lambda d: (
                d["tensors"][WEIGHT].update(shape=[2**40, 6]),
                chunk(d).update(sizes=[2**40, 6]),
            ),
        ),
        DamagedCheckpoint,
        RANK_0,
    ),
    "contents with an unknown dtype": (
        lambda c: change_contents(c, lambda d: d["tensors"][WEIGHT].update(dtype="F1")),
        DamagedCheckpoint,
        CONTENTS,
    ),
    "contents with a chunk in a file elsewhere": (
        lambda c: change_contents(c, lambda d: chunk(d).update(file="../../etc/passwd")),
        DamagedCheckpoint,
        CONTENTS,
    ),
    "contents of more ranks": (
        lambda c: change_contents(c, lambda d: d["ranks"].append({})),
        DamagedCheckpoint,
        CONTENTS,
    ),
    "contents with a generator of another kind": (
        lambda c: change_contents(c, lambda d: d["ranks"][0].update(cpu={"$tensor": WEIGHT})),
        DamagedCheckpoint,
        CONTENTS,
    ),
    "contents with a generator that is none": (
        lambda c: change_contents(c, lambda d: d["ranks"][0].update(python={"$tuple": [3]})),
        DamagedCheckpoint,
        CONTENTS,
    ),
    "tensors missing": (lambda c: (c / RANK_0).unlink(), DamagedCheckpoint, RANK_0),
    "tensors empty": (lambda c: (c / RANK_0).write_bytes(b""), DamagedCheckpoint, RANK_0),
    "tensors cut off": (lambda c: cut(c / RANK_0, 1), DamagedCheckpoint, RANK_0),
    "tensors with more behind them": (
        lambda c: (c / RANK_0).write_bytes((c / RANK_0).read_bytes() + b"\0"),
        DamagedCheckpoint,
        RANK_0,
    ),
    "tensors with a bit of the header flipped": (
        lambda c: flip(c / RANK_0, 30),
        DamagedCheckpoint,
        RANK_0,
    ),
    "tensors with a bit of the last value flipped": (
        lambda c: flip(c / RANK_0, -1),
        DamagedCheckpoint,
        RANK_0,
    ),
    "tensors behind a link": (lambda c: link_away(c / RANK_0), DamagedCheckpoint, RANK_0),
    "tensors that are a directory": (
        lambda c: ((c / RANK_0).unlink(), (c / RANK_0).mkdir()),
        DamagedCheckpoint,
        RANK_0,
    ),
    "tensors that are a pipe": (
        lambda c: ((c / RANK_0).unlink(), os.mkfifo(c / RANK_0)),
        DamagedCheckpoint,
        RANK_0,
    ),
    "tensors of another step": (take_from_another_step, DamagedCheckpoint, RANK_0),
    "tensors that are none, and are vouched for": (
        lambda c: ((c / RANK_0).write_bytes(b"\x80\x04N." * 64), vouch_for(c, RANK_0)),
        DamagedCheckpoint,
        RANK_0,
    ),
    "tensors under another name": (
        lambda c: change_header(c, lambda h: h.update(strange=h.pop(WEIGHT))),
        DamagedCheckpoint,
        RANK_0,
    ),
    "tensors of another dtype": (
        lambda c: change_header(c, lambda h: h[WEIGHT].update(dtype="I32")),
        DamagedCheckpoint,
        RANK_0,
    ),
    "tensors that overlap in the file": (
        lambda c: change_header(
            c, lambda h: h[WEIGHT].update(data_offsets=h[MOMENT]["data_offsets"])
        ),
        DamagedCheckpoint,
        RANK_0,
    ),
    "a checkpoint of torch": (make_torchs, ForeignCheckpoint, "step-00000003"),
    "an empty directory": (
        lambda c: (shutil.rmtree(c), c.mkdir()),
        DamagedCheckpoint,
        MANIFEST,
    ),
    "latest that names nothing": (
        lambda c: (c.parent / "latest").write_text("step-00000099\n"),
        NoCheckpoint,
        "these steps: 2, 3",
    ),
    "latest that is no text": (
        lambda c: (c.parent / "latest").write_bytes(bytes(range(256))),
        NoCheckpoint,
        "these steps: 2, 3",
    ),
    "latest that names a way out": (
        lambda c: (c.parent / "latest").write_text("../../elsewhere\n"),
        NoCheckpoint,
        "these steps: 2, 3",
    ),
    "contents without a parameter": (
        lambda c: change_contents(c, lambda d: d["model"].pop("first.weight")),
        CheckpointMismatch,
        "model: first.weight is not in the checkpoint",
    ),
    "contents with something else for a parameter": (
        lambda c: change_contents(c, lambda d: d["model"].update({"first.weight": [1, 2]})),
        CheckpointMismatch,
        "model: first.weight is no tensor in the checkpoint",
    ),
    "contents with state of a parameter that is not here": (
        lambda c: change_contents(c, lambda d: d["optimizer"]["state"].update(third={})),
        CheckpointMismatch,
        "optimizer: state: third is in the checkpoint only",
    ),
    "contents of another optimizer": (
        lambda c: change_contents(c, lambda d: d["optimizer"].update(kind="builtins.eval")),
        CheckpointMismatch,
        "optimizer: builtins.eval in the checkpoint, torch.optim.adamw.AdamW here",
    ),
}


@pytest.fixture(scope="module")
def undamaged(device_type: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with checkpoints of steps 2 and 3, the latest."""
    directory = tmp_path_factory.mktemp("undamaged")
    manager = stepped(plain_manager())
    kept = Checkpoints(directory, manager, scheduler=decaying(manager.optimizer))
    kept.save(2)
    stepped(manager, 1)
    kept.save(3, {"note": torch.arange(3)})
    return directory


def unchanged_after(load: Callable[[], object], manager: PlacementManager) -> CheckpointError:
    """The error of a load, after which module, optimizer and generators are as they were."""
    found = whole_state(manager)
    generators = random.getstate(), torch.get_rng_state()
    assert manager.optimizer is not None
    rates = [dict(group, params=None) for group in manager.optimizer.param_groups]
    places = {k: str(v) for k, v in manager.placements.items()}
    with pytest.raises(CheckpointError) as caught:
        load()
    assert_equal(whole_state(manager), found)
    assert [dict(group, params=None) for group in manager.optimizer.param_groups] == rates
    assert random.getstate() == generators[0]
    assert torch.equal(torch.get_rng_state(), generators[1])
    assert {k: str(v) for k, v in manager.placements.items()} == places
    manager.verify()
    return caught.value


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("name", DAMAGE)
@pytest.mark.parametrize("fresh", [False, True], ids=["trained", "fresh"])
def test_a_malformed_checkpoint_is_refused_by_name_and_changes_nothing(
    undamaged: Path, tmp_path: Path, name: str, fresh: bool
) -> None:
    directory = tmp_path / "copy"
    shutil.copytree(undamaged, directory)
    damage, error, told = DAMAGE[name]
    damage(directory / "step-00000003")
    manager = plain_manager() if fresh else stepped(plain_manager(), 5)
    kept = Checkpoints(directory, manager, scheduler=decaying(manager.optimizer))
    raised = unchanged_after(kept.load, manager)
    assert type(raised) is error, raised
    assert told in str(raised)
    if name != "another step's checkpoint":
        kept.load(2)  # the other one is as good as before


def test_any_bit_of_any_file_that_flips_is_noticed(undamaged: Path, tmp_path: Path) -> None:
    directory = tmp_path / "copy"
    shutil.copytree(undamaged, directory)
    manager = stepped(plain_manager(), 5)
    kept = Checkpoints(directory, manager, scheduler=decaying(manager.optimizer))
    generator = random.Random(0)
    for path in sorted((directory / "step-00000003").iterdir()):
        content = path.read_bytes()
        places = range(len(content))
        for place in places if path.name == MANIFEST else generator.sample(places, 60):
            changed = bytearray(content)
            changed[place] ^= 1 << generator.randrange(8)
            path.write_bytes(changed)
            with pytest.raises(CheckpointError) as caught:
                kept.load()
            assert path.name in str(caught.value), (place, str(caught.value))
        path.write_bytes(content)
    kept.load()


# What does not fit.


class Other(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.extra = nn.Linear(2, 2, bias=False)
        self.second = nn.Linear(7, 3).double()


def other_module(device: str) -> PlacementManager:
    module = Other().to(device)
    return PlacementManager(module, adam(module.parameters()), trace=Trace())


def other_groups(device: str) -> PlacementManager:
    module = dropping().to(device)
    optimizer = torch.optim.AdamW(
        [{"params": [*module.first.parameters()]}, {"params": [*module.second.parameters()]}]
    )
    return PlacementManager(module, optimizer, trace=Trace())


def other_optimizer(device: str) -> PlacementManager:
    module = dropping().to(device)
    return PlacementManager(
        module, torch.optim.SGD(module.parameters(), momentum=0.9), trace=Trace()
    )


@pytest.mark.parametrize(
    ("managed", "told"),
    [
        (
            other_module,
            [
                "model: first.weight is torch.float32 of [7, 6] in the checkpoint, and "
                "torch.float32 of [8, 6] here",
                "model: second.bias is torch.float32 of [3] in the checkpoint, and torch.float64",
                "model: extra.weight is not in the checkpoint",
                "model: scale is in the checkpoint only",
            ],
        ),
        (
            other_groups,
            [
                "optimizer: 1 groups of parameters, here 2",
                "optimizer: group 0: second.bias is in the checkpoint only",
            ],
        ),
        (
            other_optimizer,
            ["optimizer: torch.optim.adamw.AdamW in the checkpoint, torch.optim.sgd"],
        ),
    ],
)
def test_a_checkpoint_of_something_else_is_refused_with_all_that_differs(
    undamaged: Path,
    device_type: str,
    managed: Callable[[str], PlacementManager],
    told: list[str],
) -> None:
    manager = stepped(managed(device_type))
    kept = Checkpoints(undamaged, manager, scheduler=decaying(manager.optimizer))
    raised = unchanged_after(kept.load, manager)
    assert isinstance(raised, CheckpointMismatch)
    for line in told:
        assert any(line in found for found in raised.tensors), raised.tensors


def test_a_scheduler_on_one_side_only_is_refused(undamaged: Path, tmp_path: Path) -> None:
    manager = plain_manager()
    without = Checkpoints(undamaged, manager)
    raised = unchanged_after(without.load, manager)
    assert "a scheduler is in the checkpoint only" in raised.tensors
    Checkpoints(tmp_path, manager).save(1)
    with_one = Checkpoints(tmp_path, manager, scheduler=decaying(manager.optimizer))
    raised = unchanged_after(with_one.load, manager)
    assert "a scheduler is not in the checkpoint" in raised.tensors


# Several ranks.


def one_rank_finds_it() -> list[str]:
    """Damage the file that each rank verifies, in turn: all ranks refuse alike, and go on."""
    paths = [tempfile.mkdtemp(prefix="checkpoints-") if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(paths)
    engine = dropping_engine(Offload.NONE)
    engine.train_batch([torch.ones(4, 6)])
    kept = checkpoints(Path(paths[0]), engine)
    kept.save(1)
    engine.train_batch([torch.ones(4, 6)])
    told = []
    for rank in range(dist.get_world_size()):
        path = Path(paths[0]) / "step-00000001" / f"rank-{rank:05d}.safetensors"
        if dist.get_rank() == 0:
            flip(path, -1)
        dist.barrier()
        raised = unchanged_after(kept.load, engine.manager)
        assert type(raised) is DamagedCheckpoint
        assert path.name in str(raised)
        told.append(str(raised))
        dist.barrier()
        if dist.get_rank() == 0:
            flip(path, -1)
        dist.barrier()
    kept.load()
    return told


def test_a_bad_file_that_one_rank_finds_is_refused_by_all(two_ranks: Ranks) -> None:
    first, second = two_ranks.run(one_rank_finds_it)
    assert first == second


def other_extras(in_a_tensor: bool) -> str:
    engine = dropping_engine(Offload.NONE)
    rank = torch.tensor(dist.get_rank()) if in_a_tensor else dist.get_rank()
    with pytest.raises(Exception, match="extras") as caught:
        checkpoints(Path("never written"), engine).save(1, {"rank": rank})
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize("in_a_tensor", [False, True], ids=["number", "tensor"])
def test_extras_that_differ_from_rank_to_rank_are_refused(
    two_ranks: Ranks, in_a_tensor: bool
) -> None:
    first, second = two_ranks.run(other_extras, in_a_tensor)
    assert first == second
    assert first.startswith("RanksDisagree")
    assert not Path("never written").exists()
