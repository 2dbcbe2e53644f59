"""All ranks hear the same end of a save, whoever fails, is late, or is gone."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest

from dist_ckpt._comm.failures import describe_failure
from dist_ckpt._saving.publish import CommitPoint
from dist_ckpt._worker import agreement
from dist_ckpt._worker.agreement import CommitParticipant, commit, report_dead_worker
from dist_ckpt._worker.hub import Hub
from dist_ckpt._worker.hub_client import HubClient, HubLostError
from dist_ckpt.errors import (
    AsyncSaveError,
    BarrierTimeoutError,
    RankFailedError,
    StorageError,
    WorkerDiedError,
)


class Ledger:
    """An order that notes what is done with it.

    Args:
        fails: What raises.
        before_publish: Called first when it is published.
    """

    target = "ckpt"
    commits = True

    def __init__(self, fails: str = "", before_publish: Callable[[], None] | None = None) -> None:
        self.done: list[Any] = []
        self._fails, self._before_publish = fails, before_publish

    def write(self, staged: object) -> None:
        raise AssertionError(staged)

    def publish(self, reports: Sequence[Any]) -> None:
        if self._before_publish:
            self._before_publish()
        self.done.append(list(reports))
        if "publish" in self._fails:
            raise StorageError("the disk is full")

    def abort(self) -> None:
        self.done.append("abort")
        if "abort" in self._fails:
            raise OSError("busy")


@pytest.fixture
def hub() -> Iterator[Hub]:
    hub = Hub(("127.0.0.1",), grace_secs=0.1)
    yield hub
    hub.close()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


@pytest.fixture(autouse=True)
def no_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "_GRACE_SECS", 0.2)


def point(hub: Hub, rank: int, *, size: int = 3, timeout_secs: float = 30.0) -> CommitPoint:
    return CommitPoint(hub.address, "save", rank, size, timeout_secs)


def errors_of(futures: Sequence[Future[None]]) -> list[BaseException | None]:
    return [future.exception(30) for future in futures]


def test_all_reports_are_published(hub: Hub, pool: ThreadPoolExecutor) -> None:
    """By rank, once; all return."""
    order = Ledger()

    ends = [
        pool.submit(commit, point(hub, r), order if r == 0 else Ledger(), f"r{r}") for r in range(3)
    ]

    assert errors_of(ends) == [None] * 3
    assert order.done == [["r0", "r1", "r2"]]


def test_one_rank_alone() -> None:
    """No hub is needed; a failure is raised as all ranks would."""
    good, bad, unlucky = Ledger(), Ledger(), Ledger("publish")

    commit(None, good, "mine")
    with pytest.raises(StorageError, match="writing ckpt failed on rank 0. rank 0: full"):
        commit(None, bad, failure=describe_failure(StorageError("full")))
    with pytest.raises(StorageError, match="committing ckpt failed on rank 0. rank 0: the disk"):
        commit(None, unlucky, "mine")

    assert good.done == [["mine"]]
    assert bad.done == ["abort"]
    assert unlucky.done == [["mine"], "abort"]


@pytest.mark.parametrize("failing", [(0,), (1,), (0, 2), (0, 1, 2)])
def test_failures_are_merged(hub: Hub, pool: ThreadPoolExecutor, failing: tuple[int, ...]) -> None:
    """All ranks raise the same; nothing is published; rank 0 removes the attempt, others do not."""
    orders = [Ledger() for _ in range(3)]

    ends = [
        pool.submit(
            commit,
            point(hub, rank),
            orders[rank],
            "report",
            describe_failure(StorageError(f"full {rank}")) if rank in failing else None,
        )
        for rank in range(3)
    ]

    errors = errors_of(ends)
    assert {type(error) for error in errors} == {StorageError}
    assert len({str(error) for error in errors}) == 1
    assert all(f"rank {rank}: full {rank}" in str(errors[0]) for rank in failing)
    assert all(isinstance(e, StorageError) and list(e.failures) == list(failing) for e in errors)
    assert [order.done for order in orders] == [["abort"], [], []]


def test_nothing_is_removed_while_a_rank_may_write(hub: Hub, pool: ThreadPoolExecutor) -> None:
    """A failure is known at once, but the attempt stays until the last rank has ended."""
    order = Ledger()
    failed = pool.submit(commit, point(hub, 0), order, None, describe_failure(ValueError("mine")))
    other = pool.submit(commit, point(hub, 1), None, None, describe_failure(ValueError("theirs")))
    with closing(HubClient(hub.address, 1)) as watch:
        assert watch.wait({"save/in/1": None}, 30) == []
    assert not failed.done()
    assert order.done == []

    last = pool.submit(commit, point(hub, 2), None, "late")

    errors = errors_of([failed, other, last])
    assert all(isinstance(error, RankFailedError) for error in errors)
    assert order.done == ["abort"]


def test_a_failed_publication_is_told(hub: Hub, pool: ThreadPoolExecutor) -> None:
    """Removing what is left may fail too; what is told is the first failure."""
    order = Ledger("publish, abort")

    ends = [pool.submit(commit, point(hub, r), order if r == 0 else None, "x") for r in range(3)]

    assert all(
        isinstance(error, StorageError) and "committing ckpt failed on rank 0" in str(error)
        for error in errors_of(ends)
    )
    assert order.done == [["x"] * 3, "abort"]


def test_a_report_that_does_not_travel(hub: Hub, pool: ThreadPoolExecutor) -> None:
    """Is a failure of that rank, on either side."""
    order = Ledger()
    local = threading.Lock()

    ends = [
        pool.submit(commit, point(hub, rank, size=3), order if rank == 0 else None, report)
        for rank, report in enumerate(["fine", local, Thorn()])
    ]

    assert all("failed on ranks 1, 2" in str(error) for error in errors_of(ends))
    assert order.done == ["abort"]


class Thorn:
    """Can be pickled, and not unpickled."""

    def __reduce__(self) -> Any:
        return _raise, ()


def _raise() -> None:
    raise LookupError("not here")


def test_a_missing_rank_is_named(hub: Hub, pool: ThreadPoolExecutor) -> None:
    """With what others failed of."""
    order = Ledger()
    failure = describe_failure(StorageError("full"))

    ends = [
        pool.submit(commit, point(hub, 0, size=4, timeout_secs=0.1), order, "x"),
        pool.submit(commit, point(hub, 2, size=4), None, None, failure),
    ]

    for error in errors_of(ends):
        assert isinstance(error, RankFailedError)
        assert "writing ckpt failed on ranks 1, 2, 3" in str(error)
        assert "BarrierTimeoutError: it did not report within 0.1 s" in str(error)
        assert "StorageError: full" in str(error)
    assert order.done == ["abort"]


def test_a_rank_that_is_gone_is_not_waited_for(hub: Hub) -> None:
    """A connection lost for the grace ends the wait, long before its time."""
    order = Ledger()
    with closing(CommitParticipant()) as gone:
        gone.connect(point(hub, 1, size=2))

    with pytest.raises(BarrierTimeoutError, match="rank 1: its connection to the hub is gone"):
        commit(point(hub, 0, size=2, timeout_secs=300), order, "x")
    assert order.done == ["abort"]


def test_who_comes_too_late_hears_the_verdict(hub: Hub) -> None:
    """It fails as the others did."""
    with pytest.raises(BarrierTimeoutError) as first:
        commit(point(hub, 0, size=2, timeout_secs=0), Ledger(), "x")
    with pytest.raises(BarrierTimeoutError) as late:
        commit(point(hub, 1, size=2), Ledger(), "x")

    assert str(late.value) == str(first.value)


def test_who_gives_up_decides(hub: Hub) -> None:
    """A rank that has waited in vain for rank 0 fails, and then nothing is committed any more."""
    order = Ledger()
    with pytest.raises(BarrierTimeoutError, match="committing ckpt failed on rank 0"):
        commit(point(hub, 1, size=2, timeout_secs=0), Ledger(), "x")

    with pytest.raises(BarrierTimeoutError, match=r"rank 1: it waited for rank 0 for .* gave up"):
        commit(point(hub, 0, size=2), order, "x")
    assert order.done == ["abort"]


def test_who_waits_while_rank_0_publishes_does_not_give_up(
    hub: Hub, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 has decided: its verdict counts, however late."""
    monkeypatch.setattr(agreement, "_GRACE_SECS", -4.9)  # rank 1 waits for 0.1 s, then for 5 s
    is_late = threading.Event()
    order = Ledger(before_publish=lambda: is_late.wait(120) and None)
    real = HubClient.set_if_absent

    def watched(client: HubClient, key: str, value: bytes) -> bool:
        done = real(client, key, value)
        if key == "save/decision" and value == b"1":
            is_late.set()
        return done

    monkeypatch.setattr(HubClient, "set_if_absent", watched)

    ends = [
        pool.submit(commit, point(hub, r, size=2, timeout_secs=5), order if r == 0 else None, "x")
        for r in range(2)
    ]

    assert errors_of(ends) == [None, None]
    assert is_late.is_set()
    assert order.done == [["x", "x"]]


