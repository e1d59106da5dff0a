"""Which tensors an optimizer holds, and where torch's own rule lets them be.

Nothing here is remembered between calls: ``load_state_dict`` installs new tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from placement.errors import ForeignOptimizer
from placement.owners import Owner
from placement.tensors import Holding, Kind, carried_along, is_ordinary, tensors_in
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
            waiting += [value for name, value in vars(found).items() if name not in _OF_TORCH]
        elif isinstance(found, Mapping):
            waiting += found.values()
        elif isinstance(found, (list, tuple)):
            waiting += found


_OF_TORCH = frozenset({"state", "param_groups", "defaults"})
"""Attributes that every optimizer has. They hold no other optimizer, and may be large."""


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
    yield from _with_what_they_carry(owner.holdings(), owner.module)
    if optimizer is not None:
        state = _each_once(_state_of_all(optimizer, owner.parameters()))
        yield from _with_what_they_carry(state)
    if scaler is not None:
        # Its tensors are used with the optimizer, and live with its state.
        for name, tensor in scaler_tensors(scaler).items():
            yield Holding("gradient scaler", Kind.OPTIMIZER, tensor, f"/{name}")


def _with_what_they_carry(
    holdings: Iterable[Holding], module: nn.Module | None = None
) -> Iterator[Holding]:
    """``holdings``, each followed by the tensors that a subclass carries; in the end those that the
    layers of such weights keep, unregistered, in attributes of their own."""
    held: set[int] = set()
    weights: dict[int, Holding] = {}
    for holding in holdings:
        yield holding
        held.add(id(holding.tensor))
        if is_ordinary(holding.tensor):
            continue
        yield from _not_held_yet(carried_along(holding.tensor), holding, held)
        if not isinstance(holding.tensor, DTensor):
            weights.setdefault(id(holding.tensor), holding)
    if module is None or not weights:
        return
    for layer in module.modules():
        for registered in [*layer.parameters(recurse=False), *layer.buffers(recurse=False)]:
            if (weight := weights.get(id(registered))) is not None:
                # bitsandbytes' Linear8bitLt takes the scale from its weight into its ``state``.
                kept = tensors_in(vars(layer), " (its layer)")
                yield from _not_held_yet(kept, weight, held)


def _not_held_yet(
    found: Iterable[tuple[str, torch.Tensor]], weight: Holding, held: set[int]
) -> Iterator[Holding]:
    """Those of ``found`` that nobody holds, as parts of ``weight``."""
    for path, tensor in found:
        if id(tensor) not in held:
            held.add(id(tensor))
            yield Holding(weight.of, weight.kind, tensor, weight.detail + path)


def _state_of_all(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]
) -> Iterator[Holding]:
    own = {id(parameter) for parameter in parameters.values()}
    for one in optimizers_in(optimizer):
        for holding in [*_optimizer_holdings(one, parameters), *_attributes(one)]:
            if id(holding.tensor) not in own:  # an entry that is a parameter moves as one
                yield holding


def attributes_of(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    """What a class of optimizer keeps beside the state: slow weights, a buffer of its own."""
    for name, value in vars(optimizer).items():
        if name not in _OF_TORCH and isinstance(value, (torch.Tensor, list, tuple, dict)):
            yield from tensors_in(value, f"/{name}")


def _attributes(optimizer: torch.optim.Optimizer) -> Iterator[Holding]:
    for path, tensor in attributes_of(optimizer):
        on_host = tensor.ndim == 0
        yield Holding("(optimizer)", Kind.OPTIMIZER, tensor, path, host_scalar=on_host)


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
