"""Ranks that differ, fail, die or are stopped: the others raise within the deadline."""

from __future__ import annotations

import json
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist

from placement import find_compute_device, torch_private
from placement.agreement import Agreement, _compared, _Group, _listed, _Meeting, _Verdict
from placement.errors import GroupPoisoned, RankLost, RanksDisagree
from placement.testing import Ranks

pytestmark = pytest.mark.timed

DEADLINE = 1.5
"""Seconds; long enough for busy ranks on two cores, and what each lost rank costs a test."""

AMPLE = 30.0
"""Seconds; the deadline where nobody is lost."""

SLACK = 4.0
"""Seconds beyond a deadline: the store's second, and busy cores."""

PATIENCE = timedelta(seconds=30)
"""How long a test waits for what must happen."""

UNTOUCHED = timedelta(minutes=30)
"""The timeout of collectives that :func:`join_group` leaves: torch's default."""

FACTS = {"model": "gpu", "optimizer": "gpu", "step": "3"}


@pytest.fixture(params=[2, 4], ids=["2 ranks", "4 ranks"])
def local_ranks(request: pytest.FixtureRequest) -> Ranks:
    return request.getfixturevalue("two_ranks" if request.param == 2 else "four_ranks")


@pytest.fixture(params=["cpu", "device"])
def tensors_on(request: pytest.FixtureRequest, device_type: str) -> str:
    """Where the tensors of a collective are that a rank does not finish."""
    if request.param == "cpu":
        return "cpu"
    if device_type != "sim":
        pytest.skip("NCCL's watchdog would end the ranks' processes")
    return device_type


# What bodies are made of.


@dataclass
class Seen:
    """What one rank saw of an operation, and of the next one."""

    error: BaseException | None
    seconds: float
    poisoned: str | None
    next_error: BaseException | None
    next_seconds: float

    @property
    def notes(self) -> str:
        return "\n".join(getattr(self.error, "__notes__", ()))


def attempt(work: Callable[[], object]) -> tuple[BaseException | None, float]:
    began = time.monotonic()
    try:
        work()
    except (Exception, KeyboardInterrupt) as error:
        return error, time.monotonic() - began
    return None, time.monotonic() - began


def operation(
    agreement: Agreement,
    body: Callable[[], object],
    name: str = "save",
    refusal: Exception | None = None,
    **facts: str,
) -> None:
    with agreement.together(name, {**FACTS, **facts}, refusal):
        body()


def seen(agreement: Agreement, work: Callable[[], object]) -> Seen:
    """What comes of ``work``, and of an operation after it that all ranks could do. Local work must
    be possible in between."""
    error, seconds = attempt(work)
    device = find_compute_device()
    torch.testing.assert_close(torch.arange(5).to(device).cpu(), torch.arange(5))
    assert timeouts() == {UNTOUCHED}
    next_error, next_seconds = attempt(lambda: operation(agreement, lambda: None))
    return Seen(error, seconds, agreement.poisoned, next_error, next_seconds)


def timeouts() -> set[timedelta]:
    return {communicator.timeout for communicator in torch_private.communicators()}


def collective(device: str) -> None:
    on = torch.device("cpu") if device == "cpu" else find_compute_device()
    total = torch.ones(3, device=on)
    dist.all_reduce(total)
    torch.testing.assert_close(total.cpu(), torch.full((3,), float(dist.get_world_size())))


def nothing() -> None:
    pass


def odd_one() -> int:
    """The rank that differs or fails. It is not rank 0, which clears up, and not the last."""
    return 1


def is_odd() -> bool:
    return dist.get_rank() == odd_one()


def store() -> dist.Store:
    return torch_private.default_store()


def meet_again(what: str) -> None:
    """All ranks are here, by the store alone."""
    if store().add(f"test/{what}", 1) == dist.get_world_size():
        store().set(f"test/{what}/all", "")
    store().wait([f"test/{what}/all"], PATIENCE)


def others_than_the_odd_one(results: list[Seen]) -> list[Seen]:
    return [result for rank, result in enumerate(results) if rank != odd_one()]


def assert_poisoned(result: Seen, *, within: float = DEADLINE + SLACK) -> None:
    assert result.error is not None
    assert result.seconds < within
    assert result.poisoned is not None
    assert isinstance(result.next_error, GroupPoisoned)
    assert result.poisoned in str(result.next_error)
    assert result.next_seconds < 0.5 * DEADLINE


# Agreement.