def test_a_stand_in_fails_the_save(hub: Hub, pool: ThreadPoolExecutor) -> None:
    """In place of a worker that died before it had done its part."""
    order = Ledger()
    death = describe_failure(WorkerDiedError("killed by SIGKILL"))

    ends = [
        pool.submit(commit, point(hub, 0, size=2), order, "x"),
        pool.submit(report_dead_worker, point(hub, 1, size=2), death),
    ]

    errors = errors_of(ends)
    assert all(isinstance(error, WorkerDiedError) for error in errors)
    assert all("rank 1: killed by SIGKILL" in str(error) for error in errors)
    assert order.done == ["abort"]


def test_a_stand_in_takes_nothing_back(hub: Hub, pool: ThreadPoolExecutor) -> None:
    """What the worker had said before it died counts."""
    order = Ledger()
    post = agreement._RankReport(pickle.dumps("done"))
    with closing(HubClient(hub.address, 1)) as worker:
        worker.set("save/in/1", pickle.dumps(post))
    death = describe_failure(WorkerDiedError("killed"))

    ends = [
        pool.submit(report_dead_worker, point(hub, 1, size=2), death),
        pool.submit(commit, point(hub, 0, size=2), order, "x"),
    ]

    assert errors_of(ends) == [None, None]
    assert order.done == [["x", "done"]]


