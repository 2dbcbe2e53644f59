"""A rank's cells -> files of arrays.

Here: the jobs that put down pieces and write cells. Not here: which (``plan``), TensorStore
(``arrays``), threads (``_engine.transfer``). Runs on every rank for its own work; ranks meet only
between putting down and writing.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

import torch

from dist_ckpt._checksums import FileSum, sum_of_file
from dist_ckpt._engine.memory import Scratch, bits, fill_zero, host_bytes, pieces_for_write
from dist_ckpt._engine.transfer import run_jobs
from dist_ckpt._formats.base import WriteJob, WriteResult, Written
from dist_ckpt._formats.zarr.arrays import Arrays, host_array
from dist_ckpt._formats.zarr.grid import split_on_grid
from dist_ckpt._formats.zarr.metadata import array_metadata
from dist_ckpt._formats.zarr.names import chunk_name, pieces_name
from dist_ckpt._planning.describe import dtype_from_name
from dist_ckpt._planning.index import StoredChunk
from dist_ckpt.errors import CheckpointingException
from dist_ckpt.storage import Extent, open_store
from dist_ckpt.storage.local import storage_errors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from dist_ckpt._formats.zarr.plan import Array, RankWork, Received, SharedCell
    from dist_ckpt._geometry import Box
    from dist_ckpt._planning.distribution import WriteItem
    from dist_ckpt._planning.index import Encoding

__all__ = ["pass_on_pieces", "write_cells"]

FILES_OF_A_THREAD = 16
"""Small files that one thread has the file system write at a time."""

_BATCH_NBYTES = 8 << 20
"""Most that those files have together; a larger one is alone."""


def pass_on_pieces(job: WriteJob) -> None:
    """Put down, in one file, what other ranks write of this rank's shards.

    Raises:
        StorageError: Naming the file.
    """
    items: Sequence[WriteItem] = job.work.passed_on
    if not items:
        return
    views = [_view(job, item) for item in items]
    nbytes = sum(view.numel() * view.element_size() for view in views)
    open_store(job.directory).write(pieces_name(job.rank), _extents(views), nbytes=nbytes)


def _extents(views: Sequence[torch.Tensor]) -> Iterator[Extent]:
    scratch, start = Scratch(), 0
    for view in views:
        for offset, piece in pieces_for_write(view, scratch):
            yield Extent(start + offset, host_bytes(piece))
        start += view.numel() * view.element_size()


def write_cells(job: WriteJob, zarr_format: int) -> Written:
    """Write this rank's cells and return their files and boxes.

    Besides the state, each of ``thread_count`` threads holds a cell, or a batch of small ones: none
    if it is host memory as it is, strided or not.

    Raises:
        StorageError: Naming the key that was being written.
    """
    work: RankWork = job.work
    writer = _Writer(job, zarr_format)
    cells = [
        writer.whole(array, item, box)
        for array, item in work.whole
        for box in split_on_grid(item.box, array.grid.cell, array.itemsize, 1)
    ]
    cells += [writer.shared(shared) for shared in work.shared]
    files = run_jobs(
        [_batch_job(batch) for batch in _batches(cells)],
        thread_count=job.thread_count,
        name="dist_ckpt-write",
    )
    results = [writer.result(array, item.shard, item.box) for array, item in work.whole]
    for shared in work.shared:
        boxes = [*(part.box for part in shared.own), *(part.box for part in shared.received)]
        results += [writer.result(shared.array, shared.own[0].shard, box) for box in boxes]
    return Written(files=dict(file for batch in files for file in batch), results=results)


_Finish: TypeAlias = "Callable[[], tuple[str, FileSum]]"
"""Waits until a cell is durable; returns its file and the file's checksums."""


@dataclass(frozen=True, slots=True)
class _Cell:
    """A cell to be written: ``start`` begins and returns at once."""

    nbytes: int
    start: Callable[[], _Finish]


def _batches(cells: Sequence[_Cell]) -> Iterator[list[_Cell]]:
    """Put small cells together: waiting for the disk, not writing, is what they cost."""
    batch: list[_Cell] = []
    nbytes = 0
    for cell in cells:
        if batch and (nbytes + cell.nbytes > _BATCH_NBYTES or len(batch) == FILES_OF_A_THREAD):
            yield batch
            batch, nbytes = [], 0
        batch.append(cell)
        nbytes += cell.nbytes
    if batch:
        yield batch


