"""How background saves end: in order, with what was queued behind them, and told once to all ranks.

Here: ``Settler``, its thread, and at which poll a failure is raised. Not here: planning and copying
(``background``), the worker's own commit (``_background.agreement``). On every rank.

The thread makes no collective of a backend. It talks to the other ranks through the job's store,
only when a save has failed or when it is not known how one ended.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from dist_ckpt._background.agreement import commit, stand_in
from dist_ckpt._background.hub_client import HubLostError
from dist_ckpt._comm.failures import describe_failure
from dist_ckpt._comm.single import SingleCommunicator
from dist_ckpt._comm.store import StoreCommunicator
from dist_ckpt._engine.commit import forget_trash, locate
from dist_ckpt._formats.manifest import read_manifest
from dist_ckpt.errors import (
    AsyncSaveError,
    BarrierTimeoutError,
    CheckpointingException,
    ConfigError,
    WorkerDiedError,
)
from dist_ckpt.events import Committed, Failed

if TYPE_CHECKING:
    from pathlib import Path

    from dist_ckpt._async_saving import PlannedSave
    from dist_ckpt._background.orders import Staged
    from dist_ckpt._engine.commit import Attempt
    from dist_ckpt._handing_over import HandedOver
    from dist_ckpt.events import Event
    from dist_ckpt.types import Communicator

__all__ = ["InFlight", "Settler", "beside"]

logger = logging.getLogger(__name__)

_AGREE_SECS = 30.0
"""How long ranks wait for each other to agree at which poll a failure is raised."""


_Poll: TypeAlias = "tuple[int, int]"
"""A poll: behind which save, and the number since. Saves are counted alike on all ranks, so that
ranks which poll more often than others are in step again at the next save."""


@dataclass(slots=True, kw_only=True)
class InFlight:
    """A save between its hand-over and its end.

    Attributes:
        number: 1 for the first of a saver.
        path: Where the checkpoint shall be.
        comm: The ranks.
        started: When it was asked for, by ``time.monotonic``.
        planned: Its plan.
        handed: What the worker has; None if it could not be handed over, for the reason ``error``.
        interrupt: Ctrl-C or the like, to be raised once the others are told.
        on_settled: Called at the end, on the settler's thread, with None or the failure.
    """

    number: int
    path: Path
    comm: Communicator
    planned: PlannedSave
    handed: HandedOver | None = None
    started: float = 0.0
    error: Exception | None = None
    interrupt: BaseException | None = None
    on_settled: Callable[[BaseException | None], None] | None = None


@dataclass(slots=True)
class _Alarm:
    """A failure that nobody was told of yet.

    Attributes:
        earliest: The first poll of this rank at which it may be raised.
        raise_at: The poll at which all ranks raise it; None until they have agreed.
    """

    number: int
    path: Path
    error: AsyncSaveError
    earliest: _Poll
    raise_at: _Poll | None = None
    agreed: threading.Event = field(default_factory=threading.Event)


@dataclass(frozen=True, slots=True)
class _Action:
    number: int
    run: Callable[[], None]
    what: str


class Settler:
    """Ends saves one after the other on a thread of its own.

    Args:
        emit: Takes events, from any thread.
    """

    def __init__(self, emit: Callable[[Event], None]) -> None:
        """Start without a thread: the first save starts it."""
        self._emit = emit
        self._changed = threading.Condition()
        self._saves: deque[InFlight] = deque()
        self._actions: deque[_Action] = deque()
        self._alarms: deque[_Alarm] = deque()
        self._failed: set[int] = set()
        self._newest = 0
        self._polls = 0
        self._settling = False
        self._acting = False
        self._closed = False
        self._threads: list[threading.Thread] = []

    @property
    def in_flight(self) -> tuple[Path, ...]:
        """Where the saves go that have not ended, oldest first."""
        with self._changed:
            return tuple(save.path for save in self._saves)

    @property
    def handed(self) -> tuple[HandedOver, ...]:
        """What the worker has of them."""
        with self._changed:
            return tuple(save.handed for save in self._saves if save.handed is not None)

    def start(self) -> None:
        """Start the threads, if they are not there: what follows cannot fail for want of one."""
        with self._changed:
            self._run_threads()

    def add(self, save: InFlight) -> None:
        """Take over a save."""
        with self._changed:
            self._saves.append(save)
            self._newest, self._polls = save.number, 0
            self._run_threads()
            self._changed.notify_all()

    def after(self, action: Callable[[], None], what: str) -> None:
        """Run ``action`` behind the saves in flight; now, and by the caller, if there are none.

        Not at all if the newest save has failed and nobody was told: the caller takes it for done.
        """
        with self._changed:
            if not self.is_idle():
                self._actions.append(_Action(self._newest, action, what))
                self._run_threads()
                self._changed.notify_all()
                return
            failed = any(alarm.number == self._newest for alarm in self._alarms)
        if failed:
            logger.warning("not done, as the save before it failed: %s", what)
            return
        action()

    def poll(self) -> None:
        """Raise the oldest failure if all ranks raise it at this poll.

        Raises:
            AsyncSaveError: A save has failed.
        """
        with self._changed:
            self._polls += 1
            if not self._alarms:
                return
            alarm = self._alarms[0]
            now = (self._newest, self._polls)
        if now < alarm.earliest:
            return
        alarm.agreed.wait(_AGREE_SECS)
        if alarm.raise_at is None or now >= alarm.raise_at:
            self.raise_failures(upto=alarm.number)

    def raise_failures(self, *, upto: int | None = None, path: Path | None = None) -> None:
        """Raise what has failed and was not told, of the saves up to a number.

        Args:
            upto: The number; None for all.
            path: Only of saves to this path.

        Raises:
            AsyncSaveError: The first of them; the others stand in its notes.
        """
        with self._changed:
            told = [
                one
                for one in self._alarms
                if (upto is None or one.number <= upto)
                and (path is None or os.path.realpath(one.path) == os.path.realpath(path))
            ]
            for one in told:
                self._alarms.remove(one)
        if not told:
            return
        error = told[0].error
        for other in told[1:]:
            error.add_note(f"and before this was told: {other.error}")
        raise error

    def wait_for(self, done: Callable[[], bool], timeout_secs: float, what: str) -> float:
        """Wait until ``done``, called with the lock held; return for how many seconds.

        Raises:
            BarrierTimeoutError: It takes longer; names the saves in flight.
        """
        begun = time.monotonic()
        with self._changed:
            if not self._changed.wait_for(done, timeout_secs):
                paths = ", ".join(f"{save.path}" for save in self._saves) or "queued actions"
                raise BarrierTimeoutError(
                    f"{what}: {paths} did not end within {timeout_secs:g} s.",
                    hint="the disk is slow, or a rank is stuck; see the log of the other ranks.",
                )
        return time.monotonic() - begun

    def has_room(self, limit: int) -> bool:
        """Whether fewer than ``limit`` saves are in flight; for ``wait_for``."""
        return len(self._saves) < limit

    def newest_to(self, path: Path) -> int:
        """Return the number of the newest save to a path, also through links; or 0.

        One that has failed counts until it is told: on another rank it may still be in flight.
        """
        wanted = os.path.realpath(path)
        with self._changed:
            known = [(one.number, one.path) for one in self._saves]
            known += [(one.number, one.path) for one in self._alarms]
        return max((n for n, one in known if os.path.realpath(one) == wanted), default=0)

    def is_past(self, number: int) -> bool:
        """Whether a save and all before it have ended; for ``wait_for``."""
        return not self._saves or self._saves[0].number > number

    def is_idle(self) -> bool:
        """Whether all saves have ended and all actions have run; for ``wait_for``."""
        return not (self._saves or self._actions or self._settling or self._acting)

    def close(self, timeout_secs: float) -> None:
        """End the threads; what is in flight is not waited for."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            threads, self._threads = self._threads, []
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(timeout_secs)

    # -- the threads: a slow action keeps no rank from hearing how a save ended

    def _run_threads(self) -> None:
        """Start those that are not there. With the lock held."""
        for run, name in ((self._run, "dist_ckpt-settle"), (self._act, "dist_ckpt-after"))[
            len(self._threads) :
        ]:
            self._closed = False
            thread = threading.Thread(target=run, name=name, daemon=True)
            thread.start()
            self._threads.append(thread)

    def _run(self) -> None:
        """End saves, one after the other."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._saves or self._closed)
                if not self._saves:
                    return
                save = self._saves[0]
                self._settling = True
            try:
                self._settle(save)
            finally:
                with self._changed:
                    self._settling = False
                    self._changed.notify_all()

    def _act(self) -> None:
        """Run actions, one after the other."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_action_due() or self._is_over())
                if not self._is_action_due():
                    return
                action = self._actions.popleft()
                is_void = action.number in self._failed
                self._acting = True
            try:
                if is_void:
                    logger.warning("not done, as the save before it failed: %s", action.what)
                else:
                    _perform(action)
            finally:
                with self._changed:
                    self._acting = False
                    self._changed.notify_all()

    def _is_action_due(self) -> bool:
        """Whether no save stands before the oldest action. With the lock held."""
        return bool(self._actions) and self.is_past(self._actions[0].number)

    def _is_over(self) -> bool:
        return self._closed and not self._actions

    def _settle(self, save: InFlight) -> None:
        failure = _outcome(save)
        _let_go_of_frames(failure)
        if save.handed is not None:
            if save.handed.task is not None:
                save.handed.task.abandon()  # nobody writes into the memory that goes back
            save.handed.lease.release()
        secs = time.monotonic() - save.started
        nbytes = save.handed.nbytes if save.handed is not None else 0
        path, rank = str(save.path), save.comm.rank
        event: Event
        if failure is None:
            event = Committed(
                path=path, rank=rank, save=save.number, is_async=True, secs=secs, nbytes=nbytes
            )
        else:
            event = Failed(
                path=path, rank=rank, save=save.number, is_async=True, secs=secs,
                phase="background save", error=str(failure),
            )  # fmt: skip
        self._emit(event)
        if save.on_settled is not None:
            _perform(_Action(save.number, lambda: save.on_settled(failure), "end of a save"))  # type: ignore[misc]  # looked at
        alarm = self._end(save, failure)
        if alarm is not None:
            self._agree(save, alarm)

    def _end(self, save: InFlight, failure: BaseException | None) -> _Alarm | None:
        with self._changed:
            self._saves.popleft()
            alarm = None
            if failure is not None:
                self._failed.add(save.number)
                earliest = (self._newest, self._polls + 1)
                alarm = _Alarm(save.number, save.path, _told(save, failure), earliest)
                self._alarms.append(alarm)
            self._changed.notify_all()
        return alarm

    def _agree(self, save: InFlight, alarm: _Alarm) -> None:
        """Find the first poll that no rank has passed."""
        try:
            comm = beside(save.comm, f"alarm/{save.planned.name}", _AGREE_SECS)
            phase = f"telling that the save to {save.path} failed"
            alarm.raise_at = comm.map_reduce(phase, lambda: alarm.earliest, _last)
        except Exception as error:  # noqa: BLE001 - then each rank raises as soon as it can
            logger.warning("ranks did not agree when to raise a failed save: %s", error)
            alarm.raise_at = alarm.earliest
        finally:
            alarm.agreed.set()


