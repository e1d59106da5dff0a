"""What placement refuses, by name.

Every error here is a refusal *before* anything moved, except where its docstring says otherwise.
Each says what was asked, of what and in which state, why not, which tensors show it, and what to
do instead; the parts are attributes too, for a caller that wants to act on them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transitions import MachineError

from placement.trace import Event

_SHOWN = 8
"""How many tensors a message lists; the attribute ``tensors`` holds all of them."""

_CHANGES_SHOWN = 3
"""How many of the last changes a message tells; the attribute ``events`` holds more."""


class PlacementError(Exception):
    """The base of all refusals.

    Attributes:
        asked: the call that was refused, for example ``onload()``.
        state: what it was asked of, for example ``model in cpu_fsdp2_managed``.
        why: the reason.
        tensors: lines of the form ``name (kind) on device`` for each tensor that shows it.
        instead: what to do.
        events: the last events of the module's trace, oldest first; empty where a manager was
            still being made.
    """

    def __init__(
        self, *, asked: str, state: str, why: str, instead: str, tensors: Sequence[str] = ()
    ) -> None:
        self.asked = asked
        self.state = state
        self.why = why
        self.tensors = tuple(tensors)
        self.instead = instead
        self.events: tuple[Event, ...] = ()
        super().__init__(self._message())

    def _message(self) -> str:
        tensors = list(self.tensors[:_SHOWN])
        if (hidden := len(self.tensors) - _SHOWN) > 0:
            tensors.append(f"... and {hidden} more")
        return "\n".join(
            [
                f"{self.asked} refused: {self.state}",
                *_labelled("why:", [f"{self.why}."]),
                *_labelled("tensors:", tensors),
                *_labelled("instead:", [f"{self.instead}."]),
                *_labelled("lately:", self._lately()),
            ]
        )

    def _lately(self) -> list[str]:
        """The last events that changed where the module is, or tried to."""
        changes = [event for event in self.events if event.changes_placement]
        return [event.in_words(self.events[-1].monotonic) for event in changes[-_CHANGES_SHOWN:]]

    def __str__(self) -> str:
        # MachineError, a base of one subclass, would print the repr of the message.
        return self._message()

    def __reduce__(self) -> tuple[Any, ...]:
        # An error travels between ranks, and its keyword arguments with it.
        return (_rebuild, (type(self), self.__dict__.copy()))


def _labelled(label: str, lines: Sequence[str]) -> list[str]:
    return [f"  {label if i == 0 else '':<8} {line}" for i, line in enumerate(lines)]


def _rebuild(cls: type[PlacementError], parts: dict[str, Any]) -> PlacementError:
    error = cls.__new__(cls)
    error.__dict__.update(parts)
    error.args = (str(error),)
    return error


class IllegalTransition(PlacementError, MachineError):
    """A trigger was fired that the table does not allow in this state.

    It is a ``transitions.MachineError`` too, so code that catches that one catches this.
    """


class AlreadyManaged(PlacementError):
    """Another manager that is alive manages the module, a part of it, or memory that it shares."""


class Detached(PlacementError):
    """The manager was detached from its module."""


class RanksDisagree(PlacementError):
    """The ranks were about to do different things together, or the same in different states. It
    is raised on all of them, before any did.

    Attributes:
        said: for each fact that differs, which ranks said what.
    """

    def __init__(self, *, said: Mapping[str, Mapping[str, Sequence[int]]], **parts: Any) -> None:
        super().__init__(**parts)
        self.said = said


class RankLost(PlacementError):
    """A rank did not come to a collective operation, or did not finish it: it is late, it died, or
    it failed. This is raised on the others, within the deadline. If the operation had begun, what
    it made on this rank is to be discarded; the placement is restored.

    Attributes:
        ranks: which, as far as is known.
    """

    def __init__(self, *, ranks: Sequence[int], **parts: Any) -> None:
        super().__init__(**parts)
        self.ranks = tuple(ranks)


class GroupPoisoned(PlacementError):
    """A collective operation after one that failed. Ranks may be missing, or be in the middle of
    another collective; only local moves are possible."""


class DeclarationBroken(PlacementError):
    """What was declared to stay unchanged on the device was changed there."""


class TornPlacement(IllegalTransition):
    """A move failed, now or earlier, and swapping its tensors back failed, too: the component is
    torn."""


class PlacementHeld(PlacementError):
    """A move, or a phase of another thread, while an open context needs the tensors where they
    are. The error names the context and where it was entered."""


class PutAway(PlacementError):
    """The module or its optimizer was about to be computed with, and rests where it can't be."""


class PlacementDrift(PlacementError):
    """The record and the tensors disagree: something moved them without the manager."""


class OwnershipChanged(PlacementError):
    """The module was wrapped, or its policy changed, after the manager adopted it."""


class OwnershipUnclear(PlacementError):
    """Who owns the module's placement can't be told: a policy on some groups only, a policy of an
    unknown class, FSDP1's own ``CPUOffload``, or DDP around a module that was elsewhere."""


class ScatteredModule(PlacementError):
    """The module lies on several devices, and no ``stays=`` declares that it should."""


class NothingToPlace(PlacementError):
    """The module has no parameters."""


class NotMaterialised(PlacementError):
    """A module that was made without memory got some, but not all of it got values, or not where
    they belong."""


class ForeignOptimizer(PlacementError):
    """The optimizer updates tensors that are not the module's (sharded) parameters."""


class ContradictoryOptions(PlacementError):
    """Two settings exclude each other, for example FSDP2's policy and offloading by hand."""


class NoAccelerator(PlacementError):
    """There is no compute device to place anything on."""


class CannotMove(PlacementError):
    """A tensor can't be moved exactly, so that it would come back as it was."""


class NotEnoughMemory(PlacementError):
    """A move would not fit on its target device, known before its first copy."""


class UnsupportedAdapter(PlacementError):
    """An adapter can't be merged, or taken out, so that what comes out is what the module computes
    with."""


class ForeignSnapshot(PlacementError):
    """A snapshot does not fit the module: it is of another one, or the module changed since."""


class ExportFailed(PlacementError):
    """The rank that writes the files could not. It is raised on all ranks, and what was at the
    place before is there still."""


class MissingPackage(PlacementError):
    """An optional package is needed for this, and is not installed."""


class CheckpointError(PlacementError):
    """The base of what is refused about a checkpoint on disk."""


class CannotSave(CheckpointError):
    """A value can't be written so that it comes back exactly. Nothing was written."""


class CheckpointFailed(CheckpointError):
    """A checkpoint was not written or not read: the disk is full, a file can't be opened, memory
    ran out. It is raised on all ranks, and says on which it happened. After a save the checkpoint
    before is whole; after a load nothing was changed, unless the message says otherwise."""


class NoCheckpoint(CheckpointError):
    """There is no checkpoint, or none of the step that was asked for."""


class DamagedCheckpoint(CheckpointError):
    """A file of a checkpoint is missing, cut off, changed, or not what it should be. The message
    names it; nothing was changed."""


class ForeignCheckpoint(CheckpointError):
    """A directory holds something else than a checkpoint of this library."""


class NewerCheckpoint(CheckpointError):
    """A checkpoint was written in a format that this version does not know yet."""


class CheckpointMismatch(CheckpointError):
    """A checkpoint does not fit the module, the optimizer or the scheduler that it is to be loaded
    into. The lines say which names, shapes or dtypes differ; nothing was changed."""
