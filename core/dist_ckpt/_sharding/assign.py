"""Who writes which box, when several ranks hold the same one.

Here: one greedy, deterministic assignment balanced by bytes. Not here: whether the boxes are right
(``_sharding.coverage``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, overload

import numpy as np

from dist_ckpt._sharding.table import MAIN, WRITERS
from dist_ckpt._sharding.together import JobTable
from dist_ckpt.box import Box, split_box

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dist_ckpt._sharding.shard_info import ShardInfo

__all__ = ["CHUNK_NBYTES", "Split", "WriteItem", "WriteItems", "assign_writers", "writers_of_boxes"]

Split: TypeAlias = Callable[[str, Box, int, int], Iterable[Box]]
"""``(key, box, itemsize, max_nbytes)`` -> the pieces of the box that are shared out."""

CHUNK_NBYTES = 256 << 20
"""Largest stored chunk: well below the 4 GiB where zip needs its 64-bit records."""

_SPREAD_NBYTES = 16 << 20
"""Largest chunk of a shard that any of several ranks may write: small enough to balance."""


@dataclass(frozen=True, slots=True)
class WriteItem:
    """``box`` (global coordinates) of the rank's shard number ``shard`` is to be written."""

    shard: int
    box: Box


class WriteItems(Sequence[WriteItem]):
    """What one rank writes, in order; looks like a sequence of ``WriteItem``.

    Attributes:
        shard: Number of the shard on that rank; int32, ``[n]``.
        ndim: Number of axes; uint8, ``[n]``.
        sizes: Offset and shape of the box, global coordinates; int64, ``[2, n, D]``.
    """

    __slots__ = ("ndim", "shard", "sizes")

    def __init__(
        self, shard: NDArray[np.int32], ndim: NDArray[np.uint8], sizes: NDArray[np.int64]
    ) -> None:
        """Take the columns."""
        self.shard, self.ndim, self.sizes = shard, ndim, sizes

    @classmethod
    def of(cls, items: Sequence[WriteItem]) -> WriteItems:
        """Return items as columns."""
        if isinstance(items, WriteItems):
            return items
        ndim = np.array([len(item.box.shape) for item in items], dtype=np.uint8)
        sizes = np.ones((2, len(items), int(ndim.max(initial=0))), dtype=np.int64)
        sizes[0] = 0
        for row, item in enumerate(items):
            sizes[0, row, : ndim[row]] = item.box.offset
            sizes[1, row, : ndim[row]] = item.box.shape
        return cls(np.array([item.shard for item in items], dtype=np.int32), ndim, sizes)

    def __len__(self) -> int:
        """Return the number of items."""
        return len(self.shard)

    @overload
    def __getitem__(self, index: int) -> WriteItem: ...
    @overload
    def __getitem__(self, index: slice) -> list[WriteItem]: ...
    def __getitem__(self, index: int | slice) -> WriteItem | list[WriteItem]:
        """Return one item, or several."""
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        ndim = int(self.ndim[index])
        offset, shape = (tuple(row[index, :ndim].tolist()) for row in self.sizes)
        return WriteItem(int(self.shard[index]), Box(offset, shape))

    def take(self, rows: NDArray[Any]) -> WriteItems:
        """Return some of the items, in the given order."""
        return WriteItems(self.shard[rows], self.ndim[rows], self.sizes[:, rows])

    def __eq__(self, other: object) -> bool:
        """Whether both have equal items in the same order."""
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]  # compared by content

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the columns."""
        return WriteItems, (self.shard, self.ndim, self.sizes)

    def __repr__(self) -> str:
        """Show the items."""
        return f"WriteItems({list(self)!r})"


class _Piece(NamedTuple):
    """A part of a box that any of ``holders`` (rows of the job's table) may write."""

    nbytes: int
    key: int
    box: Box
    holders: NDArray[Any]


class _Given(NamedTuple):
    """A piece of the box ``number`` and who writes it: a row of the job's table."""

    number: int
    row: int
    piece: _Piece


def assign_writers(
    views: JobTable | Sequence[Sequence[ShardInfo]], *, split: Split | None = None
) -> list[WriteItems]:
    """Return for each rank the boxes it writes; every distinct box goes to exactly one rank.

    Args:
        views: Each rank's shards, in rank order.
        split: How boxes are cut into what goes to one rank; by size alone if None. What it leaves
            out of a box is written by nobody.

    The result depends on the descriptions alone: ties go to the lowest rank, never to hash order.
    Boxes without elements are written by nobody.
    """
    job = JobTable.of(views)
    chosen = _Candidates(job)
    limits = np.where(chosen.counts > 1, _SPREAD_NBYTES, CHUNK_NBYTES)
    first = job.boxes_with_data.first
    itemsize = job.itemsizes[job.dtype[first]]
    # In floating point: the sizes of boxes are not known to be any that memory could hold.
    nbytes = job.sizes[1, first].astype(np.float64).prod(axis=1) * itemsize
    alone = (chosen.counts == 1) & (nbytes <= limits)
    if split is not None:
        alone &= False
    rows = chosen.rows[chosen.starts[alone]]
    load = np.bincount(job.rank[rows], weights=nbytes[alone], minlength=len(job.views))
    fixed, free = _pieces(job, chosen, np.flatnonzero(~alone & (chosen.counts > 0)), limits, split)
    cut = [*fixed, *_dealt(job, fixed, free, load)]
    return _by_rank(job, np.flatnonzero(alone), rows, cut)


def _pieces(
    job: JobTable,
    chosen: _Candidates,
    numbers: NDArray[Any],
    limits: NDArray[Any],
    split: Split | None,
) -> tuple[list[_Given], list[_Piece]]:
    """Cut boxes; return the pieces that only one rank holds, and the others.

    Both come in the order of the boxes.
    """
    fixed: list[_Given] = []
    free: list[_Piece] = []
    first = job.boxes_with_data.first
    for number in numbers.tolist():
        row = int(first[number])
        box, itemsize = _box(job, row), int(job.itemsizes[job.dtype[row]])
        holders, limit = chosen.of(number), int(limits[number])
        key = int(job.key[row])
        pieces = (
            split(job.keys[key], box, itemsize, limit) if split else split_box(box, itemsize, limit)
        )
        for piece in pieces:
            one = _Piece(piece.numel * itemsize, key, piece, holders)
            if len(holders) > 1:
                free.append(one)
            else:
                fixed.append(_Given(number, int(holders[0]), one))
    return fixed, free


def _dealt(
    job: JobTable, fixed: Sequence[_Given], free: list[_Piece], load: NDArray[Any]
) -> Iterator[_Given]:
    """Give each free piece, the largest first, to the holder with the least to write."""
    for one in fixed:
        load[job.rank[one.row]] += one.piece.nbytes
    places = job.order_of_keys
    free.sort(key=lambda one: (-one.nbytes, places[one.key], one.box))
    for piece in free:
        # The first of the smallest: ties go to the lowest rank.
        row = int(piece.holders[np.argmin(load[job.rank[piece.holders]])])
        load[job.rank[row]] += piece.nbytes
        yield _Given(len(job), row, piece)


def _by_rank(
    job: JobTable, numbers: NDArray[Any], rows: NDArray[Any], cut: Sequence[_Given]
) -> list[WriteItems]:
    """Return each rank's whole boxes and pieces: in the order of the boxes, free pieces last.

    Args:
        job: The descriptions.
        numbers: Of the boxes that one rank writes whole.
        rows: Its row of each.
        cut: Pieces of others.
    """
    count, total = len(rows), len(rows) + len(cut)
    every = np.append(rows, np.array([one.row for one in cut], dtype=np.int64))
    turn = np.append(numbers, np.array([one.number for one in cut], dtype=np.int64))
    sizes = np.ones((2, total, job.sizes.shape[2]), dtype=np.int64)
    sizes[0, count:] = 0
    sizes[:, :count] = job.sizes[:2, rows]
    for at, one in enumerate(cut, count):
        box = one.piece.box
        sizes[0, at, : len(box.offset)] = box.offset
        sizes[1, at, : len(box.shape)] = box.shape
    ranks = job.rank[every]
    order = np.lexsort((np.arange(total), turn, ranks))
    bounds = np.searchsorted(ranks[order], np.arange(len(job.views) + 1))
    items = WriteItems(job.index[every].astype(np.int32), job.ndim[every], sizes)
    return [items.take(order[start:stop]) for start, stop in pairwise(bounds)]


def _box(job: JobTable, row: int) -> Box:
    ndim = int(job.ndim[row])
    offset, shape = (tuple(size[row, :ndim].tolist()) for size in job.sizes[:2])
    return Box(offset, shape)


class _Candidates:
    """Who may write each distinct box with data.

    Attributes:
        rows: Rows of the job's table, those of one box side by side in rank order.
        starts: Where those of each box begin, ``[b]``.
        counts: How many there are, ``[b]``: 0 if nobody may.
    """

    def __init__(self, job: JobTable) -> None:
        """Look at the holders of each box: the strictest rule of any of them counts."""
        boxes = job.boxes_with_data
        flags = job.flags[boxes.rows]
        box = np.repeat(np.arange(len(boxes.starts)), boxes.counts)
        rule = np.full(len(boxes.starts), len(WRITERS), dtype=np.int64)
        np.minimum.at(rule, box, (flags >> 2 & 3).astype(np.int64))
        may = np.ones(len(flags), dtype=bool)
        may[rule[box] == 0] = ((flags & MAIN) != 0)[rule[box] == 0]
        # One of a rank, and of all where the rule says so: the first.
        rank = job.rank[boxes.rows]
        again = np.zeros(len(flags), dtype=bool)
        again[1:] = (box[1:] == box[:-1]) & (rank[1:] == rank[:-1])
        may &= ~(again & (rule[box] == WRITERS.index("any")))
        kept = np.flatnonzero(may)
        if len(kept):
            place = np.zeros(len(kept), dtype=bool)
            place[1:] = box[kept[1:]] == box[kept[:-1]]
            kept = kept[~(place & (rule[box[kept]] != WRITERS.index("any")))]
        self.rows = boxes.rows[kept]
        self.counts = np.bincount(box[kept], minlength=len(boxes.starts))
        self.starts = np.append(0, np.cumsum(self.counts))[:-1]

    def of(self, number: int) -> NDArray[Any]:
        """Return the rows of those who may write a box."""
        start = self.starts[number]
        found: NDArray[Any] = self.rows[start : start + self.counts[number]]
        return found


def writers_of_boxes(
    views: JobTable | Sequence[Sequence[ShardInfo]],
) -> Iterator[tuple[str, Box, tuple[tuple[int, int], ...]]]:
    """Yield each distinct box with elements, sorted, and who may write it.

    Yields ``(key, box, writers)``; a writer is ``(rank, index of the shard on that rank)``, in rank
    order. Boxes that nobody writes are left out.
    """
    job = JobTable.of(views)
    chosen = _Candidates(job)
    for number, row in enumerate(job.boxes_with_data.first.tolist()):
        holders = chosen.of(number)
        if len(holders):
            writers = zip(job.rank[holders].tolist(), job.index[holders].tolist(), strict=True)
            yield job.keys[job.key[row]], _box(job, row), tuple(writers)