def ranks_that_agree() -> None:
    first, second = Agreement(AMPLE), Agreement(AMPLE)
    pair = dist.new_group([0, 1])
    assert timeouts() == {UNTOUCHED}
    bodies = 0
    for step in range(20):
        with first.together("save", {**FACTS, "step": str(step)}):
            assert timeouts() == {timedelta(seconds=AMPLE)}
            collective("cpu")
            collective("device")
            if dist.get_rank() < 2:
                dist.all_reduce(torch.ones(1), group=pair)
            with second.together("export", FACTS):
                bodies += 1
            assert timeouts() == {timedelta(seconds=AMPLE)}
        assert timeouts() == {UNTOUCHED}
        if step == 2:
            meet_again("few")
            few = store().num_keys()
            meet_again("counted")
    assert bodies == 20
    meet_again("many")
    assert store().num_keys() <= few + 4  # the meetings of this test itself
    assert first.poisoned is None


def test_ranks_that_agree_run_the_body_and_leave_nothing_behind(local_ranks: Ranks) -> None:
    local_ranks.run(ranks_that_agree)


def test_a_single_rank_agrees_with_itself(one_rank: str) -> None:
    agreement = Agreement(DEADLINE)
    with pytest.raises(ZeroDivisionError):
        operation(agreement, lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError, match="refusal"):
        operation(agreement, nothing, refusal=ZeroDivisionError("a refusal"))
    operation(agreement, nothing)
    assert agreement.poisoned is None


def test_a_deadline_is_positive() -> None:
    with pytest.raises(ValueError, match="positive"):
        Agreement(0)


# Disagreement.


def one_rank_differs(what: str) -> Seen:
    first, second = Agreement(DEADLINE), Agreement(DEADLINE)
    bodies: list[int] = []
    name, facts = "save", {}
    if is_odd() and what == "operation":
        name = "export"
    elif is_odd() and what != "manager":
        facts = {what: "another"}
    agreement = second if is_odd() and what == "manager" else first
    result = seen(first, lambda: operation(agreement, lambda: bodies.append(1), name, **facts))
    assert not bodies
    return result


@pytest.mark.parametrize(
    ("what", "value", "odd_value"),
    [
        ("operation", "save", "export"),
        ("model", "gpu", "another"),
        ("step", "3", "another"),
        ("manager", "number 0 of its group", "number 1 of its group"),
    ],
)
def test_a_rank_that_differs_makes_all_raise_and_is_named(
    local_ranks: Ranks, what: str, value: str, odd_value: str
) -> None:
    others = [rank for rank in range(local_ranks.size) if rank != odd_one()]
    for result in local_ranks.run(one_rank_differs, what):
        assert isinstance(result.error, RanksDisagree)
        assert result.error.said == {what: {value: others, odd_value: [odd_one()]}}
        for words in (f"{what} is {value} on {_listed(others)}", f"{odd_value} on rank 1"):
            assert words in str(result.error)
        assert result.seconds < DEADLINE
        # Nothing had begun, so the ranks may agree about the next operation.
        assert result.poisoned is None
        assert result.next_error is None


def some_ranks_refuse(which: list[int]) -> Seen:
    agreement = Agreement(DEADLINE)
    bodies: list[int] = []
    refusal = ZeroDivisionError("a refusal") if dist.get_rank() in which else None
    result = seen(
        agreement, lambda: operation(agreement, lambda: bodies.append(1), refusal=refusal)
    )
    assert not bodies
    return result


@pytest.mark.parametrize("all_refuse", [False, True])
def test_a_rank_that_refuses_tells_the_others_first(local_ranks: Ranks, all_refuse: bool) -> None:
    which = list(range(local_ranks.size)) if all_refuse else [odd_one()]
    for rank, result in enumerate(local_ranks.run(some_ranks_refuse, which)):
        if rank in which:
            assert isinstance(result.error, ZeroDivisionError)
        else:
            assert isinstance(result.error, RanksDisagree)
            assert "ZeroDivisionError: a refusal on rank 1" in str(result.error)
        assert result.seconds < DEADLINE
        assert result.poisoned is None
        assert result.next_error is None


# A rank that does not come.


def one_rank_is_late() -> Seen:
    agreement = Agreement(DEADLINE)
    if not is_odd():
        result = seen(agreement, lambda: operation(agreement, nothing))
        if store().add("test/gave up", 1) == dist.get_world_size() - 1:
            store().set("test/all gave up", "")
        return result
    store().wait(["test/all gave up"], PATIENCE)
    return seen(agreement, lambda: operation(agreement, nothing))


