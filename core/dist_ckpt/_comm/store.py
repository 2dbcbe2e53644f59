"""A communicator over a key-value store (``torch.distributed.Store``): TCPStore, HashStore, ...

Here: the exchange and its timeouts. Not here: which store and which ranks (``_comm.torch_dist``).
No collective of a process group is used: it could deadlock with those of training, takes
accelerator memory, and cannot name a rank that does not arrive.

Values are pickled by ranks of the same job, never read from a checkpoint.
"""

from __future__ import annotations

import contextlib
import logging
import pickle
import time
from typing import TYPE_CHECKING, Any

from dist_ckpt._comm.failures import describe_failure, merged_error
from dist_ckpt.errors import BarrierTimeoutError, CoordinationError, RankFailure

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterator, Sequence

    from torch._C._distributed_c10d import Store

    from dist_ckpt.types import R, T

__all__ = ["StoreCommunicator"]

logger = logging.getLogger(__name__)

_SHORTEST_NAP_SECS, _LONGEST_NAP_SECS = 0.0005, 0.25
"""Between two polls of the store; a nap is 5 % of the time waited so far."""

_GRACE_SECS = 30.0
"""How much longer the others wait than rank 0, so that its verdict reaches them first."""

_LEAVE_SECS = 30.0
"""How long rank 0 waits for ranks that have not read the verdict; they may be suspended or dead."""


