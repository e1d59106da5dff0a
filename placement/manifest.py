"""What of an optimizer has to be the same on all ranks before its state is saved together.

A state dict of sharded state is put together entry by entry, by all ranks. If one has entries that
another lacks, they wait for each other without end, or a checkpoint with holes is written
(https://github.com/NVIDIA/Megatron-LM/issues/4910). So each rank says beforehand what it has, in
two lines, which are compared with everything else that ranks agree on.

Compared are the parameters of which every rank has a shard: DTensors whose mesh has all ranks in
it. Of others (of a pipeline's stages, of experts) ranks may have different ones.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from placement.optimizer import optimizers_in

_SHOWN = 3
"""How many parameters with the same entries are named."""


def optimizer_manifest(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]
) -> dict[str, str]:
    """Facts that two ranks have in common exactly if their optimizers have the same groups and the
    same entries of state for the parameters that all ranks share.

    They name the few and count the many, and end with a digest of everything, so their length does
    not grow with the module.

    Args:
        optimizer: may wrap others.
        parameters: the module's, by name.

    Returns:
        The facts by name, in words; none without other ranks.
    """
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return {}
    names = {
        id(parameter): name
        for name, parameter in reversed(list(parameters.items()))
        if _is_on_every_rank(parameter)
    }
    return {
        "the optimizer's groups": _in_short(_options_of_groups(optimizer, names)),
        "the optimizer's state": _in_short(_entries_of_parameters(optimizer, names)),
    }


def _is_on_every_rank(parameter: nn.Parameter) -> bool:
    return isinstance(parameter, DTensor) and parameter.device_mesh.size() == dist.get_world_size()


Group = tuple[torch.optim.Optimizer, str, list[nn.Parameter], list[str]]
"""A parameter group: its optimizer, which it is, its parameters, and the names of its options."""


def _groups(optimizer: torch.optim.Optimizer) -> Iterator[Group]:
    for number, one in enumerate(optimizers_in(optimizer)):
        for index, group in enumerate(one.param_groups):
            options = sorted(option for option in group if option != "params")
            yield one, f"group {index} of {type(one).__name__} {number}", group["params"], options


def _options_of_groups(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str]
) -> Iterator[tuple[str, str]]:
    for _, which, members, options in _groups(optimizer):
        count = sum(id(parameter) in names for parameter in members)
        yield which, f"{count} parameters with {', '.join(options)}"


def _entries_of_parameters(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str]
) -> Iterator[tuple[str, str]]:
    for one, which, members, _ in _groups(optimizer):
        for parameter in members:
            if id(parameter) in names:
                entries = ", ".join(sorted(map(str, one.state.get(parameter, ())))) or "nothing"
                yield names[id(parameter)], f"{entries} in {which}"


def _in_short(facts: Iterator[tuple[str, str]]) -> str:
    """Pairs of a name and what it has, with the names that have the same together, the fewest
    first."""
    having: dict[str, list[str]] = {}
    for name, has in sorted(facts):
        having.setdefault(has, []).append(name)
    digest = hashlib.sha256(repr(having).encode()).hexdigest()[:8]
    fewest_first = sorted(having.items(), key=lambda item: len(item[1]))
    return "; ".join(f"{_some(names)}: {has}" for has, names in fewest_first) + f" [{digest}]"


def _some(names: Sequence[str]) -> str:
    hidden = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {hidden} more" if hidden > 0 else "")