def test_a_rank_that_does_not_come_is_lost_and_learns_it_when_it_does(local_ranks: Ranks) -> None:
    results = local_ranks.run(one_rank_is_late)
    for result in results:
        assert_poisoned(result)
        assert isinstance(result.error, RankLost)
        assert result.error.ranks == (odd_one(),)
        assert "rank 1 did not come" in str(result.error)
    assert results[odd_one()].seconds < 0.5 * DEADLINE


# A rank that raises in the body.


def one_rank_raises(others_do: str) -> Seen:
    agreement = Agreement(DEADLINE)

    def body() -> None:
        if is_odd():
            raise ZeroDivisionError("by the odd one")
        if others_do != "leave":
            collective(others_do)

    return seen(agreement, lambda: operation(agreement, body))


def test_a_rank_that_raises_ends_the_collective_of_the_others(
    local_ranks: Ranks, tensors_on: str
) -> None:
    results = local_ranks.run(one_rank_raises, tensors_on)
    for result in results:
        assert_poisoned(result)
        assert "rank 1 failed in save: ZeroDivisionError: by the odd one" in str(result.poisoned)
    assert isinstance(results[odd_one()].error, ZeroDivisionError)
    for result in others_than_the_odd_one(results):
        assert isinstance(result.error, RuntimeError)  # gloo's, which names nobody
        if hasattr(BaseException, "add_note"):
            assert "ZeroDivisionError: by the odd one" in result.notes


def test_a_rank_that_raises_is_named_at_once_where_the_others_leave(local_ranks: Ranks) -> None:
    results = local_ranks.run(one_rank_raises, "leave")
    assert isinstance(results[odd_one()].error, ZeroDivisionError)
    for result in others_than_the_odd_one(results):
        assert_poisoned(result, within=0.75 * DEADLINE)
        assert isinstance(result.error, RankLost)
        assert result.error.ranks == (odd_one(),)
        assert "rank 1 failed in save: ZeroDivisionError" in str(result.error)


# A rank that is killed.


def one_rank_is_killed(when: str, others_do: str) -> Seen:
    agreement = Agreement(DEADLINE)

    def body() -> None:
        if is_odd():
            os.kill(os.getpid(), signal.SIGKILL)
        if others_do != "leave":
            collective(others_do)

    if when == "before" and is_odd():
        os.kill(os.getpid(), signal.SIGKILL)
    return seen(agreement, lambda: operation(agreement, body))


def test_a_rank_killed_in_a_collective_ends_that_of_the_others(
    local_ranks: Ranks, device_type: str
) -> None:
    tensors_on = "device" if local_ranks.size == 2 and device_type == "sim" else "cpu"
    results = local_ranks.run(one_rank_is_killed, "in the body", tensors_on, dies=[odd_one()])
    for result in others_than_the_odd_one(results):
        assert_poisoned(result)
        assert isinstance(result.error, RuntimeError)


def test_a_killed_rank_is_named_where_the_others_wait_for_it(local_ranks: Ranks) -> None:
    when = "before" if local_ranks.size == 4 else "in the body"
    results = local_ranks.run(one_rank_is_killed, when, "leave", dies=[odd_one()])
    for result in others_than_the_odd_one(results):
        assert_poisoned(result)
        assert isinstance(result.error, RankLost)
        assert result.error.ranks == (odd_one(),)


# A rank that is stopped.


def one_rank_is_stopped(others_do: str) -> Seen:
    agreement = Agreement(DEADLINE)

    def body() -> None:
        if is_odd():
            stop()
        if others_do != "leave":
            collective(others_do)

    return resumed_by_the_others(agreement, lambda: operation(agreement, body))


def stop() -> None:
    """Stop this process; the last of the others that is through resumes it."""
    store().set("test/stopped", str(os.getpid()))
    os.kill(os.getpid(), signal.SIGSTOP)


def resumed_by_the_others(agreement: Agreement, work: Callable[[], object]) -> Seen:
    result = seen(agreement, work)
    if not is_odd() and store().add("test/through", 1) == dist.get_world_size() - 1:
        os.kill(int(store().get("test/stopped")), signal.SIGCONT)
    return result


def test_a_stopped_rank_ends_the_collective_of_the_others(
    local_ranks: Ranks, tensors_on: str
) -> None:
    results = local_ranks.run(one_rank_is_stopped, tensors_on)
    for result in others_than_the_odd_one(results):
        assert_poisoned(result)
        assert isinstance(result.error, RuntimeError)
    assert_poisoned(results[odd_one()], within=PATIENCE.total_seconds())


def test_a_stopped_rank_is_lost_and_learns_it_when_it_wakes(local_ranks: Ranks) -> None:
    results = local_ranks.run(one_rank_is_stopped, "leave")
    for result in results:
        assert_poisoned(result, within=PATIENCE.total_seconds())
        assert isinstance(result.error, RankLost)
        assert result.error.ranks == (odd_one(),)
    for result in others_than_the_odd_one(results):
        assert result.seconds < DEADLINE + SLACK


