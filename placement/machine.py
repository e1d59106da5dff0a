"""The state machine of one component, built from the table with the transitions library.

The library runs the machine; this file adds two things. A refused trigger becomes an
:class:`~placement.errors.IllegalTransition` whose text is read from the table, and a guard
(``integrity``) closes every trigger of a torn component.

The machine is a *record*. What a trigger does to tensors is the caller's ``carry_out``, which runs
inside the transition, before the state changes: when it raises, the state has not changed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from transitions import Event, EventData, Machine, MachineError

from placement.errors import IllegalTransition, TornPlacement
from placement.states import TABLE, TORN, Component, Illegal, Integrity, Legal, Placement, Trigger


class _RefusingEvent(Event):
    """An event that raises our error where the library would raise its own or return False."""

    def trigger(self, model: object, *args: Any, **kwargs: Any) -> bool:
        assert isinstance(model, PlacementMachine)
        asked = Trigger(self.name)
        try:
            fired = super().trigger(model, *args, **kwargs)
        except IllegalTransition:
            raise
        except MachineError:
            raise model.refusal(asked) from None
        if not fired:  # the integrity guard held it back
            raise model.refusal(asked)
        return True


class _Machine(Machine):
    event_cls = _RefusingEvent


class PlacementMachine:
    """The record of where one component is, and the triggers that may change it.

    Args:
        component: whose record this is; named in every error.
        initial: the placement that was read from the tensors.
        evidence: called for an error's list of tensors, one line each.

    Each trigger is a method (``onload()``, ``offload()``, ``save()``). It takes ``carry_out``, a
    function that does the work; it is called before the state changes.
    """

    state: Placement
    onload: Callable[..., bool]
    offload: Callable[..., bool]
    save: Callable[..., bool]
    trigger: Callable[..., bool]

    def __init__(
        self,
        component: Component,
        initial: Placement,
        *,
        evidence: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        self.component = component
        self.integrity = Integrity.WHOLE
        self._evidence = evidence
        self._machine = _Machine(
            model=self,
            states=Placement,
            initial=initial,
            transitions=[
                {
                    "trigger": trigger.value,
                    "source": source,
                    "dest": row.dest,
                    "conditions": self._is_whole,
                    "before": self._carry_out,
                }
                for (source, trigger), row in TABLE.items()
                if isinstance(row, Legal)
            ],
            auto_transitions=False,
            send_event=True,
        )

    def fire(self, trigger: Trigger, carry_out: Callable[[], None] | None = None) -> None:
        """Fire ``trigger``, with ``carry_out`` as the work that must succeed before it counts.

        Raises:
            IllegalTransition: the table has no such transition; ``carry_out`` was not called.
            TornPlacement: the component is torn; ``carry_out`` was not called.
        """
        self.trigger(trigger.value, carry_out=carry_out)

    def may(self, trigger: Trigger) -> bool:
        """Whether ``trigger`` would be accepted now. Read from the table, which takes a fraction of
        the time of the library's own question."""
        return self.integrity is Integrity.WHOLE and isinstance(TABLE[self.state, trigger], Legal)

    def tear(self) -> None:
        """Record that a move failed half way: from now on every trigger is refused."""
        self.integrity = Integrity.TORN

    def mend(self) -> None:
        """Record that every tensor is again where the placement says."""
        self.integrity = Integrity.WHOLE

    def refusal(self, trigger: Trigger, asked: str | None = None) -> IllegalTransition:
        """The error for ``trigger`` in the present state, in the words of the table.

        Args:
            trigger: what would have to be fired.
            asked: the call that would need it; by default the trigger itself.
        """
        asked = asked or f"{trigger.value}()"
        if self.integrity is Integrity.TORN:
            return self._torn(asked)
        row = TABLE[self.state, trigger]
        if not isinstance(row, Illegal):
            raise AssertionError(f"{trigger.value} is legal in {self.state.value}")
        return IllegalTransition(
            asked=asked,
            state=f"the record has the {self.component.value} in {self.state.value}",
            why=row.why,
            instead=row.instead,
            tensors=self._evidence(),
        )

    def require_whole(self, asked: str) -> None:
        """
        Raises:
            TornPlacement: the component is torn; ``asked`` can't be granted.
        """
        if self.integrity is Integrity.TORN:
            raise self._torn(asked)

    def _torn(self, asked: str) -> TornPlacement:
        return TornPlacement(
            asked=asked,
            state=f"the record has the {self.component.value} in {self.state.value}, torn",
            why=TORN.why,
            instead=TORN.instead,
            tensors=self._evidence(),
        )

    def _is_whole(self, event: EventData) -> bool:
        return self.integrity is Integrity.WHOLE

    def _carry_out(self, event: EventData) -> None:
        if (work := event.kwargs.get("carry_out")) is not None:
            work()
