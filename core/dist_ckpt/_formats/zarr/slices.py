"""Large chunks of zarr v2 of which only the needed bytes are read.

Here: which arrays have such chunks, and their chunks as boxes of raw bytes. Not here: reading those
(``torch_dist.read``), everything that TensorStore reads (``read``).

TensorStore reads a chunk of v2 as a whole. Megatron-Core made a whole shard one chunk, so that a
row of a shard would cost all of it. Chunks of ours are small and hardly ever come here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dist_ckpt._formats.torch_dist.read import read_into as read_raw
from dist_ckpt._formats.zarr.files import is_as_torch
from dist_ckpt._formats.zarr.grid import cells_of
from dist_ckpt._geometry import Box
from dist_ckpt._planning.index import CheckpointIndex, StoredChunk, StoredTensor
from dist_ckpt.errors import CheckpointNotFoundError, CorruptedCheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dist_ckpt._formats.base import Destination
    from dist_ckpt._formats.zarr.files import ChunkFiles
    from dist_ckpt.storage import Store

__all__ = ["has_large_plain_chunks", "read_slices"]

_LARGE_NBYTES = 32 << 20
"""More than this: ours are not larger, and as much more memory than the state is held."""


def has_large_plain_chunks(document: dict[str, Any], files: ChunkFiles) -> bool:
    """Whether an array, whose metadata TensorStore took, has large chunks of plain elements."""
    return (
        files.zarr_format == 2  # noqa: PLR2004 - of zarr
        and files.least_nbytes > _LARGE_NBYTES
        and is_as_torch(document)
    )


def read_slices(
    destinations: Sequence[Destination],
    index: CheckpointIndex,
    files: Mapping[str, ChunkFiles],
    store: Store,
    *,
    thread_count: int,
) -> int:
    """Fill the destinations from chunk files; return the number of bytes read.

    Args:
        destinations: Boxes within their tensors.
        index: What is stored.
        files: Those of each key's array.
        store: The checkpoint's files.
        thread_count: Most reads at a time.

    Raises:
        CorruptedCheckpointError: A chunk is missing or cut short.
        StorageError: The file system failed.
    """
    tensors: dict[str, StoredTensor] = {}
    for key, of_key in files.items():
        wanted = [one.box for one in destinations if one.key == key and one.box.numel]
        tensors[key] = _as_raw(index.tensors[key], wanted, of_key)
    try:
        return read_raw(destinations, CheckpointIndex(tensors), store, thread_count=thread_count)
    except CheckpointNotFoundError as error:
        raise CorruptedCheckpointError(str(error), hint="use another checkpoint.") from error


def _as_raw(stored: StoredTensor, wanted: Sequence[Box], files: ChunkFiles) -> StoredTensor:
    """Return the tensor with its wanted chunks as raw boxes.

    A chunk at the end of the tensor is stored in full, so that its box reaches beyond the tensor.
    """
    cell = files.cell
    chunks = [
        StoredChunk(
            Box(tuple(i * c for i, c in zip(numbers, cell, strict=True)), cell),
            files.name(numbers),
            0,
            files.least_nbytes,
        )
        for numbers in dict.fromkeys(n for box in wanted for n in cells_of(box, cell))
    ]
    return StoredTensor(stored.dtype, stored.shape, tuple(chunks), stored.role)
