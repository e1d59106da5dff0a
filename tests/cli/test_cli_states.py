"""``placement states``: every drawing follows the table."""

from __future__ import annotations

import io
from collections.abc import Callable

import pytest
from recorded_job import GPU, MANAGED, MANUAL
from rich.console import Console

from placement.cli import diagram
from placement.states import TABLE, TORN, Illegal, Legal, Trigger


def table_text(table: diagram.Machine) -> str:
    console = Console(file=io.StringIO(), width=4000)
    console.print(diagram.as_table(table))
    return console.file.getvalue()  # type: ignore[attr-defined]


def svg_text(table: diagram.Machine) -> str:
    matplotlib = pytest.importorskip("matplotlib")
    file = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        diagram.draw(table).savefig(file, format="svg")
    return file.getvalue()


def test_mermaid_has_the_legal_rows_as_arrows_and_no_other(placement: Callable) -> None:
    output = placement("states", "--format", "mermaid").output
    assert output.startswith("stateDiagram-v2\n")
    arrows = {line.strip() for line in output.splitlines() if "-->" in line}
    assert arrows == {
        f"{source.value} --> {row.dest.value} : {trigger.value}"
        for (source, trigger), row in TABLE.items()
        if isinstance(row, Legal)
    }


def test_table_tells_every_row_and_its_reason() -> None:
    text = table_text(TABLE)
    rows = [[cell.strip() for cell in line.split("│")] for line in text.splitlines()]
    for (source, trigger), row in TABLE.items():
        (cells,) = (cells for cells in rows if cells[1:3] == [source.value, trigger.value])
        if isinstance(row, Legal):
            assert cells[3:5] == [row.dest.value, row.meaning]
        else:
            assert cells[3:5] == ["refused", row.why + "."]
            assert row.instead in text
    assert TORN.why in text


@pytest.mark.parametrize("draw", [diagram.mermaid, table_text, svg_text])
def test_changed_row_changes_the_drawing(draw: Callable[[diagram.Machine], str]) -> None:
    found = draw(TABLE)
    opened = {**TABLE, (MANAGED, Trigger.OFFLOAD): Legal(MANUAL, "taken from its owner")}
    closed = {**TABLE, (GPU, Trigger.OFFLOAD): Illegal("full", "make room")}
    assert len({found, draw(opened), draw(closed)}) == 3


def test_svg_draws_an_arrow_for_each_pair_of_placements_and_names_refusals() -> None:
    text = svg_text(TABLE)
    opened = svg_text({**TABLE, (MANAGED, Trigger.OFFLOAD): Legal(GPU, "taken")})
    assert ">refused: onload, offload, save<" in text
    assert ">refused: onload, save<" in opened
    assert opened.count(">offload<") == text.count(">offload<") + 1


def test_command_prints_each_format(placement: Callable) -> None:
    pytest.importorskip("matplotlib")
    for format, begin in (("mermaid", "stateDiagram"), ("table", "╭"), ("svg", "<?xml")):
        result = placement("states", "--format", format)
        assert result.exit_code == 0, result.output
        assert result.output.startswith(begin)
