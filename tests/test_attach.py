"""A manager under the methods of an engine: what is refused, what is undone, whose code may move.

``docs/examples/test_attach_an_engine.py`` shows a whole engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from models import adam, normed, policy, sharded
from torch import nn

from placement import (
    AlreadyManaged,
    ContradictoryOptions,
    IllegalTransition,
    Operation,
    Placement,
    PlacementHeld,
    PlacementManager,
    find_compute_device,
)


class Engine:
    """Moves its module through its own ``to``, and notes where it is while its own code runs."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.seen: list[str] = []

    def to(self, device: str) -> None:
        self.module.to(device)

    def look(self) -> None:
        self.seen.append(next(self.module.parameters()).device.type)

    @contextmanager
    def train_mode(self, note: str = "") -> Iterator[str]:
        self.to(str(find_compute_device()))
        self.look()
        try:
            yield note
        finally:
            self.to("cpu")

    eval_mode = train_mode

    def save_checkpoint(self, path: str) -> str:
        self.to(str(find_compute_device()))
        self.look()
        self.to("cpu")
        return path

    load_checkpoint = save_checkpoint

    def weights(self) -> Iterator[str]:
        self.to(str(find_compute_device()))
        try:
            for name, _ in self.module.named_parameters():
                self.look()
                yield name
        finally:
            self.to("cpu")


def attached(module: nn.Module, **methods: Any) -> tuple[Engine, PlacementManager]:
    engine = Engine(module)
    manager = PlacementManager(module, adam(module.parameters()))
    manager.attach(engine, **methods)
    return engine, manager


def test_the_engines_own_moves_are_seen_to_and_what_it_returns_is_returned(one_rank: str) -> None:
    engine, manager = attached(sharded(normed()), export="weights")
    manager.offload()
    found = manager.placements
    with engine.train_mode("a note") as note:
        assert note == "a note"
    with engine.eval_mode():
        pass
    assert engine.save_checkpoint("there") == "there"
    assert engine.load_checkpoint("there") == "there"
    names = list(engine.weights())
    assert names == [name for name, _ in engine.module.named_parameters()]
    # Saved and loaded where it rests; computed with on the device.
    assert engine.seen == [one_rank] * 2 + ["cpu"] * 2 + [one_rank] * len(names)
    assert manager.placements == found
    manager.verify()


@pytest.mark.parametrize("drop", ["closed", "after an error"])
def test_what_a_dropped_export_of_the_engines_puts_back_is_seen_to(
    one_rank: str, drop: str
) -> None:
    engine, manager = attached(sharded(normed()), export=["weights"])
    manager.offload()
    weights = engine.weights()
    next(weights)
    if drop == "closed":
        weights.close()
    else:
        with pytest.raises(LookupError):
            weights.throw(LookupError())
    assert set(manager.placements.values()) == {Placement.CPU_MANUAL}
    manager.verify()


def test_a_move_between_the_engines_calls_is_the_managers(one_rank: str) -> None:
    engine, manager = attached(sharded(normed()), export=["weights"])
    engine.to("cpu")
    assert set(manager.placements.values()) == {Placement.CPU_MANUAL}
    with engine.train_mode(), pytest.raises(PlacementHeld, match="train"):
        engine.to("cpu")
    weights = engine.weights()
    next(weights)
    with pytest.raises(PlacementHeld, match="export"):
        engine.to("cpu")
    weights.close()

    engine, _ = attached(sharded(normed(), policy()))
    with pytest.raises(IllegalTransition, match="CPUOffloadPolicy"):
        engine.to(one_rank)
    with engine.train_mode():
        assert engine.seen == ["cpu"]


def test_an_error_of_the_engine_leaves_what_was_found(one_rank: str) -> None:
    engine, manager = attached(sharded(normed()))
    manager.offload()
    with pytest.raises(ZeroDivisionError), engine.train_mode():
        raise ZeroDivisionError
    assert set(manager.placements.values()) == {Placement.CPU_MANUAL}
    engine.to(one_rank)  # its own code runs no more
    assert set(manager.placements.values()) == {Placement.GPU}


def test_detaching_gives_the_engine_its_methods_back(one_rank: str) -> None:
    engine = Engine(sharded(normed()))
    engine.load_checkpoint = theirs = lambda path: "theirs"  # type: ignore[method-assign]
    before = dict(vars(engine))
    manager = PlacementManager(engine.module)
    attachment = manager.attach(engine, export=["weights"])
    assert attachment.methods == (
        *("to", "train_mode", "eval_mode", "save_checkpoint", "load_checkpoint"),
        "weights",
    )
    assert engine.train_mode.__name__ == "train_mode"
    attachment.detach()
    assert dict(vars(engine)) == before
    assert engine.load_checkpoint is theirs
    manager.attach(engine)


def test_only_the_methods_that_are_named_are_wrapped(one_rank: str) -> None:
    engine, _ = attached(sharded(normed()), to=None, save=None, load=None)
    assert set(vars(engine)) - {"module", "seen"} == {"train_mode", "eval_mode"}


def test_a_method_that_the_engine_lacks_is_refused_and_nothing_is_wrapped(one_rank: str) -> None:
    engine = Engine(sharded(normed()))
    manager = PlacementManager(engine.module)
    with pytest.raises(ContradictoryOptions, match="no method fit and no method export_all"):
        manager.attach(engine, train="fit", export=["export_all"])
    assert set(vars(engine)) == {"module", "seen"}


def test_a_method_that_trains_at_once_is_no_mode(one_rank: str) -> None:
    engine, manager = attached(sharded(normed()), evaluate="save_checkpoint", save=None)
    with pytest.raises(ContradictoryOptions) as caught:
        engine.save_checkpoint("there")
    assert "Engine.save_checkpoint()" in str(caught.value)
    assert "returned str, not a context" in str(caught.value)
    manager.verify()


def test_a_second_attachment_is_refused(one_rank: str) -> None:
    engine, manager = attached(sharded(normed()))
    with pytest.raises(AlreadyManaged, match="a manager is attached to it"):
        manager.attach(engine)


def test_operations_stand_in_the_trace_as_if_the_engine_had_been_written_so(
    one_rank: str, trace: Any
) -> None:
    module = sharded(normed())
    manager = PlacementManager(module, trace=trace)
    engine = Engine(module)
    manager.attach(engine, export=["weights"])
    with engine.train_mode():
        engine.save_checkpoint("there")
    names = [event.name for event in trace if event.kind.value == "operation"]
    assert names == [Operation.SAVE.value, Operation.TRAIN.value]
    assert torch.is_grad_enabled()
