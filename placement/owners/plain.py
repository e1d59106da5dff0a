"""A module that nobody wraps: its parameters are its own, and are moved by hand."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping

from torch import nn

from placement.owners.base import Owner, module_holdings, registered_parameters
from placement.tensors import Holding
from placement.torch_private import ModuleTree, roll_of


class PlainModule(Owner):
    """Any ``nn.Module`` that no other kind recognised."""

    name = "plain module"

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self._tree = ModuleTree(module)

    @classmethod
    def recognise(cls, module: nn.Module) -> PlainModule:
        return cls(module)

    def parameters(self) -> Mapping[str, nn.Parameter]:
        return registered_parameters(self.module)

    def holdings(self) -> Iterator[Holding]:
        return module_holdings(self.module, self.parameters())

    def fingerprint(self) -> Hashable:
        return self.name

    def roll(self) -> list[object]:
        return roll_of(self._tree)
