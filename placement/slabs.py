"""Pinned host memory that is made once, kept, and carved into storages.

Pinning is slow, and torch's pinned allocator rounds each block up to a power of two
(``aten/src/ATen/core/CachingHostAllocator.h``). So blocks here, *slabs*, have such sizes to begin
with, and each is carved into many storages, which do not look into each other.

A piece is free again when the last tensor that looks into it is gone. Nobody has to give one back,
and none is handed out twice while somebody can still read it.
"""

from __future__ import annotations

import ctypes
import warnings
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch

_ALIGNMENT = 64
"""Bytes. Every piece begins at a multiple of it, as torch's own CPU tensors do."""

_SMALLEST = 4096
"""Bytes of the smallest slab: a page, below which nothing can be pinned."""


class Slabs:
    """The host memory of one manager."""

    def __init__(self) -> None:
        self._slabs: list[_Slab] = []

    @property
    def nbytes(self) -> int:
        """Bytes held, in use or not."""
        return sum(slab.nbytes for slab in self._slabs)

    def __contains__(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor``'s bytes are a piece of a slab."""
        address = tensor.data_ptr()
        return any(slab.begins <= address < slab.ends for slab in self._slabs)

    def carve(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        """Pieces of the given sizes.

        Args:
            sizes: in bytes.

        Returns:
            One tensor of dtype uint8 a size, each with a storage of its own, uninitialised.
        """
        pieces = [torch.empty(0, dtype=torch.uint8) for _ in sizes]
        # The largest first, so that the small ones fill what these leave.
        waiting = [index for index, size in enumerate(sizes) if size]
        waiting.sort(key=lambda index: -sizes[index])
        for slab in self._slabs:
            waiting = slab.fill(waiting, sizes, pieces)
        while waiting:
            left = sum(_aligned(sizes[index]) for index in waiting)
            slab = _Slab(max(_floor(left), _ceiling(sizes[waiting[0]])))
            self._slabs.append(slab)
            waiting = slab.fill(waiting, sizes, pieces)
        return pieces

    def release(self) -> int:
        """Let go of the slabs of which no piece is in use.

        Returns:
            Their bytes. They go back to torch's pinned allocator, which keeps them for others.
        """
        before = self.nbytes
        self._slabs = [slab for slab in self._slabs if slab.in_use]
        return before - self.nbytes


@dataclass
class _Piece:
    offset: int
    ends: int
    buffer: weakref.ref[object]


class _Slab:
    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._memory = _pinned(nbytes)
        self._pieces: list[_Piece] = []
        self.begins = self._memory.data_ptr()
        self.ends = self.begins + nbytes

    @property
    def in_use(self) -> bool:
        return any(piece.buffer() is not None for piece in self._pieces)

    def fill(
        self, waiting: list[int], sizes: Sequence[int], pieces: list[torch.Tensor]
    ) -> list[int]:
        """Put as many of the ``waiting`` sizes into ``pieces`` as there is room for.

        Returns:
            Those that are still waiting.
        """
        gaps = self._gaps()
        still: list[int] = []
        for index in waiting:
            room = next((gap for gap in gaps if gap.room >= sizes[index]), None)
            if room is None:
                still.append(index)
                continue
            pieces[index] = self._piece(room.offset, sizes[index])
            room.offset += _aligned(sizes[index])
        return still

    def _gaps(self) -> list[_Gap]:
        self._pieces = [piece for piece in self._pieces if piece.buffer() is not None]
        self._pieces.sort(key=lambda piece: piece.offset)
        gaps, begins = [], 0
        for piece in self._pieces:
            if piece.offset > begins:
                gaps.append(_Gap(begins, piece.offset))
            begins = piece.ends
        if begins < self.nbytes:
            gaps.append(_Gap(begins, self.nbytes))
        return gaps

    def _piece(self, offset: int, nbytes: int) -> torch.Tensor:
        buffer = (ctypes.c_char * nbytes).from_address(self.begins + offset)
        buffer.slab = self._memory  # type: ignore[attr-defined]  # alive as long as the piece is
        self._pieces.append(_Piece(offset, offset + _aligned(nbytes), weakref.ref(buffer)))
        return torch.frombuffer(buffer, dtype=torch.uint8)


@dataclass
class _Gap:
    offset: int
    ends: int

    @property
    def room(self) -> int:
        return self.ends - self.offset


def _pinned(nbytes: int) -> torch.Tensor:
    """Uninitialised host memory; ordinary memory, with a warning, where pinning fails."""
    try:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        warnings.warn(
            f"{nbytes:,} bytes of host memory could not be pinned, and moves will be slower: "
            f"{error}",
            stacklevel=2,
        )
    return torch.empty(nbytes, dtype=torch.uint8)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _floor(nbytes: int) -> int:
    """The largest slab of at most ``nbytes``."""
    return max(_SMALLEST, 1 << (nbytes.bit_length() - 1))


def _ceiling(nbytes: int) -> int:
    """The smallest slab with room for ``nbytes``."""
    return max(_SMALLEST, 1 << (_aligned(nbytes) - 1).bit_length())
