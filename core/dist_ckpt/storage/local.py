"""Files of a local or mounted directory.

Here: reading and writing at planned offsets, checksums on the way, fsync; the only module that
opens data files, so a faster way to the disk replaces just this one. Not here: directories
(``storage.trees``), commit by rename (``storage.commit``). Called from transfer threads on every
rank; rank 0 also writes the small documents. No torch: the process that writes in the background
uses it too.

Below the root no link is followed, and only regular files are opened: a checkpoint that somebody
else made must not make a reader leave its directory, nor block it at a pipe.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from dist_ckpt.errors import CorruptedCheckpointError
from dist_ckpt.storage._writeback import Writeback, drop_pages
from dist_ckpt.storage.base import checked_name
from dist_ckpt.storage.checksums import BLOCK_NBYTES, BlockSums, FileSum, read_at
from dist_ckpt.storage.failures import storage_errors

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from dist_ckpt.storage.base import Extent

__all__ = ["LARGE_NBYTES", "LocalStore", "drop_pages_of"]

_MAX_IO_NBYTES = 1 << 30
"""Linux moves at most 0x7ffff000 bytes in one read or write call; this is less."""

LARGE_NBYTES = 1 << 20
"""The pages of smaller files are never dropped: that would free little."""

_CREATE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
_OPEN = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class LocalStore:
    """The files below ``root``, which must exist and may be a link itself.

    Args:
        root: The directory.
        keeps_pages: Whether written pages stay in the page cache. Those of ``create`` always do:
            documents are small, and a load reads them first.
    """

    def __init__(self, root: Path, *, keeps_pages: bool = False) -> None:
        """Open nothing yet."""
        self._root, self._keeps_pages = root, keeps_pages
        self._prefix = f"{root}/"  # joining paths takes as long as opening a file
        self._folders: set[str] = set()  # of names, found to be real ones
        self._held: dict[tuple[int, str], int] = {}  # thread and name -> descriptor

    def __repr__(self) -> str:
        """Name the root."""
        return f"LocalStore({str(self._root)!r})"

    def _text(self, name: str) -> str:
        return self._prefix + checked_name(name)

    def _open(self, name: str) -> int:
        """Return a descriptor of a regular file below the root.

        Raises:
            CorruptedCheckpointError: It is something else, or lies behind a link.
            OSError: It cannot be opened.
        """
        path = self._text(name)
        if "/" in name:
            self._check_folders(name)
        try:
            descriptor = os.open(path, _OPEN)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENXIO):  # a link; a socket
                raise _irregular(path) from error
            raise
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            return descriptor
        os.close(descriptor)
        raise _irregular(path)

    def _check_folders(self, name: str) -> None:
        """Raise if a folder that ``name`` lies in is a link; each folder is looked at once.

        Raises:
            CorruptedCheckpointError: It is one.
            OSError: It is not there, or cannot be looked at.
        """
        if name.rpartition("/")[0] in self._folders:
            return
        parts = name.split("/")
        for depth in range(1, len(parts)):
            folder = "/".join(parts[:depth])
            if folder in self._folders:
                continue
            path = self._prefix + folder
            if stat.S_ISLNK(os.lstat(path).st_mode):
                raise _irregular(path)
            self._folders.add(folder)

    def writer(self, name: str, *, nbytes: int) -> LocalWriter:
        """Create ``name``."""
        return LocalWriter(self._text(name), nbytes, keeps_pages=self._keeps_pages)

    def write(self, name: str, extents: Iterable[Extent], *, nbytes: int) -> FileSum:
        """Create ``name`` from ``extents`` and fsync it."""
        writer = self.writer(name, nbytes=nbytes)
        try:
            for extent in extents:
                writer.write_at(extent.position, memoryview(extent.buffer))
            return writer.finish()
        finally:
            writer.abandon()

    def create(self, name: str, data: bytes) -> FileSum:
        """Create the small file ``name`` and fsync it."""
        writer = LocalWriter(self._text(name), len(data), keeps_pages=True)
        try:
            writer.write_at(0, memoryview(data))
            return writer.finish()
        finally:
            writer.abandon()

    def read(self, name: str, *, max_nbytes: int) -> bytes:
        """Return the whole file ``name``."""
        path = self._text(name)
        with storage_errors("read", path), os.fdopen(self._open(name), "rb") as file:
            # Allocate by the size of the file, not by the limit.
            nbytes = os.fstat(file.fileno()).st_size
            data = file.read(nbytes + 1) if nbytes <= max_nbytes else b""
        if max(nbytes, len(data)) > max_nbytes:
            raise CorruptedCheckpointError(f"{path}: longer than the {max_nbytes} bytes allowed.")
        return data

    def read_ranges(self, name: str, extents: Sequence[Extent]) -> None:
        """Fill the buffers of ``extents`` from ``name``."""
        key = threading.get_ident(), name
        if key in self._held:
            self._read(self._held[key], name, extents)
            return
        with self.held(name):
            self._read(self._held[key], name, extents)

    def _read(self, descriptor: int, name: str, extents: Sequence[Extent]) -> None:
        path = self._prefix + name
        with storage_errors("read", path):
            for extent in extents:
                _read_all(descriptor, extent, path)

    @contextmanager
    def held(self, name: str) -> Iterator[None]:
        """Keep ``name`` open for what this thread reads of it inside, see ``storage.base.held``."""
        key, path = (threading.get_ident(), name), self._text(name)
        if key in self._held:
            yield
            return
        with storage_errors("read", path):
            descriptor = self._held[key] = self._open(name)
        try:
            yield
        finally:
            del self._held[key]
            os.close(descriptor)

    def list(self) -> list[str]:
        """Return the names of the regular files of the root."""
        with storage_errors("list", self._root), os.scandir(self._root) as entries:
            return sorted(one.name for one in entries if one.is_file(follow_symlinks=False))

    def delete(self, name: str) -> None:
        """Remove ``name`` if it is there."""
        path = self._text(name)
        with storage_errors("delete", path), suppress(FileNotFoundError):
            os.unlink(path)  # noqa: PTH108 - a path costs more than the call

    def nbytes(self, name: str) -> int | None:
        """Return the size of ``name``, or None.

        Raises:
            CorruptedCheckpointError: It is no regular file, or lies behind a link.
        """
        path = self._text(name)
        with storage_errors("stat", path):
            try:
                self._check_folders(name)
                found = os.lstat(path)
            except (FileNotFoundError, NotADirectoryError):
                return None
        if not stat.S_ISREG(found.st_mode):
            raise _irregular(path)
        return found.st_size


class LocalWriter:
    """A file that is being written, see ``storage.base.FileWriter``.

    Args:
        path: The file, which must not exist.
        nbytes: Size that it will have.
        keeps_pages: Whether its pages stay in the page cache.

    Raises:
        StorageError: It cannot be created.
    """

    def __init__(self, path: Path | str, nbytes: int, *, keeps_pages: bool = False) -> None:
        """Create the file."""
        self._path, self._nbytes = path, nbytes
        self._keeps_pages = keeps_pages or nbytes < LARGE_NBYTES
        self._sums = BlockSums()
        self._descriptor = -1
        with storage_errors("create", path):
            self._descriptor = os.open(path, _CREATE, 0o666)
        self._writeback = Writeback(self._descriptor, keeps_pages=self._keeps_pages)

    def write_at(self, position: int, data: memoryview) -> None:
        """Write bytes (a flat view) and add them to the checksums in the same pass."""
        with storage_errors("write", self._path):
            done = 0
            while done < data.nbytes:
                # One block at a time: it is still in the processor's cache for the checksum, and
                # the page cache uses small pages for it, which are easier to get. The view is
                # released on an error too: a kept traceback must not keep the caller's memory.
                count = BLOCK_NBYTES - (position + done) % BLOCK_NBYTES
                with data[done : done + count] as piece:
                    _write_all(self._descriptor, position + done, piece)
                    self._sums.add(position + done, piece)
                    self._writeback.note(position + done, position + done + piece.nbytes)
                    done += piece.nbytes

    def finish(self) -> FileSum:
        """Set the file's size, sync it and close it."""
        with storage_errors("sync", self._path):
            os.ftruncate(self._descriptor, self._nbytes)
            found = self._sums.finish(self._nbytes, self._read)
            # After the last change of data and size, and before pages are dropped.
            os.fsync(self._descriptor)
            if not self._keeps_pages:
                drop_pages(self._descriptor)
        self.abandon()
        return found

    def _read(self, position: int, nbytes: int) -> bytes:
        return read_at(self._descriptor, position, nbytes)

    def abandon(self) -> None:
        """Close the file, complete or not."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def drop_pages_of(paths: Iterable[Path]) -> None:
    """Drop the pages of files; files that were removed or renamed since are skipped."""
    for path in paths:
        with suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                drop_pages(descriptor)
            finally:
                os.close(descriptor)


def _irregular(path: Path | str) -> CorruptedCheckpointError:
    return CorruptedCheckpointError(
        f"{path}: expected a regular file below the checkpoint, found a link or something else.",
        hint="links, pipes and devices in a checkpoint are not followed; "
        "`cp -rL` makes files of links.",
    )


def _write_all(descriptor: int, position: int, view: memoryview) -> None:
    done = 0
    while done < view.nbytes:
        with view[done:] as rest:
            count = os.pwrite(descriptor, rest, position + done)
        if count == 0:
            raise OSError(errno.EIO, "the file system took no bytes")
        done += count


def _read_all(fd: int, extent: Extent, path: Path | str) -> None:
    view, position = memoryview(extent.buffer), extent.position
    while view.nbytes:
        some = view if view.nbytes <= _MAX_IO_NBYTES else view[:_MAX_IO_NBYTES]
        done = os.preadv(fd, (some,), position)
        if done == view.nbytes:
            return
        if done == 0:
            raise CorruptedCheckpointError(
                f"{path}: ends at byte {os.fstat(fd).st_size}; {view.nbytes} more bytes were "
                f"expected from byte {position} on.",
                hint="the file is truncated; use another checkpoint.",
            )
        view, position = view[done:], position + done
