"""``placement export`` writes what Perfetto reads, without an error and with every event."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import perfetto_reader
import pytest
from recorded_job import GPU, MANAGED, MANUAL, Job

from placement.cli import export
from placement.cli.reading import Traces
from placement.states import Operation, Trigger
from placement.trace import Event, EventKind, Outcome

_ERRORS = "select name, value from stats where severity = 'error' and value > 0"
_SLICES = """
    select slice.name, ts, dur, depth, thread.name as track, process.name as process
    from slice join thread_track on slice.track_id = thread_track.id
    join thread using (utid) join process using (upid)
"""
_COUNTERS = """
    select t.name, c.ts, c.value from counter c join process_counter_track t on c.track_id = t.id
    order by c.ts
"""


@dataclass
class Exported:
    """One exported trace, as Perfetto sees it: starting it takes longer than all the rest."""

    recorded: dict[int, list[Event]]
    errors: list[perfetto_reader.Row]
    slices: list[perfetto_reader.Row]
    counters: list[perfetto_reader.Row]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Exported]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        directory = tmp_path_factory.mktemp("exported")
        job = Job(directory / "traces", monkeypatch)
        for number in (0, 1):
            job.rank(number).train()
            job.rank(number).train()
        rank = job.rank(1)
        rank.fire(
            Trigger.ONLOAD, MANUAL, MANUAL, outcome=Outcome.FAILED, detail="RuntimeError: boom"
        )
        rank.refuse("offload", MANAGED, "IllegalTransition: no", "engine/worker.py:9")
        rank.event(EventKind.FOREIGN, "to()", "gpu", "gpu")
        rank.module = "Nested#1"
        outer = rank.enter(Operation.LOAD, GPU)
        rank.enter(Operation.EVALUATE, GPU)
        rank.leave(Operation.EVALUATE, GPU)
        late = rank.enter(Operation.SAVE, GPU)
        rank.leave(Operation.LOAD, GPU, lease=outer)
        rank.leave(Operation.SAVE, GPU, lease=late)
        with (directory / "trace.json").open("w") as file:
            export.write(Traces([job.write()]), file)
        read = perfetto_reader.query(
            (directory / "trace.json").read_bytes(), [_ERRORS, _SLICES, _COUNTERS]
        )
        yield Exported({rank: list(job.ranks[rank].trace) for rank in (0, 1)}, *read)


def test_perfetto_finds_no_error(exported: Exported) -> None:
    assert exported.errors == []


def test_perfetto_would_find_one() -> None:
    """So that no error means something: two spans of one track cross here, and a time is none."""
    spans = [
        {"ph": "X", "name": "a", "pid": 1, "tid": 1, "ts": 0, "dur": 10},
        {"ph": "X", "name": "b", "pid": 1, "tid": 1, "ts": 5, "dur": 10},
    ]
    (errors,) = perfetto_reader.query(json.dumps({"traceEvents": spans}).encode(), [_ERRORS])
    assert errors


def test_every_process_and_component_has_a_track(exported: Exported) -> None:
    assert {(row["process"], row["track"]) for row in exported.slices} == {
        (f"rank {number}", f"Actor#0 {track}")
        for number in (0, 1)
        for track in ("contexts", "params", "optimizer")
    } | {("rank 1", "Nested#1 contexts"), ("rank 1", "Nested#1 contexts (2)")}


def test_every_event_is_there(exported: Exported) -> None:
    names = Counter(row["name"] for row in exported.slices)
    assert names["train"] == 4
    assert names["onload"] == 9
    assert names["failed: onload"] == names["refused: offload"] == names["foreign to()"] == 1


def test_memory_is_counted_before_and_after_each_move(exported: Exported) -> None:
    names = Counter(row["name"] for row in exported.counters)
    moves = sum(e.device_bytes is not None for events in exported.recorded.values() for e in events)
    assert names == {"device memory bytes": 2 * moves, "host memory bytes": 2 * moves}
    assert {row["value"] for row in exported.counters} == {0, 4096, 9000, 8000}


def test_spans_last_as_long_as_what_they_tell_of(exported: Exported) -> None:
    enter, *_, operation = exported.recorded[0][:6]
    train = next(row for row in exported.slices if row["name"] == "train")
    assert abs(train["dur"] / 1e9 - (operation.monotonic - enter.monotonic)) < 1e-6
    within = [row for row in exported.slices if row["process"] == "rank 0"]
    end = train["ts"] + train["dur"]
    assert sum(train["ts"] <= row["ts"] and row["ts"] + row["dur"] <= end for row in within) == 5


def test_nested_contexts_nest_and_crossing_ones_get_a_track_of_their_own(
    exported: Exported,
) -> None:
    nested = [row for row in exported.slices if row["track"].startswith("Nested")]
    assert {row["name"]: (row["track"], row["depth"]) for row in nested} == {
        "load": ("Nested#1 contexts", 0),
        "evaluate": ("Nested#1 contexts", 1),
        "save": ("Nested#1 contexts (2)", 0),
    }


def test_arguments_tell_what_the_format_has_no_field_for(
    job: Job, placement: Callable, tmp_path: Path
) -> None:
    job.rank(0).train(at="engine/worker.py:17")
    result = placement("export", job.write(), "-o", tmp_path / "trace.json")
    assert result.exit_code == 0, result.output
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    (onload, _) = (event for event in events if event["name"] == "onload")
    assert onload["args"]["call_site"] == "engine/worker.py:17"
    assert onload["args"]["bytes_to_device"] == 4096
    assert (onload["args"]["source"], onload["args"]["dest"]) == ("cpu_manual", "gpu")


def test_output_that_can_not_be_written(job: Job, placement: Callable, tmp_path: Path) -> None:
    job.rank(0).train()
    result = placement("export", job.write(), "-o", tmp_path / "nowhere" / "trace.json")
    assert result.exit_code == 2
    assert "nowhere" in result.stderr
