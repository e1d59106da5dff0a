"""Engines, modules and looks at them that the tests of checkpoints share."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from models import adam, local, normed_loss
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from engine import FSDPEngine, Offload
from placement import Checkpoints, PlacementManager, Trace, find_compute_device


class Dropping(nn.Module):
    """Two layers whose result depends on the accelerator's random generator, and whose sizes do not
    divide by two or four: of four ranks one has no shard of the second."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 7)
        self.drop = nn.Dropout(0.3)
        self.second = nn.Linear(7, 3)
        self.register_buffer("scale", torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(self.drop(self.first(x).tanh())) * self.scale
        return out


def dropping() -> Dropping:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Dropping()


decaying = partial(torch.optim.lr_scheduler.MultiStepLR, milestones=[1, 3, 3], gamma=0.7)
"""A scheduler whose state has a Counter."""


def dropping_engine(offload: Offload) -> FSDPEngine:
    module = dropping()
    return FSDPEngine(
        module,
        blocks=[module.first],
        loss=normed_loss,
        optimizer=adam,
        scheduler=decaying,
        offload=offload,
        mesh=init_device_mesh(find_compute_device().type, (dist.get_world_size(),)),
        verify="always",
        deadline=60.0,
        trace=Trace(),
    )


def plain_manager(module: nn.Module | None = None) -> PlacementManager:
    """A manager of a module that nobody wraps, on the accelerator, with an optimizer that has taken
    no step."""
    module = (module or dropping()).to(find_compute_device())
    return PlacementManager(module, adam(module.parameters()), trace=Trace())


def stepped(manager: PlacementManager, number: int = 0) -> PlacementManager:
    """``manager`` after a step."""
    assert manager.optimizer is not None
    with manager.training():
        generator = torch.Generator().manual_seed(number)
        for parameter in manager.module.parameters():
            parameter.grad = torch.zeros_like(parameter)
            shard = local(parameter.grad)
            shard.copy_(torch.randn(shard.shape, generator=generator))
        manager.optimizer.step()
        manager.optimizer.zero_grad()
    return manager


def whole_state(manager: PlacementManager) -> dict[str, torch.Tensor]:
    """Parameters, buffers and optimizer state in full, on the CPU, by name; on all ranks."""
    return {
        f"{site.kind.value} {site.name}": whole(site.holding.tensor)
        for site in manager.census().sites
        if "padded" not in site.name
    }


def whole(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    return tensor.detach().cpu().clone()


def checkpoints(directory: Path, engine: FSDPEngine) -> Checkpoints:
    return Checkpoints(directory, engine.manager, scheduler=engine.scheduler)


def layers() -> nn.Sequential:
    """What can be cut in two dimensions, and does not divide by four."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.Linear(10, 6))


def _mesh(first: str, second: str) -> DeviceMesh:
    shape = (2, dist.get_world_size() // 2)
    return init_device_mesh(find_compute_device().type, shape, mesh_dim_names=(first, second))


def hybrid(policy: OffloadPolicy) -> nn.Module:
    """Sharded over half of the ranks, and the same on the other half (HSDP)."""
    return fully_shard(layers(), mesh=_mesh("replicate", "shard"), offload_policy=policy)


def tensor_parallel(policy: OffloadPolicy) -> nn.Module:
    """Layers cut over half of the ranks, and each part sharded over the others."""
    mesh, module = _mesh("data", "tensor"), layers()
    parallelize_module(module, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return fully_shard(module, mesh=mesh["data"], offload_policy=policy)


def one_dimension(policy: OffloadPolicy) -> nn.Module:
    """Sharded over all ranks."""
    mesh = init_device_mesh(find_compute_device().type, (dist.get_world_size(),))
    return fully_shard(layers(), mesh=mesh, offload_policy=policy)
