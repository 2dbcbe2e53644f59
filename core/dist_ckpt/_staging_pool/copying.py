"""Copies of tensors into staging memory: exact, by several threads, now or in the background.

Here: ``Copier``, its threads, and the proof that nothing changed under a copy. Not here: how one
tensor is copied (``copy_steps``), the memory (``pool``), what is copied where (the formats). Local,
on every rank.

Host memory goes by ``memmove`` in blocks, which runs without the interpreter's lock; what a GPU
holds is enqueued on a stream of our own; anything else is copied by torch, as integers.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent import futures
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import torch

from dist_ckpt._staging_pool.copy_steps import (
    BLOCK_NBYTES,
    Copy,
    Watched,
    check_copy,
    copy_batch,
    copy_blocking,
    copy_on_stream,
    copy_piece,
    is_ordinary,
    move,
    pieces,
)
from dist_ckpt._staging_pool.memory import is_plain
from dist_ckpt.errors import AsyncSaveError, BarrierTimeoutError, ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Copier", "Copy", "CopyPlan", "CopyTask"]

logger = logging.getLogger(__name__)

_SMALL_NBYTES = 64 << 10
"""Up to here a copy costs less than handing it to a thread: it is made where it is found."""

_BATCH_NUMEL = 32 << 10
"""Up to here torch copies in the thread that asks; beyond, it may start more for each of ours."""

_Job: TypeAlias = Callable[[], object]


class CopyTask:
    """Copies under way, made by ``Copier.start``. From any thread.

    It keeps the memory of the sources until they are copied.
    """

    def __init__(self, jobs: deque[_Job], watched: Watched, thread_count: int) -> None:
        """Begin; ``work`` is to be called that many times, in whichever threads."""
        self._jobs, self._watched = jobs, watched
        self._lock = threading.Lock()
        self._working = thread_count
        self._done = threading.Event()
        self._failure: BaseException | None = None
        self._is_settled = False
        self._callbacks: list[Callable[[BaseException | None], object]] = []
        self.threads: list[futures.Future[None]] = []
        if not thread_count:
            self._finish()

    @property
    def is_done(self) -> bool:
        """Whether ``wait`` returns or raises at once."""
        return self._done.is_set()

    def wait(self, timeout_secs: float) -> None:
        """Return when all is copied. May be called again, also after a failure.

        Raises:
            AsyncSaveError: Sources changed while they were copied; names all. The copies are void.
            InvalidShardingError: A tensor cannot be copied.
            StorageError: A device has no memory left to copy from.
            BarrierTimeoutError: It took longer; the copies go on.
        """
        if not self._done.wait(timeout_secs):
            raise BarrierTimeoutError(
                f"copying tensors to staging memory took longer than {timeout_secs:g} s: "
                f"{len(self._jobs)} pieces have not been begun.",
                hint="the machine is short of memory or of processors, or a GPU is stuck.",
            )
        if self._failure is not None:
            raise self._failure

    def add_done_callback(self, callback: Callable[[BaseException | None], object]) -> None:
        """Call ``callback`` once with None or with what failed, when that is known; now if it is.

        In the thread that ends last, before ``wait`` returns: so it must not wait for the task.
        What it raises is logged.
        """
        with self._lock:
            if not self._is_settled:
                self._callbacks.append(callback)
                return
        _call(callback, self._failure)

    def abandon(self) -> None:
        """Begin no more copies and wait for those that were begun: then nobody writes any more.

        If some were not made, the task has failed.
        """
        with self._lock:
            if self._jobs and self._failure is None:
                self._failure = AsyncSaveError("the copies to staging memory were given up.")
            self._jobs.clear()
        futures.wait(self.threads)

    def work(self) -> None:
        """Make copies until there are none left. Whoever ends last settles the task."""
        try:
            while (job := self._next()) is not None:
                job()
        except BaseException as error:  # noqa: BLE001 - `wait` raises it
            self._jobs.clear()
            with self._lock:
                self._failure = self._failure or error
        finally:
            with self._lock:
                self._working -= 1
                is_last = not self._working
            if is_last:
                self._finish()

    def _next(self) -> _Job | None:
        try:
            return self._jobs.popleft()
        except IndexError:
            return None

    def _finish(self) -> None:
        changed = self._watched.changed()
        if changed and self._failure is None:
            self._failure = AsyncSaveError(
                f"{len(changed)} tensors changed while they were copied: "
                f"{', '.join(map(repr, changed))}.",
                hint="nothing may change parameters or optimizer state before the copies are made; "
                "save without overlap, or wait for them first.",
            )
        self._watched = Watched()  # the sources may go, and their memory with them
        with self._lock:
            self._is_settled = True
        for callback in self._callbacks:
            _call(callback, self._failure)
        self._callbacks.clear()
        self._done.set()


class Copier:
    """Copies with threads that are kept from save to save. For one thread at a time.

    Args:
        thread_count: How many copy at a time. ``run`` makes its caller one of them.

    Raises:
        ConfigError: ``thread_count`` is not positive.
    """

    def __init__(self, *, thread_count: int = 2) -> None:
        """Start no thread yet."""
        if thread_count < 1:
            raise ConfigError(f"expected a thread_count of 1 or more, found {thread_count}.")
        self._thread_count = thread_count
        self._executor = futures.ThreadPoolExecutor(thread_count, "staging-copy")
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._is_closed = False

    def run(self, copies: Sequence[Copy] | CopyPlan) -> None:
        """Copy all; return when that is done. When it raises, nothing is copied any more.

        Raises:
            InvalidShardingError: A tensor has no data, or does not fit its target.
            StorageError: A device has no memory left to copy from.
            ConfigError: The copier is closed.
        """
        plan = copies if isinstance(copies, CopyPlan) else CopyPlan(copies)
        jobs = self._begun(plan)
        helpers = max(min(self._thread_count, len(jobs)) - 1, 0)
        task = CopyTask(jobs, plan.watched, helpers + 1)
        try:
            self._submit(task, helpers)
            task.work()
            futures.wait(task.threads)
        except BaseException:
            task.abandon()
            raise
        task.wait(0)

    def start(self, copies: Sequence[Copy] | CopyPlan) -> CopyTask:
        """Copy in the background what the sources hold now, in order of the devices' streams.

        Until the task is done nothing may change the sources. A change is an error of the task. It
        is known by a tensor's version, which torch counts up, and by samples of host memory, as
        some optimizers (fused ones) and ``.data`` do not count.

        Raises:
            InvalidShardingError: A tensor has no data, or does not fit its target; nothing is
                copied any more then.
            ConfigError: The copier is closed.
        """
        plan = copies if isinstance(copies, CopyPlan) else CopyPlan(copies, watches=True)
        jobs = self._begun(plan)
        task = CopyTask(jobs, plan.watched, min(self._thread_count, len(jobs)))
        self._submit(task, min(self._thread_count, len(jobs)))
        return task

    def close(self) -> None:
        """Wait for copies under way, then end the threads. Idempotent."""
        self._is_closed = True
        self._executor.shutdown(wait=True)
        self._streams.clear()

    def _begun(self, plan: CopyPlan) -> deque[_Job]:
        """Return what is to be done, after making the small copies at once."""
        if self._is_closed:
            raise ConfigError("the copier is closed.")
        plan.begin()
        devices = (self._device_job(one, copies) for one, copies in plan.on_devices.items())
        return deque([*devices, *plan.jobs])

    def _device_job(self, device: torch.device, copies: Sequence[Copy]) -> _Job:
        if device.type != "cuda":
            return partial(copy_blocking, copies)
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # Taken here: what the caller enqueues later does not count any more.
        ready = torch.cuda.current_stream(device).record_event()
        return partial(copy_on_stream, self._streams[device], ready, copies)

    def _submit(self, task: CopyTask, thread_count: int) -> None:
        for _ in range(thread_count):
            try:
                task.threads.append(self._executor.submit(task.work))
            except RuntimeError:
                # The interpreter is ending and starts no threads: this one does their part.
                task.work()


def _call(callback: Callable[[BaseException | None], object], error: BaseException | None) -> None:
    try:
        callback(error)
    except Exception:
        logger.exception("who waited for copies failed")


class CopyPlan:
    """Copies cut into pieces of work; may be made again while sources and targets stay the same.

    Args:
        copies: All of them.
        watches: Whether sources may change meanwhile, which is then an error.

    Raises:
        InvalidShardingError: A tensor has no data, or does not fit its target.
    """

    def __init__(self, copies: Sequence[Copy], *, watches: bool = False) -> None:
        """Check and cut; nothing is copied yet."""
        self.jobs: list[_Job] = []
        self.on_devices: dict[torch.device, list[Copy]] = {}
        self.watched = Watched()
        self._watches = watches
        self._small: list[Copy] = []
        self._batch: list[Copy] = []
        self._batch_nbytes = 0
        with torch.no_grad():
            for copy in copies:
                self._add(copy)
        self._end_batch()

    def begin(self) -> None:
        """Note how the watched sources are now, and make the small copies."""
        self.watched.note()
        try:
            copy_batch(self._small)
        except RuntimeError:
            for copy in self._small:
                check_copy(copy)
            raise

    def _add(self, copy: Copy) -> None:
        nbytes, is_like_others = copy.target.nbytes, is_ordinary(copy)
        if is_like_others and nbytes <= _SMALL_NBYTES:
            self._small.append(copy)
            return
        check_copy(copy)
        if self._watches:
            copy = self.watched.add(copy)
        if not copy.source.is_cpu:
            self.on_devices.setdefault(copy.source.device, []).append(copy)
        elif is_like_others and copy.target.numel() <= _BATCH_NUMEL:
            self._add_to_batch(copy, nbytes)
        elif is_plain(copy.source):
            self._add_blocks(copy, nbytes)
        else:
            for target, source in pieces(copy):
                self.jobs.append(partial(copy_piece, target, source, copy.name))

    def _end_batch(self) -> None:
        if self._batch:
            self.jobs.append(partial(copy_batch, self._batch))
        self._batch, self._batch_nbytes = [], 0

    def _add_to_batch(self, copy: Copy, nbytes: int) -> None:
        self._batch.append(copy)
        self._batch_nbytes += nbytes
        if self._batch_nbytes >= BLOCK_NBYTES:
            self._end_batch()

    def _add_blocks(self, copy: Copy, nbytes: int) -> None:
        # The plan keeps the memory, not only its address.
        job = partial(_move_block, copy)
        for position in range(0, nbytes, BLOCK_NBYTES):
            self.jobs.append(partial(job, position, min(BLOCK_NBYTES, nbytes - position)))


def _move_block(copy: Copy, position: int, nbytes: int) -> None:
    move(copy.target.data_ptr() + position, copy.source.data_ptr() + position, nbytes)
