"""A worker and its training process: saves, failures, deaths, and what is left of them."""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest

from dist_ckpt._formats.manifest import read_manifest
from dist_ckpt._saving.publish import CommitPoint
from dist_ckpt._staging_pool.runs import Run
from dist_ckpt._worker import link
from dist_ckpt._worker.hub_client import HubLostError
from dist_ckpt._worker.orders import FileOrder, Order
from dist_ckpt._worker.worker import Worker, WorkerSave
from dist_ckpt.errors import (
    AsyncSaveError,
    BarrierTimeoutError,
    ConfigError,
    RankFailedError,
    StorageError,
    WorkerDiedError,
)
from tests.unit._orders import (
    FailingOrder,
    GatedOrder,
    LimitedOrder,
    Memory,
    ReportOrder,
    UnreadableOrder,
    bytes_of,
    file_orders,
    make_gate,
    open_gate,
    runs_of,
    wait_at_gate,
)

KINDS: list[Literal["process", "thread"]] = ["process", "thread"]
ROOT = str(Path(__file__).parents[2])


@pytest.fixture(autouse=True)
def path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers import the orders of this folder."""
    monkeypatch.syspath_prepend(ROOT)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Literal["process", "thread"]:
    found: Literal["process", "thread"] = request.param
    return found


@pytest.fixture
def worker(kind: Literal["process", "thread"]) -> Iterator[Worker]:
    worker = Worker(kind=kind, rank=0)
    yield worker
    worker.close(30)


def begin(
    worker: Worker,
    order: Order,
    memory: Memory | None = None,
    *,
    number: int = 1,
    key: int = 1,
    point: CommitPoint | None = None,
) -> WorkerSave:
    return worker.begin(
        number,
        order,
        descriptor=-1 if memory is None else memory.descriptor,
        arena_key=key,
        nbytes=0 if memory is None else memory.nbytes,
        point=point,
    )


def save(
    worker: Worker, order: FileOrder, wrapped: Order | None = None, **options: Any
) -> WorkerSave:
    with Memory(bytes_of(order)) as memory:
        one = begin(worker, wrapped or order, memory, **options)
        for run in runs_of(order):
            one.staged(run)
        one.all_staged()
    return one


def is_committed(target: Path) -> bool:
    return (target / "metadata.json").exists()


def test_a_save_is_committed(worker: Worker, tmp_path: Path) -> None:
    """The files have the staged bytes, and the marker is there."""
    (order,) = file_orders(tmp_path / "c", 1)

    one = save(worker, order)

    assert one.outcome.result(120) is None
    assert one.written.result(0) >= 0
    assert is_committed(tmp_path / "c")
    found = b"".join((tmp_path / "c" / name).read_bytes() for name, _ in order.files)
    assert found == bytes_of(order)
    assert [p.name for p in tmp_path.iterdir()] == ["c"]
    assert list(one.timings) == ["begun", "first_write", "written", "committed"]
    assert sorted(one.timings.values()) == list(one.timings.values())


def test_a_worker_process_has_no_framework() -> None:
    """Neither torch nor numpy is loaded in it, after it has done something."""
    worker = Worker(kind="process", rank=0)
    try:
        one = begin(worker, ReportOrder())
        one.all_staged()
        modules = one.outcome.result(120)
    finally:
        worker.close(30)

    assert "dist_ckpt._saving.publish" in modules
    assert {"torch", "numpy", "tensorstore", "multiprocessing", "pytest"} & set(modules) == set()


def point_of(
    workers: list[Worker], *, name: str = "save-1", timeout_secs: float = 30.0
) -> list[CommitPoint]:
    address = workers[0].serve_hub(["127.0.0.1"], 30)
    size = len(workers)
    return [CommitPoint(address, name, rank, size, timeout_secs) for rank in range(size)]


@pytest.fixture
def team(kind: Literal["process", "thread"]) -> Iterator[list[Worker]]:
    """Three ranks' workers."""
    workers = [Worker(kind=kind, rank=rank) for rank in range(3)]
    yield workers
    for worker in workers:
        worker.start()  # ends what a test has killed, and the others, in any order
    threads = [threading.Thread(target=worker.close, args=(30,)) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def all_saves(
    team: list[Worker],
    orders: list[Any],
    inner: list[FileOrder],
    *,
    number: int = 1,
    **options: Any,
) -> list[WorkerSave]:
    points = point_of(team, **options)
    return [
        save(worker, own, order, point=point, number=number, key=number)
        for worker, own, order, point in zip(team, inner, orders, points, strict=True)
    ]


def failures(saves: list[WorkerSave]) -> list[BaseException]:
    found = [one.outcome.exception(30) for one in saves]
    assert None not in found
    return [error for error in found if error is not None]


def test_three_ranks_commit(team: list[Worker], tmp_path: Path) -> None:
    """All workers hear that it is committed; all files are in the manifest."""
    orders = list(file_orders(tmp_path / "c", 3))

    saves = all_saves(team, orders, orders)

    assert [one.outcome.result(120) for one in saves] == [None] * 3
    assert is_committed(tmp_path / "c")
    assert set(read_manifest(tmp_path / "c").files) == {
        "index.json",
        "metadata.json",
        *(name for order in orders for name, _ in order.files),
    }
    for order in orders:
        found = b"".join((tmp_path / "c" / name).read_bytes() for name, _ in order.files)
        assert found == bytes_of(order)


@pytest.mark.parametrize("rank", [0, 2])
def test_one_rank_fails_all(team: list[Worker], tmp_path: Path, rank: int) -> None:
    """Every rank gets the same error; attempt and marker are absent; the next save is good."""
    inner = list(file_orders(tmp_path / "c", 3))
    orders: list[Any] = list(inner)
    orders[rank] = FailingOrder(inner[rank])

    saves = all_saves(team, orders, inner)
    errors = failures(saves)

    assert [r for r, one in enumerate(saves) if "written" not in one.timings] == [rank]
    assert not any("committed" in one.timings for one in saves)
    assert {type(error) for error in errors} == {RankFailedError}
    assert len({str(error) for error in errors}) == 1
    assert f"writing {tmp_path / 'c'} failed on rank {rank}" in str(errors[0])
    assert "ValueError: no such luck" in str(errors[0])
    assert all(list(error.failures) == [rank] for error in errors)  # type: ignore[attr-defined]
    assert list(tmp_path.iterdir()) == []

    again = list(file_orders(tmp_path / "c", 3))
    good = all_saves(team, again, again, name="save-2", number=2)
    assert [one.outcome.result(120) for one in good] == [None] * 3
    assert is_committed(tmp_path / "c")


def test_a_failed_publication_fails_all(team: list[Worker], tmp_path: Path) -> None:
    """What rank 0 meets while it commits, all ranks raise; nothing is left."""
    inner = list(file_orders(tmp_path / "c", 3))

    errors = failures(all_saves(team, [FailingOrder(inner[0], "publish"), *inner[1:]], inner))

    assert {str(error) for error in errors} == {str(errors[0])}
    assert f"committing {tmp_path / 'c'} failed on rank 0" in str(errors[0])
    assert "the network is down" in str(errors[0])
    assert list(tmp_path.iterdir()) == []


def test_an_order_that_cannot_be_read(team: list[Worker], tmp_path: Path) -> None:
    """It fails this save only; the attempt, which the worker cannot remove, is removed here."""
    inner = list(file_orders(tmp_path / "c", 3))
    unreadable = UnreadableOrder(inner[0].directory, inner[0].files, 0, inner[0].publication)

    errors = failures(all_saves(team, [unreadable, *inner[1:]], inner))

    assert all("no module of that name here" in str(error) for error in errors)
    assert list(tmp_path.iterdir()) == []
    assert all(worker.is_alive() for worker in team)


def test_staging_that_fails(team: list[Worker], tmp_path: Path) -> None:
    """``abandon`` tells all ranks why; there it has its cause."""
    orders = list(file_orders(tmp_path / "c", 3))
    points = point_of(team)
    saves = [save(team[rank], orders[rank], point=points[rank]) for rank in (0, 1)]
    torn = begin(team[2], orders[2], point=points[2])
    error = AsyncSaveError("'w' changed while it was copied")

    torn.abandon(error)
    errors = failures([*saves, torn])

    assert {str(one) for one in errors} == {str(errors[0])}
    assert "failed on rank 2. rank 2: 'w' changed while it was copied" in str(errors[0])
    assert isinstance(errors[0], AsyncSaveError)
    assert errors[2].__cause__ is error
    assert list(tmp_path.iterdir()) == []


def test_a_rank_that_does_not_come(team: list[Worker], tmp_path: Path) -> None:
    """The others are told its number."""
    orders = list(file_orders(tmp_path / "c", 3))
    points = point_of(team, timeout_secs=0.2)

    ready = save(team[2], orders[2], point=points[2])
    ready.written.result(120)
    errors = failures([save(team[0], orders[0], point=points[0]), ready])

    assert all(isinstance(error, BarrierTimeoutError) for error in errors)
    assert all("rank 1: it did not report within 0.2 s" in str(e) for e in errors)
    assert list(tmp_path.iterdir()) == []


def test_killed_while_it_writes(tmp_path: Path) -> None:
    """It is noticed at once; the other ranks are told; the next save has another worker."""
    team = [Worker(kind="process", rank=rank) for rank in range(2)]
    inner = list(file_orders(tmp_path / "c", 2))
    gate = make_gate(tmp_path)
    try:
        points = point_of(team, timeout_secs=300)
        good = save(team[0], inner[0], point=points[0])
        bad = save(team[1], inner[1], GatedOrder(inner[1], gate), point=points[1])
        wait_at_gate(gate)
        pid = team[1].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)

        errors = failures([good, bad])

        assert all(isinstance(error, WorkerDiedError) for error in errors)
        assert f"the worker of rank 1 (process {pid}) was killed by SIGKILL" in str(errors[0])
        assert f"while it was writing {inner[1].target}" in str(errors[0])
        assert "memory runs out" in str(errors[0])
        assert bad.written.done()
        assert not team[1].is_alive()
        assert sorted(p.suffix for p in tmp_path.iterdir()) == [".open", ".reached"]

        again = list(file_orders(tmp_path / "c", 2))
        saves = all_saves(team, again, again, name="save-2", number=2)
        assert [one.outcome.result(120) for one in saves] == [None, None]
        assert team[1].pid != pid
    finally:
        for worker in reversed(team):
            worker.close(30)


