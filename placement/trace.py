"""What happened to a module's placement, and when.

Every trigger, operation, move and refusal is one :class:`Event`. They are kept in a bounded memory
and can be written as JSON lines, one file a rank, for people and programs to read afterwards.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import os
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch.distributed as dist

SCHEMA = "torch-placement-trace"
SCHEMA_VERSION = 1
"""Raised whenever a field changes its meaning or goes; a new field alone does not raise it."""

_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep


class EventKind(enum.Enum):
    """What sort of thing happened."""

    TRIGGER = "trigger"
    """A transition of a component's machine; its bytes are those it moved."""

    OPERATION = "operation"
    """What an engine did with the module, written when it ended."""

    MOVE = "move"
    """Tensors that were put right without a change of placement."""

    REFUSAL = "refusal"
    """A request that was turned down; nothing moved."""


class Outcome(enum.Enum):
    """How it ended."""

    OK = "ok"
    REFUSED = "refused"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened.

    Attributes:
        number: counts from 0 in its trace, so that a gap is noticed.
        wall: seconds since the epoch.
        monotonic: seconds of a clock that never goes back, for intervals within one process.
        rank: of the process in the default process group, 0 without one.
        module: the class of the placed module.
        component: ``model`` or ``optimizer``; None for an operation, which concerns both.
        kind: see :class:`EventKind`.
        name: the trigger, operation or call.
        source: the placement before.
        dest: the placement after.
        mode: how an operation got at the parameters, see ``placement.states.Mode``.
        bytes_to_device: bytes copied to the compute device.
        bytes_to_host: bytes copied to the CPU.
        seconds: how long it took; of an operation, with everything inside it.
        call_site: ``file:line`` of the first frame outside this package.
        outcome: see :class:`Outcome`.
        detail: of a refusal or failure, the error in one line.
    """

    number: int
    wall: float
    monotonic: float
    rank: int
    module: str
    component: str | None
    kind: EventKind
    name: str
    source: str
    dest: str
    mode: str | None = None
    bytes_to_device: int = 0
    bytes_to_host: int = 0
    seconds: float = 0.0
    call_site: str = ""
    outcome: Outcome = Outcome.OK
    detail: str = ""

    @property
    def bytes_moved(self) -> int:
        return self.bytes_to_device + self.bytes_to_host

    def as_json(self) -> str:
        plain = dataclasses.asdict(self)
        plain["kind"], plain["outcome"] = self.kind.value, self.outcome.value
        return json.dumps(plain, separators=(",", ":"))


class Trace:
    """The last events of one or more managers of this process.

    Args:
        limit: how many events are kept; older ones are dropped, and their numbers with them.
    """

    def __init__(self, limit: int = 10_000) -> None:
        self._events: deque[Event] = deque(maxlen=limit)
        self._count = 0

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
        mode: str | None = None,
        bytes_to_device: int = 0,
        bytes_to_host: int = 0,
        seconds: float = 0.0,
        call_site: str = "",
        outcome: Outcome = Outcome.OK,
        detail: str = "",
    ) -> None:
        """Add an event. Number, clocks and rank are filled in here."""
        self._events.append(
            Event(
                number=self._count,
                wall=time.time(),
                monotonic=time.monotonic(),
                rank=current_rank(),
                module=module,
                component=component,
                kind=kind,
                name=name,
                source=source,
                dest=dest,
                mode=mode,
                bytes_to_device=bytes_to_device,
                bytes_to_host=bytes_to_host,
                seconds=seconds,
                call_site=call_site,
                outcome=outcome,
                detail=detail,
            )
        )
        self._count += 1

    def moves(self) -> list[Event]:
        """The events that moved tensors: each move, and each transition that changed a placement,
        even if it found no bytes to copy."""
        return [
            event
            for event in self
            if event.outcome is Outcome.OK
            and (
                event.kind is EventKind.MOVE
                or (event.kind is EventKind.TRIGGER and event.source != event.dest)
            )
        ]

    def write(self, directory: str | os.PathLike[str]) -> Path:
        """Write the events kept so far as ``rank<N>.jsonl`` in ``directory``, a header line first.

        Returns:
            The file's path.
        """
        path = Path(directory)
        path.mkdir(parents=True, exist_ok=True)
        path /= f"rank{current_rank()}.jsonl"
        header = {"schema": SCHEMA, "version": SCHEMA_VERSION, "rank": current_rank()}
        lines = [json.dumps(header, separators=(",", ":"))] + [event.as_json() for event in self]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return path


def current_rank() -> int:
    """This process's rank in the default group, 0 without one."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def call_site() -> str:
    """``file:line`` of the nearest frame that is neither ours nor contextlib's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(_PACKAGE) and not name.endswith("contextlib.py"):
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
