"""A job that is told to go: one more save, then a clean stop, after the same step on all ranks.

Here: ``PreemptionGuard``, its handler of signals, ``Preempted``. Not here: how ranks find the poll
at which it counts (``_comm.stopping``), what is saved (``training_state``, the adapters). Made and
polled alike on every rank, by the main thread.

See docs/guides/preemption.md and docs/decisions/0020-preemption.md.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import queue
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from types import FrameType
from typing import TYPE_CHECKING, Any, Self

from dist_ckpt._comm import default_communicator
from dist_ckpt._comm.stopping import Agreement, PollCounts
from dist_ckpt._comm.store import StoreCommunicator
from dist_ckpt._process.endings import at_exit
from dist_ckpt.errors import ConfigError
from dist_ckpt.options import SaveOptions

if TYPE_CHECKING:
    from collections.abc import Callable

    from dist_ckpt.types import Communicator

__all__ = ["Preempted", "PreemptionGuard", "shield_worker"]

logger = logging.getLogger(__name__)

_SHORTEST_SECS = 1.0
"""What a save gets at least: less than that, and it could not even be planned."""

_LATE_SECS = 1.0
"""How long after the grace a process that cannot end by itself is ended."""


class Preempted(SystemExit):
    """The job was asked to stop, has saved, and ends; with the exit code of the signal."""


class PreemptionGuard:
    """Turns a signal into an answer that all ranks get at the same poll.

    From ``install`` to ``close``, the signals do nothing but set a flag; what handled them before
    is not called, as it may end the process before its save, and is put back by ``close``. A
    process that is forked meanwhile handles them as before. The signal may come to one rank or to
    all of them.

    Args:
        signals: Names (``SIGTERM``) or numbers.
        grace_secs: How long the job may go on after the signal: less than until it is killed.
        communicator: The ranks, if not those of the default process group, which must exist then.
        ends_process: Whether a process that is still not closed when the grace is over, as its
            storage or a rank hangs, is ended, with the exit code of the signal.

    Raises:
        ConfigError: A signal is not known, or the grace is not positive.
    """

    def __init__(
        self,
        signals: Sequence[str | int] = ("SIGTERM",),
        grace_secs: float = 30.0,
        communicator: Communicator | None = None,
        *,
        ends_process: bool = False,
    ) -> None:
        """Install nothing yet."""
        if not 0 < grace_secs < float("inf"):
            raise ConfigError(f"grace_secs: expected more than 0, found {grace_secs!r}.")
        self._signals = tuple(_signal_of(one) for one in signals)
        self.grace_secs = grace_secs
        self._comm, self._ends_process = communicator, ends_process
        self._earlier: dict[signal.Signals, Any] = {}
        self._agreement: Agreement | None = None
        self._unregister: Callable[[], None] | None = None
        self._watchdog: _Watchdog | None = None
        self._closed = False
        self._pid = os.getpid()
        # Written by the handler, between any two instructions of the main thread: plain values.
        self._is_asked = False
        self._heard_at: float | None = None
        self._signum = 0
        self._polls = 0
        self._is_waiting = False
        self._is_told = False

    def install(self) -> Self:
        """Handle the signals from now on; again does nothing. Alike on all ranks, waits for none.

        Raises:
            ConfigError: This is not the main thread, where signals are handled; or it is closed.
        """
        if self._closed:
            raise ConfigError("this PreemptionGuard is closed: make another one.")
        if self._unregister is not None:
            return self
        if threading.current_thread() is not threading.main_thread():
            raise ConfigError(
                "PreemptionGuard was installed in thread "
                f"{threading.current_thread().name!r}: Python handles signals in the main thread.",
                hint="install it there, before other threads begin to train.",
            )
        self._pid = os.getpid()
        self._agreement = self._begin(self._comm or default_communicator())
        self._watchdog = _Watchdog(self.grace_secs) if self._ends_process else None
        self._unregister = at_exit(close=self.close)
        for signum in self._signals:
            self._earlier[signum] = signal.signal(signum, self._on_signal)
        return self

    def _begin(self, comm: Communicator) -> Agreement | None:
        if comm.size == 1:
            return None
        if not isinstance(comm, StoreCommunicator):
            raise ConfigError(f"a PreemptionGuard needs ranks that meet in a store, not {comm!r}.")
        name = f"preemption/{comm.number_of('preemption')}"
        counts = PollCounts(on_request=self._on_request, passed=self._passed)
        own = comm.duplicate(name, timeout_secs=self.grace_secs)
        return Agreement(own, counts, self.grace_secs)

    def close(self) -> None:
        """Put the earlier handlers back and end what this started; again does nothing."""
        self._closed = True
        if self._pid != os.getpid():
            return  # a forked child: threads and ranks are its parent's
        if self._unregister is not None:
            self._unregister()
        self._put_back()
        if self._watchdog is not None:
            self._watchdog.close()
        if self._agreement is not None:
            self._agreement.close()

    def _put_back(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            logger.warning("PreemptionGuard was closed in another thread: its handlers stay")
            return
        for signum, earlier in self._earlier.items():
            # One that was set after ours stays, and so does ours if C had set the one before.
            if earlier is not None and signal.getsignal(signum) == self._on_signal:
                signal.signal(signum, earlier)
        self._earlier = {}

    def __enter__(self) -> Self:
        """Install it."""
        return self.install()

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()

    def poll(self) -> bool:
        """Whether to save and stop now: True on every rank at the same poll, and ever after.

        Call it equally often on all ranks, at a place where the state may be saved: at the end of
        each step. It costs next to nothing until a rank was asked to stop; then one poll may wait
        for the others, for about a third of the grace at most. If they cannot be reached, this
        rank stops for itself.
        """
        self._polls += 1
        return self._is_asked and self._is_due()

    def request(self) -> None:
        """Ask all ranks to stop, as if the signal had come. On any rank, from any thread."""
        self._ask(0)

    @property
    def is_asked(self) -> bool:
        """Whether this rank knows of a request; the others may not yet."""
        return self._is_asked

    @property
    def deadline(self) -> float | None:
        """When the grace is over, by ``time.monotonic``; None if nobody has asked."""
        return None if self._heard_at is None else self._heard_at + self.grace_secs

    @property
    def remaining_secs(self) -> float:
        """How much is left of the grace, counted from when this rank heard; all of it before."""
        deadline = self.deadline
        return self.grace_secs if deadline is None else max(0.0, deadline - time.monotonic())

    @property
    def exit_code(self) -> int:
        """What a process that stops on this request should exit with: 128 and the signal."""
        return 128 + (self._signum or signal.SIGTERM)

    def bounded(self, options: SaveOptions | None = None) -> SaveOptions:
        """Return options of a save whose ranks wait for each other no longer than the grace."""
        options = options or SaveOptions()
        left = max(_SHORTEST_SECS, self.remaining_secs)
        return replace(options, timeout_secs=min(options.timeout_secs, left))

    # -- in the handler: no lock, no log, nothing but values of this object

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        del frame
        if os.getpid() != self._pid:  # a forked child has inherited this, not the job's business
            earlier = self._earlier.get(signal.Signals(signum))
            signal.signal(signum, signal.SIG_DFL if earlier is None else earlier)
            os.kill(os.getpid(), signum)
            return
        self._ask(signum)

    def _ask(self, signum: int) -> None:
        if self._heard_at is None:
            self._heard_at = time.monotonic()
        self._signum = self._signum or signum
        self._is_asked = True
        # Reentrant, both of them: they put into a SimpleQueue.
        if self._watchdog is not None:
            self._watchdog.arm(signum)
        if self._agreement is not None:
            self._agreement.request(signum)

    # -- once somebody was asked

    def _on_request(self, signum: int) -> None:
        """Take note of a request of any rank. On the agreement's thread."""
        if self._heard_at is None:
            self._heard_at = time.monotonic()
        self._signum = self._signum or signum
        self._is_asked = True  # before the polls are counted: the next one waits
        if self._watchdog is not None:
            self._watchdog.arm(signum)

    def _passed(self) -> int:
        """Return how many polls returned False, or one more. On the agreement's thread."""
        is_waiting = self._is_waiting  # read first: while it waits, the number stands still
        return self._polls - 1 if is_waiting else self._polls

    def _is_due(self) -> bool:
        if self._agreement is None:
            self._tell()
            return True
        self._is_waiting = True
        self._agreement.wait()
        self._is_waiting = False
        stop_at = self._agreement.stop_at
        if stop_at is not None and self._polls < stop_at:
            return False
        self._tell()
        return True

    def _tell(self) -> None:
        if not self._is_told:
            self._is_told = True
            what = signal.Signals(self._signum).name if self._signum else "a request"
            logger.warning("%s: stopping, %.1f s of the grace left", what, self.remaining_secs)


