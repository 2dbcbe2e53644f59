"""Saves that go on while training continues.

Here: ``BackgroundSaver``, from the call to the hand-over, and what waits for a save. Not here:
planning (``_saving.plan``), copying (``_worker.submit``), how saves end (``_worker.queue``), the
worker (``_worker``). Called on every rank alike, from the thread that trains. See
docs/decisions/0017-background-saves.md.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from dist_ckpt._comm import default_communicator
from dist_ckpt._comm.hosts import hosts_of_this_rank
from dist_ckpt._formats.native import new_format
from dist_ckpt._process.endings import at_exit
from dist_ckpt._saving.describe_live import LiveDescriptions
from dist_ckpt._saving.plan import Planner
from dist_ckpt._saving.request import SaveCall, SaveRequest
from dist_ckpt._staging_pool.copying import Copier
from dist_ckpt._staging_pool.pool import StagingPool
from dist_ckpt._worker.queue import SaveQueue
from dist_ckpt._worker.result import SaveInFlight, duplicate_communicator
from dist_ckpt._worker.step_guard import step_guard
from dist_ckpt._worker.submit import StagingResources, submit_save
from dist_ckpt._worker.worker import Worker
from dist_ckpt.errors import (
    AsyncSaveError,
    BarrierTimeoutError,
    CheckpointingException,
    ConfigError,
)
from dist_ckpt.events import (
    Event,
    EventSink,
    Failed,
    Pruned,
    SaveStarted,
    Staged,
    Written,
    emit_to,
)
from dist_ckpt.options import BackgroundOptions, SaveOptions, checked_path, path_to_tell

if TYPE_CHECKING:
    from concurrent.futures import Future

    from dist_ckpt._worker.hub import HubAddress
    from dist_ckpt.config import DistCkptConfig
    from dist_ckpt.types import Communicator, PathLike, ShardedStateDict

__all__ = ["BackgroundOptions", "BackgroundSaver", "saver_of"]

logger = logging.getLogger(__name__)

_GENERATIONS = 2
_CLOSE_SECS = 60.0
_DROP_SECS = 1.0


class _Machinery:
    """The resources of a saver: worker, threads and memory.

    It has no reference to the saver, so that a saver without references is collected.
    """

    def __init__(
        self, options: BackgroundOptions, sinks: tuple[EventSink, ...], timeout_secs: float
    ) -> None:
        self._options, self._sinks, self._timeout_secs = options, sinks, timeout_secs
        self.queue = SaveQueue(self.emit)
        self.pool: StagingPool | None = None
        self.copier: Copier | None = None
        self.worker: Worker | None = None
        self._guard: Any = None
        self._pid = os.getpid()
        self._is_retired = self._is_given_up = False
        self._is_released = threading.Event()
        self._forget_exit = at_exit(finish=self._finish_at_exit, close=self._close_at_exit)

    def emit(self, event: Event) -> None:
        emit_to(self._sinks, event)

    def worker_of(self, rank: int) -> Worker:
        if self.worker is None:
            self.worker = Worker(kind=self._options.worker, rank=rank)
        return self.worker

    def staging_resources(self, worker: Worker, timeout_secs: float) -> StagingResources:
        if self.pool is None:
            self.pool = StagingPool(
                generations=min(_GENERATIONS, self._options.max_in_flight),
                budget_nbytes=self._options.staging_budget,
            )
        if self.copier is None:
            self.copier = Copier(thread_count=self._options.copy_threads)
        self.guard_optimizers()
        return StagingResources(
            pool=self.pool,
            copier=self.copier,
            worker=worker,
            overlap=self._options.overlap,
            timeout_secs=timeout_secs,
        )

    def guard_optimizers(self) -> None:
        if self._options.overlap and self._guard is None:
            self._guard = step_guard(self)

    def finish_staging(self) -> None:
        """Return when all copies are done; see ``BackgroundSaver.finish_staging``."""
        for submitted in self.queue.submitted:
            if submitted.task is None:
                continue
            try:
                submitted.task.wait(self._timeout_secs)
            except BarrierTimeoutError:
                raise  # going on would change what is being copied
            except CheckpointingException:
                continue  # `poll` raises it

    def drain(self, timeout_secs: float | None = None) -> None:
        """Wait until nothing is in flight and queued, and raise what failed."""
        limit = self._options.drain_timeout_secs if timeout_secs is None else timeout_secs
        self.queue.wait_for(self.queue.is_idle, limit, "waiting for saves")
        self.queue.raise_failures()

    def close(self, timeout_secs: float | None, *, leaves: bool = False) -> None:
        """Drain, then release everything; see ``BackgroundSaver.close``."""
        try:
            self.drain(timeout_secs)
        except BarrierTimeoutError:
            if leaves and self.worker is not None:
                self.worker.leave()
            raise
        finally:
            self._release(_CLOSE_SECS if timeout_secs is None else min(_CLOSE_SECS, timeout_secs))

    def retire(self) -> None:
        """Release everything once the saves in flight have ended; do not wait for them.

        Called when the saver is collected, in any thread and under any lock, so it starts no
        thread. If nothing is in flight, the main thread waits up to ``_DROP_SECS``, so that the
        next saver usually finds memory and processors free.
        """
        if os.getpid() != self._pid:
            return  # a forked child: all is its parent's
        self._is_retired = True
        if self.queue.retire(self._end_retired):
            in_main = threading.current_thread() is threading.main_thread()
            if in_main and not self.queue.in_flight:
                self._is_released.wait(_DROP_SECS)
            return
        self._forget_exit()
        if self._guard is not None:
            self._guard.remove()
        if self.worker is not None:
            self.worker.end_soon()

    def _end_retired(self) -> None:
        try:
            self.queue.raise_failures()
        except AsyncSaveError:
            logger.exception("a saver was dropped without being closed, and its save failed")
        self._release(_CLOSE_SECS)

    def _finish_at_exit(self) -> None:
        try:
            self.drain()
        except BarrierTimeoutError:
            self._is_given_up = True
            raise

    def _close_at_exit(self) -> None:
        if self._is_retired:
            if not self._is_released.wait(_CLOSE_SECS):
                self.queue.close(_CLOSE_SECS)
        elif self._is_given_up:
            self._release(_CLOSE_SECS)
        else:
            self.close(None)

    def _release(self, timeout_secs: float) -> None:
        self._forget_exit()
        if self._guard is not None:
            self._guard.remove()
        if self.worker is not None:
            self.worker.close(timeout_secs)  # after that no save is open any more
        self.queue.close(_CLOSE_SECS)
        if self.copier is not None:
            self.copier.close()
        if self.pool is not None:
            self.pool.retire()  # no process reads it any more, even if leases are open
        self._is_released.set()


class BackgroundSaver:
    """Writes checkpoints in the background, in the order in which they are asked for.

    One for each rank, made and used alike on all of them, by the thread that trains. A save is
    visible when the files of all ranks are durable, whatever this thread does meanwhile. One that
    fails is raised once, on every rank: by the next ``poll``, at the same one everywhere; or by the
    next save, ``wait``, ``drain`` or ``close``.

    Pass it to ``dist_ckpt.training_state.save_training_state``. Close it; a saver that is collected
    without ``close`` finishes its saves, logs failures, and then releases its resources.

    Args:
        options: How to save.
        sinks: Take the events of every save.
        timeout_secs: How long to wait for free memory, and for the worker to start.
    """

    def __init__(
        self,
        options: BackgroundOptions | None = None,
        *,
        sinks: Iterable[EventSink] = (),
        timeout_secs: float = 1800.0,
    ) -> None:
        """Start nothing yet."""
        self.options = options or BackgroundOptions()
        self._timeout_secs = timeout_secs
        self.descriptions = LiveDescriptions()
        self._machinery = _Machinery(self.options, tuple(sinks), timeout_secs)
        self._queue = self._machinery.queue
        self._planner = Planner(self._queue)
        self._emit = self._machinery.emit
        self._number = 0
        self._accepted: deque[int] = deque(maxlen=self.options.max_in_flight)
        self._rank = 0
        self._closed = False
        self._pid = os.getpid()
        # A saver that is collected without `close`: its saves end, then its resources are released.
        self._when_dropped = weakref.finalize(self, self._machinery.retire)
        self._when_dropped.atexit = False  # `at_exit` does that

    def __enter__(self) -> Self:
        """Return the saver."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()

    def start(self) -> None:
        """Start the worker before it is needed; local, waits for nothing.

        Raises:
            ConfigError: The saver is closed.
        """
        self._check_open()
        # The first save may come in the closure of a step that has begun.
        self._machinery.guard_optimizers()
        self._worker_of(self._rank_of_job()).start()

    @property
    def in_flight(self) -> tuple[Path, ...]:
        """Where the saves go that have not ended, oldest first."""
        return self._queue.in_flight

    def poll(self) -> None:
        """Raise the failure of a save that has ended, once. Cheap: call it each batch.

        Raises:
            AsyncSaveError: A save failed; on every rank at the same call, counted from the first.
        """
        self._queue.poll()

    def after_commit(
        self, action: Callable[[], None], *, what: str, frees_space: bool = False
    ) -> None:
        """Run ``action`` once the newest save in flight is committed; now if there is none.

        On a thread of the saver, in the order of the calls. If that save fails, ``action`` is not
        run. What it raises then is logged.

        Args:
            action: Takes no arguments.
            what: What it does, for the log.
            frees_space: Whether it removes something large: once it is due, the next save waits for
                it, so that a run needs no more of the disk than one whose saves block.
        """
        self._queue.after(action, what, frees_space=frees_space)

    def wait(self, path: PathLike | None = None, *, timeout_secs: float | None = None) -> None:
        """Wait until a path is not in flight any more, or nothing is.

        Args:
            path: A target, also through links; None for all saves.
            timeout_secs: The drain time-out of the options if None.

        Raises:
            AsyncSaveError: A save failed and nobody was told.
            BarrierTimeoutError: It takes longer.
        """
        limit = self.options.drain_timeout_secs if timeout_secs is None else timeout_secs
        if path is None:
            self._queue.wait_for(lambda: self._queue.has_room(1), limit, "waiting for saves")
            self._queue.raise_failures()
            return
        number = self._queue.newest_to(path_to_tell(path))
        self._queue.wait_for(lambda: self._queue.is_past(number), limit, f"waiting for {path}")
        # Not those before it: whether this rank has waited here, the others do not know.
        self._queue.raise_failures(upto=number, path=path_to_tell(path))

    def drain(self, *, timeout_secs: float | None = None) -> None:
        """Wait until nothing is in flight and all queued actions have run.

        Raises:
            AsyncSaveError: A save failed and nobody was told.
            BarrierTimeoutError: It takes longer.
        """
        self._machinery.drain(timeout_secs)

    def pruned(self, path: PathLike, reason: str) -> None:
        """Tell the sinks that a checkpoint was removed. From any thread."""
        self._emit(
            Pruned(
                path=os.fspath(path), rank=self._rank, save=self._number, is_async=True,
                reason=reason,
            )
        )  # fmt: skip

    def finish_staging(self) -> None:
        """Return when all copies are done, so that parameters may change. Local.

        What failed in a copy fails the save.

        Raises:
            BarrierTimeoutError: The copies take too long.
        """
        self._machinery.finish_staging()

    def close(self, *, timeout_secs: float | None = None, leaves: bool = False) -> None:
        """Drain, then end worker, threads and memory; again does nothing.

        Args:
            timeout_secs: How long to wait for what is in flight; the drain time-out of the options
                if None.
            leaves: Whether the worker processes go on with what takes longer: they complete what
                all ranks have staged, as they do for a program that is killed.

        Raises:
            AsyncSaveError: A save failed and nobody was told; all is closed then, too.
            BarrierTimeoutError: What is in flight takes longer; it is given up, or left.
        """
        if self._closed:
            return
        self._closed = True
        self._when_dropped.detach()
        try:
            self._machinery.close(timeout_secs, leaves=leaves)
        finally:
            self.descriptions.forget()

    # -- a save

    def save(
        self,
        sharded_state_dict: ShardedStateDict,
        checkpoint_dir: PathLike,
        *,
        options: SaveOptions | None = None,
        communicator: Communicator | None = None,
    ) -> None:
        """Save a sharded state dict, as ``dist_ckpt.save`` does; return when it may change.

        Collective. Nothing is overlapped: what may change when is not known of such a dict.

        Args:
            sharded_state_dict: Nested dicts and lists; ``ShardedTensor`` and its like as leaves.
            checkpoint_dir: The directory to make.
            options: Further choices.
            communicator: The ranks, if not those of the default process group.

        Raises:
            AsyncSaveError: A save before it failed and nobody was told; this one does not begin.
            CheckpointingException: Planning failed, on every rank.
        """
        options = options or SaveOptions()
        comm = communicator or default_communicator(timeout_secs=options.timeout_secs)

        def build() -> SaveRequest:
            checked_path(checkpoint_dir)  # an invalid path is raised on every rank
            fmt = new_format(*options.format)
            return SaveRequest(state_dict=sharded_state_dict, format=fmt)

        call = SaveCall(
            build=build,
            target=path_to_tell(checkpoint_dir),
            comm=comm,
            options=options,
            check_coverage=options.verify_sharding,
        )
        self.submit(call)

    def submit(
        self,
        call: SaveCall,
        *,
        on_settled: Callable[[BaseException | None], None] | None = None,
    ) -> None:
        """Plan, stage and hand over one save. Collective.

        Returns when the state may change; with overlap, when all may but what is ``steady``.

        Raises:
            AsyncSaveError: A save before it failed and nobody was told; this one does not begin.
            CheckpointingException: Planning failed, on every rank.
        """
        self._check_open()
        started, limit = time.monotonic(), self.options.max_in_flight
        waited = self._queue.wait_for(
            lambda: self._queue.has_room(limit) and self._queue.has_space(),
            self._patience(call.options),
            f"saving {call.target}",
        )
        # The newest may be in flight on some rank; those before have ended on all.
        ended = self._accepted[0] if len(self._accepted) == limit else 0
        self._queue.raise_failures(upto=ended)
        self._number += 1
        common = {
            "path": str(call.target),
            "rank": call.comm.rank,
            "save": self._number,
            "is_async": True,
        }
        self._emit(SaveStarted(**common))  # type: ignore[arg-type]  # as it says
        try:
            save = self._begin(call)
        except BaseException as error:
            secs = time.monotonic() - started
            self._emit(Failed(**common, secs=secs, phase="planning", error=str(error)))  # type: ignore[arg-type]  # as above
            raise
        save.started, save.on_settled = started, on_settled
        try:
            self._announce(save, common, waited)
        finally:  # the worker has it: Ctrl-C in a sink must not leave its memory to nobody
            self._accepted.append(save.number)
            self._queue.add(save)
        if save.interrupt is not None:
            raise save.interrupt

    def _begin(self, call: SaveCall) -> SaveInFlight:
        comm, worker = call.comm, self._worker_of(call.comm.rank)

        def started() -> SaveRequest:
            # A part of the request: if one rank cannot, all are told.
            worker.start()
            self._queue.start()
            return call.build()

        planned = self._planner.plan(
            replace(call, build=started),
            serve=lambda: self._served(worker, comm),
            number=self._number,
        )
        save = SaveInFlight(number=self._number, path=call.target, comm=comm, planned=planned)
        try:
            save.submitted = submit_save(
                planned, self._number, self._staging_resources(worker, call.options)
            )
        except Exception as error:  # noqa: BLE001 - all ranks are told when it is settled
            save.error = error
        except BaseException as interrupt:  # noqa: BLE001 - raised when the others are told
            save.error = AsyncSaveError(f"rank {comm.rank} was interrupted: {interrupt!r}")
            save.interrupt = interrupt
        if save.submitted is not None:
            save.interrupt = save.submitted.interrupt
        return save

    def _served(self, worker: Worker, comm: Communicator) -> HubAddress | None:
        if comm.size == 1:
            return None
        duplicate_communicator(
            comm, "look", 1.0
        )  # refuses ranks that could not be told of a failure
        return worker.serve_hub(hosts_of_this_rank(), self._timeout_secs)

    def _announce(self, save: SaveInFlight, common: dict[str, Any], waited: float) -> None:
        """Tell of the copy when it is done, and of the writing."""
        submitted, emit = save.submitted, self._emit  # callbacks must not keep the saver
        if submitted is None:
            return
        stall = time.monotonic() - save.started

        def staged(error: BaseException | None) -> None:
            if error is None:
                secs = time.monotonic() - save.started - waited
                emit(
                    Staged(**common, stall_secs=stall, wait_secs=waited, copy_secs=secs,
                           nbytes=submitted.nbytes)
                )  # fmt: skip

        def written(done: Future[float]) -> None:
            if "written" in submitted.save.timings:
                emit(Written(**common, secs=done.result(), nbytes=submitted.save.nbytes))

        if submitted.task is None:
            staged(submitted.failure)
        else:
            submitted.task.add_done_callback(staged)
        submitted.save.written.add_done_callback(written)

    def _staging_resources(self, worker: Worker, options: SaveOptions) -> StagingResources:
        return self._machinery.staging_resources(worker, self._patience(options))

    def _worker_of(self, rank: int) -> Worker:
        self._rank = rank
        return self._machinery.worker_of(rank)

    def _rank_of_job(self) -> int:
        return default_communicator(timeout_secs=self._timeout_secs).rank

    def _patience(self, options: SaveOptions) -> float:
        """Return how long a save before may take to end: it has time-outs of its own."""
        return max(self._timeout_secs, 2 * options.timeout_secs)

    def _check_open(self) -> None:
        if self._closed:
            raise ConfigError("the saver is closed.")
        if os.getpid() != self._pid:
            raise ConfigError(
                "this saver was made in another process.",
                hint="make one in each rank, after it was started.",
            )


def saver_of(config: DistCkptConfig, sinks: Iterable[EventSink]) -> BackgroundSaver:
    """Return the saver that a configuration asks for.

    Args:
        config: With ``async_save``.
        sinks: Take the events of every save, see ``events.sinks_of``.
    """
    mib = config.staging_budget_mib
    options = BackgroundOptions(
        worker=config.worker,
        overlap=config.overlap,
        max_in_flight=config.max_in_flight,
        staging_budget=None if mib is None else mib << 20,
        copy_threads=config.thread_count,
        drain_timeout_secs=config.drain_timeout_secs,
    )
    return BackgroundSaver(options, sinks=sinks, timeout_secs=config.timeout_secs)
