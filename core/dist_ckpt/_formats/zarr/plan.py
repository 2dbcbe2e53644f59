"""Who writes which cells of which arrays.

Here: the work of every rank, from the descriptions of all. Not here: grids (``grid``), names
(``names``), writing (``write``). Pure; runs on rank 0.

What a box has in whole cells is written by a rank that holds it. A cell that no box fills belongs
to the rank that has most of it; the other ranks put their pieces of it into a file first.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from dist_ckpt._formats.zarr.grid import (
    Grid,
    around,
    cell_box,
    cells_of,
    choose_grid,
    split_on_grid,
    whole_cells,
)
from dist_ckpt._formats.zarr.names import paths_of_keys
from dist_ckpt._sharding.assign import WriteItem, assign_writers, writers_of_boxes
from dist_ckpt._sharding.shard_info import dtype_from_name
from dist_ckpt._sharding.together import JobTable
from dist_ckpt.box import Box

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dist_ckpt._sharding.shard_info import ShardInfo

__all__ = ["Array", "RankWork", "Received", "SharedCell", "ZarrPlan", "plan_arrays"]


@dataclass(frozen=True, slots=True)
class Array:
    """An array to be made: where, for which tensors, on which grid."""

    path: str
    dtype: str
    shape: tuple[int, ...]
    grid: Grid

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return dtype_from_name(self.dtype).itemsize


@dataclass(frozen=True, slots=True)
class Received:
    """``box`` lies row-major at byte ``position`` of the file that ``rank`` put down."""

    rank: int
    position: int
    box: Box


@dataclass(frozen=True, slots=True)
class SharedCell:
    """A cell that its owner puts together from its own shards and from what others put down."""

    array: Array
    box: Box
    own: tuple[WriteItem, ...]
    received: tuple[Received, ...]


@dataclass(frozen=True, slots=True)
class RankWork:
    """What one rank does.

    Attributes:
        whole: Boxes of whole cells that it writes from its own shards.
        shared: Cells that it puts together.
        passed_on: Boxes that it puts down for other ranks, in this order.
        documents: Arrays whose metadata it writes: each array is in one rank's.
        barred: Names that files beside the arrays cannot have, the same for all ranks.
    """

    whole: tuple[tuple[Array, WriteItem], ...]
    shared: tuple[SharedCell, ...]
    passed_on: tuple[WriteItem, ...]
    documents: tuple[Array, ...] = ()
    barred: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ZarrPlan:
    """All arrays by key, those without elements too, and each rank's work."""

    arrays: Mapping[str, Array]
    work: tuple[RankWork, ...]


_Piece: TypeAlias = tuple[Box, tuple[tuple[int, int], ...]]
"""A box within one cell, with the ranks that hold it and their shards."""


def plan_arrays(views: JobTable | Sequence[Sequence[ShardInfo]], zarr_format: int) -> ZarrPlan:
    """Return the arrays and the work of all ranks; every element is written by exactly one.

    Args:
        views: Each rank's shards, in rank order; the boxes to be written do not overlap.
        zarr_format: 2 or 3.

    Depends on the descriptions alone.
    """
    job = JobTable.of(views)
    boxes: dict[str, list[_Piece]] = defaultdict(list)
    for key, box, writers in writers_of_boxes(job):
        boxes[key].append((box, writers))
    arrays = _arrays(job, boxes, zarr_format)
    items = assign_writers(job, split=partial(_split, arrays))
    shared: list[list[SharedCell]] = [[] for _ in job.views]
    passed_on: list[list[WriteItem]] = [[] for _ in job.views]
    position = [0] * len(job.views)
    for key, pieces in boxes.items():
        for cell, held in _borders(arrays[key], pieces):
            owner = _owner(held)
            own, received = [], []
            for box, writers in held:
                mine = [index for rank, index in writers if rank == owner]
                if mine:
                    own.append(WriteItem(mine[0], box))
                    continue
                rank, index = writers[0]
                received.append(Received(rank, position[rank], box))
                passed_on[rank].append(WriteItem(index, box))
                position[rank] += box.numel * arrays[key].itemsize
            shared[owner].append(SharedCell(arrays[key], cell, tuple(own), tuple(received)))
    whole = [
        tuple((arrays[table.keys[table.key[item.shard]]], item) for item in of_rank)
        for table, of_rank in zip(job.views, items, strict=True)
    ]
    documents = _documents(arrays, whole, shared)
    work = zip(whole, map(tuple, shared), map(tuple, passed_on), documents, strict=True)
    return ZarrPlan(arrays, tuple(RankWork(*one) for one in work))


def _documents(
    arrays: Mapping[str, Array],
    whole: Sequence[Iterable[tuple[Array, WriteItem]]],
    shared: Sequence[Iterable[SharedCell]],
) -> list[tuple[Array, ...]]:
    """Give each array's metadata to a rank that writes of it, or else to rank 0."""
    writers: dict[str, dict[int, None]] = defaultdict(dict)
    for rank, (of_rank, cells) in enumerate(zip(whole, shared, strict=True)):
        for path in (*(array.path for array, _ in of_rank), *(one.array.path for one in cells)):
            writers[path][rank] = None
    documents: list[list[Array]] = [[] for _ in whole]
    for array in arrays.values():
        few = min(writers.get(array.path, (0,)), key=lambda rank: len(documents[rank]))
        documents[few].append(array)
    return [tuple(of_rank) for of_rank in documents]


def _arrays(job: JobTable, boxes: Mapping[str, list[_Piece]], zarr_format: int) -> dict[str, Array]:
    told = {}
    for key, row in zip(job.keys, job.first_rows.tolist(), strict=True):
        shape = tuple(job.sizes[2, row, : job.ndim[row]].tolist())
        if key in boxes or 0 in shape:  # of others nothing is stored
            told[key] = shape, job.dtypes[job.dtype[row]]
    paths = paths_of_keys(told)
    arrays = {}
    for key, (shape, dtype) in sorted(told.items()):
        held = [box for box, _ in boxes.get(key, ())]
        grid = choose_grid(shape, held, dtype_from_name(dtype).itemsize, zarr_format)
        arrays[key] = Array(paths[key], dtype, shape, grid)
    return arrays


def _split(
    arrays: Mapping[str, Array], key: str, box: Box, itemsize: int, max_nbytes: int
) -> Iterable[Box]:
    array = arrays[key]
    inside = whole_cells(box, array.grid.cell, array.shape)
    return split_on_grid(inside, array.grid.cell, itemsize, max_nbytes) if inside else ()


def _borders(array: Array, held: Iterable[_Piece]) -> Iterator[tuple[Box, list[_Piece]]]:
    """Yield the cells that no box fills, in order, with what lies in each."""
    cells: dict[tuple[int, ...], list[_Piece]] = defaultdict(list)
    cell = array.grid.cell
    for box, writers in held:
        for part in around(box, whole_cells(box, cell, array.shape)):
            touched = list(cells_of(part, cell))
            for numbers in touched:
                inside = cell_box(numbers, cell, array.shape) if len(touched) > 1 else part
                piece = part.intersect(inside)
                if piece is not None:
                    cells[numbers].append((piece, writers))
    for numbers, pieces in sorted(cells.items()):
        yield cell_box(numbers, cell, array.shape), pieces


def _owner(pieces: Iterable[_Piece]) -> int:
    """Return the rank that has most of a cell, the lowest of several."""
    volume: dict[int, int] = defaultdict(int)
    for box, writers in pieces:
        for rank, _ in writers:
            volume[rank] += math.prod(box.shape)
    return min(volume, key=lambda rank: (-volume[rank], rank))