def test_rank_0_is_killed(tmp_path: Path) -> None:
    """The others lose the hub; nothing is committed; the next hub is another one."""
    team = [Worker(kind="process", rank=rank) for rank in range(2)]
    inner = list(file_orders(tmp_path / "c", 2))
    gate = make_gate(tmp_path)
    try:
        points = point_of(team, timeout_secs=300)
        other = save(team[1], inner[1], point=points[1])
        bad = save(team[0], inner[0], GatedOrder(inner[0], gate, "publish"), point=points[0])
        wait_at_gate(gate)
        os.kill(team[0].pid or 0, signal.SIGKILL)

        errors = failures([bad, other])

        assert isinstance(errors[0], WorkerDiedError)
        assert f"while it was committing {tmp_path / 'c'}" in str(errors[0])
        assert isinstance(errors[1], HubLostError)
        assert "rank 1 cannot reach the hub" in str(errors[1])
        assert not is_committed(tmp_path / "c")
        assert inner[0].publication is not None
        assert not inner[0].publication.is_published()
        inner[0].abort()
        assert point_of(team)[0].address != points[0].address
    finally:
        for worker in reversed(team):
            worker.close(30)


def test_killed_after_its_part(tmp_path: Path) -> None:
    """A save that all ranks have written is committed, though a worker does not live to see it."""
    team = [Worker(kind="process", rank=rank) for rank in range(2)]
    inner = list(file_orders(tmp_path / "c", 2))
    gate = make_gate(tmp_path)
    try:
        points = point_of(team, timeout_secs=300)
        bad = save(team[1], inner[1], point=points[1])
        good = save(team[0], inner[0], GatedOrder(inner[0], gate, "publish"), point=points[0])
        wait_at_gate(gate)
        os.kill(team[1].pid or 0, signal.SIGKILL)
        open_gate(gate)

        assert [one.outcome.result(120) for one in (good, bad)] == [None, None]
        assert inner[0].publication is not None
        assert inner[0].publication.is_published()
    finally:
        for worker in reversed(team):
            worker.close(30)


