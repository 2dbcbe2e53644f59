"""One background save, seen from the training process.

Here: ``WorkerSave``: what is staged, and the futures of how it goes. Not here: the worker
(``worker``, ``link``), what happens after the outcome (``background``).

Futures end in the thread that hears from the worker: what is added to them as a callback must be
short, and must not wait for this worker.
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
from dist_ckpt._worker.agreement import stand_in
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
    """Nobody waits for the end of this save any more, and it may still be committed."""


class WorkerTraceback(Exception):  # noqa: N818 - what it shows, not what went wrong
    """Cause of an error that was raised in a worker: the traceback there, as text."""


class WorkerSave:
    """A save that a worker has begun.

    Attributes:
        number: Its number.
        written: Seconds that writing took; ends when the worker reads the arena no more, however
            the save ends. Never fails.
        outcome: None, or the report of an order that does not commit; or what failed.
        timings: Unix times by name: ``begun``, ``first_write``, ``written``, ``committed``; each
            only if it came so far. ``written`` is there when the future of that name ends.
        nbytes: Bytes of the files that were written; known when ``written`` ends.
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
        self._stand_in: threading.Thread | None = None
        self._client: HubClient | None = None
        self._is_given_up = False
        for future in (self.written, self.outcome):
            future.set_running_or_notify_cancel()  # nobody can cancel what a worker does

    # -- staging -----------------------------------------------------------------------------------

    def staged(self, run: Run) -> None:
        """These bytes are ready. They must stay as they are until ``written``, or ``wait_freed``.

        A dead worker is no error here: ``outcome`` tells.
        """
        self._tell(StagedRun(self.number, run))

    def all_staged(self) -> None:
        """No further runs: from now on the save commits even if the training process ends."""
        self._tell(AllStaged(self.number))

    def abandon(self, error: BaseException) -> None:
        """Staging failed: the save fails on all ranks, which are told ``error``."""
        self._abandoned = error
        self._tell(Abandon(self.number, describe_failure(error)))

    def wait_freed(self, run: Run, timeout_secs: float) -> None:
        """Wait until the bytes of ``run`` may be overwritten.

        Raises:
            AsyncSaveError: The worker takes no more of them: the save has failed; see ``outcome``.
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

    # -- what the link hears -----------------------------------------------------------------------

    def handle(self, message: Freed | Written | Ended) -> None:
        """Take what the worker says of this save."""
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
        """The worker is dead: nobody reads the arena. How the save ended, the other ranks know."""
        self._set_written(time.monotonic() - self._began)
        point = self._point
        if point is None or point.rank == 0 or not self._order.commits:
            self._fail(error)
            return
        if is_ending():
            self._ask_others(point, error)  # in the thread that noticed, which has no more to do
            return
        self._stand_in = threading.Thread(
            target=self._ask_others, args=(point, error), name="dist_ckpt-stand-in", daemon=True
        )
        self._stand_in.start()

    def give_up(self, error: CheckpointingException) -> None:
        """Wait no more: what is not settled fails with ``error``."""
        self._is_given_up = True
        if self._client is not None:
            self._client.close()
        if self._stand_in is not None:
            self._stand_in.join(_JOIN_SECS)  # it may be connecting
        self._fail(error)

    # -- helpers -----------------------------------------------------------------------------------

    def _tell(self, message: object) -> None:
        try:
            self._send(message)
        except OSError:
            return  # the link notices by itself that the worker is gone

    def _ask_others(self, point: CommitPoint, error: CheckpointingException) -> None:
        try:
            self._client = HubClient(point.address, point.rank)
            try:
                if not self._is_given_up:
                    stand_in(point, describe_failure(error), self._client)
            finally:
                self._client.close()
        except Exception as failure:  # noqa: BLE001 - it is what `outcome` is for
            if self._is_given_up:
                return  # `give_up` tells why
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
        """Do what the worker could not, as it could not make out the order."""
        try:
            self._order.abort()
        except Exception:  # noqa: BLE001 - the save has failed anyway, and of something else
            logger.warning("%s: what a failed save has left was not removed", self._order.target)

    def _set_written(self, secs: float) -> None:
        with self._changed:
            is_news, self._is_written = not self._is_written, True
            self._changed.notify_all()
        if is_news:  # with no lock held: callbacks may take others
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
