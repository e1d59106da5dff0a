"""Which manager moves which bytes: no storage is moved by two.

Two managers over one *module* are noticed by what watches it (``foreign.py``). But two modules may
share a parameter, as an actor and a critic do with a common trunk, or hold views of one storage.
Each manager would move the bytes, and each would find drift, or a view would be parted from its
neighbours without a word.

Every manager that lives has a claim here. Claims remember no address, since a move changes it and
an address is used again: who looks into which storage is read from the tensors, at adoption and
before each move.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterator

from placement.census import Census, Site, take_census
from placement.errors import AlreadyManaged
from placement.optimizer import holdings_of
from placement.record import Record
from placement.tensors import has_storage, parts
from placement.torch_private import storage_address

_claims: weakref.WeakSet[Claim] = weakref.WeakSet()


class Claim:
    """One manager's claim to the bytes that its record's tensors look into. It ends with
    :meth:`release`, or with the manager."""

    def __init__(self, record: Record) -> None:
        self._record = record

    def stake(self) -> None:
        """From now on, other claims are refused what this one has."""
        _claims.add(self)

    def release(self) -> None:
        """Let others have it."""
        _claims.discard(self)

    def refuse_shared(self, asked: str, census: Census) -> None:
        """
        Args:
            asked: the call this is for, as the error names it.
            census: where the tensors of this claim are now.

        Raises:
            AlreadyManaged: another manager's tensors look into the same bytes, so that a move would
                part them, or be met as drift by the other.
        """
        mine: dict[int, list[Site]] | None = None
        for other in list(_claims):
            if other is self:
                continue
            mine = _by_storage(census) if mine is None else mine
            # Only the module's tensors: another thread may be stepping the optimizer.
            theirs = _by_storage(take_census(holdings_of(other._record.owner)))
            if shared := list(self._parted_by_a_move(mine, other, theirs)):
                raise AlreadyManaged(
                    asked=asked,
                    state=f"{len(shared)} tensors look into memory that the manager of a "
                    f"{type(other._record.module).__name__} moves, too",
                    why="a storage has one place: a move by one manager is drift to the other, and "
                    "parts two views of it",
                    tensors=shared,
                    instead="let one manager have both modules, in an nn.ModuleDict, or declare a "
                    "shared parameter with stays= in one of them",
                )

    def _parted_by_a_move(
        self, mine: dict[int, list[Site]], other: Claim, theirs: dict[int, list[Site]]
    ) -> Iterator[str]:
        for storage in mine.keys() & theirs.keys():
            moved_here, moved_there = self._moves(mine[storage]), other._moves(theirs[storage])
            if moved_here and moved_there:
                yield f"{mine[storage][0]}, which is the other's {theirs[storage][0]}"
                continue
            # One of the two leaves it alone. A parameter that both hold is one object and follows.
            follows = {id(site.holding.tensor) for site in moved_here or moved_there}
            for site in theirs[storage] if moved_here else mine[storage] if moved_there else ():
                if id(site.holding.tensor) not in follows:
                    yield f"{mine[storage][0]}, of which the other's {theirs[storage][0]} is a view"
                    break

    def _moves(self, sites: list[Site]) -> list[Site]:
        return [site for site in sites if not self._record.residence.stays(site.holding)]


def _by_storage(census: Census) -> dict[int, list[Site]]:
    """The sites that look into each storage, by its address."""
    found: defaultdict[int, list[Site]] = defaultdict(list)
    for site in census.sites:
        for part in parts(site.holding.tensor):
            if has_storage(part):
                found[storage_address(part)].append(site)
    return found
