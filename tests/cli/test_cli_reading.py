"""What a killed or foreign process leaves behind is read, or refused by file and line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from recorded_job import Job

from placement.cli.reading import TraceError, Traces
from placement.trace import SCHEMA, SCHEMA_VERSION, Event


@pytest.fixture
def lines(job: Job) -> list[str]:
    """A good trace, line by line."""
    job.rank(0).train()
    return (job.write() / "rank0.jsonl").read_text().splitlines()


def read(path: Path, text: str | bytes) -> Traces:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return Traces([path])


def header(**changed: object) -> str:
    return json.dumps({"schema": SCHEMA, "version": SCHEMA_VERSION, "rank": 0} | changed)


@pytest.mark.parametrize(
    ("text", "line", "problem"),
    [
        ("", 1, "the file is empty"),
        ("{EVENT}\n", 1, "begins with its header"),
        ('{"loss": 1.5}\n', 1, "begins with its header"),
        ("PNG\x00\n", 1, "begins with its header"),
        (b"\xff\xfe\x00\n", 1, "begins with its header"),
        ('{"schema":"torch-pl', 1, "begins with its header"),
        (header(schema="other") + "\n", 1, "begins with its header"),
        (header(version=SCHEMA_VERSION + 1) + "\n", 1, f"schema version {SCHEMA_VERSION + 1}"),
        (header(version="x") + "\n", 1, "lacks its version"),
        (header() + "\n{EVENT}\ngarbage\n{EVENT}\n", 3, "garbage"),
        (header() + "\n{EVENT}\n[1, 2]\n{EVENT}\n", 3, "Expected `object`"),
        (header() + '\n{EVENT}\n{"number": 3}\n{EVENT}\n', 3, "missing required field `wall`"),
        (header() + "\n{EVENT}{EVENT}\n", 2, "trailing characters"),
        (header() + "\n" + '{"number":"one"}\n', 2, "`$.number`"),
        (header() + "\n{EVENT}\n\xff\xff\n{EVENT}\n", 3, "malformed"),
        (header() + "\n" + "[" * 100_000 + "\n", 2, "not an event"),
    ],
)
def test_what_is_no_trace_is_named_by_file_and_line(
    tmp_path: Path,
    placement: Callable,
    lines: list[str],
    text: str | bytes,
    line: int,
    problem: str,
) -> None:
    path = tmp_path / "odd.jsonl"
    path.write_bytes(
        text if isinstance(text, bytes) else text.replace("{EVENT}", lines[1]).encode()
    )
    with pytest.raises(TraceError, match="instead: ") as raised:
        list(Traces([path]))
    assert raised.value.line == line
    assert f"{path}:{line}: " in str(raised.value)
    assert problem in str(raised.value)
    result = placement("show", path)
    assert result.exit_code == 2
    assert f"error: {path}:{line}: " in result.stderr
    assert "Traceback" not in result.output + result.stderr


def test_line_that_a_kill_cut_off_is_left_out(tmp_path: Path, lines: list[str]) -> None:
    whole = "\n".join(lines)
    for cut in range(1, len(lines[-1])):
        traces = read(tmp_path / "cut.jsonl", whole[:-cut])
        assert len(list(traces)) == len(lines) - 2
        (note,) = traces.notes
        assert f"cut.jsonl:{len(lines)}: the last line was cut off" in note
    traces = read(tmp_path / "cut.jsonl", whole)
    assert len(list(traces)) == len(lines) - 1, "only the newline is missing"
    assert not traces.notes


def test_newer_fields_and_kinds_of_the_same_version(tmp_path: Path, lines: list[str]) -> None:
    fields = json.loads(lines[1]) | {"kind": "teleport", "outcome": "odd", "added": [1, {}]}
    (entry,) = read(tmp_path / "newer.jsonl", f"{header(added=1)}\n\n{json.dumps(fields)}\n")
    assert isinstance(entry.event, Event)
    assert entry.event.kind == "teleport"
    assert entry.event.outcome == "odd"
    assert entry.line == 3


def test_newer_kinds_are_shown_and_drawn(
    tmp_path: Path, placement: Callable, lines: list[str]
) -> None:
    fields = json.loads(lines[1]) | {"kind": "teleport", "outcome": "odd"}
    path = tmp_path / "newer.jsonl"
    path.write_text(f"{header()}\n{json.dumps(fields)}\n")
    assert "teleport train" in placement("show", path).output
    assert "teleport train" in placement("show", "--tree", path).output
    assert placement("check", path).exit_code == 0
    assert placement("export", path, "-o", tmp_path / "t.json").exit_code == 0
    assert placement("plot", path, "-o", tmp_path / "t.png").exit_code == 0


def test_process_that_was_started_again_under_the_same_id(
    tmp_path: Path, placement: Callable, lines: list[str]
) -> None:
    path = tmp_path / "rank0-pid1.jsonl"
    path.write_text("\n".join(lines * 2) + "\n")
    labels = {entry.process.label for entry in Traces([path])}
    assert labels == {"rank 0 pid 1", "rank 0 pid 1 part 2"}
    assert placement("check", path).exit_code == 0


def test_ranks_are_merged_by_wall_time(job: Job) -> None:
    for step in range(3):
        for number in (1, 0):
            job.rank(number).train(at=f"step {step}")
    entries = list(Traces([job.write()]))
    walls = [entry.event.wall for entry in entries]
    assert walls == sorted(walls)
    assert [entry.event.rank for entry in entries[::6]] == [1, 0] * 3


def test_directories_are_searched_and_files_are_read_once(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one", "two"):
        each = Job(job.directory / "deep" / name, monkeypatch)
        each.rank(0).train()
        each.write()
    traces = Traces([job.directory, job.directory / "deep" / "one" / "rank0.jsonl"])
    assert len(traces.files) == 2
    assert {entry.process.label for entry in traces} == {"one: rank 0", "two: rank 0"}


@pytest.mark.parametrize("name", ["missing.jsonl", "empty"])
def test_path_without_traces(tmp_path: Path, placement: Callable, name: str) -> None:
    (tmp_path / "empty").mkdir()
    result = placement("check", tmp_path / name)
    assert result.exit_code == 2
    assert name in result.stderr


def test_header_alone_is_an_empty_trace(tmp_path: Path, placement: Callable) -> None:
    path = tmp_path / "rank0.jsonl"
    path.write_text(header() + "\n")
    assert placement("show", path).exit_code == 0
    assert placement("check", path).output == "ok: 1 file, 0 ranks, 0 events, 0 operations\n"
