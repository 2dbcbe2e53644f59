"""What one process sees of its background saver: order, waiting, failures, the end."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import pytest
import torch
from torch import nn

from dist_ckpt import SaveOptions, ShardedTensor, load_plain_tensors
from dist_ckpt.background import BackgroundOptions, BackgroundSaver
from dist_ckpt.errors import AsyncSaveError, BarrierTimeoutError, ConfigError, WorkerDiedError
from dist_ckpt.events import Committed, Failed, SaveStarted, Staged, Written
from dist_ckpt.storage.commit import Attempt
from dist_ckpt.training_state import (
    CheckpointView,
    TrainingState,
    is_checkpoint,
    save_training_state,
)
from tests.faults._background import Job, Told, same_bits, worker_pid
from tests.faults._leaks import hidden_entries, no_leaks
from tests.multiprocess._world import run_program

Kind = Literal["process", "thread"]
Make = Callable[..., BackgroundSaver]
WORKER_THREAD = "dist_ckpt-worker-0-writer"

both_kinds = pytest.mark.parametrize("worker", ["process", "thread"])


@pytest.fixture
def make() -> Iterator[Make]:
    """Make savers that are closed at the end, whatever they still have to say."""
    made: list[BackgroundSaver] = []

    def of(told: Told | None = None, **options: Any) -> BackgroundSaver:
        sinks = [] if told is None else [told]
        saver = BackgroundSaver(BackgroundOptions(**options), sinks=sinks, timeout_secs=60)
        made.append(saver)
        return saver

    yield of
    for saver in made:
        with contextlib.suppress(AsyncSaveError, BarrierTimeoutError):
            saver.close()


@pytest.fixture
def job() -> Job:
    return Job(0, 1)


def save(saver: BackgroundSaver, job: Job, path: Path) -> dict[str, torch.Tensor]:
    """Save, and return what the checkpoint must hold."""
    job.step()
    expected = job.bits()
    save_training_state(path, job.state, saver=saver)
    return expected


@contextlib.contextmanager
def stage_failing(*, error: BaseException | None = None) -> Iterator[None]:
    failure = error or OSError(12, "boom in staging")
    with mock.patch("dist_ckpt._worker.submit._stage", side_effect=failure):
        yield


@contextlib.contextmanager
def stopped(saver: BackgroundSaver) -> Iterator[None]:
    """The worker stands still, like one whose disk does not answer."""
    saver.start()
    assert saver._machinery.worker is not None
    saver._machinery.worker._started().wait_until_ready()
    pid = worker_pid(saver)
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    del saver  # a test may drop it
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def started(call: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=call)
    thread.start()
    return thread


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


# -- saves -----------------------------------------------------------------------------------------


@both_kinds
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("budget", [None, 8192])
def test_each_save_holds_the_state_at_its_call(
    make: Make, job: Job, tmp_path: Path, worker: Kind, overlap: bool, budget: int | None
) -> None:
    """Bit for bit, though training goes on at once; also streamed through little memory."""
    with mock.patch("dist_ckpt._staging_pool.pool.BLOCK_NBYTES", 4096):
        saver = make(worker=worker, overlap=overlap, staging_budget=budget)
        expected = {}
        for n in range(4):
            expected[n] = save(saver, job, tmp_path / str(n))
            job.step()
        saver.drain()

    for n, bits in expected.items():
        assert same_bits(job.loaded(tmp_path / str(n)), bits) == []


@both_kinds
def test_saves_commit_in_the_order_they_were_asked_for(
    make: Make, job: Job, tmp_path: Path, worker: Kind
) -> None:
    """Also the same path twice: the later save is what stays."""
    told = Told()
    saver = make(told, worker=worker, max_in_flight=3)

    paths = [tmp_path / name for name in ("a", "b", "a", "c", "a")]
    expected = [save(saver, job, path) for path in paths]
    saver.drain()

    committed = [one.path for one in told.events if isinstance(one, Committed)]
    assert committed == [str(path) for path in paths]
    assert same_bits(job.loaded(tmp_path / "a"), expected[4]) == []
    assert names(tmp_path) == ["a", "b", "c"]


def test_a_save_waits_for_the_one_before_it(make: Make, job: Job, tmp_path: Path) -> None:
    """One in flight is the default; for how long the caller waited is told."""
    told = Told()
    saver = make(told)
    with stopped(saver):
        save(saver, job, tmp_path / "1")
        assert saver.in_flight == (tmp_path / "1",)
        second = started(lambda: save(saver, job, tmp_path / "2"))
        second.join(0.3)
        assert second.is_alive()
        assert saver.in_flight == (tmp_path / "1",)
    second.join(120)
    saver.drain()

    staged = [one for one in told.events if isinstance(one, Staged)]
    assert staged[0].wait_secs < 0.2 < staged[1].wait_secs <= staged[1].stall_secs
    assert saver.in_flight == ()


def test_two_saves_may_be_staged_while_the_disk_stands_still(
    make: Make, job: Job, tmp_path: Path
) -> None:
    """With room for three in flight; the third waits for memory: two generations are all."""
    saver = make(max_in_flight=3)
    with stopped(saver):
        for n in (1, 2):
            save(saver, job, tmp_path / str(n))
        assert saver.in_flight == (tmp_path / "1", tmp_path / "2")
        third = started(lambda: save(saver, job, tmp_path / "3"))
        third.join(0.2)
        assert third.is_alive()
    third.join(120)
    saver.drain()
    assert names(tmp_path) == ["1", "2", "3"]


def test_events_come_in_order_with_sane_numbers(make: Make, job: Job, tmp_path: Path) -> None:
    """Started, staged, written, committed; seconds and bytes fit together."""
    told = Told()
    saver = make(told)
    before = time.time()
    save(saver, job, tmp_path / "1")
    saver.drain()
    begun, staged, written, committed = told.events

    assert isinstance(begun, SaveStarted)
    assert isinstance(staged, Staged)
    assert isinstance(written, Written)
    assert isinstance(committed, Committed)
    assert [one.time for one in told.events] == sorted(one.time for one in told.events)
    assert before <= begun.time <= committed.time <= time.time()
    assert 0 <= staged.wait_secs <= staged.stall_secs <= committed.secs < 60
    assert 0 < staged.copy_secs <= committed.secs
    assert 0 <= written.secs <= committed.secs
    nbytes = sum(path.stat().st_size for path in (tmp_path / "1").glob("*.distcp"))
    assert staged.nbytes == written.nbytes == committed.nbytes == nbytes
    assert {(one.path, one.rank, one.save, one.is_async) for one in told.events} == {
        (str(tmp_path / "1"), 0, 1, True)
    }


def test_a_failed_save_tells_that_it_started_and_that_it_failed(
    make: Make, job: Job, tmp_path: Path
) -> None:
    """And never that it was written or committed."""
    told = Told()
    saver = make(told)
    with stage_failing():
        save(saver, job, tmp_path / "1")
    with pytest.raises(AsyncSaveError):
        saver.drain()

    assert told.kinds(1) == ["SaveStarted", "Failed"]
    failed = told.events[-1]
    assert isinstance(failed, Failed)
    assert "boom in staging" in failed.error


# -- failures --------------------------------------------------------------------------------------


@both_kinds
def test_one_that_fails_in_the_middle_leaves_the_others_alone(
    make: Make, job: Job, tmp_path: Path, worker: Kind
) -> None:
    """It is told once, and nothing of it is there."""
    saver = make(worker=worker, max_in_flight=3)
    first = save(saver, job, tmp_path / "1")
    with stage_failing():
        save(saver, job, tmp_path / "2")
    third = save(saver, job, tmp_path / "3")

    with pytest.raises(AsyncSaveError, match="2 failed, nothing of it is committed") as caught:
        saver.drain()

    assert "boom in staging" in str(caught.value.__cause__)
    saver.drain()
    saver.wait()
    saver.poll()
    assert names(tmp_path) == ["1", "3"]
    assert same_bits(job.loaded(tmp_path / "1"), first) == []
    assert same_bits(job.loaded(tmp_path / "3"), third) == []


TOUCHES: dict[str, Callable[[BackgroundSaver, Job, Path], object]] = {
    "poll": lambda saver, job, folder: saver.poll(),
    "wait": lambda saver, job, folder: saver.wait(),
    "wait for the path": lambda saver, job, folder: saver.wait(folder / "1"),
    "drain": lambda saver, job, folder: saver.drain(),
    "save": lambda saver, job, folder: save(saver, job, folder / "2"),
    "close": lambda saver, job, folder: saver.close(),
}


@pytest.mark.parametrize("touch", TOUCHES.values(), ids=TOUCHES.keys())
def test_a_failure_is_raised_once_by_whatever_comes_first(
    make: Make, job: Job, tmp_path: Path, touch: Callable[[BackgroundSaver, Job, Path], object]
) -> None:
    """The save that raises it does not begin; nothing else raises it again."""
    saver = make()
    settled = threading.Event()
    job.step()
    with stage_failing():
        save_training_state(
            tmp_path / "1", job.state, saver=saver, on_settled=lambda _: settled.set()
        )
    assert settled.wait(120)
    assert _ended(saver)

    with pytest.raises(AsyncSaveError, match="boom in staging"):
        touch(saver, job, tmp_path)

    saver.poll()
    saver.wait()
    saver.wait(tmp_path / "1")
    saver.drain()
    saver.close()
    assert names(tmp_path) == []


def _ended(saver: BackgroundSaver) -> bool:
    saver._queue.wait_for(saver._queue.is_idle, 30, "the end")
    return True


def test_several_failures_are_told_together(make: Make, job: Job, tmp_path: Path) -> None:
    """The first is raised, the others stand in its notes: none is lost."""
    saver = make(max_in_flight=3)
    with stage_failing():
        for n in (1, 2):
            save(saver, job, tmp_path / str(n))
    with pytest.raises(AsyncSaveError, match=r"/1 failed") as caught:
        saver.drain()
    assert any("/2 failed" in note for note in caught.value.__notes__)
    saver.drain()


def test_a_killed_worker_is_named_and_replaced(make: Make, job: Job, tmp_path: Path) -> None:
    """By signal and by what it did; the next save has another one, and what is there stays."""
    saver = make()
    good = save(saver, job, tmp_path / "1")
    saver.drain()
    with stopped(saver):
        save(saver, job, tmp_path / "2")
        first = worker_pid(saver)
        assert first is not None
        os.kill(first, signal.SIGKILL)
        with pytest.raises(AsyncSaveError) as caught:
            saver.wait(timeout_secs=60)
    cause = caught.value.__cause__
    assert isinstance(cause, WorkerDiedError)
    assert "SIGKILL" in str(cause)
    assert f"process {first}" in str(cause)

    again = save(saver, job, tmp_path / "2")
    saver.drain()
    assert worker_pid(saver) != first
    assert same_bits(job.loaded(tmp_path / "1"), good) == []
    assert same_bits(job.loaded(tmp_path / "2"), again) == []
    assert hidden_entries([tmp_path]) == []


def test_a_worker_that_dies_between_saves_fails_none(make: Make, job: Job, tmp_path: Path) -> None:
    """The next save starts another."""
    saver = make()
    save(saver, job, tmp_path / "1")
    saver.drain()
    pid = worker_pid(saver)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    save(saver, job, tmp_path / "2")
    with contextlib.suppress(AsyncSaveError):  # it may be found out only by the save itself
        saver.drain()
    expected = save(saver, job, tmp_path / "2")
    saver.drain()
    assert same_bits(job.loaded(tmp_path / "2"), expected) == []


def test_an_interrupt_while_it_stages_comes_through_and_fails_the_save(
    make: Make, job: Job, tmp_path: Path
) -> None:
    """Ctrl-C is not swallowed; the next save is good."""
    saver = make()
    with stage_failing(error=KeyboardInterrupt()), pytest.raises(KeyboardInterrupt):
        save(saver, job, tmp_path / "1")
    with pytest.raises(AsyncSaveError):
        saver.drain()
    expected = save(saver, job, tmp_path / "1")
    saver.drain()
    assert same_bits(job.loaded(tmp_path / "1"), expected) == []
    assert names(tmp_path) == ["1"]


def test_a_description_that_fails_is_raised_by_the_call(
    make: Make, job: Job, tmp_path: Path
) -> None:
    """At once and not again; nothing is left, and the saver serves on."""
    saver = make()

    def broken() -> Any:
        raise ValueError("boom in describing")

    with pytest.raises(Exception, match="boom in describing"):
        save_training_state(tmp_path / "1", broken, saver=saver)
    saver.poll()
    assert names(tmp_path) == []
    save(saver, job, tmp_path / "1")
    saver.drain()
    assert is_checkpoint(tmp_path / "1")


# -- waiting ---------------------------------------------------------------------------------------


def test_waiting_for_a_path_waits_for_no_other(make: Make, job: Job, tmp_path: Path) -> None:
    """For one that is not in flight not at all; a link is the path it leads to."""
    saver = make()
    (tmp_path / "link").symlink_to(tmp_path / "1")
    with stopped(saver):
        save(saver, job, tmp_path / "1")
        saver.wait(tmp_path / "other", timeout_secs=0)
        for name in ("1", "link", "x/../1"):
            with pytest.raises(BarrierTimeoutError, match=str(tmp_path / "1")):
                saver.wait(tmp_path / name, timeout_secs=0.01)
    saver.wait(tmp_path / "link", timeout_secs=60)
    assert is_checkpoint(tmp_path / "1")


def test_a_drain_that_takes_too_long_names_what_is_in_flight(
    make: Make, job: Job, tmp_path: Path
) -> None:
    """Nothing is given up: it may be drained again."""
    saver = make()
    with stopped(saver):
        save(saver, job, tmp_path / "1")
        with pytest.raises(BarrierTimeoutError, match=str(tmp_path / "1")):
            saver.drain(timeout_secs=0.01)
    saver.drain()
    assert is_checkpoint(tmp_path / "1")


@both_kinds
def test_polling_with_nothing_to_tell_costs_microseconds(
    make: Make, job: Job, tmp_path: Path, worker: Kind, record_property: Callable[..., None]
) -> None:
    """The least of several rounds is noted; the bound is far above what it is."""
    saver = make(worker=worker)
    save(saver, job, tmp_path / "1")
    saver.drain()
    rounds = []
    for _ in range(20):
        begun = time.perf_counter()
        for _ in range(200):
            saver.poll()
        rounds.append((time.perf_counter() - begun) / 200 * 1e6)
    record_property("microseconds of an idle poll", round(min(rounds), 2))
    assert min(rounds) < 50


# -- what is queued behind -------------------------------------------------------------------------


def test_an_action_runs_at_once_when_nothing_is_in_flight(make: Make) -> None:
    """In the thread of the caller, and what it raises is the caller's."""
    saver = make()
    where: list[str] = []
    saver.after_commit(lambda: where.append(threading.current_thread().name), what="a test")
    assert where == [threading.current_thread().name]
    with pytest.raises(ZeroDivisionError):
        saver.after_commit(lambda: 1 / 0, what="a bad one")  # type: ignore[arg-type, return-value]


