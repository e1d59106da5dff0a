"""Whether memory on a device holds what it held before, told without a copy of it.

A digest is a sum over the bytes, taken eight at a time, each weighted by its position, modulo
2**64. It is made on the device that the bytes are on; eight bytes a chunk come back. High bits are
folded into low ones first: a product loses them, and a change of signs alone (``neg_()`` of
float64) would cancel out. It is no defence against somebody who looks for a collision.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

_CHUNK = 2**20
"""Numbers of eight bytes that are weighted at once. Three temporary tensors of it are made."""

_MODULUS = 2**64
_ODD = 0x9E3779B97F4A7C15 - _MODULUS  # of the golden ratio, as a signed number of 64 bits


def digests_of(storages: Sequence[torch.UntypedStorage]) -> list[int]:
    """A digest of each of ``storages``, which are on one device.

    Raises:
        OutOfMemoryError: the device has no room for the temporary tensors (24 MiB at most).
    """
    numbers = [_numbers(storage) for storage in storages]
    longest = max((chunk.numel() for parts in numbers for chunk in parts), default=0)
    if not longest:
        return [0] * len(storages)
    weights = _weights(longest, storages[0].device)
    sums = [_weighted(chunk, weights) for parts in numbers for chunk in parts]
    found = iter(torch.stack(sums).tolist())
    return [_combined([next(found) for _ in parts]) for parts in numbers]


def _numbers(storage: torch.UntypedStorage) -> list[torch.Tensor]:
    """All bytes of ``storage`` as whole numbers, in chunks."""
    nbytes = storage.nbytes()
    whole = torch.empty(0, dtype=torch.uint8, device=storage.device)
    whole.set_(storage, 0, (nbytes,), (1,))
    even = nbytes // 8 * 8
    chunks = list(whole[:even].view(torch.int64).split(_CHUNK)) if even else []
    return chunks if even == nbytes else [*chunks, whole[even:].long()]


def _weights(count: int, device: torch.device) -> torch.Tensor:
    """Odd numbers without a pattern, the same ones every time."""
    weights = torch.arange(1, count + 1, device=device) * _ODD
    weights ^= weights >> 32
    weights *= _ODD
    weights ^= weights >> 29
    return weights | 1


def _weighted(chunk: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    folded = chunk >> 29
    folded ^= chunk
    folded *= weights[: chunk.numel()]
    return folded.sum()


def _combined(sums: Sequence[int]) -> int:
    digest = len(sums)
    for value in sums:
        digest = (digest * _ODD + value) % _MODULUS
    return digest
