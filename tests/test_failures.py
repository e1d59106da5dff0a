"""Crashes, interrupts and threads: a move is whole or did not happen, and contexts balance."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from models import (
    adam,
    assert_equal,
    local,
    normed,
    normed_batch,
    normed_engine,
    normed_loss,
    policy,
    sharded,
    values,
    whereabouts,
)
from torch import nn

from engine import Offload
from placement import (
    Component,
    Integrity,
    Placement,
    PlacementHeld,
    PlacementManager,
    TornPlacement,
    Trace,
    find_compute_device,
)
from placement.routes import Journey, Retracing
from placement.testing import Ranks
from placement.transfer import Part, Transfer

# Taken back; torn, and recovered.


def fail_at_swap(monkeypatch: pytest.MonkeyPatch, number: int, back: int | None = None) -> None:
    """Let a move fail before its ``number``-th swap, and before its ``back``-th swap back."""

    def failing(
        swaps: Callable[[object], Iterator[tuple[torch.Tensor, torch.Tensor]]], number: int
    ) -> Callable[[object], Iterator[tuple[torch.Tensor, torch.Tensor]]]:
        def until_half_way(part: object) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
            for index, swap in enumerate(swaps(part)):
                if index == number:
                    raise OSError("half way")
                yield swap

        return until_half_way

    for way in (Part, Journey):  # planned, and back the way it came
        monkeypatch.setattr(way, "swaps", failing(way.swaps, number))
        if back is not None:
            monkeypatch.setattr(way, "swaps_back", failing(way.swaps_back, back))


def trained(
    device: str, start: Placement, shard: bool
) -> tuple[PlacementManager, Callable[[], None]]:
    """Everything that moves, in ``start``, and a function that makes a step of training."""
    module = sharded(normed()) if shard else normed().to(device)
    optimizer = adam(module.parameters())
    normed_loss(module, [x.to(device) for x in normed_batch()]).backward()
    optimizer.step()
    manager = PlacementManager(module, optimizer, rest=start, verify="always")

    def step() -> None:
        with manager.training():
            normed_loss(module, [x.to(device) for x in normed_batch()]).backward()
            optimizer.step()

    return manager, step


@pytest.mark.parametrize("shard", [False, True], ids=["plain", "fsdp2"])
@pytest.mark.parametrize("start", [Placement.GPU, Placement.CPU_MANUAL])
def test_a_move_that_fails_at_a_swap_is_taken_back(
    one_rank: str, monkeypatch: pytest.MonkeyPatch, shard: bool, start: Placement
) -> None:
    manager, step = trained(one_rank, start, shard)
    move, back = manager.offload, manager.onload
    if start is not Placement.GPU:
        move, back = back, move
    move()
    back()
    found, before = whereabouts(manager), values(manager.census())
    gc.collect()
    on_device = torch.accelerator.memory_allocated()
    for known_way in (True, False):
        for number in range(12 if shard else 5):
            if not known_way:
                manager.release_host_memory()
                manager._mover._routes.clear()
            with monkeypatch.context() as patch:
                fail_at_swap(patch, number)
                with pytest.raises(OSError, match="half way"):
                    move()
            assert manager.placement is start
            assert whereabouts(manager) == found
            assert_equal(values(manager.census()), before)
            gc.collect()  # the traceback had the move's tensors
            assert torch.accelerator.memory_allocated() == on_device
    move()
    back()
    step()


@pytest.mark.parametrize("known_way", [False, True])
@pytest.mark.parametrize("start", [Placement.GPU, Placement.CPU_MANUAL])
def test_a_move_that_is_broken_off_while_it_lets_go_has_been_made(
    one_rank: str, monkeypatch: pytest.MonkeyPatch, known_way: bool, start: Placement
) -> None:
    """As by a signal's handler that raises: the tensors are there, and the record says so."""
    manager, step = trained(one_rank, start, shard=True)
    move, back = manager.offload, manager.onload
    if start is not Placement.GPU:
        move, back = back, move
    move()
    back()
    if not known_way:
        manager._mover._routes.clear()
    before = values(manager.census())

    def raising(*_: object) -> None:
        raise OSError("handler")

    with monkeypatch.context() as patch:
        patch.setattr(Retracing if known_way else Transfer, "release", raising)
        with pytest.raises(OSError, match="handler"):
            move()
    assert manager.placement is not start
    manager.verify()
    assert_equal(values(manager.census()), before)
    back()
    assert_equal(values(manager.census()), before)
    step()


