"""What of a module and its optimizer goes into a checkpoint, and under which names.

Names are those that parameters have in the module before anything wraps it: torch's
``get_model_state_dict`` and ``placement/names.py`` leave the same parts out. So what one wrapper
saved another can load.

Unlike ``get_optimizer_state_dict`` this changes nothing: torch's function takes a step with an
optimizer that has no state yet, after which its step counters are at 1.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
import xxhash
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LRScheduler

from placement.checkpoint.form import OptimizerState, ParameterGroup, SchedulerState
from placement.checkpoint.tensor_file import bytes_of
from placement.checkpoint.tree import Encoder, tensors_in
from placement.errors import CannotSave
from placement.manager import PlacementManager
from placement.optimizer import optimizers_in
from placement.owners.fsdp1 import FSDP1Module


@dataclass(frozen=True)
class Taken:
    """What one rank has for a checkpoint.

    Attributes:
        tensors: by name. Those of the model and the optimizer are the tensors themselves.
        model, optimizer, scheduler, extras: the trees, as ``contents.json`` has them.
        generators: the tree of this rank's random generators.
    """

    tensors: dict[str, torch.Tensor]
    model: dict[str, Any]
    optimizer: OptimizerState | None
    scheduler: SchedulerState | None
    extras: Any
    generators: Any

    def digests(self) -> dict[str, str]:
        """What has to be the same on all ranks, by its name, as checksums. Of the extras that is
        the values of tensors, too, unless they are distributed."""
        same = {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "extras": self.extras,
        }
        digests = {name: xxhash.xxh3_64(msgspec.json.encode(tree)) for name, tree in same.items()}
        for name in tensors_in(self.extras):
            if not isinstance(self.tensors[name], DTensor):
                for block in bytes_of(self.tensors[name]):
                    digests["extras"].update(block)
        return {name: digest.hexdigest() for name, digest in digests.items()}


def take(manager: PlacementManager, scheduler: LRScheduler | None, extras: Any, rank: int) -> Taken:
    """Everything that is to be saved.

    Args:
        manager: of the module and the optimizer.
        scheduler: its state goes along.
        extras: anything that ``tree.py`` can encode.
        rank: whose random generators these are.

    Raises:
        CannotSave: something of it can't come back exactly.
    """
    refuse_what_has_no_names(manager)
    encoder = Encoder()
    taken = Taken(
        tensors=encoder.tensors,
        model={
            name: encoder.encode(value, "model", name)
            for name, value in get_model_state_dict(manager.module).items()
        },
        optimizer=take_optimizer(manager, encoder),
        scheduler=_take_scheduler(scheduler, encoder),
        extras=encoder.encode(extras, "extras"),
        generators=encoder.encode(generators(manager.device), "ranks", str(rank)),
    )
    encoder.refuse()
    return taken


def take_optimizer(manager: PlacementManager, encoder: Encoder) -> OptimizerState | None:
    """The optimizer's state, with names in the place of the numbers that torch gives parameters.

    Raises:
        CannotSave: it has state for something that is no parameter.
    """
    optimizer = manager.optimizer
    if optimizer is None:
        return None
    named = named_parameters(manager)
    known = {id(parameter) for parameter in named.values()}
    if strange := [type(key).__name__ for key in optimizer.state if id(key) not in known]:
        raise CannotSave(
            asked="saving a checkpoint",
            state=f"{kind_of(optimizer)} has state of {len(strange)} things that are in none of "
            "its groups",
            why="state is saved by the name of its parameter",
            tensors=strange,
            instead="save the optimizer's state through extras, in a form of your own",
        )
    packed, names = optimizer.state_dict(), list(named)
    return OptimizerState(
        kind_of(optimizer),
        {
            names[number]: encoder.encode(state, "optimizer", "state", names[number])
            for number, state in packed["state"].items()
        },
        [
            ParameterGroup(
                [names[number] for number in group["params"]],
                encoder.encode(_options(group), "optimizer", "groups", str(index)),
            )
            for index, group in enumerate(packed["param_groups"])
        ],
    )


def named_parameters(manager: PlacementManager) -> dict[str, nn.Parameter]:
    """The optimizer's parameters by name, in the order in which torch numbers them."""
    assert manager.optimizer is not None
    found = reversed(list(manager.owner.parameters().items()))
    names = {id(parameter): name for name, parameter in found}
    return {
        names[id(parameter)]: parameter
        for group in manager.optimizer.param_groups
        for parameter in group["params"]
    }


def generators(device: torch.device) -> dict[str, Any]:
    """The state of the random generators of this process: Python's, torch's on the CPU, and torch's
    on the compute device."""
    return {
        "python": random.getstate(),
        "cpu": torch.get_rng_state(),
        device.type: torch.get_device_module(device).get_rng_state(device),
    }


def kind_of(what: object) -> str:
    """The class of an optimizer or a scheduler, as errors and checkpoints name it."""
    return f"{type(what).__module__}.{type(what).__qualname__}"


def refuse_what_has_no_names(manager: PlacementManager) -> None:
    """
    Raises:
        CannotSave: the module is FSDP1's, or the optimizer wraps others.
    """
    wrapped = [] if manager.optimizer is None else list(optimizers_in(manager.optimizer))[1:]
    if wrapped:
        raise CannotSave(
            asked="a checkpoint",
            state=f"{kind_of(manager.optimizer)} wraps {', '.join(map(kind_of, wrapped))}",
            why="its own state dict says nothing of the state that these have",
            instead="save the state dicts of these through extras, from a manager without an "
            "optimizer, or train with one optimizer that has all groups",
        )
    if isinstance(manager.owner, FSDP1Module):
        raise CannotSave(
            asked="a checkpoint",
            state="the module is wrapped by FSDP1",
            why="its optimizer state is of flat parameters, which have no names of their own",
            instead="shard it with fully_shard, or save with FSDP1's own functions inside "
            "manager.saving()",
        )


def _take_scheduler(scheduler: LRScheduler | None, encoder: Encoder) -> SchedulerState | None:
    if scheduler is None:
        return None
    return SchedulerState(kind_of(scheduler), encoder.encode(scheduler.state_dict(), "scheduler"))


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}
