"""Memory: counted to the byte, cached, limited, and out of the host's reach."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from placement import sim

MIB = 1 << 20


def test_allocated_bytes_are_those_of_the_tensors_without_rounding() -> None:
    before = torch.sim.memory_allocated()
    small = torch.empty(3, dtype=torch.int8, device="sim")
    large = torch.empty(1000, device="sim")
    assert torch.sim.memory_allocated() - before == 3 + 4000
    del small
    assert torch.sim.memory_allocated() - before == 4000
    del large
    assert torch.sim.memory_allocated() == before


def test_results_of_kernels_are_counted_and_freed_like_any_other_tensor() -> None:
    x = torch.ones(100, device="sim")
    before = torch.sim.memory_allocated()
    y = x + 1
    values, indices = x.sort()
    assert torch.sim.memory_allocated() - before == 400 + 400 + 800
    del y, values, indices
    assert torch.sim.memory_allocated() == before


def test_a_result_takes_over_the_memory_that_its_kernel_allocated() -> None:
    x = torch.ones(100, device="sim")
    before = sim.counters()
    kept = x + x
    assert (sim.counters() - before).allocations == 1
    assert kept.sum().item() == 200


def test_the_peak_remembers_what_was_freed_until_it_is_reset() -> None:
    base = torch.sim.memory_allocated()
    torch.sim.reset_peak_memory_stats()
    torch.empty(5000, dtype=torch.int8, device="sim")
    assert torch.sim.max_memory_allocated() - base == 5000
    torch.sim.reset_peak_memory_stats()
    assert torch.sim.max_memory_allocated() == base


def test_devices_are_accounted_separately() -> None:
    here, there = torch.sim.memory_allocated(0), torch.sim.memory_allocated(1)
    kept = torch.empty(10, device="sim:1")
    assert torch.sim.memory_allocated(0) == here
    assert torch.sim.memory_allocated(1) == there + kept.nbytes


def test_a_freed_block_is_reused_and_stays_reserved_until_the_cache_is_emptied() -> None:
    reserved = torch.sim.memory_reserved()
    x = torch.empty(2 * MIB, dtype=torch.int8, device="sim")
    address = x.data_ptr()
    del x
    assert torch.sim.memory_reserved() - reserved == 2 * MIB
    x = torch.empty(2 * MIB - 700, dtype=torch.int8, device="sim")
    assert x.data_ptr() == address
    del x
    torch.accelerator.empty_cache()
    assert torch.sim.memory_reserved() == reserved


def test_a_cached_block_serves_only_the_stream_that_it_was_allocated_on() -> None:
    x = torch.empty(2 * MIB, dtype=torch.int8, device="sim")
    address = x.data_ptr()
    del x
    with torch.sim.Stream():
        elsewhere = torch.empty(2 * MIB, dtype=torch.int8, device="sim")
    assert elsewhere.data_ptr() != address


def test_a_capacity_runs_out_with_an_error_that_has_the_numbers() -> None:
    sim.set_capacity(torch.sim.memory_reserved() + 4 * MIB)
    kept = torch.empty(3 * MIB, dtype=torch.int8, device="sim")
    with pytest.raises(torch.OutOfMemoryError) as error:
        torch.empty(2 * MIB, dtype=torch.int8, device="sim")
    message = str(error.value)
    assert "Tried to allocate 2.00 MiB (2097152 bytes)" in message
    assert f"sim:0 has a total capacity of 4.00 MiB ({sim.capacity()} bytes)" in re.sub(
        r"capacity of \S+ MiB", "capacity of 4.00 MiB", message
    )
    assert "(1048576 bytes) is free" in message
    assert torch.accelerator.memory_stats()["num_ooms"] >= 1
    assert kept.numel() == 3 * MIB


def test_cached_blocks_are_released_before_an_allocation_fails() -> None:
    sim.set_capacity(torch.sim.memory_reserved() + 4 * MIB)
    x = torch.empty(3 * MIB, dtype=torch.int8, device="sim")
    del x
    # this fits, but not beside the cached block
    y = torch.empty(2 * MIB, dtype=torch.int8, device="sim")
    assert y.numel() == 2 * MIB


def test_the_capacity_runs_out_inside_a_kernel_too() -> None:
    x = torch.ones(MIB, device="sim")
    sim.set_capacity(torch.sim.memory_reserved() + MIB)
    with pytest.raises(torch.OutOfMemoryError):
        x + x
    x.add_(1)
    assert x.sum().item() == 2 * MIB


def test_a_capacity_below_what_is_live_lets_live_tensors_be() -> None:
    x = torch.ones(MIB, device="sim")
    sim.set_capacity(1024)
    assert x[5].item() == 1.0
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(2048, dtype=torch.int8, device="sim")
    sim.set_capacity(None)
    assert sim.capacity() == sim.DEFAULT_CAPACITY == 80 << 30


def test_free_and_total_memory_are_reported() -> None:
    sim.set_capacity(64 * MIB)
    kept = torch.empty(MIB, dtype=torch.int8, device="sim")
    free, total = torch.sim.mem_get_info()
    assert total == 64 * MIB
    assert free == total - torch.sim.memory_reserved()
    assert torch.accelerator.get_memory_info() == (free, total)
    assert torch.sim.get_device_properties().total_memory == total
    assert kept.numel() == MIB


def test_a_storage_resized_to_nothing_frees_its_memory_and_can_come_back() -> None:
    x = torch.ones(12, device="sim")
    allocated = torch.sim.memory_allocated()
    x.untyped_storage().resize_(0)
    assert torch.sim.memory_allocated() == allocated - 48
    x.untyped_storage().resize_(48)
    assert torch.sim.memory_allocated() == allocated
    assert x.zero_().sum().item() == 0.0


def test_a_tensor_of_freed_storage_raises_wherever_it_is_used() -> None:
    x = torch.ones(12, device="sim")
    view = x[3:]
    x.untyped_storage().resize_(0)
    host = torch.ones(12)
    for use in (lambda: view + 1, x.cpu, lambda: x.copy_(host), x.sum, x.clone):
        with pytest.raises(RuntimeError, match=r"illegal memory access.*freed or shrunk"):
            use()


def test_growing_a_storage_keeps_what_it_held() -> None:
    x = torch.arange(4.0, device="sim")
    x.untyped_storage().resize_(64)
    assert x.tolist() == [0.0, 1.0, 2.0, 3.0]
    x.resize_(2, 8)
    assert x[0, :4].tolist() == [0.0, 1.0, 2.0, 3.0]


def test_the_host_cannot_convert_device_memory() -> None:
    x = torch.ones(3, device="sim")
    with pytest.raises(TypeError, match="can't convert sim:0 device type tensor to numpy"):
        x.numpy()
    with pytest.raises(RuntimeError, match="different device"):
        torch.zeros(3).set_(x.untyped_storage())
    with pytest.raises(RuntimeError, match="only dense CPU tensors can be pinned"):
        x.pin_memory()


def test_the_address_of_a_device_tensor_carries_its_device() -> None:
    for index in (0, 5):
        address = torch.ones(3, device=f"sim:{index}").data_ptr()
        assert address >> 54 == 1
        assert (address >> 48) & 31 == index


def test_a_host_read_of_device_memory_ends_the_process() -> None:
    code = (
        "import ctypes, torch; from placement import sim; sim.enable()\n"
        "x = torch.ones(3, device='sim'); print(ctypes.c_float.from_address(x.data_ptr()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60)
    assert done.returncode == -signal.SIGSEGV, done.stderr


def test_pinned_bytes_are_exact() -> None:
    before = sim.pinned_bytes()
    x = torch.empty(3, dtype=torch.int8, pin_memory=True)
    y = torch.ones(1000).pin_memory()
    assert sim.pinned_bytes() - before == 3 + 4000
    assert x.is_pinned()
    assert y[10:].is_pinned()
    assert not torch.ones(3).is_pinned()
    del x, y
    assert sim.pinned_bytes() == before


def test_a_non_blocking_copy_to_the_host_lands_in_pinned_memory() -> None:
    x = torch.ones(3, device="sim")
    assert x.to("cpu", non_blocking=True).is_pinned()
    assert not x.to("cpu").is_pinned()


def test_copies_are_counted_with_their_bytes() -> None:
    host = torch.ones(10)
    before = sim.counters()
    device = host.to("sim")
    device.to("sim:1")
    device.copy_(host)
    device[:5].cpu()
    counted = sim.counters() - before
    assert (counted.host_to_device_copies, counted.host_to_device_bytes) == (2, 80)
    assert (counted.device_to_device_copies, counted.device_to_device_bytes) == (1, 40)
    assert (counted.device_to_host_copies, counted.device_to_host_bytes) == (1, 20)


def test_an_out_argument_that_grows_is_counted() -> None:
    x = torch.ones(4, device="sim")
    out = torch.empty(0, device="sim")
    before = sim.counters()
    torch.add(x, x, out=out)
    assert (sim.counters() - before).out_resizes == 1
    assert out.tolist() == [2.0] * 4


def test_threads_may_allocate_at_the_same_time() -> None:
    allocated = torch.sim.memory_allocated()

    def allocate_and_free() -> None:
        for size in range(1, 400):
            x = torch.ones(size, device="sim")
            assert (x + x).sum().item() == 2 * size

    with ThreadPoolExecutor(4) as threads:
        for done in [threads.submit(allocate_and_free) for _ in range(4)]:
            done.result()
    assert torch.sim.memory_allocated() == allocated


def test_training_leaves_nothing_behind() -> None:
    allocated = torch.sim.memory_allocated()
    model = torch.nn.Sequential(torch.nn.Conv1d(3, 4, 3), torch.nn.ReLU()).to("sim")
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(2):
        model(torch.ones(2, 3, 8, device="sim")).sum().backward()
        optimizer.step()
    del model, optimizer
    assert torch.sim.memory_allocated() == allocated
