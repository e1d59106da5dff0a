"""``placement show``: rows, filters, the tree, and traces of any length."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from recorded_job import GPU, MANAGED, Job

from placement.cli.reading import Traces
from placement.cli.rows import Rows
from placement.states import Operation, Trigger
from placement.trace import Outcome


@pytest.fixture
def directory(job: Job) -> Path:
    """Two ranks; the second one's second module is refused something, and fails."""
    for number in (0, 1):
        job.rank(number).train(at="/home/somebody/engine/worker.py:3")
    rank = job.rank(1)
    rank.module = "Critic#1"
    rank.enter(Operation.SAVE, MANAGED)
    rank.refuse("onload", MANAGED, "IllegalTransition: onload() refused", "engine/worker.py:8")
    rank.leave(Operation.SAVE, MANAGED, outcome=Outcome.FAILED, detail="ValueError: %s {odd}")
    return job.write()


def rows(output: str) -> list[str]:
    return output.splitlines()[1:]


def test_a_row_tells_all_of_an_event(directory: Path, placement: Callable) -> None:
    result = placement("show", directory)
    assert result.exit_code == 0, result.output
    (row, *_) = (row for row in rows(result.output) if "onload" in row)
    cells = row.split("  ")
    for cell in (
        "rank 0",
        "Actor#0",
        "params",
        "trigger onload",
        "cpu_manual → gpu",
        "4.1 kB",
        "engine/worker.py:3",
        "ok",
    ):
        assert cell in map(str.strip, cells), row
    assert "\x1b" not in result.output, "plain text, as it is no terminal"
    assert "ValueError: %s {odd}" in result.output
    assert float(rows(result.output)[0].split()[0]) == 0


def test_columns_are_aligned(directory: Path, placement: Callable) -> None:
    header, *lines = placement("show", directory).output.splitlines()
    for title in ("process", "module", "what", "from → to", "call site", "outcome"):
        column = header.index(title)
        assert {line[column - 2 : column] for line in lines} == {"  "}


@pytest.mark.parametrize(
    ("filters", "count"),
    [
        (["--component", "optimizer"], 4),
        (["--component", "optimizer", "--component", "params"], 8),
        (["--rank", 1], 9),
        (["--phase", "save"], 2),
        (["--outcome", "refused"], 1),
        (["--outcome", "refused", "--outcome", "failed"], 2),
        (["--module", "Critic*"], 3),
        (["--module", "Critic#1", "--rank", 0], 0),
    ],
)
def test_filters(directory: Path, placement: Callable, filters: list[object], count: int) -> None:
    for more in ([], ["--tree"]):
        result = placement("show", directory, *filters, *more)
        assert result.exit_code == 0, result.output
        shown = [line for line in rows(result.output) if " rank" not in f" {line[:4]}"]
        assert len(shown) - (1 if more and count and shown[0].startswith("rank") else 0) == count


def test_tree_nests_events_in_their_contexts(job: Job, placement: Callable) -> None:
    rank = job.rank(0)
    outer = rank.enter(Operation.TRAIN, GPU)
    inner = rank.enter(Operation.EVALUATE, GPU)
    rank.fire(Trigger.SAVE, GPU)
    rank.leave(Operation.TRAIN, GPU, lease=outer)
    rank.leave(Operation.EVALUATE, GPU, lease=inner)
    rank.fire(Trigger.OFFLOAD, GPU)
    lines = placement("show", "--tree", job.write()).output.splitlines()
    assert [line[14:].partition("Actor")[0] for line in lines[1:]] == [
        "┌ ",
        "│ ┌ ",
        "│ │ ─ ",
        "└ ",
        "└ ",
        "─ ",
    ]
    assert lines[0].startswith("rank 0  ")


def test_on_a_terminal_rows_are_cropped_and_coloured(directory: Path) -> None:
    lines = list(Rows(0.0, width=60).lines(Traces([directory])))
    refused = next(line for line in lines if "IllegalTransition" in line)
    assert "\x1b[33m" in refused
    assert all(len(line.rstrip("\n")) <= 60 for line in lines if "\x1b" not in line)


_MEASURE = """
import contextlib, io, resource, sys, time
from placement.cli import app
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
before, started = peak(), time.process_time()
for command in ("show", "check"):
    app([command, *sys.argv[1:]], standalone_mode=False)
print(peak() - before, time.process_time() - started, file=sys.stderr)
"""


def test_a_hundred_thousand_events_in_bounded_memory(job: Job) -> None:
    for number in (0, 1):
        job.rank(number).train()
    for path in job.write().iterdir():
        repeat(path, 8334)
    ran = subprocess.run(
        [sys.executable, "-c", _MEASURE, str(job.directory)],
        capture_output=True,
        text=True,
        check=True,
    )
    *shown, checked = ran.stdout.splitlines()
    assert len(shown) == 1 + 100_008
    assert checked == "ok: 2 files, 2 ranks, 100008 events, 16668 operations"
    megabytes, seconds = map(float, ran.stderr.split())
    assert megabytes < 30, "the files have 40 MB, and as objects many times that"
    assert seconds < 20, "some 2 s on an idle machine"


def repeat(path: Path, times: int) -> None:
    """Make a trace longer by repeating it, with numbers, leases and times that go on."""
    head, *lines = path.read_text().splitlines()
    cycle = [json.loads(line) for line in lines]
    with path.open("w") as file:
        file.write(head + "\n")
        for again in range(times):
            for event in cycle:
                later = {
                    "number": event["number"] + again * len(cycle),
                    "wall": event["wall"] + again,
                    "monotonic": event["monotonic"] + again,
                    "lease": event["lease"] + again,
                }
                file.write(json.dumps(event | later, separators=(",", ":")) + "\n")
