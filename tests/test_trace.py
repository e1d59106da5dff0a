"""The trace: what is in it, and that it is there to read."""

from __future__ import annotations

import json
import logging
import os
import pickle
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from models import normed, normed_batch, normed_engine
from torch import nn
from torch.profiler import ProfilerActivity, profile

from engine import Offload
from placement import EventKind, IllegalTransition, PlacementDrift, PlacementManager, Trace
from placement.trace import SCHEMA, SCHEMA_VERSION, TRACE_VARIABLE

COPYING = (EventKind.ISSUED, EventKind.LANDED)


def record(trace: Trace, name: str = "onload") -> None:
    trace.record(
        module="M#0",
        component="params",
        kind=EventKind.TRIGGER,
        name=name,
        source="cpu_manual",
        dest="gpu",
    )


def test_a_step_of_a_manually_offloaded_engine_reads_as_what_happened(
    one_rank: str, trace: Trace
) -> None:
    engine = normed_engine(Offload.MANUAL, trace)
    engine.train_batch(normed_batch(0))
    known = len(trace)
    engine.train_batch(normed_batch(1))
    events = list(trace)[known:]
    copies = [(e.kind.value, e.component) for e in events if e.kind in COPYING]
    assert copies == [
        (kind, component)
        for _ in ("onload", "offload")
        for kind in ("issued", "landed")
        for component in ("params", "buffers", "optimizer")
    ]
    (grads, _) = [event for event in events if event.component == "grads"]
    assert not grads.moved, "there are none: they went along"
    events = [e for e in events if e.kind not in COPYING and e.component != "grads"]
    assert [(e.kind.value, e.component, e.name, e.source, e.dest) for e in events] == [
        ("enter", None, "train", "cpu_manual", "cpu_manual"),
        ("trigger", "params", "onload", "cpu_manual", "gpu"),
        ("trigger", "buffers", "onload", "cpu_manual", "gpu"),
        ("trigger", "optimizer", "onload", "cpu_manual", "gpu"),
        ("trigger", "params", "offload", "gpu", "cpu_manual"),
        ("trigger", "buffers", "offload", "gpu", "cpu_manual"),
        ("trigger", "optimizer", "offload", "gpu", "cpu_manual"),
        ("operation", None, "train", "cpu_manual", "cpu_manual"),
    ]
    census = engine.manager.census().bytes_by_device()["cpu"]
    scalars = 4 * 5  # AdamW's step counters, which rest on the host
    assert sum(event.bytes_to_device for event in events[1:4]) == census - scalars
    assert {event.lease for event in events} == {events[0].lease}
    assert {event.phase for event in events[:3]} == {"train"}
    here = engine.train_batch.__func__.__code__.co_filename
    assert all(event.call_site.startswith(here + ":") for event in events)
    assert [event.number for event in trace] == list(range(len(trace)))


def test_a_refusal_is_recorded_with_its_reason_and_call_site(one_rank: str, trace: Trace) -> None:
    engine = normed_engine(Offload.POLICY, trace)
    with pytest.raises(IllegalTransition):
        engine.manager.offload()
    (event,) = trace
    assert event.kind is EventKind.REFUSAL
    assert event.name == "offload"
    said = "the record has the params in cpu_fsdp2_managed"
    assert event.detail == f"IllegalTransition: offload() refused: {said}"
    assert event.call_site.startswith(__file__)


def test_memory_is_recorded_where_something_moved(one_rank: str, trace: Trace) -> None:
    manager = PlacementManager(normed().to(one_rank), trace=trace)
    manager.offload()
    event, *_ = trace.moves()
    assert event.device_bytes is not None
    assert event.host_bytes is not None
    before, after = event.device_bytes
    if one_rank == "sim":
        assert before - after == event.bytes_to_host


def test_memory_is_bounded_and_numbers_tell_what_was_dropped() -> None:
    trace = Trace(limit=3)
    for _ in range(5):
        record(trace)
    assert [event.number for event in trace] == [2, 3, 4]


def test_a_written_trace_is_json_lines_behind_a_versioned_header(tmp_path: Path) -> None:
    trace = Trace()
    record(trace, "onload")
    path = trace.write(tmp_path)
    assert path.name == "rank0.jsonl"
    header, event = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    assert header == {"schema": SCHEMA, "version": SCHEMA_VERSION, "rank": 0}
    assert event["name"] == "onload"
    assert event["kind"] == "trigger"
    assert event["outcome"] == "ok"


def test_a_streamed_trace_is_whole_lines_up_to_a_kill(tmp_path: Path) -> None:
    script = f"""
        import os, signal
        from placement.trace import EventKind, process_trace
        for number in range(100):
            process_trace().record(module="M#0", component=None, kind=EventKind.OPERATION,
                                   name=str(number), source="gpu", dest="gpu")
        os.kill(os.getpid(), {int(signal.SIGKILL)})
    """
    environment = os.environ | {TRACE_VARIABLE: str(tmp_path)}
    killed = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], env=environment)
    assert killed.returncode == -signal.SIGKILL
    (path,) = tmp_path.glob("rank0-pid*.jsonl")
    lines = path.read_text(encoding="utf-8").splitlines()
    assert [json.loads(line).get("name") for line in lines[1:]] == [str(n) for n in range(100)]


def test_events_go_to_the_logging_tree_where_it_is_asked(
    caplog: pytest.LogCaptureFixture,
) -> None:
    record(Trace())
    assert not caplog.records
    with caplog.at_level(logging.DEBUG, logger="placement.trace"):
        record(Trace())
    assert json.loads(caplog.records[0].getMessage())["name"] == "onload"


def test_a_refusal_tells_the_last_moves_of_its_module(one_rank: str, trace: Trace) -> None:
    other = PlacementManager(nn.Linear(2, 2).to(one_rank))
    manager = PlacementManager(nn.Linear(2, 2))
    for _ in range(2):
        manager.onload()
        manager.offload()
    other.offload()
    manager.module.to(one_rank)
    with pytest.raises(PlacementDrift) as caught:
        manager.verify()
    error = caught.value
    assert {event.module for event in error.events} == {"Linear#" + error.events[0].module[7:]}
    lately = str(error).splitlines()[-3:]
    assert "params onload cpu_manual → gpu at" in lately[0]
    assert "params offload gpu → cpu_manual at" in lately[1]
    assert "to() in cpu_manual, past the manager at" in lately[2]
    assert __file__ in lately[2]
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_moves_and_operations_are_spans_of_the_profiler(one_rank: str) -> None:
    manager = PlacementManager(normed())
    with profile(activities=[ProfilerActivity.CPU]) as profiled, manager.evaluating():
        pass
    names = {event.key for event in profiled.key_averages()}
    assert {"placement: evaluate", "placement: onload", "placement: offload"} <= names


def test_a_process_of_a_killed_one_number_begins_on_a_line_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / f"rank0-pid{os.getpid()}.jsonl"
    path.write_text('{"schema":"torch-placement-trace","version":1,"rank":0}\n{"number":0,"wal')
    record(Trace(directory=tmp_path))
    lines = path.read_text(encoding="utf-8").splitlines()
    assert lines[1] == '{"number":0,"wal'
    assert [json.loads(line).get("schema") for line in lines[2:]] == [SCHEMA, None]
