"""Reads trace files as they are found on disk, lazily and with bounded memory.

What a running or killed process leaves behind is read: a last line that was cut off is left out,
with a note. Whatever else is not a line of a placement trace is an error that names file and line,
since a command that skips lines would report on a trace that nobody recorded.

A file may hold several *processes*: a stream is named after its process id, and containers like
to start every process as the same id. Each header line begins one.
"""

from __future__ import annotations

import heapq
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, get_type_hints

import msgspec
from msgspec.structs import astuple

from placement.trace import SCHEMA, SCHEMA_VERSION, Event, EventKind, Outcome

_INSTEAD = "pass files that placement wrote, or a directory that holds no other .jsonl files"


class TraceError(Exception):
    """A file can't be read as a placement trace.

    Attributes:
        path: the file.
        line: the line in it, from 1; None where no line is to blame.
        problem: what is wrong with it.
        instead: what to do.
    """

    def __init__(self, path: Path, line: int | None, problem: str, instead: str) -> None:
        self.path, self.line, self.problem, self.instead = path, line, problem, instead
        where = str(path) if line is None else f"{path}:{line}"
        super().__init__(f"{where}: {problem}\n  instead: {instead}")


@dataclass(eq=False)
class Run:
    """The traces in one directory: ranks that worked together.

    Attributes:
        label: the directory, relative to what it has in common with the others; empty if there
            is only one.
        files: how many files there are of each rank.
    """

    label: str
    files: Counter[int] = field(default_factory=Counter)


@dataclass(eq=False)
class Process:
    """What one process recorded.

    Attributes:
        path: the file.
        run: the directory's run.
        rank: as the header says.
        part: counts the processes in the file.
        first: number of the first event; above 0 where a bounded trace dropped its beginning.
        cut: whether the last line was cut off, as by a kill.
    """

    path: Path
    run: Run
    rank: int
    part: int = 0
    first: int | None = None
    cut: bool = False

    @property
    def streamed(self) -> bool:
        """Whether events were written as they happened, so that they may end anywhere."""
        return "-pid" in self.path.stem

    @cached_property
    def label(self) -> str:
        """What tells it from the other processes: run, rank, and process id if there is one."""
        pid = self.path.stem.partition("-pid")[2]
        part = f" part {self.part + 1}" if self.part else ""
        run = f"{self.run.label}: " if self.run.label else ""
        return f"{run}rank {self.rank}" + (f" pid {pid}" if pid else "") + part


class Entry(NamedTuple):
    """One event, and where it stands.

    An event of a kind that this version doesn't know has the kind's name in ``event.kind``, so no
    comparison with an :class:`EventKind` holds for it.

    Attributes:
        event: the event.
        process: who recorded it.
        line: its line in ``process.path``, from 1.
    """

    event: Event
    process: Process
    line: int


