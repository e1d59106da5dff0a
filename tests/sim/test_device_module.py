"""torch.accelerator, torch.sim, streams and events: the names that generic torch code uses."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from placement import sim


def test_the_current_accelerator_is_the_simulation() -> None:
    assert torch.accelerator.is_available()
    assert torch.accelerator.current_accelerator() == torch.device("sim")
    assert torch.accelerator.device_count() == torch.sim.device_count() == 8
    assert torch.get_device_module("sim") is torch.sim
    assert torch.sim.is_available()
    assert torch.sim.is_initialized()


def test_the_current_device_can_be_changed_and_is_each_threads_own() -> None:
    seen = []
    with torch.sim.device(3):
        assert torch.accelerator.current_device_index() == torch.sim.current_device() == 3
        assert torch.empty(1, device="sim").device.index == 3
        thread = threading.Thread(target=lambda: seen.append(torch.sim.current_device()))
        thread.start()
        thread.join()
    assert torch.sim.current_device() == 0
    assert seen == [0]
    torch.accelerator.set_device_index(2)
    assert torch.sim.current_device() == 2
    torch.sim.set_device("sim:0")
    assert torch.sim.current_device() == 0


def test_a_device_that_does_not_exist_is_refused() -> None:
    for use in (
        lambda: torch.empty(1, device="sim:8"),
        lambda: torch.sim.set_device(8),
        lambda: torch.accelerator.set_device_index(8),
        lambda: sim.capacity(8),
    ):
        with pytest.raises(RuntimeError, match="invalid device ordinal 8"):
            use()


def test_streams_have_ids_of_their_own() -> None:
    first, second = torch.sim.Stream(), torch.sim.Stream(device=1)
    assert first.stream_id != second.stream_id
    assert second.device == torch.device("sim:1")
    assert torch.sim.current_stream() == torch.sim.default_stream()
    with torch.sim.stream(first):
        assert torch.sim.current_stream() == torch.accelerator.current_stream() == first
    with torch.sim.stream(None):
        assert torch.sim.current_stream() == torch.sim.default_stream()
    torch.sim.set_stream(first)
    assert torch.accelerator.current_stream() == first


def test_events_tell_the_time_between_them() -> None:
    start, end = (torch.sim.Event(enable_timing=True) for _ in range(2))
    start.record()
    torch.randn(200, 200, device="sim") @ torch.randn(200, 200, device="sim")
    end.record()
    end.synchronize()
    assert end.query()
    assert 0 < start.elapsed_time(end) < 10_000


def test_memory_statistics_have_the_usual_names() -> None:
    kept = torch.empty(1000, device="sim")
    stats = torch.accelerator.memory_stats()
    assert stats["allocated_bytes.all.current"] == torch.accelerator.memory_allocated()
    assert stats["reserved_bytes.all.current"] == torch.accelerator.memory_reserved()
    assert torch.accelerator.max_memory_allocated() >= kept.nbytes
    assert torch.sim.memory_stats()["num_ooms"] == stats["num_ooms"]
    torch.accelerator.reset_peak_memory_stats()
    torch.accelerator.reset_accumulated_memory_stats()
    assert torch.accelerator.memory_stats()["allocated_bytes.all.allocated"] == 0
    assert torch.accelerator.max_memory_allocated() == torch.accelerator.memory_allocated()


def test_the_device_can_do_everything() -> None:
    assert torch.bfloat16 in torch.accelerator.get_device_capability()["supported_dtypes"]
    assert torch.sim.is_bf16_supported()
    assert torch.bfloat16 in torch.sim.get_amp_supported_dtype()


def test_states_of_all_generators_can_be_saved_and_restored() -> None:
    states = torch.sim.get_rng_state_all()
    drawn = [torch.randn(2, device=f"sim:{index}").cpu() for index in range(8)]
    torch.sim.set_rng_state_all(states)
    again = [torch.randn(2, device=f"sim:{index}").cpu() for index in range(8)]
    assert all(torch.equal(a, b) for a, b in zip(drawn, again, strict=True))
    with torch.random.fork_rng(devices=[0], device_type="sim"):
        forked = torch.randn(2, device="sim")
    assert torch.equal(torch.randn(2, device="sim"), forked)
    torch.sim.manual_seed(7)
    assert torch.sim.initial_seed() == 7
    torch.sim.seed()
    assert len(torch.sim.default_generators) == 8


def test_tensors_and_modules_have_a_method_of_the_devices_name() -> None:
    assert torch.ones(2).sim(1).device == torch.device("sim:1")
    assert torch.ones(2, device="sim").is_sim
    assert next(nn.Linear(2, 2).sim().parameters()).is_sim


def test_a_data_loader_pins_its_batches() -> None:
    loader = DataLoader(TensorDataset(torch.arange(6.0)), batch_size=3, pin_memory=True)
    batches = [batch for (batch,) in loader]
    assert all(batch.is_pinned() for batch in batches)
    assert torch.cat(batches).to("sim", non_blocking=True).sum().item() == 15.0
