"""What happened to the placement of this process's modules, and when.

Every trigger, operation, move and refusal is one :class:`Event`. A :class:`Trace` keeps the last
of them in memory; it can be written as JSON lines, one file a rank, or stream each event to such a
file as it happens (``TORCH_PLACEMENT_TRACE=directory``). Every event also goes to the standard
``logging`` tree under ``placement.trace`` at level DEBUG, which is quiet unless it is asked for.
"""

from __future__ import annotations

import contextlib
import enum
import importlib.util
import json
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import NamedTuple

SCHEMA = "torch-placement-trace"
SCHEMA_VERSION = 1
"""Raised when a field changes its meaning or goes. A new field alone does not raise it."""

RECOVERY = "recover"
"""Name of the move that makes a torn component whole."""

TRACE_VARIABLE = "TORCH_PLACEMENT_TRACE"
"""Environment variable: a directory into which the process's trace is streamed."""

_LOG = logging.getLogger("placement.trace")
_TORCH = importlib.util.find_spec("torch")
_PASSED_OVER = (
    os.path.dirname(os.path.abspath(__file__)) + os.sep,
    *(_TORCH.submodule_search_locations or () if _TORCH is not None else ()),
    os.path.abspath(contextlib.__file__),
)
"""Files whose frames are not what a reader looks for: ours, torch's and contextlib's."""


class EventKind(enum.Enum):
    """What sort of thing happened."""

    ENTER = "enter"
    """A context was entered. The operation with the same lease ends it."""

    OPERATION = "operation"
    """What an engine did with the module in a context, written when it ended."""

    TRIGGER = "trigger"
    """A transition of a component's machine; its bytes are those that it moved."""

    ISSUED = "issued"
    """Copies of a component were begun. Their targets may not be read yet."""

    LANDED = "landed"
    """The copies of a component that were issued have arrived."""

    MOVE = "move"
    """Tensors that were put right without a change of placement."""

    FOREIGN = "foreign"
    """A call of the module's own that moved tensors, or may have, without the manager."""

    ADOPTION = "adoption"
    """A component's placement was read anew from its tensors, after a foreign move."""

    REFUSAL = "refusal"
    """A request that was turned down; nothing moved."""


class Outcome(enum.Enum):
    """How it ended."""

    OK = "ok"
    REFUSED = "refused"
    FAILED = "failed"


class Event(NamedTuple):
    """One thing that happened. (A named tuple, since making one must cost next to nothing.)

    Attributes:
        number: counts from 0 in its trace, so that a gap is noticed.
        wall: seconds since the epoch, at its end.
        monotonic: seconds of a clock that never goes back, at its end; for intervals within one
            process.
        rank: of the process in the default process group, 0 without one.
        thread: name of the thread.
        module: the placed module, as ``Class#n`` with n counting the process's managers.
        component: ``params``, ``grads``, ``buffers`` or ``optimizer``; None where it concerns all.
        kind: see :class:`EventKind`.
        name: the trigger, operation or call.
        source: the placement before; of an operation, the model's.
        dest: the placement after.
        lease: number of the context that this is, or happened in; None outside of all.
        phase: operation of that context.
        mode: how an operation got at the parameters, see ``placement.states.Mode``.
        bytes_to_device: bytes copied to the compute device; of an operation those that were copied
            for it alone and dropped again, its triggers have the others.
        bytes_to_host: bytes copied to the CPU.
        bytes_unchanged: bytes that went to the CPU without a copy: they had not changed since they
            came from there.
        seconds: how long it took; of an operation, with everything inside it.
        device_bytes: bytes allocated on the compute device before and after, where it moved.
        host_bytes: resident bytes of the process before and after, where it moved.
        call_site: ``file:line`` of the first frame outside this package.
        outcome: see :class:`Outcome`.
        detail: of a refusal or failure, the error in one line.
    """

    number: int
    wall: float
    monotonic: float
    rank: int
    thread: str
    module: str
    component: str | None
    kind: EventKind
    name: str
    source: str
    dest: str
    lease: int | None
    phase: str | None
    mode: str | None
    bytes_to_device: int
    bytes_to_host: int
    bytes_unchanged: int
    seconds: float
    device_bytes: tuple[int, int] | None
    host_bytes: tuple[int, int] | None
    call_site: str
    outcome: Outcome
    detail: str

    @property
    def moved(self) -> bool:
        """Whether tensors were moved, by a transition or by a move within a placement. A component
        without tensors makes its transition, too, but moves nothing."""
        return (
            self.outcome is Outcome.OK
            and self.kind in (EventKind.MOVE, EventKind.TRIGGER)
            and self.bytes_to_device + self.bytes_to_host + self.bytes_unchanged > 0
        )

    @property
    def changes_placement(self) -> bool:
        """Whether it changed where tensors are, or tried to."""
        return self.moved or (
            self.kind in (EventKind.FOREIGN, EventKind.ADOPTION)
            or (self.kind is EventKind.TRIGGER and self.outcome is Outcome.FAILED)
        )

    def in_words(self, now: float) -> str:
        """One line for a person.

        Args:
            now: seconds of the monotonic clock, to say how long ago it was.
        """
        what = " ".join(filter(None, (self.component, self.name)))
        where = f"{self.source} → {self.dest}" if self.source != self.dest else f"in {self.dest}"
        how = ""
        if self.kind is EventKind.FOREIGN:
            how = ", past the manager"
        elif self.outcome is not Outcome.OK:
            how = f", {self.outcome.value}: {self.detail}"
        return f"{now - self.monotonic:.3f} s before: {what} {where}{how} at {self.call_site}"

    def as_json(self) -> str:
        """One line, fields in the order above."""
        plain = self._asdict()
        plain["kind"], plain["outcome"] = self.kind.value, self.outcome.value
        return json.dumps(plain, separators=(",", ":"))


