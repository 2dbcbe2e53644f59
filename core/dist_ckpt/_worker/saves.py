"""One background save, as the training process sees it.

Here: ``WorkerSave``: messages about staged bytes to the worker, and futures for its progress. Not
here: the worker (``worker``, ``link``), what happens after the outcome (``background``).

The futures are completed by the thread that receives from the worker: their callbacks must be short
and must not wait for this worker.
"""

from __future__ import annotations

import logging
import pickle
import threading
import time
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from dist_ckpt._comm.failures import describe_failure
from dist_ckpt._process.endings import is_ending
from dist_ckpt._worker.agreement import report_dead_worker
from dist_ckpt._worker.hub_client import HubClient
from dist_ckpt._worker.messages import Abandon, AllStaged, Ended, Freed, StagedRun, Written
from dist_ckpt.errors import AsyncSaveError, BarrierTimeoutError, CheckpointingException

if TYPE_CHECKING:
    from collections.abc import Callable

    from dist_ckpt._saving.publish import CommitPoint
    from dist_ckpt._staging_pool.runs import Run
    from dist_ckpt._worker.orders import Order

__all__ = ["GivenUpError", "WorkerSave", "WorkerTraceback"]

logger = logging.getLogger(__name__)

_JOIN_SECS = 5.0


class GivenUpError(AsyncSaveError):
    """The end of this save is not waited for any more; it may still be committed."""


class WorkerTraceback(Exception):  # noqa: N818 - what it shows, not what went wrong
    """Cause of an error that was raised in a worker: the traceback there, as text."""