def beside(comm: Communicator, name: str, timeout_secs: float) -> Communicator:
    """Return a communicator of the same ranks for another thread than the one that saves.

    Raises:
        ConfigError: They do not meet in a store.
    """
    if comm.size == 1:
        return SingleCommunicator()
    if not isinstance(comm, StoreCommunicator):
        raise ConfigError(f"background saves need ranks that meet in a store, not {comm!r}.")
    return comm.beside(name, timeout_secs=timeout_secs)


def _last(polls: Sequence[_Poll]) -> _Poll:
    return max(polls)


def _perform(action: _Action) -> None:
    try:
        action.run()
    except BaseException:  # SystemExit too: it would end the thread, not the program
        logger.exception("failed, after a background save: %s", action.what)


def _let_go_of_frames(error: BaseException | None) -> None:
    """Forget where it was raised: frames hold staged memory. ``failures`` has that as text."""
    while isinstance(error, Exception):  # an interrupt is still on its way through the caller
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


def _told(save: InFlight, failure: BaseException) -> AsyncSaveError:
    error = AsyncSaveError(
        f"the background save to {save.path} failed, nothing of it is committed: {failure}"
    )
    error.failures = dict(getattr(failure, "failures", {}))
    error.__cause__ = failure
    return error


def _outcome(save: InFlight) -> BaseException | None:
    """Wait for the end of a save; return None if it is committed, else what failed."""
    try:
        if save.handed is not None:
            save.handed.save.outcome.result()
        elif save.error is not None:
            _stand_in(save, save.error)
    except (HubLostError, WorkerDiedError) as error:
        is_known = save.comm.rank != 0 and not isinstance(error, HubLostError)
        return error if is_known else _looked_up(save, error)
    except BaseException as error:  # noqa: BLE001 - it is told, not lost
        return error if save.comm.rank != 0 else _noted(save, error)
    return None if save.comm.rank != 0 else _noted(save, None)