def test_killed_while_idle() -> None:
    """The next save has another worker, and nobody is told of an error."""
    worker = Worker(kind="process", rank=0)
    try:
        first = begin(worker, ReportOrder("pid"))
        first.all_staged()
        pid = first.outcome.result(120)[0]
        ended = os.pidfd_open(pid)
        os.kill(pid, signal.SIGKILL)
        select.select([ended], [], [], 30)
        os.close(ended)

        second = begin(worker, ReportOrder("pid"), number=2)
        second.all_staged()
        outcome = second.outcome.exception(30)
        if outcome is not None:  # it was given the save before its death was seen
            assert isinstance(outcome, WorkerDiedError)
            second = begin(worker, ReportOrder("pid"), number=3)
            second.all_staged()
        assert second.outcome.result(120)[0] not in (pid, os.getpid())
    finally:
        worker.close(30)


def test_a_worker_process_stands_apart() -> None:
    """It is our child, has a session of its own, and is nicer."""
    worker = Worker(kind="process", rank=0, niceness=3)
    try:
        one = begin(worker, ReportOrder("pid"))
        one.all_staged()
        pid, parent, session, niceness = one.outcome.result(120)
    finally:
        worker.close(30)

    assert (pid, parent, session) == (worker_pid := pid, os.getpid(), worker_pid)
    assert niceness == min(os.nice(0) + 3, 19)


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_signals_are_the_parents_business(name: str) -> None:
    """A worker that is sent them goes on."""
    worker = Worker(kind="process", rank=0)
    try:
        first = begin(worker, ReportOrder("pid"))
        first.all_staged()
        pid = first.outcome.result(120)[0]
        os.kill(pid, getattr(signal, name))
        second = begin(worker, ReportOrder("pid"), number=2)
        second.all_staged()
        assert second.outcome.result(120)[0] == pid
    finally:
        worker.close(30)


