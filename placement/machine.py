"""The state machine of one component, built from the table with the transitions library.

The library runs the machine; this file adds two things. A refused trigger becomes an
:class:`~placement.errors.IllegalTransition` whose text is read from the table, and a guard
(``integrity``) closes every trigger of a torn component.

The machine is a *record*: it is fired when what the trigger stands for is done.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from transitions import Event, Machine, MachineError

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

    Each trigger is a method (``onload()``, ``offload()``, ``save()``).
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
                }
                for (source, trigger), row in TABLE.items()
                if isinstance(row, Legal)
            ],
            auto_transitions=False,
        )

    def fire(self, trigger: Trigger) -> None:
        """
        Raises:
            IllegalTransition: the table has no such transition.
            TornPlacement: the component is torn.
        """
        self.trigger(trigger.value)

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
            return self.torn(asked)
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
            raise self.torn(asked)

    def torn(self, asked: str) -> TornPlacement:
        """The error for ``asked`` once the component is torn."""
        return TornPlacement(
            asked=asked,
            state=f"the record has the {self.component.value} in {self.state.value}, torn",
            why=TORN.why,
            instead=TORN.instead,
            tensors=self._evidence(),
        )

    def _is_whole(self) -> bool:
        return self.integrity is Integrity.WHOLE
