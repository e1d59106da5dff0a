"""The main job: train, evaluate, save, export, resume, train on, under each way to offload.

:func:`run_policy` takes all phases of one policy on several local ranks; :func:`run_twin` does the
same steps with plain torch on the CPU, as the truth to compare with.
"""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from engine.byte_transformer import ByteTransformer, next_byte_loss
from engine.fsdp_engine import FSDPEngine, Offload, StepResult
from engine.text import LibrarySource
from placement import Census, Component, Trace, find_compute_device
from placement.testing import Ranks

BATCH = 16
"""Sequences in the global batch, split over the ranks."""

STEPS = 6
"""Training steps before the checkpoint."""

MORE_STEPS = 4
"""Training steps after it, taken twice: uninterrupted, and resumed from the checkpoint."""


@dataclass(frozen=True)
class Phase:
    """What one phase of one policy did, on rank 0.

    Attributes:
        name: the phase.
        before: placement of model and optimizer before it.
        after: the same after it.
        bytes_to_device, bytes_to_host: bytes that the manager moved.
        seconds: how long it took.
        peak_bytes: the most accelerator memory that was allocated at once.
        losses: the loss of each step, or the one of the evaluation.
        grad_norms: the gradient norm of each step.
        exported: of an export, the 2-norm of each weight by name.
    """

    name: str
    before: str
    after: str
    bytes_to_device: int
    bytes_to_host: int
    seconds: float
    peak_bytes: int
    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    exported: dict[str, float] = field(default_factory=dict)

    @property
    def left_what_it_found(self) -> bool:
        return self.before == self.after


@dataclass
class PolicyRun:
    """All phases of one policy on one rank.

    Attributes:
        resumed_exactly: whether the resumed run ended with the bits of the uninterrupted one.
    """

    offload: Offload
    phases: list[Phase] = field(default_factory=list)
    resumed_exactly: bool = False

    def phase(self, name: str) -> Phase:
        return next(phase for phase in self.phases if phase.name == name)


@dataclass(frozen=True)
class Twin:
    """The same steps on a plain module on the CPU."""

    steps: list[StepResult]
    eval_loss: float
    exported: dict[str, float]


def run_twin() -> Twin:
    """Train the same model on the same global batches with plain torch."""
    module = _new_module()
    optimizer = _new_optimizer(module.parameters())
    scheduler = _new_scheduler(optimizer)
    text = LibrarySource(module.context)
    steps, eval_loss, exported = [], 0.0, {}
    for step in range(STEPS + MORE_STEPS):
        if step == STEPS:
            with torch.no_grad():
                eval_loss = next_byte_loss(module, [text.eval_batch(BATCH)]).item()
            exported = _norms(module.named_parameters())
        loss = next_byte_loss(module, [text.train_batch(step, BATCH)])
        loss.backward()
        norm = nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        steps.append(StepResult(loss.item(), norm.item()))
    return Twin(steps, eval_loss, exported)


def run_policy(offload: Offload, ranks: Ranks, traces: Path | None) -> PolicyRun:
    """Run all phases of one policy on all ranks.

    Args:
        offload: the policy.
        ranks: the processes to run on.
        traces: directory for the traces, one file a rank; None writes none.

    Returns:
        What rank 0 measured.

    Raises:
        RankFailed: a rank raised; every rank also checks its placement after each phase.
    """
    with tempfile.TemporaryDirectory(prefix="placement-") as scratch:
        runs = ranks.run(_phases, offload, Path(scratch) / "checkpoint", traces)
    first: PolicyRun = runs[0]
    first.resumed_exactly = all(run.resumed_exactly for run in runs)
    return first


