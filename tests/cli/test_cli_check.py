"""Every rule of ``placement check`` finds the fault that is planted for it, where it is planted."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from recorded_job import GPU, MANAGED, MANUAL, OPTIMIZER, Job, Recorder

from placement.cli import checking, rules
from placement.cli.reading import Entry, Traces
from placement.states import TABLE, Illegal, Operation, Trigger
from placement.trace import Event, EventKind, Outcome, Trace

PLANTED = "engine/planted.py:42"
TRAIN, EVALUATE, SAVE = Operation.TRAIN, Operation.EVALUATE, Operation.SAVE
FAILED = {"outcome": Outcome.FAILED, "detail": "RuntimeError: boom"}


def test_what_a_manager_records_is_in_order(job: Job, placement: Callable) -> None:
    for number in (0, 1):
        job.rank(number).train()
    for number in (1, 0):
        job.rank(number).train()
    result = placement("check", job.write())
    assert result.exit_code == 0, result.output
    assert result.output == "ok: 2 files, 2 ranks, 24 events, 4 operations\n"


# Each plants one fault into the trace of a rank, and says what the violation is called.


def illegal_trigger(rank: Recorder) -> str:
    rank.fire(Trigger.OFFLOAD, MANAGED, MANUAL, at=PLANTED)
    return rules.LegalTriggers.title


def wrong_destination(rank: Recorder) -> str:
    rank.fire(Trigger.OFFLOAD, GPU, GPU, at=PLANTED)
    return rules.LegalTriggers.title


def unknown_trigger(rank: Recorder) -> str:
    rank.event(EventKind.TRIGGER, "teleport", "gpu", "gpu", component="params", call_site=PLANTED)
    return rules.LegalTriggers.title


def moved_by_somebody_else(rank: Recorder) -> str:
    rank.train()
    rank.fire(Trigger.OFFLOAD, GPU, at=PLANTED)
    return rules.Continuity.title


def entered_elsewhere(rank: Recorder) -> str:
    rank.fire(Trigger.OFFLOAD, GPU)
    rank.enter(EVALUATE, GPU, at=PLANTED)
    rank.leave(EVALUATE, GPU, at="engine/worker.py:9")
    return rules.Continuity.title


def read_before_landing(rank: Recorder) -> str:
    rank.event(EventKind.ISSUED, "offload", "gpu", "gpu", component="params")
    rank.fire(Trigger.OFFLOAD, GPU, at=PLANTED)
    return rules.NothingBeforeLanding.title


def lease_leak(rank: Recorder) -> str:
    rank.train()
    rank.enter(EVALUATE, MANUAL, at=PLANTED)
    return rules.LeasesEnd.title


def inner_lease_leak(rank: Recorder) -> str:
    outer = rank.enter(TRAIN, GPU)
    rank.enter(EVALUATE, GPU, at=PLANTED)
    rank.leave(TRAIN, GPU, lease=outer)
    return rules.LeasesEnd.title


def ended_twice(rank: Recorder) -> str:
    lease = rank.enter(EVALUATE, GPU)
    rank.leave(EVALUATE, GPU)
    rank.leases.append(lease)
    rank.leave(EVALUATE, GPU, at=PLANTED)
    return "a context ends that is not open"


def entered_twice(rank: Recorder) -> str:
    rank.enter(EVALUATE, GPU)
    rank.count = 0
    rank.enter(EVALUATE, GPU, at=PLANTED)
    rank.leave(EVALUATE, GPU)
    return "a lease is entered twice"


def ended_as_another(rank: Recorder) -> str:
    rank.enter(EVALUATE, GPU)
    rank.leave(TRAIN, GPU, at=PLANTED)
    return "a context ends as another"


def model_not_restored(rank: Recorder) -> str:
    rank.enter(EVALUATE, MANUAL)
    rank.fire(Trigger.ONLOAD, MANUAL)
    rank.leave(EVALUATE, MANUAL, GPU, at=PLANTED)
    return rules.FoundIsRestored.title


def optimizer_not_restored(rank: Recorder) -> str:
    rank.enter(TRAIN, GPU)
    rank.fire(Trigger.ONLOAD, MANUAL, component=OPTIMIZER)
    rank.leave(TRAIN, GPU, at=PLANTED)
    return rules.FoundIsRestored.title


def went_on_torn(rank: Recorder) -> str:
    rank.fire(Trigger.OFFLOAD, GPU, GPU, **FAILED)
    rank.refuse("offload", GPU, "TornPlacement: offload() refused: torn", "engine/worker.py:7")
    rank.module = "Actor#0"
    rank.fire(Trigger.OFFLOAD, GPU, at=PLANTED)
    return rules.NothingAfterTorn.title


def swallowed_in_a_context(rank: Recorder) -> str:
    rank.enter(TRAIN, MANAGED)
    rank.refuse("onload", MANAGED, "IllegalTransition: onload() refused", PLANTED)
    rank.leave(TRAIN, MANAGED)
    return rules.RefusalsAreHeeded.title


def swallowed_outside(rank: Recorder) -> str:
    rank.refuse("offload", MANAGED, "IllegalTransition: offload() refused", PLANTED)
    rank.enter(TRAIN, MANAGED)
    rank.leave(TRAIN, MANAGED)
    return rules.RefusalsAreHeeded.title


def moved_past_the_manager(rank: Recorder) -> str:
    rank.train()
    rank.event(EventKind.FOREIGN, "to()", "cpu_manual", "cpu_manual", call_site=PLANTED)
    rank.train()
    return rules.ForeignMoves.title


@pytest.mark.parametrize(
    "plant",
    [
        illegal_trigger,
        moved_past_the_manager,
        read_before_landing,
        wrong_destination,
        unknown_trigger,
        moved_by_somebody_else,
        entered_elsewhere,
        lease_leak,
        inner_lease_leak,
        ended_twice,
        entered_twice,
        ended_as_another,
        model_not_restored,
        optimizer_not_restored,
        went_on_torn,
        swallowed_in_a_context,
        swallowed_outside,
    ],
)
def test_planted_fault_is_found(
    job: Job, placement: Callable, plant: Callable[[Recorder], str]
) -> None:
    title = plant(job.rank(0))
    directory = job.write()
    findings = checking.check(Traces([directory])).findings
    assert [violation.entry.event.call_site for _, violation in findings.by_rule.values()].count(
        PLANTED
    ), findings
    assert title in findings.by_rule
    assert findings.by_rule[title][1].entry.event.call_site == PLANTED
    result = placement("check", directory)
    assert result.exit_code == 1
    assert PLANTED in result.output
    assert title in result.output


def test_first_violation_by_time_comes_with_its_neighbourhood(
    job: Job, placement: Callable
) -> None:
    rank = job.rank(0)
    rank.fire(Trigger.OFFLOAD, GPU, at="engine/before.py:1")
    illegal_trigger(rank)
    rank.fire(Trigger.ONLOAD, MANUAL, at="engine/after.py:1")
    rank.fire(Trigger.OFFLOAD, MANAGED, MANUAL, at="engine/later.py:1")
    rank.module = "Critic#1"
    rank.fire(Trigger.OFFLOAD, GPU, at="engine/other.py:1")
    result = placement("check", job.write())
    told, further = result.output.split("further violations:")
    assert told.index("engine/before.py:1") < told.index("\n> ") < told.index("engine/after.py:1")
    assert "engine/other.py" not in told, "another module is no neighbourhood"
    row = TABLE[MANAGED, Trigger.OFFLOAD]
    assert isinstance(row, Illegal)
    assert row.why in told, "the reason is the table's own"
    assert "rank0.jsonl:3" in told
    assert "1 x an illegal trigger" in further


def test_cause_comes_before_what_it_led_to(tmp_path: Path, job: Job, placement: Callable) -> None:
    """Rank 1 moved the model by hand and died of it in its second step, while rank 0 had begun it
    and waited: that is where a trace stops first."""
    for number in (0, 1):
        job.rank(number).trace = Trace(directory=tmp_path)
        job.rank(number).train()
    job.rank(0).enter(TRAIN, MANUAL, at="engine/waiting.py:1")
    dying = job.rank(1)
    dying.enter(TRAIN, MANUAL, at="engine/dying.py:1")
    dying.event(EventKind.FOREIGN, "cuda()", "cpu_manual", "cpu_manual", call_site=PLANTED)
    dying.refuse("train", MANUAL, "PlacementDrift: train refused", at=PLANTED)
    told, further = placement("check", tmp_path).output.split("further violation")
    assert "violation: moved past the manager" in told
    assert f"  at {PLANTED}\n" in told
    assert "x the trace ends inside a context, first at engine/waiting.py:1" in further


def test_number_of_further_violations(job: Job, placement: Callable) -> None:
    rank = job.rank(0)
    for _ in range(5):
        rank.fire(Trigger.OFFLOAD, MANAGED, at=PLANTED)
    output = placement("check", job.write()).output
    assert "\n4 further violations:\n" in output
    assert "5 violations" in output


def test_inner_context_may_outlive_its_outer_one(job: Job, placement: Callable) -> None:
    rank = job.rank(0)
    outer = rank.enter(EVALUATE, MANUAL)
    rank.fire(Trigger.ONLOAD, MANUAL)
    inner = rank.enter(TRAIN, GPU)
    rank.leave(EVALUATE, MANUAL, GPU, lease=outer)  # the inner one will put it back
    rank.fire(Trigger.OFFLOAD, GPU)
    rank.leave(TRAIN, GPU, MANUAL, lease=inner)
    result = placement("check", job.write())
    assert result.exit_code == 0, result.output


def test_inner_context_that_does_not_put_back_what_the_outer_found(
    job: Job, placement: Callable
) -> None:
    rank = job.rank(0)
    outer = rank.enter(EVALUATE, MANUAL)
    rank.fire(Trigger.ONLOAD, MANUAL)
    inner = rank.enter(TRAIN, GPU)
    rank.leave(EVALUATE, MANUAL, GPU, lease=outer)
    rank.leave(TRAIN, GPU, GPU, lease=inner, at=PLANTED)
    result = placement("check", job.write())
    assert result.exit_code == 1
    assert PLANTED in result.output


def test_refusal_that_fails_its_context_is_heeded(job: Job, placement: Callable) -> None:
    rank = job.rank(0)
    detail = "IllegalTransition: onload() refused"
    rank.enter(TRAIN, MANAGED)
    rank.refuse("onload", MANAGED, detail, PLANTED)
    rank.leave(TRAIN, MANAGED, outcome=Outcome.FAILED, detail=detail)
    assert placement("check", job.write()).exit_code == 0


def test_foreign_move_that_was_adopted(job: Job, placement: Callable) -> None:
    rank = job.rank(0)
    rank.train()
    rank.event(EventKind.FOREIGN, "cuda()", "cpu_manual", "cpu_manual", call_site=PLANTED)
    for component in ("params", "optimizer"):
        rank.event(EventKind.ADOPTION, "adopt", "cpu_manual", "gpu", component=component)
    rank.fire(Trigger.OFFLOAD, GPU)
    rank.fire(Trigger.OFFLOAD, GPU, component=OPTIMIZER)
    rank.train()
    result = placement("check", job.write())
    assert result.exit_code == 0, result.output


def test_torn_module_that_was_recovered(job: Job, placement: Callable) -> None:
    rank = job.rank(0)
    rank.fire(Trigger.OFFLOAD, GPU, GPU, **FAILED)
    rank.refuse("offload", GPU, "TornPlacement: offload() refused: torn", PLANTED)
    rank.event(EventKind.MOVE, "recover", "gpu", "gpu", component="params")
    rank.fire(Trigger.OFFLOAD, GPU)
    result = placement("check", job.write())
    assert result.exit_code == 0, result.output


def test_refusal_for_lack_of_memory_may_be_lived_with(job: Job, placement: Callable) -> None:
    rank = job.rank(0)
    rank.enter(EVALUATE, MANUAL)
    rank.refuse("onload", MANUAL, "NotEnoughMemory: onload() refused", PLANTED)
    rank.leave(EVALUATE, MANUAL)
    assert placement("check", job.write()).exit_code == 0


def test_refusal_on_the_way_out_is_told_once(job: Job, placement: Callable) -> None:
    """Leaving the outermost context is refused: the failed operation only says so again."""
    rank = job.rank(0)
    detail = "PlacementDrift: leaving train refused"
    lease = rank.enter(TRAIN, GPU)
    rank.leases.clear()
    rank.refuse("leaving train", GPU, detail, PLANTED)
    rank.leases.append(lease)
    rank.leave(TRAIN, GPU, outcome=Outcome.FAILED, detail=detail)
    assert placement("check", job.write()).exit_code == 0


def test_trace_that_a_kill_ended_is_no_leak(job: Job, placement: Callable, tmp_path: Path) -> None:
    rank = job.rank(0)
    rank.train()
    rank.enter(TRAIN, MANUAL, at=PLANTED)
    path = job.write() / "rank0.jsonl"
    path.write_text(path.read_text()[:-1] + '\n{"number":7,"wall":17')
    result = placement("check", path)
    assert result.exit_code == 1
    assert "violation: the trace ends inside a context" in result.output
    assert "lease leak" not in result.output
    assert PLANTED in result.output
    assert "note: " in result.stderr
    assert "rank0.jsonl:9: the last line was cut off" in result.stderr


def test_stream_may_end_anywhere(
    tmp_path: Path, placement: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = Recorder(Trace(directory=tmp_path))
    rank.enter(TRAIN, GPU, at=PLANTED)
    result = placement("check", tmp_path)
    assert "violation: the trace ends inside a context" in result.output
    assert PLANTED in result.output


def edited(path: Path, edit: Callable[[list[str]], object]) -> None:
    lines = path.read_text().splitlines(keepends=True)
    edit(lines)
    path.write_text("".join(lines))


def test_gap_in_the_middle(job: Job, placement: Callable) -> None:
    rank = job.rank(0)
    rank.train()
    rank.train(at=PLANTED)
    path = job.write() / "rank0.jsonl"
    edited(path, lambda lines: lines.pop(9))
    output = placement("check", path).output
    assert "violation: events are missing" in output
    assert "event 7 is followed by 9" in output
    assert PLANTED in output


def test_clock_that_goes_back(job: Job, placement: Callable) -> None:
    job.rank(0).train()
    job.rank(0).train(at=PLANTED)
    path = job.write() / "rank0.jsonl"

    def turn_back(lines: list[str]) -> None:
        fields = json.loads(lines[7])
        fields["monotonic"] -= 5
        lines[7] = json.dumps(fields) + "\n"

    edited(path, turn_back)
    output = placement("check", path).output
    assert "violation: the clock goes back" in output
    assert PLANTED in output


def test_dropped_beginning_is_no_violation(job: Job, placement: Callable) -> None:
    rank = job.rank(0)
    rank.trace = type(rank.trace)(limit=15)
    for _ in range(4):
        rank.train()
    result = placement("check", job.write())
    assert result.exit_code == 0, result.output
    assert "15 events" in result.output


def test_operation_that_one_rank_left_out(job: Job, placement: Callable) -> None:
    for step in range(4):
        for number in range(3):
            if (step, number) != (2, 1):
                job.rank(number).train(at=f"engine/rank{number}.py:{step}")
    output = placement("check", job.write()).output
    assert "violation: the ranks are out of step" in output
    assert "operation 4 of Actor#0: rank 1 has none" in output
    assert "rank 0: engine/rank0.py:3" in output
    assert "rank 2: engine/rank2.py:3" in output


def test_operation_that_differs_on_one_rank(job: Job, placement: Callable) -> None:
    for number in range(3):
        rank = job.rank(number)
        rank.train()
        operation = SAVE if number == 1 else EVALUATE
        rank.enter(operation, MANUAL, at=f"engine/rank{number}.py:5")
        rank.leave(operation, MANUAL, at=f"engine/rank{number}.py:5")
    output = placement("check", job.write()).output
    assert "operation 2 of Actor#0 differs" in output
    assert "  at engine/rank1.py:5\n" in output, "the odd one out is to blame"
    assert "rank 0: engine/rank0.py:5" in output


def test_transition_that_differs_on_one_rank(job: Job, placement: Callable) -> None:
    job.rank(0).fire(Trigger.OFFLOAD, GPU, at="engine/a.py:1")
    job.rank(1).fire(Trigger.SAVE, GPU, at="engine/b.py:2")
    output = placement("check", job.write()).output
    assert "transition 1 of Actor#0 differs" in output
    assert "engine/a.py:1" in output
    assert "engine/b.py:2" in output


def test_module_of_one_rank_is_not_compared(job: Job, placement: Callable) -> None:
    for number in (0, 1):
        rank = job.rank(number)
        rank.train()
        rank.module = f"Stage{number}#1"
        for _ in range(number + 1):
            rank.train()
    result = placement("check", job.write())
    assert result.exit_code == 0, result.output


def test_job_that_was_started_again_is_compared_start_by_start(
    job: Job, placement: Callable
) -> None:
    job.directory.mkdir()
    for start, times in ((0, 2), (1, 3)):
        job.ranks.clear()
        for number in (0, 1):
            for step in range(times + (start == 1 and number == 1)):
                job.rank(number).train(at=f"engine/start{start}.py:{step}")
            written = job.rank(number).trace.write(job.directory)
            written.rename(job.directory / f"rank{number}-pid{start}{number}.jsonl")
    output = placement("check", job.directory).output
    assert "operation 4 of Actor#0: rank 0 has none" in output
    assert "  at engine/start1.py:3\n" in output
    assert "4 files, 2 ranks" in output


def test_directories_are_jobs_of_their_own(
    job: Job, placement: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = job.directory
    for number, times in ((0, 1), (1, 2)):
        each = Job(root / f"run{number}", monkeypatch)
        for _ in range(times):
            each.rank(number).train()
        each.write()
    result = placement("check", root)
    assert result.exit_code == 0, result.output
    assert "2 files, 2 ranks" in result.output


def test_a_rule_is_a_few_lines(job: Job) -> None:
    class NoForeignMove(rules.Rule):
        title = "moved by somebody else"

        def see(self, entry: Entry) -> None:
            if entry.event.kind == "newer":
                self.report(entry, "seen in passing")

    job.rank(0).train()
    path = job.write() / "rank0.jsonl"
    edited(path, lambda lines: lines.append(lines[-1].replace('"operation"', '"newer"')))
    traces = Traces([path])
    assert checking.check(traces, [NoForeignMove]).findings.count == 1
    assert "Numbers" in {rule.__name__ for rule in rules.RULES}
    assert checking.check(traces, rules.RULES[1:]).findings.count == 0, "unknown kinds pass"


def test_ranks_far_apart_do_not_pile_up(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules.RanksInStep, "_AHEAD", 10)
    for number, times in ((0, 40), (1, 2)):
        for _ in range(times):
            job.rank(number).train(at=f"engine/rank{number}.py:1")
    findings = checking.check(Traces([job.write()])).findings
    assert set(findings.by_rule) == {rules.RanksInStep.title}


def test_event_is_what_was_recorded(job: Job) -> None:
    job.rank(0).train()
    recorded = list(job.rank(0).trace)
    read = [entry.event for entry in Traces([job.write()])]
    assert read == recorded
    assert all(type(event) is Event for event in read)
