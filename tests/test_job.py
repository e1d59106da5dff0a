"""The main job as a user starts it."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from engine import StepResult, report
from engine.fsdp_engine import Offload
from engine.job import MORE_STEPS, STEPS, Phase, PolicyRun, Twin


def test_the_job_succeeds_and_writes_a_trace_a_rank_and_policy(
    device_type: str, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "engine", "--device", device_type, "--traces", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "All policies agree with the CPU run" in done.stdout
    for offload in Offload:
        ranks = sorted((tmp_path / offload.value).glob("rank*.jsonl"))
        assert ranks
        for path in ranks:
            events = [json.loads(line) for line in path.read_text().splitlines()[1:]]
            operations = [event for event in events if event["kind"] == "operation"]
            assert {"train", "evaluate", "save", "export", "load"} <= {
                e["name"] for e in operations
            }
            assert all(event["source"] == event["dest"] for event in operations)


def phase(name: str, losses: list[float], norms: list[float], after: str = "gpu") -> Phase:
    return Phase(name, "gpu", after, 0, 0, 0.1, 0, losses, norms)


def good_run() -> PolicyRun:
    first, more = [2.0] * STEPS, [1.0] * MORE_STEPS
    return PolicyRun(
        Offload.NONE,
        [
            phase("train", first, first),
            phase("evaluate", [1.5], []),
            phase("save", [], []),
            replace(phase("export", [], []), exported={"weight": 3.0}),
            phase("train on", more, more),
            phase("resume", [], []),
            phase("train on, resumed", more, more),
        ],
        resumed_exactly=True,
    )


TWIN = Twin(
    [StepResult(2.0, 2.0)] * STEPS + [StepResult(1.0, 1.0)] * MORE_STEPS, 1.5, {"weight": 3.0}
)


def test_a_good_run_has_no_faults() -> None:
    assert list(report.faults([good_run()], TWIN)) == []


@pytest.mark.parametrize(
    ("index", "changed", "fault"),
    [
        (
            0,
            phase("train", [2.0] * STEPS, [2.1] + [2.0] * (STEPS - 1)),
            "differ",
        ),
        (0, phase("train", [float("nan")] + [2.0] * (STEPS - 1), [2.0] * STEPS), "differ"),
        (1, phase("evaluate", [1.6], []), "differ"),
        (3, replace(phase("export", [], []), exported={"weight": 3.1}), "differ"),
        (2, phase("save", [], [], after="cpu_manual"), "save found gpu, left cpu_manual"),
        (
            6,
            phase("train on, resumed", [1.0] * (MORE_STEPS - 1) + [1.0 + 1e-7], [1.0] * MORE_STEPS),
            "does not equal the uninterrupted one",
        ),
    ],
)
def test_each_check_of_the_job_can_fail(index: int, changed: Phase, fault: str) -> None:
    run = good_run()
    run.phases[index] = changed
    assert any(fault in line for line in report.faults([run], TWIN))


def test_a_resumed_state_that_differs_is_a_fault() -> None:
    run = good_run()
    run.resumed_exactly = False
    assert any("does not equal" in line for line in report.faults([run], TWIN))
