"""Whether the pages of a save stay in the page cache after they are on disk.

Here: the policy (``should_keep``), and what one process of a save does by it (``PagePolicy``). Not
here: the system calls (``storage``), how much memory there is (``available``). Local; no torch: the
process that writes in the background uses it too. See docs/decisions/0037-page-cache.md.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from dist_ckpt._engine.available import available_nbytes
from dist_ckpt.storage.local import LARGE_NBYTES, drop_pages

if TYPE_CHECKING:
    from dist_ckpt.options import PageCache

__all__ = ["PagePolicy", "num_writers_by_rank", "should_keep"]

KEPT_SHARE: Final = 4
"""By ``auto`` a checkpoint stays if it takes at most one part in so many of what is available."""


def should_keep(
    choice: PageCache, *, nbytes: int, available: int | None, num_writers: int = 1
) -> bool:
    """Return whether one rank's files of a save stay in the page cache.

    Args:
        choice: ``SaveOptions.page_cache``.
        nbytes: Bytes that this rank writes.
        available: Bytes of memory that a process of this host can still get; None if unknown.
        num_writers: Ranks of this host that write: they share the memory.
    """
    if choice != "auto":
        return choice == "keep"
    return available is not None and nbytes * num_writers * KEPT_SHARE <= available


def num_writers_by_rank(hosts: Sequence[str], work: Sequence[object]) -> list[int]:
    """Return for each rank how many ranks of its host have something to write, at least 1."""
    writers = Counter(host for host, one in zip(hosts, work, strict=True) if one)
    return [max(writers[host], 1) for host in hosts]


@dataclass(frozen=True, slots=True)
class PagePolicy:
    """What becomes of the pages of one save; picklable.

    Attributes:
        choice: ``SaveOptions.page_cache``.
        num_writers: Ranks of this rank's host that write.
        target: Where the checkpoint is once it is committed; None if nobody knows.
    """

    choice: PageCache = "auto"
    num_writers: int = 1
    target: Path | None = None

    def begin(self, files: Sequence[tuple[str, int]]) -> bool:
        """Return whether the pages of these files stay; drop those of the save before.

        One checkpoint of a process stays, the newest. The one before is dropped now and not when
        the new one is committed: its pages are the ones that the new one takes, and two
        checkpoints are never held at a time.

        Args:
            files: Name and size of each file that is about to be written by this process.
        """
        nbytes = sum(size for _, size in files)
        available = available_nbytes() if self.choice == "auto" else None
        keeps = should_keep(
            self.choice, nbytes=nbytes, available=available, num_writers=self.num_writers
        )
        superseded: list[Path] = []
        if self.choice == "auto" and keeps and self.target is not None:
            superseded = [self.target / name for name, size in files if size >= LARGE_NBYTES]
        _drop_all(_newest.replace_by(superseded))
        return keeps


class _Newest:
    """The files of this process that ``auto`` has kept, to be dropped when they are superseded."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._paths: Sequence[Path] = ()

    def replace_by(self, paths: Sequence[Path]) -> Sequence[Path]:
        with self._lock:
            old, self._paths = self._paths, paths
        return old


_newest: Final = _Newest()


def _drop_all(paths: Iterable[Path]) -> None:
    """Drop the pages of files; those that were removed or renamed since have none of ours."""
    for path in paths:
        with suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                drop_pages(descriptor)
            finally:
                os.close(descriptor)
