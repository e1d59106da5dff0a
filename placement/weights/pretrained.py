"""Weights as a directory that ``transformers`` and ``peft`` load.

Written by rank 0, one file after the other, each gathered into host memory and written before the
next one is begun. The directory is built beside its place and put there when it is complete, so
that an error leaves what was there before.

``safetensors`` writes the files, ``huggingface_hub`` decides what goes into which. Both are
optional packages.
"""

from __future__ import annotations

import copy
import importlib
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from placement.errors import ExportFailed, MissingPackage
from placement.journal import one_line
from placement.weights.gather import Weight
from placement.weights.lora import active_adapter, peft_model

Gather = Callable[[Sequence[Weight]], Iterator[tuple[str, torch.Tensor]]]
"""Gathers weights in full, by all ranks in step."""

_OF_A_SAVE = (
    "*.safetensors",
    "*.safetensors.index.json",
    "pytorch_model*.bin",
    "pytorch_model.bin.index.json",
    "adapter_model.bin",
    "config.json",
    "generation_config.json",
    "adapter_config.json",
)
"""Files that describe weights. Those of an earlier save are not carried over to the next."""


def write_pretrained(
    module: nn.Module,
    weights: Sequence[Weight],
    directory: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None,
    max_shard_bytes: int,
    gather: Gather,
) -> None:
    """Write ``weights``, and the configuration of the model in ``module`` if it has one.

    All ranks call it; rank 0 writes. What else lies in ``directory`` (a tokenizer) stays.

    Args:
        module: the model, or one wrapped by something.
        weights: what to write, the same on all ranks.
        directory: the place.
        dtype: what floating-point weights are converted to; None leaves them.
        max_shard_bytes: the most bytes of weights in one file, unless a single weight has more.
        gather: gathers them.

    Raises:
        ExportFailed: rank 0 could not write. Raised on all ranks.
        MissingPackage: safetensors or huggingface_hub is not installed.
    """

    def configure(built: Path) -> None:
        if (model := _configured(module)) is not None:
            _write_config(model, weights, dtype, built)

    pattern = "model{suffix}.safetensors"
    _write(weights, Path(directory), dtype, max_shard_bytes, pattern, gather, configure)


def write_adapter(
    module: nn.Module,
    weights: Sequence[Weight],
    directory: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None,
    gather: Gather,
) -> None:
    """Write the active adapter of the peft model in ``module``, in the one file from which
    ``PeftModel.from_pretrained`` reads it. Otherwise as :func:`write_pretrained`."""
    _, model = peft_model(module)
    config = copy.copy(model.peft_config[active_adapter(model)])
    config.inference_mode = True
    if config.base_model_name_or_path is None:
        config.base_model_name_or_path = getattr(model.get_base_model(), "name_or_path", None)

    one_file = 1 + sum(weight.shape.numel() * weight.dtype(dtype).itemsize for weight in weights)
    pattern = "adapter_model{suffix}.safetensors"
    _write(weights, Path(directory), dtype, one_file, pattern, gather, config.save_pretrained)


def _write(
    weights: Sequence[Weight],
    directory: Path,
    dtype: torch.dtype | None,
    max_shard_bytes: int,
    pattern: str,
    gather: Gather,
    configure: Callable[[Path], None],
) -> None:
    split = _package("huggingface_hub").split_torch_state_dict_into_shards(
        {w.name: torch.empty(w.shape, dtype=w.dtype(dtype), device="meta") for w in weights},
        filename_pattern=pattern,
        max_shard_size=max_shard_bytes,
    )
    save_file = _package("safetensors.torch").save_file
    by_name = {weight.name: weight for weight in weights}
    place = directory.resolve()
    built = place.with_name(f".{place.name}.{uuid.uuid4().hex}")
    rank_0 = _RankZero(f"writing {place}")

    def finish() -> None:
        if split.is_sharded:
            _write_index(split, built)
        configure(built)
        _carry_over(place, built)
        _put_in_place(built, place)

    try:
        rank_0.does(built.mkdir, parents=True)
        for file, names in split.filename_to_tensors.items():
            held: dict[str, torch.Tensor] = {}
            for name, whole in gather([by_name[name] for name in names]):
                rank_0.does(_hold, held, name, whole)
            rank_0.does(save_file, held, built / file, metadata={"format": "pt"})
            rank_0.tells()
        rank_0.does(finish)
        rank_0.tells()
    finally:
        shutil.rmtree(built, ignore_errors=True)


