"""Brings a checkpoint into a module, an optimizer and a scheduler, in two steps.

*Fitting* compares names, shapes, dtypes and classes, and lays out a buffer on the host for every
tensor that is to be read: of a distributed tensor, for this rank's shard. *Installing* takes place
when all ranks have found all they need. Up to there nothing has changed.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LRScheduler

from placement.checkpoint.form import (
    CONTENTS,
    DTYPES,
    Contents,
    OptimizerState,
    StoredTensor,
    damaged,
)
from placement.checkpoint.taking import (
    generators,
    kind_of,
    named_parameters,
    refuse_what_has_no_names,
    take_optimizer,
)
from placement.checkpoint.tree import Encoder, NotATree, decode
from placement.checkpoint.verifying import Stored
from placement.errors import CheckpointMismatch
from placement.manager import PlacementManager
from placement.torch_private import rewrap


class Incoming:
    """What a checkpoint brings to one rank.

    Args:
        stored: the checkpoint, verified.
        manager: of the module and the optimizer that it goes into.
        scheduler: that it goes into.
        rank, world_size: who this is.

    Attributes:
        buffers: for what has to be read, by the tensor's name in the checkpoint. Their memory is
            only taken when it is written to.
        random_state: whether random generators are restored: the checkpoint has them, for as many
            ranks as there are now, and for this kind of device.

    Raises:
        CheckpointMismatch: it does not fit.
        DamagedCheckpoint: its contents are no trees.
    """

    def __init__(
        self,
        stored: Stored,
        manager: PlacementManager,
        scheduler: LRScheduler | None,
        rank: int,
        world_size: int,
    ) -> None:
        refuse_what_has_no_names(manager)
        self.buffers: dict[str, torch.Tensor] = {}
        self._path = stored.path
        self._contents: Contents = stored.contents
        self._manager = manager
        self._scheduler = scheduler
        self._present: dict[str, torch.Tensor] = {}
        self._differences: list[str] = []
        try:
            self._fit_model()
            self._fit_optimizer()
            self._fit_scheduler()
            self._fit_plain(self._contents.extras)
            self._generators = self._own_generators(rank, world_size)
        except NotATree as error:
            raise damaged(stored.path / CONTENTS, str(error)) from error
        self.random_state = self._generators is not None
        self._refuse()

    def install(self) -> Any:
        """Put what was read into place.

        Returns:
            The extras.
        """
        contents = self._contents
        set_model_state_dict(
            self._manager.module,
            {
                name: decode(tree, self._read_own if _is_extra_state(name) else self._read)
                for name, tree in contents.model.items()
            },
        )
        if contents.optimizer is not None:
            self._install_optimizer(contents.optimizer)
        if contents.scheduler is not None and self._scheduler is not None:
            self._scheduler.load_state_dict(decode(contents.scheduler.state, self._read_own))
        extras = decode(contents.extras, self._read_own)
        if self._generators is not None:
            self._install_generators(decode(self._generators, self._read_own))
        return extras

    # Fitting.

    def _fit_model(self) -> None:
        present, saved = get_model_state_dict(self._manager.module), self._contents.model
        self._compare_names("model", present, saved)
        for name in present.keys() & saved.keys():
            value, tree = present[name], saved[name]
            stored = self._stored(tree)
            if _is_extra_state(name):
                self._fit_plain(tree)
            elif not isinstance(value, torch.Tensor) or stored is None:
                self._differences.append(f"model: {name} is no tensor in the checkpoint")
            elif self._compare(f"model: {name}", value, stored):
                self.buffers[tree["$tensor"]] = _host_memory_like(value, value.dtype)

    def _fit_optimizer(self) -> None:
        saved, optimizer = self._contents.optimizer, self._manager.optimizer
        if saved is None or optimizer is None:
            self._compare_presence("an optimizer", saved, optimizer)
            return
        self._compare_kinds("optimizer", saved.kind, optimizer)
        named = named_parameters(self._manager)
        names = {id(parameter): name for name, parameter in named.items()}
        groups = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
        if len(groups) != len(saved.groups):
            self._differences.append(
                f"optimizer: {len(saved.groups)} groups of parameters, here {len(groups)}"
            )
        for number, (group, present) in enumerate(zip(saved.groups, groups)):
            self._compare_names(f"optimizer: group {number}", present, group.parameters)
            self._fit_plain(group.options)
        self._compare_names("optimizer: state", named, [*named, *saved.state])
        encoder = Encoder()
        take_optimizer(self._manager, encoder)
        self._present = encoder.tensors
        for name in saved.state.keys() & named.keys():
            self._fit_state(name, saved.state[name], named[name])

    def _fit_state(self, name: str, tree: Any, parameter: torch.Tensor) -> None:
        """Lay out memory for one parameter's state: as it is distributed now, if there is any, else
        like the parameter, if it has its shape."""

        def lay_out(key: str) -> torch.Tensor:
            stored, present = self._contents.tensors[key], self._present.get(key)
            shape, dtype = torch.Size(stored.shape), DTYPES[stored.dtype]
            if present is not None and present.shape == shape:
                buffer = _host_memory_like(present, dtype)
            elif isinstance(parameter, DTensor) and parameter.shape == shape:
                buffer = _host_memory_like(parameter, dtype)
            else:
                buffer = torch.empty(shape, dtype=dtype)
                if stored.sharded and isinstance(parameter, DTensor):
                    self._differences.append(
                        f"optimizer: {key} was sharded in shape {stored.shape}, which is not that "
                        f"of {name}; take a step before loading it"
                    )
            self.buffers[key] = buffer
            return buffer

        decode(tree, lay_out)

    def _fit_scheduler(self) -> None:
        saved = self._contents.scheduler
        if saved is None or self._scheduler is None:
            self._compare_presence("a scheduler", saved, self._scheduler)
            return
        self._compare_kinds("scheduler", saved.kind, self._scheduler)
        self._fit_plain(saved.state)

    def _fit_plain(self, tree: Any) -> None:
        """Lay out memory for tensors that are no part of a module: each rank gets all of them."""

        def lay_out(key: str) -> torch.Tensor:
            stored = self._contents.tensors[key]
            self.buffers[key] = torch.empty(stored.shape, dtype=DTYPES[stored.dtype])
            return self.buffers[key]

        decode(tree, lay_out)

    def _own_generators(self, rank: int, world_size: int) -> Any | None:
        """The tree of this rank's random generators; None if the checkpoint has none that fit."""
        if len(self._contents.ranks) != world_size:
            return None
        tree, present = self._contents.ranks[rank], generators(self._manager.device)
        if not isinstance(tree, dict) or tree.keys() != present.keys():
            return None
        for name, value in present.items():
            if isinstance(value, torch.Tensor):
                stored = self._stored(tree[name])
                if stored is None or not _agree(value, stored):
                    raise NotATree(f"the generator {name} of rank {rank} is of another kind")
        self._fit_plain(tree)
        try:
            random.Random().setstate(decode(tree["python"], self._read))
        except (ValueError, TypeError, OverflowError) as error:
            raise NotATree(f"the generator python of rank {rank}: {error}") from error
        return tree

    def _compare_names(self, what: str, present: Iterable[str], saved: Iterable[str]) -> None:
        here, there = set(present), set(saved)
        self._differences += [f"{what}: {name} is not in the checkpoint" for name in here - there]
        self._differences += [f"{what}: {name} is in the checkpoint only" for name in there - here]

    def _compare(self, what: str, present: torch.Tensor, stored: StoredTensor) -> bool:
        if not _agree(present, stored):
            self._differences.append(
                f"{what} is {DTYPES[stored.dtype]} of {list(stored.shape)} in the checkpoint, and "
                f"{present.dtype} of {list(present.shape)} here"
            )
            return False
        return True

    def _compare_presence(self, what: str, saved: object, present: object) -> None:
        if saved is not None:
            self._differences.append(f"{what} is in the checkpoint only")
        if present is not None:
            self._differences.append(f"{what} is not in the checkpoint")

    def _compare_kinds(self, what: str, saved: str | None, present: object) -> None:
        if saved is not None and saved != kind_of(present):
            self._differences.append(f"{what}: {saved} in the checkpoint, {kind_of(present)} here")

    def _refuse(self) -> None:
        if self._differences:
            raise CheckpointMismatch(
                asked="loading a checkpoint",
                state=f"{self._path} and what it is to be loaded into differ in "
                f"{len(self._differences)} ways",
                why="a load is exact or does not happen",
                tensors=sorted(self._differences),
                instead="build the module, the optimizer and the scheduler as they were when it "
                "was saved; nothing was changed",
            )

    def _stored(self, tree: Any) -> StoredTensor | None:
        if isinstance(tree, dict) and "$tensor" in tree:
            return self._contents.tensors[tree["$tensor"]]
        return None

    # Installing.

    def _read(self, key: str) -> torch.Tensor:
        """A tensor that was read, to copy from: it may look into the checkpoint's file."""
        return self.buffers[key]

    def _read_own(self, key: str) -> torch.Tensor:
        """A tensor that was read, to be kept."""
        return self.buffers[key].clone()

    def _read_state(self, key: str) -> torch.Tensor:
        """A tensor of the optimizer's state: the one that is there, with the values that were read,
        if it fits, so that it takes no more memory than before."""
        buffer, present = self.buffers[key], self._present.get(key)
        if present is None or (present.shape, present.dtype) != (buffer.shape, buffer.dtype):
            return self._read_own(key)
        return present.copy_(buffer)

    @torch.no_grad()
    def _install_optimizer(self, saved: OptimizerState) -> None:
        optimizer = self._manager.optimizer
        assert optimizer is not None
        named = named_parameters(self._manager)
        numbers = {name: number for number, name in enumerate(named)}
        state = {name: decode(tree, self._read_state) for name, tree in saved.state.items()}
        optimizer.load_state_dict(
            {
                "state": {numbers[name]: value for name, value in state.items()},
                "param_groups": [
                    {
                        **_beside(decode(group.options, self._read_own), present),
                        # In the present order: torch pairs them with the parameters by place.
                        "params": [numbers[name] for name in named if name in group.parameters],
                    }
                    for group, present in zip(saved.groups, optimizer.param_groups, strict=True)
                ],
            }
        )
        # torch gives state its parameter's dtype; exact is as it was saved.
        for name, values in state.items():
            installed = optimizer.state[named[name]]
            for key, value in values.items():
                if isinstance(value, torch.Tensor) and installed[key].dtype != value.dtype:
                    installed[key] = value.to(installed[key].device)

    def _install_generators(self, state: dict[str, Any]) -> None:
        device = self._manager.device
        random.setstate(state["python"])
        torch.set_rng_state(state["cpu"])
        torch.get_device_module(device).set_rng_state(state[device.type], device)


def _agree(present: torch.Tensor, stored: StoredTensor) -> bool:
    return (present.dtype, tuple(present.shape)) == (DTYPES[stored.dtype], stored.shape)


def _is_extra_state(name: str) -> bool:
    """Whether an entry of a state dict is what a module's ``get_extra_state()`` returned: anything,
    also a tensor of another shape than the one that is there."""
    return name.rpartition(".")[2] == "_extra_state"


def _host_memory_like(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Memory on the host for ``tensor``; of a distributed one, for this rank's shard."""
    if isinstance(tensor, DTensor):
        described = torch.empty_like(tensor, dtype=dtype, device="meta", requires_grad=False)
        shard = torch.empty(tensor.to_local().shape, dtype=dtype)
        return rewrap(described, {"_local_tensor": shard})
    return torch.empty(tensor.shape, dtype=dtype)


def _beside(options: dict[str, Any], present: dict[str, Any]) -> dict[str, Any]:
    """``options`` of a group, its tensors on the devices of those that they replace."""
    return {
        name: value.to(present[name].device)
        if isinstance(value, torch.Tensor) and isinstance(present.get(name), torch.Tensor)
        else value
        for name, value in options.items()
    }