def test_a_report_is_the_outcome(worker: Worker) -> None:
    """An order that does not commit returns what it found, or raises what failed."""
    with Memory(b"abcdef") as memory:
        one = begin(worker, ReportOrder("bytes"), memory)
        one.staged(Run(0, 0, 4, 2))
        one.staged(Run(0, 2, 0, 3))
        one.all_staged()
        assert one.outcome.result(120) == [b"ef", b"abc"]

        same = begin(worker, ReportOrder("descriptor"), memory, number=2)
        same.all_staged()
        assert same.outcome.result(120) == 6

    bad = begin(worker, ReportOrder("?"), number=3)
    bad.all_staged()
    with pytest.raises(
        RankFailedError, match="writing nothing failed on rank 0. rank 0: ValueError"
    ):
        bad.outcome.result(120)
    error = bad.outcome.exception(0)
    assert error is not None
    assert "in write" in str(error.__cause__)  # the traceback of the worker

    cannot = begin(worker, ReportOrder("lambda"), number=4)
    cannot.all_staged()
    with pytest.raises(RankFailedError, match="ickl"):
        cannot.outcome.result(120)


def test_an_arena_is_reused_and_forgotten(worker: Worker) -> None:
    """Its file travels once; later contents are seen; a forgotten key may name another."""
    with Memory(b"first") as memory, Memory(b"other") as other:
        for number, data in enumerate((b"first", b"again"), start=1):
            os.pwrite(memory.descriptor, data, 0)
            one = begin(worker, ReportOrder("bytes"), memory, number=number)
            one.staged(Run(0, 0, 0, 5))
            one.all_staged()
            assert one.outcome.result(120) == [data]
        worker.forget_arena(1)
        worker.forget_arena(77)
        one = begin(worker, ReportOrder("bytes"), other, number=3)
        one.staged(Run(0, 0, 0, 5))
        one.all_staged()
        assert one.outcome.result(120) == [b"other"]


def test_a_forgotten_arena_serves_what_has_begun(worker: Worker, tmp_path: Path) -> None:
    """Forgetting takes nothing from a save that is under way."""
    (order,) = file_orders(tmp_path / "c", 1)
    with Memory(bytes_of(order)) as memory:
        one = begin(worker, order, memory)
        worker.forget_arena(1)
        for run in runs_of(order):
            one.staged(run)
        one.all_staged()
        assert one.outcome.result(120) is None


