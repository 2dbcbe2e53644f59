"""The queue of background saves: they end in order, and a failure is raised once on every rank.

Here: ``SaveQueue``, its threads, and the poll at which a failure is raised. Not here: how one save
ended (``_worker.result``), planning and copying (``background``). On every rank.

The threads call no collective of a process group. When a save has failed they exchange with the
other ranks through the job's store, on a communicator of their own.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from dist_ckpt._saving.in_flight import add_writer
from dist_ckpt._worker.result import SaveInFlight, duplicate_communicator, outcome
from dist_ckpt.errors import AsyncSaveError, BarrierTimeoutError
from dist_ckpt.events import Committed, Failed
from dist_ckpt.storage.paths import real_path

if TYPE_CHECKING:
    from pathlib import Path

    from dist_ckpt._worker.submit import SubmittedSave
    from dist_ckpt.events import Event

__all__ = ["SaveQueue"]

logger = logging.getLogger(__name__)

_AGREE_SECS = 30.0
"""How long ranks wait for each other to agree at which poll a failure is raised."""


_Poll: TypeAlias = "tuple[int, int]"
"""A poll: the number of the newest save, and the number of polls since it. All ranks number saves
alike, so ranks that poll at different rates agree again at the next save."""


@dataclass(slots=True)
class _UnraisedFailure:
    """A failure that has not been raised yet.

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
    frees_space: bool = False