# A rank that is interrupted.


def one_rank_is_interrupted() -> Seen:
    agreement = Agreement(AMPLE)
    if is_odd():
        signal.signal(signal.SIGINT, signal.default_int_handler)
        store().set("test/interrupt", str(os.getpid()))
        result = seen(agreement, lambda: operation(agreement, nothing))
        store().set("test/interrupted", "")
        return result
    if dist.get_rank() == 0:
        store().wait(["test/interrupt", "placement/agreement/0/0/1"], PATIENCE)
        os.kill(int(store().get("test/interrupt")), signal.SIGINT)
    store().wait(["test/interrupted"], PATIENCE)
    return seen(agreement, lambda: operation(agreement, nothing))


def test_a_rank_that_is_interrupted_while_it_waits_tells_the_others(local_ranks: Ranks) -> None:
    results = local_ranks.run(one_rank_is_interrupted)
    assert isinstance(results[odd_one()].error, KeyboardInterrupt)
    for result in others_than_the_odd_one(results):
        assert_poisoned(result, within=SLACK)
        assert isinstance(result.error, RankLost)
        assert result.error.ranks == (odd_one(),)
        assert "rank 1 failed in save: KeyboardInterrupt" in str(result.error)


# The store.


def join_group_over_tcp() -> dist.TCPStore:
    """The default group anew; returns its store, whose server is part of rank 0."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        served = dist.TCPStore("127.0.0.1", 0, size, is_master=True, wait_for_workers=False)
        store().set("test/port", str(served.port))
    else:
        port = int(store().get("test/port"))
        served = dist.TCPStore("127.0.0.1", port, size, is_master=False, timeout=PATIENCE)
    meet_again("connected")
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=served, rank=rank, world_size=size)
    return served


def the_server_is(lost: str) -> Seen | None:
    agreement = Agreement(DEADLINE)
    other_store = store()
    join_group_over_tcp()

    def body() -> None:
        if dist.get_rank() == 0 and lost == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if dist.get_rank() == 0:
            other_store.set("test/stopped", str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)

    result = seen(agreement, lambda: operation(agreement, body))
    if dist.get_rank() != 0 and lost == "stopped":
        os.kill(int(other_store.get("test/stopped")), signal.SIGCONT)
    return result


def test_a_stopped_rank_that_serves_the_store_does_not_hold_the_others(two_ranks: Ranks) -> None:
    _, result = two_ranks.run(the_server_is, "stopped")
    assert_poisoned(result)
    assert isinstance(result.error, RankLost)
    assert "store does not answer" in str(result.error)


def test_a_killed_rank_that_serves_the_store_does_not_hold_the_others(two_ranks: Ranks) -> None:
    _, result = two_ranks.run(the_server_is, "killed", dies=[0])
    assert_poisoned(result)
    assert isinstance(result.error, RankLost)
    assert "store failed" in str(result.error)


def failed_alike() -> None:
    agreement = Agreement(AMPLE)
    for _ in range(2):
        error, _ = attempt(lambda: operation(agreement, lambda: 1 / 0))
        assert isinstance(error, ZeroDivisionError)
        assert agreement.poisoned is None
    operation(agreement, nothing)


def test_ranks_that_all_failed_alike_are_still_in_step(local_ranks: Ranks) -> None:
    local_ranks.run(failed_alike)


def failed_in_collectives() -> None:
    agreement = Agreement(AMPLE)

    def time_out() -> None:
        raise RuntimeError("Timed out waiting for recv operation to complete")

    error, _ = attempt(lambda: operation(agreement, time_out))
    assert isinstance(error, RuntimeError)
    assert agreement.poisoned is not None


def test_ranks_whose_collectives_all_failed_are_not_in_step(two_ranks: Ranks) -> None:
    two_ranks.run(failed_in_collectives)


def a_group_made_anew() -> None:
    agreement = Agreement(AMPLE)
    served = join_group_over_tcp()
    for attempts in range(2):
        operation(agreement, nothing)
        odd = dist.get_rank() == 1
        body = (lambda: 1 / 0) if odd else nothing
        error, _ = attempt(partial(operation, agreement, body))
        assert isinstance(error, ZeroDivisionError if odd else RankLost)
        assert agreement.poisoned is not None
        rank, size = dist.get_rank(), dist.get_world_size()
        dist.destroy_process_group()
        assert agreement.poisoned is None
        # Gloo would read the addresses of the group before, were it not for the prefix.
        anew = dist.PrefixStore(f"attempt {attempts}", served)
        dist.init_process_group("gloo", store=anew, rank=rank, world_size=size)
    operation(agreement, nothing)


def test_a_group_made_anew_is_not_poisoned(two_ranks: Ranks) -> None:
    two_ranks.run(a_group_made_anew)


def test_a_group_made_anew_over_the_same_store_does_not_read_the_old_keys() -> None:
    shared = dist.HashStore()
    groups = [[_Group() for _ in range(3)] for _ in range(2)]  # of three ranks, one after the other
    prefixes = [{rank.prefix(shared, 3) for rank in group} for group in groups]
    assert [len(of_a_group) for of_a_group in prefixes] == [1, 1]
    assert prefixes[0] != prefixes[1]


# The verdict.


@pytest.fixture
def meetings() -> list[_Meeting]:
    """Two ranks' parts in one meeting, in one process."""
    shared = dist.HashStore()
    return [_Meeting(shared, "test", rank, 2) for rank in range(2)]


