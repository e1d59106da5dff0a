"""``placement plot``: what is drawn, and what is said when it can't be."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path

import pytest
from recorded_job import GPU, MANAGED, MANUAL, Job

from placement.cli import plotting
from placement.cli.reading import Traces
from placement.states import Operation, Trigger
from placement.trace import EventKind, Outcome

pytest.importorskip("matplotlib")


@pytest.fixture
def directory(job: Job) -> Path:
    for number in (0, 1):
        job.rank(number).train()
    rank = job.rank(1)
    rank.module = "Critic#1"
    rank.enter(Operation.SAVE, MANAGED)
    rank.refuse("onload", MANAGED, "IllegalTransition: no", "engine/worker.py:8")
    rank.leave(Operation.SAVE, MANAGED, outcome=Outcome.FAILED, detail="IllegalTransition: no")
    rank.event(EventKind.FOREIGN, "to()", "gpu", "gpu")
    return job.write()


def drawn(
    placement: Callable, directory: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> str:
    """The text of the picture, which is kept as text."""
    import matplotlib

    monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "none")
    result = placement("plot", directory, "-o", output)
    assert result.exit_code == 0, result.output
    root = ElementTree.parse(output).getroot()
    return "\n".join(text for element in root.iter() for text in element.itertext() if text.strip())


def test_picture_names_what_it_shows(
    directory: Path, placement: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = drawn(placement, directory, tmp_path / "timeline.svg", monkeypatch)
    for name in (
        "rank 0  Actor#0",
        "rank 1  Critic#1",
        "params",
        "optimizer",
        GPU.value,
        MANUAL.value,
        MANAGED.value,
        "train",
        "save",
        "moved to device",
        "moved to host",
        "device memory, rank 1",
        "refused",
        "failed",
        "moved past the manager",
    ):
        assert name in text, text


def test_nothing_moved_nothing_measured(
    job: Job, placement: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = job.rank(0)
    rank.enter(Operation.TRAIN, MANAGED)
    rank.leave(Operation.TRAIN, MANAGED)
    rank.enter(Operation.EVALUATE, MANAGED)  # never left
    rank.enter(Operation.SAVE, MANAGED)
    text = drawn(placement, job.write(), tmp_path / "timeline.svg", monkeypatch)
    assert MANAGED.value in text
    assert "evaluate" in text, "a context that never ended lasts until the end"
    assert "memory" not in text
    assert "moved" not in text


def test_long_trace_stays_a_small_picture(job: Job, placement: Callable, tmp_path: Path) -> None:
    for _ in range(1500):
        job.rank(0).train()
    job.rank(0).trace.write(job.directory)
    output = tmp_path / "timeline.svg"
    assert placement("plot", job.directory, "-o", output).exit_code == 0
    assert output.stat().st_size < 2_000_000


@pytest.mark.parametrize("name", ["timeline.odd", "nowhere/timeline.png"])
def test_output_that_can_not_be_written(
    directory: Path, placement: Callable, tmp_path: Path, name: str
) -> None:
    result = placement("plot", directory, "-o", tmp_path / name)
    assert result.exit_code == 2
    assert "choose another output file" in result.stderr


def test_trace_without_events(job: Job, placement: Callable, tmp_path: Path) -> None:
    job.rank(0)
    result = placement("plot", job.write(), "-o", tmp_path / "timeline.png")
    assert result.exit_code == 2
    assert "no event to draw" in result.stderr


@pytest.mark.parametrize("command", [["plot", "-o", "t.png"], ["states", "--format", "svg"]])
def test_without_matplotlib_it_says_how_to_get_it(
    directory: Path, placement: Callable, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = placement(*command, *([directory] if command[0] == "plot" else []))
    assert result.exit_code == 2
    assert "pip install matplotlib" in result.stderr
    assert Trigger.SAVE.value not in result.output


def test_record_is_in_doubt_from_a_foreign_move_until_the_manager_looks(
    job: Job, placement: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = job.rank(0)
    rank.train()
    rank.event(EventKind.FOREIGN, "to()", MANUAL.value, MANUAL.value)
    rank.event(EventKind.FOREIGN, "cuda()", MANUAL.value, MANUAL.value)
    rank.fire(Trigger.ONLOAD, MANUAL)  # of the parameters
    rank.enter(Operation.SAVE, GPU)
    rank.event(EventKind.FOREIGN, "cpu()", GPU.value, GPU.value)
    directory = job.write()
    text = drawn(placement, directory, tmp_path / "timeline.svg", monkeypatch)
    assert "the record, in doubt" in text
    picture = plotting._Drawn(0.0)
    moments = []
    for entry in Traces([directory]):
        picture.add(entry.process, entry.event)
        moments.append(entry.event.wall)
    *_, first, _, onload, enter, last = moments
    (rows,) = picture.rows.values()
    assert rows["params"].doubtful == [(first, onload), (last, None)]
    assert rows["optimizer"].doubtful == [(first, enter), (last, None)]
    assert rows[""].doubtful == []