class SaveQueue:
    """Finishes saves one after the other on a thread of its own.

    Args:
        emit: Called with events, from any thread.
    """

    def __init__(self, emit: Callable[[Event], None]) -> None:
        """Start no thread; the first save does."""
        self._emit = emit
        self._changed = threading.Condition()
        self._saves: deque[SaveInFlight] = deque()
        self._actions: deque[_Action] = deque()
        self._unraised: deque[_UnraisedFailure] = deque()
        self._failed: set[int] = set()
        self._newest = 0
        self._polls = 0
        self._is_finishing = False
        self._acting: _Action | None = None
        self._closed = False
        self._given_up = threading.Event()
        self._threads: list[threading.Thread] = []
        self._then: Callable[[], None] | None = None
        add_writer(self)

    @property
    def in_flight(self) -> tuple[Path, ...]:
        """The targets of the saves that have not ended, oldest first."""
        with self._changed:
            return tuple(save.path for save in self._saves)

    @property
    def submitted(self) -> tuple[SubmittedSave, ...]:
        """The saves in flight that the worker has, oldest first."""
        with self._changed:
            return tuple(save.submitted for save in self._saves if save.submitted is not None)

    def is_own_thread(self) -> bool:
        """Whether the calling thread is one of these."""
        return threading.current_thread() in self._threads

    def start(self) -> None:
        """Start the threads now, so that a lack of threads fails the save before it is planned."""
        with self._changed:
            self._run_threads()

    def add(self, save: SaveInFlight) -> None:
        """Append a save; the queue owns its staging lease from now on."""
        with self._changed:
            save.given_up = self._given_up
            self._saves.append(save)
            self._newest, self._polls = save.number, 0
            self._run_threads()
            self._changed.notify_all()

    def after(self, action: Callable[[], None], what: str, *, frees_space: bool = False) -> None:
        """Run ``action`` after the saves in flight; at once, in this thread, if there are none.

        It is skipped if the newest save has failed and that was not raised yet: the caller assumes
        that the save was committed.
        """
        with self._changed:
            if not self.is_idle():
                self._actions.append(_Action(self._newest, action, what, frees_space))
                self._run_threads()
                self._changed.notify_all()
                return
            failed = any(unraised.number == self._newest for unraised in self._unraised)
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
            if not self._unraised:
                return
            unraised = self._unraised[0]
            now = (self._newest, self._polls)
        if now < unraised.earliest:
            return
        unraised.agreed.wait(_AGREE_SECS)
        if unraised.raise_at is None or now >= unraised.raise_at:
            self.raise_failures(upto=unraised.number)

    def raise_failures(self, *, upto: int | None = None, path: Path | None = None) -> None:
        """Raise failures that were not raised yet, of the saves up to a number.

        Args:
            upto: The number; None for all.
            path: Only of saves to this path.

        Raises:
            AsyncSaveError: The first of them; the others are in its notes.
        """
        with self._changed:
            raised = [
                one
                for one in self._unraised
                if (upto is None or one.number <= upto)
                and (path is None or real_path(one.path) == real_path(path))
            ]
            for one in raised:
                self._unraised.remove(one)
        if not raised:
            return
        error = raised[0].error
        for other in raised[1:]:
            error.add_note(f"another save failed before this was raised: {other.error}")
        raise error

    def wait_for(self, done: Callable[[], bool], timeout_secs: float, what: str) -> float:
        """Wait until ``done()``, called with the lock held, is true; return the seconds waited.

        Raises:
            BarrierTimeoutError: It took too long; names the saves in flight.
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

    def has_space(self) -> bool:
        """Whether no action that frees disk space is due or running; for ``wait_for``.

        A save that began before the removal would need more disk space than a blocking save.
        """
        due = [action for action in self._actions if self.is_past(action.number)]
        running = [] if self._acting is None else [self._acting]
        return not any(action.frees_space for action in (*running, *due))

    def newest_to(self, path: Path) -> int:
        """Return the number of the newest save to a path, also through links; 0 if there is none.

        A failed save counts until it is raised: it may still be in flight on another rank.
        """
        wanted = real_path(path)
        with self._changed:
            known = [(one.number, one.path) for one in self._saves]
            known += [(one.number, one.path) for one in self._unraised]
        return max((n for n, one in known if real_path(one) == wanted), default=0)

    def is_past(self, number: int) -> bool:
        """Whether a save and all before it have ended; for ``wait_for``."""
        return not self._saves or self._saves[0].number > number

    def is_idle(self) -> bool:
        """Whether all saves have ended and all actions have run; for ``wait_for``."""
        return not (self._saves or self._actions or self._is_finishing or self._acting is not None)

    def close(self, timeout_secs: float) -> None:
        """End the threads without waiting for saves in flight.

        Must be called before the interpreter is finalised: a thread that is then inside a call of
        torch's store is unwound through a C++ destructor, which aborts the process.
        """
        self._given_up.set()
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            threads, self._threads = self._threads, []
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(timeout_secs)

    def retire(self, then: Callable[[], None]) -> bool:
        """Arrange that ``then`` is called on a thread of the queue when all work has ended.

        Returns:
            False if no thread was ever started: ``then`` is not called.
        """
        with self._changed:
            if not self._threads:
                return False
            self._then, self._closed = then, True
            self._changed.notify_all()
        return True

    # -- the threads: two, so that a slow action does not delay the end of the next save

    def _run_threads(self) -> None:
        """Start the threads that are missing. The caller holds the lock."""
        for run, name in (
            (self._run_saves, "dist_ckpt-saves"),
            (self._run_actions, "dist_ckpt-actions"),
        )[len(self._threads) :]:
            self._closed = False
            thread = threading.Thread(target=run, name=name, daemon=True)
            thread.start()
            self._threads.append(thread)

    def _run_saves(self) -> None:
        """Finish saves, one after the other."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._saves or self._closed)
                if not self._saves:
                    break
                save = self._saves[0]
                self._is_finishing = True
            try:
                self._finish(save)
            finally:
                del save  # a local would keep its state alive until the next save
                with self._changed:
                    self._is_finishing = False
                    self._changed.notify_all()
        if self._then is not None:
            with self._changed:
                self._changed.wait_for(self.is_idle)
            self._then()

    def _run_actions(self) -> None:
        """Run actions, one after the other."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_action_due() or self._is_over())
                if not self._is_action_due():
                    return
                action = self._actions.popleft()
                is_void = action.number in self._failed
                self._acting = action
            try:
                if is_void:
                    logger.warning("not done, as the save before it failed: %s", action.what)
                else:
                    _run_action(action)
            finally:
                with self._changed:
                    self._acting = None
                    self._changed.notify_all()

    def _is_action_due(self) -> bool:
        """Whether no save is in flight before the oldest action. The caller holds the lock."""
        return bool(self._actions) and self.is_past(self._actions[0].number)

    def _is_over(self) -> bool:
        return self._closed and not self._actions

    def _finish(self, save: SaveInFlight) -> None:
        failure = outcome(save)
        _drop_tracebacks(failure)
        if save.submitted is not None:
            if save.submitted.task is not None:
                # Before the release: no copy may write into memory that another save may get.
                save.submitted.task.abandon()
            save.submitted.lease.release()
        secs = time.monotonic() - save.started
        nbytes = save.submitted.save.nbytes if save.submitted is not None else 0
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
            _run_action(_Action(save.number, lambda: save.on_settled(failure), "end of a save"))  # type: ignore[misc]  # looked at
        unraised = self._end(save, failure)
        if unraised is not None:
            self._agree(save, unraised)

    def _end(self, save: SaveInFlight, failure: BaseException | None) -> _UnraisedFailure | None:
        with self._changed:
            self._saves.popleft()
            unraised = None
            if failure is not None:
                self._failed.add(save.number)
                earliest = (self._newest, self._polls + 1)
                unraised = _UnraisedFailure(
                    save.number, save.path, _async_error(save, failure), earliest
                )
                self._unraised.append(unraised)
            self._changed.notify_all()
        return unraised

    def _agree(self, save: SaveInFlight, unraised: _UnraisedFailure) -> None:
        """Agree with all ranks on the first poll that none of them has passed."""
        try:
            name = f"failure/{save.planned.name}"
            comm = duplicate_communicator(save.comm, name, _AGREE_SECS, self._given_up)
            phase = f"agreeing when to raise the failed save to {save.path}"
            unraised.raise_at = comm.map_reduce(phase, lambda: unraised.earliest, _last)
        except Exception as error:  # noqa: BLE001 - then each rank raises at its next poll
            logger.warning("ranks did not agree when to raise a failed save: %s", error)
            unraised.raise_at = unraised.earliest
        finally:
            unraised.agreed.set()


def _last(polls: Sequence[_Poll]) -> _Poll:
    return max(polls)


def _run_action(action: _Action) -> None:
    try:
        action.run()
    except BaseException:  # SystemExit too: it would end the thread, not the program
        logger.exception("failed, after a background save: %s", action.what)


def _drop_tracebacks(error: BaseException | None) -> None:
    """Drop the tracebacks: their frames keep staged memory alive. ``failures`` has them as text."""
    while isinstance(error, Exception):  # an interrupt is still on its way through the caller
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


def _async_error(save: SaveInFlight, failure: BaseException) -> AsyncSaveError:
    error = AsyncSaveError(
        f"the background save to {save.path} failed, nothing of it is committed: {failure}"
    )
    error.failures = dict(getattr(failure, "failures", {}))
    error.__cause__ = failure
    return error
