"""A rank's work -> files of arrays.

Here: the jobs that put down pieces and write documents, cells and directories. Not here: which
(``plan``), the bytes of a cell (``cells``), threads (``storage.transfer``). Runs on every rank for
its own work; ranks meet only between putting down and writing.

An array is a directory with at least two files, most of them small: what they cost is waiting for
the disk, so that many wait together. What is large is written a file a thread.
"""

from __future__ import annotations

import math
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from dist_ckpt._formats.base import WriteJob, WriteResult, Written
from dist_ckpt._formats.zarr.cells import cell_bytes, shared_cell
from dist_ckpt._formats.zarr.grid import split_on_grid
from dist_ckpt._formats.zarr.layout import shard_index, stored_extents
from dist_ckpt._formats.zarr.metadata import array_metadata, encode_metadata, metadata_name
from dist_ckpt._formats.zarr.names import chunk_name, pieces_name
from dist_ckpt._sharding.assign import WriteItem
from dist_ckpt._sharding.index import StoredChunk
from dist_ckpt._staging_pool.memory import Scratch, host_bytes, pieces_for_write
from dist_ckpt.errors import CheckpointingException, StorageError
from dist_ckpt.storage import Extent, open_store
from dist_ckpt.storage.failures import storage_errors
from dist_ckpt.storage.transfer import run_jobs
from dist_ckpt.storage.trees import fsync_directory, make_folders

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    import torch

    from dist_ckpt._formats.zarr.grid import Grid
    from dist_ckpt._formats.zarr.plan import Array, RankWork, SharedCell
    from dist_ckpt._sharding.index import Encoding
    from dist_ckpt.box import Box
    from dist_ckpt.storage import FileWriter
    from dist_ckpt.storage.checksums import FileSum

__all__ = ["pass_on_pieces", "write_arrays"]

T = TypeVar("T")

_FILES_TOGETHER = 16
"""Small files that one thread has open at a time."""

_WAITING_THREADS = 8
"""For each thread that moves bytes, so many that mostly wait for small files."""

_TINY_NBYTES = 1 << 16
"""Up to here bytes and index of a cell are put together for one write."""

_SMALL_NBYTES = 1 << 20
"""A larger file is written alone: its bytes, not its name, are what it costs."""


def pass_on_pieces(job: WriteJob) -> None:
    """Put down, in one file, what other ranks write of this rank's shards.

    Raises:
        StorageError: Naming the file.
    """
    items: Sequence[WriteItem] = job.work.passed_on
    if not items:
        return
    views = [job.shards.part(item.shard, item.box) for item in items]
    nbytes = sum(view.numel() * view.element_size() for view in views)
    open_store(job.directory).write(pieces_name(job.rank), _extents(views), nbytes=nbytes)


def _extents(views: Sequence[torch.Tensor]) -> Iterator[Extent]:
    scratch, start = Scratch(), 0
    for view in views:
        for offset, piece in pieces_for_write(view, scratch):
            yield Extent(start + offset, host_bytes(piece))
        start += view.numel() * view.element_size()


def write_arrays(job: WriteJob, zarr_format: int) -> Written:
    """Write this rank's documents and cells, durably; return their files and boxes.

    Besides the state, each thread holds a cell that it puts together, or a piece of one that is not
    plain host memory.

    Raises:
        StorageError: Naming the key that was being written.
    """
    work: RankWork = job.work
    files = _Files(job, zarr_format)
    folders = _make_folders(job.directory, _arrays(work))
    every = [files.document(array) for array in work.documents]
    every += [
        files.whole(array, item, box)
        for array, item in work.whole
        for box in split_on_grid(item.box, array.grid.cell, array.itemsize, 1)
    ]
    every += [files.shared(shared) for shared in work.shared]
    files.open(job.pages.begin([(file.name, file.nbytes) for file in every]))
    few, many = job.thread_count, job.thread_count
    if job.thread_count > 1:
        many *= _WAITING_THREADS
    large = [[file] for file in every if file.nbytes > _SMALL_NBYTES]
    small = _batches([file for file in every if file.nbytes <= _SMALL_NBYTES])
    written = [
        *run_jobs(list(map(files.job, large)), thread_count=few, name="dist_ckpt-write"),
        *run_jobs(list(map(files.job, small)), thread_count=many, name="dist_ckpt-write"),
    ]
    syncs = list(map(_sync_job, _batches(folders)))
    run_jobs(syncs, thread_count=many, name="dist_ckpt-write")
    found = dict(one for batch in written for one in batch)
    return Written(files=found, results=list(_results(job, zarr_format)))


def _arrays(work: RankWork) -> Iterator[Array]:
    yield from work.documents
    yield from (array for array, _ in work.whole)
    yield from (shared.array for shared in work.shared)


def _make_folders(directory: Path, arrays: Iterable[Array]) -> list[Path]:
    """Make the arrays' directories; return them and those above, the innermost first.

    Several ranks may make the same ones: each syncs all in which it has made names.
    """
    paths = dict.fromkeys(array.path for array in arrays)
    above = dict.fromkeys(path[:at] for path in paths for at in _slashes(path))
    make_folders(directory, sorted((*above, *paths)))  # the outer ones first
    return [directory / path for path in sorted((*above, *paths), reverse=True)] + [directory]


def _slashes(path: str) -> Iterator[int]:
    return (at for at, letter in enumerate(path) if letter == "/")


def _batches(items: Sequence[T]) -> Iterator[Sequence[T]]:
    return (items[at : at + _FILES_TOGETHER] for at in range(0, len(items), _FILES_TOGETHER))


