"""Weights as files: what is in them, how much host memory they take, and what an error leaves."""

from __future__ import annotations

import json
import sys
import tempfile
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from exported_modules import ON_TWO_RANKS, Make, fsdp2, fsdp2_under_the_policy, plain, reader, truth
from models import assert_equal, whereabouts

from placement import ExportFailed, MissingPackage, Placement, PlacementManager
from placement.testing import Ranks

safetensors = pytest.importorskip("safetensors.torch")


def written(directory: Path) -> dict[str, torch.Tensor]:
    """What all the files hold; of sharded ones each tensor is in the file that the index says."""
    held = {path.name: safetensors.load_file(path) for path in directory.glob("*.safetensors")}
    index = directory / "model.safetensors.index.json"
    if index.exists():
        for name, file in json.loads(index.read_text())["weight_map"].items():
            assert name in held[file]
    else:
        assert list(held) == ["model.safetensors"]
    return {name: tensor for tensors in held.values() for name, tensor in tensors.items()}


def tied_once() -> dict[str, torch.Tensor]:
    return {name: value for name, value in truth().items() if name != "head.weight"}


def saves_what_a_plain_twin_has(make: Make, directory: str) -> None:
    manager = PlacementManager(make())
    if manager.owner.managed is None:
        manager.offload()
    found = whereabouts(manager)
    place = Path(directory)
    manager.save_pretrained(place / "whole")
    manager.save_pretrained(place / "in parts", max_shard_bytes=300)
    manager.save_pretrained(place / "halved", dtype=torch.bfloat16, names=lambda n: f"model.{n}")
    assert whereabouts(manager) == found
    assert_equal(written(place / "whole"), tied_once())
    assert_equal(written(place / "in parts"), tied_once())
    parts = sorted((place / "in parts").glob("*.safetensors"))
    assert len(parts) > 2
    assert all(sum(t.nbytes for t in safetensors.load_file(p).values()) <= 300 for p in parts)
    half = reader().to(torch.bfloat16).state_dict()
    half.pop("head.weight")
    assert_equal(written(place / "halved"), {f"model.{n}": value for n, value in half.items()})
    dist.barrier()
    assert {path.name for path in place.iterdir()} == {"whole", "in parts", "halved"}


@pytest.mark.parametrize("make", ON_TWO_RANKS)
def test_files_hold_what_a_plain_twin_has(two_ranks: Ranks, make: Make, tmp_path: Path) -> None:
    two_ranks.run(saves_what_a_plain_twin_has, make, str(tmp_path))


def test_what_else_lies_in_the_directory_stays_and_older_weights_go(
    one_rank: str, tmp_path: Path
) -> None:
    place = tmp_path / "model"
    (place / "notes").mkdir(parents=True)
    (place / "tokenizer.json").write_text("{}")
    (place / "notes" / "one").write_text("1")
    for stale in ("model-00001-of-00009.safetensors", "pytorch_model.bin", "config.json"):
        (place / stale).write_text("another model's")
    manager = PlacementManager(plain())
    manager.save_pretrained(place, max_shard_bytes=300)
    manager.save_pretrained(place)
    assert {path.name for path in place.iterdir()} == {
        "model.safetensors",
        "tokenizer.json",
        "notes",
    }
    assert (place / "notes" / "one").read_text() == "1"
    assert_equal(written(place), tied_once())
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


# Failures.


def no_space(*args: Any, **kwargs: Any) -> None:
    raise OSError(28, "No space left on device")


def fails_on_all_and_leaves_the_old(directory: str, fails: str) -> None:
    place = Path(directory) / "model"
    manager = PlacementManager(fsdp2(), rest=Placement.CPU_MANUAL, deadline=60.0)
    found = whereabouts(manager)
    manager.save_pretrained(place)
    with manager.loading(), torch.no_grad():
        manager.module.narrow.weight.fill_(1)
    with pytest.MonkeyPatch.context() as patch:
        if fails == "a file can't be written":
            patch.setattr(safetensors, "save_file", no_space)
        else:
            patch.setattr(Path, "rename", no_space)
        with pytest.raises(ExportFailed, match=r"rank 0 failed: OSError: .*No space left") as said:
            manager.save_pretrained(place, max_shard_bytes=300)
    assert (said.value.__cause__ is not None) is (dist.get_rank() == 0)
    assert whereabouts(manager) == found
    dist.barrier()
    assert_equal(written(place), tied_once())
    assert [path.name for path in Path(directory).iterdir()] == ["model"]
    dist.barrier()
    manager.save_pretrained(place)  # the ranks are still in step
    assert written(place)["narrow.weight"].eq(1).all()


@pytest.mark.parametrize("fails", ["a file can't be written", "the place can't be taken"])
def test_a_save_that_fails_on_rank_0_fails_on_all_and_leaves_the_old_files(
    two_ranks: Ranks, tmp_path: Path, fails: str
) -> None:
    two_ranks.run(fails_on_all_and_leaves_the_old, str(tmp_path), fails)


def test_without_its_packages_a_save_is_refused_by_name(
    one_rank: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = PlacementManager(plain())
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(MissingPackage, match=r"huggingface_hub(.|\n)*pip install huggingface_hub"):
        manager.save_pretrained(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


# Host memory.


def holds_one_file_at_a_time() -> None:
    """Of the tensors that rank 0 was given, those of one file are alive when it is written."""
    alive: list[int] = []
    held_before: list[Any] = []
    write = safetensors.save_file

    def watched(tensors: dict[str, torch.Tensor], *args: Any, **kwargs: Any) -> None:
        alive.append(sum(reference() is not None for reference in held_before))
        held_before.extend(weakref.ref(tensor) for tensor in tensors.values())
        write(tensors, *args, **kwargs)

    manager = PlacementManager(fsdp2_under_the_policy())
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        patch.setattr(safetensors, "save_file", watched)
        manager.save_pretrained(Path(directory) / "model", max_shard_bytes=300)
    if dist.get_rank() == 0:
        assert len(alive) > 2
        assert set(alive) == {0}
    else:
        assert alive == []


def test_host_memory_is_that_of_one_file(two_ranks: Ranks) -> None:
    two_ranks.run(holds_one_file_at_a_time)
