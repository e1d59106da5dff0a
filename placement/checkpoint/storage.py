"""The storage layer under ``torch.distributed.checkpoint``.

torch plans: which rank writes which block of which tensor, and which blocks of which files a rank
has to read to get its own (https://docs.pytorch.org/docs/stable/distributed.checkpoint.html). The
planning is collective. What is written and read is decided here, and is not: a :class:`Taker`
only takes the tensors that a rank is to write, so that they can be written later and elsewhere.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import (
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
    StorageReader,
    StorageWriter,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from placement.checkpoint.form import DTYPE_NAMES, DTYPES, Chunk, StoredTensor
from placement.checkpoint.tensor_file import TensorFile
from placement.torch_private import inner_tensors


@dataclass(frozen=True)
class _Planned:
    """A chunk, and whether it is a shard of a distributed tensor."""

    chunk: Chunk
    sharded: bool


@dataclass
class Taker(StorageWriter):
    """Takes what one rank is to write.

    Attributes:
        file: name of the file that it is going to write.
        take: what becomes of a tensor that is taken: itself, or a copy of its own.
        taken: the tensors, by their key in the file, after the planning.
        tensors: all tensors of the checkpoint, on the coordinating rank.
    """

    file: str
    take: Callable[[torch.Tensor], torch.Tensor]
    taken: dict[str, torch.Tensor] = field(default_factory=dict)
    tensors: dict[str, StoredTensor] = field(default_factory=dict)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results = []
        for item in plan.items:
            tensor = planner.resolve_data(item)
            assert isinstance(tensor, torch.Tensor)
            chunk = _chunk_of(item, self.file)
            self.taken[chunk.key] = self.take(tensor.detach())
            sharded = item.type is WriteItemType.SHARD
            results.append(WriteResult(item.index, tensor.nbytes, _Planned(chunk, sharded)))
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        chunks: dict[str, list[_Planned]] = {}
        for of_rank in results:
            for result in of_rank:
                chunks.setdefault(result.index.fqn, []).append(result.storage_data)
        for name, tensor in metadata.state_dict_metadata.items():
            assert isinstance(tensor, TensorStorageMetadata)
            planned = chunks[name]
            self.tensors[name] = StoredTensor(
                DTYPE_NAMES[tensor.properties.dtype],
                tuple(tensor.size),
                any(part.sharded for part in planned),
                [part.chunk for part in planned],
            )

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False  # it is made by its one user


class Reader(StorageReader):
    """Reads tensors of a checkpoint that was verified.

    What a buffer is to hold is seldom copied. If it lies in one piece in one file, the buffer is
    made to look into that file instead, and takes no memory of its own.

    Args:
        directory: the checkpoint.
        tensors: what is in it.
        buffers: what is read into, by the tensors' names.
    """

    def __init__(
        self,
        directory: Path,
        tensors: Mapping[str, StoredTensor],
        buffers: Mapping[str, torch.Tensor],
    ) -> None:
        self._directory = directory
        self._tensors = tensors
        self._buffers = buffers
        self._chunks = {
            MetadataIndex(name, chunk.offsets): chunk
            for name, tensor in tensors.items()
            for chunk in tensor.chunks
        }
        self._files: dict[str, TensorFile] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return metadata_of(self._tensors)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            chunk = self._chunks[item.storage_index]
            stored = self._file(chunk.file).tensor(chunk.key)
            for dim, (start, length) in enumerate(
                zip(item.storage_offsets, item.lengths, strict=True)
            ):
                stored = stored.narrow(dim, start, length)
            buffer = self._buffers[item.dest_index.fqn]
            own = inner_tensors(buffer).get("_local_tensor", buffer)
            if own.shape == stored.shape:
                own.set_(stored)  # type: ignore[call-overload]  # torch types storages only
            else:
                planner.resolve_tensor(item).detach().copy_(stored)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _file(self, name: str) -> TensorFile:
        if name not in self._files:
            self._files[name] = TensorFile(self._directory / name)
        return self._files[name]

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False


def metadata_of(tensors: Mapping[str, StoredTensor]) -> Metadata:
    """What torch plans a load with."""
    return Metadata(
        {
            name: TensorStorageMetadata(
                TensorProperties(DTYPES[tensor.dtype]),
                torch.Size(tensor.shape),
                [
                    ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes))
                    for chunk in tensor.chunks
                ],
            )
            for name, tensor in tensors.items()
        }
    )


def _chunk_of(item: WriteItem, file: str) -> Chunk:
    """The chunk that ``item`` asks for. Its key is the tensor's name, and the block if it is not
    the whole."""
    assert item.tensor_data is not None
    planned, shape = item.tensor_data.chunk, item.tensor_data.size
    offsets, sizes = tuple(planned.offsets), tuple(planned.sizes)
    key = item.index.fqn
    if sizes != tuple(shape):
        block = ",".join(f"{o}:{o + n}" for o, n in zip(offsets, sizes, strict=True))
        key = f"{key}[{block}]"
    return Chunk(offsets, sizes, file, key)