class StoreCommunicator:
    """Ranks that communicate through a store.

    Args:
        store: Shared by all ranks of this communicator.
        rank: This process's rank, 0 to ``size - 1``.
        size: Number of ranks.
        name: Prefix of the keys. Each name has a sequence of exchanges of its own.
        timeout_secs: How long a rank waits for the others in one exchange.
        stop: Once it is set, waits end with a ``CoordinationError``.
    """

    def __init__(
        self,
        store: Store,
        *,
        rank: int,
        size: int,
        name: str = "dist_ckpt",
        timeout_secs: float,
        stop: threading.Event | None = None,
    ) -> None:
        """Exchange nothing yet."""
        self._store, self._rank, self._size = store, rank, size
        self._name, self._timeout_secs, self._stop = name, timeout_secs, stop

    @property
    def rank(self) -> int:
        """This process's rank."""
        return self._rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self._size

    def duplicate(
        self, name: str, *, timeout_secs: float, stop: threading.Event | None = None
    ) -> StoreCommunicator:
        """Return a communicator of the same ranks with exchanges of its own, for another thread."""
        return StoreCommunicator(
            self._store,
            rank=self._rank,
            size=self._size,
            name=f"{self._name}/{name}",
            timeout_secs=timeout_secs,
            stop=stop,
        )

    def post_note(self, key: str, value: object) -> None:
        """Store a note that any rank can read under ``key``, now or later. Not collective."""
        with self._reaching():
            self._store.set(f"{self._name}/{key}", pickle.dumps(value))  # type: ignore[arg-type]  # bytes are taken

    def delete_note(self, key: str) -> None:
        """Delete a note, if there is one. Not collective."""
        with self._reaching():
            self._store.delete_key(f"{self._name}/{key}")

    def read_note(self, key: str) -> Any:
        """Return the note at ``key``; wait for it up to the timeout. Not collective.

        Raises:
            BarrierTimeoutError: No rank has posted it in time.
        """
        if not self._wait(key, self._timeout_secs):
            raise BarrierTimeoutError(
                f"rank {self._rank}: nobody posted {key!r} within {self._timeout_secs:g} s."
            )
        return self._get(key)

    def has_note(self, key: str) -> bool:
        """Whether there is a note at ``key``. Not collective, does not wait.

        Raises:
            CoordinationError: The store is gone.
        """
        return self._wait(key, 0.0)

    def number_of(self, what: str) -> int:
        """Return how often this rank has called this for ``what``; equal on ranks that act alike.

        Not collective. Gives objects that are made again and again a name that all ranks share.
        """
        with self._reaching():
            return int(self._store.add(f"{self._name}/number/{what}/{self._rank}", 1))

    def broadcast(self, phase: str, produce: Callable[[], R]) -> R:
        """Run ``produce`` on rank 0; collective."""
        return self.map_reduce(phase, lambda: None, lambda _: produce())

    def map_reduce(
        self, phase: str, local: Callable[[], T], combine: Callable[[Sequence[T]], R]
    ) -> R:
        """Run ``local`` everywhere and ``combine`` on rank 0; collective."""
        result: R = self._exchange(phase, local, combine, scatter=False)
        return result

    def map_scatter(
        self, phase: str, local: Callable[[], T], combine: Callable[[Sequence[T]], Sequence[R]]
    ) -> R:
        """Like ``map_reduce`` with one result for each rank; collective."""
        result: R = self._exchange(phase, local, combine, scatter=True)
        return result

    def _exchange(
        self,
        phase: str,
        local: Callable[[], Any],
        combine: Callable[[Sequence[Any]], Any],
        *,
        scatter: bool,
    ) -> Any:
        number = self._next_exchange()
        try:
            value, error = _attempt(local)
        except BaseException as interrupt:
            # Ctrl-C or an exit: report it to the others and wait for none of them.
            self._report_interrupt(phase, number, describe_failure(interrupt))
            raise
        failure = None if error is None else describe_failure(error)
        if self._rank == 0:
            try:
                found = self._collect(phase, number, value, failure)
                if isinstance(found, list):
                    verdict, combine_error = _combined(found, combine)
                    error = error or combine_error
                else:
                    verdict = found
            except BaseException as interrupt:
                self._report_interrupt(phase, number, describe_failure(interrupt))
                raise
            verdict, pack_error = self._publish_any(number, verdict, scatter=scatter)
            error = error or pack_error
            self._stay_for_readers(phase, number, verdict)
        else:
            self._set(f"{number}/in/{self._rank}", (phase, value, failure))
            try:
                verdict = self._await_verdict(phase, number)
                if not isinstance(verdict, _Missing):  # then others still read who has arrived
                    self._forget(number)
            finally:
                self._leave(number)  # the last access: after this the store may be gone
        if isinstance(verdict, _Missing):
            raise BarrierTimeoutError(verdict.message)
        if isinstance(verdict, _Disagreement):
            raise CoordinationError(verdict.message)
        if isinstance(verdict, _Failed):
            raise merged_error(phase, verdict.failures, error)
        if self._rank == 0 and scatter:
            return verdict.result[0]
        return verdict.result

    def _report_interrupt(self, phase: str, number: int, failure: RankFailure) -> None:
        # The interrupt itself is raised, also if the store is gone.
        with contextlib.suppress(CoordinationError):
            if self._rank == 0:
                self._publish(number, self._packed(_Failed({0: failure}), scatter=False))
            else:
                self._set(f"{number}/in/{self._rank}", (phase, None, failure))
                self._leave(number)

    def _next_exchange(self) -> int:
        # The counter is in the store, one for each rank: communicators may be made again, and a
        # rank that skipped an exchange has another number, so it is found missing and named.
        with self._reaching():
            return int(self._store.add(f"{self._name}/calls/{self._rank}", 1))

    def _collect(
        self, phase: str, number: int, value: object, failure: RankFailure | None
    ) -> list[Any] | _Verdict:
        values, failures = [value], {0: failure} if failure else {}
        deadline = time.monotonic() + self._timeout_secs
        missing, phases = [], {}
        for rank in range(1, self._size):
            key = f"{number}/in/{rank}"
            if not self._wait(key, deadline - time.monotonic()):
                missing.append(rank)
                continue
            other_phase, other_value, other_failure = self._get(key)
            values.append(other_value)
            if other_phase != phase:
                phases[rank] = other_phase
            if other_failure is not None:
                failures[rank] = other_failure
        if missing:
            return _Missing(self._who_is_missing(phase, missing), num_missing=len(missing))
        if phases:
            told = ", ".join(f"rank {rank} is in {name!r}" for rank, name in phases.items())
            return _Disagreement(
                f"ranks are in different steps: rank 0 is in {phase!r}, {told}. "
                "hint: every rank must make the same calls of dist_ckpt in the same order."
            )
        return _Failed(failures) if failures else values

    def _packed(self, verdict: _Verdict, *, scatter: bool) -> list[bytes]:
        """Return the pickled verdict for each of the other ranks."""
        if not (scatter and isinstance(verdict, _Done)):
            return [pickle.dumps(verdict)] * (self._size - 1)
        if len(verdict.result) != self._size:
            raise CoordinationError(f"{len(verdict.result)} results for {self._size} ranks")
        return [pickle.dumps(_Done(result)) for result in verdict.result[1:]]

    def _publish_any(
        self, number: int, verdict: _Verdict, *, scatter: bool
    ) -> tuple[_Verdict, Exception | None]:
        """Send the verdict; a result that cannot be pickled becomes a failure on every rank."""
        packed, error = _attempt(lambda: self._packed(verdict, scatter=scatter))
        if error is not None:
            verdict = _Failed({0: describe_failure(error)})
            packed = self._packed(verdict, scatter=False)
        self._publish(number, packed)
        return verdict, error

    def _publish(self, number: int, packed: Sequence[bytes]) -> None:
        with self._reaching():
            for rank, data in enumerate(packed, start=1):
                self._store.set(f"{self._name}/{number}/out/{rank}", data)  # type: ignore[arg-type]  # bytes are taken

    def _await_verdict(self, phase: str, number: int) -> _Verdict:
        key = f"{number}/out/{self._rank}"
        if not self._wait(key, self._timeout_secs + _GRACE_SECS):
            ranks = range(1, self._size)
            missing = [rank for rank in ranks if not self._wait(f"{number}/in/{rank}", 0.0)]
            return _Missing(self._who_is_missing(phase, [0, *missing]))
        verdict: _Verdict = self._get(key)
        return verdict

    def _who_is_missing(self, phase: str, missing: list[int]) -> str:
        return (
            f"{phase}: ranks {missing} of {self._size} did not arrive within "
            f"{self._timeout_secs:g} s (told by rank {self._rank}). "
            "hint: they died, are stuck elsewhere, or did not make this call."
        )

    def _leave(self, number: int) -> None:
        """Report to rank 0 that this rank has read the verdict of an exchange.

        Rank 0 may host the store and may end as soon as it sees this. A store that is gone by then
        does not fail an exchange whose verdict is known.
        """
        with contextlib.suppress(CoordinationError), self._reaching():
            self._store.add(f"{self._name}/{number}/left", 1)

    def _forget(self, number: int) -> None:
        """Delete this rank's keys of an exchange whose verdict it has read."""
        with contextlib.suppress(CoordinationError), self._reaching():
            self._store.delete_key(f"{self._name}/{number}/in/{self._rank}")
            self._store.delete_key(f"{self._name}/{number}/out/{self._rank}")

    def _stay_for_readers(self, phase: str, number: int, verdict: _Verdict) -> None:
        """Wait until all participating ranks have read the verdict. Rank 0.

        A verdict must not depend on a rank that has returned, and rank 0 may host the store. Ranks
        that do not read it in time are named in the log; the verdict does not change.
        """
        key = f"{self._name}/{number}/left"
        num_readers = self._size - 1 - verdict.num_missing
        limit = min(_LEAVE_SECS, self._timeout_secs)
        with contextlib.suppress(CoordinationError):
            if self._poll(lambda: self._store.add(key, 0) >= num_readers, limit):
                with self._reaching():
                    self._store.delete_key(key)
                return
            ranks = range(1, self._size)
            unread = [rank for rank in ranks if self._wait(f"{number}/in/{rank}", 0.0)]
            logger.warning(
                "%s: it is decided, but ranks %s of %d have not read the verdict within %g s; if "
                "this process hosts the store and ends, they will not. hint: they died, or are "
                "stopped.",
                phase, unread, self._size, limit,
            )  # fmt: skip

    def _wait(self, key: str, timeout_secs: float) -> bool:
        name = f"{self._name}/{key}"
        return self._poll(lambda: self._store.check([name]), timeout_secs)

    def _poll(self, is_there: Callable[[], bool], timeout_secs: float) -> bool:
        """Poll until ``is_there`` returns True; return whether it did in time."""
        started = time.monotonic()
        with self._reaching():
            # Polled, not waited for: a wait inside of the store keeps Python from seeing Ctrl-C and
            # SIGTERM, and the store logs each of its time-outs.
            while not is_there():
                waited = time.monotonic() - started
                if waited >= timeout_secs:
                    return False
                nap = min(max(0.05 * waited, _SHORTEST_NAP_SECS), _LONGEST_NAP_SECS)
                if self._stop is None:
                    time.sleep(nap)
                elif self._stop.wait(nap):
                    raise CoordinationError(
                        f"rank {self._rank}: waiting was ended, as the program or its saver ends."
                    )
        return True

    @contextlib.contextmanager
    def _reaching(self) -> Iterator[None]:
        """Raise ``CoordinationError`` if the store cannot be reached."""
        from torch.distributed import DistError  # noqa: PLC0415 - keeps this module light

        try:
            yield
        except DistError as error:
            raise CoordinationError(
                f"the store through which ranks meet is gone (seen by rank {self._rank}): "
                f"{error}. hint: the process that hosts it, usually rank 0, has died."
            ) from error

    def _set(self, key: str, value: object) -> None:
        try:
            data = pickle.dumps(value)
        except Exception as error:  # noqa: BLE001 - whatever pickling raises is reported to rank 0
            phase = value[0] if isinstance(value, tuple) else key
            data = pickle.dumps((phase, None, describe_failure(error)))
        with self._reaching():
            self._store.set(f"{self._name}/{key}", data)  # type: ignore[arg-type]  # bytes are taken

    def _get(self, key: str) -> Any:
        with self._reaching():
            data = self._store.get(f"{self._name}/{key}")
        # Only ranks of this job write to the store, and never bytes of a checkpoint.
        return pickle.loads(data)  # noqa: S301


class _Verdict:
    """What rank 0 sends to the others at the end of an exchange."""

    result: Any = None
    num_missing = 0


class _Done(_Verdict):
    def __init__(self, result: object) -> None:
        self.result = result


class _Failed(_Verdict):
    def __init__(self, failures: dict[int, RankFailure]) -> None:
        self.failures = failures


class _Missing(_Verdict):
    def __init__(self, message: str, *, num_missing: int = 0) -> None:
        self.message, self.num_missing = message, num_missing


class _Disagreement(_Verdict):
    def __init__(self, message: str) -> None:
        self.message = message


def _attempt(call: Callable[[], Any]) -> tuple[Any, Exception | None]:
    """Return the result of ``call``, or the error that it raised."""
    try:
        return call(), None
    except Exception as error:  # noqa: BLE001 - raised again on every rank after the exchange
        return None, error


def _combined(
    values: list[Any], combine: Callable[[Sequence[Any]], Any]
) -> tuple[_Verdict, Exception | None]:
    result, error = _attempt(lambda: combine(values))
    if error is not None:
        return _Failed({0: describe_failure(error)}), error
    return _Done(result), None