class WorkerSave:
    """A save that was given to a worker.

    Attributes:
        number: Its number.
        written: Seconds that writing took; completed once the worker no longer reads the arena,
            whether or not the save succeeds. Never fails.
        outcome: None for a committed save, the report of an order that does not commit, or the
            error.
        timings: Unix times by name: ``begun``, ``first_write``, ``written``, ``committed``; only
            for steps that were reached. ``written`` is set before the future of that name.
        nbytes: Bytes of the files that were written; set before ``written``.
    """

    def __init__(
        self, number: int, order: Order, point: CommitPoint | None, send: Callable[[object], None]
    ) -> None:
        """Nothing is staged yet."""
        self.number = number
        self.written: Future[float] = Future()
        self.outcome: Future[Any] = Future()
        self.timings: dict[str, float] = {}
        self.nbytes = 0
        self._order, self._point, self._send = order, point, send
        self._began = time.monotonic()
        self._changed = threading.Condition()
        self._freed: set[Run] = set()
        self._is_written = False
        self._abandoned: BaseException | None = None
        self._reporter: threading.Thread | None = None
        self._client: HubClient | None = None
        self._is_given_up = False
        for future in (self.written, self.outcome):
            future.set_running_or_notify_cancel()  # what a worker does cannot be cancelled

    # -- staging -----------------------------------------------------------------------------------

    def staged(self, run: Run) -> None:
        """Tell the worker that these bytes may be written.

        They must not change until ``written`` is completed or ``wait_freed`` has returned. A dead
        worker is not an error here: ``outcome`` has it.
        """
        self._post(StagedRun(self.number, run))

    def all_staged(self) -> None:
        """Tell the worker that there are no further runs.

        From now on the save commits even if the training process ends.
        """
        self._post(AllStaged(self.number))

    def abandon(self, error: BaseException) -> None:
        """Tell the worker that staging failed: the save fails on all ranks with ``error``."""
        self._abandoned = error
        self._post(Abandon(self.number, describe_failure(error)))

    def wait_freed(self, run: Run, timeout_secs: float) -> None:
        """Wait until the bytes of ``run`` may be overwritten.

        Raises:
            AsyncSaveError: The worker writes no more of them: the save has failed; see ``outcome``.
            BarrierTimeoutError: They were not written in time.
        """
        with self._changed:
            is_over = self._changed.wait_for(
                lambda: run in self._freed or self._is_written, timeout_secs
            )
            if run in self._freed:
                self._freed.discard(run)
                return
        if not is_over:
            raise BarrierTimeoutError(
                f"writing {self._order.target}: the worker has not taken {run.nbytes} staged bytes "
                f"within {timeout_secs:g} s.",
                hint="the disk is slow or hangs.",
            )
        raise AsyncSaveError(f"writing {self._order.target}: the worker has given up.")

    # -- called by the link ------------------------------------------------------------------------

    def handle(self, message: Freed | Written | Ended) -> None:
        """Handle a message of the worker about this save."""
        match message:
            case Freed():
                with self._changed:
                    self._freed.add(message.run)
                    self._changed.notify_all()
            case Written():
                self.timings |= message.timings
                self.nbytes = message.nbytes
                self._set_written(message.secs)
            case Ended():
                self.timings |= message.timings
                self._set_written(time.monotonic() - self._began)
                self._end(message)

    def handle_death(self, error: CheckpointingException) -> None:
        """Handle the worker's death: nothing reads the arena now; other ranks know the outcome."""
        self._set_written(time.monotonic() - self._began)
        point = self._point
        if point is None or point.rank == 0 or not self._order.commits:
            self._fail(error)
            return
        if is_ending():
            self._ask_others(
                point, error
            )  # in this thread: no thread may be started while the interpreter ends
            return
        self._reporter = threading.Thread(
            target=self._ask_others, args=(point, error), name="dist_ckpt-dead-worker", daemon=True
        )
        self._reporter.start()

    def give_up(self, error: CheckpointingException) -> None:
        """Stop waiting: an outcome that is not known yet becomes ``error``."""
        self._is_given_up = True
        if self._client is not None:
            self._client.close()
        if self._reporter is not None:
            self._reporter.join(_JOIN_SECS)  # it may be connecting
        self._fail(error)

    # -- helpers -----------------------------------------------------------------------------------

    def _post(self, message: object) -> None:
        try:
            self._send(message)
        except OSError:
            return  # the link notices by itself that the worker is gone

    def _ask_others(self, point: CommitPoint, error: CheckpointingException) -> None:
        try:
            self._client = HubClient(point.address, point.rank)
            try:
                if not self._is_given_up:
                    report_dead_worker(point, describe_failure(error), self._client)
            finally:
                self._client.close()
        except Exception as failure:  # noqa: BLE001 - it is what `outcome` is for
            if self._is_given_up:
                return  # `give_up` sets the outcome
            failure.__cause__ = failure.__cause__ or error
            self._fail(failure)
        else:
            logger.warning("%s, after it had done its part: the save is committed", error)
            self._succeed(None)

    def _end(self, message: Ended) -> None:
        error = message.error
        if error is None:
            try:
                # Of our own worker: a report that it has made for this process.
                self._succeed(pickle.loads(message.report) if message.report else None)  # noqa: S301
            except Exception as failure:  # noqa: BLE001 - it is what `outcome` is for
                self._fail(failure)
            return
        if not message.is_aborted and (self._point is None or self._point.rank == 0):
            self._abort()
        error.__cause__ = self._abandoned or _cause(error, self._point)
        self._fail(error)

    def _abort(self) -> None:
        """Remove the attempt for a worker that could not unpickle the order."""
        try:
            self._order.abort()
        except Exception:  # noqa: BLE001 - the save has failed anyway, and of something else
            logger.warning("%s: what a failed save has left was not removed", self._order.target)

    def _set_written(self, secs: float) -> None:
        with self._changed:
            is_news, self._is_written = not self._is_written, True
            self._changed.notify_all()
        if is_news:
            # Without the lock: callbacks of the future may take other locks.
            self.written.set_result(secs)

    def _succeed(self, report: object) -> None:
        if not self.outcome.done():
            self.outcome.set_result(report)

    def _fail(self, error: BaseException) -> None:
        if not self.outcome.done():
            self.outcome.set_exception(error)


def _cause(error: CheckpointingException, point: CommitPoint | None) -> WorkerTraceback | None:
    failures = error.failures
    own = failures.get(0 if point is None else point.rank)
    text = own.traceback if own is not None else ""
    return WorkerTraceback(f"in the worker:\n{text}") if text else None
