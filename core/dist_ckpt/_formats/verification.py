"""Files of a checkpoint compared with the checksums in its manifest.

Here: a store that compares what it reads, and whole files looked through. Not here: the sums
themselves (``_checksums``), the manifest, who decides what is compared (``_loading``). Runs on
every rank, from transfer threads.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from heapq import heapreplace
from typing import TYPE_CHECKING

from dist_ckpt._checksums import BLOCK_NBYTES, FileSum, digest
from dist_ckpt._engine.transfer import run_jobs
from dist_ckpt.errors import CheckpointNotFoundError, CorruptedCheckpointError
from dist_ckpt.storage import Extent, open_store
from dist_ckpt.validation import shortened

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from dist_ckpt._formats.manifest import Manifest
    from dist_ckpt.storage import FileWriter, Store

__all__ = [
    "VerifiedStore",
    "check_data",
    "check_files",
    "shared_out",
    "verify_files",
    "verify_whole",
]

_CACHED_BLOCKS = 32
"""Blocks that are kept for the next read: neighbours share them, and threads read in file order."""

_READ_NBYTES = 4 * BLOCK_NBYTES
_POISON = b"\xff" * BLOCK_NBYTES
_HINT = "the file was altered after it was written; use another checkpoint."


class VerifiedStore:
    """A store that never hands out a block whose checksum is wrong.

    Args:
        store: Has the files.
        files: Their checksums; files that are not among them are read as they are.
        root: Where the files are, for messages.

    A wrong block may have been read straight into the caller's memory: it is overwritten with ones
    (no numbers, in a tensor of floats) before the error is raised.
    """

    def __init__(
        self, store: Store, files: Mapping[str, FileSum], root: Path | None = None
    ) -> None:
        """Remember what is to be compared with what."""
        self._store, self._files, self._root = store, files, root
        self._lock = threading.Lock()
        self._blocks: OrderedDict[tuple[str, int], bytes] = OrderedDict()
        self._whole: set[str] = set()

    def read_ranges(self, name: str, extents: Sequence[Extent]) -> None:
        """Fill the buffers of ``extents`` from ``name``.

        Raises:
            CorruptedCheckpointError: Names file, offset, the checksum that is expected and the one
                that is found.
        """
        found = self._files.get(name)
        if found is None:
            self._store.read_ranges(name, extents)
            return
        for extent in extents:
            self._fill(name, found, extent.position, memoryview(extent.buffer))

    def _told(self, name: str) -> str:
        return name if self._root is None else str(self._root / name)

    def _fill(self, name: str, found: FileSum, position: int, view: memoryview) -> None:
        if position + view.nbytes > found.nbytes:
            raise CorruptedCheckpointError(
                f"{self._told(name)}: bytes {position} to {position + view.nbytes} of a file of "
                f"{found.nbytes}."
            )
        done = 0
        while done < view.nbytes:
            number, inside = divmod(position + done, BLOCK_NBYTES)
            _, size = found.extent(number)
            rest = view.nbytes - done
            if inside == 0 and rest >= size:
                run = min(rest, _READ_NBYTES)
                nbytes = run if position + done + run == found.nbytes else run // size * size
                self._fill_whole(name, found, number, view[done : done + nbytes])
            else:
                nbytes = min(size - inside, rest)
                block = self._block(name, found, number)
                view[done : done + nbytes] = block[inside : inside + nbytes]
            done += nbytes

    def _fill_whole(self, name: str, found: FileSum, number: int, view: memoryview) -> None:
        """Read whole blocks straight to where they go."""
        self._store.read_ranges(name, [Extent(number * BLOCK_NBYTES, view)])
        for at in range(0, view.nbytes, BLOCK_NBYTES):
            block = view[at : at + BLOCK_NBYTES]
            problem = _problem(self._told(name), found, number, block)
            if problem:
                block[:] = _POISON[: block.nbytes]
                raise CorruptedCheckpointError(f"{problem}.", hint=_HINT)
            number += 1

    def _block(self, name: str, found: FileSum, number: int) -> bytes:
        with self._lock:
            block = self._blocks.get((name, number))
            if block is not None:
                self._blocks.move_to_end((name, number))
                return block
        start, nbytes = found.extent(number)
        buffer = bytearray(nbytes)
        self._store.read_ranges(name, [Extent(start, memoryview(buffer))])
        problem = _problem(self._told(name), found, number, buffer)
        if problem:
            raise CorruptedCheckpointError(f"{problem}.", hint=_HINT)
        block = bytes(buffer)
        with self._lock:
            self._blocks[name, number] = block
            while len(self._blocks) > _CACHED_BLOCKS:
                self._blocks.popitem(last=False)
        return block

    def verify_whole(self, name: str) -> None:
        """Compare a whole file, once: for those who let others read it.

        Raises:
            CorruptedCheckpointError: It is not as it was written.
        """
        found = self._files.get(name)
        with self._lock:
            if found is None or name in self._whole:
                return
        problem = verify_whole(self._store, name, found)
        if problem:
            told = problem if self._root is None else f"{self._root}: {problem}"
            raise CorruptedCheckpointError(f"{told}.", hint=_HINT)
        with self._lock:
            self._whole.add(name)

    def read(self, name: str, *, max_nbytes: int) -> bytes:
        """Return a whole small file, compared."""
        data = self._store.read(name, max_nbytes=max_nbytes)
        check_data(self._told(name), data, self._files.get(name))
        return data

    # -- what needs no comparing

    def writer(self, name: str, *, nbytes: int) -> FileWriter:
        """Create a file."""
        return self._store.writer(name, nbytes=nbytes)

    def write(self, name: str, extents: Iterable[Extent], *, nbytes: int) -> FileSum:
        """Create a file."""
        return self._store.write(name, extents, nbytes=nbytes)

    def create(self, name: str, data: bytes) -> FileSum:
        """Create a small file."""
        return self._store.create(name, data)

    def list(self) -> list[str]:
        """Return the names of the files."""
        return self._store.list()

    def delete(self, name: str) -> None:
        """Remove a file."""
        self._store.delete(name)

    def nbytes(self, name: str) -> int | None:
        """Return the size of a file."""
        return self._store.nbytes(name)


def _problem(
    name: str, found: FileSum, number: int, data: bytes | bytearray | memoryview
) -> str | None:
    now, expected = digest(data), found.block(number)
    if now == expected:
        return None
    start, nbytes = found.extent(number)
    return (
        f"{name}: bytes {start} to {start + nbytes} have the checksum {now:016x}, "
        f"{expected:016x} is expected"
    )


def check_data(name: str, data: bytes, found: FileSum | None) -> None:
    """Raise if ``data`` is not the whole file ``name`` as it was written.

    Raises:
        CorruptedCheckpointError: Names the file, the offset, and what is expected and found.
    """
    if found is None:
        return
    if len(data) != found.nbytes:
        raise CorruptedCheckpointError(
            f"{name}: has {len(data)} bytes, not {found.nbytes}.", hint=_HINT
        )
    for number, start in enumerate(range(0, len(data), BLOCK_NBYTES)):
        problem = _problem(name, found, number, data[start : start + BLOCK_NBYTES])
        if problem:
            raise CorruptedCheckpointError(f"{problem}.", hint=_HINT)


def check_files(directory: Path, manifest: Manifest) -> None:
    """Raise if a file of the manifest is missing, is no regular file or has another size.

    Raises:
        CorruptedCheckpointError: Naming all of them.
    """
    store = open_store(directory)
    problems = [
        problem
        for name, nbytes in manifest.sizes.items()
        if (problem := _size_problem(store, name, nbytes))
    ]
    if problems:
        raise CorruptedCheckpointError(
            f"{directory}: {shortened(problems)}.", hint="use another checkpoint."
        )


def _size_problem(store: Store, name: str, nbytes: int) -> str | None:
    try:
        found = store.nbytes(name)
    except CorruptedCheckpointError as error:
        return str(error)
    if found is None:
        return f"{name} is missing"
    return None if found == nbytes else f"{name} has {found} bytes, not {nbytes}"


def verify_whole(store: Store, name: str, found: FileSum) -> str | None:
    """Return what is wrong with a file, None if it is as it was written.

    Raises:
        StorageError: It cannot be read.
    """
    try:
        size = _size_problem(store, name, found.nbytes)
        return size or next(_bad_blocks(store, name, found), None)
    except (CheckpointNotFoundError, CorruptedCheckpointError) as error:
        return str(error)


def _bad_blocks(store: Store, name: str, found: FileSum) -> Iterator[str]:
    buffer = memoryview(bytearray(min(_READ_NBYTES, found.nbytes)))
    for start in range(0, found.nbytes, _READ_NBYTES):
        view = buffer[: min(_READ_NBYTES, found.nbytes - start)]
        store.read_ranges(name, [Extent(start, view)])
        for at in range(0, view.nbytes, BLOCK_NBYTES):
            number = (start + at) // BLOCK_NBYTES
            problem = _problem(name, found, number, view[at : at + BLOCK_NBYTES])
            if problem:
                yield problem


def shared_out(files: Mapping[str, FileSum], size: int) -> list[dict[str, FileSum]]:
    """Give each of ``size`` ranks about as many bytes to look through as the others."""
    shares: list[dict[str, FileSum]] = [{} for _ in range(size)]
    loads = [(0, rank) for rank in range(size)]
    for name, one in sorted(files.items(), key=lambda item: (-item[1].nbytes, item[0])):
        nbytes, rank = loads[0]
        shares[rank][name] = one
        heapreplace(loads, (nbytes + one.nbytes, rank))
    return shares


def verify_files(store: Store, files: Mapping[str, FileSum], *, thread_count: int) -> list[str]:
    """Look through files byte by byte; return what is wrong, one line a file.

    Args:
        store: The checkpoint.
        files: Some of its manifest, or all.
        thread_count: Files at a time.

    Raises:
        StorageError: A file cannot be read.
    """

    def job(name: str) -> Callable[[Callable[[], None]], str | None]:
        def run(check: Callable[[], None]) -> str | None:
            check()
            return verify_whole(store, name, files[name])

        return run

    jobs = [job(name) for name in files]
    found = run_jobs(jobs, thread_count=thread_count, name="dist_ckpt-verify")
    return [problem for problem in found if problem]
