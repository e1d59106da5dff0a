"""What a step of reinforcement learning copies between host and device, to the byte."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from models import assert_equal, local
from rl_step import IN_PLAIN_TORCH, ByHand, Copied, Managed, Outcome, Way, rl_step

from placement.testing import SimulatedAccelerator

DIGESTS = 2 * 8
"""Bytes that come back for each small tensor that is known to be unchanged: a digest when it
arrives, and one when it leaves."""


@pytest.fixture
def second_step(
    one_rank: str, sim_accelerator: SimulatedAccelerator, tmp_path: Path
) -> Callable[[Way], Outcome]:
    """Does two steps; the first one makes the optimizer's state."""

    def of(way: Way) -> Outcome:
        rl_step(way, 0, tmp_path)
        return rl_step(way, 1, tmp_path)

    return of


def parameter_bytes(way: Way) -> int:
    return sum(local(parameter).nbytes for parameter in way.actor.parameters())


def buffer_bytes(way: Way) -> int:
    return sum(buffer.nbytes for buffer in way.actor.buffers())


def test_an_evaluation_brings_no_parameter_back(second_step: Callable[[Way], Outcome]) -> None:
    way = Managed()
    copied = second_step(way).copied
    tensors = len(list(way.actor.parameters()))
    both = parameter_bytes(way) + buffer_bytes(way)
    came_back = buffer_bytes(way) + tensors * DIGESTS
    assert copied["log-probabilities"] == Copied(to_device=both, to_host=came_back)
    digests_alone = (tensors + len(list(way.reference.buffers()))) * DIGESTS
    assert copied["reference"] == Copied(to_device=both, to_host=digests_alone)


def test_a_save_copies_nothing(second_step: Callable[[Way], Outcome]) -> None:
    assert second_step(Managed()).copied["save"] == Copied(to_device=0, to_host=0)


def test_an_export_copies_each_parameter_once(second_step: Callable[[Way], Outcome]) -> None:
    way = Managed()
    once = Copied(to_device=parameter_bytes(way), to_host=0)
    assert second_step(way).copied["export"] == once


def test_a_step_copies_at_most_seven_tenths_of_one_by_hand(
    second_step: Callable[[Way], Outcome],
) -> None:
    managed, by_hand = second_step(Managed()), second_step(ByHand(IN_PLAIN_TORCH))
    assert managed.total <= 0.7 * by_hand.total
    assert_equal(managed.values, by_hand.values)


def test_the_step_by_hand_copies_what_verl_does(second_step: Callable[[Way], Outcome]) -> None:
    """The other side of the comparison is not inflated: what each phase copies, in parameters."""
    way = ByHand(IN_PLAIN_TORCH)
    copied, unit = second_step(way).copied, parameter_bytes(way)
    assert {
        phase: (round(each.to_device / unit, 1), round(each.to_host / unit, 1))
        for phase, each in copied.items()
    } == {
        "log-probabilities": (1, 1),
        "reference": (1, 0),
        "train": (3, 3),
        "save": (1, 2),
        "export": (1, 0),
    }
