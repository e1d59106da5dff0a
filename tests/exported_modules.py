"""One module under every kind of owner, for tests of what comes out of it."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from models import policy
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, OffloadPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from placement import find_compute_device


class Reader(nn.Module):
    """Tied embeddings, a submodule that is itself called ``module``, integer and non-persistent
    buffers, and sizes of which most do not divide by two."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 6)
        self.module = nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.Linear(10, 6))
        self.norm = nn.BatchNorm1d(6)
        self.narrow = nn.Linear(6, 1, bias=False)
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("counts", torch.arange(5))
        self.register_buffer("scratch", torch.ones(3), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.module(self.embedding(tokens)))
        out: torch.Tensor = self.head(hidden) + self.narrow(hidden)
        return out


def reader() -> Reader:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Reader()


def truth() -> dict[str, torch.Tensor]:
    """The state dict of a plain twin."""
    return reader().state_dict()


def plain() -> nn.Module:
    return reader()


def compiled() -> nn.Module:
    module: nn.Module = torch.compile(reader(), backend="eager")
    return module


def ddp() -> nn.Module:
    return DistributedDataParallel(reader().to(find_compute_device()))


def checkpointed_in_ddp() -> nn.Module:
    module = reader()
    module.module = checkpoint_wrapper(module.module)
    return DistributedDataParallel(module.to(find_compute_device()))


def fsdp1() -> nn.Module:
    return _flat(reader(), use_orig_params=False)


def fsdp1_with_original_parameters() -> nn.Module:
    return _flat(reader(), use_orig_params=True)


def _flat(module: Reader, *, use_orig_params: bool) -> nn.Module:
    """Two flat parameters, one inside the other."""
    device = find_compute_device()
    module.to(device)
    module.module = FullyShardedDataParallel(
        module.module, device_id=device, use_orig_params=use_orig_params
    )
    return FullyShardedDataParallel(module, device_id=device, use_orig_params=use_orig_params)


def fsdp2() -> nn.Module:
    return _sharded(OffloadPolicy())


def fsdp2_under_the_policy() -> nn.Module:
    return _sharded(policy())


def fsdp2_under_the_policy_in_ordinary_memory() -> nn.Module:
    return _sharded(policy(pin_memory=False))


def _sharded(offload: OffloadPolicy) -> nn.Module:
    module = reader()
    mesh = init_device_mesh(find_compute_device().type, (dist.get_world_size(),))
    fully_shard(module.module, mesh=mesh, offload_policy=offload)
    return fully_shard(module, mesh=mesh, offload_policy=offload)


def sharded_by_columns() -> nn.Module:
    """FSDP2, its even matrices sharded on their second dimension."""
    mesh = init_device_mesh(find_compute_device().type, (dist.get_world_size(),))

    def dimension(parameter: nn.Parameter) -> Shard:
        even = parameter.ndim == 2 and parameter.shape[1] % dist.get_world_size() == 0
        return Shard(1 if even else 0)

    return fully_shard(reader(), mesh=mesh, shard_placement_fn=dimension)


def hybrid() -> nn.Module:
    mesh = init_device_mesh(find_compute_device().type, (2, 2), mesh_dim_names=("copies", "shard"))
    return fully_shard(reader(), mesh=mesh)


def tensor_parallel() -> nn.Module:
    """FSDP2 over tensor parallelism: shards of shards on one dimension, and on two."""
    module = reader()
    mesh = init_device_mesh(find_compute_device().type, (2, 2), mesh_dim_names=("data", "tensor"))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(module.module, mesh["tensor"], plan)
    return fully_shard(module, mesh=mesh["data"])


Make = Callable[[], nn.Module]

ON_TWO_RANKS: list[Make] = [
    plain,
    ddp,
    checkpointed_in_ddp,
    fsdp1,
    fsdp1_with_original_parameters,
    fsdp2,
    fsdp2_under_the_policy,
    fsdp2_under_the_policy_in_ordinary_memory,
    sharded_by_columns,
]
ON_FOUR_RANKS: list[Make] = [hybrid, tensor_parallel, fsdp1, sharded_by_columns]
