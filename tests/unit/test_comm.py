"""Exchanges between ranks: results, failures, absences, and keys that do not pile up."""

from __future__ import annotations

import contextlib
import pickle
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dist_ckpt import (
    CheckpointingException,
    MismatchError,
    ShardedTensor,
    load_plain_tensors,
    save,
)
from dist_ckpt._comm import SingleCommunicator, default_communicator
from dist_ckpt._comm import store as store_comm
from dist_ckpt._comm.failures import describe_failure, merged_error
from dist_ckpt._comm.store import StoreCommunicator
from dist_ckpt.barriers import group_store
from dist_ckpt.errors import BarrierTimeoutError, CoordinationError, RankFailedError
from dist_ckpt.testing import RankErrors, ThreadWorld
from dist_ckpt.types import Communicator


def fail(error: Exception) -> object:
    raise error


@pytest.mark.parametrize("size", [1, 2, 5])
def test_results(size: int) -> None:
    """All three exchanges, many times over one store."""

    def run(comm: Communicator) -> list[object]:
        results: list[object] = []
        for number in range(5):
            results.append(comm.broadcast("b", lambda n=number: [n, comm.rank]))
            results.append(comm.map_reduce("r", lambda: comm.rank, sum))
            results.append(
                comm.map_scatter("s", lambda: comm.rank, lambda values: [v * 10 for v in values])
            )
        return results

    for rank, results in enumerate(ThreadWorld(size).run(run)):
        expected = [[[n, 0], sum(range(size)), rank * 10] for n in range(5)]
        assert results == [one for group in expected for one in group]


def test_one_process() -> None:
    """Calls go straight through, errors too."""
    comm = SingleCommunicator()

    assert comm.broadcast("x", lambda: 1) == 1
    assert comm.map_reduce("x", lambda: 2, list) == [2]
    assert comm.map_scatter("x", lambda: 3, list) == 3
    with pytest.raises(ZeroDivisionError):
        comm.broadcast("x", lambda: 1 / 0)
    assert not dist.is_initialized()
    assert isinstance(default_communicator(), SingleCommunicator)


@pytest.mark.parametrize("where", ["local", "combine", "result", "value", "count"])
def test_whatever_fails_fails_everywhere_at_once(where: str) -> None:
    """The callbacks, and values that cannot travel; the next exchange works again."""
    lock = threading.Lock()  # cannot be pickled

    def run(comm: Communicator) -> str:
        def local() -> object:
            if where == "local" and comm.rank == 1:
                raise KeyError("boom")
            return lock if where == "value" else comm.rank

        def combine(values: Sequence[object]) -> list[object]:
            if where == "combine":
                raise KeyError("boom")
            if where == "count":
                return [1]
            return [lock if where == "result" else 1] * len(values)

        try:
            comm.map_scatter("step", local, combine)
        except CheckpointingException as error:
            assert comm.map_reduce("next", lambda: 1, sum) == 2
            return f"{type(error).__name__}: {error}"
        return "nothing was raised"

    first, second = ThreadWorld(2, timeout_secs=60).run(run)

    assert first == second
    assert "step failed on rank" in first
    assert ("boom" in first) == (where in ("local", "combine"))


def test_errors_of_the_tree_keep_their_class() -> None:
    """A handler for one process works for many; mixed failures become one of ranks."""
    errors = ThreadWorld(2).errors(
        lambda comm: comm.broadcast("open", lambda: fail(MismatchError("no", hint="do")))
    )

    for error in errors.values():
        assert type(error) is MismatchError
        assert str(error) == "open failed on rank 0. rank 0: no hint: do"
        assert error.failures[0].kind == "mismatch"
        assert "MismatchError" in error.failures[0].traceback


def test_failures_of_many_ranks_are_told_shortly() -> None:
    """Equal messages are told once, with the ranks."""
    failures = {rank: describe_failure(OSError(5, "io")) for rank in range(40)}

    error = merged_error("write", failures, None)

    assert isinstance(error, RankFailedError)
    assert "and 24 more" in str(error)
    assert str(error).count("OSError") == 1
    copy = pickle.loads(pickle.dumps(error))
    assert copy.failures.keys() == failures.keys()