def test_pieces_are_handed_back(worker: Worker, tmp_path: Path) -> None:
    """A state larger than its memory goes through it piece by piece."""
    (order,) = file_orders(tmp_path / "c", 1, nbytes=100, files=1)
    with Memory(bytes(10)) as memory:
        one = begin(worker, order, memory)
        for number in range(10):
            os.pwrite(memory.descriptor, bytes([number]) * 10, 0)
            run = Run(0, 10 * number, 0, 10)
            one.staged(run)
            one.wait_freed(run, 30)
        one.all_staged()
        assert one.outcome.result(120) is None

    data = (tmp_path / "c" / "__0_0.distcp").read_bytes()
    assert data == b"".join(bytes([n]) * 10 for n in range(10))


def test_no_piece_comes_back_from_a_failed_save(worker: Worker, tmp_path: Path) -> None:
    """Who waits for it is told that the save has failed; who waits too long, what is slow."""
    (order,) = file_orders(tmp_path / "c", 1)
    with Memory(bytes(10)) as memory:
        one = begin(worker, FailingOrder(order), memory)
        with pytest.raises(AsyncSaveError, match="the worker has given up"):
            one.wait_freed(Run(0, 0, 0, 10), 30)
        assert isinstance(one.outcome.exception(30), RankFailedError)

        (order,) = file_orders(tmp_path / "c", 1)
        one = begin(worker, order, memory, number=2)
        with pytest.raises(BarrierTimeoutError, match="10 staged bytes within 0.01 s"):
            one.wait_freed(Run(0, 0, 0, 10), 0.01)
        one.abandon(ValueError("enough"))
        with pytest.raises(RankFailedError, match="ValueError: enough"):
            one.outcome.result(120)
    assert list(tmp_path.iterdir()) == []


def test_saves_end_in_order(worker: Worker, tmp_path: Path) -> None:
    """The second is not begun before the first is committed."""
    gate = make_gate(tmp_path)
    (first,) = file_orders(tmp_path / "a", 1)
    (second,) = file_orders(tmp_path / "b", 1)
    ended: list[int] = []
    saves = [
        save(worker, first, GatedOrder(first, gate), number=1, key=1),
        save(worker, second, number=2, key=2),
    ]
    for one in saves:
        one.outcome.add_done_callback(lambda _, n=one.number: ended.append(n))
    wait_at_gate(gate)
    assert not is_committed(tmp_path / "b")

    open_gate(gate)

    assert [one.outcome.result(120) for one in saves] == [None, None]
    assert ended == [1, 2]


def test_close_finishes_what_is_staged(worker: Worker, tmp_path: Path) -> None:
    """And gives up what is not; every outcome is there."""
    (first,) = file_orders(tmp_path / "a", 1)
    (second,) = file_orders(tmp_path / "b", 1)
    good = save(worker, first)
    bad = begin(worker, second, number=2)

    worker.close(30)

    assert good.outcome.result(0) is None
    with pytest.raises(AsyncSaveError, match="the saver was closed while it staged"):
        bad.outcome.result(0)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a"]
    assert not worker.is_alive()


def test_close_kills_after_the_time(tmp_path: Path) -> None:
    """A worker that does not end is ended."""
    worker = Worker(kind="process", rank=0)
    gate = make_gate(tmp_path)
    (order,) = file_orders(tmp_path / "c", 1)
    one = save(worker, order, GatedOrder(order, gate))
    wait_at_gate(gate)

    worker.close(0.1)

    with pytest.raises(WorkerDiedError, match="did not end within 0.1 s, while it was writing"):
        one.outcome.result(0)
    assert one.written.done()
    assert worker.pid is None


def test_close_leaves_a_thread_after_the_time(tmp_path: Path) -> None:
    """A thread cannot be ended: its save has failed, and its memory is still in use."""
    others = set(threading.enumerate())
    worker = Worker(kind="thread", rank=0)
    gate = make_gate(tmp_path)
    (order,) = file_orders(tmp_path / "c", 1)
    one = save(worker, order, GatedOrder(order, gate))
    wait_at_gate(gate)

    worker.close(0.1)

    with pytest.raises(AsyncSaveError, match="did not end within 0.1 s, while it was writing"):
        one.outcome.result(0)
    assert not one.written.done()
    left = set(threading.enumerate()) - others  # they end those that they start themselves
    open_gate(gate)
    for thread in left:
        thread.join(120)


