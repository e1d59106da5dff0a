"""One manager's eye on moves that go past it."""

from __future__ import annotations

import contextlib

from placement.foreign import Convert, would_move_to
from placement.journal import Journal
from placement.record import Record
from placement.residence import CPU
from placement.states import Component, Placement, Trigger
from placement.trace import call_site


class ForeignWatch:
    """Notices moves that go past a manager, and refuses them where they would break the module.

    Attributes:
        unchecked: whether tensors may have been moved since the record was last checked.
        conversions: how many calls have converted the module, also those that moved nothing.
        last_conversion: the last of them, with its call site.
    """

    def __init__(self, record: Record, journal: Journal) -> None:
        self._record = record
        self._journal = journal
        self.unchecked = False
        self.conversions = 0
        self.last_conversion = ""

    def before_conversion(self, call: str, convert: Convert) -> None:
        """Refuse a conversion that would move a managed module."""
        managed = self._record.owner.managed
        if managed is None:
            return
        with contextlib.suppress(LookupError):
            target = would_move_to(convert, {CPU, self._record.device})
            if target is not None:
                trigger = Trigger.OFFLOAD if target == CPU else Trigger.ONLOAD
                with self._journal.refusals(call):
                    raise self._record.machines[Component.PARAMS].refusal(trigger, f"module.{call}")

    def after_conversion(self, call: str, convert: Convert) -> None:
        """Remember a conversion that moved tensors, or may have."""
        self.conversions += 1
        self.last_conversion = f"module.{call} at {call_site()}"
        placement = self._record[Component.PARAMS]
        try:
            rests_on = CPU if placement is Placement.CPU_MANUAL else self._record.device
            if would_move_to(convert, {rests_on}) is None:
                return
        except LookupError:
            pass  # it may have
        self.unchecked = True
        self._record.last_foreign = self.last_conversion
        self._journal.foreign(call)