@pytest.mark.parametrize("shard", [False, True], ids=["plain", "fsdp2"])
@pytest.mark.parametrize("start", [Placement.GPU, Placement.CPU_MANUAL])
def test_a_torn_module_refuses_everything_until_it_is_recovered(
    one_rank: str, monkeypatch: pytest.MonkeyPatch, shard: bool, start: Placement
) -> None:
    manager, step = trained(one_rank, start, shard)
    move = manager.offload if start is Placement.GPU else manager.onload
    found, before = whereabouts(manager), values(manager.census())
    for number in range(12 if shard else 5):
        with monkeypatch.context() as patch:
            fail_at_swap(patch, number, back=number // 2)
            with pytest.raises(TornPlacement) as caught:
                move()
        assert isinstance(caught.value.__cause__, OSError)
        assert not manager.may_save()
        for call in (manager.onload, manager.offload, manager.verify):
            with pytest.raises(TornPlacement, match="recover"):
                call()
        for context in (manager.training, manager.evaluating, manager.saving, manager.loading):
            with pytest.raises(TornPlacement):
                context().__enter__()
        manager.recover()
        assert manager.placement is start
        assert whereabouts(manager) == found
        assert_equal(values(manager.census()), before)
    step()


def test_a_load_whose_tensors_are_put_right_by_half_tears_the_component(
    one_rank: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = normed_engine(Offload.MANUAL)
    engine.train_batch(normed_batch(0))
    before = values(engine.manager.census())
    fail_at_swap(monkeypatch, 3, back=1)

    def install_on_the_device() -> None:
        for state in engine.optimizer.state.values():
            state["exp_avg"] = state["exp_avg"].to(one_rank)

    with pytest.raises(TornPlacement), engine.manager.loading():
        install_on_the_device()
    monkeypatch.undo()
    with pytest.raises(TornPlacement):
        engine.train_batch(normed_batch(1))
    engine.manager.recover()
    assert_equal(values(engine.manager.census()), before)
    engine.train_batch(normed_batch(1))


def test_recovering_a_whole_module_does_nothing(one_rank: str, trace: Trace) -> None:
    manager = PlacementManager(normed().to(one_rank), trace=trace)
    manager.recover()
    assert len(trace) == 0


# Interrupts.


@pytest.fixture
def interruptible() -> Iterator[None]:
    """SIGINT raises, also where it is ignored, as in what a shell runs in its background."""
    found = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, found)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_during_copies_leaves_everything_as_it_was(
    one_rank: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = normed().to(one_rank)
    manager = PlacementManager(module)
    before = whereabouts(manager)
    interrupt_in(monkeypatch, "_copy")
    with pytest.raises(KeyboardInterrupt):
        manager.offload()
    monkeypatch.undo()
    assert whereabouts(manager) == before
    assert manager.placement is Placement.GPU
    manager.offload()


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_during_the_swaps_waits_until_it_is_whole(
    one_rank: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = PlacementManager(normed().to(one_rank))
    interrupt_in(monkeypatch, "swap")
    with pytest.raises(KeyboardInterrupt):
        manager.offload()
    monkeypatch.undo()
    assert manager.placement is Placement.CPU_MANUAL
    manager.verify()


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_while_a_context_is_entered_leaves_what_was_found(
    one_rank: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = PlacementManager(normed())
    interrupt_in(monkeypatch, "swap")
    with pytest.raises(KeyboardInterrupt):
        manager.training().__enter__()
    monkeypatch.undo()
    assert manager.placement is Placement.CPU_MANUAL
    manager.verify()
    with manager.training():
        pass


def test_the_handler_that_was_found_is_put_back(one_rank: str) -> None:
    found = signal.getsignal(signal.SIGINT)
    PlacementManager(normed().to(one_rank)).offload()
    assert signal.getsignal(signal.SIGINT) is found


def interrupt_in(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """Send SIGINT to this process each time ``Transfer``'s ``method`` begins."""
    found: Callable[..., object] = getattr(Transfer, method)

    def interrupted(self: Transfer, *args: object, **kwargs: object) -> object:
        os.kill(os.getpid(), signal.SIGINT)
        return found(self, *args, **kwargs)

    monkeypatch.setattr(Transfer, method, interrupted)


# A forward or backward pass that is broken off.


class Breaks(nn.Module):
    def __init__(self, where: str) -> None:
        super().__init__()
        self.inner = normed()
        self.where = where
        self.armed = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.inner.first(x)
        if self.armed and self.where == "forward":
            raise ArithmeticError("planned")
        if self.armed:
            hidden.register_hook(self._break)
        return self.inner.second(self.inner.norm(hidden))

    def _break(self, gradient: torch.Tensor) -> None:
        raise ArithmeticError("planned")


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("offload", Offload)
def test_a_pass_that_is_broken_off_leaves_what_was_found_and_the_next_step_works(
    one_rank: str, offload: Offload, where: str
) -> None:
    module = sharded(Breaks(where), policy() if offload is Offload.POLICY else None)
    optimizer = adam(module.parameters())
    rest = Placement.CPU_MANUAL if offload is Offload.MANUAL else None
    manager = PlacementManager(module, optimizer, rest=rest, verify="always")
    found = whereabouts(manager)
    module.armed = True
    with pytest.raises(ArithmeticError), manager.training():
        normed_loss(module, [x.to(one_rank) for x in normed_batch()]).backward()
    optimizer.zero_grad()
    assert whereabouts(manager) == found
    module.armed = False
    with manager.training():
        normed_loss(module, [x.to(one_rank) for x in normed_batch()]).backward()
        gradient = local(module.inner.second.weight.grad).cpu().clone()
        optimizer.step()
    manager.verify()
    twin = Breaks(where)
    normed_loss(twin, normed_batch()).backward()
    torch.testing.assert_close(gradient, twin.inner.second.weight.grad)


def accumulates(offload: Offload) -> None:
    """Two backward passes without reduction and one with it, a context each."""
    device = find_compute_device()
    module = sharded(normed(), policy() if offload is Offload.POLICY else None)
    rest = Placement.CPU_MANUAL if offload is Offload.MANUAL else None
    manager = PlacementManager(module, rest=rest, verify="always")
    twin = normed()
    for step in range(3):
        module.set_requires_gradient_sync(step == 2)
        with manager.training():
            normed_loss(module, [x.to(device) for x in normed_batch(step)]).backward()
        normed_loss(twin, normed_batch(step)).backward()
        manager.verify()
    whole = module.second.weight.grad
    if offload is not Offload.NONE:
        assert local(whole).device.type == "cpu"
    with manager.training():
        torch.testing.assert_close(whole.full_tensor().cpu(), twin.second.weight.grad)


@pytest.mark.parametrize("offload", Offload)
def test_gradients_survive_contexts_also_before_they_are_reduced(
    one_rank: str, offload: Offload
) -> None:
    accumulates(offload)


@pytest.mark.parametrize("offload", Offload)
def test_gradients_survive_contexts_on_two_ranks(two_ranks: Ranks, offload: Offload) -> None:
    two_ranks.run(accumulates, offload)


# Generators.


def weights(manager: PlacementManager) -> Iterator[str]:
    """A lazily consumed export, which holds its context open between two items."""
    with manager.evaluating():
        for name, _ in manager.module.named_parameters():
            yield name


def exhaust(generator: Iterator[str]) -> None:
    assert list(generator)


def close_early(generator: Iterator[str]) -> None:
    next(generator)
    generator.close()


def drop(generator: Iterator[str]) -> None:
    next(generator)


def never_start(generator: Iterator[str]) -> None:
    assert generator


def throw(generator: Iterator[str]) -> None:
    next(generator)
    with pytest.raises(ZeroDivisionError):
        generator.throw(ZeroDivisionError)


@pytest.mark.parametrize("consume", [exhaust, close_early, drop, never_start, throw])
def test_a_generator_that_holds_a_context_ends_balanced(
    one_rank: str, trace: Trace, consume: Callable[[Iterator[str]], None]
) -> None:
    manager = PlacementManager(normed(), trace=trace)
    consume(weights(manager))
    gc.collect()
    assert manager.placement is Placement.CPU_MANUAL
    manager.verify()
    kinds = [event.kind.value for event in trace]
    assert kinds.count("enter") == kinds.count("operation")


def test_a_generator_collected_inside_a_later_context_takes_nothing_from_it(
    one_rank: str,
) -> None:
    manager = PlacementManager(normed())
    generator = weights(manager)
    next(generator)
    with manager.training():
        del generator
        gc.collect()
        assert manager.placement is Placement.GPU
        manager.verify()
    assert manager.placement is Placement.CPU_MANUAL


# Threads.


def test_a_second_thread_is_refused_while_a_context_is_open(one_rank: str) -> None:
    manager = PlacementManager(normed().to(one_rank))
    raised: list[BaseException] = []

    def other() -> None:
        for call in (manager.offload, manager.training().__enter__):
            try:
                call()
            except PlacementHeld as error:
                raised.append(error)

    with manager.training():
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert len(raised) == 2
    assert "another thread is in a context (train, entered at" in str(raised[0])
    assert manager.placement is Placement.GPU


def test_two_threads_are_never_interleaved(one_rank: str, trace: Trace) -> None:
    manager = PlacementManager(normed(), trace=trace)
    start, refused = threading.Barrier(2), []

    def work() -> None:
        start.wait()
        for _ in range(20):
            try:
                with manager.evaluating():
                    assert manager.placement is Placement.GPU
            except PlacementHeld:
                refused.append(1)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert manager.placement is Placement.CPU_MANUAL
    manager.verify()
    done = [event for event in trace if event.kind.value == "operation"]
    assert len(done) + len(refused) == 40
    inside = None
    for event in trace:
        if event.kind.value == "enter":
            assert inside is None
            inside = event.lease
        elif event.kind.value == "operation":
            assert event.lease == inside
            inside = None


def test_a_restore_that_fails_does_not_hide_the_error_of_the_body(
    one_rank: str, trace: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = normed_engine(Offload.MANUAL, trace)
    manager = engine.manager

    def fail(*_: object, **__: object) -> None:
        raise OSError("no memory for the way back")

    def break_off() -> None:
        monkeypatch.setattr(Transfer, "stage", fail)
        monkeypatch.setattr(Retracing, "set_out", fail)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught, manager.training():
        break_off()
    monkeypatch.undo()
    assert "could not be restored" in "".join(getattr(caught.value, "__notes__", [""]))
    assert manager.placement is Placement.GPU, "the record is true"
    manager.verify()
    failed = [event for event in trace if event.outcome.value == "failed"]
    assert [event.name for event in failed] == ["offload", "train"]
    manager.offload()
    assert manager._record.machines[Component.PARAMS].integrity is Integrity.WHOLE
