"""Which box goes at which position of which data file, before anything is written.

Here: the layout of a rank's files, and of all ranks' files what is stored where. Not here: writing
them (``write``), who writes what (``_sharding.assign``). Pure; a layout depends on
descriptions alone, not on values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heapreplace
from typing import TYPE_CHECKING, Any

import numpy as np

from dist_ckpt._formats.torch_dist.records import Frames
from dist_ckpt._sharding.assign import WriteItems
from dist_ckpt._sharding.chunks import ChunkTable
from dist_ckpt._sharding.table import ROLES, ShardTable

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    from dist_ckpt._formats.torch_dist.records import RecordFrame
    from dist_ckpt._sharding.assign import WriteItem
    from dist_ckpt._sharding.shard_info import ShardInfo
    from dist_ckpt._sharding.table import LocalShards
    from dist_ckpt._sharding.together import JobTable

__all__ = [
    "ChunksOfJob",
    "PlannedFile",
    "RankChunks",
    "data_file_name",
    "plan_files",
    "rank_chunks",
]


@dataclass(frozen=True, eq=False)
class PlannedFile:
    """A data file before it is written.

    Attributes:
        name: Its name.
        nbytes: Its size.
        rows: Numbers of the rank's items that are in it, in file order.
        items: The items themselves.
        frames: What stands around the payload of each.
        payloads: Byte position of the first element of each.
        table: Descriptions of the rank's shards.
    """

    name: str
    nbytes: int
    rows: NDArray[np.int64]
    items: WriteItems
    frames: list[RecordFrame]
    payloads: list[int]
    table: ShardTable

    @cached_property
    def is_whole(self) -> list[bool]:
        """Whether an item is all that the rank has of the shard."""
        sizes = self.table.sizes[:2, self.items.shard]
        depth = min(sizes.shape[2], self.items.sizes.shape[2])
        found: list[bool] = (
            (sizes[..., :depth] == self.items.sizes[..., :depth]).all(axis=(0, 2)).tolist()
        )
        return found

    def key_of(self, number: int) -> str:
        """Return the key of an item."""
        return self.table.keys[int(self.table.key[self.items.shard[number]])]

    def view_in(self, shards: LocalShards, number: int) -> torch.Tensor:
        """Return the data of an item."""
        if not self.is_whole[number]:
            item = self.items[number]
            return shards.part(item.shard, item.box)
        view = shards.view(int(self.items.shard[number]))
        assert view is not None  # noqa: S101 - the plan gives work to holders of data only
        return view


@dataclass(frozen=True, slots=True, eq=False)
class RankChunks:
    """Where a rank has written its items, in the order of its plan.

    Attributes:
        files: Names of its files.
        file: Number of the file of each item, ``[n]``.
        position: Of its first element in the file, bytes, ``[n]``.
    """

    files: tuple[str, ...]
    file: NDArray[np.int32]
    position: NDArray[np.int64]

    def __len__(self) -> int:
        """Return the number of items."""
        return len(self.position)


def data_file_name(rank: int, number: int, prefix: str = "") -> str:
    """Return the name that DCP gives to a rank's data file, after a prefix of our own."""
    return f"{prefix}__{rank}_{number}.distcp"


def plan_files(
    infos: Sequence[ShardInfo],
    items: Sequence[WriteItem],
    *,
    rank: int,
    thread_count: int,
    separation_hint: str | None = None,
) -> list[PlannedFile]:
    """Return the files that this rank's ``items`` make, with the place of each.

    Tensors whose key begins with ``separation_hint`` get files of their own, named after it.
    """
    table, items = ShardTable.of(infos), WriteItems.of(items)
    nbytes = items.sizes[1].prod(axis=1) * table.itemsize[items.shard]
    frames = _frames(table, items)
    return [
        _planned_file(data_file_name(rank, number, prefix), group, table, items, frames)
        for prefix, rows in _separated(table, items, separation_hint)
        for number, group in enumerate(_spread(rows, nbytes[rows], thread_count))
        if len(group)
    ]


def _frames(table: ShardTable, items: WriteItems) -> list[RecordFrame]:
    frames = Frames()
    sizes = table.itemsize[items.shard].tolist()
    columns = (table.dtype[items.shard].tolist(), items.ndim.tolist(), items.sizes[1].tolist())
    return [
        frames.of(table.dtypes[dtype], tuple(shape[:ndim]), itemsize)
        for dtype, ndim, shape, itemsize in zip(*columns, sizes, strict=True)
    ]