class Trace:
    """The last events of the managers that share it.

    Args:
        limit: how many events are kept in memory; older ones are dropped, and their numbers with
            them.
        directory: where to stream events as they happen, as ``rank<R>-pid<P>.jsonl``. A line is
            written whole, by one write, so what happened before a kill is there to read.
    """

    def __init__(
        self, limit: int = 10_000, directory: str | os.PathLike[str] | None = None
    ) -> None:
        self._events: deque[Event] = deque(maxlen=limit)
        self._count = 0
        self._lock = threading.Lock()
        self._directory = Path(directory) if directory is not None else None
        self._stream: int | None = None

    def __iter__(self) -> Iterator[Event]:
        return iter(tuple(self._events))

    def __len__(self) -> int:
        return len(self._events)

    def record(
        self,
        *,
        module: str,
        component: str | None,
        kind: EventKind,
        name: str,
        source: str,
        dest: str,
        lease: int | None = None,
        phase: str | None = None,
        mode: str | None = None,
        bytes_to_device: int = 0,
        bytes_to_host: int = 0,
        bytes_unchanged: int = 0,
        seconds: float = 0.0,
        device_bytes: tuple[int, int] | None = None,
        host_bytes: tuple[int, int] | None = None,
        call_site: str = "",
        outcome: Outcome = Outcome.OK,
        detail: str = "",
    ) -> None:
        """Add an event. Number, clocks, rank and thread are filled in here."""
        with self._lock:
            event = Event(
                self._count,
                time.time(),
                time.monotonic(),
                current_rank(),
                threading.current_thread().name,
                module,
                component,
                kind,
                name,
                source,
                dest,
                lease,
                phase,
                mode,
                bytes_to_device,
                bytes_to_host,
                bytes_unchanged,
                seconds,
                device_bytes,
                host_bytes,
                call_site,
                outcome,
                detail,
            )
            self._count += 1
            self._events.append(event)
            if self._directory is not None:
                self._append(self._directory, event)
        if _LOG.isEnabledFor(logging.DEBUG):
            _LOG.debug("%s", event.as_json())

    def last_of(self, module: str, count: int = 20) -> tuple[Event, ...]:
        """The last ``count`` events of one module, oldest first."""
        found: list[Event] = []
        for event in reversed(self._events):
            if event.module == module:
                found.append(event)
                if len(found) == count:
                    break
        return tuple(reversed(found))

    def moves(self) -> list[Event]:
        """The events in which tensors moved."""
        return [event for event in self if event.moved]

    def write(self, directory: str | os.PathLike[str]) -> Path:
        """Write the events kept so far as ``rank<R>.jsonl`` in ``directory``.

        Returns:
            The file's path.
        """
        path = Path(directory)
        path.mkdir(parents=True, exist_ok=True)
        path /= f"rank{current_rank()}.jsonl"
        lines = [_header()] + [event.as_json() for event in self]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return path

    def _append(self, directory: Path, event: Event) -> None:
        if self._stream is None:
            directory.mkdir(parents=True, exist_ok=True)
            path = directory / f"rank{event.rank}-pid{os.getpid()}.jsonl"
            cut = _ends_within_a_line(path)
            self._stream = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            # A process of the same number may have been killed in the middle of a line.
            os.write(self._stream, (("\n" if cut else "") + _header() + "\n").encode())
        os.write(self._stream, (event.as_json() + "\n").encode())


def process_trace() -> Trace:
    """The trace that all managers of this process share unless they are given another."""
    global _process_trace
    if _process_trace is None:
        _process_trace = Trace(directory=os.environ.get(TRACE_VARIABLE) or None)
    return _process_trace


def use_process_trace(trace: Trace) -> Trace:
    """Let managers made from now on share ``trace``.

    Returns:
        The one that they shared before.
    """
    global _process_trace
    found, _process_trace = process_trace(), trace
    return found


_process_trace: Trace | None = None


def current_rank() -> int:
    """This process's rank in the default group, 0 without one."""
    # Reading traces needs no torch, and a process that has not imported it is in no group.
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or (group := dist.group.WORLD) is None:
        return 0
    rank: int = group.rank()
    return rank


def call_site() -> str:
    """``file:line`` of the nearest frame that is neither ours nor torch's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(_PASSED_OVER):
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def _ends_within_a_line(path: Path) -> bool:
    if not path.exists() or path.stat().st_size == 0:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


def _header() -> str:
    header = {"schema": SCHEMA, "version": SCHEMA_VERSION, "rank": current_rank()}
    return json.dumps(header, separators=(",", ":"))