def test_no_python_to_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each way in which the interpreter is of no use says what to do."""
    worker = Worker(kind="process", rank=0)
    monkeypatch.setattr(sys, "executable", "")
    with pytest.raises(ConfigError, match='hint: use worker="thread"'):
        worker.start()

    monkeypatch.setattr(sys, "executable", str(tmp_path / "none"))
    with pytest.raises(WorkerDiedError, match='No such file.* hint: use worker="thread"'):
        worker.start()

    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(
        WorkerDiedError, match='exit code 1, while it was starting.*worker="thread"'
    ):
        worker.serve_hub(["127.0.0.1"], 30)
    one = begin(worker, ReportOrder())
    with pytest.raises(WorkerDiedError, match="exit code 1"):
        one.outcome.result(0)
    assert one.written.done()
    worker.close(1)


def test_nothing_is_left(kind: Literal["process", "thread"], tmp_path: Path) -> None:
    """No descriptor, thread or child remains after saves, failures and a kill."""
    begin_and_close(kind, tmp_path / "warm")  # what is made once, by the first
    before = resources()

    for number in range(3):
        begin_and_close(kind, tmp_path / str(number))

    assert resources() == before


def begin_and_close(kind: Literal["process", "thread"], folder: Path) -> None:
    folder.mkdir()
    others = set(threading.enumerate())
    team = [Worker(kind=kind, rank=rank) for rank in range(2)]
    for number in (1, 2):
        orders = list(file_orders(folder / str(number), 2))
        for one in all_saves(team, orders, orders, name=f"save-{number}", number=number):
            assert one.outcome.exception(30) is None
    pid = team[1].pid
    if pid is not None:
        os.kill(pid, signal.SIGKILL)
    for worker in team:
        worker.close(30)
    for thread in set(threading.enumerate()) - others:
        thread.join(120)


def resources() -> tuple[int, list[str], list[int]]:
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return (
        len(list(Path("/proc/self/fd").iterdir())),
        sorted(thread.name for thread in threading.enumerate()),
        sorted(int(child) for child in children),
    )


def test_a_worker_that_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without heartbeats it counts as dead, and is killed."""
    monkeypatch.setattr(link, "_SLICE_SECS", 0.05)
    monkeypatch.setattr(link, "SILENCE_SECS", 0.5)
    worker = Worker(kind="process", rank=0, heartbeat_secs=0.05)
    try:
        first = begin(worker, ReportOrder("pid"))
        first.all_staged()
        pid = first.outcome.result(120)[0]
        os.kill(pid, signal.SIGSTOP)

        second = begin(worker, ReportOrder("pid"), number=2)

        with pytest.raises(WorkerDiedError, match="gave no sign of life for 0.5"):
            second.outcome.result(120)
    finally:
        worker.close(30)


def test_a_limit_on_files_is_an_error(tmp_path: Path) -> None:
    """Not a signal that ends the worker: the save fails, the next one is good."""
    (order,) = file_orders(tmp_path / "c", 1)
    worker = Worker(kind="process", rank=0)
    try:
        bad = save(worker, order, LimitedOrder(order, 500))
        with pytest.raises(StorageError, match=r"cannot write .*__0_\d.distcp.*EFBIG.*file-size"):
            bad.outcome.result(120)
        assert list(tmp_path.iterdir()) == []

        (again,) = file_orders(tmp_path / "c", 1)
        assert save(worker, again, number=2).outcome.result(120) is None
    finally:
        worker.close(30)