def _separated(
    table: ShardTable, items: WriteItems, hint: str | None
) -> Iterator[tuple[str, NDArray[np.int64]]]:
    """Yield prefix and rows: of the items below the hint, and of the others."""
    apart = np.zeros(len(items), dtype=bool)
    if hint:
        is_apart = np.array([key.startswith(hint) for key in table.keys], dtype=bool)
        apart = is_apart[table.key[items.shard]]
        yield hint, np.flatnonzero(apart)
    yield "", np.flatnonzero(~apart)


def _spread(
    rows: NDArray[np.int64], nbytes: NDArray[np.int64], count: int
) -> list[NDArray[np.int64]]:
    """Deal the rows to ``count`` files by bytes; order within a file is the plan's."""
    if count == 1:
        return [rows]
    order = np.lexsort((np.arange(len(rows)), -nbytes))
    load = [(0, number) for number in range(count)]
    home = np.empty(len(rows), dtype=np.int64)
    homes = []
    for size in nbytes[order].tolist():
        total, number = load[0]
        homes.append(number)
        heapreplace(load, (total + size, number))
    home[order] = homes
    return [rows[home == number] for number in range(count)]


def _planned_file(
    name: str,
    rows: NDArray[np.int64],
    table: ShardTable,
    items: WriteItems,
    frames: Sequence[RecordFrame],
) -> PlannedFile:
    chosen = [frames[row] for row in rows.tolist()]
    payloads, end = [], 0
    for frame in chosen:
        payload = frame.start_after(end) + len(frame.head)
        payloads.append(payload)
        end = payload + frame.nbytes + len(frame.tail)
    return PlannedFile(name, end, rows, items.take(rows), chosen, payloads, table)


def rank_chunks(files: Sequence[PlannedFile]) -> RankChunks:
    """Return where this rank's items are, once its files are written."""
    total = sum(len(one.rows) for one in files)
    file, position = np.empty(total, dtype=np.int32), np.empty(total, dtype=np.int64)
    for number, one in enumerate(files):
        file[one.rows], position[one.rows] = number, one.payloads
    return RankChunks(tuple(one.name for one in files), file, position)


@dataclass(frozen=True, eq=False)
class ChunksOfJob:
    """Makes one table of what all ranks have written. Rank 0.

    Attributes:
        job: The descriptions of all ranks.
        work: What each rank had to write.
    """

    job: JobTable
    work: Sequence[WriteItems]

    def __call__(self, found: Sequence[RankChunks | tuple[()]]) -> ChunkTable:
        """Return what is stored where, tensors without elements included."""
        job = self.job
        starts = np.searchsorted(job.rank, np.arange(len(self.work)))
        rows = [start + items.shard for start, items in zip(starts, self.work, strict=True)]
        row = np.concatenate([np.empty(0, dtype=np.int64), *rows])
        sizes = np.concatenate([job.sizes[:2, :0], *(items.sizes for items in self.work)], axis=1)
        files, file, position = _files_of_all(found)
        keys = self._stored_keys(row)
        number = np.zeros(len(job.keys), dtype=np.int32)
        number[keys] = np.arange(len(keys))
        first = job.first_rows[keys]
        return ChunkTable(
            keys=tuple(job.keys[key] for key in keys.tolist()),
            dtypes=tuple(job.dtypes[one] for one in job.dtype[first].tolist()),
            roles=tuple(ROLES[one >> 4 & 3] for one in job.flags[first].tolist()),
            shapes=_shapes(job, first),
            files=files,
            tensor=number[job.key[row]],
            offset=sizes[0],
            shape=sizes[1],
            file=file,
            position=position,
        )

    def _stored_keys(self, row: NDArray[Any]) -> NDArray[np.int64]:
        """Return the keys with chunks, and those of tensors without elements."""
        job = self.job
        is_stored = np.zeros(len(job.keys), dtype=bool)
        is_stored[job.key[row]] = True
        is_stored[job.key[(job.sizes[2] == 0).any(axis=1)]] = True
        return np.flatnonzero(is_stored)


def _shapes(job: JobTable, rows: NDArray[Any]) -> tuple[tuple[int, ...], ...]:
    sizes, ndims = job.sizes[2, rows].tolist(), job.ndim[rows].tolist()
    return tuple(tuple(size[:ndim]) for size, ndim in zip(sizes, ndims, strict=True))


def _files_of_all(
    found: Sequence[RankChunks | tuple[()]],
) -> tuple[tuple[str, ...], NDArray[np.int32], NDArray[np.int64]]:
    files: list[str] = []
    file: list[NDArray[Any]] = [np.empty(0, dtype=np.int32)]
    position: list[NDArray[Any]] = [np.empty(0, dtype=np.int64)]
    for one in found:
        if isinstance(one, RankChunks):
            file.append(one.file + np.int32(len(files)))
            position.append(one.position)
            files += one.files
    return tuple(files), np.concatenate(file), np.concatenate(position)
