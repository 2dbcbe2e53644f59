"""Stored chunks, column by column.

Here: where all chunks of a checkpoint lie, as arrays, and the chunks of one tensor as a sequence
that makes each of them when it is asked for. Not here: how the columns stand in a file
(``packed``), what a chunk is (``index``). Pure; nothing is checked here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, overload

import numpy as np

from dist_ckpt._sharding.index import Chunks, StoredChunk
from dist_ckpt.box import Box

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from dist_ckpt._sharding.index import StoredTensor
    from dist_ckpt._sharding.shard_info import Role

__all__ = ["ChunkRows", "ChunkTable", "table_of"]


@dataclass(frozen=True, slots=True, eq=False)
class ChunkTable:
    """Chunks of many tensors; row ``i`` is a chunk of the tensor number ``tensor[i]``.

    Attributes:
        keys: One entry a tensor, as ``dtypes``, ``roles`` and ``shapes``; tensors without elements
            stand there too and have no rows.
        dtypes: Names of dtypes.
        roles: What each tensor is.
        shapes: Global shapes.
        files: Names of files, relative to the checkpoint's directory.
        tensor: ``[n]``: number of the tensor.
        offset: ``[n, D]``, elements; D is the most axes of any tensor. A tensor's axes come first,
            the rest is offset 0 and shape 1.
        shape: ``[n, D]``, elements.
        file: ``[n]``: number in ``files``.
        position: ``[n]``: first byte of the payload in the file.
    """

    keys: tuple[str, ...]
    dtypes: tuple[str, ...]
    roles: tuple[Role, ...]
    shapes: tuple[tuple[int, ...], ...]
    files: tuple[str, ...]
    tensor: NDArray[np.int32]
    offset: NDArray[np.int64]
    shape: NDArray[np.int64]
    file: NDArray[np.int32]
    position: NDArray[np.int64]

    def __len__(self) -> int:
        """Return the number of chunks."""
        return len(self.tensor)


def table_of(tensors: Mapping[str, StoredTensor]) -> ChunkTable:
    """Return the table of tensors that are objects already."""
    names = {chunk.file: 0 for one in tensors.values() for chunk in one.chunks}
    number = {name: i for i, name in enumerate(names)}
    depth = max((len(one.shape) for one in tensors.values()), default=0)
    rows: list[tuple[int, ...]] = []
    for i, one in enumerate(tensors.values()):
        fill = depth - len(one.shape)
        for chunk in one.chunks:
            offset, shape = (*chunk.box.offset, *(0,) * fill), (*chunk.box.shape, *(1,) * fill)
            rows.append((i, number[chunk.file], chunk.position, *offset, *shape))
    columns = np.array(rows, np.int64).reshape(len(rows), 3 + 2 * depth)
    return ChunkTable(
        keys=tuple(tensors),
        dtypes=tuple(one.dtype for one in tensors.values()),
        roles=tuple(one.role for one in tensors.values()),
        shapes=tuple(one.shape for one in tensors.values()),
        files=tuple(names),
        tensor=columns[:, 0].astype(np.int32),
        file=columns[:, 1].astype(np.int32),
        position=columns[:, 2],
        offset=columns[:, 3 : 3 + depth],
        shape=columns[:, 3 + depth :],
    )


class ChunkRows(Chunks):
    """The chunks of one tensor; a ``StoredChunk`` is made when it is asked for.

    Args:
        files: Names of files.
        itemsize: Bytes an element.
        offset: ``[n, axes]``, elements.
        shape: ``[n, axes]``, elements.
        file: ``[n]``: number in ``files``.
        position: ``[n]``: first byte of the payload.
    """

    __slots__ = ("file", "files", "itemsize", "offset", "position", "shape")

    def __init__(
        self,
        files: Sequence[str],
        itemsize: int,
        *,
        offset: NDArray[np.int64],
        shape: NDArray[np.int64],
        file: NDArray[np.int32],
        position: NDArray[np.int64],
    ) -> None:
        """Keep the columns as they are."""
        self.files, self.itemsize = files, itemsize
        self.offset, self.shape, self.file, self.position = offset, shape, file, position

    def __len__(self) -> int:
        """Return the number of chunks."""
        return len(self.position)

    @overload
    def __getitem__(self, at: int) -> StoredChunk: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[StoredChunk, ...]: ...
    def __getitem__(self, at: int | slice) -> StoredChunk | tuple[StoredChunk, ...]:
        """Return a chunk, or several."""
        if isinstance(at, slice):
            return tuple(self[i] for i in range(*at.indices(len(self))))
        extent = tuple(self.shape[at].tolist())
        return StoredChunk(
            Box(tuple(self.offset[at].tolist()), extent),
            self.files[int(self.file[at])],
            int(self.position[at]),
            math.prod(extent) * self.itemsize,
        )

    def common(self, box: Box) -> tuple[NDArray[np.intp], NDArray[np.int64], NDArray[np.int64]]:
        """Return which chunks have elements of ``box``: rows, offset and shape of what is common.

        ``[m]``, ``[m, axes]`` and ``[m, axes]``, in global coordinates; the order is the chunks'.
        """
        offset = np.maximum(self.offset, np.array(box.offset, np.int64))
        stop = np.minimum(self.offset + self.shape, np.array(box.stop, np.int64))
        rows = np.flatnonzero((stop > offset).all(axis=1)) if box.numel else np.arange(0)
        return rows, offset[rows], stop[rows] - offset[rows]

    def overlapping(self, box: Box) -> list[tuple[StoredChunk, Box]]:
        """Return the chunks that have elements of ``box``, each with the common box."""
        rows, offset, shape = self.common(box)
        return [
            (self[row], Box(tuple(start), tuple(extent)))
            for row, start, extent in zip(
                rows.tolist(), offset.tolist(), shape.tolist(), strict=True
            )
        ]

    def stored_in(self, box: Box) -> int:
        """Return how many elements of ``box`` the chunks have."""
        _, _, shape = self.common(box)
        return int(shape.prod(axis=1).sum())