class _Watchdog:
    """Ends a process that does not end by itself in time."""

    def __init__(self, grace_secs: float) -> None:
        self._grace_secs = grace_secs
        self._signals: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dist_ckpt-grace", daemon=True)
        self._thread.start()

    def arm(self, signum: int) -> None:
        if signum:  # who asks without a signal is not about to be killed
            self._signals.put(signum)

    def close(self) -> None:
        self._closing.set()
        self._signals.put(0)
        self._thread.join(_LATE_SECS)

    def _run(self) -> None:
        signum = self._signals.get()
        if self._closing.wait(self._grace_secs + _LATE_SECS):
            return
        # Where this process hangs may be its log.
        teller = threading.Thread(target=_tell_late, daemon=True)
        teller.start()
        teller.join(_LATE_SECS)
        os._exit(128 + signum)


def _tell_late() -> None:
    text = "dist_ckpt: the grace is over, and this process has not stopped: it is ended.\n"
    os.write(2, text.encode())
    faulthandler.dump_traceback(2, all_threads=True)


def shield_worker(_: int = 0) -> None:
    """Ignore SIGTERM in a worker of a dataloader: pass it as ``worker_init_fn``.

    Some schedulers (SLURM) send their signal to every process of a job. A worker that dies of it
    ends training with an error before the last save.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _signal_of(name: str | int) -> signal.Signals:
    try:
        found = signal.Signals[name] if isinstance(name, str) else signal.Signals(name)
    except (KeyError, ValueError):
        found = None
    if found is None or found in (signal.SIGKILL, signal.SIGSTOP):
        raise ConfigError(
            f"signals: expected names like 'SIGTERM', found {name!r}, which no process can handle."
        ) from None
    return found
