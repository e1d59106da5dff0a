"""Tensors as safetensors files: written tensor by tensor, read by the library.

The library's own writer takes all tensors of a file at once, in host memory, and does not say when
they are on the disk. Ours needs one tensor in host memory at a time, and none where a tensor is
there already; the bytes are the same (https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from placement.checkpoint.form import DTYPE_NAMES, Chunk, StoredTensor, damaged

_ALIGNED_TO = 8
"""Bytes. The header is filled up to a multiple of this, so that the data begins at one."""


def content(tensors: Mapping[str, torch.Tensor]) -> Iterator[memoryview]:
    """The bytes of a file with ``tensors``, block by block. A block is valid until the next one.

    Args:
        tensors: by key, on any device.
    """
    # Large elements first, so that each begins at a multiple of its size.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].itemsize, item[0]))
    yield memoryview(_header(ordered))
    for _, tensor in ordered:
        yield from bytes_of(tensor)


def bytes_of(tensor: torch.Tensor) -> Iterator[memoryview]:
    """The elements of ``tensor`` in order, as they lie in memory; nothing for an empty tensor."""
    host = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    if host.nbytes:
        array = ctypes.c_ubyte * host.nbytes
        yield memoryview(array.from_address(host.data_ptr()))  # valid as long as host is


class TensorFile:
    """A safetensors file that is read.

    Raises:
        DamagedCheckpoint: it is none.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file: Any = safe_open(path, framework="pt")
        except SafetensorError as error:
            raise damaged(path, f"it is no safetensors file: {error}") from None

    def require(self, chunks: Mapping[str, tuple[StoredTensor, Chunk]]) -> None:
        """Require that the file holds just ``chunks``, by key.

        Raises:
            DamagedCheckpoint: it holds something else.
        """
        if missing := sorted(chunks.keys() ^ set(self._file.keys())):
            raise damaged(self.path, f"the contents and it disagree about {missing[0]}")
        for key, (tensor, chunk) in chunks.items():
            found = self._file.get_slice(key)
            expected = tensor.dtype, _shape_in_file(tensor.dtype, chunk.sizes)
            if (found.get_dtype(), found.get_shape()) != expected:
                raise damaged(self.path, f"the contents and it disagree about the shape of {key}")

    def tensor(self, key: str) -> torch.Tensor:
        """A tensor on the CPU, read from the file as it is used."""
        found: torch.Tensor = self._file.get_tensor(key)
        return found


def _header(ordered: list[tuple[str, torch.Tensor]]) -> bytes:
    entries, end = {}, 0
    for key, tensor in ordered:
        start, end = end, end + tensor.nbytes
        dtype = DTYPE_NAMES[tensor.dtype]
        entries[key] = {
            "dtype": dtype,
            "shape": _shape_in_file(dtype, tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNED_TO)
    return len(text).to_bytes(8, "little") + text


def _shape_in_file(dtype: str, shape: Sequence[int]) -> list[int]:
    """safetensors counts numbers, and torch has two of F4's in one element."""
    if dtype == "F4":
        return [*shape[:-1], 2 * shape[-1]]
    return list(shape)
