"""Early writeback of a file that is being written, and dropping its pages once they are on disk.

Here: ``Writeback``, which a writer calls for each run of bytes, and ``drop_pages``. Not here:
writing (``local``), whether pages are dropped (``storage.page_cache``). Any thread, one at a time
for each file; no torch.

The disk starts with the first run of bytes, so that fsync finds little left to do, and the number
of dirty pages is bounded. If pages are dropped, a file takes no more than a window of the page
cache: the cache keeps what others have in it, and the pages that are written next are those that
were written before. New pages cost more than the bytes in them where a machine has to get them
first: from other processes' files, or from its host.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import os
from collections import deque
from collections.abc import Callable

__all__ = ["RUN_NBYTES", "WINDOW_RUNS", "Writeback", "drop_pages"]

RUN_NBYTES = 4 << 20
"""Bytes that are given to the disk at a time."""

WINDOW_RUNS = 8
"""Runs that may be under way; who is further ahead waits for the oldest."""

_WAIT_BEFORE, _WRITE, _WAIT_AFTER = 1, 2, 4  # SYNC_FILE_RANGE_*, linux/fs.h

_UNSUPPORTED = frozenset(
    {errno.EINVAL, errno.ENOSYS, errno.ESPIPE, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EPERM}
)
"""What a file system or a sandbox answers that has no such call: the file is left to fsync then."""


class Writeback:
    """Keeps the disk busy with a file while it is written.

    Args:
        descriptor: The file, which stays the caller's.
        keeps_pages: Whether what is on disk stays in the page cache, too.
    """

    def __init__(self, descriptor: int, *, keeps_pages: bool = False) -> None:
        """Start with an empty file."""
        self._descriptor, self._keeps_pages = descriptor, keeps_pages
        self._start = self._stop = 0  # of what the disk was not told of
        self._runs: deque[tuple[int, int]] = deque()
        self._is_on = True

    def note(self, start: int, stop: int) -> None:
        """Take notice that bytes were written; what is not one behind the other is left to fsync.

        Raises:
            OSError: The disk could not write what it was given before. Nobody else is told: the
                kernel reports an error of writeback once.
        """
        if start != self._stop:
            self._start = start
        self._stop = stop
        if stop - self._start >= RUN_NBYTES and self._is_on:
            self._is_on = self._give()

    def _give(self) -> bool:
        """Start to write a run, and finish the oldest one; False if the system cannot do that."""
        run = self._start, self._stop
        if not _ask(self._descriptor, *run, _WRITE):
            return False
        self._start = self._stop
        self._runs.append(run)
        if len(self._runs) > WINDOW_RUNS:
            oldest = self._runs.popleft()
            if not _ask(self._descriptor, *oldest, _WAIT_BEFORE | _WRITE | _WAIT_AFTER):
                return False
            if not self._keeps_pages:
                drop_pages(self._descriptor, *oldest)
        return True


def drop_pages(descriptor: int, start: int = 0, stop: int = 0) -> None:
    """Ask the kernel to drop the pages of these bytes, up to the end of the file if ``stop`` is 0.

    Pages that are not on disk yet stay.
    """
    with contextlib.suppress(OSError, AttributeError):  # not all systems have it
        os.posix_fadvise(descriptor, start, max(stop - start, 0), os.POSIX_FADV_DONTNEED)


def _ask(descriptor: int, start: int, stop: int, flags: int) -> bool:
    """Call sync_file_range(2); False where there is none."""
    call = sync_file_range()
    if call is None:
        return False
    code = call(descriptor, start, stop - start, flags)
    if code in _UNSUPPORTED:
        return False
    if code:
        raise OSError(code, os.strerror(code))
    return True


@functools.cache
def sync_file_range() -> Callable[[int, int, int, int], int] | None:
    """Return the system's call, which returns an errno or 0; None where it has none.

    It takes a descriptor, a position, a number of bytes and flags.
    """
    function = getattr(ctypes.CDLL(None, use_errno=True), "sync_file_range", None)  # Linux only
    if function is None:
        return None
    function.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]

    def call(descriptor: int, position: int, nbytes: int, flags: int) -> int:
        return ctypes.get_errno() if function(descriptor, position, nbytes, flags) else 0

    return call
