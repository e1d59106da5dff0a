"""How bytes move: all of them, or none.

A transfer has four steps. *Stage* begins to copy every storage to its target, where each tensor has
a *twin*. *Swap* points each tensor at its twin, while the copies are made; it allocates nothing and
copies nothing. *Land* waits until the copies are there. Until then what the tensors pointed at
before is as it was, so whatever fails, they are pointed at that again, and the module is as it was
found. *Release* frees it.

Host copies are pinned, so that copying uses the whole link; what was found on the host in ordinary
memory goes back to ordinary memory. What a tensor pointed at before is kept for its way back
(``placement/twins.py``), so a move that has been made before makes no tensor.

Tensors keep their identity: optimizer keys, hooks and references of callers stay valid. Storages
that were shared are shared afterwards, and are copied once.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from placement.census import Site
from placement.device import free_bytes
from placement.errors import CannotMove, NotEnoughMemory
from placement.states import Component
from placement.tensors import has_its_bytes, has_storage, parts
from placement.torch_private import (
    begin_to_copy,
    inner_tensors,
    is_dtensor,
    rewrap,
    storage_address,
    storage_holders,
    view_base,
)
from placement.twins import Twins

BUCKET = 128 * 2**20
"""Bytes that are copied by one call; an interrupt is met between two."""


@dataclass
class Moved:
    """What a transfer cost.

    Attributes:
        to_device: bytes copied to the compute device.
        to_host: bytes copied to the CPU.
        unchanged: bytes that went there without a copy.
        seconds: how long copying and swapping took.
        device_bytes: bytes allocated on the compute device before and after it, sources released.
        host_bytes: resident bytes of the process before and after it.
        still_held: device memory that was copied away and not freed, since somebody else looks into
            it: address of the storage, name of its first tensor, bytes.
        broken: tensors that were declared unchanged and were changed. They were copied.
    """

    to_device: int = 0
    to_host: int = 0
    unchanged: int = 0
    seconds: float = 0.0
    device_bytes: tuple[int, int] | None = None
    host_bytes: tuple[int, int] | None = None
    still_held: dict[int, tuple[str, int]] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Add the seconds that the block takes."""
        started = time.monotonic()
        yield
        self.seconds += time.monotonic() - started


class Move(NamedTuple):
    """One tensor's move.

    Attributes:
        site: the tensor and where it is.
        target: the device it goes to.
        pinned: whether its bytes rest in pinned memory on the host, where they go to or come from.
        declared: whether somebody declared that its values stay as they are while it is on the
            device.
    """

    site: Site
    target: torch.device
    pinned: bool
    declared: bool = False


@dataclass
class _Storage:
    """A block of bytes to copy, and the tensors that look into it.

    Attributes:
        name: of the first of them.
        nbytes: its bytes, padding and neighbours included.
        tensors: all that look into it, with the bases of views.
        twins: what each is to point at; known once the storage is staged, as is
        before: an alias of what each points at before it is swapped.
        borrowed: whether the twins are those of an earlier move.
        declared: whether it is declared unchanged while it is on the device.
        unchanged: whether it goes to the host and its twin there has its bytes already.
    """

    name: str
    nbytes: int
    target: torch.device
    pinned: bool
    tensors: list[torch.Tensor] = field(default_factory=list)
    twins: list[torch.Tensor] = field(default_factory=list)
    before: list[torch.Tensor] = field(default_factory=list)
    borrowed: bool = False
    declared: bool = True
    unchanged: bool = False

    @property
    def before_device(self) -> torch.device:
        return self.before[0].device


@dataclass
class _Wrapper:
    """A wrapper whose device changes, and one like it that is on the target."""

    tensor: torch.Tensor
    inner: dict[str, torch.Tensor]
    site: Site
    target: torch.device
    like: torch.Tensor = field(init=False)


