"""Collectives of backend simccl, on two ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from placement import sim
from placement.testing import Ranks


def own_value(length: int = 4) -> Tensor:
    """Return 1.0 on rank 0, 2.0 on rank 1."""
    return torch.full((length,), dist.get_rank() + 1.0, device="sim")


def reduce_with(name: str) -> list[float]:
    x = own_value()
    dist.all_reduce(x, getattr(dist.ReduceOp, name))
    return x.tolist()


@pytest.mark.parametrize(
    ("name", "expected"), [("SUM", 3.0), ("AVG", 1.5), ("MAX", 2.0), ("MIN", 1.0), ("PRODUCT", 2.0)]
)
def test_all_reduce(two_ranks: Ranks, name: str, expected: float) -> None:
    assert two_ranks.run(reduce_with, name) == [[expected] * 4] * 2


def reduce_scatter_with(name: str, dtype: torch.dtype) -> list[float]:
    output = torch.empty(2, device="sim", dtype=dtype)
    x = torch.arange(4.0, device="sim", dtype=dtype) * (dist.get_rank() + 1)
    operation = (
        dist._make_nccl_premul_sum(0.5) if name == "PREMUL_SUM" else getattr(dist.ReduceOp, name)
    )
    work = dist.reduce_scatter_tensor(output, x, operation, async_op=True)
    work.wait()
    work.wait()  # with gloo's own Work the second wait would undo the division
    assert work.is_completed()
    return output.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("name", "scale"), [("SUM", 3.0), ("AVG", 1.5), ("PREMUL_SUM", 1.5)])
def test_reduce_scatter_averages_once(
    two_ranks: Ranks, name: str, scale: float, dtype: torch.dtype
) -> None:
    expected = [[0.0, scale], [2 * scale, 3 * scale]]
    assert two_ranks.run(reduce_scatter_with, name, dtype) == expected


def move_data() -> dict[str, Any]:
    rank, x = dist.get_rank(), own_value(2)
    gathered = [torch.empty(2, device="sim") for _ in range(2)]
    dist.all_gather(gathered, x)
    flat = torch.empty(4, device="sim")
    dist.all_gather_into_tensor(flat, x)
    from_first = x.clone()
    dist.broadcast(from_first, src=0)
    exchanged = torch.empty(2, device="sim")
    dist.all_to_all_single(exchanged, torch.arange(2.0, device="sim") + 10 * rank)
    scattered = torch.empty(2, device="sim")
    parts = [torch.full((2,), 5.0 + part, device="sim") for part in range(2)]
    dist.scatter(scattered, parts if rank == 0 else None, src=0)
    collected = [torch.empty(2, device="sim") for _ in range(2)] if rank == 0 else None
    dist.gather(x, collected, dst=0)
    reduced = x.clone()
    dist.reduce(reduced, dst=0, op=dist.ReduceOp.AVG)
    dist.barrier()
    return {
        "all_gather": torch.cat(gathered).tolist(),
        "all_gather_into_tensor": flat.tolist(),
        "broadcast": from_first.tolist(),
        "all_to_all": exchanged.tolist(),
        "scatter": scattered.tolist(),
        "gather": None if collected is None else torch.cat(collected).tolist(),
        "reduce": reduced.tolist() if rank == 0 else None,
    }


def test_collectives_that_move_data(two_ranks: Ranks) -> None:
    first, second = two_ranks.run(move_data)
    for result in (first, second):
        assert result["all_gather"] == [1.0, 1.0, 2.0, 2.0]
        assert result["all_gather_into_tensor"] == [1.0, 1.0, 2.0, 2.0]
        assert result["broadcast"] == [1.0, 1.0]
    assert (first["all_to_all"], second["all_to_all"]) == ([0.0, 10.0], [1.0, 11.0])
    assert (first["scatter"], second["scatter"]) == ([5.0, 5.0], [6.0, 6.0])
    assert first["gather"] == [1.0, 1.0, 2.0, 2.0]
    assert first["reduce"] == [1.5, 1.5]


def pass_around() -> list[float]:
    other = 1 - dist.get_rank()
    received = torch.empty(1000, device="sim")
    works = [dist.isend(own_value(1000), other), dist.irecv(received, other)]
    for work in works:
        work.wait()
    first = received[0].item()
    operations = [
        dist.P2POp(dist.isend, own_value(3), other),
        dist.P2POp(dist.irecv, received[:3], other),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return [first, received[0].item()]


def test_both_ranks_may_send_first(two_ranks: Ranks) -> None:
    assert two_ranks.run(pass_around) == [[2.0, 2.0], [1.0, 1.0]]


def exchange_objects_and_host_tensors() -> tuple[Any, Any, float]:
    objects: list[Any] = [None, None]
    dist.all_gather_object(objects, {"rank": dist.get_rank()})
    broadcast = [dist.get_rank()]
    dist.broadcast_object_list(broadcast, src=1, device=torch.device("sim", dist.get_rank()))
    on_host = torch.ones(1)
    dist.all_reduce(on_host)
    return objects, broadcast, on_host.item()


def test_objects_and_host_tensors_travel_in_the_same_group(two_ranks: Ranks) -> None:
    expected = ([{"rank": 0}, {"rank": 1}], [1], 2.0)
    assert two_ranks.run(exchange_objects_and_host_tensors) == [expected] * 2


def mix_devices_in_a_collective() -> str:
    try:
        dist.all_gather_into_tensor(torch.empty(4, device="sim"), torch.ones(2))
    except RuntimeError as error:
        return str(error)
    return "nothing was raised"


def test_a_collective_refuses_tensors_of_two_devices(two_ranks: Ranks) -> None:
    for message in two_ranks.run(mix_devices_in_a_collective):
        assert "cpu" in message
        assert "nothing was raised" not in message


def count_and_fail() -> tuple[int, str, float, bool]:
    x = own_value()
    before = sim.counters()
    dist.all_reduce(x)
    counted = (sim.counters() - before).collectives
    with sim.failing(collective=2) as plan:
        dist.all_reduce(x)
        try:
            dist.all_reduce(x)
        except RuntimeError as error:
            message = str(error).splitlines()[0]
        dist.all_reduce(x)
    return counted, message, x[0].item(), plan.fired and plan.seen.collectives == 3


def test_collectives_are_counted_and_fail_on_request(two_ranks: Ranks) -> None:
    expected = (1, "sim: collective failed (planned): all-reduce", 12.0, True)
    assert two_ranks.run(count_and_fail) == [expected] * 2


def gather_a_late_copy() -> tuple[list[float], list[bool]]:
    """An all-gather orders copies like any operation of the current stream."""
    late = torch.full((2,), dist.get_rank() + 1.0).pin_memory()
    output = torch.empty(4, device="sim")
    with sim.delayed_copies():
        dist.all_gather_into_tensor(output, late.to("sim", non_blocking=True))
        with torch.sim.Stream():
            unordered = late.to("sim", non_blocking=True)
        poisoned = torch.empty(4, device="sim")
        dist.all_gather_into_tensor(poisoned, unordered)
    return output.tolist(), poisoned.isnan().tolist()


def test_a_collective_waits_for_copies_on_its_stream_only(two_ranks: Ranks) -> None:
    assert two_ranks.run(gather_a_late_copy) == [([1.0, 1.0, 2.0, 2.0], [True] * 4)] * 2
