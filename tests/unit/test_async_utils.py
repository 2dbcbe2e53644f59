"""Requests, workers and the queue; ranks are threads that meet in one store."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from dist_ckpt.errors import BarrierTimeoutError, CoordinationError, RankFailedError, StorageError
from dist_ckpt.strategies.async_utils import (
    AsyncCaller,
    AsyncCallsQueue,
    AsyncRequest,
    PersistentAsyncCaller,
    TemporalAsyncCaller,
    UnmatchedAsyncCallsError,
)
from dist_ckpt.testing import ThreadWorld
from dist_ckpt.types import Communicator

CALLERS: list[Callable[[], AsyncCaller]] = [TemporalAsyncCaller, PersistentAsyncCaller]


def boom(text: str = "boom") -> None:
    raise OSError(text)


# -- requests --------------------------------------------------------------------------------------


def test_fields_and_defaults() -> None:
    """They are those of the lineage."""
    request = AsyncRequest(None, (), [])
    assert request._fields == (
        "async_fn", "async_fn_args", "finalize_fns", "async_fn_kwargs", "preload_fn", "is_frozen",
        "call_idx",
    )  # fmt: skip
    assert request[3:] == ({}, None, False, 0)


def test_a_frozen_request_takes_no_more_functions() -> None:
    """The one it was made of still does."""
    request = AsyncRequest(None, (), [])
    frozen = request.freeze()
    request.add_finalize_fn(lambda: None)
    with pytest.raises(RuntimeError, match="Cannot add finalization functions"):
        frozen.add_finalize_fn(lambda: None)
    assert (request.is_frozen, frozen.is_frozen, len(request.finalize_fns)) == (False, True, 1)


def test_execute_sync_runs_everything_in_order() -> None:
    """The preloaded value takes the place of the second argument."""
    done: list[Any] = []
    request = AsyncRequest(
        lambda *args, **kwargs: done.append((args, kwargs)),
        (1, "not staged", 3),
        [lambda: done.append("first"), lambda: done.append("second")],
        {"key": 4},
        lambda: "staged",
    )
    request.execute_sync()
    assert done == [((1, "staged", 3), {"key": 4}), "first", "second"]


def test_execute_sync_finalizes_nothing_after_a_failure() -> None:
    """In one process the error is raised as it is."""
    done: list[str] = []
    with pytest.raises(OSError, match="boom"):
        AsyncRequest(boom, (), [lambda: done.append("no")]).execute_sync()
    with pytest.raises(OSError, match="boom"):
        AsyncRequest(None, (), [boom, lambda: done.append("no")]).execute_sync()
    assert done == []


# -- workers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", CALLERS)
def test_a_caller_runs_calls_in_order_and_reports_each_once(
    make: Callable[[], AsyncCaller],
) -> None:
    """A call that is under way is not done; blocking waits for it."""
    caller, gate, done = make(), threading.Event(), []
    try:
        caller.schedule_async_call(AsyncRequest(lambda: gate.wait(120) and done.append(0), (), []))
        caller.schedule_async_call(AsyncRequest(lambda: boom("second"), (), []))
        assert not caller.is_current_async_call_done(no_dist=True)
        gate.set()
        assert caller.is_current_async_call_done(blocking=True, no_dist=True)
        assert caller.take_error() is None
        assert done == [0]
        assert caller.is_current_async_call_done(blocking=True, no_dist=True)
        assert str(caller.take_error()) == "second"
        assert caller.take_error() is None
        assert caller.is_current_async_call_done(no_dist=True)  # nothing is under way
    finally:
        gate.set()
        caller.close()


@pytest.mark.parametrize("make", CALLERS)
def test_preloading_happens_before_scheduling_returns(make: Callable[[], AsyncCaller]) -> None:
    """What changes afterwards is not seen by the worker."""
    caller, state, seen = make(), [1, 2], []
    request = AsyncRequest(
        lambda _, staged: seen.append(staged), (0, state), [], preload_fn=lambda: list(state)
    )
    caller.schedule_async_call(request)
    state.clear()
    caller.close()
    assert seen == [[1, 2]]


@pytest.mark.parametrize("make", CALLERS)
def test_abort_does_not_wait(make: Callable[[], AsyncCaller]) -> None:
    """The call under way goes on by itself; the caller can be used again."""
    caller, gate, done = make(), threading.Event(), []
    caller.schedule_async_call(AsyncRequest(lambda: gate.wait(120), (), []))
    caller.close(abort=True)
    assert not gate.is_set()
    gate.set()
    caller.schedule_async_call(AsyncRequest(lambda: done.append(1), (), []))
    caller.close()
    assert done == [1]


@pytest.mark.parametrize("make", CALLERS)
def test_errors_that_nobody_took_are_logged(
    make: Callable[[], AsyncCaller], caplog: pytest.LogCaptureFixture
) -> None:
    """Closing a worker does not make a failure disappear."""
    caller = make()
    caller.schedule_async_call(AsyncRequest(boom, (), []))
    caller.close()
    assert "an asynchronous call failed unheard" in caplog.text
    assert "boom" in caplog.text


def test_a_persistent_caller_keeps_its_thread() -> None:
    """A temporal one has a thread for each call."""

    def threads(caller: AsyncCaller) -> int:
        seen: list[threading.Thread] = []
        for _ in range(3):
            caller.schedule_async_call(
                AsyncRequest(lambda: seen.append(threading.current_thread()), (), [])
            )
            assert caller.is_current_async_call_done(blocking=True, no_dist=True)
        caller.close()
        assert threading.main_thread() not in seen
        return len({id(thread) for thread in seen})

    assert threads(PersistentAsyncCaller()) == 1
    assert threads(TemporalAsyncCaller()) == 3


# -- the queue in one process ----------------------------------------------------------------------


@pytest.mark.parametrize("persistent", [False, True])
def test_calls_are_numbered_and_finalized_in_order(persistent: bool) -> None:
    """The numbers begin at 0; an empty queue finalizes nothing."""
    queue, done = AsyncCallsQueue(persistent), []
    assert queue.maybe_finalize_async_calls() == []
    for number in range(3):
        idx = queue.schedule_async_request(
            AsyncRequest(None, (), [lambda n=number: done.append(n)])
        )
        assert idx == number
    assert queue.get_num_unfinalized_calls() == 3
    assert queue.maybe_finalize_async_calls(blocking=True) == [0, 1, 2]
    assert queue.get_num_unfinalized_calls() == 0
    assert done == [0, 1, 2]
    queue.close()


def test_nothing_is_finalized_before_the_work_is_done() -> None:
    """Asking does not wait; work behind unfinished work has to wait too."""
    queue, gate, done = AsyncCallsQueue(), threading.Event(), []
    queue.schedule_async_request(
        AsyncRequest(lambda: gate.wait(120), (), [lambda: done.append("slow")])
    )
    queue.schedule_async_request(AsyncRequest(None, (), [lambda: done.append("quick")]))
    assert queue.maybe_finalize_async_calls() == []
    assert done == []
    gate.set()
    assert queue.maybe_finalize_async_calls(blocking=True) == [0, 1]
    assert done == ["slow", "quick"]


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("where", ["work", "preload", "finalize"])
def test_a_failure_is_raised_once_and_poisons_nothing(persistent: bool, where: str) -> None:
    """Then come three good calls, of which nothing is heard."""
    queue, done = AsyncCallsQueue(persistent), []
    bad = {
        "work": AsyncRequest(boom, (), [lambda: done.append("bad")]),
        "preload": AsyncRequest(lambda *_: None, (0, 0), [lambda: done.append("bad")], {}, boom),
        "finalize": AsyncRequest(None, (), [boom, lambda: done.append("bad")]),
    }[where]
    queue.schedule_async_request(bad)
    for number in range(3):
        queue.schedule_async_request(AsyncRequest(None, (), [lambda n=number: done.append(n)]))
    with pytest.raises(OSError, match="boom"):
        queue.maybe_finalize_async_calls(blocking=True)
    assert done == []
    assert queue.maybe_finalize_async_calls(blocking=True) == [1, 2, 3]
    assert done == [0, 1, 2]
    queue.close()


def test_close_finishes_all_and_tells_the_first_failure() -> None:
    """Calls behind the failed one are finalized."""
    queue, done = AsyncCallsQueue(), []
    for fn in (lambda: boom("one"), lambda: boom("two"), None):
        queue.schedule_async_request(AsyncRequest(fn, (), [lambda: done.append("end")]))
    with pytest.raises(OSError, match="one"):
        queue.close()
    assert done == ["end"]
    assert queue.get_num_unfinalized_calls() == 0
    queue.close()


@pytest.mark.parametrize("persistent", [False, True])
def test_an_aborted_queue_finalizes_nothing(
    persistent: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """It does not wait either."""
    queue, gate, done = AsyncCallsQueue(persistent), threading.Event(), []
    queue.schedule_async_request(
        AsyncRequest(lambda: gate.wait(120), (), [lambda: done.append("end")])
    )
    queue.close(abort=True)
    assert "asynchronous calls given up: [0]" in caplog.text
    assert not gate.is_set()
    gate.set()
    assert queue.get_num_unfinalized_calls() == 0
    assert queue.maybe_finalize_async_calls(blocking=True) == []
    assert done == []


# -- the queue on several ranks --------------------------------------------------------------------


def test_a_call_is_done_when_it_is_done_on_all_ranks() -> None:
    """Until then nobody finalizes it; asking again is cheap."""
    gate, counted = threading.Event(), []

    def run(comm: Communicator) -> list[list[int]]:
        queue = AsyncCallsQueue(communicator=comm)
        queue.schedule_async_request(
            AsyncRequest((lambda: gate.wait(120)) if comm.rank == 2 else None, (), [])
        )
        told = [queue.maybe_finalize_async_calls() for _ in range(3)]
        if comm.rank == 0:
            counted.append(queue.get_num_unfinalized_calls())
            gate.set()
        told.append(queue.maybe_finalize_async_calls(blocking=True))
        return told

    assert ThreadWorld(3).run(run) == [[[], [], [], [0]]] * 3
    assert counted == [1]


def test_one_rank_that_waits_makes_all_wait() -> None:
    """The ranks' exchanges stay in step."""
    started = threading.Event()

    def run(comm: Communicator) -> list[int]:
        queue = AsyncCallsQueue(persistent=True, communicator=comm)

        def work() -> None:
            started.set()
            comm_gate.wait(120)

        for _ in range(2):
            queue.schedule_async_request(AsyncRequest(work if comm.rank == 1 else None, (), []))
        if comm.rank == 1:
            started.wait(120)
            threading.Timer(0.05, comm_gate.set).start()
        done = queue.maybe_finalize_async_calls(blocking=comm.rank == 0)
        queue.close()
        return done

    comm_gate = threading.Event()
    assert ThreadWorld(2).run(run) == [[0, 1], [0, 1]]


