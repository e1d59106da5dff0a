"""How bytes move: all of them, or none.

A transfer has four steps. *Stage* begins to copy every storage to its target and builds, for each
tensor, a twin that looks into the copy. *Land* waits until the copies are there. Until then nothing
has changed, so a failing copy or an out-of-memory leaves the module as it was found. *Commit*
points each tensor at its twin; it allocates nothing and copies nothing. *Release* drops the rest.

Host copies are pinned, so that copying uses the whole link; what was found on the host in ordinary
memory goes back to ordinary memory.

Tensors keep their identity: optimizer keys, hooks and references of callers stay valid. Storages
that were shared are shared afterwards, and are copied once.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch.distributed.tensor import DTensor

from placement.census import Site
from placement.device import free_bytes
from placement.errors import CannotMove, NotEnoughMemory
from placement.states import Component
from placement.tensors import has_its_bytes, has_storage, parts, same_device
from placement.torch_private import (
    inner_tensors,
    negated_view,
    rewrap,
    storage_address,
    view_base,
)


@dataclass
class Moved:
    """What a transfer cost.

    Attributes:
        to_device: bytes copied to the compute device.
        to_host: bytes copied to the CPU.
        seconds: how long copying and swapping took.
        device_bytes: bytes allocated on the compute device before and after it, sources released.
        host_bytes: resident bytes of the process before and after it.
    """

    to_device: int = 0
    to_host: int = 0
    seconds: float = 0.0
    device_bytes: tuple[int, int] | None = None
    host_bytes: tuple[int, int] | None = None


class Move(NamedTuple):
    """One tensor's move.

    Attributes:
        site: the tensor and where it is.
        target: the device it goes to.
        pinned: whether its bytes rest in pinned memory on the host, where they go to or come from.
    """

    site: Site
    target: torch.device
    pinned: bool


@dataclass
class _Swap:
    """A tensor, and the twin whose bytes and device it is to take over."""

    tensor: torch.Tensor
    twin: torch.Tensor


@dataclass
class _Part:
    """What a transfer does for one component."""

    swaps: list[_Swap] = field(default_factory=list)
    moved: Moved = field(default_factory=Moved)
    copying_on: set[torch.device] = field(default_factory=set)
    sources: dict[int, tuple[str, int]] = field(default_factory=dict)
    """Address of each storage that was copied, with the name of its first tensor and its bytes."""

    @contextmanager
    def timed(self) -> Iterator[None]:
        started = time.monotonic()
        yield
        self.moved.seconds += time.monotonic() - started


class Transfer:
    """A move of tensors, planned from a census.

    Args:
        moves: what is to move.
        staying: the sites that do not move. None may look into a storage that moves.
        asked: the call this is for, as errors name it.

    Raises:
        CannotMove: a tensor could not come back as it was (it is sparse or meta, or it shares
            its storage with one that stays). A wrapper that does not let itself be pointed at
            other parts is found out when it is staged.
        NotEnoughMemory: the target has less room than the move needs.
    """

    def __init__(
        self,
        moves: Sequence[Move],
        staying: Sequence[Site] = (),
        *,
        asked: str,
    ) -> None:
        self._moves = moves
        self._asked = asked
        self._copies: dict[int, torch.UntypedStorage] = {}
        self._twins: dict[int, torch.Tensor] = {}
        self._parts: dict[Component, _Part] = {}
        self._refuse_what_cannot_move()
        self._refuse_to_split(staying)
        self._refuse_what_does_not_fit()

    def stage(self, component: Component, between: Callable[[], None] = lambda: None) -> bool:
        """Begin to copy everything of ``component``. Raises what torch raises; nothing has changed
        then.

        A storage that two components share is copied for the one that is staged first.

        Args:
            component: what to copy.
            between: called before each tensor; may raise.

        Returns:
            Whether there was anything to copy.
        """
        part = self._parts.setdefault(component, _Part())
        with torch.no_grad(), part.timed():
            for move in self._moves:
                if move.site.kind.component is component:
                    between()
                    self._stage_tensor(move.site.holding.tensor, move, part)
        return bool(part.copying_on)

    def land(self, component: Component) -> None:
        """Wait for the copies of ``component``: what is committed may be read at once."""
        part = self._parts[component]
        with part.timed():
            for device in part.copying_on:
                torch.accelerator.current_stream(device).synchronize()

    def _stage_tensor(self, tensor: torch.Tensor, move: Move, part: _Part) -> torch.Tensor:
        """Make the twin of ``tensor``, and the swap that commits it."""
        if (known := self._twins.get(id(tensor))) is not None:
            return known  # held under two names
        if tensor.device == move.target and not inner_tensors(tensor):
            return tensor  # the part of a wrapper that is where it belongs already
        if inner := inner_tensors(tensor):
            twins = {name: self._stage_tensor(value, move, part) for name, value in inner.items()}
            twin = rewrap(tensor, twins)
            self._rehearse(tensor, inner, twin, move)
        else:
            if (base := view_base(tensor)) is not None:
                # Autograd keeps the base alive; if it stayed behind, so would the bytes.
                self._stage_tensor(base, move, part)
            key = storage_address(tensor)
            if key not in self._copies:
                self._copies[key] = copy = _copied(tensor, move, part)
                part.sources[key] = (move.site.name, copy.nbytes())
            twin = torch.empty(0, dtype=tensor.dtype, device=move.target)
            twin.set_(self._copies[key], tensor.storage_offset(), tensor.size(), tensor.stride())
            # Both are notes on how the bytes are to be read, which a lazy view of torch's carries.
            twin = twin.conj() if tensor.is_conj() else twin
            twin = negated_view(twin) if tensor.is_neg() else twin
        self._twins[id(tensor)] = twin
        part.swaps.append(_Swap(tensor, twin))
        return twin

    def _rehearse(
        self, tensor: torch.Tensor, inner: dict[str, torch.Tensor], twin: torch.Tensor, move: Move
    ) -> None:
        """Try on a stand-in what a commit will do with a wrapper of somebody's."""
        if isinstance(tensor, DTensor):
            return
        try:
            rewrap(tensor, inner).data = twin
        except RuntimeError as error:
            raise CannotMove(
                asked=self._asked,
                state=f"{type(tensor).__name__} does not let itself be pointed at other tensors",
                why=f"a commit would tear the module; torch says: {str(error).splitlines()[0]}",
                tensors=[str(move.site)],
                instead="declare it with stays=, or keep its parts as parameters and buffers",
            ) from error

    def commit(self, component: Component) -> None:
        """Point the tensors of ``component`` at their copies.

        An exception from here means that some tensors were swapped and others were not: the
        component is torn.
        """
        part = self._parts[component]
        with torch.no_grad(), part.timed():
            for swap in part.swaps:
                # Keeps the Python object and the C++ tensor, so weak references, autograd's
                # accumulators and optimizer keys hold (torch.utils.swap_tensors would refuse
                # some). Of a wrapper it changes the device that the wrapper reports; the inner
                # tensor, which stays the same object, was swapped before it.
                swap.tensor.data = swap.twin

    def sources(self, component: Component) -> dict[int, tuple[str, int]]:
        """Address of each storage that was copied for ``component``, with the name of its first
        tensor and its bytes."""
        return self._parts[component].sources

    def release(self, component: Component) -> Moved:
        """Let the sources of ``component`` go, and say what moving it cost."""
        return self._parts.pop(component).moved

    def _refuse_what_cannot_move(self) -> None:
        stuck = [
            str(site)
            for site, _, _ in self._moves
            if not all(has_its_bytes(part) for part in parts(site.holding.tensor))
        ]
        if stuck:
            raise CannotMove(
                asked=self._asked,
                state=f"{len(stuck)} of the tensors have no one storage with their bytes",
                why="a meta, lazy or freed tensor has no bytes, a sparse or nested one has several "
                "blocks of them, a qint8 one and an opaque wrapper have some elsewhere: none would "
                "come back as it was",
                tensors=stuck,
                instead="materialise it first, or declare it with stays=",
            )

    def _refuse_to_split(self, staying: Sequence[Site]) -> None:
        moving = {
            storage_address(p) for site, _, _ in self._moves for p in parts(site.holding.tensor)
        }
        split = [
            str(site)
            for site in staying
            for part in parts(site.holding.tensor)
            if has_storage(part) and storage_address(part) in moving
        ]
        if split:
            raise CannotMove(
                asked=self._asked,
                state=f"{len(split)} tensors that stay share their storage with one that moves",
                why="moving one of two that look into the same bytes would part them",
                tensors=split,
                instead="move all of their components together, or declare all of them with stays=",
            )

    def _refuse_what_does_not_fit(self) -> None:
        for target in {move.target for move in self._moves}:
            need = sum(m.site.nbytes for m in self._moves if same_device(m.target, target))
            free = free_bytes(target)
            if free is not None and need > free:
                raise NotEnoughMemory(
                    asked=self._asked,
                    state=f"{need:,} bytes are to go to {target}, which has {free:,} bytes free",
                    why="the move would run out of memory half way",
                    instead="release memory on the device first; nothing was moved",
                )


def _copied(tensor: torch.Tensor, move: Move, part: _Part) -> torch.UntypedStorage:
    """Begin to copy all the bytes that ``tensor`` looks into, its padding and its neighbours
    included; the copy's storage."""
    source = tensor.untyped_storage()
    nbytes = source.nbytes()
    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(source, 0, (nbytes,), (1,))
    if move.target.type == "cpu":
        copy = _host_bytes(nbytes, pinned=move.pinned)
        part.moved.to_host += nbytes
        part.copying_on.add(tensor.device)
    else:
        copy = torch.empty(nbytes, dtype=torch.uint8, device=move.target)
        part.moved.to_device += nbytes
        part.copying_on.add(move.target)
    copy.copy_(whole, non_blocking=True)
    return copy.untyped_storage()


def _host_bytes(nbytes: int, *, pinned: bool) -> torch.Tensor:
    """Uninitialised host memory; ordinary memory, with a warning, where pinning fails."""
    if pinned:
        try:
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:
            warnings.warn(
                f"{nbytes:,} bytes of host memory could not be pinned, and moves will be slower: "
                f"{error}",
                stacklevel=2,
            )
    return torch.empty(nbytes, dtype=torch.uint8)
