"""One step of reinforcement learning on FSDP2, moved by managers and by hand.

A step computes log-probabilities, those of a reference model, trains, saves and exports. Both ways
do the same arithmetic on the same batch, so they end with the same bits; what differs is the bytes
that they copy between host and device, which the simulated accelerator counts.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from models import adam, local
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F  # noqa: N812

from engine.byte_transformer import VOCABULARY, ByteTransformer
from placement import Placement, PlacementManager, Trace, find_compute_device, sim

CONTEXT = 8


class Way(Protocol):
    """How the tensors get where a phase needs them, and back. Everything rests on the CPU."""

    actor: nn.Module
    reference: nn.Module
    optimizer: torch.optim.Optimizer

    def scoring(self) -> AbstractContextManager[object]:
        """The actor may be computed with."""

    def comparing(self) -> AbstractContextManager[object]:
        """The reference model may be computed with."""

    def training(self) -> AbstractContextManager[object]:
        """The actor may be trained."""

    def saving(self) -> AbstractContextManager[object]:
        """The actor's and the optimizer's state dicts may be written."""

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The actor's weights in full, on the device."""


class Managed:
    """A manager each for actor and reference."""

    def __init__(self, trace: Trace | None = None) -> None:
        self.actor, self.reference = transformer(), transformer()
        self.optimizer = adam(self.actor.parameters())
        rest = Placement.CPU_MANUAL
        self.manager = PlacementManager(self.actor, self.optimizer, rest=rest, trace=trace)
        self.reference_manager = PlacementManager(
            self.reference, unchanged=["*"], rest=rest, trace=Trace()
        )
        self.scoring = self.manager.evaluating
        self.comparing = self.reference_manager.evaluating
        self.training = self.manager.training
        self.saving = self.manager.saving
        self.weights = self.manager.export_weights


@dataclass(frozen=True)
class Moves:
    """Functions that move a module and an optimizer's state, named as verl names its own."""

    load_model: Callable[[nn.Module], None]
    offload_model: Callable[[nn.Module], None]
    load_optimizer: Callable[[torch.optim.Optimizer, torch.device], None]
    offload_optimizer: Callable[[torch.optim.Optimizer], None]


class ByHand:
    """As the FSDP2 engine of verl 0.9.1 goes about it with ``param_offload`` and
    ``optimizer_offload`` (``verl/workers/engine/fsdp/transformer_impl.py``): each phase loads what
    it needs and offloads it afterwards. A save loads the parameters, and an export loads one at a
    time. The reference model is under ``CPUOffloadPolicy``, whatever the configuration says, and is
    resharded after its pass, as verl does with ``fsdp_size`` above 1.
    """

    def __init__(self, moves: Moves) -> None:
        self.actor, self.reference = transformer(), transformer(CPUOffloadPolicy())
        self.optimizer = adam(self.actor.parameters())
        self._moves = moves
        self._device = find_compute_device()
        for buffer in self.reference.buffers():
            buffer.data = buffer.to(self._device)
        moves.offload_model(self.actor)

    @contextmanager
    def scoring(self) -> Iterator[None]:
        self._moves.load_model(self.actor)
        yield
        self._moves.offload_model(self.actor)

    @contextmanager
    def comparing(self) -> Iterator[None]:
        yield
        self.reference.reshard()

    @contextmanager
    def training(self) -> Iterator[None]:
        self._moves.load_optimizer(self.optimizer, self._device)
        with self.scoring():
            yield
        self._moves.offload_optimizer(self.optimizer)

    saving = scoring

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, weight in self.actor.state_dict().items():
            yield name, weight.to(self._device, non_blocking=True).full_tensor()


def _load_model(model: nn.Module) -> None:
    model.to(find_compute_device(), non_blocking=True)


def _offload_model(model: nn.Module) -> None:
    model.to("cpu", non_blocking=True)