def test_a_rank_whose_news_comes_too_late_does_not_go_on_alone(meetings: list[_Meeting]) -> None:
    given_up = meetings[0].attend(FACTS, time.monotonic(), threading.Event())
    assert given_up.ranks == [1]
    late = meetings[1].attend(FACTS, time.monotonic() + DEADLINE, threading.Event())
    assert late == given_up


def test_the_verdict_does_not_need_the_last_one_who_came(meetings: list[_Meeting]) -> None:
    meetings[1].store.set(meetings[1]._claim(1), json.dumps(FACTS))  # it died before it counted in
    assert meetings[0].attend(FACTS, time.monotonic(), threading.Event()).complete


def test_a_waiting_rank_can_be_left(meetings: list[_Meeting]) -> None:
    left = threading.Event()
    left.set()
    meetings[0].attend(FACTS, time.monotonic() + PATIENCE.total_seconds(), left)
    failure = _Verdict(ranks=[0], why="it left")
    assert meetings[0].settle(failure) == failure


def test_a_fact_that_one_rank_does_not_give_is_a_difference() -> None:
    assert _compared([FACTS, {"model": "gpu", "step": "3"}]).said == {
        "optimizer": {"gpu": [0], "not given": [1]}
    }


def test_ranks_are_listed_in_runs() -> None:
    assert _listed([4]) == "rank 4"
    assert _listed([0, 1, 2, 5, 7, 8]) == "ranks 0-2, 5, 7-8"


def test_errors_travel_between_processes() -> None:
    parts = {"asked": "save", "state": "rank 0 of 2", "why": "so", "instead": "not"}
    said = {"step": {"3": [0], "4": [1]}}
    disagree = pickle.loads(pickle.dumps(RanksDisagree(**parts, said=said)))
    lost = pickle.loads(pickle.dumps(RankLost(**parts, ranks=(1,))))
    assert (disagree.said, disagree.why) == (said, "so")
    assert (lost.ranks, str(lost).splitlines()[0]) == ((1,), "save refused: rank 0 of 2")


# Generators that are dropped.


def gathered(agreement: Agreement) -> Iterator[int]:
    with agreement.together("export", FACTS):
        for item in range(3):
            dist.barrier()
            yield item


def drop_in_step(late: int) -> str | None:
    agreement = Agreement(AMPLE)
    items = gathered(agreement)
    next(items)
    if dist.get_rank() == late:
        time.sleep(0.1)  # the others go on: nobody waits for it to drop its own
    items.close()
    with agreement.together("save", FACTS):
        dist.barrier()
    return agreement.poisoned


def test_a_body_that_all_ranks_drop_in_step_has_ended_like_any_other(local_ranks: Ranks) -> None:
    for late in range(2):
        assert local_ranks.run(drop_in_step, late) == [None] * local_ranks.size


def drop_on_one_rank() -> tuple[bool, float]:
    agreement = Agreement(DEADLINE)
    items = gathered(agreement)
    next(items)
    began = time.monotonic()
    if dist.get_rank() == 1:
        items.close()
        return time.monotonic() - began < DEADLINE, 0.0
    with pytest.raises((RuntimeError, RankLost)):
        list(items)
    return agreement.poisoned is not None, time.monotonic() - began


def test_a_rank_that_drops_its_body_alone_is_lost_to_the_others(two_ranks: Ranks) -> None:
    (noticed, seconds), (left_at_once, _) = two_ranks.run(drop_on_one_rank)
    assert noticed
    assert seconds < DEADLINE + SLACK
    assert left_at_once
