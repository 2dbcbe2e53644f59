"""The write step of an ``AsyncRequest``, carried out by a worker process.

Here: ``staged_write``, which copies the data of a planned save into staging memory and returns a
function that has the worker write it. Not here: who calls that function
(``strategies.async_utils``), the commit (``_saving.execute``), saves without a request
(``background``).

The function blocks the thread that calls it, but not the interpreter: the bytes are written by
another process. A request has no owner that could keep a worker and a pool, so one of each serves
all requests of this process.
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


class _ProcessResources:
    """Worker, staging pool and copier that serve all requests of this process."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.pool, self.copier = StagingPool(generations=2), Copier(thread_count=2)
        self.worker = Worker(kind="process", rank=int(os.environ.get("RANK", "0")))
        self.numbers = itertools.count(1)
        at_exit(close=self.close)

    def close(self) -> None:
        self.worker.close(_CLOSE_SECS)
        self.copier.close()


class _ResourcesOfProcess:
    """Makes the resources when they are first needed; a forked child makes its own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._resources: _ProcessResources | None = None

    def get(self) -> _ProcessResources:
        with self._lock:
            if self._resources is None or self._resources.pid != os.getpid():
                self._resources = _ProcessResources()
            return self._resources


_RESOURCES: Final = _ResourcesOfProcess()


def staged_write(save: SaveInSteps) -> Callable[[], None] | None:
    """Copy the data of a planned save; return a function that has it written. Local, every rank.

    Returns:
        A function to be called once, from any thread; it keeps the result or the error for
        ``save.commit``. None if no staging memory is free, or if the format needs the tensors
        themselves: then the caller copies and writes in its own process.
    """
    planned = save.planned
    if not is_made_of_bytes(planned.prepared.request):
        return None
    image = lay_out(planned)
    try:
        resources = _RESOURCES.get()
        resources.worker.start()
        lease = resources.pool.acquire(max(image.nbytes, 1), timeout_secs=0.0, what="a request")
    except (BarrierTimeoutError, ConfigError, StorageError) as error:
        logger.info("an asynchronous save is written by this process: %s", error)
        return None
    if lease.nbytes < image.nbytes:
        lease.release()
        return None
    try:
        image.put_frames(lease.arena)
        resources.copier.run(image.copies(image.targets(lease.arena), planned.prepared.shards))
    except BaseException:
        lease.release()
        raise
    return _StagedWrite(resources, save, image, lease).run


class _StagedWrite:
    """One staged write; releases its lease when it has run, or when it is collected without."""

    def __init__(
        self, resources: _ProcessResources, save: SaveInSteps, image: FileImage, lease: Lease
    ) -> None:
        self._resources, self._save, self._image, self._lease = resources, save, image, lease
        self._release = weakref.finalize(self, lease.release)

    def run(self) -> None:
        """Have the worker write; an error is kept for the commit."""
        if not self._save.has_failed:
            self._save.written = attempt(self._write)
        self._release()

    def _write(self) -> Written:
        for key in self._lease.retired:
            self._resources.worker.forget_arena(key)
        planned = self._save.planned
        save = self._resources.worker.begin(
            next(self._resources.numbers),
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
