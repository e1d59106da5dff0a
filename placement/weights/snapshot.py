"""A private copy of what training changes, on the host, and the way back to it.

A snapshot holds this rank's parameters and buffers (also those of no state dict), the optimizer's
state and the options of its groups, and the state of the gradient scaler. It holds no gradients, no
scheduler and no random numbers' state. It lies in ordinary host memory and shares nothing with the
module.

Restoring writes into the tensors that are there, wherever they rest, so that whoever refers to one
sees its value come back. Only the optimizer's state may be missing (before the first step there is
none) or be too much; then it is made, or dropped.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from placement.errors import ForeignSnapshot
from placement.owners import Owner
from placement.record import Record
from placement.residence import CPU
from placement.tensors import parts
from placement.torch_private import inner_tensors, rewrap


@dataclass(frozen=True)
class Snapshot:
    """What :meth:`placement.PlacementManager.snapshot` copied.

    Attributes:
        model: each parameter and buffer by name, this rank's shard of it. What is registered under
            two names is one tensor here, too.
        optimizer: the optimizer's state by parameter; None without an optimizer.
        options: the options of each of the optimizer's groups.
        scaler: the gradient scaler's state; None without one.
    """

    model: Mapping[str, torch.Tensor]
    optimizer: Mapping[Any, Any] | None
    options: tuple[Mapping[str, Any], ...]
    scaler: Mapping[str, Any] | None

    @property
    def nbytes(self) -> int:
        """Bytes of host memory that it holds."""
        held = {id(tensor): tensor for tensor in self.model.values()}
        held |= {id(tensor): tensor for tensor in _tensors_in(self.optimizer)}
        return sum(part.nbytes for tensor in held.values() for part in parts(tensor))


def take_snapshot(record: Record) -> Snapshot:
    """Copy what training changes to the host."""
    record.owner.settle()
    copies: dict[int, torch.Tensor] = {}
    model = {}
    for name, tensor in _model_tensors(record.owner):
        if id(tensor) not in copies:
            copies[id(tensor)] = _copy_on(CPU, tensor)
        model[name] = copies[id(tensor)]
    optimizer, scaler = record.optimizer, record.scaler
    return Snapshot(
        model=model,
        optimizer=None if optimizer is None else _copied(dict(optimizer.state)),
        options=() if optimizer is None else tuple(map(_options, optimizer.param_groups)),
        scaler=None if scaler is None else copy.deepcopy(scaler.state_dict()),
    )


def restore(record: Record, snapshot: Snapshot) -> None:
    """Write a snapshot's values back.

    Raises:
        ForeignSnapshot: it does not fit the module or the optimizer. Nothing was written.
    """
    present = dict(_model_tensors(record.owner))
    _refuse_what_does_not_fit(record, present, snapshot)
    record.owner.settle()
    with torch.no_grad():
        for name, tensor in present.items():
            _write(tensor, snapshot.model[name])
        if (optimizer := record.optimizer) is not None and snapshot.optimizer is not None:
            for parameter in optimizer.state.keys() - snapshot.optimizer.keys():
                del optimizer.state[parameter]
            for parameter, saved in snapshot.optimizer.items():
                now = optimizer.state.get(parameter)
                optimizer.state[parameter] = _written_back(now, saved, parameter)
            for group, options in zip(optimizer.param_groups, snapshot.options, strict=True):
                group |= {key: _written_back(group.get(key), v) for key, v in options.items()}
    if record.scaler is not None and snapshot.scaler:
        record.scaler.load_state_dict(copy.deepcopy(dict(snapshot.scaler)))


def _refuse_what_does_not_fit(
    record: Record, present: Mapping[str, torch.Tensor], snapshot: Snapshot
) -> None:
    amiss = [f"{name}: in one of the two only" for name in present.keys() ^ snapshot.model.keys()]
    amiss += [
        f"{name}: {_form(tensor)}, and {_form(saved)} in the snapshot"
        for name, tensor in present.items()
        if (saved := snapshot.model.get(name)) is not None and _form(tensor) != _form(saved)
    ]
    groups = 0 if record.optimizer is None else len(record.optimizer.param_groups)
    if groups != len(snapshot.options):
        amiss.append(f"optimizer: {groups} groups, and {len(snapshot.options)} in the snapshot")
    known = {id(parameter) for parameter in record.owner.parameters().values()}
    if any(isinstance(p, torch.Tensor) and id(p) not in known for p in snapshot.optimizer or ()):
        amiss.append("optimizer: state of parameters that are not the module's")
    if amiss:
        raise ForeignSnapshot(
            asked="restore()",
            state=f"{len(amiss)} tensors or groups differ from those of the snapshot",
            why="it is of another module, or the module changed since; nothing was written",
            tensors=amiss,
            instead="restore a snapshot of this module, as it is now",
        )


def _model_tensors(owner: Owner) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in owner.parameters().items():
        yield f"{name} (param)", parameter
    for name, buffer in owner.module.named_buffers(remove_duplicate=False):
        yield f"{name} (buffer)", buffer


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _copied(value) for key, value in group.items() if key != "params"}


def _form(tensor: torch.Tensor) -> list[tuple[tuple[int, ...], torch.dtype]]:
    return [(tuple(part.shape), part.dtype) for part in parts(tensor)]


def _copy_on(device: torch.device, tensor: torch.Tensor) -> torch.Tensor:
    """A copy of ``tensor`` with its bytes on ``device``; of a wrapper, with the same wrapper."""
    tensor = tensor.detach()
    if inner := inner_tensors(tensor):
        return rewrap(tensor, {name: _copy_on(device, value) for name, value in inner.items()})
    return tensor.to(device, copy=True)


def _write(tensor: torch.Tensor, saved: torch.Tensor) -> None:
    for target, source in zip(parts(tensor), parts(saved), strict=True):
        target.copy_(source)


# Nested values, as an optimizer's state has them.


def _copied(value: Any) -> Any:
    """A copy of a nested value, its tensors on the host. Keys that are tensors stay themselves."""
    if isinstance(value, torch.Tensor):
        return _copy_on(CPU, value)
    if isinstance(value, Mapping):
        return {key: _copied(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_copied(inner) for inner in value)
    return copy.deepcopy(value)


def _written_back(now: Any, saved: Any, parameter: Any = None) -> Any:
    """``saved``, in the tensors of ``now`` where they fit, in new ones otherwise.

    New ones are made beside ``parameter``, single numbers on the host.
    """
    if isinstance(saved, torch.Tensor):
        if isinstance(now, torch.Tensor) and _form(now) == _form(saved):
            _write(now, saved)
            return now
        beside = isinstance(parameter, torch.Tensor) and saved.ndim > 0
        return _copy_on(next(parts(parameter)).device if beside else CPU, saved)
    if isinstance(saved, Mapping):
        known = now if isinstance(now, Mapping) else {}
        return {key: _written_back(known.get(key), v, parameter) for key, v in saved.items()}
    if isinstance(saved, (list, tuple)):
        fits = isinstance(now, (list, tuple)) and len(now) == len(saved)
        pairs = zip(now if fits else [None] * len(saved), saved, strict=True)
        return type(saved)(_written_back(inner, value, parameter) for inner, value in pairs)
    return copy.deepcopy(saved)


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _tensors_in(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _tensors_in(inner)