def test_actions_run_behind_the_save_they_were_queued_at(
    make: Make, job: Job, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In order; not if that save failed; one that raises is logged and keeps nobody from running."""
    saver = make(max_in_flight=2)
    done: list[tuple[str, list[str]]] = []

    def note(name: str) -> Callable[[], None]:
        return lambda: done.append((name, sorted(n for n in names(tmp_path) if n[0] != ".")))

    with stopped(saver):
        save(saver, job, tmp_path / "1")
        saver.after_commit(note("behind 1"), what="one")
        saver.after_commit(lambda: 1 / 0, what="a bad one")  # type: ignore[arg-type, return-value]
        with stage_failing():
            save(saver, job, tmp_path / "2")
        saver.after_commit(note("behind 2"), what="remove what 2 replaces")
        assert done == []
    with pytest.raises(AsyncSaveError):
        saver.drain()
    save(saver, job, tmp_path / "3")
    saver.after_commit(note("behind 3"), what="three")
    saver.drain()

    assert done == [("behind 1", ["1"]), ("behind 3", ["1", "3"])]
    assert "not done, as the save before it failed: remove what 2 replaces" in caplog.text
    assert "a bad one" in caplog.text


def test_what_frees_space_comes_before_the_next_save(make: Make, job: Job, tmp_path: Path) -> None:
    """Once it is due: not while its save is in flight, and no other action holds up a save."""
    saver, other, removal = make(max_in_flight=2), threading.Event(), threading.Event()
    queue = saver._queue

    def has_space() -> bool:
        with queue._changed:
            return queue.has_space()

    with stopped(saver):
        save(saver, job, tmp_path / "1")
        saver.after_commit(lambda: removal.wait(60) and None, what="removing", frees_space=True)
        assert has_space()  # nothing is due: a second save may be on its way, too
    saver.wait()
    assert not has_space()
    removal.set()
    queue.wait_for(queue.is_idle, 60, "a test")
    with stopped(saver):
        save(saver, job, tmp_path / "2")
        saver.after_commit(lambda: other.wait(60) and None, what="an upload")
    saver.wait()
    assert has_space()
    save(saver, job, tmp_path / "3")
    other.set()
    saver.drain()


# -- the end ---------------------------------------------------------------------------------------


@both_kinds
def test_closing_gives_everything_back(job: Job, tmp_path: Path, worker: Kind) -> None:
    """Processes, threads, files, memory; again does nothing; afterwards nothing is saved."""
    options = BackgroundOptions(worker=worker, overlap=True, max_in_flight=2)
    with BackgroundSaver(options) as saver:
        save(saver, job, tmp_path / "warm")
    with no_leaks(tmp_path):
        saver = BackgroundSaver(options)
        for n in range(3):
            save(saver, job, tmp_path / str(n))
        saver.close()
        saver.close()
        assert names(tmp_path) == ["0", "1", "2", "warm"]
    for refused in (saver.start, lambda: save(saver, job, tmp_path / "late")):
        with pytest.raises(ConfigError, match="closed"):
            refused()
    assert names(tmp_path) == ["0", "1", "2", "warm"]


def test_a_saver_that_never_saved_closes(tmp_path: Path) -> None:
    """Started or not."""
    with no_leaks(tmp_path):
        BackgroundSaver().close()
        saver = BackgroundSaver()
        saver.start()
        saver.close()


def test_closing_raises_what_failed_and_gives_everything_back(job: Job, tmp_path: Path) -> None:
    """Nothing is lost by closing, and nothing is kept."""
    BackgroundSaver(BackgroundOptions()).close()
    with no_leaks(tmp_path):
        saver = BackgroundSaver(BackgroundOptions(overlap=True))
        save(saver, job, tmp_path / "0")
        with stage_failing():
            save(saver, job, tmp_path / "1")
        with pytest.raises(AsyncSaveError, match="boom in staging"):
            saver.close()
    assert names(tmp_path) == ["0"]


def test_closing_does_not_wait_forever_for_a_worker_that_stands_still(
    job: Job, tmp_path: Path
) -> None:
    """It is killed after a bound; the save is not there, nor anything of it, nor of the worker."""
    with no_leaks(tmp_path), mock.patch("dist_ckpt.background._CLOSE_SECS", 0.2):
        saver = BackgroundSaver(BackgroundOptions(drain_timeout_secs=0.2))
        with stopped(saver):
            save(saver, job, tmp_path / "1")
            with pytest.raises(BarrierTimeoutError, match=str(tmp_path / "1")):
                saver.close()
    assert names(tmp_path) == []


@pytest.mark.parametrize("where", ["fsync", "before the rename", "behind the rename"])
def test_a_thread_that_is_stuck_commits_nothing_once_its_save_was_given_up(
    job: Job, tmp_path: Path, where: str
) -> None:
    """A thread cannot be killed. What it does after ``close`` agrees with what the sinks heard."""
    stuck, go_on, told = threading.Event(), threading.Event(), Told()
    fsync, publish = os.fsync, Attempt.publish

    def held() -> None:
        stuck.set()
        assert go_on.wait(60)

    def slow_fsync(descriptor: int) -> None:
        held()
        fsync(descriptor)

    def slow_publish(attempt: Attempt, **kwargs: Any) -> None:
        if where == "before the rename":
            held()
        publish(attempt, **kwargs)
        if where == "behind the rename":
            held()

    patch = {"fsync": (os, "fsync", slow_fsync)}.get(where, (Attempt, "publish", slow_publish))
    options = BackgroundOptions(worker="thread", drain_timeout_secs=60)
    saver = BackgroundSaver(options, sinks=[told], timeout_secs=60)
    with mock.patch.object(*patch):
        try:
            save(saver, job, tmp_path / "1")
            assert stuck.wait(60)
            (thread,) = [one for one in threading.enumerate() if one.name == WORKER_THREAD]
            with pytest.raises(BarrierTimeoutError, match=str(tmp_path / "1")):
                saver.close(timeout_secs=0.1)
            ended = told.kinds(1)[-1]
        finally:
            go_on.set()
        thread.join(60)
        assert not thread.is_alive()
    is_behind = where == "behind the rename"
    assert ended == ("Committed" if is_behind else "Failed")
    assert names(tmp_path) == (["1"] if is_behind else [])


def test_closing_may_leave_a_save_to_its_worker(job: Job, tmp_path: Path) -> None:
    """The caller waits no longer than it wants; the worker process commits all the same."""
    saver = BackgroundSaver(BackgroundOptions())
    with stopped(saver):
        expected = save(saver, job, tmp_path / "1")
        pid = worker_pid(saver)
        assert pid is not None
        with pytest.raises(BarrierTimeoutError, match="did not end"):
            saver.close(timeout_secs=0.1, leaves=True)
        assert [name for name in names(tmp_path) if name[0] != "."] == []
    os.waitpid(pid, 0)

    assert same_bits(job.loaded(tmp_path / "1"), expected) == []
    assert names(tmp_path) == ["1"]


def test_a_forked_child_may_not_save_and_does_no_harm(make: Make, job: Job, tmp_path: Path) -> None:
    """The parent's worker is the parent's: it serves on after the child has ended."""
    saver = make()
    save(saver, job, tmp_path / "1")
    saver.drain()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            save(saver, job, tmp_path / "child")
        except ConfigError as error:
            code = 0 if "another process" in str(error) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0

    expected = save(saver, job, tmp_path / "2")
    saver.drain()
    assert same_bits(job.loaded(tmp_path / "2"), expected) == []
    assert names(tmp_path) == ["1", "2"]


SCRIPT = """
import logging, os, signal, sys
logging.basicConfig(level=logging.WARNING)
import torch
from dist_ckpt.background import BackgroundOptions, BackgroundSaver
from dist_ckpt.training_state import TrainingState, save_training_state
saver = BackgroundSaver(BackgroundOptions(worker=sys.argv[2]))
model = torch.nn.Linear(300, 300)
torch.nn.init.constant_(model.weight, 3.0)
save_training_state(sys.argv[1], TrainingState(models=[model]), saver=saver)
torch.nn.init.constant_(model.weight, 4.0)
{end}
"""
ENDS = {
    "returns": ("process", "", 0),
    "returns, thread": ("thread", "", 0),
    "raises": ("process", "raise SystemExit(3)", 3),
    "ends at once": ("process", "os._exit(4)", 4),
    "is killed": ("process", "os.kill(os.getpid(), signal.SIGKILL)", -9),
}


@pytest.mark.parametrize("case", ENDS)
def test_a_program_that_ends_leaves_its_last_checkpoint(tmp_path: Path, case: str) -> None:
    """However it ends: once the save has returned, its worker needs nobody to commit it."""
    worker, end, code = ENDS[case]
    path = tmp_path / "c"
    script = textwrap.dedent(SCRIPT).format(end=end)

    # The worker has the program's output: when that is at its end, both are gone.
    done = run_program(script, str(path), worker)

    assert (done.returncode, done.stderr) == (code, "")
    weight = load_plain_tensors(path)["models.0.weight"]
    assert torch.equal(weight, torch.full((300, 300), 3.0))
    assert names(tmp_path) == ["c"]


def test_a_save_that_failed_at_the_very_end_is_logged(tmp_path: Path) -> None:
    """A program that never looks again tells it all the same, with its other output."""
    end = "import resource, threading\n"
    script = textwrap.dedent(SCRIPT).replace(
        "save_training_state(sys",
        "import resource; saver.start(); resource.prlimit(saver._machinery.worker.pid, "
        "resource.RLIMIT_FSIZE, (20000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))\n"
        "save_training_state(sys",
    )
    done = run_program(script.format(end=end), str(tmp_path / "c"), "process")
    assert done.returncode == 0
    assert "a checkpoint was not finished at the end of the program" in done.stderr
    assert "EFBIG" in done.stderr
    assert names(tmp_path) == []


AT_THE_END = """
import multiprocessing, sys, threading
from pathlib import Path
import torch
from dist_ckpt.storage.transfer import run_jobs
from dist_ckpt.background import BackgroundSaver
from dist_ckpt.training_state import TrainingState, save_training_state

ends = threading.Event()

def prune(name):
    ends.wait(120)
    run_jobs([lambda _: None, lambda _: None], thread_count=2, name="jobs")
    Path(f"{name} is pruned").touch()

def train(name):
    saver = BackgroundSaver()
    threading._register_atexit(ends.set)
    save_training_state(name, TrainingState(models=[torch.nn.Linear(300, 300)]), saver=saver)
    if saver.in_flight:
        saver.after_commit(lambda: prune(name), what="prune")
    else:
        Path(f"{name} is pruned").touch()  # nothing waits for the end
    globals()["kept"] = saver

if __name__ == "__main__":
    for method in ("fork", "spawn"):
        child = multiprocessing.get_context(method).Process(target=train, args=(method,))
        child.start()
        child.join()
    train("main")
"""


def test_what_waits_for_a_commit_is_done_while_the_interpreter_ends(tmp_path: Path) -> None:
    """In a program and in its forked and spawned processes, though no pool may be used any more."""
    script = tmp_path / "script.py"
    script.write_text(AT_THE_END)
    folder = tmp_path / "folder"
    folder.mkdir()

    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=folder, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip

    assert (done.returncode, done.stderr) == (0, "")
    expected = ("fork", "fork is pruned", "main", "main is pruned", "spawn", "spawn is pruned")
    assert tuple(names(folder)) == expected


@pytest.mark.parametrize("use", ["made", "started", "saved", "in flight"])
def test_a_saver_that_nobody_holds_gives_everything_back(
    job: Job, tmp_path: Path, use: str
) -> None:
    """Also with a save in flight, which is completed first; nothing but the saver is dropped."""
    BackgroundSaver().close()
    with BackgroundSaver() as warm:
        save(warm, job, tmp_path / "warm")
    told = Told()
    with no_leaks(tmp_path):
        saver = BackgroundSaver(BackgroundOptions(overlap=True), sinks=[told])
        if use == "started":
            saver.start()
        if use == "saved":
            save(saver, job, tmp_path / "1")
            saver.drain()
        if use == "in flight":
            with stopped(saver):
                expected = save(saver, job, tmp_path / "1")
                saver.after_commit((tmp_path / "2").mkdir, what="make 2")
                reference = weakref.ref(saver)
                del saver
                gc.collect()
                assert reference() is None
        else:
            del saver
    if use == "in flight":
        assert same_bits(job.loaded(tmp_path / "1"), expected) == []
        assert [type(one) for one in told.events][-1] is Committed
        assert names(tmp_path) == ["1", "2", "warm"]


def test_the_failure_of_a_dropped_saver_is_logged(
    job: Job, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody can be told any more; what waited for the commit is not done."""
    with no_leaks(tmp_path):
        saver = BackgroundSaver()
        with stopped(saver):
            with stage_failing():
                save(saver, job, tmp_path / "1")
            saver.after_commit((tmp_path / "2").mkdir, what="make 2")
            del saver
    assert "a saver was dropped without being closed, and its save failed" in caplog.text
    assert "boom in staging" in caplog.text
    assert names(tmp_path) == []


# -- other things to save --------------------------------------------------------------------------


@both_kinds
def test_a_sharded_state_dict_is_saved_too(make: Make, tmp_path: Path, worker: Kind) -> None:
    """By ``BackgroundSaver.save``: copied before it returns, whatever the dict's tensors are."""
    saver = make(worker=worker, overlap=True)
    tensor = torch.arange(30_000.0)
    state = {"x": ShardedTensor.from_rank_offsets("x", tensor), "values": [1]}
    saver.save(state, tmp_path / "c")
    tensor.zero_()
    state["values"].append(2)  # type: ignore[union-attr]
    saver.drain()
    assert torch.equal(load_plain_tensors(tmp_path / "c")["x"], torch.arange(30_000.0))


@both_kinds
def test_files_are_those_of_a_save_that_waits(make: Make, tmp_path: Path, worker: Kind) -> None:
    """Byte for byte, whatever other layouts have left in the staging memory."""
    saver = make(worker=worker)
    first = nn.Sequential(nn.Linear(257, 255), nn.Linear(13, 17))
    other = nn.Sequential(*(nn.Linear(50, 41) for _ in range(5)), nn.Linear(333, 222))

    for name, model in (("a", first), ("b", other), ("c", first), ("d", other)):
        state = TrainingState(models=[model])
        save_training_state(tmp_path / name, state, saver=saver)
        saver.drain()
        save_training_state(tmp_path / f"{name}-now", state)
        for file in ("__0_0.distcp", "__0_1.distcp"):
            found = (tmp_path / name / file).read_bytes()
            assert found == (tmp_path / f"{name}-now" / file).read_bytes()


@both_kinds
@pytest.mark.parametrize("budget", [None, 8192])
def test_zarr_is_written_in_the_background(
    make: Make, job: Job, tmp_path: Path, worker: Kind, budget: int | None
) -> None:
    """Bit for bit; what does not fit into the budget is written before the call returns."""
    with mock.patch("dist_ckpt._staging_pool.pool.BLOCK_NBYTES", 4096):
        saver = make(worker=worker, staging_budget=budget)
        job.step()
        expected = job.bits()
        options = SaveOptions(backend="zarr")
        save_training_state(tmp_path / "c", job.state, saver=saver, options=options)
        job.step()
        saver.drain()
    assert same_bits(job.loaded(tmp_path / "c"), expected) == []


WRONG: dict[str, dict[str, Any]] = {
    "worker": {"worker": "fork"},
    "max_in_flight": {"max_in_flight": 0},
    "copy_threads": {"copy_threads": 0},
    "staging_budget": {"staging_budget": -1},
    "drain_timeout_secs": {"drain_timeout_secs": float("nan")},
}


@pytest.mark.parametrize("name", WRONG)
def test_options_that_cannot_work_are_refused(name: str) -> None:
    """By name, when they are made."""
    with pytest.raises(ConfigError, match=name):
        BackgroundOptions(**WRONG[name])


@pytest.mark.parametrize("positional", [True, False])
def test_a_step_with_a_closure_waits_behind_it(tmp_path: Path, positional: bool) -> None:
    """Forward and backward in the closure go on under the copy; the change does not."""
    model = torch.nn.Linear(300, 300)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    order: list[str] = []
    with BackgroundSaver(BackgroundOptions(worker="thread", overlap=True)) as saver:
        saved = model.weight.detach().clone()
        state = TrainingState(models=[model], optimizers=[optimizer])
        save_training_state(tmp_path / "c", state, saver=saver)
        machinery = saver._machinery
        finish = machinery.finish_staging
        machinery.finish_staging = lambda: (order.append("waited"), finish())[-1]  # type: ignore[method-assign]

        def closure() -> torch.Tensor:
            order.append("closure")
            loss = model(torch.ones(1, 300)).sum()
            loss.backward()
            return loss

        optimizer.step(closure) if positional else optimizer.step(closure=closure)
        saver.wait()

    assert order == ["closure", "waited"]
    view = CheckpointView.open(tmp_path / "c")
    assert torch.equal(view.full_model(0)["weight"], saved)
    assert not torch.equal(model.weight, saved)
