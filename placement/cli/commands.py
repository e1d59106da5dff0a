"""The command line: parses arguments, prints what the other files of this package make."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import Annotated, TextIO

import typer
from rich.console import Console

from placement.cli import checking, diagram, export, plotting, showing
from placement.cli.reading import TraceError, Traces
from placement.cli.rows import Rows
from placement.states import Component, Operation
from placement.trace import Outcome

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Reads placement traces: what was moved where, when, by whom, and whether it was right. "
    "Converts checkpoints.",
)

_VIOLATED = 1
_UNREADABLE = 2
_TOGETHER = 512
"""Lines that are written at once."""

_Paths = Annotated[
    list[Path],
    typer.Argument(metavar="TRACE", help="Trace files, or directories to search for *.jsonl."),
]


@app.command()
def show(
    paths: _Paths,
    tree: Annotated[
        bool, typer.Option("--tree", help="Nest events in the contexts they happened in.")
    ] = False,
    component: Annotated[
        list[Component], typer.Option(help="Only events of this component alone.")
    ] = [],  # noqa: B006, typer makes a new list of it
    rank: Annotated[list[int], typer.Option(help="Only this rank's events.")] = [],  # noqa: B006
    phase: Annotated[
        list[Operation], typer.Option(help="Only events in contexts for this operation.")
    ] = [],  # noqa: B006
    outcome: Annotated[list[Outcome], typer.Option(help="Only events that ended like this.")] = [],  # noqa: B006
    module: Annotated[
        list[str], typer.Option(help="Only events of modules with this name or pattern.")
    ] = [],  # noqa: B006
) -> None:
    """Show what happened, one line an event. Filters may be given several times each."""
    with _errors_told():
        traces = Traces(paths)
        wanted = showing.Wanted(component, rank, phase, outcome, module)
        _write(showing.tree(traces, wanted) if tree else _table(traces, wanted))
        _tell_notes(traces.notes)


@app.command()
def check(paths: _Paths) -> None:
    """Replay traces against the table of legal moves. Exits with 1 if one breaks a rule."""
    with _errors_told():
        traces = Traces(paths)
        checked = checking.check(traces)
        _tell_notes([*traces.notes, *checked.findings.notes])
        if checked.findings.first is not None:
            _write(checking.told(checked, traces, _width()))
            raise typer.Exit(_VIOLATED)
        typer.echo(f"ok: {checked.summary}")


@app.command(name="export")
def export_(
    paths: _Paths,
    output: Annotated[Path, typer.Option("-o", "--output", help="The file to write.")],
) -> None:
    """Write a trace for Perfetto (https://ui.perfetto.dev) and chrome://tracing."""
    with _errors_told():
        traces = Traces(paths)
        with _new_file(output) as file:
            count = export.write(traces, file)
        _tell_notes(traces.notes)
        typer.echo(f"{output}: {count} events; open it in https://ui.perfetto.dev")


@app.command()
def plot(
    paths: _Paths,
    output: Annotated[
        Path, typer.Option("-o", "--output", help="The picture to write: .svg, .png or .pdf.")
    ],
) -> None:
    """Draw placements, phases, moved bytes and memory over time."""
    with _errors_told():
        traces = Traces(paths)
        plotting.plot(traces, output)
        _tell_notes(traces.notes)
        typer.echo(str(output))


@app.command()
def states(
    format: Annotated[
        diagram.Format, typer.Option(help="What to print the state machine as.")
    ] = diagram.Format.TABLE,
) -> None:
    """Print the state machine, as the table that decides what is legal has it."""
    with _errors_told():
        diagram.show(format, sys.stdout)


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(help="A checkpoint of torch.distributed.checkpoint.")],
    destination: Annotated[Path, typer.Argument(help="The directory of checkpoints to add it to.")],
    trust_pickle: Annotated[
        bool, typer.Option("--trust-pickle", help="Run whatever code the source holds.")
    ] = False,
    step: Annotated[
        int | None, typer.Option(min=0, help="The training step; by default the source's own.")
    ] = None,
) -> None:
    """Convert a checkpoint of torch.distributed.checkpoint into one without pickles.

    Its .metadata is a pickle, and so is every value in its .distcp files that is no tensor. Reading
    them can run any code, with your rights. So you have to say that you trust who wrote it.
    """
    if not trust_pickle:
        typer.echo(
            f"error: {source} has to be unpickled: .metadata, and every value in its .distcp files "
            "that is no tensor. That can run any code, with your rights.\n"
            "  instead: if you trust who wrote it, say so: --trust-pickle",
            err=True,
        )
        raise typer.Exit(_UNREADABLE)
    # Here, since torch takes seconds to import, and the other commands do without it.
    from placement.checkpoint import convert as converted
    from placement.errors import CheckpointError

    try:
        typer.echo(f"{destination}: added step {converted(source, destination, step=step)}")
    except CheckpointError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(_UNREADABLE) from None


def _table(traces: Traces, wanted: showing.Wanted) -> Iterator[str]:
    entries = iter(traces)
    first = list(islice(entries, 1))
    for entry in first:
        rows = Rows(entry.event.wall, _width())
        yield from rows.lines(wanted.among(chain(first, entries)))


def _width() -> int | None:
    """Characters of the terminal's lines; None if the output is none."""
    console = Console()
    return console.width if console.is_terminal else None


def _write(lines: Iterable[str]) -> None:
    rest = iter(lines)
    while together := "".join(islice(rest, _TOGETHER)):
        sys.stdout.write(together)


def _tell_notes(notes: Iterable[str]) -> None:
    for note in notes:
        typer.echo(f"note: {note}", err=True)


def _new_file(path: Path) -> TextIO:
    try:
        return path.open("w", encoding="utf-8")
    except OSError as error:
        problem = f"can't be written: {error.strerror}"
        raise TraceError(path, None, problem, "choose another output file") from None


@contextmanager
def _errors_told() -> Iterator[None]:
    """Turn errors that a user can act on into a message and an exit status."""
    try:
        yield
    except TraceError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(_UNREADABLE) from None
