"""Sharded tensors through torch.distributed.checkpoint's public planner and storage interfaces, without any collective.

Saving: each rank keeps of DCP's own local plan what it owns. Loading: DCP's default planner reshards whatever the ranks' files
hold onto the tensors it is given. Where a piece lies is in the header of each file; nothing is pickled.
"""

import contextlib
import functools
import math
import os
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.distributed.tensor import DTensor, Replicate

from supervise_hooks.contract import tensors
from supervise_hooks.contract.errors import CheckpointError
from supervise_hooks.integrations.raw import DTYPE_NAMES, bytes_of, from_buffer, to_buffer, why_unstorable
from supervise_hooks.writing import Part


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Silences DCP's warning that `no_dist` means a single process: here it means no collectives. Raises the error that happened.

    DCP wraps every error in its CheckpointException, a BaseException: no `except Exception` of a training loop would stop it (2.13).
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        try:
            yield
        except CheckpointException as error:
            cause = next((one for one, _ in error.failures.values()), None)
            raise CheckpointError(str(error)) if cause is None else cause from None


def assign_owners(named: Mapping[str, torch.Tensor], pinned: frozenset[str], world_size: int) -> dict[str, int]:
    """Which rank writes each plain (replicated) tensor: the largest first, each to the rank with the least so far.

    Follows from names and shapes alone, so every rank computes the same without asking. `pinned` ones are rank 0's.
    """
    load = [0] * world_size
    owners: dict[str, int] = {}
    plain = {name: tensor.numel() * tensor.element_size() for name, tensor in named.items() if not isinstance(tensor, DTensor)}
    for name, size in sorted(plain.items(), key=lambda item: (-item[1], item[0])):
        owner = 0 if name in pinned else min(range(world_size), key=lambda rank: (load[rank], rank))
        owners[name] = owner
        load[owner] += size
    return owners


def writes_chunk(tensor: DTensor) -> bool:
    """Whether this rank writes its chunk: along mesh dimensions that replicate, only the first coordinate does."""
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return False
    return all(
        index == 0 for index, placement in zip(coordinate, tensor.placements, strict=True) if isinstance(placement, Replicate)
    )


class RankSavePlanner(DefaultSavePlanner):
    """DCP's local plan, less what other ranks write. There is no global plan: nobody is asked."""

    def __init__(self, rank: int, owners: Mapping[str, int]) -> None:
        super().__init__()
        self._rank = rank
        self._owners = owners

    def create_local_plan(self) -> SavePlan:
        """Only the items this rank owns."""
        plan = super().create_local_plan()
        self.plan = SavePlan([item for item in plan.items if self._owns(item)])
        return self.plan

    def _owns(self, item: WriteItem) -> bool:
        tensor = self.state_dict[item.index.fqn]
        return writes_chunk(tensor) if isinstance(tensor, DTensor) else self._owners[item.index.fqn] == self._rank

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """The local plan as it is; DCP's check that chunks cover every tensor is ours at verification, over all ranks' headers."""
        return all_plans, Metadata(state_dict_metadata={})


def as_part(key: str, tensor: torch.Tensor, piece: tensors.Piece | None = None) -> Part:
    """The tensor as it goes into the file, read when its turn comes. Raises CheckpointError when raw bytes cannot stand for it."""
    why = why_unstorable(tensor)
    if why is not None:
        raise CheckpointError(f"cannot save {key}: {why}")
    read = functools.partial(to_buffer, tensor)
    return Part(key, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), bytes_of(tensor), read, piece)


class RankStorageWriter(StorageWriter):
    """Collects the planned pieces as parts of the rank's file, to be written together with what is not DCP's."""

    def __init__(self) -> None:
        self.parts: list[Part] = []

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A new save."""
        self.parts = []

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to prepare."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """As they are."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> "torch.futures.Future[list[WriteResult]]":
        """Resolve each item to its tensor; nothing is copied yet, and never one that lies contiguous in host memory."""
        results = []
        for item in plan.items:
            if item.type is WriteItemType.BYTE_IO or item.tensor_data is None:
                raise CheckpointError(f"cannot save {item.index.fqn}: only tensors are stored this way")
            tensor = planner.resolve_data(item)
            assert isinstance(tensor, torch.Tensor)
            offset = tuple(item.tensor_data.chunk.offsets)
            piece = tensors.Piece(item.index.fqn, tuple(item.tensor_data.size), offset)
            key = item.index.fqn if piece.shape == tuple(tensor.shape) else f"{item.index.fqn}@{','.join(map(str, offset))}"
            self.parts.append(as_part(key, tensor, piece))
            results.append(WriteResult(index=item.index, size_in_bytes=bytes_of(tensor), storage_data=None))
        future: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """The commit is the manifest, elsewhere."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Any."""
        return True


