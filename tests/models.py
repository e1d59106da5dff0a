"""Small modules, optimizers and looks at them that several tests share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.utils._pytree import tree_map_only

from engine import FSDPEngine, Offload
from engine.byte_transformer import ByteTransformer, next_byte_loss
from placement import Census, PlacementManager, Trace, find_compute_device


class Normed(nn.Module):
    """Two layers with a buffer that training changes, and sizes that do not divide by two."""

    def __init__(self, hidden: int = 5, outputs: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(6, hidden, bias=False)  # before a norm its gradient would be noise
        self.norm = nn.BatchNorm1d(hidden)
        self.second = nn.Linear(hidden, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(self.norm(self.first(x)))
        return out


def normed(hidden: int = 5, outputs: int = 3) -> Normed:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Normed(hidden, outputs)


def sharded(module: nn.Module, policy: OffloadPolicy | None = None) -> nn.Module:
    """``module`` sharded as one group over all ranks."""
    mesh = init_device_mesh(find_compute_device().type, (torch.distributed.get_world_size(),))
    return fully_shard(module, mesh=mesh, offload_policy=policy or OffloadPolicy())


def policy(*, pin_memory: bool = True) -> CPUOffloadPolicy:
    return CPUOffloadPolicy(pin_memory=pin_memory)


def adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def normed_loss(module: nn.Module, batch: Iterable[torch.Tensor]) -> torch.Tensor:
    (x,) = batch
    return module(x).square().mean()


def normed_batch(step: int = 0) -> list[torch.Tensor]:
    return [torch.randn(8, 6, generator=torch.Generator().manual_seed(step))]


def normed_engine(
    offload: Offload,
    trace: Trace | None = None,
    module: Normed | None = None,
    deadline: float = 60.0,
) -> FSDPEngine:
    """An engine over :class:`Normed`, checked at every context."""
    module = module or normed()
    return FSDPEngine(
        module,
        blocks=[module.first],
        loss=normed_loss,
        optimizer=adam,
        offload=offload,
        mesh=init_device_mesh(find_compute_device().type, (torch.distributed.get_world_size(),)),
        verify="always",
        deadline=deadline,
        trace=trace if trace is not None else Trace(),
    )


def byte_engine(offload: Offload, trace: Trace | None = None) -> FSDPEngine:
    """An engine over a transformer with tied embeddings and a buffer of no state dict."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = ByteTransformer(width=16, depth=1, heads=2, context=8)
    return FSDPEngine(
        module,
        blocks=module.blocks,
        loss=next_byte_loss,
        optimizer=adam,
        offload=offload,
        mesh=init_device_mesh(find_compute_device().type, (torch.distributed.get_world_size(),)),
        verify="always",
        trace=trace if trace is not None else Trace(),
    )


def byte_batch(step: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randint(0, 256, (4, 9), generator=generator)]


Whereabouts = dict[str, tuple[str, tuple[str, ...]]]


def whereabouts(manager: PlacementManager) -> Whereabouts:
    """Each tensor's name with its device and the devices of its bytes."""
    return {
        f"{site.kind.value} {site.name}": (str(site.device), tuple(map(str, site.rests_on)))
        for site in manager.census().sites
    }


def values(census: Census) -> dict[str, torch.Tensor]:
    """Each tensor's name with a copy of its values on the CPU; of a DTensor, of its shard."""
    return {
        f"{site.kind.value} {site.name}": local(site.holding.tensor).detach().cpu().clone()
        for site in census.sites
    }


def local(tensor: torch.Tensor) -> torch.Tensor:
    to_local: Callable[[], torch.Tensor] | None = getattr(tensor, "to_local", None)
    return to_local() if to_local is not None else tensor


def assert_equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    """The same names, dtypes and bits."""
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert value.dtype == right[name].dtype, name
        assert torch.equal(value, right[name]), name


def state_dict_of(optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    return optimizer.state_dict() if optimizer is not None else {}


def copied(value: Any) -> Any:
    """A copy of all tensors in ``value``, however nested."""
    return tree_map_only(torch.Tensor, lambda x: x.detach().clone(), value)


def load(
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    module_state: dict[str, Any],
    optimizer_state: dict[str, Any],
) -> None:
    module.load_state_dict(module_state)
    if optimizer is not None:
        optimizer.load_state_dict(copied(optimizer_state))
