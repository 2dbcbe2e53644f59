"""What an array's document says, compared with the index.

Here: reading it, once for all arrays whose documents are equal. Not here: what a document may say
(``metadata``, ``files``), reading chunks (``read``, ``known``). Runs on every rank for its own
boxes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from dist_ckpt._formats.zarr.files import ChunkFiles, chunk_files, is_as_written
from dist_ckpt._formats.zarr.grid import Grid
from dist_ckpt._formats.zarr.metadata import (
    MAX_METADATA_NBYTES,
    array_metadata,
    check_metadata,
    metadata_name,
    parse_metadata,
)
from dist_ckpt._sharding.shard_info import dtype_from_name
from dist_ckpt.errors import CheckpointNotFoundError, CorruptedCheckpointError

if TYPE_CHECKING:
    import torch

    from dist_ckpt._formats.verification import VerifiedStore
    from dist_ckpt._sharding.index import StoredTensor

__all__ = ["Described", "Documents"]


@dataclass(frozen=True, slots=True)
class Described:
    """An array whose metadata has been compared with the index.

    Attributes:
        document: Its metadata.
        is_ours: Whether this is, word for word, what this format writes.
        stored: What the index says.
        files: The files of its chunks.
    """

    document: dict[str, Any]
    is_ours: bool
    stored: StoredTensor
    files: ChunkFiles

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the tensor."""
        return dtype_from_name(self.stored.dtype)


class Documents:
    """The documents of one checkpoint's arrays; for several threads.

    Most arrays of a model have one of a few shapes, and then the same document. Those of which the
    manifest tells the same size and checksum are the same, and one of them is read.

    Args:
        store: The checkpoint's files.
    """

    def __init__(self, store: VerifiedStore) -> None:
        """Read nothing yet."""
        self._store = store
        self._known: dict[tuple[Any, ...], Described] = {}

    def shared(self, key: str, stored: StoredTensor) -> Described | None:
        """Return what all arrays with the same document have in common, one object for all.

        Its ``stored``, and the path in its ``files``, are those of any of them. None if the
        manifest does not tell of the document.

        Raises:
            CorruptedCheckpointError: As ``of``.
            StorageError: The same.
        """
        chunk = stored.chunks[0]
        name = f"{chunk.file}/{metadata_name(3 if chunk.encoding == 'zarr3' else 2)}"
        found = self._store.sum_of(name)
        if found is None:
            return None
        told = found, stored.dtype, stored.shape, chunk.encoding
        known = self._known.get(told)
        if known is None:
            known = self._known[told] = _described(key, self._read(key, name), name, stored)
        return known

    def of(self, key: str, stored: StoredTensor) -> Described:
        """Return what an array's document says.

        Raises:
            CorruptedCheckpointError: It is missing or altered, or not what the index says.
            StorageError: The file system failed.
        """
        chunk = stored.chunks[0]
        known = self.shared(key, stored)
        if known is None:
            name = f"{chunk.file}/{metadata_name(3 if chunk.encoding == 'zarr3' else 2)}"
            data = self._read(key, name)
            told = data, stored.dtype, stored.shape, chunk.encoding
            if told not in self._known:
                self._known[told] = _described(key, data, name, stored)
            known = self._known[told]
        return replace(known, stored=stored, files=replace(known.files, path=chunk.file))

    def _read(self, key: str, name: str) -> bytes:
        try:
            return self._store.read(name, max_nbytes=MAX_METADATA_NBYTES)
        except CheckpointNotFoundError as error:
            raise CorruptedCheckpointError(
                f"{key!r}: {error}", hint="use another checkpoint."
            ) from error


def _described(key: str, data: bytes, name: str, stored: StoredTensor) -> Described:
    """Return an array whose document describes what the index says."""
    document, chunk = parse_metadata(data, name), stored.chunks[0]
    check_metadata(document, key, stored.dtype, stored.shape, name)
    itemsize = dtype_from_name(stored.dtype).itemsize
    files = chunk_files(document, chunk.file, itemsize, key=key, where=name)
    if chunk.encoding == "zarr2" and not is_as_written(document):
        raise CorruptedCheckpointError(
            f"{key!r}: {name} describes chunks that are not laid out as they were written.",
            hint="use another checkpoint.",
        )
    grid = Grid(files.cell, files.inner)
    ours = array_metadata(stored.shape, stored.dtype, grid, files.zarr_format)
    is_ours = document == ours and len(files.cell) == len(stored.shape)
    return Described(document, is_ours, stored, files)
