"""A small training engine on FSDP2. It reads from top to bottom: build, modes, steps, checkpoints.

The engine has no device logic. Wherever it matters where a tensor is, it opens a context of its
:class:`~placement.PlacementManager`, which makes sure of what the operation needs and leaves the
placement it found. The same code therefore serves all three ways to offload.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LRScheduler

from placement import Checkpoints, Placement, PlacementManager, Trace

Batch = Sequence[torch.Tensor]


class Offload(enum.Enum):
    """Where the model rests between operations, and who puts it there."""

    NONE = "none"
    """On the accelerator."""

    MANUAL = "manual"
    """On the CPU, moved by the engine's manager around each operation."""

    POLICY = "policy"
    """On the CPU, kept there by FSDP2's ``CPUOffloadPolicy``."""


@dataclass(frozen=True)
class StepResult:
    """What one training step measured, averaged over the ranks.

    Attributes:
        loss: mean loss of the global batch.
        grad_norm: total 2-norm of its gradients, before clipping.
    """

    loss: float
    grad_norm: float


class FSDPEngine:
    """Trains any module whose loss can be computed from it and a batch.

    Args:
        module: the module, whole and on the CPU, or already sharded by the caller.
        blocks: submodules to shard one by one, the usual transformer blocks; the rest forms the
            root group.
        loss: ``loss(module, batch)``, the mean over the batch, a scalar tensor.
        optimizer: makes the optimizer from the sharded parameters.
        scheduler: makes the learning rate scheduler from the optimizer; None for a constant rate.
        offload: where the model rests.
        mesh: the ranks to shard over, on the compute device.
        max_grad_norm: gradients are clipped to this total 2-norm.
        verify: passed to the manager.
        deadline: passed to the manager.
        trace: passed to the manager.

    Raises:
        PlacementError: the module can't be placed as asked, for example ``Offload.MANUAL`` for a
            module that was sharded with an offload policy.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        blocks: Iterable[nn.Module] = (),
        loss: Callable[[nn.Module, Batch], torch.Tensor],
        optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
        scheduler: Callable[[torch.optim.Optimizer], LRScheduler] | None = None,
        offload: Offload = Offload.NONE,
        mesh: DeviceMesh,
        max_grad_norm: float = 1.0,
        verify: Literal["boundaries", "always"] | None = None,
        deadline: float = 600.0,
        trace: Trace | None = None,
    ) -> None:
        policy = CPUOffloadPolicy() if offload is Offload.POLICY else OffloadPolicy()
        if not isinstance(module, FSDPModule):
            for block in blocks:
                fully_shard(block, mesh=mesh, offload_policy=policy)
            fully_shard(module, mesh=mesh, offload_policy=policy)
        self.module = module
        self.optimizer = optimizer(module.parameters())
        self.scheduler = scheduler(self.optimizer) if scheduler is not None else None
        self.steps = 0
        self._loss = loss
        self._max_grad_norm = max_grad_norm
        self.manager = PlacementManager(
            module,
            self.optimizer,
            rest=_RESTS[offload],
            verify=verify,
            deadline=deadline,
            trace=trace,
        )

    # Modes.

    @contextmanager
    def train_mode(self) -> Iterator[FSDPEngine]:
        """The engine ready to train. Steps taken inside it pay for one onload and one offload
        together; a step outside it pays for its own."""
        with self.manager.training(), _module_mode(self.module, training=True):
            yield self

    @contextmanager
    def eval_mode(self) -> Iterator[FSDPEngine]:
        """The engine ready to evaluate, without gradients."""
        with self.manager.evaluating(), _module_mode(self.module, training=False), torch.no_grad():
            yield self

    # Steps.

    def train_batch(self, batch: Batch) -> StepResult:
        """One step on this rank's part of the global batch."""
        with self.train_mode():
            loss = self._loss(self.module, self._on_device(batch))
            loss.backward()
            norm = nn.utils.clip_grad_norm_(self.module.parameters(), self._max_grad_norm)
            self.optimizer.step()
            if self.scheduler is not None:
                self.scheduler.step()
            self.optimizer.zero_grad()
            self.steps += 1
            return StepResult(_mean_over_ranks(loss), _whole(norm).item())

    def eval_batch(self, batch: Batch) -> float:
        """The mean loss of the global batch, of which ``batch`` is this rank's part."""
        with self.eval_mode():
            return _mean_over_ranks(self._loss(self.module, self._on_device(batch)))

    def _on_device(self, batch: Batch) -> list[torch.Tensor]:
        return [tensor.to(self.manager.device) for tensor in batch]

    # Checkpoints.

    def save_checkpoint(self, directory: str | os.PathLike[str]) -> None:
        """Add a checkpoint of model, optimizer, scheduler and step to those in ``directory``, on
        all ranks together, from wherever they are."""
        self._checkpoints(directory).save(self.steps)

    def load_checkpoint(self, directory: str | os.PathLike[str]) -> None:
        """Read back what :meth:`save_checkpoint` added last. Every tensor ends where it belongs in
        the present placement, whatever the placement was when it was saved."""
        self.steps = self._checkpoints(directory).load().step

    def _checkpoints(self, directory: str | os.PathLike[str]) -> Checkpoints:
        return Checkpoints(directory, self.manager, scheduler=self.scheduler)

    # Export.

    def export_weights(
        self, *, tied: Literal["once", "both"] = "once"
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights in full, one after the other, for a rollout engine; see
        :meth:`placement.PlacementManager.export_weights`."""
        return self.manager.export_weights(tied=tied)


_RESTS = {
    Offload.NONE: Placement.GPU,
    Offload.MANUAL: Placement.CPU_MANUAL,
    Offload.POLICY: Placement.CPU_FSDP2_MANAGED,
}


@contextmanager
def _module_mode(module: nn.Module, *, training: bool) -> Iterator[None]:
    """Training or evaluation mode for every submodule; what each was in is put back."""
    found = {submodule: submodule.training for submodule in module.modules()}
    module.train(training)
    try:
        yield
    finally:
        for submodule, was_training in found.items():
            submodule.training = was_training


def _whole(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _mean_over_ranks(loss: torch.Tensor) -> float:
    mean = loss.detach().clone()
    dist.all_reduce(mean, dist.ReduceOp.AVG)
    return mean.item()
