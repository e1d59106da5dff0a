"""One rank of a real engine raises, differs, dies or stops inside a save: the others raise within
the deadline, restore what they found by local moves, and refuse further collectives."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch.distributed as dist
from models import assert_equal, normed_batch, normed_engine, values, whereabouts

from engine import FSDPEngine, Offload
from placement import EventKind, GroupPoisoned, Placement, PlacementDrift, RanksDisagree
from placement.testing import Ranks

pytestmark = pytest.mark.timed

DEADLINE = 2.0
"""Seconds."""

SLACK = 5.0
"""Seconds beyond it, for the store, and for ranks that share two cores with each other."""

ODD = 1
"""The rank that misbehaves."""


@dataclass(frozen=True)
class Outcome:
    """What a rank saw: the type and text of its error, and after how many seconds."""

    error: str
    text: str
    seconds: float


@pytest.fixture(params=[2, 4], ids=["2 ranks", "4 ranks"])
def local_ranks(request: pytest.FixtureRequest) -> Ranks:
    ranks: Ranks = request.getfixturevalue("two_ranks" if request.param == 2 else "four_ranks")
    return ranks


def is_odd() -> bool:
    return dist.get_rank() == ODD


def trained(offload: Offload) -> FSDPEngine:
    engine = normed_engine(offload, deadline=DEADLINE)
    engine.train_batch(normed_batch(0))
    return engine


def save(engine: FSDPEngine, path: str, misbehave: str) -> None:
    with engine.manager.saving(engine.steps):
        if misbehave == "raises":
            raise ZeroDivisionError("planted")
        if misbehave == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if misbehave == "stops":
            os.kill(os.getpid(), signal.SIGSTOP)
        engine.save_checkpoint(path)


def outcome_of(engine: FSDPEngine, misbehave: str) -> Outcome:
    """Save on all ranks, with one that misbehaves; check what this rank is left with."""
    directory = Path(tempfile.mkdtemp()) / "checkpoint"
    paths = [str(directory)]
    dist.broadcast_object_list(paths)
    found, before = whereabouts(engine.manager), values(engine.manager.census())
    started = time.monotonic()
    with pytest.raises(Exception) as caught:  # noqa: PT011  (which one is the tests' to say)
        save(engine, paths[0], misbehave if is_odd() else "")
    seconds = time.monotonic() - started
    assert whereabouts(engine.manager) == found
    assert_equal(values(engine.manager.census()), before)
    engine.manager.verify()
    with pytest.raises(GroupPoisoned):
        engine.save_checkpoint(paths[0])
    if engine.manager.placement is not Placement.CPU_FSDP2_MANAGED:
        engine.manager.offload()  # local moves stay possible
        engine.manager.onload()
        engine.manager.verify()
    return Outcome(caught.type.__name__, str(caught.value), seconds)


def save_with_an_odd_rank(offload: Offload, misbehave: str) -> Outcome:
    return outcome_of(trained(offload), misbehave)


@pytest.mark.parametrize("offload", Offload)
def test_one_rank_raises_inside_a_save(local_ranks: Ranks, offload: Offload) -> None:
    outcomes = local_ranks.run(save_with_an_odd_rank, offload, "raises")
    assert outcomes[ODD].error == "ZeroDivisionError"
    for outcome in outcomes:
        assert outcome.seconds < DEADLINE + SLACK


@pytest.mark.parametrize("offload", Offload)
def test_one_rank_is_killed_inside_a_save(local_ranks: Ranks, offload: Offload) -> None:
    outcomes = local_ranks.run(save_with_an_odd_rank, offload, "dies", dies=[ODD])
    for rank, outcome in enumerate(outcomes):
        if rank != ODD:
            assert outcome.seconds < DEADLINE + SLACK


def save_while_one_is_stopped(offload: Offload) -> Outcome:
    engine = trained(offload)
    everyone: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(everyone, os.getpid())
    if is_odd():
        # Its error comes after it was woken up, so its seconds mean nothing.
        return outcome_of(engine, "stops")
    outcome = outcome_of(engine, "stops")
    os.kill(everyone[ODD], signal.SIGCONT)
    return outcome


@pytest.mark.parametrize("offload", Offload)
def test_one_rank_is_stopped_inside_a_save(local_ranks: Ranks, offload: Offload) -> None:
    outcomes = local_ranks.run(save_while_one_is_stopped, offload)
    for rank, outcome in enumerate(outcomes):
        if rank != ODD:
            assert outcome.seconds < DEADLINE + SLACK


def save_in_another_state() -> str:
    engine = trained(Offload.NONE)
    if is_odd():
        engine.manager.offload()
    found, known = whereabouts(engine.manager), len(engine.manager.trace)
    with pytest.raises(RanksDisagree) as caught:
        engine.save_checkpoint("never written")
    assert whereabouts(engine.manager) == found
    events = list(engine.manager.trace)[known:]
    assert [event.kind for event in events] == [EventKind.REFUSAL]
    engine.manager.onload()
    with engine.manager.saving(engine.steps):
        pass  # they agree again: nothing is poisoned
    return str(caught.value)


def test_one_rank_in_another_state_is_named_on_every_rank(local_ranks: Ranks) -> None:
    for text in local_ranks.run(save_in_another_state):
        assert "params is gpu on rank" in text
        assert f"but cpu_manual on rank {ODD}" in text


def save_at_another_step() -> str:
    engine = trained(Offload.POLICY)
    engine.steps += is_odd()
    with pytest.raises(RanksDisagree) as caught:
        engine.save_checkpoint("never written")
    return str(caught.value)


def test_one_rank_at_another_step_is_named_on_every_rank(local_ranks: Ranks) -> None:
    for text in local_ranks.run(save_at_another_step):
        assert f"but 2 on rank {ODD}" in text


def save_that_one_rank_refuses() -> str:
    engine = trained(Offload.NONE)
    engine.manager.verify()
    if is_odd():  # something moved a buffer behind the manager's back
        engine.module.norm.running_mean.data = engine.module.norm.running_mean.data.cpu()
    with pytest.raises(PlacementDrift if is_odd() else RanksDisagree) as caught:
        engine.save_checkpoint("never written")
    return str(caught.value)


def test_a_rank_that_refuses_tells_the_others_why(local_ranks: Ranks) -> None:
    texts = local_ranks.run(save_that_one_rank_refuses)
    for rank, text in enumerate(texts):
        if rank != ODD:
            assert "PlacementDrift: a context for save refused" in text
            assert f"on rank {ODD}" in text
