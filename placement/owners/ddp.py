"""A module wrapped by ``DistributedDataParallel``, moved by hand.

DDP averages gradients with hooks on autograd's accumulators, and torch drops a parameter's
accumulator when the parameter changes its device (``VariableHooks::set_data`` in
``torch/csrc/autograd/variable.cpp``): after ``ddp.to("cpu").to("cuda")`` the ranks train apart, and
nothing says so. So the reducer, which owns the hooks and the buckets on the device, is let go when
the model leaves the compute device, and made anew when it is back.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from placement.errors import OwnershipUnclear
from placement.names import canonical_names
from placement.owners.plain import PlainModule
from placement.states import Placement
from placement.torch_private import drop_reducer, make_reducer


class DDPModule(PlainModule):
    """A module with a ``DistributedDataParallel`` wrapper at it or in it."""

    name = "DDP"

    @classmethod
    def recognise(cls, module: nn.Module) -> DDPModule | None:  # type: ignore[override]
        wrappers = list(_wrappers(module))
        if not wrappers:
            return None
        canonical = canonical_names(module)
        on_cpu = [
            canonical(name) or "(root)"
            for name, wrapper in wrappers
            if wrapper.device_type == "cpu"
        ]
        if on_cpu:
            raise OwnershipUnclear(
                asked="adopting the module",
                state="DistributedDataParallel was made while its parameters were on the CPU",
                why="it averages gradients where the parameters were when it was made",
                tensors=on_cpu,
                instead="move the module to the compute device, then wrap it",
            )
        return cls(module)

    @property
    def compute_device(self) -> torch.device | None:
        _, wrapper = next(_wrappers(self.module))
        device: torch.device = wrapper.device
        return device

    def fingerprint(self) -> Hashable:
        return tuple(id(wrapper) for _, wrapper in _wrappers(self.module))

    def moved(self, placement: Placement) -> None:
        for _, wrapper in _wrappers(self.module):
            drop_reducer(wrapper)
            if placement is Placement.GPU:
                make_reducer(wrapper)


def _wrappers(module: nn.Module) -> Iterator[tuple[str, DistributedDataParallel]]:
    for name, submodule in module.named_modules():
        if isinstance(submodule, DistributedDataParallel):
            yield name, submodule
