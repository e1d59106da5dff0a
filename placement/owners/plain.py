"""A module that nobody wraps: its parameters are its own, and are moved by hand."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from placement.errors import OwnershipUnclear
from placement.owners.base import Owner, module_holdings
from placement.tensors import Holding


class PlainModule(Owner):
    """Any ``nn.Module`` that no other kind recognised."""

    name = "plain module"

    @classmethod
    def recognise(cls, module: nn.Module) -> PlainModule:
        wrapped = [
            f"{name or '(root)'}: {type(submodule).__name__}"
            for name, submodule in module.named_modules()
            if isinstance(submodule, FullyShardedDataParallel)
        ]
        if wrapped:
            raise OwnershipUnclear(
                asked="adopting the module",
                state="it is wrapped by FullyShardedDataParallel (FSDP1)",
                why="FSDP1 keeps parameters in flat handles, which no registered owner knows",
                tensors=wrapped,
                instead="shard it with fully_shard (FSDP2), or register an owner that knows FSDP1",
            )
        return cls(module)

    def parameters(self) -> Mapping[str, nn.Parameter]:
        return dict(self.module.named_parameters(remove_duplicate=False))

    def holdings(self) -> Iterator[Holding]:
        return module_holdings(self.module, self.parameters())

    def fingerprint(self) -> Hashable:
        return self.name