class RankFiles(StorageReader):
    """The tensor files of all ranks as one store of named tensors."""

    def __init__(self, files: list[Path]) -> None:
        self._where: dict[MetadataIndex, tuple[Path, int, tensors.Entry]] = {}
        self.metadata = Metadata(state_dict_metadata={}, storage_data=self._where)
        for path in files:
            self._index(path, tensors.read_header(path))

    def _index(self, path: Path, header: tensors.Header) -> None:
        for key, piece in header.pieces.items():
            entry = header.entries[key]
            offset, sizes = torch.Size(piece.offset), torch.Size(entry.shape)
            known = self.metadata.state_dict_metadata.get(piece.name)
            if known is None:
                known = TensorStorageMetadata(TensorProperties(dtype=_dtype(entry.dtype)), torch.Size(piece.shape), [])
                self.metadata.state_dict_metadata[piece.name] = known
            assert isinstance(known, TensorStorageMetadata)
            known.chunks.append(ChunkStorageMetadata(offset, sizes))
            self._where[MetadataIndex(piece.name, offset)] = (path, header.data_start, entry)

    def specification(self, name: str) -> tuple[torch.dtype, torch.Size]:
        """(dtype, whole shape) of a stored tensor."""
        stored = self.metadata.state_dict_metadata[name]
        assert isinstance(stored, TensorStorageMetadata)
        return stored.properties.dtype, stored.size

    def names(self) -> set[str]:
        """Names of all stored tensors."""
        return set(self.metadata.state_dict_metadata)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing is kept between loads."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Made from the headers."""
        return self.metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to prepare."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """As they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> "torch.futures.Future[None]":
        """Read of each piece the rows that are wanted, and copy: nothing live ever shares memory with a file."""
        for item in plan.items:
            target = planner.resolve_tensor(item).detach()
            target.copy_(self._read(item))
            planner.commit_tensor(item, target)
        future: torch.futures.Future[None] = torch.futures.Future()
        future.set_result(None)
        return future

    def _read(self, item: ReadItem) -> torch.Tensor:
        path, data_start, entry = self._where[MetadataIndex(item.storage_index.fqn, item.storage_index.offset)]
        shape, begin = entry.shape, data_start + entry.data_offsets[0]
        rows = slice(0, 1)
        if shape:  # whole rows of the first dimension are one range of the file
            rows = slice(item.storage_offsets[0], item.storage_offsets[0] + item.lengths[0])
            row_bytes = math.prod(shape[1:]) * tensors.DTYPE_BITS[entry.dtype] // 8
            begin, count = begin + rows.start * row_bytes, item.lengths[0] * row_bytes
            shape = (item.lengths[0], *shape[1:])
        else:
            count = tensors.DTYPE_BITS[entry.dtype] // 8
        tensor = from_buffer(read_range(path, begin, count), entry.dtype, shape)
        for dim in range(1, len(shape)):
            tensor = tensor.narrow(dim, item.storage_offsets[dim], item.lengths[dim])
        return tensor

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Any."""
        return True


def read_range(path: Path, begin: int, count: int) -> bytearray:
    """Exactly `count` bytes of a file. Raises CheckpointError when it is too short, OSError."""
    buffer = bytearray(count)
    view = memoryview(buffer)
    with open(path, "rb", buffering=0) as file:
        file.seek(begin)
        while view and (got := file.readinto(view)):
            view = view[got:]
    if view:
        raise CheckpointError(f"cannot read {path}: it ends {len(view)} bytes too early")
    return buffer


def _dtype(name: str) -> torch.dtype:
    known = next((dtype for dtype, known in DTYPE_NAMES.items() if known == name), None)
    if known is None:
        raise CheckpointError(f"cannot read a tensor of type {name}: torch {torch.__version__} does not know it")
    return known
