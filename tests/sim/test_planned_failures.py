"""Failure plans: the n-th event fails, once, and can be enumerated."""

from __future__ import annotations

import pytest
import torch

from placement import sim


def work() -> float:
    """Three copies, and some allocations, of which no test has to know the number."""
    x = torch.ones(4).to("sim")
    y = x * 2 + 1
    y.copy_(y + 1)
    return y.cpu().sum().item()


def test_a_plan_without_a_failure_counts() -> None:
    with sim.failing() as plan:
        work()
        assert plan.seen.copies == 3
    assert plan.seen.copies == 3
    assert plan.seen.allocations >= 4
    assert plan.seen.collectives == 0
    assert not plan.fired


def test_events_before_and_after_the_block_do_not_count() -> None:
    work()
    with sim.failing() as plan:
        pass
    work()
    assert plan.seen == sim.Seen()


def test_every_allocation_can_be_made_to_fail_once() -> None:
    with sim.failing() as plan:
        expected = work()
    for number in range(1, plan.seen.allocations + 1):
        with sim.failing(allocation=number) as failure:
            with pytest.raises(torch.OutOfMemoryError, match="planned"):
                work()
            assert failure.fired
            assert failure.seen.allocations == number
            assert work() == expected


def test_every_copy_can_be_made_to_fail_once() -> None:
    with sim.failing() as plan:
        expected = work()
    for number in range(1, plan.seen.copies + 1):
        with sim.failing(copy=number) as failure:
            with pytest.raises(RuntimeError, match=r"^sim: copy failed \(planned\)"):
                work()
            assert failure.fired
            assert work() == expected


def test_a_failed_copy_moves_nothing() -> None:
    host = torch.zeros(3)
    with sim.failing(copy=1), pytest.raises(RuntimeError, match="12 bytes from sim:0 to cpu"):
        host.copy_(torch.ones(3, device="sim"))
    assert host.tolist() == [0.0] * 3


def test_a_number_beyond_the_last_event_does_not_fire() -> None:
    with sim.failing(copy=4) as plan:
        work()
    assert not plan.fired


def test_the_capacity_drops_at_an_allocation_and_comes_back() -> None:
    expected = work()
    with sim.failing(capacity=(2, 0)) as plan:
        torch.ones(4, device="sim")
        with pytest.raises(torch.OutOfMemoryError, match="total capacity of 0 bytes"):
            work()
        assert plan.fired
    assert work() == expected
    assert sim.capacity() == sim.DEFAULT_CAPACITY


def test_plans_do_not_nest() -> None:
    with sim.failing(), pytest.raises(RuntimeError, match="don't nest"), sim.failing():
        pass
    with sim.failing():
        pass


def test_a_plan_ends_when_its_block_raises() -> None:
    with pytest.raises(KeyError), sim.failing(copy=1):
        raise KeyError
    work()


def test_events_are_counted_from_one() -> None:
    with pytest.raises(ValueError, match="from 1"), sim.failing(copy=0):
        pass
