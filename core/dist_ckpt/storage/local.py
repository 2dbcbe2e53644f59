"""Files of a local or mounted directory.

Here: reading and writing at planned offsets with fsync; the only module that opens data files, so
a faster way to the disk replaces just this one. Not here: commit by rename (``_engine.commit``).
Called from transfer threads on every rank; rank 0 also writes the small documents.
"""

from __future__ import annotations

import errno
import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

from dist_ckpt.errors import CheckpointNotFoundError, CorruptedCheckpointError, StorageError
from dist_ckpt.storage.base import checked_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from dist_ckpt.storage.base import Extent

__all__ = ["LocalStore", "fsync_directory", "hint_of_errno", "storage_errors"]

_MAX_IO_NBYTES = 1 << 30
"""read(2) and write(2) move at most 0x7ffff000 bytes a call on Linux; stay below it."""


class LocalStore:
    """The files below ``root``, which must exist.

    Args:
        root: The directory.
    """

    def __init__(self, root: Path) -> None:
        """Remember the root; nothing is opened yet."""
        self._root = root

    def __repr__(self) -> str:
        """Name the root."""
        return f"LocalStore({str(self._root)!r})"

    def _path(self, name: str) -> Path:
        return self._root / checked_name(name)

    def write(self, name: str, extents: Iterable[Extent], *, nbytes: int) -> None:
        """Create ``name`` from ``extents`` and fsync it."""
        path = self._path(name)
        with storage_errors("write", path):
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            try:
                for extent in extents:
                    _write_all(fd, extent)
                os.ftruncate(fd, nbytes)
                os.fsync(fd)
            finally:
                os.close(fd)

    def create(self, name: str, data: bytes) -> None:
        """Create the small file ``name`` and fsync it."""
        path = self._path(name)
        with storage_errors("create", path):
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            with os.fdopen(fd, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())

    def read(self, name: str, *, max_nbytes: int) -> bytes:
        """Return the whole file ``name``."""
        path = self._path(name)
        with storage_errors("read", path), path.open("rb") as file:
            data = file.read(max_nbytes + 1)
        if len(data) > max_nbytes:
            raise CorruptedCheckpointError(f"{path}: longer than the {max_nbytes} bytes allowed.")
        return data

    def read_ranges(self, name: str, extents: Sequence[Extent]) -> None:
        """Fill the buffers of ``extents`` from ``name``."""
        path = self._path(name)
        with storage_errors("read", path):
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                for extent in extents:
                    _read_all(fd, extent, path)
            finally:
                os.close(fd)

    def list(self) -> list[str]:
        """Return the names of the regular files of the root."""
        with storage_errors("list", self._root):
            return sorted(entry.name for entry in os.scandir(self._root) if entry.is_file())

    def delete(self, name: str) -> None:
        """Remove ``name`` if it is there."""
        path = self._path(name)
        with storage_errors("delete", path):
            path.unlink(missing_ok=True)

    def nbytes(self, name: str) -> int | None:
        """Return the size of ``name``, or None."""
        path = self._path(name)
        with storage_errors("stat", path):
            try:
                return path.stat().st_size
            except FileNotFoundError:
                return None


def _write_all(fd: int, extent: Extent) -> None:
    view, position = memoryview(extent.buffer), extent.position
    while view.nbytes:
        done = os.pwrite(fd, view[:_MAX_IO_NBYTES], position)
        if done == 0:
            raise OSError(errno.EIO, "the file system took no bytes")
        view, position = view[done:], position + done


def _read_all(fd: int, extent: Extent, path: Path) -> None:
    view, position = memoryview(extent.buffer), extent.position
    while view.nbytes:
        done = os.preadv(fd, [view[:_MAX_IO_NBYTES]], position)
        if done == 0:
            raise CorruptedCheckpointError(
                f"{path}: ends at byte {os.fstat(fd).st_size}; {view.nbytes} more bytes were "
                f"expected from byte {position} on.",
                hint="the file is truncated; use another checkpoint.",
            )
        view, position = view[done:], position + done


def fsync_directory(path: Path) -> None:
    """Make the names in directory ``path`` durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


_HINTS = {
    errno.ENOSPC: "the disk is full; nothing of this save was committed.",
    errno.EDQUOT: "the quota is used up; nothing of this save was committed.",
    errno.EFBIG: "the file-size limit is reached; nothing of this save was committed.",
    errno.EROFS: "the file system is read-only.",
    errno.EACCES: "no permission.",
    errno.EPERM: "no permission.",
}


def hint_of_errno(code: int) -> str | None:
    """Return what a user can do about an error of the system, None if that is not known."""
    return _HINTS.get(code)


@contextmanager
def storage_errors(action: str, path: Path) -> Iterator[None]:
    """Turn an ``OSError`` into the error of our tree that names action, path and errno."""
    try:
        yield
    except (CheckpointNotFoundError, StorageError):
        raise
    except FileNotFoundError as error:
        raise CheckpointNotFoundError(f"cannot {action} {path}: no such file.") from error
    except OSError as error:
        code = errno.errorcode.get(error.errno or 0, "?")
        raise StorageError(
            f"cannot {action} {path}: {error.strerror} ({code}).",
            hint=hint_of_errno(error.errno or 0),
        ) from error
