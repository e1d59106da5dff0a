"""Assertions about placement, with messages that name the tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from placement.census import Census, take_census
from placement.device import find_compute_device
from placement.optimizer import holdings_of
from placement.owners import owner_of
from placement.residence import Residence
from placement.states import TABLE, Component, Legal, Placement, Trigger
from placement.tensors import parts
from placement.torch_private import storage_address
from placement.trace import Event, EventKind, Outcome, Trace, process_trace


def assert_placement(
    module: nn.Module,
    placement: Placement,
    optimizer: torch.optim.Optimizer | None = None,
) -> None:
    """Assert where ``module`` is, and its optimizer's state if one is given. No manager is needed:
    it is read from the tensors.

    Raises:
        AssertionError: another placement, or none; the message lists the tensors that are amiss.
    """
    owner = owner_of(module)
    residence = Residence(owner, owner.compute_device or find_compute_device())
    census = _census(module, optimizer)
    if (owner.managed is not None) != (placement is Placement.CPU_FSDP2_MANAGED):
        is_managed = "manages" if owner.managed is not None else "does not manage"
        raise AssertionError(
            f"expected {placement.value}, but {owner.name} {is_managed} this module's placement"
        )
    for component in Component:
        strays = residence.strays(census.of(component), placement)
        if strays:
            raise AssertionError(
                f"expected the {component.value} in {placement.value}, but {len(strays)} tensors "
                "are not:\n" + _listed(str(site) for site in strays)
            )


@contextmanager
def assert_round_trip(
    module: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> Iterator[None]:
    """Assert that what happens in the block leaves everything as it was: the same Parameter objects
    and optimizer entries, shared where they were shared, with the same values, dtypes, layouts and
    devices. Gradients count, too.

    Raises:
        AssertionError: something changed; the message lists what.
    """
    before = _facts(_census(module, optimizer))
    yield
    after = _facts(_census(module, optimizer))
    changed: dict[str, list[str]] = {
        "is gone": [name for name in before if name not in after],
        "is new": [name for name in after if name not in before],
    }
    for name, was in before.items():
        for change in was.changes(after[name]) if name in after else ():
            changed.setdefault(change, []).append(name)
    if any(changed.values()):
        raise AssertionError("the round trip changed\n" + _listed(_by_change(changed)))


def assert_trace(events: Trace | Sequence[Event], expected: Sequence[str]) -> None:
    """Assert what happened, in order.

    Args:
        events: a trace, or some of its events.
        expected: one line an event: ``params onload cpu_manual->gpu`` for a transition in which
            tensors moved, ``params save gpu->gpu`` for one that moves none, ``train`` for an
            operation, ``refused onload`` for a refusal, ``foreign to()`` for a
            move past the manager, ``move load`` for one that put tensors right. Contexts that were
            entered are not listed: their operation is.

    Raises:
        AssertionError: something else happened; the message shows both.
    """
    happened = [line for event in events if (line := _line(event)) is not None]
    if happened != list(expected):
        raise AssertionError(
            "expected\n" + _listed(expected) + "\nbut what happened is\n" + _listed(happened)
        )


@contextmanager
def assert_no_moves(trace: Trace | None = None) -> Iterator[None]:
    """Assert that nothing in the block moves tensors, through a manager or past it.

    Args:
        trace: where managers record; by default the trace of the process.

    Raises:
        AssertionError: something moved; the message says what and where it was called.
    """
    watched = trace if trace is not None else process_trace()
    known = len(list(watched))
    yield
    moves = [
        f"{event.in_words(event.monotonic)}"
        for event in list(watched)[known:]
        if event.moved or event.kind is EventKind.FOREIGN
    ]
    if moves:
        raise AssertionError("expected no moves, but\n" + _listed(moves))


def assert_legal(events: Trace | Sequence[Event]) -> None:
    """Assert that each transition in a trace is one that the table allows, from where the last one
    led, and that every context that was entered has ended.

    ``placement check`` holds a written trace against more rules than these.

    Raises:
        AssertionError: the first event that is not legal, or the contexts left open.
    """
    states: dict[tuple[str, str], str] = {}
    open_contexts: dict[int | None, Event] = {}
    for event in events:
        if event.kind is EventKind.ENTER:
            open_contexts[event.lease] = event
        elif event.kind is EventKind.OPERATION:
            open_contexts.pop(event.lease, None)
        if event.component is None or event.outcome is not Outcome.OK:
            continue
        key = (event.module, event.component)
        if event.kind is EventKind.TRIGGER:
            row = TABLE[Placement(event.source), Trigger(event.name)]
            if not isinstance(row, Legal) or row.dest.value != event.dest:
                raise AssertionError(f"illegal: {event.in_words(event.monotonic)}")
            if states.get(key, event.source) != event.source:
                raise AssertionError(
                    f"{event.in_words(event.monotonic)}, but it had been left in {states[key]}"
                )
        states[key] = event.dest
    if open_contexts:
        left = [f"{event.name} at {event.call_site}" for event in open_contexts.values()]
        raise AssertionError("contexts that did not end:\n" + _listed(left))


def assert_ranks_agree(module: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Assert that every rank has the same kinds of tensors in the same places. A collective: called
    on all ranks.

    Raises:
        AssertionError: on every rank; the message says which rank differs from rank 0, and where.
    """
    mine = [
        f"{site.kind.value} {site.name} on {site.device.type}"
        + (", bytes on " + site.rests_on[0].type if site.at_odds else "")
        for site in _census(module, optimizer).sites
    ]
    everyone: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, mine)
    differences = [
        f"rank {rank}: {line}"
        for rank, theirs in enumerate(everyone)
        for line in sorted(set(theirs) ^ set(everyone[0]))
    ]
    if differences:
        raise AssertionError("ranks differ from rank 0 in\n" + _listed(differences))


