"""The ``.metadata`` file of torch.distributed.checkpoint: written for others, read from others.

Here: the pickle of DCP's ``Metadata`` dataclass (torch/distributed/checkpoint/metadata.py, torch
2.13), and a restricted unpickler for it. Not here: our own index, which is JSON
(``_planning.index``). Runs on rank 0. Nothing that we wrote is ever unpickled.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import PosixPath, WindowsPath
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint import filesystem as dcp_filesystem
from torch.distributed.checkpoint import metadata as dcp

from dist_ckpt._geometry import Box
from dist_ckpt._planning.describe import dtype_from_name, dtype_name
from dist_ckpt._planning.index import CheckpointIndex, StoredChunk, StoredTensor
from dist_ckpt.errors import CorruptedCheckpointError, UnsafeContentError
from dist_ckpt.storage.base import checked_name

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dist_ckpt._formats.torch_dist.write import WriteResult

__all__ = [
    "ForeignCheckpoint",
    "StoredBytes",
    "decode_metadata",
    "encode_metadata",
]


@dataclass(frozen=True, slots=True)
class StoredBytes:
    """A pickled object of another writer: a ``torch.save`` record of anything."""

    file: str
    position: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class ForeignCheckpoint:
    """What a ``.metadata`` of another writer tells."""

    index: CheckpointIndex
    objects: Mapping[str, StoredBytes]
    paths: Mapping[str, tuple[str | int, ...]]
    """Flat key -> path in the nested state dict, where the writer noted it."""


def encode_metadata(results: Sequence[WriteResult], empty: Mapping[str, StoredTensor]) -> bytes:
    """Return the ``.metadata`` that lets DCP read what was written.

    Args:
        results: Every box of every rank.
        empty: Tensors without elements, of which no box is written.
    """
    tensors: dict[str, dcp.STORAGE_TYPES] = {}
    storage: dict[dcp.MetadataIndex, Any] = {}
    for result in results:
        info, box = result.info, result.chunk.box
        entry = tensors.get(info.key)
        if entry is None:
            entry = tensors[info.key] = _tensor_entry(info.dtype, info.global_shape)
        assert isinstance(entry, dcp.TensorStorageMetadata)  # noqa: S101 - made just above
        place = dcp.MetadataIndex(info.key, torch.Size(box.offset), len(entry.chunks))
        entry.chunks.append(dcp.ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.shape)))
        storage[place] = dcp_filesystem._StorageInfo(  # noqa: SLF001 - part of DCP's file format
            result.chunk.file, result.record_position, result.record_nbytes
        )
    for key, tensor in empty.items():
        tensors[key] = _tensor_entry(tensor.dtype, tensor.shape)
    metadata = dcp.Metadata(
        state_dict_metadata=tensors,
        planner_data={key: (key,) for key in tensors},
        storage_data=storage,
        storage_meta=dcp.StorageMeta(),
        version="1.0.0",
    )
    return pickle.dumps(metadata)


def _tensor_entry(dtype: str, shape: tuple[int, ...]) -> dcp.TensorStorageMetadata:
    properties = dcp.TensorProperties(dtype=dtype_from_name(dtype))
    return dcp.TensorStorageMetadata(properties, torch.Size(shape), [])


def decode_metadata(data: bytes, *, where: str, sizes: Mapping[str, int]) -> ForeignCheckpoint:
    """Return what a ``.metadata`` file of another writer tells, believing nothing.

    Args:
        data: The file's bytes.
        where: Its path, for errors.
        sizes: Files of the checkpoint's directory with their sizes.

    Raises:
        UnsafeContentError: It names a class that metadata has no business with.
        CorruptedCheckpointError: It is no metadata, or points outside of the checkpoint.
    """
    try:
        _check_memo(data)
        metadata = _MetadataUnpickler(io.BytesIO(data), where).load()
        if not isinstance(metadata, dcp.Metadata):
            raise TypeError(f"expected Metadata, found {type(metadata).__name__}")
        return _foreign(metadata, sizes)
    except UnsafeContentError:
        raise
    except Exception as error:  # a torn pickle makes pickle raise almost anything
        raise CorruptedCheckpointError(
            f"{where}: not the metadata of a distributed checkpoint "
            f"({type(error).__name__}: {error})."
        ) from error


def _check_memo(data: bytes) -> None:
    """Raise if the pickle puts at a memo index that its length cannot have reached.

    The C unpickler keeps an array as long as the highest index: five bytes could take 64 GiB.
    """
    for opcode, argument, _ in pickletools.genops(data):
        if opcode.name not in {"PUT", "BINPUT", "LONG_BINPUT"}:
            continue
        if not isinstance(argument, int) or not 0 <= argument <= len(data):
            raise ValueError(f"memo index {argument} in a pickle of {len(data)} bytes")


def _foreign(metadata: dcp.Metadata, sizes: Mapping[str, int]) -> ForeignCheckpoint:
    tensors: dict[str, StoredTensor] = {}
    objects: dict[str, StoredBytes] = {}
    places = {(i.fqn, tuple(i.offset or ())): i for i in metadata.storage_data}
    for key, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, dcp.BytesStorageMetadata):
            objects[key] = StoredBytes(*_place(metadata, places, key, (), sizes))
            continue
        shape = tuple(int(n) for n in entry.size)
        chunks = []
        for chunk in entry.chunks:
            box = Box(tuple(map(int, chunk.offsets)), tuple(map(int, chunk.sizes)))
            if not box.within(shape):
                raise ValueError(f"{key!r}: chunk {box} is outside of shape {shape}")
            if box.numel:
                place = _place(metadata, places, key, box.offset, sizes)
                chunks.append(StoredChunk(box, *place, encoding="torch_zip"))
        if sum(c.box.numel for c in chunks) > math.prod(shape):
            raise ValueError(f"{key!r}: chunks overlap in shape {shape}")
        dtype = dtype_name(entry.properties.dtype)
        dtype_from_name(dtype)  # raises if it is none
        tensors[key] = StoredTensor(dtype, shape, tuple(chunks))
    paths = metadata.planner_data if isinstance(metadata.planner_data, dict) else {}
    return ForeignCheckpoint(CheckpointIndex(tensors), objects, _checked_paths(paths))


def _place(
    metadata: dcp.Metadata,
    places: Mapping[tuple[str, tuple[int, ...]], dcp.MetadataIndex],
    key: str,
    offset: tuple[int, ...],
    sizes: Mapping[str, int],
) -> tuple[str, int, int]:
    info = metadata.storage_data[places[key, offset]]
    if getattr(info, "transform_descriptors", None):
        raise ValueError(f"{key!r}: transformed by {info.transform_descriptors}")
    name = checked_name(info.relative_path)
    position, nbytes = int(info.offset), int(info.length)
    if position < 0 or nbytes < 0 or position + nbytes > sizes.get(name, -1):
        raise ValueError(f"{key!r}: record at {position}+{nbytes} is outside of file {name!r}")
    return name, position, nbytes


def _checked_paths(paths: Mapping[Any, Any]) -> dict[str, tuple[str | int, ...]]:
    return {
        key: tuple(path)
        for key, path in paths.items()
        if isinstance(path, tuple) and path and all(isinstance(part, str | int) for part in path)
    }


_ALLOWED: Mapping[tuple[str, str], object] = {
    **{("torch.distributed.checkpoint.metadata", cls.__name__): cls for cls in (
        dcp.Metadata, dcp.TensorStorageMetadata, dcp.BytesStorageMetadata, dcp.TensorProperties,
        dcp.ChunkStorageMetadata, dcp.MetadataIndex, dcp.StorageMeta,
        dcp._MEM_FORMAT_ENCODING,  # noqa: SLF001 - part of DCP's file format
    )},
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): dcp_filesystem._StorageInfo,  # noqa: SLF001 - same
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,  # noqa: SLF001 - same
    ("collections", "OrderedDict"): OrderedDict,
    ("pathlib", "PosixPath"): PosixPath,
    ("pathlib", "WindowsPath"): WindowsPath,
}  # fmt: skip


class _MetadataUnpickler(pickle.Unpickler):
    """Resolves the names that DCP metadata consists of, and nothing else."""

    def __init__(self, file: io.BytesIO, where: str) -> None:
        super().__init__(file)
        self._where = where

    def find_class(self, module: str, name: str) -> object:
        if (module, name) in _ALLOWED:
            return _ALLOWED[module, name]
        if module == "torch" and name.isidentifier():
            value = getattr(torch, name, None)
            if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
                return value
        raise UnsafeContentError(
            f"{self._where} names {module}.{name}, which checkpoint metadata does not need.",
            hint="it may be hostile; it was not loaded.",
        )
