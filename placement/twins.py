"""What each tensor points at on the other side of the link, kept from one move to the next.

A tensor that moves leaves its old self behind: an alias of the memory that it pointed at. On its
way back the tensor is pointed at that alias again. So a round trip ends with exactly the layout
that it began with, and from its second time on lays out no tensor anew and pins no memory. On the
device an alias is a shell: its memory is freed while the tensor is away. On the host it is a piece
of a slab (``placement/slabs.py``).

An alias is used again only for a tensor of the same layout, and only if nobody else looks into its
memory: a state dict that was taken while the module was offloaded keeps what it had.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from placement.digests import digests_of
from placement.slabs import Slabs
from placement.torch_private import (
    address_of,
    is_dtensor,
    negated_view,
    rewrap,
    storage_address,
    storage_holders,
)


@dataclass(frozen=True)
class _Signature:
    """What a storage on the device was when it had just been copied from the host.

    Attributes:
        address: of the storage.
        digest: of its bytes; None if the declaration that nobody changes them is trusted.
    """

    address: int
    digest: int | None


class Twins:
    """The twins of one component's tensors.

    Args:
        slabs: the host memory for them.
        trust: whether it is taken for granted that what is declared unchanged is unchanged.
    """

    def __init__(self, slabs: Slabs, *, trust: bool) -> None:
        self._slabs = slabs
        self._trust = trust
        self._signatures: dict[int, _Signature] = {}
        # By the identity of the tensor. A tensor that took a dead one's may use its twin if it has
        # its layout: a twin is memory, not content.
        self._kept: dict[int, torch.Tensor] = {}
        self._wrappers: dict[object, torch.Tensor] = {}

    def borrow(
        self, tensors: Sequence[torch.Tensor], target: torch.device, pinned: bool
    ) -> list[torch.Tensor]:
        """The twins that tensors of one storage had before, with memory; none if they can't be
        used again.

        Raises:
            OutOfMemoryError: the device has no room for them.
        """
        twins = []
        for tensor in tensors:
            twin = self._kept.get(id(tensor))
            if twin is None or twin.device != target or layout_of(twin) != layout_of(tensor):
                return []
            twins.append(twin)
        storage = twins[0].untyped_storage()
        if storage_holders(storage) != len(twins) or (
            len(twins) > 1 and any(storage_address(twin) != address_of(storage) for twin in twins)
        ):
            return []
        if target.type == "cpu":
            kept = (twins[0] in self._slabs) is pinned or self._signature(tensors) is not None
            return twins if kept else []
        storage.resize_(tensors[0].untyped_storage().nbytes())
        return twins

    def make(
        self, groups: Sequence[Sequence[torch.Tensor]], target: torch.device, pinned: bool
    ) -> list[list[torch.Tensor]]:
        """New twins, each group in a storage of its own.

        Args:
            groups: tensors that share a storage.
            target: where the twins are.
            pinned: whether host memory is pinned.
        """
        sizes = [group[0].untyped_storage().nbytes() for group in groups]
        if target.type == "cpu" and pinned:
            pieces = self._slabs.carve(sizes)
        else:
            pieces = [torch.empty(size, dtype=torch.uint8, device=target) for size in sizes]
        return [
            [_mirrored(tensor, piece.untyped_storage(), target) for tensor in group]
            for group, piece in zip(groups, pieces, strict=True)
        ]

    def leave(self, tensors: Sequence[torch.Tensor], aliases: list[torch.Tensor]) -> int | None:
        """Keep for the way back what tensors of one storage pointed at before they moved. On the
        device its memory is freed; on the host it is kept, if it is in a slab or signed.

        Args:
            tensors: those that moved.
            aliases: of what each pointed at. The caller's list is emptied.

        Returns:
            The address of the storage if it is on a device and somebody else looks into it. Then it
            is neither freed nor kept.
        """
        self._kept.update(zip(map(id, tensors), aliases, strict=True))
        storage = aliases[0].untyped_storage()
        if aliases[0].device.type == "cpu":
            if aliases[0] not in self._slabs and id(tensors[0]) not in self._signatures:
                self._forget(tensors)
            return None
        if storage_holders(storage) == len(aliases) and storage.resizable():
            storage.resize_(0)
            return None
        self._forget(tensors)
        address = address_of(storage)
        aliases.clear()
        return address if storage_holders(storage) else None

    def give_back(self, twins: Sequence[torch.Tensor]) -> None:
        """Take back twins that were borrowed and not used."""
        if twins[0].device.type != "cpu":
            twins[0].untyped_storage().resize_(0)

    def kept(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """What ``tensor`` points at on the other side, if that is kept."""
        return self._kept.get(id(tensor))

    def in_slab(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor``'s bytes are a piece of a slab."""
        return tensor in self._slabs

    def take(self, identities: Sequence[int], others: Sequence[torch.Tensor]) -> None:
        """Keep what tensors, by identity, point at on the other side."""
        self._kept.update(zip(identities, others, strict=True))

    def keep_only(self, tensors: Collection[int]) -> None:
        """Forget the twins of all other tensors than these, by identity: they are gone, and their
        memory is wanted for others."""
        for identity in self._kept.keys() - tensors:
            del self._kept[identity]

    def sign(
        self, groups: Sequence[Sequence[torch.Tensor]], copies: Sequence[torch.Tensor]
    ) -> None:
        """Remember that copies on the device are equal to what the tensors point at on the host, so
        that they can go back without a copy if nobody changes them.

        Args:
            groups: tensors that share a storage, each group in a storage of its own.
            copies: for each group, a tensor that looks into its copy.

        Raises:
            OutOfMemoryError: the device has no room for making digests.
        """
        storages = [copy.untyped_storage() for copy in copies]
        digests = [None] * len(storages) if self._trust else digests_of(storages)
        for group, storage, digest in zip(groups, storages, digests, strict=True):
            for tensor in group:
                self._signatures[id(tensor)] = _Signature(address_of(storage), digest)

    def compare(self, groups: Sequence[Sequence[torch.Tensor]]) -> list[bool | None]:
        """Whether each group of tensors is as it was when it was signed; None if it was not.

        Raises:
            OutOfMemoryError: the device has no room for making digests.
        """
        signed = [self._signature(group) for group in groups]
        storages = [
            group[0].untyped_storage()
            for group, signature in zip(groups, signed, strict=True)
            if signature is not None and signature.digest is not None
        ]
        digests = iter(digests_of(storages) if storages else [])
        return [
            None
            if signature is None
            else signature.digest is None or signature.digest == next(digests)
            for signature in signed
        ]

    def revoke(self) -> None:
        """Forget all signatures: the tensors are about to be changed."""
        self._signatures.clear()

    def _signature(self, tensors: Sequence[torch.Tensor]) -> _Signature | None:
        """The signature of tensors of one storage, if it is of all of them, and of this storage."""
        found = {self._signatures.get(id(tensor)) for tensor in tensors}
        signature = found.pop()
        if found or signature is None or signature.address != storage_address(tensors[0]):
            return None
        return signature

    def _forget(self, tensors: Sequence[torch.Tensor]) -> None:
        for tensor in tensors:
            del self._kept[id(tensor)]

    def wrapper(
        self, wrapper: torch.Tensor, twins: Mapping[str, torch.Tensor], target: torch.device
    ) -> torch.Tensor:
        """A wrapper like ``wrapper`` that says it is on ``target``.

        Args:
            wrapper: a DTensor, a quantized weight.
            twins: of its inner tensors, by attribute.
            target: the device of the twins.
        """
        if not is_dtensor(wrapper):
            return rewrap(wrapper, twins)
        # A swap takes nothing but what the wrapper says of itself, so one that wraps nothing
        # does, for all of the same layout; making a DTensor takes longer than the rest of a move.
        key = (wrapper.size(), wrapper.stride(), wrapper.dtype, target)
        if key not in self._wrappers:
            nothing = torch.empty(0, dtype=wrapper.dtype, device=target)
            self._wrappers[key] = rewrap(wrapper, dict.fromkeys(twins, nothing))
        return self._wrappers[key]


def layout_of(tensor: torch.Tensor) -> tuple[object, ...]:
    """How ``tensor`` looks into its storage."""
    return (
        tensor.size(),
        tensor.stride(),
        tensor.storage_offset(),
        tensor.dtype,
        tensor.is_conj(),
        tensor.is_neg(),
    )


def _mirrored(
    tensor: torch.Tensor, storage: torch.UntypedStorage, device: torch.device
) -> torch.Tensor:
    """A tensor that looks into ``storage`` as ``tensor`` looks into its own."""
    twin = torch.empty(0, dtype=tensor.dtype, device=device)
    twin.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())
    # Both are notes on how the bytes are to be read, which a lazy view of torch's carries.
    twin = twin.conj() if tensor.is_conj() else twin
    return negated_view(twin) if tensor.is_neg() else twin
