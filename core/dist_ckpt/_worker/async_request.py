"""The writing of an ``AsyncRequest``, done by a process of its own.

Here: ``staged_write``, which copies what a planned save writes and returns a function that has it
written. Not here: who calls that function (``strategies.async_utils``), the commit
(``_saving.execute``), saves without a request (``background``).

Whoever calls the function waits in it, in whichever thread; the bytes are written without the
interpreter's lock. One worker and one pool of memory serve all requests of this process: requests
have no owner that could keep them.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import weakref
from typing import TYPE_CHECKING, Final

from dist_ckpt._comm.outcome import attempt
from dist_ckpt._formats.base import Written
from dist_ckpt._formats.torch_dist.layout import rank_chunks
from dist_ckpt._process.endings import at_exit
from dist_ckpt._saving.plan import is_made_of_bytes, lay_out
from dist_ckpt._staging_pool.copying import Copier
from dist_ckpt._staging_pool.pool import StagingPool
from dist_ckpt._worker.orders import FileOrder
from dist_ckpt._worker.worker import Worker
from dist_ckpt.errors import BarrierTimeoutError, ConfigError, StorageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from dist_ckpt._saving.execute import SaveInSteps
    from dist_ckpt._saving.image import FileImage
    from dist_ckpt._staging_pool.pool import Lease
    from dist_ckpt.storage.checksums import FileSum

__all__ = ["staged_write"]

logger = logging.getLogger(__name__)

_CLOSE_SECS = 60.0


class _Side:
    """Worker, memory and copier of this process."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.pool, self.copier = StagingPool(generations=2), Copier(thread_count=2)
        self.worker = Worker(kind="process", rank=int(os.environ.get("RANK", "0")))
        self.numbers = itertools.count(1)
        at_exit(close=self.close)

    def close(self) -> None:
        self.worker.close(_CLOSE_SECS)
        self.copier.close()


class _Sides:
    """The side of this process, made when it is needed; a forked child makes its own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._side: _Side | None = None

    def get(self) -> _Side:
        with self._lock:
            if self._side is None or self._side.pid != os.getpid():
                self._side = _Side()
            return self._side


_SIDES: Final = _Sides()


def staged_write(save: SaveInSteps) -> Callable[[], None] | None:
    """Copy what a planned save writes; return what has it written. Local, on every rank.

    Returns:
        A function for any thread, once; it keeps result or failure for ``save.commit``. None if
        there is no free memory, or if the format needs the tensors themselves: then the caller
        copies and writes in its own process.
    """
    planned = save.planned
    if not is_made_of_bytes(planned.prepared.request):
        return None
    image = lay_out(planned)
    try:
        side = _SIDES.get()
        side.worker.start()
        lease = side.pool.acquire(max(image.nbytes, 1), timeout_secs=0.0, what="a request")
    except (BarrierTimeoutError, ConfigError, StorageError) as error:
        logger.info("an asynchronous save is written by this process: %s", error)
        return None
    if lease.nbytes < image.nbytes:
        lease.release()
        return None
    try:
        image.put_frames(lease.arena)
        side.copier.run(image.copies(image.targets(lease.arena), planned.prepared.shards))
    except BaseException:
        lease.release()
        raise
    return _Write(side, save, image, lease).run


class _Write:
    """One staged write; gives its memory back when it is done, or forgotten."""

    def __init__(self, side: _Side, save: SaveInSteps, image: FileImage, lease: Lease) -> None:
        self._side, self._save, self._image, self._lease = side, save, image, lease
        self._release = weakref.finalize(self, lease.release)

    def run(self) -> None:
        """Have it written; what goes wrong is kept for the commit."""
        if not self._save.has_failed:
            self._save.written = attempt(self._write)
        self._release()

    def _write(self) -> Written:
        for key in self._lease.retired:
            self._side.worker.forget_arena(key)
        planned = self._save.planned
        save = self._side.worker.begin(
            next(self._side.numbers),
            FileOrder(
                directory=planned.directory,
                files=self._image.names,
                rank=planned.rank,
                commits=False,
                pages=planned.pages,
            ),
            descriptor=self._lease.arena.descriptor,
            arena_key=self._lease.key,
            nbytes=self._lease.nbytes,
            point=None,
        )
        for run in self._image.runs():
            save.staged(run)
        save.all_staged()
        files: dict[str, FileSum] = save.outcome.result()
        return Written(files=files, results=rank_chunks(self._image.files))
