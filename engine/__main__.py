"""``python -m engine``: the main job from the command line."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from engine import report
from engine.fsdp_engine import Offload
from engine.job import run_policy, run_twin
from placement.testing import Ranks

_TABLE_WIDTH = 116
"""Columns that the closing table needs, so that it is whole in a log, too."""


def main(
    device: Annotated[
        str | None,
        typer.Option(
            help="Compute device: cuda, xpu, ..., or sim for the simulated accelerator. By default "
            "the accelerator that torch finds, else the simulated one."
        ),
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option(min=1, help="Processes to shard over: by default 2, or 1 on one device."),
    ] = None,
    traces: Annotated[Path | None, typer.Option(help="Directory for the placement traces.")] = None,
) -> None:
    """Train, evaluate, save, export, resume and train on, under each way to offload, and check the
    result against a plain CPU run."""
    console = Console()
    console.width = max(console.width, _TABLE_WIDTH)
    found = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        device = found.type if found is not None else "sim"
        console.print(f"Compute device: {device}" + (" (simulated)" if device == "sim" else ""))
    if device == "sim":
        from placement import sim

        sim.enable()
    # What torch asks for where its algorithms are to be deterministic on CUDA; inherited by ranks.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if ranks is None:
        ranks = 2 if device == "sim" else min(2, torch.accelerator.device_count())

    def say(line: str) -> None:
        console.print(line, highlight=False)

    torch.set_num_threads(1)
    twin = run_twin()
    say(f"plain CPU run: loss {twin.steps[0].loss:.3f} -> {twin.steps[-1].loss:.3f}")
    group = Ranks(ranks, device)
    runs = []
    for offload in Offload:
        say(f"{offload.value}: {ranks} ranks on {device} ...")
        runs.append(run_policy(offload, group, traces))
        for phase in runs[-1].phases:
            say(f"  {report.in_words(phase)}")
    group.close()
    console.print(report.table(runs))
    for policy, difference in report.differences(runs, twin):
        say(f"{policy}: losses, gradients and weights within {difference:.1e} of the CPU run")
    if traces is not None:
        say(f"traces: {traces}")
    if faults := list(report.faults(runs, twin)):
        for fault in faults:
            console.print(f"[red]FAULT[/red] {fault}", highlight=False)
        sys.exit(1)
    say("All policies agree with the CPU run, resumed exactly, and left what they found.")


if __name__ == "__main__":
    typer.run(main)