def _sync_job(folders: Sequence[Path]) -> Callable[[Callable[[], None]], None]:
    def sync(check: Callable[[], None]) -> None:
        for folder in folders:
            check()
            with storage_errors("sync", folder):
                fsync_directory(folder)

    return sync


@dataclass(frozen=True, slots=True)
class _File:
    """A file to be written; ``parts`` are its bytes, each void when the next comes."""

    key: str
    name: str
    nbytes: int
    parts: Callable[[Scratch], Iterable[tuple[int, memoryview]]]


class _Files:
    """What the files of one write share."""

    def __init__(self, job: WriteJob, zarr_format: int) -> None:
        self._job, self._zarr_format = job, zarr_format
        self._store = open_store(job.directory)  # to read what others have put down
        # Most arrays of a model have one of a few shapes, and then the same of both.
        self._documents: dict[tuple[object, ...], bytes] = {}
        self._indexes: dict[tuple[object, ...], bytes] = {}

    def open(self, keeps_pages: bool) -> None:  # noqa: FBT001 - one argument
        """Get ready to write."""
        self._store = open_store(self._job.directory, keeps_pages=keeps_pages)

    def document(self, array: Array) -> _File:
        """Return the metadata of an array."""
        told = array.shape, array.dtype, array.grid
        data = self._documents.get(told)
        if data is None:
            data = encode_metadata(array_metadata(*told, self._zarr_format))
            self._documents[told] = data
        name = f"{array.path}/{metadata_name(self._zarr_format)}"
        return _File(array.path, name, len(data), lambda _: ((0, memoryview(data)),))

    def whole(self, array: Array, item: WriteItem, box: Box) -> _File:
        """Return a cell that comes from one shard of this rank."""
        return self._cell(array, item.shard, box, lambda: self._job.shards.part(item.shard, box))

    def shared(self, shared: SharedCell) -> _File:
        """Return a cell that is put together from this rank's shards and from other ranks'."""
        shard = shared.own[0].shard
        make = lambda: shared_cell(self._job, shared, self._store)  # noqa: E731 - see `whole`
        return self._cell(shared.array, shard, shared.box, make)

    def _cell(self, array: Array, shard: int, box: Box, view: Callable[[], torch.Tensor]) -> _File:
        grid, itemsize = array.grid, array.itemsize
        stored = stored_extents(box.shape, grid.inner)
        nbytes = math.prod(stored) * itemsize
        index = b""
        if self._zarr_format == 3:  # noqa: PLR2004 - of zarr
            index = self._index(grid, box.shape, itemsize)

        def parts(scratch: Scratch) -> Iterator[tuple[int, memoryview]]:
            if nbytes > _TINY_NBYTES:
                yield from cell_bytes(view(), stored, scratch)
                yield nbytes, memoryview(index)
            else:
                data = bytearray(nbytes) + index
                for position, piece in cell_bytes(view(), stored, scratch):
                    data[position : position + piece.nbytes] = piece
                yield 0, memoryview(data)

        numbers = tuple(o // c for o, c in zip(box.offset, grid.cell, strict=True))
        name = f"{array.path}/{chunk_name(numbers, self._zarr_format)}"
        return _File(_key(self._job, shard), name, nbytes + len(index), parts)

    def _index(self, grid: Grid, extent: tuple[int, ...], itemsize: int) -> bytes:
        told = grid, extent, itemsize
        if told not in self._indexes:
            self._indexes[told] = shard_index(grid.cell, grid.inner, extent, itemsize)
        return self._indexes[told]

    def job(
        self, files: Sequence[_File]
    ) -> Callable[[Callable[[], None]], list[tuple[str, FileSum]]]:
        """Return what writes files, then waits for all of them: the disk syncs them together."""

        def write(check: Callable[[], None]) -> list[tuple[str, FileSum]]:
            begun: list[FileWriter] = []
            scratch, found = Scratch(), []
            try:
                for file in files:
                    check()
                    with _naming(file):
                        begun.append(self._store.writer(file.name, nbytes=file.nbytes))
                        for position, data in file.parts(scratch):
                            begun[-1].write_at(position, data)
                for file, writer in zip(files, begun, strict=True):
                    check()
                    with _naming(file):
                        found.append((file.name, writer.finish()))
            finally:
                for writer in begun:
                    writer.abandon()
            return found

        return write


@contextmanager
def _naming(file: _File) -> Iterator[None]:
    try:
        yield
    except CheckpointingException as error:
        raise StorageError(f"cannot write {file.key!r}: {error}") from error


def _key(job: WriteJob, shard: int) -> str:
    table = job.shards.table
    key: str = table.keys[table.key[shard]]
    return key


def _results(job: WriteJob, zarr_format: int) -> Iterator[WriteResult]:
    """Yield the proof of each box that was written."""
    work: RankWork = job.work
    encoding: Encoding = "zarr2" if zarr_format == 2 else "zarr3"  # noqa: PLR2004 - of zarr
    done = [(array, item.shard, item.box) for array, item in work.whole]
    for shared in work.shared:
        boxes = (*(part.box for part in shared.own), *(part.box for part in shared.received))
        done += [(shared.array, shared.own[0].shard, box) for box in boxes]
    for array, shard, box in done:
        info = job.shards.table[shard]
        if info.box != box:
            info = replace(info, box=box)
        yield WriteResult(
            info, StoredChunk(box, array.path, 0, box.numel * array.itemsize, encoding)
        )
