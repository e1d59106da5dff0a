"""A module wrapped by ``FullyShardedDataParallel`` (FSDP1), moved by hand.

FSDP1 keeps the parameters of a wrapped module in one flat parameter, into which the originals are
views. They share its storage, so they move with it. Its state dicts are gathered on the compute
device, so a checkpoint needs parameters and optimizer state there (``stages``).

FSDP1's own ``CPUOffload`` keeps the flat parameters on the host and is not FSDP2's policy: there is
no placement for it, and such a module is refused.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping

import torch
from torch import nn

from placement.errors import OwnershipUnclear
from placement.names import canonical_names
from placement.owners.base import (
    Owner,
    Resting,
    module_holdings,
    refuse_while_busy,
    registered_parameters,
)
from placement.states import MODEL, Component, Operation, Placement
from placement.tensors import Holding, Kind
from placement.torch_private import FlatHandle, flat_handles, persistent_buffers


class FSDP1Module(Owner):
    """A module with at least one FSDP1 wrapper in it."""

    name = "FSDP1"
    stages = {  # noqa: RUF012  (declared a ClassVar by Owner)
        Operation.SAVE: frozenset(Component),
        Operation.LOAD: frozenset(Component),
        Operation.EXPORT: MODEL,
        Operation.EVALUATE: MODEL,  # a pass points gradients at the flat one, beside parameters
    }
    weights_in_place = True

    def __init__(self, module: nn.Module, handles: list[FlatHandle]) -> None:
        super().__init__(module)
        self._handles = handles

    @classmethod
    def recognise(cls, module: nn.Module) -> FSDP1Module | None:
        handles = flat_handles(module)
        if not handles:
            return None
        canonical = canonical_names(module)
        offloaded = [canonical(h.module_name) or "(root)" for h in handles if h.offloads_to_cpu]
        if offloaded:
            raise OwnershipUnclear(
                asked="adopting the module",
                state="FSDP1's CPUOffload keeps its flat parameters on the host",
                why="FSDP1 moves them itself, and none of the placements describes that",
                tensors=offloaded,
                instead="use fully_shard with CPUOffloadPolicy (FSDP2), or leave CPUOffload out "
                "and offload through the manager",
            )
        return cls(module, handles)

    @property
    def compute_device(self) -> torch.device | None:
        return self._handles[0].device

    def parameters(self) -> Mapping[str, nn.Parameter]:
        return registered_parameters(self.module)

    def holdings(self) -> Iterator[Holding]:
        yield from module_holdings(self.module, self.parameters())
        canonical = canonical_names(self.module)
        for handle in self._handles:
            name = canonical(f"{handle.module_name}._flat_param".removeprefix("."))
            yield Holding(name, Kind.PARAM, handle.parameter)
            for detail, view in handle.views:
                yield Holding(name, Kind.PARAM, view, detail)
            for detail, gradient in handle.gradients:
                yield Holding(name, Kind.GRAD, gradient, detail)

    def weights(self) -> Iterator[tuple[str, Resting]]:
        # FSDP1's own state dict would gather everything at once, and on the compute device only.
        self.settle()
        pieces: dict[int, dict[str, Resting]] = {}
        for handle in self._handles:
            for module, name, piece in handle.pieces:
                pieces.setdefault(id(module), {})[name] = piece
        flat = {id(handle.parameter) for handle in self._handles}
        for prefix, module in self.module.named_modules(remove_duplicate=False):
            registered: dict[str, Resting] = {
                name: parameter
                for name, parameter in module.named_parameters(
                    recurse=False, remove_duplicate=False
                )
                if id(parameter) not in flat
            }
            registered |= pieces.get(id(module), {})
            registered |= dict(persistent_buffers(module))
            for name, resting in registered.items():
                yield (f"{prefix}.{name}" if prefix else name), resting

    def fingerprint(self) -> Hashable:
        return tuple(id(handle.state) for handle in self._handles)

    def evaluated(self) -> None:
        # As FSDP2, FSDP1 keeps the root's parameters gathered for a backward pass, and would
        # compute with them after the optimizer has changed the shards.
        if all(handle.busy is None for handle in self._handles):
            self._reshard()

    def moved(self, placement: Placement) -> None:
        # torch dropped the accumulator that FSDP1's hook was on, see ddp.py. Where a forward pass
        # had no backward pass, FSDP1 takes the hook to be there still, and reduces no gradient.
        for handle in self._handles:
            handle.forget_accumulator()

    def settle(self) -> None:
        refuse_while_busy(self.name, (handle.busy for handle in self._handles))
        self._reshard()

    def _reshard(self) -> None:
        for handle in self._handles:
            handle.reshard()
