"""Which tensors an optimizer holds, and where torch's own rule lets them be.

Nothing here is remembered between calls: ``load_state_dict`` installs new tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import nn

from placement.errors import ForeignOptimizer
from placement.owners import Owner
from placement.tensors import Holding, Kind, tensors_in
from placement.torch_private import scaler_tensors


def optimizers_in(optimizer: torch.optim.Optimizer) -> Iterator[torch.optim.Optimizer]:
    """``optimizer``, and the optimizers that it wraps: those in its attributes, also in a list, a
    tuple or a mapping there, however deep. Each comes once.

    A wrapper may step others and have no state of its own.
    """
    seen: set[int] = set()
    waiting: list[object] = [optimizer]
    while waiting:
        found = waiting.pop()
        if id(found) in seen:
            continue
        seen.add(id(found))
        if isinstance(found, torch.optim.Optimizer):
            yield found
            waiting += [value for name, value in vars(found).items() if name not in _NO_WRAPPED]
        elif isinstance(found, Mapping):
            waiting += found.values()
        elif isinstance(found, (list, tuple)):
            waiting += found


_NO_WRAPPED = frozenset({"state", "param_groups"})
"""Attributes of an optimizer that hold no other, and may be large."""


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
        f"{type(one).__name__}, group {g}, parameter {i}: {tuple(parameter.shape)} on "
        f"{parameter.device}"
        for one in optimizers_in(optimizer)
        for g, group in enumerate(one.param_groups)
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
        yield from _each_once(_state_of_all(optimizer, owner.parameters()))
    if scaler is not None:
        # Its tensors are used with the optimizer, and live with its state.
        for name, tensor in scaler_tensors(scaler).items():
            yield Holding("gradient scaler", Kind.OPTIMIZER, tensor, f"/{name}")


def _state_of_all(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]
) -> Iterator[Holding]:
    for one in optimizers_in(optimizer):
        yield from _optimizer_holdings(one, parameters)


def _each_once(holdings: Iterable[Holding]) -> Iterator[Holding]:
    """A wrapper may list the state of what it wraps as its own."""
    seen: set[int] = set()
    for holding in holdings:
        if id(holding.tensor) not in seen:
            seen.add(id(holding.tensor))
            yield holding


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
        for path, tensor in tensors_in(state):
            # torch.optim.Optimizer._process_value_according_to_param_policy: the step counter
            # follows its parameter only where the step runs on the device, the rest always.
            on_host = tensor.ndim == 0 and id(parameter) not in steps_on_device
            yield Holding(name, Kind.OPTIMIZER, tensor, path, host_scalar=on_host)
