"""Real text that every machine with Python has: the source of its standard library."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch

_ENOUGH = 2_000_000
"""Bytes of text to read; a few dozen modules have as much."""


class LibrarySource:
    """Batches of bytes from the standard library's source.

    The last tenth is kept for evaluation. A batch depends on its number and the seed alone, so
    ranks, policies and resumed runs see the same data.
    """

    def __init__(self, context: int, seed: int = 0) -> None:
        self._context = context
        self._seed = seed
        text = _read()
        held_out = len(text) // 10
        self._train, self._held_out = text[:-held_out], text[-held_out:]

    def train_batch(self, step: int, size: int) -> torch.Tensor:
        """The global batch of a step, of shape (size, context + 1)."""
        return self._batch(self._train, step, size)

    def eval_batch(self, size: int) -> torch.Tensor:
        """The batch for evaluation, of shape (size, context + 1)."""
        return self._batch(self._held_out, 0, size)

    def _batch(self, text: torch.Tensor, number: int, size: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + number)
        last = len(text) - self._context - 1
        starts = torch.randint(0, last, (size, 1), generator=generator)
        return text[starts + torch.arange(self._context + 1)].long()


def _read() -> torch.Tensor:
    """Modules in the order of their names, until there is enough."""
    source = bytearray()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        source += path.read_bytes()
        if len(source) >= _ENOUGH:
            break
    return torch.frombuffer(source, dtype=torch.uint8)
