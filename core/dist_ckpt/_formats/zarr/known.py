"""Arrays of plain bytes as runs of bytes in files: the way most of a load goes.

Here: which cells have the elements of which boxes, column by column, and reading them. Not here:
arrays in other layouts and boxes that are no runs (``read``, which also finds words for what is
wrong). Runs on every rank for its own boxes.

Nothing is believed that ``read`` does not believe: documents are word for word what this format
writes, files have the size that their cells need, and the index in each shard is compared with what
it must be. All of it is compared with the checksums of the manifest; without those, nothing is read
here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from dist_ckpt._formats.spans import Spans
from dist_ckpt._formats.torch_dist.runs import Memory, read_runs
from dist_ckpt._formats.zarr.described import Documents
from dist_ckpt._formats.zarr.slices import Cell, cells_in
from dist_ckpt._sharding.overlaps import matrix
from dist_ckpt._sharding.wanted import Runs, beside, runs_of
from dist_ckpt.box import Box
from dist_ckpt.errors import CheckpointNotFoundError, CorruptedCheckpointError
from dist_ckpt.storage.transfer import run_jobs

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from dist_ckpt._formats.verification import VerifiedStore
    from dist_ckpt._sharding.columns import Stored
    from dist_ckpt._sharding.index import StoredTensor
    from dist_ckpt._sharding.wanted import Wanted

__all__ = ["read_known"]

_SMALL_NBYTES = 1 << 22
"""Files from which less is wanted are read several a job."""

_JOB_NBYTES = 1 << 23
_FILES_OF_A_JOB = 64

_ENCODINGS = ("zarr2", "zarr3")


def read_known(
    wanted: Wanted,
    address: NDArray[np.int64],
    chosen: NDArray[np.bool_],
    tensors: Mapping[str, StoredTensor],
    store: VerifiedStore,
    *,
    thread_count: int,
) -> tuple[int, NDArray[np.bool_]]:
    """Fill boxes that are runs of bytes in the files of arrays that are laid out as we do.

    Args:
        wanted: Boxes.
        address: Where the elements of each box go, ``[n]``: plain memory of the stored dtype.
        chosen: Which boxes to fill, if that can be done here, ``[n]``.
        tensors: Those of the index.
        store: The checkpoint's files.
        thread_count: Most jobs at a time.

    Returns:
        The number of bytes, and which boxes were filled, ``[n]``. The memory of others may have
        been written: if anything is not as it must be, it is left to those who say what.

    Raises:
        StorageError: The file system failed.
    """
    chosen = chosen & wanted.is_complete & ~wanted.is_cut
    nothing = 0, np.zeros(len(chosen), dtype=bool)
    try:
        cells = _cells(wanted, chosen, tensors, store)
        runs, filled = runs_of(beside(wanted, cells.stored(wanted.stored)), chosen)
        if not len(runs.file):
            return nothing
        nbytes = int(runs.nbytes.sum())
        if not _read(cells, runs, address, store, thread_count=thread_count):
            return nothing
    except (CheckpointNotFoundError, CorruptedCheckpointError):
        return nothing
    return nbytes, filled


@dataclass(frozen=True, slots=True)
class _Cells:
    """Columns of cells: number of the tensor, file, what is in it."""

    tensor: list[int] = field(default_factory=list)
    name: list[str] = field(default_factory=list)
    cell: list[Cell] = field(default_factory=list)

    def stored(self, like: Stored) -> Stored:
        """Return the cells as what is stored; tensors without any are not there."""
        count, depth = len(self.tensor), like.whole.shape[1]
        tensor = np.array(self.tensor, dtype=np.int64)
        is_there = np.zeros(len(like.keys), dtype=bool)
        is_there[tensor] = True
        return replace(
            like,
            is_there=is_there,
            is_raw=is_there,
            files=self.name,
            tensor=tensor,
            offset=matrix([one.held.offset for one in self.cell], depth, fill=0),
            shape=matrix([one.extents for one in self.cell], depth, fill=1),
            file=np.arange(count, dtype=np.int64),
            position=np.zeros(count, dtype=np.int64),
        )


def _cells(
    wanted: Wanted,
    chosen: NDArray[np.bool_],
    tensors: Mapping[str, StoredTensor],
    store: VerifiedStore,
) -> _Cells:
    """Return the cells that have elements of the chosen boxes, of arrays that are known."""
    found, documents = _Cells(), Documents(store)
    # Arrays with the same document, of which the same is wanted, have the same cells.
    alike: dict[tuple[Any, ...], list[Cell]] = {}
    for number, boxes in _boxes(wanted, chosen).items():
        key = wanted.stored.keys[number]
        stored = tensors[key]
        if not stored.chunks or stored.chunks[0].encoding not in _ENCODINGS:
            continue
        described = documents.shared(key, stored)
        if described is None or not (described.is_ours and described.files.is_plain):
            continue
        told = id(described), boxes  # `documents` keeps it
        cells = alike.get(told)
        if cells is None:
            files = replace(described.files, path="")
            extents = zip(stored.shape, files.cell, strict=True)
            if math.prod(-(-n // c) for n, c in extents) > store.file_count:
                continue
            cells = alike[told] = list(cells_in(stored, boxes, files))
        path = stored.chunks[0].file
        names = [path + cell.name for cell in cells]
        if _are_as_long(store, names, cells):
            found.tensor.extend([number] * len(cells))
            found.name.extend(names)
            found.cell.extend(cells)
    return found


def _boxes(wanted: Wanted, chosen: NDArray[np.bool_]) -> dict[int, tuple[Box, ...]]:
    """Return the chosen boxes of each tensor, by its number."""
    rows = np.flatnonzero(chosen)
    tensor = wanted.tensor[rows]
    columns = (tensor, wanted.stored.ndim[tensor], wanted.offset[rows], wanted.shape[rows])
    known: dict[tuple[tuple[int, ...], tuple[int, ...]], Box] = {}
    found: dict[int, tuple[Box, ...]] = {}
    for number, ndim, offset, shape in zip(*(one.tolist() for one in columns), strict=True):
        place = tuple(offset[:ndim]), tuple(shape[:ndim])
        if place not in known:
            known[place] = Box(*place)
        found[number] = (*found.get(number, ()), known[place])
    return found


def _are_as_long(store: VerifiedStore, names: Sequence[str], cells: Sequence[Cell]) -> bool:
    """Whether the manifest says that files are just as long as their cells."""
    for name, cell in zip(names, cells, strict=True):
        found = store.sum_of(name)
        if found is None or found.nbytes != cell.nbytes + len(cell.index):
            return False
    return True


# -- reading


def _read(
    cells: _Cells,
    runs: Runs,
    address: NDArray[np.int64],
    store: VerifiedStore,
    *,
    thread_count: int,
) -> bool:
    """Read runs, and the index of each file that they are in; whether all of these are right."""
    reach = np.zeros(len(cells.name), dtype=np.int64)
    np.maximum.at(reach, runs.file, runs.position + runs.nbytes)
    file, ends = _indexes(cells, np.unique(runs.file))
    found = np.zeros(len(ends.expected), dtype=np.uint8)
    columns = [
        np.concatenate(pair)
        for pair in (
            (runs.file, file),
            (runs.position, ends.position),
            (runs.nbytes, ends.nbytes),
            (address[runs.box] + runs.start, found.ctypes.data + ends.start),
        )
    ]
    # An index far from all that is wanted is read alone, and not the block that it is in: it is
    # compared with what it must be.
    is_apart = np.arange(len(columns[0])) >= len(runs.file)
    is_apart &= reach[columns[0]] < columns[1]
    weight = np.bincount(runs.file, weights=runs.nbytes, minlength=len(cells.name))
    is_large = (weight >= _SMALL_NBYTES)[columns[0]] & ~is_apart
    _read_large(cells, columns, np.flatnonzero(is_large), store, thread_count=thread_count)
    jobs = [
        job
        for source, rows in ((store, ~is_large & ~is_apart), (store.bare, is_apart))
        for job in _jobs(source, runs.files, _in_order(columns, np.flatnonzero(rows)))
    ]
    run_jobs(jobs, thread_count=thread_count, name="dist_ckpt-read")
    return found.tobytes() == ends.expected


def _read_large(
    cells: _Cells,
    columns: Sequence[NDArray[Any]],
    rows: NDArray[np.intp],
    store: VerifiedStore,
    *,
    thread_count: int,
) -> None:
    """Read what several threads may share."""
    file, position, nbytes, memory = (column[rows] for column in columns)
    read_runs(
        Runs(cells.name, file, position, nbytes, rows, rows),
        Memory(memory, lambda run: cells.name[int(file[run])]),
        store,
        thread_count=thread_count,
    )


def _in_order(columns: Sequence[NDArray[Any]], rows: NDArray[np.intp]) -> list[list[int]]:
    """Return rows of columns in the order of the first two: files, and positions in them."""
    rows = rows[np.lexsort((columns[1][rows], columns[0][rows]))]
    return [column[rows].tolist() for column in columns]


@dataclass(frozen=True, slots=True, eq=False)
class _Ends:
    """What stands behind cells: where in the file, where in ``expected``, and how many bytes."""

    position: NDArray[np.int64]
    start: NDArray[np.int64]
    nbytes: NDArray[np.int64]
    expected: bytes


def _indexes(cells: _Cells, files: NDArray[np.int64]) -> tuple[NDArray[np.int64], _Ends]:
    """Return which of the files have an index behind their cell, and these."""
    numbers = [number for number in files.tolist() if cells.cell[number].index]
    position = [cells.cell[number].nbytes for number in numbers]
    expected = [cells.cell[number].index for number in numbers]
    nbytes = np.array([len(one) for one in expected], dtype=np.int64)
    return np.array(numbers, dtype=np.int64), _Ends(
        np.array(position, dtype=np.int64), np.cumsum(nbytes) - nbytes, nbytes, b"".join(expected)
    )


def _jobs(
    store: VerifiedStore,
    files: Sequence[str],
    columns: Sequence[list[int]],
) -> list[Callable[[Callable[[], None]], None]]:
    """Return jobs that read a few files each.

    Args:
        store: The checkpoint's files.
        files: Their names.
        columns: Number of the file, position, number of bytes and address of each run, in the order
            of files and positions.
    """
    file, *spans = columns
    nbytes = spans[1]
    jobs: list[Callable[[Callable[[], None]], None]] = []
    batch: list[tuple[str, Spans]] = []
    begun = total = 0
    for end in range(1, len(file) + 1):
        if end < len(file) and file[end] == file[begun]:
            continue
        batch.append((files[file[begun]], Spans(*(column[begun:end] for column in spans))))
        total, begun = total + sum(nbytes[begun:end]), end
        if total >= _JOB_NBYTES or len(batch) == _FILES_OF_A_JOB or end == len(file):
            jobs.append(_job(store, batch))
            batch, total = [], 0
    return jobs


def _job(
    store: VerifiedStore, batch: Sequence[tuple[str, Spans]]
) -> Callable[[Callable[[], None]], None]:
    def read(check: Callable[[], None]) -> None:
        for name, spans in batch:
            check()
            store.read_spans(name, spans)

    return read
