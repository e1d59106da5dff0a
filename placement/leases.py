"""Open contexts, and what each will put back.

A lease says which components an operation holds where they are, which of them it needs on the
compute device, and what it found. Leases usually end in the reverse of the order in which they
began. One that ends earlier (a generator that was dropped) hands what it found to the lease above
it, which puts it back in its stead: nothing is taken from a lease that still needs it.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

from placement.errors import PlacementHeld
from placement.states import EXCLUDED_BY, Component, Operation, Placement


@dataclass(eq=False)
class Lease:
    """One open context.

    Attributes:
        operation: what it is for.
        needs: components that must be on the compute device.
        holds: components that nobody may move by hand.
        unchanged: components that it declares to keep their values.
        found: the placement of every component when it began.
        entered_at: ``file:line`` where it was entered.
        entered: when, in seconds of the monotonic clock.
        number: counts the process's leases.
        thread: the thread that entered it.
        staged_bytes: bytes that were copied to the compute device for the operation alone, and
            dropped again.
    """

    operation: Operation
    needs: frozenset[Component]
    holds: frozenset[Component]
    unchanged: frozenset[Component]
    found: dict[Component, Placement]
    entered_at: str
    entered: float = field(default_factory=time.monotonic)
    number: int = field(default_factory=partial(next, itertools.count()))
    thread: int = field(default_factory=threading.get_ident)
    staged_bytes: int = 0

    def __str__(self) -> str:
        return f"{self.operation.value}, entered at {self.entered_at}"


class Leases:
    """The open leases of one manager, oldest first."""

    def __init__(self) -> None:
        self._open: list[Lease] = []

    def __iter__(self) -> Iterator[Lease]:
        return iter(tuple(self._open))

    @property
    def innermost(self) -> Lease | None:
        """The lease that began last."""
        return self._open[-1] if self._open else None

    def begin(self, lease: Lease) -> None:
        """Open ``lease``."""
        self._open.append(lease)

    def owed(self, lease: Lease) -> dict[Component, Placement]:
        """What is to be put back when ``lease`` ends: the placements that it found, without the
        components that another open lease needs; nothing if a later lease will do it."""
        if lease is not self._open[-1]:
            return {}
        needed = {component for other in self._open[:-1] for component in other.needs}
        return {c: placement for c, placement in lease.found.items() if c not in needed}

    def end(self, lease: Lease) -> None:
        """Close ``lease``. If a later one is open, that one owes from now on what this one did."""
        index = self._open.index(lease)
        del self._open[index]
        if index < len(self._open):
            self._open[index].found = lease.found

    def refuse_move(self, component: Component, asked: str) -> None:
        """
        Raises:
            PlacementHeld: an open lease holds ``component`` where it is.
        """
        for lease in self._open:
            if component in lease.holds:
                raise PlacementHeld(
                    asked=asked,
                    state=f"an open context holds the {component.value} ({lease})",
                    why="the operation in it works with the tensors where they are",
                    instead="move it after the context has ended",
                )

    def refuse_operation(self, operation: Operation, asked: str) -> None:
        """
        Raises:
            PlacementHeld: an open context reads the values that ``operation`` changes, or changes
                those that it reads.
        """
        for lease in self._open:
            if lease.operation in EXCLUDED_BY[operation]:
                raise PlacementHeld(
                    asked=asked,
                    state=f"a context is open ({lease})",
                    why=f"{operation.value} and {lease.operation.value} at once would see each "
                    "other's half finished values",
                    instead="end that context first: close the generator that holds it, if it is "
                    "an export",
                )

    def refuse_other_threads(self, asked: str) -> None:
        """
        Raises:
            PlacementHeld: a lease of another thread is open. Two threads that move one module
                would undo each other.
        """
        for lease in self._open:
            if lease.thread != threading.get_ident():
                raise PlacementHeld(
                    asked=asked,
                    state=f"another thread is in a context ({lease})",
                    why="two threads can't place one module at a time",
                    instead="let one thread own the module's lifecycle, or wait for the other",
                )
