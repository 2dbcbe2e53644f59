"""Chunks of plain elements, read without TensorStore: the bytes that are needed and no others.

Here: seeing that files are as plain as the metadata promises; whole cells straight into memory, all
else by the reader of raw chunks (``torch_dist.read``). Not here: chunks in any other layout
(``read``). Runs on every rank for its own boxes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dist_ckpt._formats.torch_dist.read import read_into as read_raw
from dist_ckpt._formats.zarr.grid import cell_box, cells_of
from dist_ckpt._formats.zarr.layout import shard_index, stored_extents
from dist_ckpt._sharding.index import CheckpointIndex, StoredChunk, StoredTensor
from dist_ckpt._sharding.shard_info import dtype_from_name
from dist_ckpt._staging_pool.memory import host_bytes, is_plain_memory
from dist_ckpt.box import Box
from dist_ckpt.errors import CheckpointNotFoundError, CorruptedCheckpointError
from dist_ckpt.storage import Extent

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    import torch

    from dist_ckpt._formats.base import Destination
    from dist_ckpt._formats.zarr.files import ChunkFiles
    from dist_ckpt.storage import Store

__all__ = ["Cell", "as_raw", "cells_in", "read_cells", "read_slices"]


@dataclass(frozen=True, slots=True)
class Cell:
    """A file: the box that it holds row by row, its bytes, and what must stand behind them."""

    name: str
    held: Box
    extents: tuple[int, ...]
    nbytes: int
    index: bytes


def cells_in(stored: StoredTensor, wanted: Iterable[Box], files: ChunkFiles) -> Iterator[Cell]:
    """Yield the cells that have elements of ``wanted``, each once.

    Args:
        stored: The tensor, which lies in an array.
        wanted: Boxes of it.
        files: The array's, which should be plain.
    """
    itemsize, is_v2 = dtype_from_name(stored.dtype).itemsize, files.zarr_format == 2  # noqa: PLR2004 - of zarr
    for numbers in dict.fromkeys(n for box in wanted for n in cells_of(box, files.cell)):
        held, index = cell_box(numbers, files.cell, stored.shape), b""
        extents = files.cell
        if not is_v2:
            extents = stored_extents(held.shape, files.inner)
            index = shard_index(files.cell, files.inner, held.shape, itemsize)
        yield Cell(files.name(numbers), held, extents, math.prod(extents) * itemsize, index)


def read_cells(
    stored: StoredTensor, part: Box, view: torch.Tensor, files: ChunkFiles, store: Store
) -> int | None:
    """Fill ``view`` with ``part`` of a tensor if that is whole cells, each in one read.

    Args:
        stored: The tensor, which lies in an array.
        part: What is wanted of it.
        view: Where it goes.
        files: The array's, which should be plain.
        store: The checkpoint's files.

    Returns:
        The number of bytes, None if it must be read in another way; ``view`` may have been written.

    Raises:
        CorruptedCheckpointError: A file is cut short or altered.
        StorageError: The file system failed.
    """
    cells = list(cells_in(stored, (part,), files))
    targets = [_target(cell, part, view) for cell in cells]
    if view.dtype != dtype_from_name(stored.dtype) or None in targets:
        return None
    nbytes = 0
    for cell, target in zip(cells, targets, strict=True):
        found = bytearray(len(cell.index))
        extents = [Extent(0, target or b""), Extent(cell.nbytes, memoryview(found))]
        try:
            if not found and store.nbytes(cell.name) != cell.nbytes:
                return None
            store.read_ranges(cell.name, extents if found else extents[:1])
        except CheckpointNotFoundError:
            return None
        if found != cell.index:
            return None
        nbytes += cell.nbytes
    return nbytes


def _target(cell: Cell, part: Box, view: torch.Tensor) -> memoryview | None:
    """Return where a cell's bytes go as they are, None if there is no such place."""
    if cell.extents != cell.held.shape or part.intersect(cell.held) != cell.held:
        return None
    target = view if cell.held == part else view[cell.held.relative_to(part).slices()]
    return host_bytes(target) if is_plain_memory(target) else None


def as_raw(
    stored: StoredTensor, wanted: Sequence[Box], files: ChunkFiles, bare: Store
) -> StoredTensor | None:
    """Return a tensor with the files that ``wanted`` needs as raw chunks, None if one is not so.

    A chunk at the end of the tensor may be stored in full, so that its box reaches beyond it.

    Args:
        stored: The tensor, which lies in an array.
        wanted: Boxes of it.
        files: The array's, which should be plain.
        bare: The checkpoint's files, not compared with checksums: the index of a shard is compared
            with what it must be, byte by byte, and all that is read later with its checksum.
    """
    chunks = []
    for cell in cells_in(stored, wanted, files):
        if not _ends_with(bare, cell.name, cell.nbytes, cell.index):
            return None
        box = Box(cell.held.offset, cell.extents)
        chunks.append(StoredChunk(box, cell.name, 0, cell.nbytes))
    return StoredTensor(stored.dtype, stored.shape, tuple(chunks), stored.role)


def _ends_with(bare: Store, name: str, position: int, index: bytes) -> bool:
    """Whether a file has ``index`` at ``position``, or ends there if there is none.

    That nothing follows the index of a shard is seen when the checkpoint is opened.
    """
    if not index:
        return bare.nbytes(name) == position
    found = bytearray(len(index))
    try:
        bare.read_ranges(name, [Extent(position, memoryview(found))])
    except CheckpointNotFoundError:
        return False
    return found == index


def read_slices(
    destinations: Sequence[Destination],
    tensors: Mapping[str, StoredTensor],
    store: Store,
    *,
    thread_count: int,
) -> int:
    """Fill the destinations from plain files; return the number of bytes read.

    Args:
        destinations: Boxes within their tensors.
        tensors: What ``as_raw`` made of each key.
        store: The checkpoint's files.
        thread_count: Most reads at a time.

    Raises:
        CorruptedCheckpointError: A chunk is missing, cut short or altered.
        StorageError: The file system failed.
    """
    try:
        return read_raw(destinations, CheckpointIndex(tensors), store, thread_count=thread_count)
    except CheckpointNotFoundError as error:
        raise CorruptedCheckpointError(str(error), hint="use another checkpoint.") from error
