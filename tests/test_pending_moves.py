"""``wait=False``: copies beside the computation, recorded when the host may read them."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable

import pytest
import torch
from models import adam, assert_equal, local, normed, normed_batch, normed_loss, sharded, values

from placement import Component, Placement, PlacementDrift, PlacementManager, Trace
from placement.transfer import Transfer

GPU, CPU = Placement.GPU, Placement.CPU_MANUAL


def stepped(device: str, trace: Trace | None = None) -> PlacementManager:
    module = sharded(normed())
    manager = PlacementManager(module, adam(module.parameters()), trace=trace)
    with manager.training():
        normed_loss(module, [x.to(device) for x in normed_batch()]).backward()
        manager.optimizer.step()
    return manager


def parameters(manager: PlacementManager) -> dict[str, torch.Tensor]:
    return {name: local(p).cpu() for name, p in manager.module.named_parameters()}


def test_tensors_and_record_stay_until_the_move_is_waited_for(one_rank: str, trace: Trace) -> None:
    manager = stepped(one_rank, trace)
    before = parameters(manager)
    move = manager.offload(wait=False)
    assert not move.done
    assert manager.placement is GPU
    assert {p.device.type for p in manager.module.parameters()} == {one_rank}
    with torch.no_grad():
        normed_loss(manager.module, [x.to(one_rank) for x in normed_batch(1)])  # beside the copies
    move.wait()
    assert move.done
    assert manager.placement is CPU
    assert_equal(parameters(manager), before)
    move.wait()  # does nothing


def test_a_handle_that_is_kept_keeps_no_memory(one_rank: str) -> None:
    gc.collect()
    before = torch.accelerator.memory_allocated()
    manager = stepped(one_rank)
    moves = []
    for _ in range(3):
        moves.append(manager.offload(wait=False))
        manager.verify()
        assert torch.accelerator.memory_allocated() == before
        moves.append(manager.onload(wait=False))
        manager.verify()
    assert all(move.done for move in moves)


@pytest.mark.parametrize(
    "ask",
    [
        lambda manager: manager.verify(),
        lambda manager: manager.offload(),
        lambda manager: manager.detach(),
        lambda manager: manager.recover(),
        lambda manager: manager.leftovers(),
        lambda manager: manager.release_host_memory(),
        lambda manager: manager.saving().__enter__(),
    ],
)
def test_whatever_is_asked_next_waits(
    one_rank: str, ask: Callable[[PlacementManager], object]
) -> None:
    manager = stepped(one_rank)
    before = values(manager.census())
    move = manager.offload(wait=False)
    ask(manager)
    assert move.done
    assert manager.placement is CPU
    assert_equal(values(manager.census()), before)


def test_training_after_an_onload_that_was_not_waited_for(one_rank: str) -> None:
    manager, twin = stepped(one_rank), stepped(one_rank)
    manager.offload()
    manager.onload(wait=False)
    for each in (manager, twin):
        with each.training():
            normed_loss(each.module, [x.to(one_rank) for x in normed_batch(2)]).backward()
            each.optimizer.step()
    assert_equal(values(manager.census()), values(twin.census()))


def test_nothing_to_move_is_done_at_once(one_rank: str) -> None:
    move = stepped(one_rank).onload(wait=False)
    assert move.done
    move.wait()


def test_a_module_that_was_moved_meanwhile_is_met_and_left(one_rank: str) -> None:
    manager = PlacementManager(normed().to(one_rank))
    move = manager.offload(wait=False)
    manager.module.to("cpu")
    with pytest.raises(PlacementDrift):
        move.wait()
    assert move.done
    manager.module.to(one_rank)
    manager.verify()
    manager.offload()
    assert {local(p).device.type for p in manager.module.parameters()} == {"cpu"}


def test_an_interrupt_while_the_move_is_made_waits_until_it_is_whole(
    one_rank: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    swap = Transfer.swap

    def interrupted(self: Transfer, component: Component) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        swap(self, component)

    manager = stepped(one_rank)
    move = manager.offload(wait=False)
    monkeypatch.setattr(Transfer, "swap", interrupted)
    found = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            move.wait()
    finally:
        signal.signal(signal.SIGINT, found)
    assert set(manager.placements.values()) == {CPU}
    manager.verify()


def test_a_copy_that_fails_is_met_when_it_is_begun(one_rank: str) -> None:
    if one_rank != "sim":
        pytest.skip("makes a copy fail, which only the simulated accelerator can")
    from placement import sim

    manager = stepped(one_rank)
    before = values(manager.census())
    with sim.failing(copy=2), pytest.raises(RuntimeError, match="planned"):
        manager.offload(wait=False)
    assert manager.placement is GPU
    manager.offload(wait=False).wait()
    assert_equal(values(manager.census()), before)
