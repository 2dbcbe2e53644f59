"""Early writeback of a file that is being written, and dropping its pages once they are on disk.

Here: ``Writeback``, which a writer calls after each write, and ``drop_pages``. Not here:
writing (``local``), whether pages are dropped (``storage.page_cache``). Any thread, one at a time
for each file; no torch.

The disk starts with the first run of bytes, so that fsync has little left to do and the number of
dirty pages is bounded. If pages are dropped, a file uses only a window of the page cache: pages of
other files stay cached, and the same few pages are used again. A new page can cost more than the
copy of its bytes, if the kernel has to reclaim it, or a virtual machine has to get it from its
host.
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
"""Bytes of one request for writeback."""

WINDOW_RUNS = 8
"""Requests that may be in progress; with more, the writer waits for the oldest."""

_WAIT_BEFORE, _WRITE, _WAIT_AFTER = 1, 2, 4  # SYNC_FILE_RANGE_*, linux/fs.h

_UNSUPPORTED = frozenset(
    {errno.EINVAL, errno.ENOSYS, errno.ESPIPE, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EPERM}
)
"""Answers of a file system or sandbox without this call: then all is left to fsync."""


class Writeback:
    """Starts writeback of a file while it is still being written.

    Args:
        descriptor: The file; the caller closes it.
        keeps_pages: Whether pages stay in the page cache once they are on disk.
    """

    def __init__(self, descriptor: int, *, keeps_pages: bool = False) -> None:
        """Start with an empty file."""
        self._descriptor, self._keeps_pages = descriptor, keeps_pages
        self._start = self._stop = 0  # written, and not requested yet
        self._runs: deque[tuple[int, int]] = deque()
        self._is_on = True

    def note(self, start: int, stop: int) -> None:
        """Note that bytes were written; bytes that are not consecutive are left to fsync.

        Raises:
            OSError: An earlier request failed. It must fail the save here: the kernel reports a
                writeback error once, and fsync may then succeed.
        """
        if start != self._stop:
            self._start = start
        self._stop = stop
        if stop - self._start >= RUN_NBYTES and self._is_on:
            self._is_on = self._give()

    def _give(self) -> bool:
        """Request a run and wait for the oldest one; False if the system has no such call."""
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
