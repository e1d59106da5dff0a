"""Delayed copies: a missing synchronisation shows, every time, and a present one is enough."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from placement import sim


@pytest.fixture(autouse=True)
def delaying() -> Iterator[None]:
    with sim.delayed_copies():
        yield


def to_host(x: Tensor) -> Tensor:
    return x.to("cpu", non_blocking=True)


def is_poison(x: Tensor) -> bool:
    return bool(x.isnan().all())


def on_device(value: float = 7.0) -> Tensor:
    return torch.full((4,), value, device="sim")


def test_a_target_on_the_host_holds_poison_until_it_is_waited_for() -> None:
    host = to_host(on_device())
    assert is_poison(host)
    torch.accelerator.synchronize()
    assert host.tolist() == [7.0] * 4


def test_poison_is_not_a_plausible_value_of_any_dtype() -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        assert is_poison(to_host(on_device().to(dtype)))
    integers = to_host(on_device().long())
    assert integers.tolist() == [-1] * 4


def synchronize_event_afterwards() -> None:
    event = torch.Event(device="sim")
    event.record()
    event.synchronize()


def synchronize_waiting_stream() -> None:
    event = torch.Event(device="sim")
    event.record()
    first, second = torch.sim.Stream(), torch.sim.Stream()
    event.wait(first)
    second.wait_stream(first)
    second.synchronize()


def poll_event() -> None:
    event = torch.Event(device="sim")
    event.record()
    asked = 1
    while not event.query():
        asked += 1
    assert asked == 2


def poll_stream() -> None:
    asked = 1
    while not torch.accelerator.current_stream().query():
        asked += 1
    assert asked == 2


WAITS: dict[str, Callable[[], object]] = {
    "synchronising the device": torch.accelerator.synchronize,
    "torch.sim.synchronize": lambda: torch.sim.synchronize(),
    "synchronising the stream": lambda: torch.accelerator.current_stream().synchronize(),
    "synchronising an event recorded after it": synchronize_event_afterwards,
    "synchronising a stream that waits for it": synchronize_waiting_stream,
    "polling an event": poll_event,
    "polling the stream": poll_stream,
    "a blocking copy to the host": lambda: torch.ones(1, device="sim").cpu(),
    "a blocking copy to the device": lambda: torch.ones(1).to("sim"),
    "item()": lambda: torch.ones(1, device="sim").item(),
}


@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS.keys())
def test_a_copy_lands_by(wait: Callable[[], object]) -> None:
    x = on_device()
    host = to_host(x)
    assert is_poison(host)
    wait()
    assert host.tolist() == [7.0] * 4


def test_an_event_recorded_before_the_copy_does_not_land_it() -> None:
    event = torch.Event(device="sim")
    event.record()
    host = to_host(on_device())
    event.synchronize()
    assert is_poison(host)


def test_another_stream_does_not_land_it() -> None:
    host = to_host(on_device())
    other = torch.sim.Stream()
    other.synchronize()
    with other:
        torch.ones(1, device="sim").item()
    assert is_poison(host)


def test_another_device_does_not_land_it() -> None:
    host = to_host(on_device())
    torch.sim.synchronize(1)
    assert is_poison(host)


def test_kernels_do_not_land_it() -> None:
    x = on_device()
    host = to_host(x)
    x + x
    assert is_poison(host)


def test_a_copy_reads_what_the_source_held_when_it_was_issued() -> None:
    x = on_device()
    host = to_host(x)
    x.fill_(8.0)
    torch.accelerator.synchronize()
    assert host.tolist() == [7.0] * 4


def test_a_source_may_be_freed_and_reused_on_the_stream_of_the_copy() -> None:
    x = on_device()
    host = to_host(x)
    del x
    on_device(8.0)
    torch.accelerator.synchronize()
    assert host.tolist() == [7.0] * 4


def copy_on_side_stream(x: Tensor) -> tuple[Tensor, torch.Stream]:
    side = torch.sim.Stream()
    side.wait_stream(torch.sim.current_stream())
    with side:
        return to_host(x), side


def test_a_source_freed_during_a_copy_on_another_stream_spoils_it() -> None:
    x = on_device()
    host, side = copy_on_side_stream(x)
    del x
    side.synchronize()
    assert is_poison(host)


def test_record_stream_keeps_the_source_of_a_copy_on_another_stream() -> None:
    x = on_device()
    host, side = copy_on_side_stream(x)
    x.record_stream(side)
    del x
    side.synchronize()
    assert host.tolist() == [7.0] * 4


def test_a_source_may_be_freed_once_its_stream_waits_for_the_copy() -> None:
    x = on_device()
    host, side = copy_on_side_stream(x)
    torch.sim.current_stream().wait_stream(side)
    del x
    side.synchronize()
    assert host.tolist() == [7.0] * 4


def test_memory_that_is_not_pinned_is_copied_at_once() -> None:
    host = torch.empty(4)
    host.copy_(on_device(), non_blocking=True)
    assert host.tolist() == [7.0] * 4
    device = torch.full((4,), 6.0).to("sim", non_blocking=True)
    assert device.tolist() == [6.0] * 4


def test_a_copy_that_changes_dtype_or_layout_is_made_at_once() -> None:
    x = torch.arange(6.0, device="sim").view(2, 3)
    host = torch.empty(2, 3, dtype=torch.float64, pin_memory=True)
    host.copy_(x, non_blocking=True)
    assert host.sum().item() == 15.0
    host = torch.empty(3, 2, pin_memory=True)
    host.copy_(x.t(), non_blocking=True)
    assert host.sum().item() == 15.0


def pinned(value: float = 5.0) -> Tensor:
    return torch.full((4,), value).pin_memory()


def test_a_source_on_the_host_overwritten_before_the_copy_landed_corrupts_it() -> None:
    source = pinned()
    device = source.to("sim", non_blocking=True)
    source.fill_(9.0)
    assert device.tolist() == [9.0] * 4


def test_a_source_on_the_host_may_be_overwritten_after_synchronising() -> None:
    source = pinned()
    device = source.to("sim", non_blocking=True)
    torch.accelerator.synchronize()
    source.fill_(9.0)
    assert device.tolist() == [5.0] * 4


def test_an_operation_on_the_same_stream_sees_the_copied_values() -> None:
    assert (pinned().to("sim", non_blocking=True) + 1).tolist() == [6.0] * 4


def test_an_operation_on_a_stream_that_did_not_wait_computes_with_poison() -> None:
    side = torch.sim.Stream()
    with side:
        device = pinned().to("sim", non_blocking=True)
    too_early = device + 1
    assert is_poison(too_early.cpu())
    torch.sim.current_stream().wait_stream(side)
    assert (device + 1).tolist() == [6.0] * 4


def test_a_source_on_the_host_may_be_dropped_at_once_and_stays_pinned_until_landing() -> None:
    before = sim.pinned_bytes()
    device = pinned().to("sim", non_blocking=True)
    assert sim.pinned_bytes() == before + 16
    torch.accelerator.synchronize()
    assert sim.pinned_bytes() == before
    assert device.tolist() == [5.0] * 4


def test_a_target_on_the_device_may_be_dropped_before_landing() -> None:
    allocated = torch.sim.memory_allocated()
    device = pinned().to("sim", non_blocking=True)
    del device
    assert torch.sim.memory_allocated() == allocated
    torch.accelerator.synchronize()


def test_a_round_trip_through_one_pinned_buffer_keeps_stream_order() -> None:
    buffer = torch.empty(4, pin_memory=True)
    buffer.copy_(on_device(3.0), non_blocking=True)
    back = torch.empty(4, device="sim")
    back.copy_(buffer, non_blocking=True)
    buffer.copy_(on_device(4.0), non_blocking=True)
    assert is_poison(buffer)
    assert back.tolist() == [3.0] * 4
    assert buffer.tolist() == [4.0] * 4  # tolist() of `back` was a blocking copy


def test_copies_into_parts_of_one_host_buffer_are_delayed_separately() -> None:
    buffer = torch.zeros(8, pin_memory=True)
    buffer[:4].copy_(on_device(3.0), non_blocking=True)
    first = torch.accelerator.current_stream().record_event()
    buffer[4:].copy_(on_device(4.0), non_blocking=True)
    assert is_poison(buffer)
    first.synchronize()
    assert buffer[:4].tolist() == [3.0] * 4
    assert is_poison(buffer[4:])


def test_copies_into_parts_of_one_device_buffer_are_delayed_separately() -> None:
    buffer = torch.zeros(8, device="sim")
    first, second = pinned(1.0), pinned(2.0)
    buffer[:4].copy_(first, non_blocking=True)
    buffer[4:].copy_(second, non_blocking=True)
    buffer[4:].add_(1)  # lands the second copy only
    first.fill_(9.0)
    second.fill_(9.0)
    assert buffer.tolist() == [9.0] * 4 + [3.0] * 4


def test_copies_that_overlap_on_the_device_land_in_order() -> None:
    buffer = torch.zeros(6, device="sim")
    buffer[:4].copy_(pinned(1.0), non_blocking=True)
    buffer[2:].copy_(pinned(2.0), non_blocking=True)
    assert buffer.tolist() == [1.0] * 2 + [2.0] * 4


def test_copies_go_on_the_link_again_after_the_block() -> None:
    with sim.delayed_copies():
        assert sim.copies_are_delayed()
    assert sim.copies_are_delayed()  # as the fixture found it
    sim.set_delayed_copies(False)
    host = to_host(on_device())
    torch.accelerator.synchronize()
    assert host.tolist() == [7.0] * 4