def test_a_lost_hub_is_told(hub: Hub) -> None:
    """How the save ended is not known then; that is another error than that it failed."""
    hub.close()

    with pytest.raises(HubLostError):
        commit(point(hub, 1), None, "x")
    with pytest.raises(HubLostError):
        report_dead_worker(point(hub, 1), describe_failure(AsyncSaveError("died")))


def test_committed_is_committed(hub: Hub) -> None:
    """A hub that is lost while rank 0 publishes does not turn the save into a failure."""
    order = Ledger(before_publish=hub.close)
    with closing(HubClient(hub.address, 1)) as other:
        other.set("save/in/1", pickle.dumps(agreement._RankReport(pickle.dumps("y"))))

        commit(point(hub, 0, size=2), order, "x")

    assert order.done == [["x", "y"]]


def test_the_hub_does_not_grow(hub: Hub, pool: ThreadPoolExecutor) -> None:
    """Only what somebody may still ask for is kept."""
    with closing(CommitParticipant()) as one, closing(CommitParticipant()) as two:
        for number in range(40):
            points = [CommitPoint(hub.address, f"save-{number}", r, 2, 30) for r in range(2)]
            ends = [
                pool.submit(seat.commit, p, Ledger(), "x" * 1000)
                for seat, p in zip((one, two), points, strict=True)
            ]
            assert errors_of(ends) == [None, None]
        one.linger(30)

    assert {key.split("/")[0] for key in hub._table._values} <= {
        f"save-{n}" for n in range(40 - agreement._NUM_KEPT_VERDICTS, 40)
    }
    assert not [key for key in hub._table._values if "/in/" in key]


def test_the_hub_lingers_until_all_have_heard(hub: Hub, pool: ThreadPoolExecutor) -> None:
    """But not for a rank that never came."""
    with closing(CommitParticipant()) as first, closing(CommitParticipant()) as second:
        second.connect(point(hub, 1))
        with pytest.raises(BarrierTimeoutError):
            first.commit(point(hub, 0, timeout_secs=0), Ledger(), "x")
        waiting = pool.submit(first.linger, 300)
        with pytest.raises(BarrierTimeoutError):
            second.commit(point(hub, 1), None, "x")
        assert waiting.result(120) is None
