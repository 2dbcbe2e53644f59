"""Saves that go on while training continues: what is to be done, who does it, and when it is over.

Here: ``AsyncRequest``, ``AsyncCallsQueue`` and the workers behind it. Not here: what a request
writes (strategies). Called on every rank alike, from the thread that saves; only ``async_fn`` runs
elsewhere, and it makes no exchange with other ranks.

Workers are threads. A snapshot by fork is not offered: a forked child of a process with threads, or
with an accelerator in use, may deadlock or crash, and pays for each page that training changes.

Source of the names: Megatron-Core 0.7 to 0.18 ``dist_checkpointing.strategies.async_utils``.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from dist_ckpt._comm import SingleCommunicator, default_communicator
from dist_ckpt._comm.failures import describe_failure, merged_error
from dist_ckpt._comm.outcome import agree, attempt
from dist_ckpt.errors import CoordinationError, RankFailure

if TYPE_CHECKING:
    from dist_ckpt.types import Communicator

__all__ = [
    "AsyncCaller",
    "AsyncCallsQueue",
    "AsyncRequest",
    "PersistentAsyncCaller",
    "TemporalAsyncCaller",
    "UnmatchedAsyncCallsError",
]

logger = logging.getLogger(__name__)

_STAGED_ARGUMENT = 1
"""Position of the argument of ``async_fn`` that ``preload_fn`` replaces, as in Megatron-Core."""


class UnmatchedAsyncCallsError(CoordinationError, AssertionError):
    """Ranks are about to finish different calls; an ``AssertionError`` too, as in Megatron-Core."""


class AsyncRequest(NamedTuple):
    """What is to be done in the background, and then on the thread that saves.

    Attributes:
        async_fn: Does the work; None if this rank has none. It makes no exchange.
        async_fn_args: Its positional arguments.
        finalize_fns: Called in order on every rank, once ``async_fn`` is done on all ranks.
        async_fn_kwargs: Its keyword arguments.
        preload_fn: Called when the request is scheduled; its result takes the place of the second
            of ``async_fn_args``. Copies to the host what training is about to change.
        is_frozen: Whether ``add_finalize_fn`` is refused.
        call_idx: Number of the call, for callers that keep several.
    """

    async_fn: Callable[..., Any] | None
    async_fn_args: Sequence[Any]
    finalize_fns: list[Callable[[], Any]]
    async_fn_kwargs: Mapping[str, Any] = {}
    preload_fn: Callable[[], Any] | None = None
    is_frozen: bool = False
    call_idx: int = 0

    def add_finalize_fn(self, fn: Callable[[], Any]) -> None:
        """Add a function behind the others.

        Args:
            fn: Takes no arguments.

        Raises:
            RuntimeError: The request is frozen.
        """
        if self.is_frozen:
            raise RuntimeError("Cannot add finalization functions to a frozen AsyncRequest")
        self.finalize_fns.append(fn)

    def execute_sync(self) -> None:
        """Do all of it now. Collective over all ranks of the job.

        Raises:
            CheckpointingException: Some rank failed; raised on all of them, and what would have
                come after the failure is done on none.
        """
        comm = default_communicator()
        # The exchange is the barrier: no rank finalizes before all have done their work.
        agree(comm, "asynchronous save", attempt(_work, self))
        _finalize("asynchronous save", self.finalize_fns, comm)

    def freeze(self) -> AsyncRequest:
        """Return the same request, which takes no more finalization functions."""
        return self._replace(is_frozen=True)


class AsyncCaller(ABC):
    """The port to a worker: runs requests in the order in which they were scheduled."""

    @abstractmethod
    def schedule_async_call(self, async_req: AsyncRequest) -> None:
        """Preload now and hand the rest to the worker. Every rank.

        What fails here is told like a failure of the call: by ``take_error``, once it is done.
        """

    @abstractmethod
    def is_current_async_call_done(
        self,
        blocking: bool = False,  # noqa: FBT001, FBT002 - the lineage's signature
        no_dist: bool = False,  # noqa: FBT001, FBT002 - same
    ) -> bool:
        """Return whether the oldest call that was not reported yet is done; reports it if so.

        Args:
            blocking: Wait for it.
            no_dist: Answer for this rank alone. Else it is done when it is done on all ranks: one
                exchange, collective over all ranks of the job.
        """

    @abstractmethod
    def take_error(self) -> BaseException | None:
        """Return what the call reported last has raised, once; None if it went well."""

    @abstractmethod
    def close(self, abort: bool = False) -> None:  # noqa: FBT001, FBT002 - the lineage's signature
        """Wait for what was scheduled, and let the worker go. Errors nobody took are logged.

        Args:
            abort: Do not wait; calls that have not begun never will.
        """


class _ThreadCaller(AsyncCaller):
    """Calls as futures; which executor runs them is told by the subclass."""

    def __init__(self) -> None:
        self._futures: deque[Future[Any]] = deque()
        self._error: BaseException | None = None

    @abstractmethod
    def _submit(self, request: AsyncRequest, args: Sequence[Any]) -> Future[Any]:
        """Start ``async_fn`` in a thread."""

    def schedule_async_call(self, async_req: AsyncRequest) -> None:
        """Preload now and start the thread."""
        self._futures.append(self._start(async_req))

    def is_current_async_call_done(self, blocking: bool = False, no_dist: bool = False) -> bool:  # noqa: FBT001, FBT002 - the lineage's signature
        """Return whether the oldest call is done, here or on all ranks."""
        current = self._futures[0] if self._futures else None
        if current is not None and blocking:
            wait([current])
        done = current is None or current.done()
        if not no_dist:
            phase = "state of an asynchronous call"
            done = default_communicator().map_reduce(phase, lambda: done, all)
        if done and current is not None:
            self._futures.popleft()
            self._error = None if current.cancelled() else current.exception()
        return done

    def take_error(self) -> BaseException | None:
        """Return the error of the call reported last, once."""
        error, self._error = self._error, None
        return error

    def close(self, abort: bool = False) -> None:  # noqa: FBT001, FBT002 - the lineage's signature
        """Wait for the thread. One that runs cannot be stopped: after an abort it ends by itself.

        The interpreter waits for it before it exits.
        """
        if abort:
            for future in self._futures:
                future.cancel()
        else:
            wait(self._futures)
            for future in self._futures:
                if (error := future.exception()) is not None:
                    logger.error("an asynchronous call failed unheard", exc_info=error)
        self._futures.clear()

    def _start(self, request: AsyncRequest) -> Future[Any]:
        done: Future[Any] = Future()
        if request.async_fn is None:
            done.set_result(None)
            return done
        try:
            args = staged_args(request)
        except Exception as error:  # noqa: BLE001 - told to all ranks when the call is finalized
            done.set_exception(error)
            return done
        return self._submit(request, args)


class TemporalAsyncCaller(_ThreadCaller):
    """A thread for each call, which ends with it."""

    def _submit(self, request: AsyncRequest, args: Sequence[Any]) -> Future[Any]:
        assert request.async_fn is not None  # noqa: S101 - _start has looked
        executor = ThreadPoolExecutor(1, thread_name_prefix="dist_ckpt-async")
        future = executor.submit(request.async_fn, *args, **request.async_fn_kwargs)
        executor.shutdown(wait=False)  # what was submitted is run; then the thread ends
        return future


class PersistentAsyncCaller(_ThreadCaller):
    """One thread for all calls, from the first on until ``close``."""

    def __init__(self) -> None:
        """Start nothing yet."""
        super().__init__()
        self._executor: ThreadPoolExecutor | None = None

    def _submit(self, request: AsyncRequest, args: Sequence[Any]) -> Future[Any]:
        assert request.async_fn is not None  # noqa: S101 - _start has looked
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="dist_ckpt-async")
        return self._executor.submit(request.async_fn, *args, **request.async_fn_kwargs)

    def close(self, abort: bool = False) -> None:  # noqa: FBT001, FBT002 - the lineage's signature
        """Wait for the calls and end the thread; a later call starts a new one."""
        super().close(abort)
        if self._executor is not None:
            self._executor.shutdown(wait=not abort, cancel_futures=abort)
            self._executor = None


@dataclass(slots=True)
class _ActiveCall:
    idx: int
    caller: AsyncCaller
    finalize_fns: Sequence[Callable[[], Any]]
    is_done: bool = False
    error: BaseException | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Status:
    """What a rank says of its queue."""

    pending: tuple[int, ...]
    num_done: int
    blocking: bool
    failures: Mapping[int, RankFailure]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Verdict:
    """What all ranks do next."""

    num_ready: int = 0
    wait: bool = False
    failures: Mapping[int, Mapping[int, RankFailure]] = field(default_factory=dict)
    unmatched: str | None = None


class AsyncCallsQueue:
    """Requests under way, finished on all ranks in the order in which they were scheduled.

    Cost: ``maybe_finalize_async_calls`` makes no exchange while the queue is empty, one small
    exchange with all ranks while it is not, and one more after each finalization function. An
    exchange takes about a millisecond on one machine, and as long as the last rank takes to come.

    Args:
        persistent: One worker for all calls, instead of one for each.
        communicator: The ranks; all of the job if left out.
    """

    def __init__(
        self,
        persistent: bool = False,  # noqa: FBT001, FBT002 - the lineage's signature
        *,
        communicator: Communicator | None = None,
    ) -> None:
        """Start with no calls and no worker."""
        self.persistent = persistent
        self._persistent_caller: AsyncCaller | None = None
        self._communicator = communicator
        self._calls: deque[_ActiveCall] = deque()
        self._next_idx = 0

    def schedule_async_request(self, async_request: AsyncRequest) -> int:
        """Start a request and return its number, 0 for the first. Call it on every rank.

        What fails in preloading is told when the call is finalized, like any failure of it.
        """
        idx, self._next_idx = self._next_idx, self._next_idx + 1
        request = async_request.freeze()._replace(call_idx=idx)
        caller = self._caller()
        caller.schedule_async_call(request)
        self._calls.append(_ActiveCall(idx, caller, request.finalize_fns))
        return idx

    def maybe_finalize_async_calls(
        self,
        blocking: bool = False,  # noqa: FBT001, FBT002 - the lineage's signature
        no_dist: bool = False,  # noqa: FBT001, FBT002 - same
    ) -> list[int]:
        """Finish the calls that are done on all ranks; return their numbers. Collective.

        Args:
            blocking: Wait for all calls. One rank that waits makes all ranks wait.
            no_dist: Look at this rank only and exchange nothing; the finalization functions must
                then be local too.

        Raises:
            CheckpointingException: A call failed on some rank: raised once, on all ranks. Nothing
                of it is finalized; calls behind it are, by the next call of this method.
            UnmatchedAsyncCallsError: Ranks hold different calls; it names them.
            BarrierTimeoutError: Ranks did not come; it names them.
        """
        if not self._calls:
            return []
        comm = SingleCommunicator() if no_dist else self._communicator or default_communicator()
        verdict = self._agree(comm, blocking=blocking)
        finalized = []
        for _ in range(verdict.num_ready):
            call = self._calls.popleft()
            phase = f"asynchronous call {call.idx}"
            _raise_failures(phase, verdict.failures.get(call.idx, {}), call.error, comm)
            _finalize(phase, call.finalize_fns, comm)
            finalized.append(call.idx)
        return finalized

    def get_num_unfinalized_calls(self) -> int:
        """Return how many calls are in the queue on this rank."""
        return len(self._calls)

    def close(self, abort: bool = False) -> None:  # noqa: FBT001, FBT002 - the lineage's signature
        """Finish all calls and let the worker go. Collective, unless ``abort``.

        Args:
            abort: Finalize nothing and wait for nothing: what is under way is given up.

        Raises:
            CheckpointingException: The first failure, as in ``maybe_finalize_async_calls``; the
                calls behind it are finished nevertheless.
        """
        first: Exception | None = None
        while self._calls and not abort:
            before = len(self._calls)
            try:
                self.maybe_finalize_async_calls(blocking=True)
            except Exception as error:  # noqa: BLE001 - raised below, once all is finished
                first = first or error
                if len(self._calls) == before:  # the ranks cannot agree: no use in asking again
                    break
        if self._calls:
            logger.warning("asynchronous calls given up: %s", [call.idx for call in self._calls])
        for call in self._calls:
            call.caller.close(abort=True)
        self._calls.clear()
        if self._persistent_caller is not None:
            self._persistent_caller.close(abort=abort)
            self._persistent_caller = None
        if first is not None:
            raise first

    def _caller(self) -> AsyncCaller:
        if not self.persistent:
            return TemporalAsyncCaller()
        if self._persistent_caller is None:
            self._persistent_caller = PersistentAsyncCaller()
        return self._persistent_caller

    def _agree(self, comm: Communicator, *, blocking: bool) -> _Verdict:
        must_wait = blocking
        while True:
            # Inside of the exchange: who is interrupted while it waits for a call tells the others.
            look = partial(self._status, blocking=blocking, must_wait=must_wait)
            verdict = comm.map_reduce("asynchronous calls", look, _judge)
            if verdict.unmatched is not None:
                raise UnmatchedAsyncCallsError(
                    f"Unmatched async calls: {verdict.unmatched}.",
                    hint="every rank must schedule and finalize the same calls in the same order.",
                )
            if not verdict.wait:
                return verdict
            must_wait = True

    def _status(self, *, blocking: bool, must_wait: bool) -> _Status:
        num_done = 0
        for call in self._calls:
            if not call.is_done:
                call.is_done = call.caller.is_current_async_call_done(must_wait, no_dist=True)
                if not call.is_done:
                    break
                call.error = call.caller.take_error()
            num_done += 1
        return _Status(
            pending=tuple(call.idx for call in self._calls),
            num_done=num_done,
            blocking=blocking,
            failures={c.idx: describe_failure(c.error) for c in self._calls if c.error is not None},
        )


def _judge(statuses: Sequence[_Status]) -> _Verdict:
    heads = [status.pending[0] for status in statuses]
    if len(set(heads)) > 1:
        told = ", ".join(f"rank {rank} finalizes call {idx}" for rank, idx in enumerate(heads))
        return _Verdict(unmatched=told)
    num_ready = min(status.num_done for status in statuses)
    # Somebody waits for all calls, and another rank has some that run: it waits for them too.
    if any(s.blocking for s in statuses) and num_ready < min(len(s.pending) for s in statuses):
        return _Verdict(wait=True)
    ready = statuses[0].pending[:num_ready]
    return _Verdict(
        num_ready=num_ready,
        failures={
            idx: {rank: s.failures[idx] for rank, s in enumerate(statuses) if idx in s.failures}
            for idx in ready
        },
    )


def _finalize(phase: str, fns: Sequence[Callable[[], Any]], comm: Communicator) -> None:
    """Call ``fns`` in order; all ranks stop behind the first that failed on any of them."""
    for number, fn in enumerate(fns):
        error: BaseException | None = None
        try:
            fn()
        except BaseException as e:  # noqa: BLE001 - raised below, on every rank
            error = e
        step = f"{phase}, finalization {number}"
        outcomes = comm.map_reduce(step, partial(_outcome, error), list)
        failures = {rank: one for rank, one in enumerate(outcomes) if one is not None}
        if error is not None:
            raise error
        _raise_failures(step, failures, None, comm)


def _outcome(error: BaseException | None) -> RankFailure | None:
    """Return what the others are told; an interrupt is raised: the exchange tells them of that."""
    if error is None or isinstance(error, Exception):
        return None if error is None else describe_failure(error)
    raise error


def _raise_failures(
    phase: str,
    failures: Mapping[int, RankFailure],
    own: BaseException | None,
    comm: Communicator,
) -> None:
    if own is not None and comm.size == 1:
        raise own
    if failures:
        raise merged_error(phase, failures, own)


def _work(request: AsyncRequest) -> None:
    if request.async_fn is not None:
        request.async_fn(*staged_args(request), **request.async_fn_kwargs)


def staged_args(request: AsyncRequest) -> list[Any]:
    """Return the arguments of ``async_fn``, after ``preload_fn`` has copied what it copies."""
    args = list(request.async_fn_args)
    if request.preload_fn is not None:
        args[_STAGED_ARGUMENT] = request.preload_fn()
    return args
