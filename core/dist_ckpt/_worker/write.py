"""Runs of memory into files: one thread a file, everything checked, everything durable.

Here: ``write_files``. Not here: where runs come from (``loop``), what the files mean
(``_formats``). Runs in the worker; files are local or on a mounted file system.
"""

from __future__ import annotations

import queue
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dist_ckpt.errors import CoordinationError, StorageError
from dist_ckpt.storage import open_store
from dist_ckpt.storage.base import checked_name
from dist_ckpt.storage.local import fsync_directory, storage_errors

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from dist_ckpt._staging_pool.runs import Run
    from dist_ckpt._worker.orders import Staged
    from dist_ckpt.storage import FileWriter
    from dist_ckpt.storage.checksums import FileSum

__all__ = ["write_files"]

_BLOCK_NBYTES = 16 << 20
"""Bytes that are written at a time: after each, the writer can stop and tells how far it is."""


def write_files(
    directory: Path,
    files: Sequence[tuple[str, int]],
    staged: Staged,
    *,
    thread_count: int,
    keeps_pages: bool = False,
) -> dict[str, FileSum]:
    """Write each run as it is staged, then make all files and their names durable.

    When this returns or raises, no thread of it reads the memory any more.

    Returns:
        The checksums of the files, made of the bytes that were written.

    Raises:
        StorageError: Names file and errno.
        CoordinationError: A byte was staged twice, never, or for no file.
        AbandonedError: The save was given up while it was staged.
    """
    store = open_store(directory, keeps_pages=keeps_pages)
    images = [_Image(directory / checked_name(name), name, nbytes) for name, nbytes in files]
    effort = _Effort(staged)
    folders = sorted({image.path.parent for image in images} - {directory})
    try:
        for folder in folders:
            with storage_errors("create", folder):
                folder.mkdir(exist_ok=True)
        for image in images:
            image.writer = store.writer(image.name, nbytes=image.nbytes)
        _write_all(images, effort, max(1, min(thread_count, len(images))))
    finally:
        effort.memory.release()
        for image in images:
            image.close()
    if images:
        with storage_errors("sync", directory):
            for folder in (*folders, directory):
                fsync_directory(folder)
    return {image.name: image.found for image in images if image.found is not None}


class _Effort:
    """What the threads of one write share: how far they are, and what failed first."""

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
class _Image:
    """One file, and which bytes of it have been written."""

    path: Path
    name: str
    nbytes: int
    writer: FileWriter | None = None
    found: FileSum | None = None
    written: list[tuple[int, int]] = field(default_factory=list)

    def close(self) -> None:
        if self.writer is not None:
            self.writer.abandon()

    def write(self, run: Run, effort: _Effort) -> None:
        if run.position < 0 or run.position + run.nbytes > self.nbytes:
            raise CoordinationError(
                f"{self.path}: {run.nbytes} bytes at {run.position} were staged for a file of "
                f"{self.nbytes} bytes"
            )
        if run.offset < 0 or run.offset + run.nbytes > effort.memory.nbytes:
            raise CoordinationError(
                f"{self.path}: {run.nbytes} bytes at {run.offset} of the arena, which has "
                f"{effort.memory.nbytes} bytes"
            )
        assert self.writer is not None  # noqa: S101 - all are made before any is written
        self._write_blocks(self.writer, run, effort)
        self.written.append((run.position, run.position + run.nbytes))

    def _write_blocks(self, writer: FileWriter, run: Run, effort: _Effort) -> None:
        done = 0
        while done < run.nbytes and not effort.has_failed:
            start = run.offset + done
            nbytes = min(_BLOCK_NBYTES, run.nbytes - done)
            with effort.memory[start : start + nbytes] as block:
                writer.write_at(run.position + done, block)
            done += nbytes
            effort.note(nbytes)

    def finish(self, effort: _Effort) -> None:
        """Check that all is there and make it durable."""
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
        effort.note(0, "syncing")
        assert self.writer is not None  # noqa: S101 - all are made before any is written
        self.found = self.writer.finish()


def _write_all(images: Sequence[_Image], effort: _Effort, thread_count: int) -> None:
    """Hand each run to the thread of its file; raise the first error when all have ended."""
    queues: list[queue.SimpleQueue[Run | None]] = [queue.SimpleQueue() for _ in range(thread_count)]
    threads = [
        threading.Thread(
            target=_guarded,
            args=(effort, lambda n=n: _serve(images, n, thread_count, queues[n], effort)),
            name=f"dist_ckpt-file-{n}",
        )
        for n in range(thread_count)
    ]
    for thread in threads:
        thread.start()
    try:
        for run in effort.staged.runs():
            if effort.has_failed:
                break
            if not 0 <= run.file < len(images):
                raise CoordinationError(f"a run for file {run.file} of {len(images)} files")
            queues[run.file % thread_count].put(run)
    except BaseException as error:  # noqa: BLE001 - raised below, when nobody reads any more
        effort.fail(error)
    finally:
        for one in queues:
            one.put(None)
        for thread in threads:
            thread.join()
    if effort.errors:
        raise _worst(effort.errors)


def _serve(
    images: Sequence[_Image],
    number: int,
    thread_count: int,
    runs: queue.SimpleQueue[Run | None],
    effort: _Effort,
) -> None:
    """Write the runs of every ``thread_count``-th file, and finish these files."""
    while (run := runs.get()) is not None:
        if not effort.has_failed:
            images[run.file].write(run, effort)
            if not effort.has_failed:
                effort.staged.freed(run)
    for image in images[number::thread_count]:
        if effort.has_failed:
            return
        image.finish(effort)


def _guarded(effort: _Effort, do: Callable[[], None]) -> None:
    try:
        do()
    except BaseException as error:  # noqa: BLE001 - raised by `_write_all`
        effort.fail(error)


def _worst(errors: Sequence[BaseException]) -> BaseException:
    """Return what is told: the first failure, but a failure of the disk before what it brought."""
    storage = (error for error in errors if isinstance(error, StorageError))
    return next(storage, errors[0])
