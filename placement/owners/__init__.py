"""Who owns a module's placement. One file a kind; :func:`owner_of` asks them in turn."""

from __future__ import annotations

from torch import nn

from placement.owners.base import Owner
from placement.owners.ddp import DDPModule
from placement.owners.fsdp1 import FSDP1Module
from placement.owners.fsdp2 import FSDP2Module
from placement.owners.plain import PlainModule

__all__ = ["Owner", "owner_of", "register"]

_KINDS: list[type[Owner]] = [FSDP2Module, FSDP1Module, DDPModule, PlainModule]
"""Asked in this order. The last one takes every module, so it stays last."""


def register(kind: type[Owner]) -> None:
    """Add a kind of owner from outside. It is asked before those already known."""
    _KINDS.insert(0, kind)


def owner_of(module: nn.Module) -> Owner:
    """The owner of ``module``, read from the module.

    Raises:
        OwnershipUnclear: who may move the module can't be told.
    """
    for kind in _KINDS:
        if (owner := kind.recognise(module)) is not None:
            return owner
    raise AssertionError("PlainModule recognises every module")