def test_half_a_message_ends_the_worker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Ctrl-C in the midst of a send: what is staged is finished, the next save has a new worker."""
    (order,) = file_orders(tmp_path / "c", 1)
    worker = Worker(kind="process", rank=0)
    gate = make_gate(tmp_path)
    try:
        first = save(worker, order, GatedOrder(order, gate))
        pid = worker.pid

        def interrupted(*_: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(socket.socket, "sendall", interrupted)
            with pytest.raises(KeyboardInterrupt):
                begin(worker, ReportOrder("pid"), number=2)
        wait_at_gate(gate)
        open_gate(gate)

        assert first.outcome.result(120) is None
        third = begin(worker, ReportOrder("pid"), number=3)
        third.all_staged()
        assert third.outcome.result(120)[0] != pid
    finally:
        worker.close(30)


def test_a_worker_of_another_release(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that was updated under the running training is not trusted."""
    monkeypatch.setattr(link, "PROTOCOL", (0, "old"))
    worker = Worker(kind="process", rank=0)

    one = begin(worker, ReportOrder())

    with pytest.raises(WorkerDiedError, match="is of another release of this library"):
        one.outcome.result(0)
    worker.close(30)


def test_a_fork_of_training_leaves_the_worker_alone(tmp_path: Path) -> None:
    """``close`` in a forked child, say at its exit, ends nothing of its parent's."""
    (order,) = file_orders(tmp_path / "c", 1)
    worker = Worker(kind="process", rank=0)
    try:
        worker.start()
        pid = worker.pid
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12: threads run here
            child = os.fork()
        if not child:
            worker.close(0)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert save(worker, order).outcome.result(120) is None
        assert worker.pid == pid
    finally:
        worker.close(30)


def test_a_worker_goes_on_without_arena(worker: Worker) -> None:
    """Memory that cannot be mapped fails this save only."""
    with Memory(b"abc") as memory:
        pipe = os.pipe()  # a descriptor that is no memory
        bad = worker.begin(
            1, ReportOrder("bytes"), descriptor=pipe[0], arena_key=1, nbytes=3, point=None
        )
        bad.all_staged()
        good = begin(worker, ReportOrder("bytes"), memory, number=2, key=2)
        good.all_staged()

        assert good.outcome.result(120) == []
        for descriptor in pipe:
            os.close(descriptor)


def test_close_does_not_wait_for_other_ranks_for_ever(tmp_path: Path) -> None:
    """A save whose end only rank 0 knows is given up after the time; no thread remains."""
    team = [Worker(kind="process", rank=rank) for rank in range(2)]
    inner = list(file_orders(tmp_path / "c", 2))
    gate = make_gate(tmp_path)
    try:
        points = point_of(team, timeout_secs=300)
        good = save(team[0], inner[0], GatedOrder(inner[0], gate, "publish"), point=points[0])
        bad = save(team[1], inner[1], point=points[1])
        wait_at_gate(gate)
        os.kill(team[1].pid or 0, signal.SIGKILL)
        bad.written.result(120)

        team[1].close(0.1)

        with pytest.raises(AsyncSaveError, match="was not known when the saver was closed"):
            bad.outcome.result(0)
        assert not [t for t in threading.enumerate() if t.name == "dist_ckpt-dead-worker"]
        open_gate(gate)
        assert good.outcome.result(120) is None
    finally:
        team[0].close(30)


def test_a_worker_may_be_started_again(worker: Worker) -> None:
    """After ``close`` the next save has another one."""
    for number in (1, 2):
        one = begin(worker, ReportOrder("bytes"), number=number)
        one.all_staged()
        assert one.outcome.result(120) == []
        worker.close(30)
        assert not worker.is_alive()
        assert worker.pid is None


def test_a_worker_that_died_between_saves(team: list[Worker], tmp_path: Path) -> None:
    """Its successor takes part in the next save, though the other ranks are ready long before."""
    first = list(file_orders(tmp_path / "a", 3))
    for one in all_saves(team, first, first):
        assert one.outcome.result(120) is None
    pid = team[1].pid
    if pid is not None:
        ended = os.pidfd_open(pid)
        os.kill(pid, signal.SIGKILL)
        select.select([ended], [], [], 30)
        os.close(ended)
        while team[1].is_alive():
            threading.Event().wait(0.001)
        team[1].start()

    second = list(file_orders(tmp_path / "b", 3))
    saves = all_saves(team, second, second, name="save-2", number=2)

    assert [one.outcome.result(120) for one in saves] == [None] * 3
    assert is_committed(tmp_path / "b")
