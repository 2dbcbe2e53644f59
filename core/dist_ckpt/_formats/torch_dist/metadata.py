"""The ``.metadata`` file of torch.distributed.checkpoint, read from others.

Here: a restricted unpickler for the pickle of DCP's ``Metadata`` dataclass
(torch/distributed/checkpoint/metadata.py, torch 2.13). Not here: writing one (``dcp_metadata``),
our own index (``_sharding.packed``), what Megatron-Core adds (``mcore``). Runs on rank 0. Nothing
that we wrote is ever unpickled.
"""

from __future__ import annotations

import io
import math
import pickle
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dist_ckpt._formats.torch_dist.dcp_metadata import NOTE_KEY
from dist_ckpt._formats.torch_dist.inert import Node, size, torch_constant
from dist_ckpt._formats.torch_dist.mcore import (
    checked_shape,
    is_object_key,
    metadata_classes,
    original_shapes,
    unfold_flattened,
)
from dist_ckpt._formats.torch_dist.pickle_bounds import check_pickle
from dist_ckpt._sharding.index import CheckpointIndex, StoredBytes, StoredChunk, StoredTensor
from dist_ckpt._sharding.shard_info import dtype_from_name, dtype_name
from dist_ckpt.box import Box
from dist_ckpt.core import CONFIG_FNAME
from dist_ckpt.errors import CorruptedCheckpointError, UnsafeContentError
from dist_ckpt.storage.base import checked_name

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "ForeignCheckpoint",
    "StoredBytes",
    "decode_metadata",
]


_MAX_PATH_LENGTH = 100
"""State dicts nest no deeper; what is read of one is put together by recursion."""


@dataclass(frozen=True, slots=True)
class ForeignCheckpoint:
    """What a ``.metadata`` of another writer tells."""

    index: CheckpointIndex
    objects: Mapping[str, StoredBytes]
    paths: Mapping[str, tuple[str | int, ...]]
    """Flat key -> path in the nested state dict, where the writer noted it."""


def decode_metadata(data: bytes, *, where: str, sizes: Mapping[str, int]) -> ForeignCheckpoint:
    """Return what a ``.metadata`` file of another writer tells, believing nothing.

    Args:
        data: The file's bytes.
        where: Its path, for errors.
        sizes: Files of the checkpoint's directory with their sizes. With ``metadata.json`` among
            them the writer was Megatron-Core, which puts each sharded object into a list.

    Raises:
        UnsafeContentError: It names a class that metadata has no business with.
        CorruptedCheckpointError: It is no metadata, or points outside of the checkpoint.
    """
    try:
        check_pickle(data)
        metadata = _MetadataUnpickler(io.BytesIO(data), where).load()
        if not isinstance(metadata, Node) or metadata.kind != "Metadata":
            raise TypeError(f"expected Metadata, found {type(metadata).__name__}")
        return _foreign(metadata, sizes, budget=len(data))
    except UnsafeContentError:
        raise
    except Exception as error:  # a torn pickle makes pickle raise almost anything
        raise CorruptedCheckpointError(
            f"{where}: not the metadata of a distributed checkpoint "
            f"({type(error).__name__}: {error})."
        ) from error


@dataclass(frozen=True, slots=True)
class _Places:
    """Where everything is stored: ``(key, offset)`` -> storage info; offset ``()`` for bytes."""

    infos: Mapping[tuple[str, tuple[int, ...]], Node]
    sizes: Mapping[str, int]

    def find(self, key: str, offset: tuple[int, ...]) -> tuple[str, int, int]:
        """Return file, position and size of a record that lies in the checkpoint for sure."""
        info = self.infos[key, offset]
        if info.get("transform_descriptors"):
            raise ValueError(f"{key!r}: transformed by {info.get('transform_descriptors')}")
        name = checked_name(info.get("relative_path"))
        position, nbytes = checked_shape((info.get("offset"), info.get("length")))
        if position + nbytes > self.sizes.get(name, -1):
            raise ValueError(f"{key!r}: record at {position}+{nbytes} is outside of file {name!r}")
        return name, position, nbytes


