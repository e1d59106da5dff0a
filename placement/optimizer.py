"""Which tensors an optimizer holds, and where torch's own rule lets them be.

Nothing here is remembered between calls: ``load_state_dict`` installs new tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from placement.errors import ForeignOptimizer
from placement.owners import Owner
from placement.tensors import Holding, Kind
from placement.torch_private import scaler_tensors


def require_own_parameters(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]
) -> None:
    """Refuse an optimizer over tensors that are not the module's.

    Raises:
        ForeignOptimizer: it would update tensors that nobody places. The usual reason under FSDP2
            is that it was made before ``fully_shard``, or while parameters were gathered.
    """
    own = {id(parameter) for parameter in parameters.values()}
    foreign = [
        f"group {g}, parameter {i}: {tuple(parameter.shape)} on {parameter.device}"
        for g, group in enumerate(optimizer.param_groups)
        for i, parameter in enumerate(group["params"])
        if id(parameter) not in own
    ]
    if foreign:
        raise ForeignOptimizer(
            asked="adopting the optimizer",
            state=f"{len(foreign)} of its parameters are not the module's",
            why="it would update tensors that this manager does not place; an optimizer made "
            "before fully_shard, or while parameters are gathered, holds such tensors",
            tensors=foreign,
            instead="make the optimizer from module.parameters() after the module is sharded",
        )


def holdings_of(
    owner: Owner,
    optimizer: torch.optim.Optimizer | None = None,
    scaler: torch.amp.GradScaler | None = None,
) -> Iterator[Holding]:
    """Everything that a module, its optimizer and its gradient scaler hold."""
    yield from owner.holdings()
    if optimizer is not None:
        yield from _optimizer_holdings(optimizer, owner.parameters())
    if scaler is not None:
        # Its tensors are used with the optimizer, and live with its state.
        for name, tensor in scaler_tensors(scaler).items():
            yield Holding("gradient scaler", Kind.OPTIMIZER, tensor, f"/{name}")


def _optimizer_holdings(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]
) -> Iterator[Holding]:
    """Every tensor in the optimizer's state, named ``parameter/entry``, however nested."""
    names = {id(parameter): name for name, parameter in reversed(list(parameters.items()))}
    steps_on_device = {
        id(parameter)
        for group in optimizer.param_groups
        if group.get("capturable") or group.get("fused")
        for parameter in group["params"]
    }
    # The state is asked, not the groups: wrappers may have state without groups of their own.
    for parameter, state in optimizer.state.items():
        name = names.get(id(parameter), "(no parameter of the module)")
        for path, tensor in _tensors_in(state):
            # torch.optim.Optimizer._process_value_according_to_param_policy: the step counter
            # follows its parameter only where the step runs on the device, the rest always.
            on_host = tensor.ndim == 0 and id(parameter) not in steps_on_device
            yield Holding(name, Kind.OPTIMIZER, tensor, path, host_scalar=on_host)


def _tensors_in(value: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _tensors_in(inner, f"{path}/{key}")
    elif isinstance(value, (list, tuple)):
        for index, inner in enumerate(value):
            yield from _tensors_in(inner, f"{path}/{index}")
