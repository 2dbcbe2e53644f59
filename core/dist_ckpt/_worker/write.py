"""Writes staged runs of memory into files and makes the files durable.

Here: ``write_files``. Not here: where the runs come from (``loop``), what the files mean
(``_formats``). Runs in the worker.
"""

from __future__ import annotations

import queue
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dist_ckpt.errors import CoordinationError, StorageError
from dist_ckpt.storage import open_store
from dist_ckpt.storage.base import checked_name
from dist_ckpt.storage.failures import storage_errors
from dist_ckpt.storage.trees import fsync_directory, make_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from dist_ckpt._staging_pool.runs import Run
    from dist_ckpt._worker.orders import Staged
    from dist_ckpt.storage import FileWriter
    from dist_ckpt.storage.checksums import FileSum

__all__ = ["write_files"]

_BLOCK_NBYTES = 16 << 20
"""Bytes of one write call: between two, a thread can stop, and it reports its progress."""


def write_files(
    directory: Path,
    files: Sequence[tuple[str, int]],
    staged: Staged,
    *,
    thread_count: int,
    keeps_pages: bool = False,
) -> dict[str, FileSum]:
    """Write each run as it is staged, then make all files and their names durable.

    When this returns or raises, none of its threads reads the staging memory any more: the training
    process may overwrite it.

    Returns:
        The checksums of the files, computed from the bytes that were written.

    Raises:
        StorageError: Names file and errno.
        CoordinationError: A byte of a file was staged twice or never, or lies outside of it.
        AbandonedError: The save was given up while it was staged.
    """
    store = open_store(directory, keeps_pages=keeps_pages)
    opened = [_OpenFile(directory / checked_name(name), name, nbytes) for name, nbytes in files]
    shared = _SharedProgress(staged)
    folders = sorted({file.path.parent for file in opened} - {directory})
    try:
        for folder in folders:
            make_folder(folder)
        for file in opened:
            file.writer = store.writer(file.name, nbytes=file.nbytes)
        _write_all(opened, shared, max(1, min(thread_count, len(opened))))
    finally:
        shared.memory.release()
        for file in opened:
            file.close()
    if opened:
        # `finish` has synced the files. Their names are durable only once the directories that hold
        # them are synced, inner ones first.
        with storage_errors("sync", directory):
            for folder in (*folders, directory):
                fsync_directory(folder)
    return {file.name: file.sums for file in opened if file.sums is not None}


class _SharedProgress:
    """State shared by the threads of one write: bytes written so far, and errors."""

    def __init__(self, staged: Staged) -> None:
        self.staged = staged
        self.memory = staged.memory()
        self.errors: list[BaseException] = []
        self._nbytes = 0
        self._lock = threading.Lock()

    def fail(self, error: BaseException) -> None:
        self.errors.append(error)
        self.staged.stop()

    @property
    def has_failed(self) -> bool:
        return bool(self.errors)

    def note(self, nbytes: int, phase: str = "writing") -> None:
        with self._lock:
            self._nbytes += nbytes
            self.staged.progress(phase, self._nbytes)


@dataclass(slots=True)
class _OpenFile:
    """One file, and which bytes of it have been written."""

    path: Path
    name: str
    nbytes: int
    writer: FileWriter | None = None
    sums: FileSum | None = None
    written: list[tuple[int, int]] = field(default_factory=list)

    def close(self) -> None:
        if self.writer is not None:
            self.writer.abandon()

    def write(self, run: Run, shared: _SharedProgress) -> None:
        if run.position < 0 or run.position + run.nbytes > self.nbytes:
            raise CoordinationError(
                f"{self.path}: {run.nbytes} bytes at {run.position} were staged for a file of "
                f"{self.nbytes} bytes"
            )
        if run.offset < 0 or run.offset + run.nbytes > shared.memory.nbytes:
            raise CoordinationError(
                f"{self.path}: {run.nbytes} bytes at {run.offset} of the arena, which has "
                f"{shared.memory.nbytes} bytes"
            )
        assert self.writer is not None  # noqa: S101 - all are made before any is written
        self._write_blocks(self.writer, run, shared)
        self.written.append((run.position, run.position + run.nbytes))

    def _write_blocks(self, writer: FileWriter, run: Run, shared: _SharedProgress) -> None:
        done = 0
        while done < run.nbytes and not shared.has_failed:
            start = run.offset + done
            nbytes = min(_BLOCK_NBYTES, run.nbytes - done)
            with shared.memory[start : start + nbytes] as block:
                writer.write_at(run.position + done, block)
            done += nbytes
            shared.note(nbytes)

    def finish(self, shared: _SharedProgress) -> None:
        """Check that every byte was written exactly once, and make the file durable."""
        end = 0
        for start, stop in sorted(run for run in self.written if run[0] != run[1]):
            if start != end:
                what = "twice" if start < end else "never"
                raise CoordinationError(
                    f"{self.path}: bytes {min(start, end)} to {max(start, end)} were staged {what}"
                )
            end = stop
        if end != self.nbytes:
            raise CoordinationError(f"{self.path}: bytes {end} to {self.nbytes} were staged never")
        shared.note(0, "syncing")
        assert self.writer is not None  # noqa: S101 - all are made before any is written
        self.sums = self.writer.finish()


def _write_all(opened: Sequence[_OpenFile], shared: _SharedProgress, thread_count: int) -> None:
    """Pass each run to the thread of its file; join all threads, then raise the first error."""
    queues: list[queue.SimpleQueue[Run | None]] = [queue.SimpleQueue() for _ in range(thread_count)]
    threads = [
        threading.Thread(
            target=_run_catching,
            args=(
                shared,
                lambda n=n: _serve(opened, n, thread_count, queues[n], shared),
            ),
            name=f"dist_ckpt-file-{n}",
        )
        for n in range(thread_count)
    ]
    for thread in threads:
        thread.start()
    try:
        for run in shared.staged.runs():
            if shared.has_failed:
                break
            if not 0 <= run.file < len(opened):
                raise CoordinationError(f"a run for file {run.file} of {len(opened)} files")
            queues[run.file % thread_count].put(run)
    except BaseException as error:  # noqa: BLE001 - raised below, when no thread reads the memory
        shared.fail(error)
    finally:
        for one in queues:
            one.put(None)
        for thread in threads:
            thread.join()
    if shared.errors:
        raise _primary_error(shared.errors)


def _serve(
    opened: Sequence[_OpenFile],
    number: int,
    thread_count: int,
    runs: queue.SimpleQueue[Run | None],
    shared: _SharedProgress,
) -> None:
    """Write the runs of every ``thread_count``-th file, then finish these files."""
    while (run := runs.get()) is not None:
        if not shared.has_failed:
            opened[run.file].write(run, shared)
            if not shared.has_failed:
                shared.staged.freed(run)
    for file in opened[number::thread_count]:
        if shared.has_failed:
            return
        file.finish(shared)


def _run_catching(shared: _SharedProgress, do: Callable[[], None]) -> None:
    try:
        do()
    except BaseException as error:  # noqa: BLE001 - raised by `_write_all`
        shared.fail(error)


def _primary_error(errors: Sequence[BaseException]) -> BaseException:
    """Return the error to raise: the first storage error, else the first of any kind."""
    storage = (error for error in errors if isinstance(error, StorageError))
    return next(storage, errors[0])
