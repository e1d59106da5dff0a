"""One manager's hand on the trace: fills in whose module it is, and which context it is in."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from placement.errors import PlacementError
from placement.leases import Lease, Leases
from placement.states import Component, Mode, Placement, Trigger
from placement.trace import EventKind, Outcome, Trace, call_site
from placement.transfer import Moved

_numbers = itertools.count()


class Journal:
    """Writes the events of one manager.

    Args:
        trace: where they go.
        module: the module, which is named ``Class#n`` in them.
        leases: the manager's open contexts.
    """

    def __init__(self, trace: Trace, module: nn.Module, leases: Leases) -> None:
        self.trace = trace
        self._module = f"{type(module).__name__}#{next(_numbers)}"
        self._leases = leases

    def entered(self, lease: Lease, mode: Mode) -> None:
        """A context is being entered; what it needs is brought next."""
        self.trace.record(
            module=self._module,
            component=None,
            kind=EventKind.ENTER,
            name=lease.operation.value,
            source=lease.found[Component.MODEL].value,
            dest=lease.found[Component.MODEL].value,
            lease=lease.number,
            phase=lease.operation.value,
            mode=mode.value,
            call_site=lease.entered_at,
        )

    def ended(
        self,
        lease: Lease,
        mode: Mode,
        found: Placement,
        left: Placement,
        failure: BaseException | None,
    ) -> None:
        """A context ended: the operation in it is over."""
        self.trace.record(
            module=self._module,
            component=None,
            kind=EventKind.OPERATION,
            name=lease.operation.value,
            source=found.value,
            dest=left.value,
            lease=lease.number,
            phase=lease.operation.value,
            mode=mode.value,
            bytes_to_device=lease.staged_bytes,
            seconds=time.monotonic() - lease.entered,
            call_site=lease.entered_at,
            outcome=Outcome.OK if failure is None else Outcome.FAILED,
            detail="" if failure is None else one_line(failure),
        )

    def triggered(
        self,
        component: Component,
        trigger: Trigger,
        source: Placement,
        dest: Placement,
        moved: Moved | None = None,
        failure: BaseException | None = None,
    ) -> None:
        """A machine's trigger was fired, or its work failed."""
        moved = moved or Moved()
        self.trace.record(
            module=self._module,
            component=component.value,
            kind=EventKind.TRIGGER,
            name=trigger.value,
            source=source.value,
            dest=dest.value,
            bytes_to_device=moved.to_device,
            bytes_to_host=moved.to_host,
            seconds=moved.seconds,
            device_bytes=moved.device_bytes,
            host_bytes=moved.host_bytes,
            outcome=Outcome.OK if failure is None else Outcome.FAILED,
            detail="" if failure is None else one_line(failure),
            **self._where(),
        )

    def copying(
        self, kind: EventKind, component: Component, name: str, placement: Placement
    ) -> None:
        """Copies of a component were issued, or have landed."""
        self.trace.record(
            module=self._module,
            component=component.value,
            kind=kind,
            name=name,
            source=placement.value,
            dest=placement.value,
            **self._where(),
        )

    def moved(self, why: str, component: Component, placement: Placement, moved: Moved) -> None:
        """Tensors were put right in the placement that they have anyway."""
        self.trace.record(
            module=self._module,
            component=component.value,
            kind=EventKind.MOVE,
            name=why,
            source=placement.value,
            dest=placement.value,
            bytes_to_device=moved.to_device,
            bytes_to_host=moved.to_host,
            seconds=moved.seconds,
            device_bytes=moved.device_bytes,
            host_bytes=moved.host_bytes,
            **self._where(),
        )

    def foreign(self, call: str, placement: Placement) -> None:
        """Tensors were moved, or may have been, by a call that went past the manager."""
        self.trace.record(
            module=self._module,
            component=None,
            kind=EventKind.FOREIGN,
            name=call,
            source=placement.value,
            dest=placement.value,
            **self._where(),
        )

    def adopted(self, component: Component, source: Placement, dest: Placement) -> None:
        """The record was read anew from the tensors."""
        self.trace.record(
            module=self._module,
            component=component.value,
            kind=EventKind.ADOPTION,
            name="adopt",
            source=source.value,
            dest=dest.value,
            **self._where(),
        )

    @contextmanager
    def refusals(self, asked: str, placement: Placement) -> Iterator[None]:
        """Record a refusal that leaves the block."""
        try:
            yield
        except PlacementError as error:
            self.trace.record(
                module=self._module,
                component=None,
                kind=EventKind.REFUSAL,
                name=asked,
                source=placement.value,
                dest=placement.value,
                outcome=Outcome.REFUSED,
                detail=one_line(error),
                **self._where(),
            )
            error.events = self.trace.last_of(self._module)
            raise

    def _where(self) -> dict[str, Any]:
        lease = self._leases.innermost
        return {
            "lease": lease.number if lease is not None else None,
            "phase": lease.operation.value if lease is not None else None,
            "call_site": call_site(),
        }


def one_line(error: BaseException) -> str:
    """The type and first line of an error."""
    return f"{type(error).__name__}: {error}".splitlines()[0]