def _stand_in(save: InFlight, error: Exception) -> None:
    """Say for a worker that was given no order that this rank has failed."""
    point, failure = save.planned.point, describe_failure(error)
    try:
        if point is None or point.rank == 0:
            # The others wait for a verdict, and write until they have heard it.
            commit(point, _Withdrawn(save.planned.attempt), failure=failure)
        else:
            stand_in(point, failure)
            return  # the worker had all of it, and the save is committed
    except HubLostError:
        raise
    except CheckpointingException as told:
        raise told from error
    raise error


@dataclass(frozen=True, slots=True)
class _Withdrawn:
    """The order of a rank 0 that could not give one to its worker: it can only be aborted."""

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


def _noted(save: InFlight, failure: BaseException | None) -> BaseException | None:
    """Leave a note of how it ended for ranks that lost their worker's hub. Rank 0."""
    if save.comm.size > 1:
        try:
            notes = beside(save.comm, save.planned.name, _AGREE_SECS)
            if isinstance(notes, StoreCommunicator):
                notes.tell("ended", failure)
            older = beside(save.comm, save.planned.name_of(save.number - 2), _AGREE_SECS)
            if isinstance(older, StoreCommunicator):
                older.untell("ended")
        except Exception as error:  # noqa: BLE001 - only ranks in trouble would have read it
            logger.warning("the other ranks were not told how %s ended: %s", save.path, error)
    return failure


def _is_published(attempt: Attempt) -> bool:
    try:
        manifest = read_manifest(locate(attempt.target))
    except CheckpointingException:
        return False
    return manifest.checkpoint_id == attempt.checkpoint_id


def _looked_up(save: InFlight, error: AsyncSaveError | HubLostError) -> BaseException | None:
    """Find out how a save ended whose commit nobody has told of."""
    if save.comm.rank == 0:
        attempt = save.planned.attempt
        is_published = attempt is not None and _is_published(attempt)
        if attempt is not None:
            # What it replaced, or what was written: whoever would have removed it is dead.
            attempt.abort()
            forget_trash(attempt)
        return _noted(save, None if is_published else error)
    point = save.planned.point
    patience = (
        _AGREE_SECS if point is None else point.timeout_secs
    )  # rank 0 may be stopped, not dead
    try:
        notes = beside(save.comm, save.planned.name, patience)
        told: BaseException | None = notes.hear("ended")  # type: ignore[attr-defined]  # of a store
    except Exception as trouble:  # noqa: BLE001 - then it is not known, and counts as failed
        error.add_note(f"rank 0 did not tell how it ended: {trouble}")
        return error
    return told
