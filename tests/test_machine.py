"""The machine does what the table says, for every pair of state and trigger."""

from __future__ import annotations

import itertools
import pickle

import pytest
from transitions import MachineError

from placement import (
    TABLE,
    Component,
    IllegalTransition,
    Integrity,
    Legal,
    Placement,
    PlacementError,
    PlacementMachine,
    TornPlacement,
    Trigger,
)
from placement.states import TORN, Illegal

PAIRS = list(itertools.product(Placement, Trigger))
LEGAL = [pair for pair in PAIRS if isinstance(TABLE[pair], Legal)]
ILLEGAL = [pair for pair in PAIRS if isinstance(TABLE[pair], Illegal)]
EVIDENCE = [f"layers.{i}.weight (param) on cpu" for i in range(12)]


def machine(state: Placement) -> PlacementMachine:
    return PlacementMachine(Component.PARAMS, state, evidence=lambda: EVIDENCE)


def name(pair: tuple[Placement, Trigger]) -> str:
    return f"{pair[1].value} from {pair[0].value}"


@pytest.mark.parametrize("pair", LEGAL, ids=name)
def test_a_legal_trigger_leads_where_the_table_says(pair: tuple[Placement, Trigger]) -> None:
    state, trigger = pair
    row = TABLE[pair]
    assert isinstance(row, Legal)
    m = machine(state)
    assert m.may(trigger)
    m.fire(trigger)
    assert m.state is row.dest


@pytest.mark.parametrize("pair", ILLEGAL, ids=name)
def test_an_illegal_trigger_is_refused_with_every_part_of_the_table_row(
    pair: tuple[Placement, Trigger],
) -> None:
    state, trigger = pair
    row = TABLE[pair]
    assert isinstance(row, Illegal)
    m = machine(state)
    assert not m.may(trigger)
    with pytest.raises(IllegalTransition) as caught:
        m.fire(trigger)
    error = caught.value
    assert m.state is state
    assert error.asked == f"{trigger.value}()"
    assert error.state == f"the record has the params in {state.value}"
    assert error.why == row.why
    assert error.instead == row.instead
    assert error.tensors == tuple(EVIDENCE)
    message = " ".join(str(error).split())
    for part in (error.asked, state.value, row.why, row.instead, EVIDENCE[0], "... and 4 more"):
        assert part in message


@pytest.mark.parametrize("pair", ILLEGAL, ids=name)
def test_code_that_catches_the_library_error_catches_ours(
    pair: tuple[Placement, Trigger],
) -> None:
    state, trigger = pair
    with pytest.raises(MachineError):
        machine(state).fire(trigger)
    with pytest.raises(PlacementError):
        machine(state).fire(trigger)


@pytest.mark.parametrize("pair", PAIRS, ids=name)
def test_a_trigger_is_a_method_with_a_question_beside_it(pair: tuple[Placement, Trigger]) -> None:
    state, trigger = pair
    m = machine(state)
    may = getattr(m, f"may_{trigger.value}")()
    assert may is isinstance(TABLE[pair], Legal)
    if may:
        getattr(m, trigger.value)()
    else:
        with pytest.raises(IllegalTransition):
            getattr(m, trigger.value)()


@pytest.mark.parametrize("pair", PAIRS, ids=name)
def test_a_torn_component_has_one_answer_to_every_trigger(pair: tuple[Placement, Trigger]) -> None:
    state, trigger = pair
    m = machine(state)
    m.tear()
    assert m.integrity is Integrity.TORN
    assert not m.may(trigger)
    with pytest.raises(TornPlacement) as caught:
        m.fire(trigger)
    assert caught.value.why == TORN.why
    assert "torn" in caught.value.state
    assert m.state is state


def test_an_error_survives_the_way_to_another_process() -> None:
    with pytest.raises(IllegalTransition) as caught:
        machine(Placement.CPU_FSDP2_MANAGED).save()
    copy = pickle.loads(pickle.dumps(caught.value))
    assert type(copy) is IllegalTransition
    assert str(copy) == str(caught.value)
    assert copy.tensors == caught.value.tensors
