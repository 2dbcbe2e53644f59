"""Agreement of all ranks on the poll at which they stop, so that all stop after the same step.

Here: ``Agreement``, one for each rank, with its thread. Not here: signals, and what a poll is
(``preemption``). The thread calls no collective of a process group: it posts and reads notes in the
job's store, and polls it for requests of other ranks.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dist_ckpt._comm.store import StoreCommunicator

__all__ = ["Agreement", "PollCounts"]

logger = logging.getLogger(__name__)

_SHORTEST_LOOK_SECS = 0.1
_LOOKS_A_SECOND = 4000
"""Most requests a second that all ranks together make to the store."""

_COUNTING_SHARE, _VERDICT_SHARE = 0.25, 0.35
"""Parts of the grace: rank 0 must have all counts by the first, the others its verdict by the
second."""

_NAP_SECS = 0.02

_CLOSE_SECS = 5.0
"""Longer than one request to a store that answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PollCounts:
    """What an ``Agreement`` asks its rank.

    Attributes:
        on_request: Called on the agreement's thread with the signal, once any rank was asked to
            stop; from then on the next poll waits.
        passed: Returns how many polls of this rank have returned False; called after
            ``on_request``.
    """

    on_request: Callable[[int], None]
    passed: Callable[[], int]


class Agreement:
    """One rank's part in finding the first poll that no rank has passed.

    Args:
        comm: The ranks; nothing else may use this communicator.
        counts: Callbacks into this rank.
        grace_secs: How long a job may run after it was asked to stop.

    Attributes:
        stop_at: The number of the poll at which all ranks stop; None if they have not agreed.
    """

    def __init__(self, comm: StoreCommunicator, counts: PollCounts, grace_secs: float) -> None:
        """Start the thread that looks for requests."""
        self._comm, self._counts, self._grace_secs = comm, counts, grace_secs
        self._look_secs = min(max(_SHORTEST_LOOK_SECS, comm.size / _LOOKS_A_SECOND), grace_secs / 8)
        self._requests: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._closing, self._settled = threading.Event(), threading.Event()
        self.stop_at: int | None = None
        self._thread = threading.Thread(target=self._run, name="dist_ckpt-preemption", daemon=True)
        self._thread.start()

    def request(self, signum: int) -> None:
        """Ask all ranks to stop. Takes no lock, so that a signal handler may call it."""
        self._requests.put(signum)

    def wait(self) -> None:
        """Wait until the poll is agreed on or agreement has failed; at most a part of the grace."""
        self._settled.wait(self._grace_secs * _VERDICT_SHARE + 2 * self._look_secs)

    def close(self) -> None:
        """End the thread."""
        self._closing.set()
        self._requests.put(None)
        self._thread.join(_CLOSE_SECS)

    def _run(self) -> None:
        try:
            signum = self._requested()
            if signum is not None:
                self._counts.on_request(signum)
                self.stop_at = self._agreed()
        except Exception as error:  # noqa: BLE001 - then each rank stops for itself
            logger.log(
                logging.DEBUG if self._closing.is_set() else logging.WARNING,
                "rank %d does not know when the others stop: %s", self._comm.rank, error,
            )  # fmt: skip
        finally:
            self._settled.set()

    def _requested(self) -> int | None:
        """Return the signal once a rank was asked to stop; None if this is closed first."""
        while not self._closing.is_set():
            try:
                signum = self._requests.get(timeout=self._look_secs)
            except queue.Empty:
                if self._comm.has_note("asked"):
                    return int(self._comm.read_note("asked"))
                continue
            if signum is not None:
                self._tell_asked(signum)
                return signum
        return None

    def _tell_asked(self, signum: int) -> None:
        try:
            self._comm.post_note("asked", signum)
        except Exception:
            # This rank was asked itself: it stops even if the others cannot be told.
            self._counts.on_request(signum)
            raise

    def _agreed(self) -> int | None:
        comm, passed = self._comm, self._counts.passed()
        began = time.monotonic()
        comm.post_note(f"passed/{comm.rank}", passed)
        if comm.rank == 0:
            verdict = self._collected(began + self._grace_secs * _COUNTING_SHARE, passed)
            comm.post_note("verdict", verdict)
        elif self._arrives("verdict", began + self._grace_secs * _VERDICT_SHARE):
            verdict = comm.read_note("verdict")
        else:
            verdict = self._missing([0])
        if isinstance(verdict, str):
            logger.warning("%s", verdict)
            return None
        return int(verdict)

    def _collected(self, deadline: float, passed: int) -> int | str:
        """Return the first poll that no rank has passed, or what says who is missing. Rank 0."""
        most, missing = passed, []
        for rank in range(1, self._comm.size):
            if self._arrives(f"passed/{rank}", deadline):
                most = max(most, self._comm.read_note(f"passed/{rank}"))
            else:
                missing.append(rank)
        return self._missing(missing) if missing else most + 1

    def _arrives(self, key: str, deadline: float) -> bool:
        while not self._comm.has_note(key):
            if time.monotonic() >= deadline or self._closing.wait(_NAP_SECS):
                return False
        return True

    def _missing(self, ranks: list[int]) -> str:
        return (
            f"the job was asked to stop, but ranks {ranks} of {self._comm.size} did not tell how "
            f"far they are within a part of the grace of {self._grace_secs:g} s: each rank stops "
            "for itself, and a save that needs them will fail."
        )