def test_a_failure_on_one_rank_is_raised_on_all_with_its_class() -> None:
    """Once; the next call is good on all of them."""

    def run(comm: Communicator) -> tuple[str, list[int], list[str]]:
        queue, done = AsyncCallsQueue(communicator=comm), []

        def work() -> None:
            raise StorageError("disk of rank 1")

        for fn in (work if comm.rank == 1 else None, None):
            queue.schedule_async_request(AsyncRequest(fn, (), [lambda: done.append("end")]))
        with pytest.raises(StorageError) as caught:
            queue.maybe_finalize_async_calls(blocking=True)
        assert done == []
        return str(caught.value), queue.maybe_finalize_async_calls(blocking=True), done

    told = ThreadWorld(3).run(run)
    assert (
        told == [("asynchronous call 0 failed on rank 1. rank 1: disk of rank 1", [1], ["end"])] * 3
    )


def test_a_failing_finalization_stops_all_ranks_at_the_same_step() -> None:
    """The rank that failed gets its own error, the others learn of it."""

    def run(comm: Communicator) -> tuple[str, list[str]]:
        queue, done = AsyncCallsQueue(communicator=comm), []
        fns = [boom if comm.rank == 1 else lambda: done.append("a"), lambda: done.append("b")]
        queue.schedule_async_request(AsyncRequest(None, (), fns))
        with pytest.raises(OSError if comm.rank == 1 else RankFailedError, match="boom") as caught:
            queue.maybe_finalize_async_calls(blocking=True)
        return type(caught.value).__name__, done

    assert ThreadWorld(2).run(run) == [("RankFailedError", ["a"]), ("OSError", [])]


