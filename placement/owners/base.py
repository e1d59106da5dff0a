"""What a kind of owner must be able to say.

An *owner* is the answer to "who may move this module's tensors, and which are they". Each kind of
wrapper has one file here. A further kind (Megatron, DeepSpeed, an in-house one) is added from
outside: derive from :class:`Owner` and call :func:`placement.owners.register`.
"""

from __future__ import annotations

import abc
from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import ClassVar

import torch
from torch import nn

from placement.errors import CannotMove
from placement.names import canonical_names
from placement.states import Component, Operation, Placement
from placement.tensors import Holding, Kind
from placement.torch_private import FlatPiece

Resting = torch.Tensor | FlatPiece
"""A weight as it rests: a tensor, whole or a DTensor, or a piece of a flat parameter."""


class Owner(abc.ABC):
    """The owner of one module's placement, as read from the module itself."""

    name: str
    """What errors and explanations call this owner."""

    stages: ClassVar[Mapping[Operation, frozenset[Component]]] = {}
    """What this kind needs on the compute device for an operation beyond what any module does
    (FSDP1's state dicts gather there)."""

    weights_in_place: ClassVar[bool] = False
    """Whether :meth:`weights` can be read where the tensors rest, whatever :attr:`stages` says of
    an export: that is about a state dict that somebody else reads in its context."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    @classmethod
    @abc.abstractmethod
    def recognise(cls, module: nn.Module) -> Owner | None:
        """The owner of ``module`` if it is of this kind, else None.

        Raises:
            OwnershipUnclear: it is of this kind, but who may move it can't be told.
        """

    @property
    def managed(self) -> Placement | None:
        """The placement that the owner itself keeps, or None if the module is moved by hand."""
        return None

    @property
    def compute_device(self) -> torch.device | None:
        """The device this owner computes on, with its index, or None if it does not say."""
        return None

    @abc.abstractmethod
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """The parameters as they rest, by fully qualified name without the parts of wrappers
        (:mod:`placement.names`): what an optimizer must hold.

        A parameter registered under two names is listed under both.
        """

    @abc.abstractmethod
    def holdings(self) -> Iterator[Holding]:
        """Every parameter, gradient and buffer, and whatever else must move with them."""

    @abc.abstractmethod
    def fingerprint(self) -> Hashable:
        """A value that changes when the wrapping or the policy changes."""

    def weights(self) -> Iterator[tuple[str, Resting]]:
        """The tensors of the module's state dict as they rest, none of them copied or gathered,
        in its order. One that is registered twice comes under both names, as one object. Names may
        have wrappers in them. Entries that are no tensors (extra state) are no weights."""
        for name, value in self.module.state_dict(keep_vars=True).items():
            if isinstance(value, torch.Tensor):
                yield name, value

    def roll(self) -> list[object] | None:
        """Every object that :meth:`parameters`, :meth:`holdings` and :meth:`fingerprint` are read
        from, in a fixed order, called faster than they are named. While these are the same, so are
        those. None if this kind has no such list, and has to be asked anew every time."""
        return None

    def belongs_on(self, holding: Holding, compute_device: torch.device) -> torch.device:
        """Where ``holding`` rests under a *managed* placement. Asked only if :attr:`managed`."""
        raise NotImplementedError(f"{self.name} manages no placement")

    def require_collectives(self) -> None:  # noqa: B027  (most kinds compute where they rest)
        """Refuse process groups that have no backend for tensors where they rest.

        Raises:
            ContradictoryOptions: a collective of the training step would fail.
        """

    def evaluated(self) -> None:  # noqa: B027  (most kinds need nothing)
        """Let go of copies of the parameters that an evaluation made and a later one would use."""

    def abandon(self) -> None:  # noqa: B027  (most kinds need nothing)
        """Come to rest after an exception broke off a forward or backward pass.

        Gradients that were being reduced are lost with the pass.
        """

    def adopted(self) -> None:  # noqa: B027  (most kinds need nothing)
        """Take away what would only make moves longer. Called once, by a module's manager."""

    def moved(self, placement: Placement) -> None:  # noqa: B027  (most kinds need nothing)
        """Repair what torch ties to a device. Called after the model came to ``placement``."""

    def settle(self) -> None:  # noqa: B027  (most kinds need nothing)
        """Bring the module to the representation in which its tensors may move.

        Raises:
            PlacementError: it is in the middle of something, and can't.
        """


def refuse_while_busy(owner: str, phases: Iterable[str | None]) -> None:
    """
    Args:
        owner: its name.
        phases: what each of its groups is in the middle of; None for one that rests.

    Raises:
        CannotMove: one of them is in the middle of a pass.
    """
    for phase in phases:
        if phase is not None:
            raise CannotMove(
                asked="moving the module",
                state=f"{owner} is in the middle of {phase.lower()}",
                why="it holds gathered parameters and will read their shards again",
                instead="move it after the backward pass, or after the forward pass of an "
                "evaluation",
            )


def registered_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """What is registered to ``module`` and below it, by canonical name."""
    canonical = canonical_names(module)
    registered = module.named_parameters(remove_duplicate=False)
    return {canonical(name): parameter for name, parameter in registered}


def module_holdings(module: nn.Module, parameters: Mapping[str, nn.Parameter]) -> Iterator[Holding]:
    """The given parameters, their gradients, and every buffer of ``module``, also those that
    are not persistent or are registered twice."""
    for name, parameter in parameters.items():
        yield Holding(name, Kind.PARAM, parameter)
        if parameter.grad is not None:
            yield Holding(name, Kind.GRAD, parameter.grad)
    canonical = canonical_names(module)
    for name, buffer in module.named_buffers(remove_duplicate=False):
        yield Holding(canonical(name), Kind.BUFFER, buffer)
