"""The outcome of one background save: committed or failed, also when processes have died.

Here: asking the worker, the other ranks, and at last the disk. Not here: the order of saves, and
when a failure is raised (``_worker.queue``). On every rank, on the queue's thread.

A committed save is never reported as failed, nor a failed one as committed. If rank 0's worker has
died, its training process looks at the disk and posts the answer in the job's store for ranks that
have lost the hub. If that process or the store is gone as well, each rank looks at the disk itself.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dist_ckpt._comm.failures import describe_failure
from dist_ckpt._comm.single import SingleCommunicator
from dist_ckpt._comm.store import StoreCommunicator
from dist_ckpt._saving.publish import was_published
from dist_ckpt._worker.agreement import commit, report_dead_worker
from dist_ckpt._worker.hub_client import HubLostError
from dist_ckpt._worker.saves import GivenUpError
from dist_ckpt.errors import (
    AsyncSaveError,
    CheckpointingException,
    ConfigError,
    StorageError,
    WorkerDiedError,
)
from dist_ckpt.storage.commit import forget_trash

if TYPE_CHECKING:
    from pathlib import Path

    from dist_ckpt._saving.plan import PlannedSave
    from dist_ckpt._worker.orders import Staged
    from dist_ckpt._worker.submit import SubmittedSave
    from dist_ckpt.storage.commit import Attempt
    from dist_ckpt.types import Communicator

__all__ = ["SaveInFlight", "duplicate_communicator", "outcome"]

logger = logging.getLogger(__name__)

_NOTE_SECS = 30.0
"""How long to try to post a note for the other ranks."""


@dataclass(slots=True, kw_only=True)
class SaveInFlight:
    """A planned save until its end, as the training process of one rank knows it.

    Attributes:
        number: 1 for the first of a saver.
        path: The target.
        comm: The ranks.
        started: When the save was called, by ``time.monotonic``.
        planned: What the ranks have agreed on.
        submitted: What the worker has; None if ``error`` prevented the submission.
        interrupt: Ctrl-C or the like, to be raised again once the save is in the queue.
        on_settled: Called at the end, on the queue's thread, with None or the failure.
        given_up: Set when the queue is closed: waiting for other ranks ends.
    """

    number: int
    path: Path
    comm: Communicator
    planned: PlannedSave
    submitted: SubmittedSave | None = None
    started: float = 0.0
    error: Exception | None = None
    interrupt: BaseException | None = None
    on_settled: Callable[[BaseException | None], None] | None = None
    given_up: threading.Event = field(default_factory=threading.Event)


def duplicate_communicator(
    comm: Communicator, name: str, timeout_secs: float, stop: threading.Event | None = None
) -> Communicator:
    """Return a communicator of the same ranks for another thread than the one that saves.

    Its waits end once ``stop`` is set.

    Raises:
        ConfigError: The ranks do not communicate through a store.
    """
    if comm.size == 1:
        return SingleCommunicator()
    if not isinstance(comm, StoreCommunicator):
        raise ConfigError(f"background saves need ranks that meet in a store, not {comm!r}.")
    return comm.duplicate(name, timeout_secs=timeout_secs, stop=stop)


def outcome(save: SaveInFlight) -> BaseException | None:
    """Wait for the end of a save; return None if it is committed, else what failed."""
    try:
        if save.submitted is not None:
            save.submitted.save.outcome.result()
        elif save.error is not None:
            _report_failure(save, save.error)
    except (GivenUpError, HubLostError, WorkerDiedError) as error:
        is_known = save.comm.rank != 0 and isinstance(error, WorkerDiedError)
        return error if is_known else _find_result(save, error)
    except BaseException as error:  # noqa: BLE001 - returned, and raised by the queue
        return error if save.comm.rank != 0 else _post_result(save, error)
    return None if save.comm.rank != 0 else _post_result(save, None)


def _report_failure(save: SaveInFlight, error: Exception) -> None:
    """Report a failure for this rank, whose worker was given no order."""
    point, failure = save.planned.point, describe_failure(error)
    try:
        if point is None or point.rank == 0:
            # The other ranks wait for a verdict, and may write until they have read it.
            commit(point, _AbortOnlyOrder(save.planned.attempt), failure=failure)
        else:
            report_dead_worker(point, failure)
            return  # the worker had all of it, and the save is committed
    except HubLostError:
        raise
    except CheckpointingException as verdict:
        raise verdict from error
    raise error


@dataclass(frozen=True, slots=True)
class _AbortOnlyOrder:
    """Rank 0's order when its worker could not be given one: it can only be aborted."""

    attempt: Attempt | None
    commits: bool = True

    @property
    def target(self) -> str:
        return "a checkpoint" if self.attempt is None else str(self.attempt.target)

    def write(self, staged: Staged) -> Any:
        raise NotImplementedError

    def publish(self, reports: Sequence[Any]) -> None:
        raise NotImplementedError

    def abort(self) -> None:
        if self.attempt is not None:
            self.attempt.abort()


def _post_result(save: SaveInFlight, failure: BaseException | None) -> BaseException | None:
    """Post the outcome for ranks that have lost the hub, and return it. Rank 0."""
    if save.comm.size > 1:
        try:
            notes = duplicate_communicator(save.comm, save.planned.name, _NOTE_SECS)
            if isinstance(notes, StoreCommunicator):
                notes.post_note("ended", failure)
            # Two saves back: no rank needs that note any more, and the store does not grow.
            older = duplicate_communicator(
                save.comm, save.planned.name_of(save.number - 2), _NOTE_SECS
            )
            if isinstance(older, StoreCommunicator):
                older.delete_note("ended")
        except Exception as error:  # noqa: BLE001 - only ranks without the hub read it
            logger.warning("the outcome of %s was not posted for other ranks: %s", save.path, error)
    return failure


def _find_result(save: SaveInFlight, error: AsyncSaveError | HubLostError) -> BaseException | None:
    """Find the outcome of a save of which no verdict came. Any rank."""
    if save.comm.rank == 0:
        return _post_result(save, _decide_by_disk(save, error))
    point = save.planned.point
    # Rank 0 may be stopped (a suspended job), not dead: wait as long as an exchange would.
    patience = _NOTE_SECS if point is None else point.timeout_secs
    try:
        notes = duplicate_communicator(save.comm, save.planned.name, patience, save.given_up)
        result: BaseException | None = notes.read_note("ended")  # type: ignore[attr-defined]  # of a store
    except Exception as trouble:  # noqa: BLE001 - rank 0 or the store is gone
        error.add_note(f"rank 0 did not report how it ended: {trouble}")
        return _decide_by_disk(save, error)
    return result


def _decide_by_disk(
    save: SaveInFlight, error: AsyncSaveError | HubLostError
) -> BaseException | None:
    """Decide by what is on disk, after which a stuck worker cannot commit any more."""
    target, directory = save.planned.target, save.planned.directory
    try:
        is_committed = was_published(target, directory)
    except StorageError as obstacle:
        error.add_note(f"how it ended is not certain: {obstacle}")
        return error
    forget_trash(target, directory)
    if is_committed:
        logger.warning("%s is committed, although no verdict came: %s", target, error)
        return None
    return error
