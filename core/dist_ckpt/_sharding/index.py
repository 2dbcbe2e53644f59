"""What a checkpoint holds: keys, shapes, dtypes, and where each stored chunk lies.

Here: the index as frozen data. Not here: its bytes, which each format defines (``packed``,
``_formats.zarr.index``). Read by rank 0 at the start of a load and sent to all.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from dist_ckpt._sharding.shard_info import Role
from dist_ckpt.box import Box

__all__ = ["CheckpointIndex", "Chunks", "LazyTensors", "StoredBytes", "StoredChunk", "StoredTensor"]

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