@dataclass
class Part:
    """What a transfer does for one component.

    Attributes:
        storages: what is copied.
        wrappers: whose device changes with it.
        swapped: whether tensors were swapped, or may have been.
        released: whether the move is made, for good.
    """

    twins: Twins
    storages: list[_Storage] = field(default_factory=list)
    wrappers: list[_Wrapper] = field(default_factory=list)
    moved: Moved = field(default_factory=Moved)
    copies: list[torch.Event] = field(default_factory=list)
    """One for each bucket of copies, recorded behind it."""
    swapped: bool = False
    released: bool = False

    def swaps(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Each tensor with the one that it is to be pointed at, inner ones before their wrapper."""
        for storage in self.storages:
            yield from zip(storage.tensors, storage.twins, strict=True)
        for wrapper in self.wrappers:
            yield wrapper.tensor, wrapper.like

    def swaps_back(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Each tensor with what it pointed at before, in the same order."""
        for storage in self.storages:
            yield from zip(storage.tensors, storage.before, strict=True)
        for wrapper in self.wrappers:
            yield wrapper.tensor, rewrap(wrapper.tensor, wrapper.inner)

    def wait(self) -> bool:
        """Wait for the copies; whether there were any."""
        for copy in self.copies:
            copy.synchronize()
        return bool(self.copies)


class Transfer:
    """A move of tensors, planned from a census.

    Args:
        moves: what is to move.
        staying: the sites that do not move. None may look into a storage that moves.
        twins: of each component, from earlier moves.
        lane: the stream to copy on.
        asked: the call this is for, as errors name it.

    Attributes:
        watched: whether other tensors than those that move look into the memory that moves.

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
        twins: Mapping[Component, Twins],
        lane: Lane,
        asked: str,
    ) -> None:
        self._lane = lane
        self._moves = moves
        self._asked = asked
        self._twins = twins
        self._known: set[int] = set()
        self._storages: dict[int, _Storage] = {}
        self._parts: dict[Component, Part] = {}
        self._refuse_what_cannot_move()
        for move in moves:
            component = move.site.kind.component
            if component not in self._parts:
                self._parts[component] = Part(twins[component])
            self._plan(move.site.holding.tensor, move, self._parts[component])
        self.watched = self._watched()
        if self.watched:
            self._refuse_to_split(staying)
        self._refuse_what_does_not_fit()

    def _watched(self) -> bool:
        return any(
            storage_holders(storage.tensors[0].untyped_storage()) > len(storage.tensors)
            for storage in self._storages.values()
        )

    def abandon(self) -> None:
        """Point the tensors at what they pointed at before, and let go of what was staged.

        An exception from here means that some may not have been pointed back: they are torn.
        """
        begun = [part for part in self._parts.values() if not part.released]
        for part in begun:
            if part.swapped:
                point(part.swaps_back())
        for part in begun:
            part.wait()
            for storage in part.storages:
                if storage.borrowed:
                    part.twins.give_back(storage.twins)

    def stage(self, component: Component, between: Callable[[], None] = lambda: None) -> bool:
        """Begin to copy everything of ``component``. Raises what torch raises; nothing has changed
        then.

        A storage that two components share is copied, and the tensors of both are swapped, with the
        one that is moved first.

        Args:
            component: what to copy.
            between: called before each bucket; may raise.

        Returns:
            Whether a copy was begun: what has not changed needs none.
        """
        part = self._parts.setdefault(component, Part(self._twins[component]))
        with torch.no_grad(), part.moved.timed():
            self._compare(part)
            part.twins.keep_only({id(t) for storage in part.storages for t in storage.tensors})
            for bucket in buckets([storage.nbytes for storage in part.storages]):
                between()
                self._copy(part.storages[bucket], part)
            self._sign(part)
            self._wrap(part)
        return bool(part.copies)

    def _plan(self, tensor: torch.Tensor, move: Move, part: Part) -> None:
        """Note what there is to copy and to swap for ``tensor``."""
        if id(tensor) in self._known:
            return  # held under two names
        self._known.add(id(tensor))
        if inner := inner_tensors(tensor):
            for value in inner.values():
                self._plan(value, move, part)
            part.wrappers.append(_Wrapper(tensor, inner, move.site, move.target))
            return
        if tensor.device == move.target:
            return  # the part of a wrapper that is where it belongs already
        if (base := view_base(tensor)) is not None:
            # Autograd keeps the base alive; if it stayed behind, so would the bytes.
            self._plan(base, move, part)
        address = storage_address(tensor)
        if (storage := self._storages.get(address)) is None:
            nbytes = tensor.untyped_storage().nbytes()
            storage = _Storage(move.site.name, nbytes, move.target, move.pinned)
            self._storages[address] = storage
            part.storages.append(storage)
        storage.tensors.append(tensor)
        storage.declared &= move.declared

    def _copy(self, bucket: Sequence[_Storage], part: Part) -> None:
        """Make the twins of a bucket, and begin to copy its bytes into them."""
        unmet = []
        for storage in bucket:
            storage.twins = part.twins.borrow(storage.tensors, storage.target, storage.pinned)
            storage.borrowed = bool(storage.twins)
            if not storage.borrowed:
                unmet.append(storage)
        for target, pinned in {(storage.target, storage.pinned) for storage in unmet}:
            alike = [s for s in unmet if (s.target, s.pinned) == (target, pinned)]
            made = part.twins.make([s.tensors for s in alike], target, pinned)
            for storage, twins in zip(alike, made, strict=True):
                storage.twins = twins
        targets, sources = [], []
        for storage in bucket:
            storage.before = [tensor.data for tensor in storage.tensors]
            if storage.unchanged and storage.borrowed:
                part.moved.unchanged += storage.nbytes
                continue
            whole_of_twin, whole = _whole(storage)
            targets.append(whole_of_twin)
            sources.append(whole)
            if storage.target.type == "cpu":
                part.moved.to_host += storage.nbytes
            else:
                part.moved.to_device += storage.nbytes
        if targets:
            part.copies.append(self._lane.copy(targets, sources))

    def _compare(self, part: Part) -> None:
        """Find out what has not changed on the device, and needs no copy."""
        declared = [s for s in part.storages if s.declared and s.target.type == "cpu"]
        try:
            compared = part.twins.compare([storage.tensors for storage in declared])
        except torch.OutOfMemoryError:
            return  # there is no room for finding out: copy
        for storage, same in zip(declared, compared, strict=True):
            storage.unchanged = bool(same)
            if same is False:
                part.moved.broken.append(storage.name)

    def _sign(self, part: Part) -> None:
        """Make what is declared unchanged known again on its way back."""
        arriving = [storage for storage in part.storages if storage.target.type != "cpu"]
        declared = [storage for storage in arriving if storage.declared]
        if arriving:
            part.twins.revoke()
        if declared:
            self._lane.follow(part.copies)
            with contextlib.suppress(torch.OutOfMemoryError):  # then it will be copied back
                part.twins.sign([s.tensors for s in declared], [s.twins[0] for s in declared])

    def _wrap(self, part: Part) -> None:
        """Make what the wrappers will be pointed at."""
        twins: dict[int, torch.Tensor] = {}
        if not all(is_dtensor(wrapper.tensor) for wrapper in part.wrappers):
            twins = {
                id(t): w for s in part.storages for t, w in zip(s.tensors, s.twins, strict=True)
            }
        for wrapper in part.wrappers:
            inner = {name: twins.get(id(value), value) for name, value in wrapper.inner.items()}
            wrapper.like = part.twins.wrapper(wrapper.tensor, inner, wrapper.target)
            twins[id(wrapper.tensor)] = wrapper.like
            if not is_dtensor(wrapper.tensor):
                self._rehearse(wrapper)

    def land(self, component: Component) -> bool:
        """Wait for the copies of ``component``.

        Returns:
            Whether there were any.
        """
        part = self._parts[component]
        with part.moved.timed():
            return part.wait()

    def _rehearse(self, wrapper: _Wrapper) -> None:
        """Try on a stand-in what a swap will do with a wrapper of somebody's."""
        try:
            rewrap(wrapper.tensor, wrapper.inner).data = wrapper.like
        except RuntimeError as error:
            raise CannotMove(
                asked=self._asked,
                state=f"{type(wrapper.tensor).__name__} does not let itself be pointed at other "
                "tensors",
                why=f"its parts can't be swapped one by one; torch says: "
                f"{str(error).splitlines()[0]}",
                tensors=[str(wrapper.site)],
                instead="declare it with stays=, or keep its parts as parameters and buffers",
            ) from error

    def swap(self, component: Component) -> None:
        """Point the tensors of ``component`` at their twins. They may be read when these have
        landed."""
        part = self._parts[component]
        part.swapped = True
        with part.moved.timed():
            point(part.swaps())

    def release(self, component: Component) -> Moved:
        """Free what the tensors of ``component`` pointed at, and say what moving it cost.

        What somebody else looks into is not freed under them, but named.
        """
        part = self._parts[component]
        part.released = True
        for storage in part.storages:
            if (held := part.twins.leave(storage.tensors, storage.before)) is not None:
                part.moved.still_held[held] = (storage.name, storage.nbytes)
        return part.moved

    def part(self, component: Component) -> Part:
        """What was done for ``component``."""
        return self._parts[component]

    def _refuse_what_cannot_move(self) -> None:
        stuck = [
            str(site)
            for site, *_ in self._moves
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
        split = [
            str(site)
            for site in staying
            for part in parts(site.holding.tensor)
            if has_storage(part) and storage_address(part) in self._storages
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
        needs: Counter[torch.device] = Counter()
        for storage in self._storages.values():
            needs[storage.target] += storage.nbytes
        for target, need in needs.items():
            free = free_bytes(target)
            if free is not None and need > free:
                raise NotEnoughMemory(
                    asked=self._asked,
                    state=f"{need:,} bytes are to go to {target}, which has {free:,} bytes free",
                    why="the move would run out of memory half way",
                    instead="release memory on the device first; nothing was moved",
                )


def point(swaps: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Point the first tensor of each pair at what the second one looks into.

    This keeps the Python object and the C++ tensor, so weak references, autograd's accumulators and
    optimizer keys hold (``torch.utils.swap_tensors`` would refuse some). Of a wrapper it changes
    the device that the wrapper reports; what it wraps stays the same objects.
    """
    with torch.no_grad():
        for tensor, other in swaps:
            tensor.data = other


class Lane:
    """The stream of a device that copies run on, beside the one that computes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.Stream | None = None

    def copy(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> torch.Event:
        """Begin to copy each of ``sources`` into the target beside it, behind all that the
        computing stream has been given. That one goes on beside the copies.

        Returns:
            An event behind the copies, for the host to wait for.
        """
        if self._stream is None:
            self._stream = torch.Stream(device=self._device)
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        with self._stream:
            begin_to_copy(targets, sources)
        return self._stream.record_event()

    def follow(self, copies: Sequence[torch.Event]) -> None:
        """Let the computing stream wait for copies."""
        for copy in copies:
            torch.accelerator.current_stream(self._device).wait_event(copy)


def buckets(sizes: Sequence[int], first: int = BUCKET) -> Iterator[slice]:
    """Runs of ``sizes``, in bytes, that sum up to about a bucket each, and the first to ``first``
    bytes."""
    begins = nbytes = 0
    enough = first
    for index, size in enumerate(sizes):
        nbytes += size
        if nbytes >= enough:
            yield slice(begins, index + 1)
            begins, nbytes, enough = index + 1, 0, BUCKET
    if begins < len(sizes):
        yield slice(begins, len(sizes))


def _whole(storage: _Storage) -> tuple[torch.Tensor, torch.Tensor]:
    """Two tensors over all bytes of a storage: of its twin, and of itself."""
    for tensor, twin in zip(storage.tensors, storage.twins, strict=True):
        if covers(tensor, storage.nbytes):
            return twin, tensor
    return _bytes(storage.twins[0]), _bytes(storage.tensors[0])


def covers(tensor: torch.Tensor, nbytes: int) -> bool:
    """Whether ``tensor``'s values are all the bytes of a storage of ``nbytes``, in their order, and
    none is still to be conjugated or negated."""
    lazy = tensor.is_conj() or tensor.is_neg()
    return tensor.nbytes == nbytes and tensor.is_contiguous() and not lazy


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes of the storage that ``tensor`` looks into."""
    storage = tensor.untyped_storage()
    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return whole.set_(storage, 0, (storage.nbytes(),), (1,))