def _load_optimizer(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    for state in optimizer.state.values():
        state.update({key: value.to(device, non_blocking=True) for key, value in state.items()})


def _offload_optimizer(optimizer: torch.optim.Optimizer) -> None:
    _load_optimizer(optimizer, torch.device("cpu"))


IN_PLAIN_TORCH = Moves(_load_model, _offload_model, _load_optimizer, _offload_optimizer)
"""What verl's functions do to FSDP2, in torch's words."""


def transformer(policy: OffloadPolicy | None = None) -> nn.Module:
    """A byte transformer, the same one each time, sharded block by block over all ranks. Its two
    embeddings are not tied, so that each parameter has one name."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = ByteTransformer(width=64, depth=2, heads=4, context=CONTEXT)
    module.head.weight = nn.Parameter(module.head.weight.detach().clone())
    device = find_compute_device().type if policy is None else "cpu"
    module.to(device)
    for part in [*module.blocks, module]:
        fully_shard(part, offload_policy=policy or OffloadPolicy())
    return module


@dataclass(frozen=True)
class Copied:
    """Bytes that were copied between host and device."""

    to_device: int
    to_host: int

    @property
    def both_ways(self) -> int:
        return self.to_device + self.to_host


@dataclass
class Outcome:
    """What a step copied, by phase, and the values that it computed, wrote and left behind."""

    copied: dict[str, Copied] = field(default_factory=dict)
    values: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return sum(copied.both_ways for copied in self.copied.values())

    @contextmanager
    def counting(self, phase: str) -> Iterator[None]:
        gc.collect()
        before = sim.counters()
        yield
        during = sim.counters() - before
        self.copied[phase] = Copied(during.host_to_device_bytes, during.device_to_host_bytes)


def rl_step(way: Way, number: int, folder: Path) -> Outcome:
    """One step.

    Args:
        way: how the tensors are moved.
        number: of the step; another batch each.
        folder: where the checkpoint is written.
    """
    outcome = Outcome()
    batch = _batch(number)
    with outcome.counting("log-probabilities"), way.scoring(), torch.no_grad():
        old = _log_probabilities(way.actor, batch)
    with outcome.counting("reference"), way.comparing(), torch.no_grad():
        reference = _log_probabilities(way.reference, batch)
    with outcome.counting("train"), way.training():
        new = _log_probabilities(way.actor, batch)
        loss = _policy_loss(new, old, reference, batch)
        loss.backward()
        way.optimizer.step()
        way.optimizer.zero_grad()
    with outcome.counting("save"), way.saving():
        torch.save(way.actor.state_dict(), folder / "model.pt")
        torch.save(way.optimizer.state_dict(), folder / "optimizer.pt")
    with outcome.counting("export"):
        exported = {name: weight.clone() for name, weight in way.weights()}
    torch.accelerator.synchronize()
    computed = {"old": old, "reference": reference, "loss": loss}
    for kind, tensors in {
        "computed": computed,
        "exported": exported,
        "left": way.actor.state_dict(),
        "saved": _saved(folder),
    }.items():
        outcome.values |= {f"{kind} {name}": _on_host(value) for name, value in tensors.items()}
    return outcome


def _batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequences, of shape (batch, time + 1), and an advantage for each of their bytes but the
    first, on the device."""
    generator = torch.Generator().manual_seed(number)
    text = torch.randint(0, VOCABULARY, (4, CONTEXT + 1), generator=generator)
    advantages = torch.randn(4, CONTEXT, generator=generator)
    return text.to(find_compute_device()), advantages.to(find_compute_device())


def _log_probabilities(module: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    text, _ = batch
    predicted = F.log_softmax(module(text[:, :-1]), dim=-1)
    return predicted.gather(-1, text[:, 1:, None]).squeeze(-1)


def _policy_loss(
    new: torch.Tensor,
    old: torch.Tensor,
    reference: torch.Tensor,
    batch: tuple[torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    _, advantages = batch
    away = reference - new
    divergence = away.exp() - away - 1
    return (0.1 * divergence - (new - old).exp() * advantages).mean()


def _saved(folder: Path) -> dict[str, torch.Tensor]:
    model = torch.load(folder / "model.pt", map_location="cpu", weights_only=False)
    optimizer = torch.load(folder / "optimizer.pt", map_location="cpu", weights_only=False)
    return model | {
        f"{number} {key}": value
        for number, state in optimizer["state"].items()
        for key, value in state.items()
    }


def _on_host(value: torch.Tensor) -> torch.Tensor:
    whole = local(value) if isinstance(value, DTensor) else value
    return whole.detach().cpu().clone()
