"""Whether the pages of a save stay in the page cache after they are on disk.

Here: the policy (``should_keep``), and applying it in one process of a save (``PagePolicy``). Not
here: the system calls (``storage``), how much memory there is (``available``). Local; no torch: the
process that writes in the background uses it too. See docs/decisions/0037-page-cache.md.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from dist_ckpt._process.available import available_nbytes
from dist_ckpt.storage.local import LARGE_NBYTES, drop_pages_of

if TYPE_CHECKING:
    from dist_ckpt.options import PageCache

__all__ = ["PagePolicy", "num_writers_by_rank", "should_keep"]

KEPT_SHARE: Final = 4
"""``auto`` keeps a checkpoint that takes at most ``1 / KEPT_SHARE`` of the available memory."""


def should_keep(
    choice: PageCache, *, nbytes: int, available: int | None, num_writers: int = 1
) -> bool:
    """Return whether one rank's files of a save stay in the page cache.

    Args:
        choice: ``SaveOptions.page_cache``.
        nbytes: Bytes that this rank writes.
        available: Bytes of memory that a process on this host can still allocate; None if unknown.
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
    """What happens to the pages of one save; picklable.

    Attributes:
        choice: ``SaveOptions.page_cache``.
        num_writers: Ranks of this rank's host that write.
        target: Where the checkpoint is once it is committed; None if unknown.
    """

    choice: PageCache = "auto"
    num_writers: int = 1
    target: Path | None = None

    def begin(self, files: Sequence[tuple[str, int]]) -> bool:
        """Return whether the pages of these files stay; drop the pages of the previous save.

        Only the newest checkpoint of a process stays. The previous one is dropped now and not when
        the new one is committed: the new one reuses its pages, and the page cache never holds both.

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
        drop_pages_of(_newest.replace_by(superseded))
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
