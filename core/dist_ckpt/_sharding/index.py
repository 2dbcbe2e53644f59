"""What a checkpoint holds: keys, shapes, dtypes, and where each stored chunk lies.

Here: the index as frozen data, with its JSON form. Not here: other formats' metadata.
Built by rank 0 at the end of a save; read by rank 0 at the start of a load and sent to all.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, TypeAlias

from dist_ckpt._sharding.shard_info import Role, dtype_from_name
from dist_ckpt.box import Box
from dist_ckpt.errors import CorruptedCheckpointError
from dist_ckpt.storage.sealed import sealed, unsealed

__all__ = ["CheckpointIndex", "Chunks", "LazyTensors", "StoredBytes", "StoredChunk", "StoredTensor"]

INDEX_VERSION = 1
_MALFORMED = (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError)
"""What reading a document of the wrong shape raises."""

Encoding: TypeAlias = Literal["raw", "torch_zip", "zarr2", "zarr3", "zarr2_foreign"]
"""``raw``: row-major bytes at the position; ``torch_zip``: a whole ``torch.save`` record; ``zarr2``
and ``zarr3``: the box of an array as we lay it out, whose directory is the file, with position 0;
``zarr2_foreign``: of any array of zarr v2."""


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """One box of a tensor, stored in one place.

    Attributes:
        box: Which elements of the tensor.
        file: Where they are, relative to the checkpoint's directory.
        position: First byte in the file.
        nbytes: Bytes from there on that belong to the chunk or to the record around it.
        encoding: What those bytes are.
        record_shape: Shape of the tensor in the record, where it is not the box's.
        record_start: First element of the box in that tensor, flattened; the box is row-major and
            contiguous there.
    """

    box: Box
    file: str
    position: int
    nbytes: int
    encoding: Encoding = "raw"
    record_shape: tuple[int, ...] | None = None
    record_start: int = 0


@dataclass(frozen=True, slots=True)
class StoredBytes:
    """A pickled object of another writer: a ``torch.save`` record of anything.

    Attributes:
        file: Where it is, relative to the checkpoint's directory.
        position: First byte of the record.
        nbytes: Size of the record.
        in_list: Whether the record is a list with the object in it.
        doubt: Why it is not certain that the record is this object; empty if it is.
    """

    file: str
    position: int
    nbytes: int
    in_list: bool = False
    doubt: str = ""


class Chunks(Sequence[StoredChunk]):
    """Chunks of a tensor that are made when they are asked for; equal to the tuple of them."""

    __slots__ = ()

    @abstractmethod
    def overlapping(self, box: Box) -> list[tuple[StoredChunk, Box]]:
        """Return the chunks that have elements of ``box``, each with the box that is common."""

    @abstractmethod
    def stored_in(self, box: Box) -> int:
        """Return how many elements of ``box`` the chunks have."""

    def __eq__(self, other: object) -> bool:
        """Whether ``other`` has the same chunks in the same order."""
        if not isinstance(other, Chunks | tuple):
            return NotImplemented
        return len(self) == len(other) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        """Return the hash of the chunks as a tuple."""
        return hash(tuple(self))

    def __repr__(self) -> str:
        """Return how many there are."""
        return f"<{len(self)} chunks>"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A global tensor and its chunks; no two of them share an element."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[StoredChunk, ...] | Chunks
    role: Role = "tensor"

    def overlapping(self, box: Box) -> list[tuple[StoredChunk, Box]]:
        """Return the chunks that have elements of ``box``, each with the box that is common."""
        if isinstance(self.chunks, Chunks):
            return self.chunks.overlapping(box)
        if not box.numel:
            return []
        common = ((chunk, box.intersect(chunk.box)) for chunk in self.chunks)
        return [(chunk, part) for chunk, part in common if part is not None]

    def stored_in(self, box: Box) -> int:
        """Return how many elements of ``box`` are stored."""
        if isinstance(self.chunks, Chunks):
            return self.chunks.stored_in(box)
        return sum(part.numel for _, part in self.overlapping(box))


class LazyTensors(Mapping[str, StoredTensor]):
    """Tensors by key that are made when they are asked for."""

    @abstractmethod
    def load(self) -> None:
        """Read what tells of the tensors, but for their chunks; whatever fails does so here."""

    @abstractmethod
    def keys_of(self, role: Role) -> list[str]:
        """Return the keys of the tensors that have this role; no tensor is made for it."""


@dataclass(frozen=True, slots=True)
class CheckpointIndex:
    """All that is stored: key -> tensor."""

    tensors: Mapping[str, StoredTensor]

    def keys_of(self, role: Role) -> list[str]:
        """Return the keys of the tensors that have this role."""
        if isinstance(self.tensors, LazyTensors):
            return self.tensors.keys_of(role)
        return [key for key, tensor in self.tensors.items() if tensor.role == role]

    def to_json(self) -> bytes:
        """Return the index as a sealed document; files stand there once, chunks name numbers."""
        files = sorted({chunk.file for t in self.tensors.values() for chunk in t.chunks})
        number = {name: i for i, name in enumerate(files)}
        entries = {
            key: {
                "dtype": tensor.dtype,
                "shape": tensor.shape,
                "role": tensor.role,
                "chunks": [
                    [c.box.offset, c.box.shape, number[c.file], c.position, c.nbytes]
                    for c in tensor.chunks
                ],
            }
            for key, tensor in sorted(self.tensors.items())
        }
        document = {"version": INDEX_VERSION, "files": files, "tensors": entries}
        return sealed(document)

    @classmethod
    def from_json(cls, data: bytes, *, where: str, sizes: Mapping[str, int]) -> CheckpointIndex:
        """Return the index of ``data``, believing nothing: every name, size and offset is checked.

        Args:
            data: The file's bytes.
            where: Its path, for errors.
            sizes: The files of the manifest with their sizes; only these may be referred to.

        Raises:
            CorruptedCheckpointError: Anything is not as it must be.
        """
        document = unsealed(data, where=where)
        try:
            if document["version"] != INDEX_VERSION:
                raise CorruptedCheckpointError(
                    f"{where}: index version {document['version']!r}; this release reads "
                    f"{INDEX_VERSION}.",
                    hint="upgrade dist-ckpt.",
                )
            files = document["files"]
            tensors = {
                key: _tensor_from_json(key, entry, files, sizes)
                for key, entry in document["tensors"].items()
            }
            _check_extents(tensors)
        except _MALFORMED as error:
            raise CorruptedCheckpointError(
                f"{where}: not an index of ours ({type(error).__name__}: {error})."
            ) from error
        return cls(tensors)


def _tensor_from_json(
    key: str, entry: dict[str, Any], files: list[str], sizes: Mapping[str, int]
) -> StoredTensor:
    shape = _int_tuple(entry["shape"])
    itemsize = dtype_from_name(entry["dtype"]).itemsize
    if entry["role"] == "object" and entry["dtype"] != "uint8":
        raise ValueError(f"{key!r}: an object is stored as uint8, not {entry['dtype']}")
    if entry["role"] not in ("tensor", "object", "part"):
        raise ValueError(f"{key!r}: unknown role {entry['role']!r}")
    chunks = []
    for offset, extent, file, *place in entry["chunks"]:
        box = Box(_int_tuple(offset), _int_tuple(extent))
        number, position, nbytes = _int_tuple([file, *place])
        name = files[number]
        if not box.within(shape) or nbytes != box.numel * itemsize:
            raise ValueError(f"{key!r}: chunk {box} of {nbytes} bytes does not fit shape {shape}")
        if position + nbytes > sizes.get(name, -1):
            raise ValueError(f"{key!r}: chunk at {position}+{nbytes} is outside of file {name!r}")
        chunks.append(StoredChunk(box, name, position, nbytes))
    stored = sum(chunk.box.numel for chunk in chunks)
    if stored > math.prod(shape):
        raise ValueError(f"{key!r}: {stored} elements are stored of {math.prod(shape)}")
    return StoredTensor(entry["dtype"], shape, tuple(chunks), entry["role"])


def _check_extents(tensors: Mapping[str, StoredTensor]) -> None:
    """Raise if two chunks share bytes of a file: few bytes could stand for any amount of memory."""
    extents = sorted(
        (chunk.file, chunk.position, chunk.nbytes, key)
        for key, tensor in tensors.items()
        for chunk in tensor.chunks
        if chunk.nbytes
    )
    for (file, position, nbytes, key), (other_file, start, _, other) in pairwise(extents):
        if file == other_file and position + nbytes > start:
            raise ValueError(f"{key!r} and {other!r} share bytes of {file!r} at {start}")


def _int_tuple(values: Any) -> tuple[int, ...]:
    result = tuple(values)
    if not all(type(n) is int and 0 <= n < 1 << 63 for n in result):
        raise ValueError(f"expected sizes, found {values!r}")
    return result
