"""The table: what it must be for everything that is derived from it."""

from __future__ import annotations

import ast
import itertools
from pathlib import Path

import pytest

import placement.states
from placement import TABLE, Illegal, Legal, Placement, Trigger
from placement.states import COMPUTES_WITH, HOLDS, TORN, Operation, trigger_between

PAIRS = list(itertools.product(Placement, Trigger))


def test_there_are_exactly_three_placements_with_the_known_values() -> None:
    assert [p.value for p in Placement] == ["gpu", "cpu_manual", "cpu_fsdp2_managed"]


def test_the_table_has_a_row_for_each_pair_of_state_and_trigger_and_no_other() -> None:
    assert set(TABLE) == set(PAIRS)


def test_the_legal_rows_are_these() -> None:
    legal = {
        (state.value, trigger.value): row.dest.value
        for (state, trigger), row in TABLE.items()
        if isinstance(row, Legal)
    }
    assert legal == {
        ("cpu_manual", "onload"): "gpu",
        ("gpu", "offload"): "cpu_manual",
        ("gpu", "save"): "gpu",
        ("cpu_manual", "save"): "cpu_manual",
    }


def test_nothing_moves_a_managed_module_by_hand() -> None:
    for trigger in Trigger:
        assert isinstance(TABLE[Placement.CPU_FSDP2_MANAGED, trigger], Illegal)


@pytest.mark.parametrize("row", [*TABLE.values(), TORN], ids=str)
def test_a_row_reads_as_a_sentence_in_an_error(row: Legal | Illegal) -> None:
    texts = [row.meaning] if isinstance(row, Legal) else [row.why, row.instead]
    for text in texts:
        assert text
        assert not text.endswith(".")  # the message adds it


@pytest.mark.parametrize(("source", "dest"), list(itertools.product(Placement, Placement)))
def test_a_trigger_between_two_states_is_one_that_the_table_has(
    source: Placement, dest: Placement
) -> None:
    try:
        trigger = trigger_between(source, dest)
    except LookupError:
        rows = [row for (state, _), row in TABLE.items() if state is source]
        assert not any(isinstance(row, Legal) and row.dest is dest for row in rows)
        return
    if trigger is None:
        assert source is dest
    else:
        row = TABLE[source, trigger]
        assert isinstance(row, Legal)
        assert row.dest is dest


def test_an_operation_holds_whatever_it_computes_with() -> None:
    for operation in Operation:
        assert COMPUTES_WITH[operation] <= HOLDS[operation]


def test_the_file_of_the_table_touches_no_tensor() -> None:
    source = Path(placement.states.__file__).read_text(encoding="utf-8")
    imported = {
        name.split(".")[0]
        for node in ast.walk(ast.parse(source))
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert imported <= {"__future__", "collections", "dataclasses", "enum"}