def test_absence_and_disagreement(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who does not come is named by those who did; who is elsewhere too."""
    monkeypatch.setattr("dist_ckpt._comm.store._GRACE_SECS", 0.3)
    absent = ThreadWorld(3, timeout_secs=0.2).errors(
        lambda comm: comm.broadcast("open", lambda: 1) if comm.rank != 1 else None
    )
    elsewhere = ThreadWorld(3).errors(
        lambda comm: comm.broadcast(f"step {comm.rank // 2}", lambda: 1)
    )

    assert sorted(absent) == [0, 2]
    for error in absent.values():
        assert isinstance(error, BarrierTimeoutError)
        assert isinstance(error, TimeoutError)
        assert "open: ranks [1] of 3 did not arrive within 0.2 s (told by rank" in str(error)
    assert sorted(elsewhere) == [0, 1, 2]
    for error in elsewhere.values():
        assert type(error) is CoordinationError
        assert "rank 0 is in 'step 0', rank 2 is in 'step 1'" in str(error)


def test_a_late_rank_hears_that_it_was_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not wait once more, and all are in step again."""
    given_up = threading.Event()

    def run(comm: StoreCommunicator) -> list[str]:
        told = []
        if comm.rank == 1:
            assert given_up.wait(60)
        try:
            comm.broadcast("first", lambda: 1)
        except BarrierTimeoutError as error:
            told.append(str(error))
        given_up.set()
        told.append(comm.broadcast("second", lambda: "fine"))
        return told

    first, second = ThreadWorld(2, timeout_secs=0.5).run(run)  # type: ignore[arg-type]

    assert first == second
    assert first[-1] == "fine"


def test_old_keys_are_removed() -> None:
    """The store does not grow with the number of saves, however they end."""
    stores: list[dist.Store] = []

    def run(comm: StoreCommunicator) -> None:
        stores.append(comm._store)
        for number in range(50):
            local = (lambda: comm.rank) if number % 2 else (lambda: fail(OSError("no")))
            with contextlib.suppress(CheckpointingException):
                comm.map_reduce("x", local, sum)  # type: ignore[arg-type]

    ThreadWorld(3).run(run)  # type: ignore[arg-type]

    # Counters of the ranks, and what the last to leave has still to delete.
    assert stores[0].num_keys() <= 3 + 2 * 2


class _Reads:
    """A store that notes when rank 1 has read a verdict."""

    def __init__(self, store: Any, events: list[str]) -> None:
        self._store, self._events = store, events

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def get(self, key: str) -> bytes:
        data: bytes = self._store.get(key)
        if "/out/1" in key:
            self._events.append("read")
        return data


@pytest.mark.parametrize("fails", [False, True])
def test_rank_0_returns_when_its_verdict_is_read(fails: bool) -> None:
    """It may host the store: whoever has not read the verdict by then never will."""
    store, events = dist.HashStore(), list[str]()

    def run(comm: Communicator) -> None:
        mine = StoreCommunicator(
            _Reads(store, events),  # type: ignore[arg-type]
            rank=comm.rank, size=2, timeout_secs=60,
        )  # fmt: skip
        for _ in range(20):
            with contextlib.suppress(RankFailedError):
                mine.broadcast("x", lambda: fail(OSError("no")) if fails else 1)
            if comm.rank == 0:
                events.append("returned")

    ThreadWorld(2).run(run)

    assert events == ["read", "returned"] * 20


def test_who_does_not_read_the_verdict_is_named_and_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A rank that died after its part was done: the exchange has succeeded, the log names it."""
    monkeypatch.setattr("dist_ckpt._comm.store._LEAVE_SECS", 0.05)

    def run(comm: StoreCommunicator) -> int:
        if comm.rank == 2:
            comm._set(f"{comm._next_exchange()}/in/2", ("x", 2, None))
            return 3
        return comm.map_reduce("x", lambda: comm.rank, sum)

    assert ThreadWorld(3).run(run) == [3, 3, 3]  # type: ignore[arg-type]
    assert "ranks [2] of 3 have not read the verdict within 0.05 s" in caplog.text


def test_who_never_came_is_not_waited_for_as_a_reader(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of three ranks one is missing; the other has read that."""
    monkeypatch.setattr(store_comm, "_LEAVE_SECS", 5.0)
    comm = StoreCommunicator(dist.HashStore(), rank=0, size=3, timeout_secs=60)
    comm._store.add(f"{comm._name}/1/left", 1)
    comm._stay_for_readers("x", 1, store_comm._Missing("rank 1", num_missing=1))
    assert comm._store.num_keys() == 0
    assert "have not read" not in caplog.text


def test_who_is_interrupted_keeps_rank_0_from_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """A rank that leaves by Ctrl-C reads no verdict, and is not waited for."""

    def interrupted() -> int:
        raise KeyboardInterrupt

    def run(comm: Communicator) -> str:
        try:
            comm.map_reduce("x", interrupted if comm.rank else int, sum)
        except BaseException as error:
            return type(error).__name__
        return "nothing was raised"

    assert ThreadWorld(3).run(run) == ["RankFailedError", "KeyboardInterrupt", "KeyboardInterrupt"]
    assert "have not read" not in caplog.text


def test_the_thread_world_itself() -> None:
    """It reports errors by rank, and names ranks that hang."""
    with pytest.raises(
        RankErrors, match=r"(?s)1 of 2 ranks raised.*rank 1.*ValueError: x"
    ) as caught:
        ThreadWorld(2).run(lambda comm: fail(ValueError("x")) if comm.rank else None)
    assert set(caught.value.errors) == {1}

    release = threading.Event()
    with pytest.raises(TimeoutError, match=r"ranks \[1\] of 2 did not end"):
        ThreadWorld(2, deadline_secs=0.2).run(lambda comm: comm.rank and release.wait(120))
    release.set()


def test_an_interrupt_of_rank_0_is_told_at_once() -> None:
    """Ctrl-C while rank 0 waits: it raises without waiting on, and the others hear why."""
    store = dist.HashStore()
    zero, one = (
        StoreCommunicator(store, rank=rank, size=2, timeout_secs=60.0) for rank in range(2)
    )

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(KeyboardInterrupt):
            zero.map_reduce("step", lambda: 0, sum)
    finally:
        signal.signal(signal.SIGALRM, before)

    with pytest.raises(RankFailedError, match="rank 0: KeyboardInterrupt"):
        one.map_reduce("step", lambda: 1, sum)


def test_a_wrong_path_on_one_rank_is_told_to_all(tmp_path: Path) -> None:
    """And the ranks are in step afterwards: the next save works."""
    state = {"x": ShardedTensor.from_rank_offsets("x", torch.ones(2))}

    def run(comm: Communicator) -> list[str]:
        told = []
        shards = state if comm.rank == 0 else {}
        for path in (tmp_path / "a", None):
            mine: Any = path if comm.rank else tmp_path / "a"
            try:
                save(shards, mine, communicator=comm)
            except CheckpointingException as error:
                told.append(str(error))
        save(shards, tmp_path / "b", communicator=comm)
        return told

    for told in ThreadWorld(2, timeout_secs=60).run(run):
        assert len(told) == 1
        assert "None" in told[0]
    assert load_plain_tensors(tmp_path / "b")["x"].tolist() == [1, 1]


def test_store_of_a_group_that_cannot_be_asked() -> None:
    """Without ``ProcessGroup.get_group_store``, as in torch 2.8, it is the same keys and values."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        world: Any = dist.group.WORLD
        group_store(world).set("key", "value")
        with pytest.MonkeyPatch.context() as patch:
            patch.delattr(dist.ProcessGroup, "get_group_store", raising=False)
            found = group_store(world).get("key")
    finally:
        dist.destroy_process_group()

    assert found == b"value"
