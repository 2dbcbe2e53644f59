"""N ranks as N threads of one process, which meet in a ``HashStore``.

Here: ``ThreadWorld`` and the error of a run. Not here: the communicator, which is the one that real
ranks use (``_comm.store``). Called by tests, from any thread; no process group is needed.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from typing import TYPE_CHECKING, TypeVar

from dist_ckpt._comm.store import StoreCommunicator

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from dist_ckpt.types import Communicator

__all__ = ["RankErrors", "ThreadWorld"]

R = TypeVar("R")


class RankErrors(AssertionError):  # noqa: N818 - it holds errors, one for each rank that failed
    """Some ranks raised. ``errors`` maps each of them to what it raised."""

    def __init__(self, message: str, errors: Mapping[int, BaseException]) -> None:
        """Keep the exceptions themselves beside the message."""
        super().__init__(message)
        self.errors = dict(errors)


class ThreadWorld:
    """A world of ``size`` ranks in this process; each ``run`` is a fresh job in it.

    Args:
        size: Number of ranks.
        timeout_secs: How long ranks wait for each other in one exchange.
        deadline_secs: How long a whole run may take before the ranks that still run are named.
    """

    def __init__(
        self, size: int, *, timeout_secs: float = 20.0, deadline_secs: float = 60.0
    ) -> None:
        """Remember the sizes; threads start in ``run``."""
        self.size = size
        self._timeout_secs, self._deadline_secs = timeout_secs, deadline_secs

    def run(self, fn: Callable[[Communicator], R]) -> list[R]:
        """Call ``fn(communicator)`` on every rank; return the results in rank order.

        Raises:
            RankErrors: Some ranks raised; with each exception by rank.
            TimeoutError: Some ranks did not end in time; names them and shows where they are.
        """
        results, errors = self.outcomes(fn)
        if errors:
            told = "\n".join(f"rank {rank}: {_text(error)}" for rank, error in errors.items())
            raise RankErrors(f"{len(errors)} of {self.size} ranks raised\n{told}", errors)
        return [results[rank] for rank in range(self.size)]

    def errors(self, fn: Callable[[Communicator], object]) -> dict[int, BaseException]:
        """Call ``fn(communicator)`` on every rank; return what ranks raised, by rank."""
        return self.outcomes(fn)[1]

    def outcomes(
        self, fn: Callable[[Communicator], R]
    ) -> tuple[dict[int, R], dict[int, BaseException]]:
        """Call ``fn(communicator)`` on every rank; return results and exceptions by rank.

        Raises:
            TimeoutError: Some ranks did not end in time; names them and shows where they are.
        """
        # Not at the top: the package must stay light.
        from torch._C._distributed_c10d import HashStore  # noqa: PLC0415

        store = HashStore()
        results: dict[int, R] = {}
        errors: dict[int, BaseException] = {}

        def work(rank: int) -> None:
            comm = StoreCommunicator(
                store, rank=rank, size=self.size, timeout_secs=self._timeout_secs
            )
            try:
                results[rank] = fn(comm)
            except BaseException as error:  # noqa: BLE001 - whatever a rank raises is its outcome
                errors[rank] = error

        threads = [
            threading.Thread(target=work, args=(rank,), name=f"rank-{rank}", daemon=True)
            for rank in range(self.size)
        ]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + self._deadline_secs
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        late = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
        if late:
            raise TimeoutError(
                f"ranks {late} of {self.size} did not end within {self._deadline_secs:g} s\n"
                + "\n".join(f"rank {rank} is at\n{_stack(threads[rank])}" for rank in late)
            )
        return results, dict(sorted(errors.items()))


def _text(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


def _stack(thread: threading.Thread) -> str:
    frame = sys._current_frames().get(thread.ident or 0)  # noqa: SLF001 - the documented way
    return "".join(traceback.format_stack(frame)) if frame else "(no frame)"
