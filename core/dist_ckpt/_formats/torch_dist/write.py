"""Boxes of this rank -> data files, bytes straight from the tensors' memory.

Here: the bytes of each planned file in order, and the jobs that write them. Not here: their layout
(``layout``), threads (``storage.transfer``), files (``storage``), metadata. Runs on every rank for
its own boxes; no rank waits for another.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dist_ckpt._formats.torch_dist import sizes
from dist_ckpt._staging_pool.memory import Scratch, host_bytes, is_plain_memory, pieces_for_write
from dist_ckpt.errors import CheckpointingException, CoordinationError, StorageError
from dist_ckpt.storage import Extent, open_store
from dist_ckpt.storage.failures import storage_errors
from dist_ckpt.storage.paths import is_directory
from dist_ckpt.storage.transfer import run_jobs
from dist_ckpt.storage.trees import fsync_directory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from dist_ckpt._formats.torch_dist.layout import PlannedFile
    from dist_ckpt._sharding.table import LocalShards
    from dist_ckpt.storage import Store
    from dist_ckpt.storage.checksums import FileSum
    from dist_ckpt.storage.page_cache import PagePolicy

__all__ = ["WrittenFile", "extents_of", "write_durably", "write_shards"]


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """A data file that is complete and durable."""

    name: str
    found: FileSum


def write_shards(
    shards: LocalShards,
    files: Sequence[PlannedFile],
    store: Store,
    *,
    thread_count: int,
) -> list[WrittenFile]:
    """Write this rank's files and return what was written, file by file.

    Raises:
        StorageError: Naming the file and the key that was being written.
    """
    jobs = [_file_job(store, file, shards) for file in files]
    return run_jobs(jobs, thread_count=thread_count, name="dist_ckpt-write")


def write_durably(
    shards: LocalShards,
    files: Sequence[PlannedFile],
    directory: Path,
    *,
    thread_count: int,
    rank: int,
    pages: PagePolicy,
) -> dict[str, FileSum]:
    """Write this rank's files into an existing directory, names and all; return their checksums.

    Raises:
        StorageError: As ``write_shards``; or the directory is not there for this rank.
        CoordinationError: A file was not written.
    """
    if not is_directory(directory):
        raise StorageError(
            f"{directory} was made by rank 0 but is not there for rank {rank}.",
            hint="the checkpoint directory must be on a file system that all ranks share.",
        )
    keeps_pages = pages.begin([(file.name, file.nbytes) for file in files])
    store = open_store(directory, keeps_pages=keeps_pages)
    written = write_shards(shards, files, store, thread_count=thread_count)
    with storage_errors("sync", directory):
        fsync_directory(directory)
    found = {file.name: file.found for file in written}
    if missing := [file.name for file in files if file.name not in found]:
        raise CoordinationError(
            f"{len(files)} files were planned for rank {rank}; not written: {', '.join(missing)}"
        )
    return found


def _file_job(
    store: Store, file: PlannedFile, shards: LocalShards
) -> Callable[[Callable[[], None]], WrittenFile]:
    def write(check: Callable[[], None]) -> WrittenFile:
        at: list[int] = []
        try:
            extents = extents_of(file, shards, check, at)
            found = store.write(file.name, extents, nbytes=file.nbytes)
        except CheckpointingException as error:
            key = f" while writing {file.key_of(at[-1])!r}" if at else ""
            raise StorageError(f"{file.name}{key}: {error}") from error
        return WrittenFile(file.name, found)

    return write


class _Gathered:
    """Bytes that follow each other in a file, on their way to be written together."""

    def __init__(self) -> None:
        self._memory = bytearray(sizes.GATHERED_NBYTES)
        self._view = memoryview(self._memory)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._start, self._used = 0, 0

    @property
    def end(self) -> int:
        """Position in the file behind all that was put in."""
        return self._start + self._used

    def has_room(self, nbytes: int) -> bool:
        return self._used + nbytes <= len(self._memory)

    def put(self, data: bytes) -> None:
        end = self._used + len(data)
        self._view[self._used : end] = data  # raises ValueError if it does not fit
        self._used = end

    def put_memory(self, address: int, nbytes: int) -> None:
        # memmove checks nothing: what does not fit would overwrite somebody else's memory.
        if not self.has_room(nbytes):
            raise ValueError(f"{nbytes} bytes do not fit in a buffer of {len(self._memory)}")
        ctypes.memmove(self._address + self._used, address, nbytes)
        self._used += nbytes

    def pad(self, gap: int) -> Iterator[Extent]:
        """Put any number of zeros and yield all that was put in."""
        while gap:
            count = min(gap, len(self._memory) - self._used)
            self.put(bytes(count))
            gap -= count
            if not self.has_room(1):
                yield from self.taken()
        yield from self.taken()

    def taken(self) -> Iterator[Extent]:
        """Yield what was put in, if anything was; the memory is used again after that."""
        if self._used:
            yield Extent(self._start, self._view[: self._used])
        self._start, self._used = self._start + self._used, 0

    def leave_out(self, nbytes: int) -> None:
        """Go on behind bytes that are written by themselves."""
        self._start += nbytes


def extents_of(
    file: PlannedFile,
    shards: LocalShards,
    check: Callable[[], None] = lambda: None,
    at: list[int] | None = None,
) -> Iterator[Extent]:
    """Yield the bytes of a file, in order and without a gap.

    An extent is void when the next one comes.

    Args:
        file: What to write.
        shards: This rank's, with data.
        check: Called between tensors; stops the job by raising.
        at: Gets the number of the item that is being read.
    """
    scratch, gathered = Scratch(), _Gathered()
    at = [] if at is None else at
    at.append(0)
    numbers = file.items.shard.tolist()
    rows = zip(numbers, file.frames, file.payloads, file.is_whole, strict=True)
    for number, (shard, frame, payload, is_whole) in enumerate(rows):
        check()
        at[0] = number
        data = shards.data[shard]
        head, nbytes, tail = frame.head, frame.nbytes, frame.tail
        gap = payload - len(head) - gathered.end
        needed = len(head) + min(nbytes, sizes.DIRECT_NBYTES) + len(tail)
        if not gathered.has_room(gap + needed):
            yield from gathered.pad(gap)
            gap = 0
        gathered.put(bytes(gap) + head)
        if nbytes < sizes.DIRECT_NBYTES and is_whole and data is not None and is_plain_memory(data):
            gathered.put_memory(data.data_ptr(), nbytes)
        else:
            yield from gathered.taken()
            for offset, piece in pieces_for_write(file.view_in(shards, number), scratch):
                yield Extent(payload + offset, host_bytes(piece))
            gathered.leave_out(nbytes)
        gathered.put(tail)
    yield from gathered.taken()
    at.clear()  # what fails from here on is of the whole file
