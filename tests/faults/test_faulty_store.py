"""A store that fails, tears, lies or hangs at any of its operations: old or new, never a mixture."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from dist_ckpt import LoadOptions, SaveOptions, ShardedTensor, load, save
from dist_ckpt.background import BackgroundOptions, BackgroundSaver
from dist_ckpt.errors import (
    BarrierTimeoutError,
    CheckpointingException,
    CorruptedCheckpointError,
    IncompleteCheckpointError,
    StorageError,
)
from dist_ckpt.events import Committed, Event
from dist_ckpt.recovery import verify_checkpoint
from dist_ckpt.serialization import load_plain_tensors
from dist_ckpt.storage import Extent, LocalStore
from dist_ckpt.storage.checksums import sum_of
from dist_ckpt.testing import ThreadWorld
from dist_ckpt.testing.faults import (
    WRITES,
    FaultPlan,
    FaultyStore,
    KillSwitch,
    Mode,
    faulty_stores,
    kill_after,
)
from dist_ckpt.training_state import TrainingState, save_training_state
from tests.multiprocess._world import run_ranks

BACKENDS = ("torch_dist", "zarr")
MODES: tuple[Mode, ...] = ("fail", "tear", "cut", "lie")
RANKS = 2
T = TypeVar("T")


def swept(act: Callable[[int], T], mode: Mode, **more: Any) -> Iterator[tuple[FaultPlan, T]]:
    """Act with a fault at the first operation, at the second, ..., until none is left to fail."""
    for number in itertools.count(1):
        with faulty_stores(number, mode, **more) as plan:
            result = act(number)
        yield plan, result
        if not plan.fired:
            return


def state(rank: int, value: float) -> dict[str, Any]:
    make = ShardedTensor.from_rank_offsets
    return {
        "cut": make("cut", torch.full((8,), value), (0, rank, RANKS)),
        "all": make("all", torch.full((5,), value), replica_id=rank),
        "value": value,
    }


def save_together(path: Path, value: float, backend: Any) -> dict[int, BaseException]:
    options = SaveOptions(thread_count=1, backend=backend)
    return ThreadWorld(RANKS).errors(
        lambda comm: save(state(comm.rank, value), path, communicator=comm, options=options)
    )


def load_together(path: Path) -> tuple[set[float], dict[int, BaseException]]:
    """Return the values that any rank got, and what ranks raised."""

    def load_one(comm: Any) -> set[float]:
        options = LoadOptions(thread_count=1)
        found = load(state(comm.rank, -1.0), path, communicator=comm, options=options)
        return {*found["cut"].tolist(), *found["all"].tolist(), found["value"]}

    results, errors = ThreadWorld(RANKS).outcomes(load_one)
    return {value for values in results.values() for value in values}, errors


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.startswith(".dist-ckpt"))


def of_our_tree(errors: dict[int, BaseException]) -> bool:
    return all(isinstance(error, CheckpointingException) for error in errors.values())


# -- saves -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["fail", "tear"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("is_again", [False, True], ids=["first", "again"])
def test_a_write_that_fails_fails_the_save(
    backend: str, mode: Mode, is_again: bool, tmp_path: Path
) -> None:
    """Told on all ranks with the file; the old checkpoint is untouched, no attempt is left."""
    target, done = tmp_path / "c", Counter[str]()
    if is_again:
        save_together(target, 1.0, backend)

    for plan, errors in swept(lambda _: save_together(target, 2.0, backend), mode, only=WRITES):
        assert leftovers(tmp_path) == []
        if not plan.fired:
            assert errors == {}
            continue
        (call,) = plan.fired
        done[call.operation] += 1
        assert sorted(errors) == list(range(RANKS))
        assert of_our_tree(errors)
        assert all(call.name in str(one) and "EIO" in str(one) for one in errors.values()), errors
        assert target.exists() == is_again
        if is_again:
            assert load_together(target) == ({1.0}, {})

    assert load_together(target) == ({2.0}, {})
    # What is swept is all that a save does: documents at once, data by one call, or chunk by chunk.
    files = sum(one.is_file() for one in target.rglob("*"))
    calls = ("write",) if backend == "torch_dist" else ("writer", "write_at", "finish")
    assert set(done) == {"create", *calls}, done
    assert done["create"] >= 4, done
    assert done.total() == done["create"] + len(calls) * (files - done["create"]), done


def standing(target: Path, contents: Callable[[Path], set[float]]) -> float | None:
    """Return the one value of a checkpoint that verifies; None if it is found to be damaged.

    A damaged one is not loaded as anything else than what was saved, either.
    """
    try:
        verify_checkpoint(target)
    except (CorruptedCheckpointError, IncompleteCheckpointError):
        return None  # the marker itself may be what was never written
    (value,) = contents(target)
    return value


def of_all_ranks(target: Path) -> set[float]:
    values, errors = load_together(target)
    assert errors == {}
    return values


def of_tensors(target: Path) -> set[float]:
    return {v for one in load_plain_tensors(target).values() for v in one.flatten().tolist()}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_any_operation_of_a_save(backend: str, mode: Mode, tmp_path: Path) -> None:
    """All are told and the old one stands; or the new one is true; or its damage is found."""
    target, ends, before = tmp_path / "c", Counter[str](), 0.0
    save_together(target, before, backend)

    for plan, errors in swept(lambda n: save_together(target, float(n), backend), mode):
        told, value = repr((plan.fired, errors)), float(sum(ends.values()) + 1)
        assert of_our_tree(errors), told
        assert len(errors) in (0, RANKS), told
        assert leftovers(tmp_path) == [], told
        found = standing(target, of_all_ranks)
        if errors:
            assert found == before, told
            ends["old"] += 1
        elif found is None:
            values, raised = load_together(target)
            assert values <= {value}, told
            assert sorted(raised) in ([], list(range(RANKS))), told
            assert of_our_tree(raised), told
            ends["damage"] += 1
            shutil.rmtree(target)
            assert save_together(target, value, backend) == {}
            before = value
        else:
            assert found == value, told
            ends["new"] += 1
            before = value

    assert ends["damage" if mode in ("cut", "lie") else "old"] >= 3, ends
    assert (ends["damage"] == 0) == (mode in ("fail", "tear")), ends


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_any_operation_of_a_background_save(backend: Any, mode: Mode, tmp_path: Path) -> None:
    """The same, by the thread that writes while training goes on; a failure is raised once."""
    target, ends, before = tmp_path / "c", Counter[str](), 0.0
    model, told = torch.nn.Linear(3, 2), list[Event]()

    class Sink:
        def emit(self, event: Event) -> None:
            told.append(event)

    with BackgroundSaver(BackgroundOptions(worker="thread"), sinks=[Sink()]) as saver:

        def save_one(value: float) -> BaseException | None:
            told.clear()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(value)
            try:
                options = SaveOptions(backend=backend)
                save_training_state(
                    target, TrainingState(models=[model]), options=options, saver=saver
                )
                saver.drain(timeout_secs=60)
            except CheckpointingException as error:
                return error
            return None

        assert save_one(before) is None
        for plan, error in swept(save_one, mode):
            value = float(sum(ends.values()) + 1)
            assert any(isinstance(one, Committed) for one in told) == (error is None)
            assert leftovers(tmp_path) == [], plan.fired
            found = standing(target, of_tensors)
            if error is not None:
                if mode in ("fail", "tear"):
                    assert plan.fired[0].name in str(error)
                assert found == before, (plan.fired, error)
                ends["old"] += 1
                continue
            if found is None:
                ends["damage"] += 1
                shutil.rmtree(target)
                assert save_one(value) is None
            else:
                assert found == value, plan.fired
                ends["new"] += 1
            before = value

    assert ends["damage" if mode in ("cut", "lie") else "old"] >= 3, ends
    assert (ends["damage"] == 0) == (mode in ("fail", "tear")), ends


def test_a_write_that_hangs_is_told_by_name_and_in_time(tmp_path: Path) -> None:
    """The other rank raises when its patience ends; nothing is committed, nothing stays."""
    target = tmp_path / "c"
    save_together(target, 1.0, "torch_dist")

    with faulty_stores(1, "hang", only=WRITES, files="__1_*") as plan:

        def save_one(comm: Any) -> None:
            try:
                save(state(comm.rank, 2.0), target, communicator=comm)
            finally:
                if comm.rank == 0:
                    assert plan.wait_until_hanging(0)
                    plan.release()

        errors = ThreadWorld(RANKS, timeout_secs=1).errors(save_one)

    assert isinstance(errors[0], BarrierTimeoutError)
    assert "ranks [1] of 2 did not arrive" in str(errors[0])
    assert isinstance(errors[1], CheckpointingException)
    assert leftovers(tmp_path) == []
    assert load_together(target) == ({1.0}, {})


# -- loads -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_any_operation_of_a_load(backend: str, mode: Mode, tmp_path: Path) -> None:
    """Every rank raises, or every rank has what was saved: no other value ever."""
    target, ends = tmp_path / "c", Counter[str]()
    save_together(target, 1.0, backend)

    for plan, (values, errors) in swept(lambda _: load_together(target), mode):
        told = repr((plan.fired, values, errors))
        assert len(errors) in (0, RANKS), told
        assert of_our_tree(errors), told
        assert values == (set() if errors else {1.0}), told
        if plan.fired and mode in ("fail", "tear"):
            assert errors, told
            assert all(plan.fired[0].name in str(error) for error in errors.values()), told
        ends["raised" if errors else "true"] += 1

    assert ends["raised"] >= 4, ends


def test_a_disk_that_is_gone_fails_every_load(tmp_path: Path) -> None:
    """All operations fail from the first one on; when they work again, so does the load."""
    target = tmp_path / "c"
    save_together(target, 1.0, "torch_dist")

    with faulty_stores(1, times=None):
        values, errors = load_together(target)

    assert (values, sorted(errors)) == (set(), [0, 1])
    assert load_together(target) == ({1.0}, {})


# -- the kit itself --------------------------------------------------------------------------------


def whole(name: str, data: bytes, store: FaultyStore) -> Any:
    return {
        "write": lambda: store.write(name, [Extent(0, data)], nbytes=len(data)),
        "create": lambda: store.create(name, data),
    }


@pytest.mark.parametrize("operation", ["write", "create"])
@pytest.mark.parametrize(
    ("mode", "left"), [("fail", None), ("tear", b"ab"), ("cut", b"ab"), ("lie", None)]
)
def test_what_a_bad_write_leaves(
    operation: str, mode: Mode, left: bytes | None, tmp_path: Path
) -> None:
    """Nothing or half; with an error that has the errno, or with the checksum of all of it."""
    store = FaultyStore(LocalStore(tmp_path), 1, mode, code=errno.ENOSPC)
    act = whole("x", b"abcd", store)[operation]

    if mode in ("fail", "tear"):
        with pytest.raises(StorageError, match="ENOSPC") as caught:
            act()
        assert isinstance(caught.value.__cause__, OSError)
        assert caught.value.__cause__.errno == errno.ENOSPC
    else:
        assert act() == sum_of(b"abcd")
    assert ((tmp_path / "x").read_bytes() if left is not None else None) == left
    assert (tmp_path / "x").exists() == (left is not None)
    assert [call.operation for call in store.plan.fired] == [operation]
    assert whole("y", b"efgh", store)[operation]() == sum_of(b"efgh")
    assert (tmp_path / "y").read_bytes() == b"efgh"


@pytest.mark.parametrize(
    ("number", "mode", "left"),
    [(1, "lie", None), (2, "tear", b"a"), (2, "cut", b"a\0cd"), (2, "lie", b"\0\0cd"),
     (3, "cut", b"abc\0"), (4, "tear", b"abcd")],
)  # fmt: skip
def test_what_a_bad_writer_leaves(
    number: int, mode: Mode, left: bytes | None, tmp_path: Path
) -> None:
    """Each of its operations goes wrong by itself; a liar claims the checksum of what it got."""
    store = FaultyStore(LocalStore(tmp_path), number, mode)

    def act() -> Any:
        writer = store.writer("x", nbytes=4)
        try:
            writer.write_at(0, memoryview(b"ab"))
            writer.write_at(2, memoryview(b"cd"))
            return writer.finish()
        finally:
            writer.abandon()

    if mode == "tear" or number == 1:
        with pytest.raises(StorageError, match="x"):
            act()
    else:
        assert act() == sum_of(b"abcd")
    assert ((tmp_path / "x").read_bytes() if left is not None else None) == left


def test_what_a_bad_read_returns(tmp_path: Path) -> None:
    """Half, other bytes, another size, no names: each one differs from the truth."""
    (tmp_path / "x").write_bytes(b"abcd")
    found: dict[str, list[Any]] = {}
    for mode in ("cut", "lie"):
        store = FaultyStore(LocalStore(tmp_path), 1, mode, times=None)
        buffer = bytearray(4)
        store.read_ranges("x", [Extent(0, memoryview(buffer))])
        read = store.read("x", max_nbytes=9)
        found[mode] = [bytes(buffer), read, store.list(), store.nbytes("x")]

    assert found == {
        "cut": [b"ab\0\0", b"ab", [], 2],
        "lie": [b"absd", b"absd", [], None],
    }


def test_a_hang_ends_by_itself_with_an_error(tmp_path: Path) -> None:
    """Nobody waits for ever, even if nobody releases it."""
    store = FaultyStore(LocalStore(tmp_path), 1, "hang", timeout_secs=0.01)

    with pytest.raises(StorageError, match="ETIMEDOUT"):
        store.create("x", b"abcd")
    assert list(tmp_path.iterdir()) == []


def test_stores_of_several_threads_share_one_count(tmp_path: Path) -> None:
    """One operation in all goes wrong, whoever comes to it."""
    plan, raised = FaultPlan(50), list[BaseException]()

    def work(number: int) -> None:
        store = FaultyStore(LocalStore(tmp_path), plan=plan)
        for n in range(20):
            try:
                store.create(f"{number}-{n}", b"")
            except StorageError as error:
                raised.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert (len(plan.calls), len(plan.fired), len(raised)) == (100, 1, 1)
    assert len(list(tmp_path.iterdir())) == 99


def killed_while_saving(rank: int, size: int, target: str, number: int, event: str) -> None:
    switch = KillSwitch(number or None, event=event or None)
    with switch.armed(), BackgroundSaver(BackgroundOptions(worker="thread"), sinks=[switch]) as s:
        save_training_state(target, TrainingState(models=[torch.nn.Linear(2, 2)]), saver=s)
        s.drain(timeout_secs=60)


@pytest.mark.multiprocess
@pytest.mark.parametrize(("number", "event"), [(3, ""), (0, "Written"), (0, "")])
def test_a_process_kills_itself(number: int, event: str, tmp_path: Path) -> None:
    """By SIGKILL, at the operation or at the event; else not at all."""
    (outcome,) = run_ranks(
        killed_while_saving, 1, str(tmp_path / "c"), number, event, expect_errors=True
    )

    is_killed = bool(number or event)
    assert outcome.ok == (not is_killed), outcome.describe()
    assert outcome.exit_code == (-signal.SIGKILL if is_killed else 0)
    assert (tmp_path / "c").exists() == (not is_killed)


def waits(rank: int, size: int) -> str:
    ready, theirs = os.pipe()
    if (pid := os.fork()) == 0:
        os.close(theirs)
        os.read(ready, 1)
        os._exit(7)
    with kill_after(pid, 0.01) as done:
        assert done.wait(120)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with kill_after(pid, 0) as done:
        assert not done.wait(0.05)
    os.close(theirs)
    return f"{code}"


@pytest.mark.multiprocess
def test_a_process_kills_another_one() -> None:
    """Once, and nobody when it has ended before."""
    assert run_ranks(waits, 1, init_process_group=False) == ["-9"]