class _RankZero:
    """What rank 0 does alone while the others wait for it at the next gather.

    Its errors are kept until it tells of them, so that all ranks leave the collectives together.

    Args:
        asked: what it does, as errors name it.
    """

    def __init__(self, asked: str) -> None:
        self._asked = asked
        self._grouped = dist.is_initialized()
        self._works = not self._grouped or dist.get_rank() == 0
        self._failure: Exception | None = None

    def does(self, work: Callable[..., object], *args: object, **options: object) -> None:
        """Do ``work`` on rank 0, unless something failed before."""
        if self._works and self._failure is None:
            try:
                work(*args, **options)
            except Exception as error:
                self._failure = error

    def tells(self) -> None:
        """
        Raises:
            ExportFailed: rank 0 failed. Raised on all ranks.
        """
        told = [one_line(self._failure) if self._failure is not None else None]
        if self._grouped:
            dist.broadcast_object_list(told, src=0)
        if (failure := told[0]) is not None:
            raise ExportFailed(
                asked=self._asked,
                state=f"rank 0 failed: {failure}",
                why="all ranks stop where one can't go on",
                instead="make room, or write elsewhere; what was there before is there still",
            ) from self._failure


def _hold(held: dict[str, torch.Tensor], name: str, whole: torch.Tensor) -> None:
    held[name] = whole.cpu().contiguous()


def _write_index(split: Any, built: Path) -> None:
    index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
    text = json.dumps(index, indent=2) + "\n"
    (built / "model.safetensors.index.json").write_text(text, encoding="utf-8")


# The model's configuration.


def _configured(module: nn.Module) -> Any | None:
    """The model in ``module`` that has a configuration which it can save; None without one."""
    for submodule in module.modules():
        config = vars(submodule).get("config")
        by_peft = type(submodule).__module__.startswith("peft.")  # it shows its model's as its own
        if hasattr(config, "save_pretrained") and not by_peft:
            return submodule
    return None


def _write_config(
    model: Any, weights: Sequence[Weight], dtype: torch.dtype | None, built: Path
) -> None:
    """Write the model's configuration as its own ``save_pretrained`` would: with its class, which
    rollout engines choose their model by, and the dtype of what was written."""
    config = copy.deepcopy(model.config)
    config.architectures = [_own_class(model).__name__]
    if floating := [d for w in weights if (d := w.dtype(dtype)).is_floating_point]:
        config.dtype = floating[0]
    config.save_pretrained(built)
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.save_pretrained(built)


def _own_class(model: nn.Module) -> type:
    """The model's class, before ``fully_shard`` put one of its own in front of it."""
    return next(cls for cls in type(model).__mro__ if not issubclass(cls, FSDPModule))


# Files.


def _carry_over(place: Path, built: Path) -> None:
    """Put into ``built`` what lies in ``place`` and belongs to no save."""
    for found in place.iterdir() if place.is_dir() else ():
        if any(fnmatchcase(found.name, pattern) for pattern in _OF_A_SAVE):
            continue
        if found.is_dir():
            shutil.copytree(found, built / found.name, copy_function=_link, dirs_exist_ok=True)
        else:
            _link(found, built / found.name)


def _link(source: str | Path, target: str | Path) -> None:
    """A second name for a file; a copy where the file system knows no such thing."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _put_in_place(built: Path, place: Path) -> None:
    """Rename ``built`` to ``place``. What was there before goes, or stays if that fails."""
    if not place.exists():
        built.rename(place)
        return
    before = place.with_name(f"{built.name}.before")
    place.rename(before)
    try:
        built.rename(place)
    except BaseException:
        before.rename(place)
        raise
    shutil.rmtree(before)


def _package(name: str) -> Any:
    """
    Raises:
        MissingPackage: ``name`` can't be imported.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingPackage(
            asked="save_pretrained()",
            state=f"the package {name.partition('.')[0]} can't be imported: {error}",
            why="the files are written with it",
            instead="pip install huggingface_hub safetensors",
        ) from error
