"""``parameter.data = other``: parameters keep their identity when they move between devices."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from placement.testing import Ranks

MICROSECOND = 1e-6


def seconds_per_call(function: Callable[[], Any], calls: int = 300) -> float:
    """Return the best of three averages, since other processes share the cores."""
    averages = []
    for _ in range(3):
        start = time.perf_counter()
        for _ in range(calls):
            function()
        averages.append((time.perf_counter() - start) / calls)
    return min(averages)


def test_a_parameter_can_be_given_data_on_the_other_device() -> None:
    parameter = nn.Parameter(torch.ones(3))
    same = parameter
    parameter.data = torch.full((3,), 2.0, device="sim")
    assert parameter is same
    assert parameter.device == torch.device("sim:0")
    assert parameter.tolist() == [2.0] * 3
    parameter.data = torch.zeros(3)
    assert parameter.device == torch.device("cpu")


def test_a_module_keeps_its_parameters_when_it_moves() -> None:
    module = nn.Linear(2, 2)
    weight = module.weight
    assert module.to("sim").weight is weight
    assert weight.is_sim
    assert module.to("cpu").weight is weight
    assert weight.is_cpu


def test_host_and_device_are_compatible_and_other_layouts_are_not() -> None:
    host, device = torch.ones(2, 2), torch.ones(2, 2, device="sim")
    compatible = torch._has_compatible_shallow_copy_type
    assert compatible(host, device)
    assert compatible(device, host)
    assert compatible(device, torch.ones(1, dtype=torch.int8, device="sim:1"))
    assert not compatible(device, host.to_sparse())
    assert not compatible(device, torch.ones(2, 2, device="meta"))


def test_the_question_costs_no_more_than_microseconds() -> None:
    host, device = torch.ones(2), torch.ones(2, device="sim")
    ask = torch._has_compatible_shallow_copy_type
    assert seconds_per_call(lambda: ask(host, device)) < 20 * MICROSECOND


def swap_the_data_of_dtensors() -> dict[str, Any]:
    mesh = init_device_mesh("sim", (torch.distributed.get_world_size(),))
    offloaded, resident = nn.Linear(8, 8), nn.Linear(8, 8).to("sim")
    fully_shard(offloaded, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
    fully_shard(resident, mesh=mesh)
    parameter, on_device = offloaded.weight, resident.weight
    assert isinstance(parameter, DTensor)
    assert isinstance(on_device, DTensor)
    host_wrapper = parameter.detach()
    ask = torch._has_compatible_shallow_copy_type
    with torch.no_grad():
        seconds = seconds_per_call(lambda: ask(parameter, on_device))
    before = parameter.device.type
    parameter.data = on_device.detach()
    during = parameter.device.type
    parameter.data = host_wrapper
    return {
        "devices": (before, during, parameter.device.type),
        "is the same parameter": parameter is offloaded.weight,
        "seconds": seconds,
    }


def test_a_dtensor_parameter_can_be_given_data_on_the_other_device(two_ranks: Ranks) -> None:
    for result in two_ranks.run(swap_the_data_of_dtensors):
        assert result["devices"] == ("cpu", "sim", "cpu")
        assert result["is the same parameter"]
        assert result["seconds"] < 50 * MICROSECOND