def _batch_job(batch: Sequence[_Cell]) -> Callable[[Callable[[], None]], list[tuple[str, FileSum]]]:
    def write(check: Callable[[], None]) -> list[tuple[str, FileSum]]:
        check()
        begun: list[_Finish] = []
        try:
            begun.extend(cell.start() for cell in batch)
            return [finish() for finish in begun]
        except BaseException:
            # Nobody writes behind the caller's back: what has begun ends before the error is told.
            for finish in begun:
                with suppress(CheckpointingException):
                    finish()
            raise

    return write


class _Writer:
    """What the cells of one write share."""

    def __init__(self, job: WriteJob, zarr_format: int) -> None:
        self._job, self._zarr_format = job, zarr_format
        self._arrays = Arrays(job.directory, job.thread_count * FILES_OF_A_THREAD)
        self._store = open_store(job.directory)

    def whole(self, array: Array, item: WriteItem, box: Box) -> _Cell:
        """Return a cell that comes from one shard of this rank."""

        def start() -> _Finish:
            view = _view(self._job, replace(item, box=box))
            if view.device.type != "cpu" or view.is_conj() or view.is_neg():
                bounce = torch.empty(box.shape, dtype=view.dtype)
                _copy_bits(bounce, view)
                view = bounce
            return self._start(array, item.shard, box, view)

        return _Cell(box.numel * array.itemsize, start)

    def shared(self, shared: SharedCell) -> _Cell:
        """Return a cell that is put together from this rank's shards and from other ranks'."""

        def start() -> _Finish:
            cell = torch.empty(shared.box.shape, dtype=dtype_from_name(shared.array.dtype))
            fill_zero(cell)
            for item in shared.own:
                _copy_bits(_inside(cell, item.box, shared.box), _view(self._job, item))
            for received in shared.received:
                piece = torch.empty(received.box.shape, dtype=cell.dtype)
                self._fetch(received, piece)
                _copy_bits(_inside(cell, received.box, shared.box), piece)
            return self._start(shared.array, shared.own[0].shard, shared.box, cell)

        return _Cell(shared.box.numel * shared.array.itemsize, start)

    def _fetch(self, received: Received, piece: torch.Tensor) -> None:
        self._store.read_ranges(
            pieces_name(received.rank), [Extent(received.position, host_bytes(piece))]
        )

    def _start(self, array: Array, shard: int, box: Box, view: torch.Tensor) -> _Finish:
        key = self._job.shards[shard].info.key
        document = array_metadata(array.shape, array.dtype, array.grid, self._zarr_format)
        opened = self._arrays.open(array.path, document, key=key)
        wait = self._arrays.begin_write(opened, box, host_array(view), key=key)
        numbers = tuple(o // c for o, c in zip(box.offset, array.grid.cell, strict=True))
        name = f"{array.path}/{chunk_name(numbers, self._zarr_format)}"

        def finish() -> tuple[str, FileSum]:
            wait()
            path = self._job.directory / name
            with storage_errors("sum up", path):
                # TensorStore does not show what it writes: it is read back out of the page cache.
                return name, sum_of_file(path)

        return finish

    def result(self, array: Array, shard: int, box: Box) -> WriteResult:
        """Return the proof that ``box`` was written."""
        info = replace(self._job.shards[shard].info, box=box)
        encoding: Encoding = "zarr2" if self._zarr_format == 2 else "zarr3"  # noqa: PLR2004 - of zarr
        chunk = StoredChunk(box, array.path, 0, box.numel * array.itemsize, encoding)
        return WriteResult(info, chunk)


def _view(job: WriteJob, item: WriteItem) -> torch.Tensor:
    shard = job.shards[item.shard]
    assert shard.view is not None  # noqa: S101 - the plan gives work to holders of data only
    return _inside(shard.view, item.box, shard.info.box)


def _inside(view: torch.Tensor, box: Box, outer: Box) -> torch.Tensor:
    return view[box.relative_to(outer).slices()] if box.shape else view


def _copy_bits(target: torch.Tensor, source: torch.Tensor) -> None:
    with torch.no_grad():
        bits(target).copy_(bits(source.resolve_conj().resolve_neg()))
