"""Runs of bytes from files straight into memory: the way most of a load goes.

Here: which thread reads which runs, and whose key an error names. Not here: which runs there are
(``_sharding.wanted``), boxes that are no runs (``read``), how runs become few reads that are
compared with checksums (``_formats.spans``). Runs on every rank for its own boxes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from dist_ckpt._formats.spans import Spans
from dist_ckpt.errors import CheckpointingException
from dist_ckpt.storage import Extent
from dist_ckpt.storage.checksums import BLOCK_NBYTES
from dist_ckpt.storage.transfer import run_jobs

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from dist_ckpt._formats.verification import VerifiedStore
    from dist_ckpt._sharding.wanted import Runs

__all__ = ["Memory", "read_runs"]

_BATCH_NBYTES = 1 << 24
"""So much is asked of a store at once; between batches a thread looks whether another failed."""

_JOB_NBYTES = 1 << 22, 1 << 26
"""Least and most bytes of one job; between them, there are four jobs for each thread."""


@dataclass(frozen=True, slots=True, eq=False)
class Memory:
    """Where runs go.

    Attributes:
        address: Of the first byte of each run, ``[m]``; whoever asks keeps the memory alive.
        key: Names the key of a run by the run's number.
    """

    address: NDArray[np.int64]
    key: Callable[[int], str]


@dataclass(frozen=True, slots=True, eq=False)
class _Piece:
    """Columns of runs, or of parts of them, in the order of the files."""

    run: NDArray[Any]
    file: NDArray[Any]
    position: NDArray[np.int64]
    nbytes: NDArray[np.int64]
    address: NDArray[np.int64]

    def take(self, chosen: Any) -> _Piece:
        columns = (self.run, self.file, self.position, self.nbytes, self.address)
        return _Piece(*(column[chosen] for column in columns))


def read_runs(runs: Runs, memory: Memory, store: VerifiedStore, *, thread_count: int) -> int:
    """Fill the memory of all runs and return how many bytes they have.

    Args:
        runs: What to read.
        memory: Where to.
        store: Has the files.
        thread_count: Most jobs at a time.

    Raises:
        CorruptedCheckpointError: A file ends early or is damaged; names a key that it hits.
        StorageError: The store failed.
    """
    total = int(runs.nbytes.sum())
    least, most = _JOB_NBYTES
    limit = min(max(total // (4 * thread_count), least), most) // BLOCK_NBYTES * BLOCK_NBYTES
    pieces = _Piece(
        np.arange(len(runs.file)), runs.file, runs.position, runs.nbytes, memory.address
    )
    pieces = _cut(pieces, limit)
    pieces = pieces.take(np.lexsort((pieces.position, pieces.file)))
    jobs = []
    for number, start, end in _by_file(pieces.file):
        part = pieces.take(slice(start, end))
        jobs += [
            _job(store, runs.files[number], part.take(slice(*one)), memory)
            for one in _portions(part.nbytes, limit)
        ]
    run_jobs(jobs, thread_count=thread_count, name="dist_ckpt-read")
    return total


def _portions(nbytes: NDArray[np.int64], limit: int) -> list[tuple[int, int]]:
    """Cut rows into portions of about ``limit`` bytes: first and end of each."""
    borders = (np.flatnonzero(np.diff(np.cumsum(nbytes) // limit)) + 1).tolist()
    return list(zip([0, *borders], [*borders, len(nbytes)], strict=True))


def _by_file(file: NDArray[Any]) -> list[tuple[int, int, int]]:
    """Return number of the file, first row and end for each run of equal numbers."""
    if not len(file):
        return []
    starts = [0, *(np.flatnonzero(np.diff(file)) + 1).tolist()]
    ends = [*starts[1:], len(file)]
    return [(int(file[a]), a, b) for a, b in zip(starts, ends, strict=True)]


def _cut(pieces: _Piece, limit: int) -> _Piece:
    """Cut pieces that are larger than a job, at borders of blocks; others stay as they are."""
    start, end = pieces.position, pieces.position + pieces.nbytes
    is_large = pieces.nbytes > limit
    if not is_large.any():
        return pieces
    base = start // BLOCK_NBYTES * BLOCK_NBYTES
    counts = np.where(is_large, -(-(end - base) // limit), 1)
    piece = np.repeat(np.arange(len(start)), counts)
    border = base[piece] + (np.arange(len(piece)) - (np.cumsum(counts) - counts)[piece]) * limit
    begin = np.maximum(start[piece], border)
    stop = np.where(is_large[piece], np.minimum(end[piece], border + limit), end[piece])
    return _Piece(
        pieces.run[piece],
        pieces.file[piece],
        begin,
        stop - begin,
        pieces.address[piece] + begin - start[piece],
    )


def _job(
    store: VerifiedStore, name: str, pieces: _Piece, memory: Memory
) -> Callable[[Callable[[], None]], None]:
    def run(check: Callable[[], None]) -> None:
        for start, end in _portions(pieces.nbytes, _BATCH_NBYTES):
            check()
            part = pieces.take(slice(start, end))
            columns = (part.position, part.nbytes, part.address)
            try:
                store.read_spans(name, Spans(*(column.tolist() for column in columns)))
            except CheckpointingException as error:
                raise _named(error, store, name, part, memory) from error

    return run


def _named(
    error: CheckpointingException, store: VerifiedStore, name: str, pieces: _Piece, memory: Memory
) -> CheckpointingException:
    """Return the error with the key of the first run that cannot be read by itself, either."""
    runs, columns = pieces.run.tolist(), (pieces.position.tolist(), pieces.nbytes.tolist())
    buffer = memoryview(bytearray(max(columns[1])))
    for run, position, nbytes in zip(runs, *columns, strict=True):
        try:
            store.read_ranges(name, [Extent(position, buffer[:nbytes])])
        except CheckpointingException as one:
            return type(one)(f"{memory.key(run)!r}: {one}")
    return type(error)(f"{memory.key(runs[0])!r}: {error}")