def _phases(offload: Offload, checkpoint: Path, traces: Path | None) -> PolicyRun:
    """The job itself, on one rank."""
    # Real accelerators add in any order unless they are told not to; a resumed run must equal an
    # uninterrupted one to the bit.
    torch.use_deterministic_algorithms(True)
    gc.collect()  # FSDP2's modules are cyclic: those of the run before would count as memory
    trace = Trace()
    run = PolicyRun(offload)
    text = LibrarySource(_new_module().context)

    def train(engine: FSDPEngine, steps: int) -> list[StepResult]:
        with engine.train_mode():
            return [
                engine.train_batch([_own_part(text.train_batch(engine.steps, BATCH))])
                for _ in range(steps)
            ]

    engine = _new_engine(offload, trace)
    phase = partial(_phase, run, engine, trace)
    phase("train", partial(train, engine, STEPS))
    phase("evaluate", lambda: engine.eval_batch([_own_part(text.eval_batch(BATCH))]))
    phase("save", lambda: engine.save_checkpoint(checkpoint))
    phase("export", lambda: _norms(engine.export_weights()))
    phase("train on", partial(train, engine, MORE_STEPS))

    resumed = _new_engine(offload, trace)
    phase = partial(_phase, run, resumed, trace)
    phase("resume", lambda: resumed.load_checkpoint(checkpoint))
    phase("train on, resumed", partial(train, resumed, MORE_STEPS))

    run.resumed_exactly = _equal(engine.manager.census(), resumed.manager.census())
    if traces is not None:
        trace.write(traces / offload.value)
    return run


def _phase(
    run: PolicyRun,
    engine: FSDPEngine,
    trace: Trace,
    name: str,
    work: Callable[[], list[StepResult] | dict[str, float] | float | None],
) -> None:
    torch.accelerator.reset_peak_memory_stats()
    known, before, started = len(trace), _placements(engine), time.perf_counter()
    result = work()
    torch.accelerator.synchronize()
    seconds = time.perf_counter() - started
    engine.manager.verify()
    events = list(trace)[known:]
    steps = result if isinstance(result, list) else []
    run.phases.append(
        Phase(
            name,
            before,
            _placements(engine),
            sum(event.bytes_to_device for event in events),
            sum(event.bytes_to_host for event in events),
            seconds,
            torch.accelerator.max_memory_allocated(),
            [result] if isinstance(result, float) else [step.loss for step in steps],
            [step.grad_norm for step in steps],
            result if isinstance(result, dict) else {},
        )
    )


def _placements(engine: FSDPEngine) -> str:
    model, optimizer = engine.manager.placement, engine.manager.placements.get(Component.OPTIMIZER)
    assert optimizer is not None
    return model.value if model is optimizer else f"{model.value}, optimizer {optimizer.value}"


def _equal(one: Census, other: Census) -> bool:
    """Whether two censuses hold the same parameters, buffers and optimizer state, bit for bit."""
    pairs = zip(_values(one), _values(other), strict=True)
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)


def _values(census: Census) -> Iterator[torch.Tensor]:
    for site in census.of(*Component).sites:
        tensor = site.holding.tensor
        yield (tensor.to_local() if hasattr(tensor, "to_local") else tensor).cpu()


def _norms(weights: Iterable[tuple[str, torch.Tensor]]) -> dict[str, float]:
    """Consume an export as a rollout engine would, one weight at a time."""
    return {name: weight.detach().norm().item() for name, weight in weights}


def _own_part(batch: torch.Tensor) -> torch.Tensor:
    return batch.chunk(dist.get_world_size())[dist.get_rank()]


def _new_engine(offload: Offload, trace: Trace) -> FSDPEngine:
    module = _new_module()
    return FSDPEngine(
        module,
        blocks=module.blocks,
        loss=next_byte_loss,
        optimizer=_new_optimizer,
        scheduler=_new_scheduler,
        offload=offload,
        mesh=init_device_mesh(find_compute_device().type, (dist.get_world_size(),)),
        verify="always",
        trace=trace,
    )


def _new_module() -> ByteTransformer:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return ByteTransformer()


_new_optimizer = partial(torch.optim.AdamW, lr=3e-3)

_new_scheduler = partial(
    torch.optim.lr_scheduler.LambdaLR, lr_lambda=lambda step: min(1.0, (step + 1) / 4)
)