def _foreign(metadata: Node, sizes: Mapping[str, int], *, budget: int) -> ForeignCheckpoint:
    """Return what the metadata says; ``budget`` bounds how many chunks and parts of paths."""
    places = _Places(
        {
            (index.get("fqn"), size(index.get("offset") or ())): info
            for index, info in metadata.get("storage_data").items()
        },
        sizes,
    )
    shapes = original_shapes(metadata.get("mcore_data"))
    tensors: dict[str, StoredTensor] = {}
    objects: dict[str, StoredBytes] = {}
    for key, entry in metadata.get("state_dict_metadata").items():
        if not isinstance(key, str):
            raise TypeError(f"key {key!r} is no text")
        if key == NOTE_KEY:
            continue  # we wrote it, for others
        if entry.kind == "BytesStorageMetadata":
            in_list = CONFIG_FNAME in sizes and is_object_key(key)
            objects[key] = StoredBytes(*places.find(key, ()), in_list=in_list)
        elif entry.kind == "TensorStorageMetadata":
            budget -= len(entry.get("chunks"))
            if budget < 0:  # one list of chunks may stand for many keys, at no cost in the pickle
                raise ValueError("more chunks than the metadata has bytes")
            tensors[key] = _tensor(key, entry, places, shapes.get(key))
        else:
            raise TypeError(f"{key!r} is a {entry.kind}")
    _check_total(tensors, objects, sizes)
    paths = metadata.get("planner_data")
    paths = paths if isinstance(paths, dict) else {}
    return ForeignCheckpoint(CheckpointIndex(tensors), objects, _checked_paths(paths))


def _check_total(
    tensors: Mapping[str, StoredTensor],
    objects: Mapping[str, StoredBytes],
    sizes: Mapping[str, int],
) -> None:
    """Raise if more is told of than the files hold: many records could lie over the same bytes."""
    chunks = [
        (chunk.file, chunk.box.numel * dtype_from_name(tensor.dtype).itemsize)
        for tensor in tensors.values()
        for chunk in tensor.chunks
    ]
    told = [*chunks, *((one.file, one.nbytes) for one in objects.values())]
    nbytes, most = sum(n for _, n in told), sum(sizes[name] for name in {name for name, _ in told})
    if nbytes > most:
        raise ValueError(f"{nbytes} bytes are told of in files of {most}")


def _tensor(
    key: str, entry: Node, places: _Places, original: tuple[int, ...] | None
) -> StoredTensor:
    """Return a stored tensor, in its original shape if it is stored in another form."""
    shape = checked_shape(entry.get("size"))
    properties = entry.get("properties").state
    dtype = dtype_name(properties[0] if isinstance(properties, tuple) else properties["dtype"])
    itemsize = dtype_from_name(dtype).itemsize  # raises if it is none
    chunks: list[StoredChunk] = []
    seen: set[Box] = set()
    for part in entry.get("chunks"):
        box = Box(checked_shape(part.get("offsets")), checked_shape(part.get("sizes")))
        if not box.within(shape):
            raise ValueError(f"{key!r}: chunk {box} is outside of shape {shape}")
        if not box.numel:
            continue
        if box in seen:
            raise ValueError(f"{key!r}: chunk {box} stands there twice")
        seen.add(box)
        chunk = StoredChunk(box, *places.find(key, box.offset), encoding="torch_zip")
        if box.numel * itemsize > chunk.nbytes:
            raise ValueError(f"{key!r}: {chunk.nbytes} bytes cannot hold chunk {box} of {dtype}")
        chunks += [chunk] if original is None else unfold_flattened(chunk, shape, original)
    if sum(c.box.numel for c in chunks) > math.prod(shape):
        raise ValueError(f"{key!r}: chunks overlap in shape {shape}")
    return StoredTensor(dtype, shape if original is None else original, tuple(chunks))


def _checked_paths(paths: Mapping[Any, Any]) -> dict[str, tuple[str | int, ...]]:
    return {
        key: tuple(path)
        for key, path in paths.items()
        if key != NOTE_KEY
        and isinstance(path, tuple)
        and 0 < len(path) <= _MAX_PATH_LENGTH
        and all(type(part) in (str, int) for part in path)
    }


class _MetadataUnpickler(pickle.Unpickler):
    """Resolves the names that checkpoint metadata consists of, to inert stand-ins."""

    def __init__(self, file: io.BytesIO, where: str) -> None:
        super().__init__(file)
        self._where = where
        self._classes = metadata_classes()

    def find_class(self, module: str, name: str) -> object:
        found = self._classes.get((module, name))
        if found is None and module == "torch":
            found = torch_constant(name)
        if found is None:
            raise UnsafeContentError(
                f"{self._where} names {module}.{name}, which checkpoint metadata does not need.",
                hint="it may be hostile; it was not loaded.",
            )
        return found