def test_unmatched_calls_name_the_ranks() -> None:
    """The error is one of ours, and the lineage's AssertionError."""

    def run(comm: Communicator) -> str:
        queue = AsyncCallsQueue(communicator=comm)
        for _ in range(2):
            queue.schedule_async_request(AsyncRequest(None, (), []))
        if comm.rank == 1:
            assert queue.maybe_finalize_async_calls(blocking=True, no_dist=True) == [0, 1]
            queue.schedule_async_request(AsyncRequest(None, (), []))
        with pytest.raises(UnmatchedAsyncCallsError) as caught:
            queue.maybe_finalize_async_calls()
        assert isinstance(caught.value, AssertionError | CoordinationError)
        queue.close(abort=True)
        return str(caught.value)

    told = ThreadWorld(2).run(run)
    assert told[0] == told[1]
    assert told[0].startswith(
        "Unmatched async calls: rank 0 finalizes call 0, rank 1 finalizes call 2."
    )


def test_a_rank_that_does_not_come_is_named() -> None:
    """Closing ends too, with the same error."""

    def run(comm: Communicator) -> None:
        queue = AsyncCallsQueue(communicator=comm)
        queue.schedule_async_request(AsyncRequest(None, (), []))
        if comm.rank == 0:
            with pytest.raises(BarrierTimeoutError, match=r"ranks \[1\] of 2 did not arrive"):
                queue.maybe_finalize_async_calls(blocking=True)
            with pytest.raises(BarrierTimeoutError, match=r"ranks \[1\]"):
                queue.close()
            assert queue.get_num_unfinalized_calls() == 0

    ThreadWorld(2, timeout_secs=0.2).run(run)


def test_an_empty_queue_exchanges_nothing() -> None:
    """So that asking in every step of training costs nothing between saves."""

    class Silent:
        rank, size = 0, 2

        def __getattr__(self, name: str) -> Any:
            raise AssertionError(f"an exchange: {name}")

    queue = AsyncCallsQueue(communicator=Silent())
    assert queue.maybe_finalize_async_calls(blocking=True) == []
    queue.close()
