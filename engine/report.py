"""The main job's verdict and its table."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from rich import box
from rich.table import Table

from engine.job import MORE_STEPS, STEPS, Phase, PolicyRun, Twin

TOLERANCE = 1e-4
"""Largest relative difference to the CPU twin that counts as agreement: ranks sum gradients in
another order than one process does."""


def table(runs: Sequence[PolicyRun]) -> Table:
    """One row a phase and policy, as rank 0 saw it."""
    table = Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        caption="MB in, MB out: what the manager moved to and from the device; peak MB: the most "
        "device memory allocated at once (1 MB = 1e6 bytes). Rank 0.",
        caption_justify="left",
    )
    for heading in ("policy", "phase", "placement before", "placement after"):
        table.add_column(heading, no_wrap=True)
    for heading in ("MB in", "MB out", "seconds", "peak MB", "loss"):
        table.add_column(heading, justify="right")
    for run in runs:
        for phase in run.phases:
            first = phase is run.phases[0]
            table.add_row(
                run.offload.value if first else "",
                phase.name,
                phase.before,
                phase.after,
                _megabytes(phase.bytes_to_device),
                _megabytes(phase.bytes_to_host),
                f"{phase.seconds:.2f}",
                _megabytes(phase.peak_bytes),
                f"{phase.losses[-1]:.4f}" if phase.losses else "",
                end_section=phase is run.phases[-1],
            )
    return table


def in_words(phase: Phase) -> str:
    """One line of progress."""
    losses = " -> ".join(f"{loss:.3f}" for loss in phase.losses[:: max(1, len(phase.losses) - 1)])
    return f"{phase.name}, {phase.seconds:.2f} s" + (f", loss {losses}" if losses else "")


def differences(runs: Sequence[PolicyRun], twin: Twin) -> Iterator[tuple[str, float]]:
    """For each run, the largest relative difference of its losses, gradient norms and exported
    weights' norms from the twin's."""
    expected = [step.loss for step in twin.steps] + [twin.eval_loss]
    expected += [step.grad_norm for step in twin.steps]
    expected += twin.exported.values()
    for run in runs:
        trained = [run.phase("train"), run.phase("train on")]
        measured = [loss for phase in trained for loss in phase.losses]
        measured += run.phase("evaluate").losses
        measured += [norm for phase in trained for norm in phase.grad_norms]
        measured += [run.phase("export").exported[name] for name in twin.exported]
        pairs = zip(measured, expected, strict=True)
        yield run.offload.value, max(abs(ours - theirs) / theirs for ours, theirs in pairs)


def faults(runs: Sequence[PolicyRun], twin: Twin) -> Iterator[str]:
    """What did not come out as it must, one line each; nothing if the job succeeded."""
    for policy, difference in differences(runs, twin):
        if not difference <= TOLERANCE:  # also true for a NaN
            yield f"{policy}: values differ from those of the CPU run by {difference:.1e}"
    for run in runs:
        uninterrupted, resumed = run.phase("train on"), run.phase("train on, resumed")
        if _outcome(uninterrupted) != _outcome(resumed) or not run.resumed_exactly:
            yield f"{run.offload.value}: the resumed run does not equal the uninterrupted one"
        for phase in run.phases:
            if not phase.left_what_it_found:
                yield f"{run.offload.value}: {phase.name} found {phase.before}, left {phase.after}"
    assert len(twin.steps) == STEPS + MORE_STEPS
    assert all(math.isfinite(step.loss) for step in twin.steps)


def _outcome(phase: Phase) -> tuple[list[float], list[float]]:
    return phase.losses, phase.grad_norms


def _megabytes(nbytes: int) -> str:
    """In MB of 1e6 bytes."""
    return "-" if nbytes == 0 else f"{nbytes / 1e6:.2f}"
