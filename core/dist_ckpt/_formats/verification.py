"""Files of a checkpoint compared with the checksums in its manifest.

Here: a store that compares what it reads, and whole files looked through. Not here: the sums
themselves (``storage.checksums``), the manifest, who decides what is compared
(``_loading.execute``). Runs on every rank, from transfer threads.
"""

from __future__ import annotations

import threading
from ctypes import addressof, c_char
from heapq import heapreplace
from typing import TYPE_CHECKING

from dist_ckpt._formats.spans import READ_NBYTES, Source, Spans, Windows, problem_of
from dist_ckpt.errors import CheckpointNotFoundError, CorruptedCheckpointError
from dist_ckpt.storage import Extent, held, open_store
from dist_ckpt.storage.checksums import BLOCK_NBYTES, FileSum, digest
from dist_ckpt.storage.transfer import run_jobs
from dist_ckpt.validation import shortened

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
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
        self._windows = Windows()
        self._whole: set[str] = set()

    def read_ranges(self, name: str, extents: Sequence[Extent]) -> None:
        """Fill the buffers of ``extents`` from ``name``.

        Raises:
            CorruptedCheckpointError: Names file, offset, the checksum that is expected and the one
                that is found.
        """
        if name not in self._files:
            self._store.read_ranges(name, extents)
            return
        views = [memoryview(extent.buffer) for extent in extents]
        positions = [extent.position for extent in extents]
        addresses = [_address(view) for view in views]
        self.read_spans(name, Spans(positions, [view.nbytes for view in views], addresses))

    def read_spans(self, name: str, spans: Spans) -> None:
        """Fill memory from ``name``: as ``read_ranges``, for many pieces of any size.

        Neighbours come with one read, and nothing is made for a piece that is read. In the order of
        the file that is quickest; edges that were read last are still there for the next call.

        Raises:
            CorruptedCheckpointError: As ``read_ranges``.
        """
        if not len(spans.positions):
            return
        source = Source(name, self._told(name), self._files.get(name), self._store)
        window = self._windows.take(name, spans.positions[0])
        try:
            with held(self._store, name):
                source.fill(spans, window)
        finally:
            self._windows.give(window)

    def _told(self, name: str) -> str:
        return name if self._root is None else str(self._root / name)

    def sum_of(self, name: str) -> FileSum | None:
        """Return what a file is compared with, None if it is read as it is."""
        return self._files.get(name)

    @property
    def bare(self) -> VerifiedStore:
        """The same files, compared with nothing: for bytes that are compared in another way."""
        return VerifiedStore(self._store, {}, self._root)

    @property
    def file_count(self) -> int:
        """How many files are compared with anything."""
        return len(self._files)

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


def _address(view: memoryview) -> int:
    """Return where writable bytes are."""
    return addressof(c_char.from_buffer(view)) if view.nbytes else 0


def _problem(name: str, found: FileSum, number: int, data: bytes | memoryview) -> str | None:
    now = digest(data)
    return None if now == found.block(number) else problem_of(name, found, number, now)


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


def check_files(
    directory: Path, manifest: Manifest, *, optional: frozenset[str] = frozenset()
) -> frozenset[str]:
    """Raise if a file of the manifest is missing, is no regular file or has another size.

    Args:
        directory: The checkpoint.
        manifest: What was read there.
        optional: Names that may be missing.

    Returns:
        Those of ``optional`` that the manifest names and that are missing.

    Raises:
        CorruptedCheckpointError: Naming all of them.
    """
    store = open_store(directory)
    problems: dict[str, str] = {}
    missing: set[str] = set()
    for name, nbytes in manifest.sizes.items():
        problem = _size_problem(store, name, nbytes)
        if problem:
            problems[name] = problem
        if problem == _missing(name):
            missing.add(name)
    absent = missing & optional
    reported = [problem for name, problem in problems.items() if name not in absent]
    if reported:
        raise CorruptedCheckpointError(
            f"{directory}: {shortened(reported)}.", hint=_copy_hint(problems, missing)
        )
    return frozenset(absent)


def _copy_hint(problems: Collection[str], missing: Collection[str]) -> str:
    hidden = all(any(part[0] == "." for part in name.split("/")) for name in problems)
    if hidden and len(missing) == len(problems):
        return (
            "only hidden files are missing, which `cp ckpt/* dst/` and some upload tools leave "
            "out: copy the directory itself, or use another checkpoint."
        )
    return "use another checkpoint."


def _missing(name: str) -> str:
    return f"{name} is missing"


def _size_problem(store: Store, name: str, nbytes: int) -> str | None:
    try:
        found = store.nbytes(name)
    except CorruptedCheckpointError as error:
        return str(error)
    if found is None:
        return _missing(name)
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
    buffer = memoryview(bytearray(min(READ_NBYTES, found.nbytes)))
    with held(store, name):
        for start in range(0, found.nbytes, READ_NBYTES):
            view = buffer[: min(READ_NBYTES, found.nbytes - start)]
            store.read_ranges(name, (Extent(start, view),))
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
