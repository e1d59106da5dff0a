"""The link: copies run beside the host, and nobody sees that before they have arrived."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

# A copy of so many values takes milliseconds: what does not wait for it reads its end too early.
COUNT = 8 << 20


def pinned(value: float) -> Tensor:
    return torch.full((COUNT,), value, pin_memory=True)


def on_device(value: float) -> Tensor:
    return torch.full((COUNT,), value, device="sim")


def synchronize_event() -> None:
    event = torch.Event("sim")
    event.record()
    event.synchronize()


def synchronize_later_event_of_a_stream_that_waited() -> None:
    ours, theirs = torch.accelerator.current_stream(), torch.Stream("sim")
    theirs.wait_stream(ours)
    event = torch.Event("sim")
    event.record(theirs)
    event.synchronize()


def ask_until_it_has_arrived() -> None:
    event = torch.Event("sim")
    event.record()
    while not event.query():
        pass


def read_one_value() -> None:
    torch.ones((), device="sim").item()


@pytest.mark.parametrize(
    "wait",
    [
        torch.accelerator.synchronize,
        lambda: torch.accelerator.current_stream().synchronize(),
        synchronize_event,
        synchronize_later_event_of_a_stream_that_waited,
        ask_until_it_has_arrived,
        read_one_value,
    ],
)
def test_what_was_waited_for_has_arrived(wait: Callable[[], None]) -> None:
    source, target = on_device(7.0), pinned(1.0)
    target.copy_(source, non_blocking=True)
    wait()
    assert target[-1] == 7.0


def test_the_host_goes_on_while_a_copy_is_made() -> None:
    source, target = on_device(7.0), pinned(1.0)

    def was_ahead() -> bool:
        target.copy_(source, non_blocking=True)
        event = torch.Event("sim")
        event.record()
        ahead = not event.query()
        event.synchronize()
        return ahead

    # Once would do, were it sure that nothing takes the core away in the meantime.
    assert any(was_ahead() for _ in range(50))


def test_operations_on_the_same_stream_come_after_the_copy() -> None:
    target = on_device(1.0)
    target.copy_(pinned(7.0), non_blocking=True)
    assert float((target + 1)[-1]) == 8.0
    target.copy_(pinned(9.0), non_blocking=True)
    target.add_(1)
    assert float(target[-1]) == 10.0


def test_operations_on_a_stream_that_waited_come_after_the_copy() -> None:
    target, side = on_device(1.0), torch.Stream("sim")
    target.copy_(pinned(7.0), non_blocking=True)
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        assert float((target + 1)[-1]) == 8.0


def test_a_blocking_copy_comes_after_those_before_it() -> None:
    target = on_device(1.0)
    target.copy_(pinned(7.0), non_blocking=True)
    assert target.cpu()[-1] == 7.0


def test_copies_are_made_in_the_order_of_their_issue() -> None:
    there, back = on_device(1.0), pinned(2.0)
    there.copy_(pinned(7.0), non_blocking=True)
    back.copy_(there, non_blocking=True)
    torch.accelerator.synchronize()
    assert back[-1] == 7.0


def test_device_memory_that_is_freed_under_a_copy_is_not_reused_before_its_end() -> None:
    source, target = on_device(7.0), pinned(1.0)
    address = source.data_ptr()
    target.copy_(source, non_blocking=True)
    del source
    reused = on_device(9.0)
    assert reused.data_ptr() == address
    torch.accelerator.synchronize()
    assert target[-1] == 7.0


def test_device_memory_that_is_freed_under_a_copy_outlives_an_empty_cache() -> None:
    source, target = on_device(7.0), pinned(1.0)
    target.copy_(source, non_blocking=True)
    del source
    torch.accelerator.empty_cache()
    torch.accelerator.synchronize()
    assert target[-1] == 7.0


def test_pinned_memory_that_is_freed_under_a_copy_is_not_reused_before_its_end() -> None:
    source, target = pinned(7.0), on_device(1.0)
    address = source.data_ptr()
    target.copy_(source, non_blocking=True)
    del source
    reused = pinned(9.0)
    assert reused.data_ptr() == address
    assert float(target[-1]) == 7.0


def test_pinned_memory_that_is_freed_under_a_copy_outlives_an_empty_cache() -> None:
    source, target = pinned(7.0), on_device(1.0)
    target.copy_(source, non_blocking=True)
    del source
    torch.accelerator.empty_host_cache()
    assert float(target[-1]) == 7.0


def test_events_tell_the_time_of_copies() -> None:
    source, target = on_device(7.0), pinned(1.0)
    before, after = (torch.Event("sim", enable_timing=True) for _ in range(2))
    before.record()
    target.copy_(source, non_blocking=True)
    after.record()
    after.synchronize()
    assert before.elapsed_time(after) > 0.1  # milliseconds; 32 MiB in that were 335 GB/s


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_forked_process_has_a_link_of_its_own() -> None:
    source, target = on_device(7.0), pinned(1.0)
    target.copy_(source, non_blocking=True)
    torch.accelerator.synchronize()
    target.fill_(1.0)
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # a copy that never arrives ends the child, not the test
        target.copy_(source, non_blocking=True)
        torch.accelerator.synchronize()
        os._exit(0 if target[-1] == 7.0 else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
