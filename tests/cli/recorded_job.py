"""Traces with known contents, recorded and written by the real ``Trace``."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from placement import trace as trace_module
from placement.states import TABLE, Component, Legal, Mode, Operation, Placement, Trigger
from placement.trace import EventKind, Outcome, Trace

GPU, MANUAL, MANAGED = Placement
PARAMS, OPTIMIZER = Component.PARAMS, Component.OPTIMIZER


@dataclass
class Recorder:
    """One rank's engine, as far as its trace goes."""

    trace: Trace = field(default_factory=Trace)
    module: str = "Actor#0"
    leases: list[int] = field(default_factory=list)
    count: int = 0

    def event(self, kind: EventKind, name: str, source: str, dest: str, **more: Any) -> None:
        more.setdefault("component", None)
        more.setdefault("lease", self.leases[-1] if self.leases else None)
        more.setdefault("module", self.module)
        self.trace.record(kind=kind, name=name, source=source, dest=dest, **more)

    def fire(
        self,
        trigger: Trigger,
        source: Placement,
        dest: Placement | None = None,
        component: Component = PARAMS,
        at: str = "engine/worker.py:1",
        **more: Any,
    ) -> None:
        """A trigger; to where the table says, unless told otherwise."""
        row = TABLE[source, trigger]
        if dest is None:
            dest = row.dest if isinstance(row, Legal) else source
        self.event(
            EventKind.TRIGGER,
            trigger.value,
            source.value,
            dest.value,
            component=component.value,
            call_site=at,
            **more,
        )

    def enter(self, operation: Operation, found: Placement, at: str = "engine/worker.py:2") -> int:
        lease = self.count
        self.count += 1
        self.leases.append(lease)
        self.event(
            EventKind.ENTER,
            operation.value,
            found.value,
            found.value,
            phase=operation.value,
            mode=Mode.IN_PLACE.value,
            call_site=at,
        )
        return lease

    def leave(
        self,
        operation: Operation,
        found: Placement,
        left: Placement | None = None,
        lease: int | None = None,
        at: str = "engine/worker.py:2",
        **more: Any,
    ) -> None:
        lease = self.leases[-1] if lease is None else lease
        self.leases.remove(lease)
        self.event(
            EventKind.OPERATION,
            operation.value,
            found.value,
            (left or found).value,
            lease=lease,
            phase=operation.value,
            mode=Mode.IN_PLACE.value,
            call_site=at,
            **more,
        )

    def refuse(self, name: str, state: Placement, detail: str, at: str) -> None:
        self.event(
            EventKind.REFUSAL,
            name,
            state.value,
            state.value,
            call_site=at,
            outcome=Outcome.REFUSED,
            detail=detail,
        )

    def train(self, at: str = "engine/worker.py:3") -> None:
        """A whole training context from and to the CPU."""
        memory = {"device_bytes": (0, 4096), "host_bytes": (9000, 8000)}
        self.enter(Operation.TRAIN, MANUAL, at)
        self.fire(Trigger.ONLOAD, MANUAL, at=at, bytes_to_device=4096, seconds=1e-6, **memory)
        self.fire(Trigger.ONLOAD, MANUAL, component=OPTIMIZER, at=at)
        self.fire(Trigger.OFFLOAD, GPU, at=at, bytes_to_host=4096, seconds=1e-6, **memory)
        self.fire(Trigger.OFFLOAD, GPU, component=OPTIMIZER, at=at)
        self.leave(Operation.TRAIN, MANUAL, at=at)


@dataclass
class Job:
    """The ranks of one run, and the directory that their traces go to."""

    directory: Path
    monkeypatch: pytest.MonkeyPatch
    ranks: dict[int, Recorder] = field(default_factory=dict)

    def rank(self, number: int) -> Recorder:
        """The recorder of a rank, which records as that rank from now on."""
        self.monkeypatch.setattr(trace_module, "current_rank", lambda: number)
        return self.ranks.setdefault(number, Recorder())

    def write(self) -> Path:
        for number in self.ranks:
            self.rank(number).trace.write(self.directory)
        return self.directory
