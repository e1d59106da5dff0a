"""Turns a checkpoint of ``torch.distributed.checkpoint`` into one of ours.

This is the only place that unpickles anything: torch's ``.metadata`` is a pickle, and so is every
value in its files that is no tensor. Whoever made the checkpoint can therefore run code in this
process, and the caller has to say that they are trusted. What comes out has no pickle in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException, DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from placement.checkpoint.directory import CheckpointDirectory
from placement.checkpoint.form import (
    DTYPE_NAMES,
    Chunk,
    Contents,
    Manifest,
    OptimizerState,
    ParameterGroup,
    SchedulerState,
    StoredTensor,
)
from placement.checkpoint.form import tensor_file as name_of_file
from placement.checkpoint.together import quiet_without_a_group
from placement.checkpoint.tree import Encoder
from placement.checkpoint.writing import Publication, Share
from placement.errors import CheckpointFailed, ForeignCheckpoint

_STEPS = ("step", "steps", "global_step")
"""Under which of these names an engine may have saved the training step."""


def convert(source: Path, destination: Path, *, step: int | None = None) -> int:
    """Read a checkpoint of torch's, running whatever is in it, and add it to a directory of ours.

    It has to hold what ``get_state_dict`` returns under ``model``, and may hold the optimizer under
    ``optimizer`` and a scheduler's state under ``scheduler``. Everything else becomes extras.

    Args:
        source: its directory.
        destination: the directory that the converted one is added to, as the latest.
        step: the training step; None for the one that the checkpoint has.

    Returns:
        The step.

    Raises:
        ForeignCheckpoint: it is of another form, or has no step.
        CannotSave: it has a value that can't be written without a pickle.
        CheckpointFailed: it can't be read.
    """
    state = _state_in(source)
    step = _step_of(state, source) if step is None else step
    model = state.pop("model", None)
    if not isinstance(model, Mapping):
        raise _foreign(source, f"it has {', '.join(state) or 'nothing'}, and no model", "")
    encoder = Encoder()
    contents = Contents(
        tensors={},
        model={name: encoder.encode(value, "model", name) for name, value in model.items()},
        optimizer=_optimizer(state.pop("optimizer", None), encoder, source),
        scheduler=_scheduler(state.pop("scheduler", None), encoder),
        extras=encoder.encode(state or None, "extras"),
        ranks=[],
    )
    encoder.refuse()
    contents.tensors.update(_stored(encoder.tensors))
    directory = CheckpointDirectory(destination)
    draft = directory.begin(step)
    manifest = Manifest(
        step=step, world_size=1, torch=str(torch.__version__), placement={}, files={}
    )
    try:
        written = Share(draft.path, 0, 1, encoder.tensors).write()
        Publication(directory, draft, contents, manifest, keep=None).publish([written])
    except BaseException:
        directory.discard(draft)
        raise
    return step


def _state_in(source: Path) -> dict[str, Any]:
    """Everything in ``source``, on the CPU, nested as it was saved."""
    try:
        reader = FileSystemReader(source)
        metadata = reader.read_metadata()
        flat: dict[str, Any] = {
            name: torch.empty(entry.size, dtype=entry.properties.dtype)
            if isinstance(entry, TensorStorageMetadata)
            else None
            for name, entry in metadata.state_dict_metadata.items()
        }
        with quiet_without_a_group():
            dcp.load(
                flat,
                storage_reader=reader,
                planner=DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
                no_dist=True,
            )
    except (Exception, CheckpointException) as error:  # the latter is no Exception
        raise CheckpointFailed(
            asked=f"converting {source}",
            state=str(error).strip().splitlines()[-1],
            why="torch can't read it",
            instead="see whether it is a checkpoint of torch.distributed.checkpoint",
        ) from error
    return _nested(flat, metadata)


def _nested(flat: Mapping[str, Any], metadata: Metadata) -> dict[str, Any]:
    """Undo what torch's planner did: it joins the keys of nested dictionaries and lists."""
    paths: Mapping[str, tuple[str | int, ...]] = metadata.planner_data or {}
    root: dict[str | int, Any] = {}
    for name, value in flat.items():
        inner, path = root, paths.get(name, (name,))
        for key in path[:-1]:
            inner = inner.setdefault(key, {})
        inner[path[-1]] = value
    nested: dict[str, Any] = _with_lists(root)
    return nested


def _with_lists(value: Any) -> Any:
    """Dictionaries whose keys are numbers were lists."""
    if not isinstance(value, dict):
        return value
    inner = {key: _with_lists(item) for key, item in value.items()}
    if inner and all(type(key) is int for key in inner):
        return [inner[key] for key in sorted(inner)]
    return inner


def _step_of(state: dict[str, Any], source: Path) -> int:
    for name in _STEPS:
        if type(step := state.get(name)) is int:
            del state[name]
            return step
    raise _foreign(source, "it has no training step", "say which it is of: --step; or ")


def _optimizer(state: Any, encoder: Encoder, source: Path) -> OptimizerState | None:
    if state is None:
        return None
    try:
        values = {
            name: encoder.encode(value, "optimizer", "state", name)
            for name, value in state.get("state", {}).items()
        }
        groups = []
        for number, group in enumerate(state["param_groups"]):
            options = {name: value for name, value in group.items() if name != "params"}
            tree = encoder.encode(options, "optimizer", "groups", str(number))
            groups.append(ParameterGroup([*map(str, group["params"])], tree))
    except (AttributeError, KeyError, TypeError) as error:
        raise _foreign(source, "its optimizer is not what get_state_dict returns", "") from error
    return OptimizerState(None, values, groups)


def _scheduler(state: Any, encoder: Encoder) -> SchedulerState | None:
    return None if state is None else SchedulerState(None, encoder.encode(state, "scheduler"))


def _stored(tensors: Mapping[str, torch.Tensor]) -> dict[str, StoredTensor]:
    """Each tensor as one chunk in one file."""
    stored = {}
    for name, tensor in tensors.items():
        shape = tuple(tensor.shape)
        chunk = Chunk((0,) * len(shape), shape, name_of_file(0), name)
        stored[name] = StoredTensor(DTYPE_NAMES[tensor.dtype], shape, False, [chunk])
    return stored


def _foreign(source: Path, found: str, instead: str) -> ForeignCheckpoint:
    return ForeignCheckpoint(
        asked=f"converting {source}",
        state=found,
        why="what can be converted is a dictionary with what get_state_dict returns under model "
        "and optimizer, a scheduler's state, and the step",
        instead=instead + "load it with the engine that saved it, and save it with Checkpoints",
    )