@dataclass(frozen=True)
class _Facts:
    identity: int
    device: str
    dtype: torch.dtype
    shape: torch.Size
    layout: tuple[object, ...]
    shares_with: int
    values: list[torch.Tensor]

    def changes(self, other: _Facts) -> Iterator[str]:
        if self.identity != other.identity:
            yield "is another tensor object"
        for what in ("device", "dtype", "shape", "layout"):
            was, now = getattr(self, what), getattr(other, what)
            if was != now:
                yield f"{what} was {was}, is {now}"
        if self.shares_with != other.shares_with:
            yield "shares its bytes with others than before"
        if len(self.values) != len(other.values) or any(
            not _same_bits(was, now) for was, now in zip(self.values, other.values)
        ):
            yield "values changed"


def _facts(census: Census) -> dict[str, _Facts]:
    first_with: dict[int, int] = {}
    facts = {}
    for index, site in enumerate(census.sites):
        tensor = site.holding.tensor
        held = list(parts(tensor))
        strided = [part for part in held if part.layout is torch.strided]
        shared = [first_with.setdefault(storage_address(part), index) for part in strided]
        # A gradient is made anew by every backward pass, so its object is nobody's to keep.
        identity = id(tensor) if site.kind.value != "grad" else 0
        facts[f"{site.kind.value} {site.name}"] = _Facts(
            identity,
            str(site.device),
            tensor.dtype,
            tensor.shape,
            tuple((part.stride(), part.storage_offset()) for part in strided),
            min(shared, default=index),
            [part.detach().cpu().clone() for part in held],
        )
    return facts


_SHOWN = 8
"""How many tensors with the same change are named."""


def _by_change(changed: Mapping[str, Sequence[str]]) -> Iterator[str]:
    for change, names in changed.items():
        yield from (f"{name}: {change}" for name in names[:_SHOWN])
        if (hidden := len(names) - _SHOWN) > 0:
            yield f"... and {hidden} more: {change}"


def _same_bits(was: torch.Tensor, now: torch.Tensor) -> bool:
    # Bits, so that a NaN equals itself.
    return (was.dtype, was.shape) == (now.dtype, now.shape) and torch.equal(
        was.reshape(-1).view(torch.uint8), now.reshape(-1).view(torch.uint8)
    )


def _census(module: nn.Module, optimizer: torch.optim.Optimizer | None) -> Census:
    return take_census(holdings_of(owner_of(module), optimizer))


def _transition(event: Event) -> str:
    return f"{event.component} {event.name} {event.source}->{event.dest}"


def _without_tensors(event: Event) -> bool:
    """Whether a component that has no tensors went where another one went."""
    return event.outcome is Outcome.OK and event.source != event.dest and not event.moved


_LINES: dict[EventKind, Callable[[Event], str | None]] = {
    EventKind.ENTER: lambda event: None,
    EventKind.ISSUED: lambda event: None,
    EventKind.LANDED: lambda event: None,
    EventKind.OPERATION: lambda event: event.name,
    EventKind.TRIGGER: lambda event: None if _without_tensors(event) else _transition(event),
    EventKind.MOVE: lambda event: f"move {event.name}",
    EventKind.FOREIGN: lambda event: f"foreign {event.name}",
    EventKind.ADOPTION: lambda event: f"adopted {event.component} {event.source}->{event.dest}",
    EventKind.REFUSAL: lambda event: f"refused {event.name}",
}


def _line(event: Event) -> str | None:
    line = _LINES[event.kind](event)
    return f"{line} failed" if line and event.outcome is Outcome.FAILED else line


def _listed(lines: Iterator[str] | Sequence[str]) -> str:
    return "\n".join(f"  {line}" for line in lines) or "  (nothing)"
