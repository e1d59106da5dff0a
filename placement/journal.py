"""One manager's hand on the trace: fills in whose module it is, and which context it is in."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from placement.errors import PlacementError
from placement.leases import Lease, Leases
from placement.record import Record
from placement.states import Component, Mode, Placement, Trigger
from placement.trace import EventKind, Outcome, Trace, call_site
from placement.transfer import Moved

_numbers = itertools.count()


class Journal:
    """Writes the events of one manager.

    Args:
        trace: where they go.
        record: of the module, which is named ``Class#n`` in them.
        leases: the manager's open contexts.
    """

    def __init__(self, trace: Trace, record: Record, leases: Leases) -> None:
        self.trace = trace
        self._module = f"{type(record.module).__name__}#{next(_numbers)}"
        self._record = record
        self._leases = leases

    def entered(self, lease: Lease, mode: Mode) -> None:
        """A context is being entered; what it needs is brought next."""
        found = lease.found[Component.PARAMS]
        self._write(EventKind.ENTER, lease.operation.value, found, found, **_of(lease, mode))

    def ended(
        self, lease: Lease, mode: Mode, found: Placement, failure: BaseException | None
    ) -> None:
        """A context ended: the operation in it is over.

        Args:
            lease: the context.
            mode: how it got at the parameters.
            found: the parameters' placement when it began.
            failure: what its body or its end raised.
        """
        self._write(
            EventKind.OPERATION,
            lease.operation.value,
            found,
            self._record[Component.PARAMS],
            bytes_to_device=lease.staged_bytes,
            seconds=time.monotonic() - lease.entered,
            failure=failure,
            **_of(lease, mode),
        )

    def triggered(
        self,
        component: Component,
        trigger: Trigger,
        source: Placement,
        moved: Moved | None = None,
        failure: BaseException | None = None,
    ) -> None:
        """A machine's trigger was fired, or its work failed."""
        self._write(
            EventKind.TRIGGER,
            trigger.value,
            source,
            self._record[component],
            component=component.value,
            failure=failure,
            **_cost(moved),
        )

    def copying(self, kind: EventKind, component: Component, name: str) -> None:
        """Copies of a component were issued, or have landed."""
        placement = self._record[component]
        self._write(kind, name, placement, placement, component=component.value)

    def moved(self, why: str, component: Component, moved: Moved) -> None:
        """Tensors were put right in the placement that they have anyway."""
        placement = self._record[component]
        self._write(
            EventKind.MOVE, why, placement, placement, component=component.value, **_cost(moved)
        )

    def foreign(self, call: str) -> None:
        """Tensors were moved, or may have been, by a call that went past the manager."""
        placement = self._record[Component.PARAMS]
        self._write(EventKind.FOREIGN, call, placement, placement)

    def adopted(self, component: Component, source: Placement) -> None:
        """The record was read anew from the tensors."""
        dest = self._record[component]
        self._write(EventKind.ADOPTION, "adopt", source, dest, component=component.value)

    @contextmanager
    def refusals(self, asked: str) -> Iterator[None]:
        """Record a refusal that leaves the block, and give it the module's last events."""
        try:
            yield
        except PlacementError as error:
            placement = self._record[Component.PARAMS]
            self._write(
                EventKind.REFUSAL,
                asked,
                placement,
                placement,
                failure=error,
                failed_as=Outcome.REFUSED,
            )
            error.events = self.trace.last_of(self._module)
            raise

    def _write(
        self,
        kind: EventKind,
        name: str,
        source: Placement,
        dest: Placement,
        *,
        failure: BaseException | None = None,
        failed_as: Outcome = Outcome.FAILED,
        **fields: Any,
    ) -> None:
        """Record an event. What is not given is the innermost context's, and the caller's."""
        if "lease" not in fields and (lease := self._leases.innermost) is not None:
            fields |= {"lease": lease.number, "phase": lease.operation.value}
        if "call_site" not in fields:
            fields["call_site"] = call_site()
        self.trace.record(
            module=self._module,
            component=fields.pop("component", None),
            kind=kind,
            name=name,
            source=source.value,
            dest=dest.value,
            outcome=Outcome.OK if failure is None else failed_as,
            detail="" if failure is None else one_line(failure),
            **fields,
        )


def _of(lease: Lease, mode: Mode) -> dict[str, Any]:
    return {
        "lease": lease.number,
        "phase": lease.operation.value,
        "mode": mode.value,
        "call_site": lease.entered_at,
    }


def _cost(moved: Moved | None) -> dict[str, Any]:
    if moved is None:
        return {}
    return {
        "bytes_to_device": moved.to_device,
        "bytes_to_host": moved.to_host,
        "bytes_unchanged": moved.unchanged,
        "seconds": moved.seconds,
        "device_bytes": moved.device_bytes,
        "host_bytes": moved.host_bytes,
    }


def one_line(error: BaseException) -> str:
    """The type and first line of an error."""
    return f"{type(error).__name__}: {error}".splitlines()[0]