class Traces:
    """The trace files that a command was given.

    Iterating reads all of them, merged by wall time. It may be done more than once.

    Args:
        paths: files, and directories that are searched for ``*.jsonl``.

    Attributes:
        files: the files found.
        notes: what was tolerated while reading, in words.

    Raises:
        TraceError: a path does not exist, a directory holds no traces, or a file does not begin
            as a trace does.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        self.files = list(dict.fromkeys(file for path in paths for file in _files(path)))
        self._notes: dict[str, None] = {}
        directories = {file.parent for file in self.files}
        common = os.path.commonpath(directories) if directories else ""
        runs = {directory: Run(os.path.relpath(directory, common)) for directory in directories}
        if len(runs) == 1:
            next(iter(runs.values())).label = ""
        self._runs = [runs[file.parent] for file in self.files]
        for file, run in zip(self.files, self._runs):
            run.files[_first_header(file)] += 1

    @property
    def notes(self) -> list[str]:
        """What was tolerated, each once."""
        return list(self._notes)

    def __iter__(self) -> Iterator[Entry]:
        return heapq.merge(*self.one_by_one(), key=lambda entry: entry.event.wall)

    def one_by_one(self) -> Iterator[Iterator[Entry]]:
        """The entries of each file."""
        return (self._read(file, run) for file, run in zip(self.files, self._runs))

    def near(self, entry: Entry, reach: int) -> list[Entry]:
        """Read up to ``reach`` entries before and after ``entry``, of its module and process."""
        near: list[Entry] = []
        for other in self._read(entry.process.path, entry.process.run):
            if other.event.module != entry.event.module or other.process.part != entry.process.part:
                continue
            near.append(other)
            if other.line <= entry.line:
                del near[: -reach - 1]
            elif sum(later.line > entry.line for later in near) == reach:
                break
        return near

    def _read(self, path: Path, run: Run) -> Iterator[Entry]:
        """The entries of one file. The loop is short, since a trace may have millions of lines."""
        process: Process | None = None
        with _open(path) as lines:
            for number, line in enumerate(lines, 1):
                try:
                    event = _event(line)
                except msgspec.MsgspecError as error:
                    if (rank := _rank(path, number, line)) is not None:
                        part = 0 if process is None else process.part + 1
                        process = Process(path, run, rank, part)
                    elif process is None:
                        raise _no_header(path, line) from None
                    elif _was_cut(line):
                        process.cut = True
                        self._notes[f"{path}:{number}: the last line was cut off"] = None
                    elif not line.isspace():
                        raise TraceError(
                            path,
                            number,
                            f"not an event ({error}): {_shortened(line)}",
                            "if two processes wrote to this file, separate their lines",
                        ) from None
                    continue
                if process is None:
                    raise _no_header(path, line)
                if process.first is None:
                    process.first = event.number
                yield Entry(event, process, number)
        if process is None:
            raise _no_header(path, b"")


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        found = sorted(file for file in path.rglob("*.jsonl") if file.is_file())
        if not found:
            raise TraceError(
                path,
                None,
                "no *.jsonl file in this directory",
                "pass the directory that TORCH_PLACEMENT_TRACE or Trace.write() was given",
            )
        return found
    if not path.exists():
        raise TraceError(path, None, "no such file or directory", "check the path")
    return [path]


def _open(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise TraceError(path, None, str(error.strerror), "make it readable") from None


def _first_header(path: Path) -> int:
    with _open(path) as lines:
        line = lines.readline()
    rank = _rank(path, 1, line)
    if rank is None:
        raise _no_header(path, line)
    return rank


class _Header(msgspec.Struct):
    """Line 1. Another schema, or a later version of this one, may have anything in the fields."""

    schema: Any = None
    version: Any = None
    rank: Any = None


_decode_header = msgspec.json.Decoder(_Header).decode


def _rank(path: Path, number: int, line: bytes) -> int | None:
    """The rank that a header names; None if the line is no header of ours.

    Raises:
        TraceError: it is ours, and what follows it can't be read.
    """
    try:
        header = _decode_header(line)
    except msgspec.MsgspecError:
        return None
    if header.schema != SCHEMA:
        return None
    version, rank = header.version, header.rank
    if type(version) is not int or type(rank) is not int:
        raise TraceError(path, number, "the header lacks its version or rank", _INSTEAD)
    if version != SCHEMA_VERSION:
        age = "a newer" if version > SCHEMA_VERSION else "an older"
        raise TraceError(
            path,
            number,
            f"written in schema version {version}; this torch-placement reads {SCHEMA_VERSION}",
            f"read it with {age} torch-placement",
        )
    return rank


def _no_header(path: Path, line: bytes) -> TraceError:
    found = f"the file begins with {_shortened(line)}" if line else "the file is empty"
    return TraceError(
        path, 1, f"not a placement trace, which begins with its header: {found}", _INSTEAD
    )


def _was_cut(line: bytes) -> bool:
    """Whether a line that can't be read is a last one that was not written to its end."""
    return not line.endswith(b"\n") and not line.endswith(b"}")


def _shortened(line: bytes) -> str:
    text = line.strip().decode(errors="replace")
    return repr(text[:60]) + (" ..." if len(text) > 60 else "")


def _as_written(hint: Any) -> Any:
    """What JSON has where an event has ``hint``. An enum's member may be newer than this code."""
    return str if isinstance(hint, type) and issubclass(hint, Enum) else hint


_Written = msgspec.defstruct(
    "_Written",
    [
        (name, _as_written(hint), Event._field_defaults[name])
        if name in Event._field_defaults
        else (name, _as_written(hint))
        for name, hint in get_type_hints(Event).items()
    ],
    gc=False,
)
"""An event as it is written. Fields that are newer than this code are left out; those that came
after the trace was written have their defaults."""

_decode_event = msgspec.json.Decoder(_Written).decode
_KINDS = {kind.value: kind for kind in EventKind}
_OUTCOMES = {outcome.value: outcome for outcome in Outcome}
_KIND, _OUTCOME = Event._fields.index("kind"), Event._fields.index("outcome")


def _event(line: bytes) -> Event:
    """The event in a line.

    Raises:
        msgspec.MsgspecError: it has none.
    """
    values: list[Any] = list(astuple(_decode_event(line)))
    values[_KIND] = _KINDS.get(values[_KIND], values[_KIND])
    values[_OUTCOME] = _OUTCOMES.get(values[_OUTCOME], values[_OUTCOME])
    return Event._make(values)
