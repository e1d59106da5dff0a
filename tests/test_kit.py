"""The test kit: each assertion holds where it should, and fails with a message that helps."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from models import adam, normed, normed_batch, normed_loss, policy, sharded
from torch import nn

from placement import IllegalTransition, Placement, PlacementManager, Trace
from placement.sim.build import cache_directory
from placement.testing import (
    RankFailed,
    Ranks,
    RanksTimedOut,
    SimulatedAccelerator,
    assert_legal,
    assert_no_moves,
    assert_placement,
    assert_ranks_agree,
    assert_round_trip,
    assert_trace,
)
from placement.trace import EventKind

CACHE = cache_directory()

# assert_placement


@pytest.mark.parametrize("shard", [False, True])
def test_a_placement_is_read_from_the_tensors(one_rank: str, shard: bool) -> None:
    module = sharded(normed()) if shard else normed().to(one_rank)
    optimizer = adam(module.parameters())
    normed_loss(module, [x.to(one_rank) for x in normed_batch()]).backward()
    optimizer.step()
    assert_placement(module, Placement.GPU, optimizer)
    with pytest.raises(AssertionError, match=r"expected the params in cpu_manual, but \d+ tens"):
        assert_placement(module, Placement.CPU_MANUAL, optimizer)
    with pytest.raises(AssertionError, match="does not manage"):
        assert_placement(module, Placement.CPU_FSDP2_MANAGED)
    PlacementManager(module).offload()
    with pytest.raises(AssertionError, match=r"exp_avg \(optimizer\) on"):
        assert_placement(module, Placement.CPU_MANUAL, optimizer)


def test_a_managed_module_is_no_module_on_the_cpu(one_rank: str) -> None:
    module = sharded(normed(), policy())
    assert_placement(module, Placement.CPU_FSDP2_MANAGED)
    with pytest.raises(AssertionError, match="FSDP2 with CPUOffloadPolicy manages"):
        assert_placement(module, Placement.CPU_MANUAL)


# assert_round_trip


def change_a_value(module: nn.Module) -> None:
    module.norm.running_mean.add_(1)


def change_a_dtype(module: nn.Module) -> None:
    module.second.double()


def replace_a_parameter(module: nn.Module) -> None:
    module.second.bias = nn.Parameter(module.second.bias.detach().clone())


def change_a_layout(module: nn.Module) -> None:
    module.first.weight.data = module.first.weight.data.t().contiguous().t()


def tie(module: nn.Module) -> None:
    module.norm.bias.data = module.norm.weight.data
    module.norm.weight.data.zero_()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (change_a_value, r"buffer norm\.running_mean: values changed"),
        (change_a_dtype, r"param second\.weight: dtype was torch\.float32, is torch\.float64"),
        (replace_a_parameter, r"param second\.bias: is another tensor object"),
        (change_a_layout, r"param first\.weight: layout was"),
        (tie, r"param norm\.bias: shares its bytes with others"),
    ],
)
def test_a_round_trip_that_changes_something_is_caught(
    one_rank: str, change: Callable[[nn.Module], None], message: str
) -> None:
    module = normed().to(one_rank)
    with pytest.raises(AssertionError, match=message), assert_round_trip(module):
        change(module)


def test_a_change_of_many_tensors_is_told_of_some_and_counted(one_rank: str) -> None:
    module = nn.Sequential(*(nn.Linear(2, 2) for _ in range(6)))
    with pytest.raises(AssertionError) as caught, assert_round_trip(module):
        module.to(one_rank)
    _, *lines = str(caught.value).splitlines()
    assert lines[0].startswith("  param 0.weight: device was cpu, is ")
    assert lines[8].startswith("  ... and 4 more: device was cpu, is ")
    assert len(lines) == 9


def test_a_lost_optimizer_entry_is_caught(one_rank: str) -> None:
    module = normed().to(one_rank)
    optimizer = adam(module.parameters())
    normed_loss(module, [x.to(one_rank) for x in normed_batch()]).backward()
    optimizer.step()
    with pytest.raises(AssertionError, match=r"optimizer second\.bias/exp_avg: is gone"):
        with assert_round_trip(module, optimizer):
            del optimizer.state[module.second.bias]["exp_avg"]


def test_a_round_trip_through_the_manager_changes_nothing(one_rank: str) -> None:
    module = sharded(normed())
    optimizer = adam(module.parameters())
    normed_loss(module, [x.to(one_rank) for x in normed_batch()]).backward()
    optimizer.step()
    manager = PlacementManager(module, optimizer)
    with assert_round_trip(module, optimizer):
        manager.offload()
        manager.onload()


# assert_trace, assert_no_moves, assert_legal


def test_a_trace_is_asserted_line_by_line(one_rank: str, placement_trace: Trace) -> None:
    module = sharded(normed(), policy())
    managed = PlacementManager(module)
    with managed.saving():
        pass
    with pytest.raises(IllegalTransition):
        managed.onload()
    plain = PlacementManager(normed())
    plain.onload()
    plain.module.cpu()
    expected = [
        "save",
        "refused onload",
        "params onload cpu_manual->gpu",
        "buffers onload cpu_manual->gpu",
        "foreign cpu()",
    ]
    assert_trace(placement_trace, expected)
    with pytest.raises(AssertionError, match=r"but what happened is\n  save\n"):
        assert_trace(placement_trace, expected[:-1])


def test_moves_are_caught_with_their_call_site(one_rank: str, placement_trace: Trace) -> None:
    manager = PlacementManager(normed())
    with assert_no_moves(), manager.saving():
        pass
    with pytest.raises(AssertionError, match=r"params onload .* at .*test_kit\.py"):
        with assert_no_moves(), manager.evaluating():
            pass
    with pytest.raises(AssertionError, match="past the manager"), assert_no_moves():
        manager.module.to(one_rank)


def test_a_manager_leaves_a_legal_trace(one_rank: str, placement_trace: Trace) -> None:
    manager = PlacementManager(normed())
    with manager.evaluating(), manager.saving():
        pass
    manager.onload()
    assert_legal(placement_trace)


@pytest.mark.parametrize(
    ("source", "dest", "message"),
    [
        ("cpu_fsdp2_managed", "gpu", "illegal"),
        ("gpu", "gpu", "illegal"),
        ("cpu_manual", "gpu", "had been left in gpu"),
    ],
)
def test_an_illegal_trace_is_caught(
    placement_trace: Trace, source: str, dest: str, message: str
) -> None:
    for start in ("cpu_manual", source):
        placement_trace.record(
            module="M#0",
            component="params",
            kind=EventKind.TRIGGER,
            name="onload",
            source=start,
            dest=dest if start == source else "gpu",
        )
    with pytest.raises(AssertionError, match=message):
        assert_legal(placement_trace)


def test_a_context_left_open_is_caught(one_rank: str, placement_trace: Trace) -> None:
    manager = PlacementManager(normed())
    context = manager.evaluating()
    context.__enter__()
    with pytest.raises(AssertionError, match=r"did not end:\n  evaluate at .*test_kit\.py"):
        assert_legal(placement_trace)
    context.__exit__(None, None, None)
    assert_legal(placement_trace)


# ranks


def rank_and_size() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


def fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ZeroDivisionError("planted on one rank")
    dist.barrier()


def hang_on(rank: int) -> None:
    if dist.get_rank() == rank:
        threading.Event().wait()


def die_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise SystemExit(3)
    dist.barrier()


def disagree() -> None:
    module = normed().to(torch.accelerator.current_accelerator())
    assert_ranks_agree(module)
    if dist.get_rank() == 1:
        module.second.to("cpu")
    with pytest.raises(AssertionError, match=r"rank 1: param second\.bias on cpu"):
        assert_ranks_agree(module)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_body_runs_on_every_rank(ranks: Callable[[int], Ranks], size: int) -> None:
    assert ranks(size).run(rank_and_size) == [(rank, size) for rank in range(size)]


@pytest.mark.timed
def test_a_failure_on_a_rank_comes_back_with_its_traceback(device_type: str) -> None:
    group = Ranks(2, device_type)
    with pytest.raises(RankFailed, match=r"(?s)rank 1 of 2 failed.*in fail_on.*planted on one"):
        group.run(fail_on, 1)
    assert group.run(rank_and_size) == [(0, 2), (1, 2)], "new processes took their place"
    with pytest.raises(RanksTimedOut, match=r"ranks \[1\] of 2 had not finished"):
        group.run(hang_on, 1, deadline=2.0)
    with pytest.raises(RankFailed):
        group.run(die_on, 0)
    group.close()


def test_ranks_that_differ_are_caught_on_every_rank(two_ranks: Ranks) -> None:
    two_ranks.run(disagree)


# The simulated accelerator


def test_what_a_test_changes_on_the_accelerator_is_put_back(
    sim_accelerator: SimulatedAccelerator,
) -> None:
    with sim_accelerator.fresh():
        sim_accelerator.set_free(4096)
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(10_000, device=sim_accelerator.device)
    assert torch.empty(10_000, device=sim_accelerator.device).device == sim_accelerator.device


def test_failures_and_counts_are_at_hand(sim_accelerator: SimulatedAccelerator) -> None:
    before = sim_accelerator.counters()
    with sim_accelerator.failing(copy=2) as plan:
        torch.ones(3).to(sim_accelerator.device)
        with pytest.raises(RuntimeError, match="planned"):
            torch.ones(3).to(sim_accelerator.device)
    assert plan.fired
    copies = sim_accelerator.counters() - before
    assert copies.host_to_device_copies == 1


# A stranger's suite


def test_the_plugin_works_in_a_stranger_suite(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A pytester's home is empty, and building the simulated accelerator takes a minute.
    monkeypatch.setenv("TORCH_PLACEMENT_CACHE", str(CACHE))
    pytester.makepyfile(
        bodies="""
            import torch.distributed as dist

            def body(word):
                return f"{word} {dist.get_rank()}"
        """,
        test_mine="""
            import torch
            from bodies import body
            from placement import Placement, PlacementManager
            from placement.testing import assert_no_moves, assert_placement, assert_trace

            def test_move(placement_device, placement_trace):
                manager = PlacementManager(torch.nn.Linear(2, 2))
                manager.onload()
                assert_placement(manager.module, Placement.GPU)
                assert_trace(placement_trace, ["params onload cpu_manual->gpu"])

            def test_every_context_is_checked(placement_device, placement_trace):
                module = torch.nn.Linear(2, 2)
                manager = PlacementManager(module)
                module.weight.data = module.weight.data.to(placement_device)
                try:
                    manager.evaluating().__enter__()
                except Exception as error:
                    assert "weight (param)" in str(error)
                else:
                    raise AssertionError("verify=always is the default under the plugin")

            def test_out_of_memory(sim_accelerator):
                sim_accelerator.set_free(0)
                try:
                    torch.empty(5000, device=sim_accelerator.device)
                except torch.OutOfMemoryError:
                    return
                raise AssertionError

            def test_ranks(ranks):
                assert ranks(2).run(body, "rank") == ["rank 0", "rank 1"]
        """,
    )
    result = pytester.runpytest_subprocess("--placement-device", "sim")
    result.assert_outcomes(passed=4)


def test_the_plugin_imports_no_torch_before_it_is_used(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test(): import sys; assert 'torch' not in sys.modules")
    pytester.runpytest_subprocess().assert_outcomes(passed=1)
