"""Background saves of real ranks: they agree without the threads that train, and tell alike."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from dist_ckpt import SaveOptions
from dist_ckpt.background import BackgroundOptions, BackgroundSaver
from dist_ckpt.errors import AsyncSaveError, CheckpointingException
from dist_ckpt.training_state import is_checkpoint, remove_checkpoint, save_training_state
from tests.faults._background import Job, same_bits, worker_pid
from tests.faults._leaks import hidden_entries
from tests.multiprocess._world import run_ranks

pytestmark = pytest.mark.multiprocess

Kind = Literal["process", "thread"]
PATIENT = SaveOptions(timeout_secs=60)
both_kinds = pytest.mark.parametrize("worker", ["process", "thread"])


def saver_of(**options: Any) -> BackgroundSaver:
    return BackgroundSaver(BackgroundOptions(**options), timeout_secs=60)


def save(saver: BackgroundSaver, job: Job, path: Path) -> dict[str, torch.Tensor]:
    job.step()
    expected = job.bits()
    save_training_state(path, job.state, saver=saver, options=PATIENT)
    return expected


def failing_to(what: str) -> Any:
    targets = {
        "stage": "dist_ckpt._worker.submit._stage",
        "get memory": "dist_ckpt._staging_pool.pool.StagingPool.acquire",
    }
    return mock.patch(targets[what], side_effect=OSError(12, f"boom: cannot {what}"))


def message_of(call: Any) -> str:
    """Return what a call raises, as text; empty if it does not."""
    try:
        call()
    except CheckpointingException as error:
        return f"{type(error).__name__}: {error}"
    return ""


# -- commits ---------------------------------------------------------------------------------------


def saves_and_loads(rank: int, size: int, folder: str, worker: Kind, overlap: bool) -> list[str]:
    job, saver = Job(rank, size), saver_of(worker=worker, overlap=overlap, max_in_flight=2)
    expected = {n: save(saver, job, Path(folder, str(n))) for n in range(4)}
    saver.close()
    return [d for n in expected for d in same_bits(job.loaded(Path(folder, str(n))), expected[n])]


@both_kinds
@pytest.mark.parametrize("overlap", [False, True])
def test_each_checkpoint_holds_the_state_of_all_ranks_at_the_call(
    worker: Kind, overlap: bool, tmp_path: Path
) -> None:
    """Replicated and sharded parameters, buffers, optimizers, values of each rank: bit for bit."""
    size = 3
    assert run_ranks(saves_and_loads, size, str(tmp_path), worker, overlap) == [[]] * size
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["0", "1", "2", "3"]


def stands_still(rank: int, size: int, folder: str) -> tuple[bool, list[str]]:
    job, saver, path = Job(rank, size), saver_of(), Path(folder, "c")
    save(saver, job, Path(folder, "warm"))
    saver.drain()
    expected = save(saver, job, path)
    Path(folder, f"pid-{rank}").write_text(f"{os.getpid()}")
    os.kill(os.getpid(), signal.SIGSTOP)
    was_there = is_checkpoint(path)
    saver.close()
    return was_there, same_bits(job.loaded(path), expected)


def test_a_save_commits_while_all_training_processes_stand_still(tmp_path: Path) -> None:
    """Stopped by a signal, every thread of them: nobody but the workers takes part."""
    path, pids = tmp_path / "c", [tmp_path / f"pid-{rank}" for rank in range(2)]
    seen: list[bool] = []

    def watch() -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and not seen:
            are_stopped = all(pid.exists() and _state(pid.read_text()) == "T" for pid in pids)
            if are_stopped and path.exists():
                seen.append(True)
            threading.Event().wait(0.02)
        for pid in pids:
            os.kill(int(pid.read_text()), signal.SIGCONT)

    watcher = threading.Thread(target=watch)
    watcher.start()
    outcomes = run_ranks(stands_still, 2, str(tmp_path))
    watcher.join()
    assert seen == [True]
    assert outcomes == [(True, [])] * 2


def _state(pid: str) -> str:
    if not pid:
        return ""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def reduces_meanwhile(rank: int, size: int, folder: str) -> list[str]:
    job, saver, problems = Job(rank, size), saver_of(worker="thread", max_in_flight=2), []
    for n in range(4):
        expected = save(saver, job, Path(folder, "c"))
        # In flight, in another order than any background work could know of; rank 1 is late.
        if rank == 1 and n % 2:
            saver.wait()
        for m in range(30):
            total = torch.tensor([float(rank + m)])
            dist.all_reduce(total)
            if total.item() != 2 * m + 1:
                problems.append(f"{m}: {total.item()}")
        dist.barrier()
        saver.poll()
    saver.close()
    return [*problems, *same_bits(job.loaded(Path(folder, "c")), expected)]


def test_training_s_own_collectives_go_on_meanwhile(tmp_path: Path) -> None:
    """Nothing in the background uses its process group: nothing to mix up, nothing to wait for."""
    assert run_ranks(reduces_meanwhile, 2, str(tmp_path)) == [[], []]


def holds_the_interpreter(rank: int, size: int, folder: str) -> bool:
    job, saver, path = Job(rank, size), saver_of(), Path(folder, "c")
    save(saver, job, Path(folder, "warm"))
    saver.drain()
    dist.barrier()
    count = 30_000_000
    begun = time.perf_counter()
    assert sum(range(count)) > 0
    count = int(count / (time.perf_counter() - begun))  # about a second
    save(saver, job, path)
    begun_ns = time.time_ns()
    assert sum(range(count)) > 0  # one call of C: no other thread of this process runs
    ended_ns = time.time_ns()
    saver.close()
    return begun_ns - 1_000_000_000 < path.stat().st_ctime_ns < ended_ns


def test_a_save_commits_while_training_holds_the_interpreter(tmp_path: Path) -> None:
    """The worker shares no lock with training: it was renamed into place during that one call."""
    assert run_ranks(holds_the_interpreter, 2, str(tmp_path)) == [True, True]


def one_ends(rank: int, size: int, folder: str, who: int) -> str:
    job, saver, path = Job(rank, size), saver_of(), Path(folder, "c")
    save(saver, job, path)
    if rank == who:
        os._exit(0)  # without a word: no atexit, no close
    told = message_of(lambda: saver.wait(path))
    saver.close()
    return told


@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_that_ends_after_its_save_returned_does_not_stop_it(
    who: int, tmp_path: Path
) -> None:
    """What it staged is its worker's, rank 0's too."""
    outcomes = run_ranks(one_ends, 2, str(tmp_path), who, expect_errors=True)
    assert outcomes[1 - who].value == ""
    assert is_checkpoint(tmp_path / "c")
    assert hidden_entries([tmp_path]) == []


def one_dies_early(rank: int, size: int, folder: str) -> str:
    job, saver, path = Job(rank, size), saver_of(), Path(folder, "c")
    if rank == 1:
        with mock.patch("dist_ckpt._worker.submit._stage", side_effect=lambda *_: os._exit(9)):
            save(saver, job, path)
    with mock.patch("dist_ckpt._worker.queue._AGREE_SECS", 1.0):  # of two ranks that are there
        told = message_of(lambda: (save(saver, job, path), saver.wait(path), saver.poll()))
    saver.close()
    return told


def test_a_rank_that_ends_while_it_stages_fails_the_save(tmp_path: Path) -> None:
    """Soon, by its worker, which says so; nothing is left."""
    begun = time.monotonic()
    alive, dead = run_ranks(one_dies_early, 2, str(tmp_path), expect_errors=True)
    assert dead.exit_code == 9
    assert "AsyncSaveError" in alive.value
    assert "rank 1's training process ended while it staged" in alive.value
    assert time.monotonic() - begun < 50
    assert list(tmp_path.iterdir()) == []


# -- failures --------------------------------------------------------------------------------------


def one_fails(rank: int, size: int, folder: str, who: int, what: str) -> dict[str, Any]:
    job, saver, folder_path = Job(rank, size), saver_of(), Path(folder)
    save(saver, job, folder_path / "good")
    saver.drain()
    begun = time.monotonic()
    if rank == who:
        with failing_to(what):
            save(saver, job, folder_path / "bad")
    else:
        save(saver, job, folder_path / "bad")
    told, polls = "", 0
    while not told and time.monotonic() < begun + 50:
        polls += 1
        told = message_of(saver.poll)
        # Ranks train at different speeds; what they count is batches.
        weights = torch.ones(30 + 100 * rank, 30 + 100 * rank)
        for _ in range(20):
            weights = weights @ weights / weights.shape[0]
    again = save(saver, job, folder_path / "bad")
    saver.close()
    differing = same_bits(job.loaded(folder_path / "bad"), again)
    return {"told": told, "polls": polls, "soon": time.monotonic() - begun < 30, "d": differing}


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("what", ["stage", "get memory"])
def test_what_one_rank_cannot_do_is_told_to_all_at_the_same_poll(
    who: int, what: str, tmp_path: Path
) -> None:
    """By rank and reason, within moments, not at a time-out; the next save to that path is good."""
    first, second = run_ranks(one_fails, 2, str(tmp_path), who, what)
    assert f"rank {who}" in first["told"]
    assert f"boom: cannot {what}" in first["told"]
    assert first == second
    assert first["soon"]
    assert first["d"] == []
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["bad", "good"]


def waits_late(rank: int, size: int, folder: str) -> tuple[str, str]:
    job, saver, path = Job(rank, size), saver_of(), Path(folder, "c")
    with failing_to("stage"):
        save(saver, job, path)
    if rank == 1:  # it has seen the end of it when it waits, rank 0 has not
        saver._queue.wait_for(saver._queue.is_idle, 30, "a test")
    first = message_of(lambda: saver.wait(path))
    saver.close()
    return first, message_of(saver.poll)


def test_waiting_for_a_path_raises_on_all_ranks_or_on_none(tmp_path: Path) -> None:
    """Also on one where that save has ended before the wait."""
    (first, later), other = run_ranks(waits_late, 2, str(tmp_path))
    assert "boom: cannot stage" in first
    assert later == ""
    assert other == (first, later)


def refused_between(rank: int, size: int, folder: str) -> list[str]:
    """A save in flight, one that is refused while it is planned, one more: which has ended?"""
    job, saver, home = Job(rank, size), saver_of(max_in_flight=2, worker="thread"), Path(folder)
    told: list[str] = []
    for round_number in range(8):
        with failing_to("stage"):
            save(saver, job, home / f"{round_number}-bad")
        if rank == round_number % 2:
            saver._queue.wait_for(saver._queue.is_idle, 30, "a test")

        def broken() -> Any:
            raise ValueError("boom")

        for name, state in (("refused", broken), ("next", job.state)):
            path = home / f"{round_number}-{name}"
            told.append(
                message_of(lambda p=path, s=state: save_training_state(p, s, saver=saver))[:60]
            )
        told.append(message_of(saver.drain)[:60])
    saver.close()
    return told


def test_refused_saves_do_not_count_for_what_a_save_raises(tmp_path: Path) -> None:
    """A failure is raised by the same call everywhere, though some ranks know of it earlier."""
    first, second = run_ranks(refused_between, 2, str(tmp_path))
    assert first == second


def describes_wrongly(rank: int, size: int, folder: str) -> tuple[str, str]:
    job, saver, path = Job(rank, size), saver_of(), Path(folder, "c")

    def state() -> Any:
        if rank == 1:
            raise ValueError("boom in describing")
        return job.state()

    told = message_of(lambda: save_training_state(path, state, saver=saver, options=PATIENT))
    save(saver, job, path)
    saver.close()
    return told, message_of(saver.poll)


def test_a_description_that_fails_on_one_rank_is_raised_on_all(tmp_path: Path) -> None:
    """By the call itself; the next save goes on."""
    first, second = run_ranks(describes_wrongly, 2, str(tmp_path))
    assert first == second
    assert "rank 1: ValueError: boom in describing" in first[0]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["c"]


# -- workers that die ------------------------------------------------------------------------------


def loses_a_worker(rank: int, size: int, folder: str, who: int) -> tuple[str, bool, list[str]]:
    job, saver, home = Job(rank, size), saver_of(), Path(folder)
    save(saver, job, home / "warm")
    saver.drain()
    dist.barrier()  # rank 0's worker tells the others how it ended: it may not be stopped before
    pid = worker_pid(saver)
    assert pid is not None
    if rank == who:
        os.kill(pid, signal.SIGSTOP)
    save(saver, job, home / "bad")
    begun = time.monotonic()
    if rank == who:
        os.kill(pid, signal.SIGKILL)
    told = message_of(lambda: saver.wait(home / "bad"))
    was_soon = time.monotonic() - begun < 10
    again = save(saver, job, home / "bad")
    saver.close()
    return told, was_soon, same_bits(job.loaded(home / "bad"), again)


@pytest.mark.parametrize("who", [0, 1])
def test_a_killed_worker_is_told_to_all_ranks_soon(who: int, tmp_path: Path) -> None:
    """With its signal and rank; the next save has another worker, and another hub if it was 0's."""
    outcomes = run_ranks(loses_a_worker, 2, str(tmp_path), who)
    for told, was_soon, differing in outcomes:
        assert told.startswith("AsyncSaveError")
        assert f"the worker of rank {who}" in told
        assert "SIGKILL" in told
        assert was_soon
        assert differing == []
    assert outcomes[0] == outcomes[1]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["bad", "warm"]


def killed_behind_the_exchange(rank: int, size: int, folder: str) -> tuple[str, list[str]]:
    job, saver, path = Job(rank, size), saver_of(), Path(folder, "c")
    save(saver, job, path)
    saver.drain()
    if rank == 0:
        for n in range(3000):  # the user's own: they take the worker some time to put away
            (path / f"note-{n}").touch()
    dist.barrier()
    old = path.stat().st_ino
    expected = save(saver, job, path)
    if rank == 0:
        deadline = time.monotonic() + 30
        while path.stat().st_ino == old and time.monotonic() < deadline:
            pass
        pid = worker_pid(saver)
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
    told = message_of(saver.drain)
    dist.barrier()
    left = hidden_entries([Path(folder)])
    differing = same_bits(job.loaded(path), expected)
    saver.close()
    return told, [*left, *differing]


def test_a_worker_killed_after_the_exchange_has_committed(tmp_path: Path) -> None:
    """All ranks are told so; what it had not tidied up is tidied up."""
    assert run_ranks(killed_behind_the_exchange, 2, str(tmp_path)) == [("", []), ("", [])]
    assert len(list((tmp_path / "c").glob("note-*"))) == 3000


def kills_both(rank: int, size: int, folder: str) -> str:
    job, saver, path = Job(rank, size), saver_of(), Path(folder, "c")
    save(saver, job, Path(folder, "warm"))
    saver.drain()
    dist.barrier()  # rank 0's worker tells the others how it ended: it may not be stopped before
    pid = worker_pid(saver)
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    save(saver, job, path)
    os.kill(pid, signal.SIGKILL)
    told = message_of(saver.drain)
    save(saver, job, path)
    saver.close()
    return told


def test_all_workers_killed_at_once(tmp_path: Path) -> None:
    """As when a host runs out of memory: one failure everywhere, and the next save is good."""
    first, second = run_ranks(kills_both, 2, str(tmp_path))
    assert first == second
    assert "SIGKILL" in first
    assert is_checkpoint(tmp_path / "c")
    assert hidden_entries([tmp_path]) == []


def saves_arrays(rank: int, size: int, folder: str) -> tuple[str, list[str], list[str]]:
    job, saver, home = Job(rank, size, width=20), saver_of(max_in_flight=2), Path(folder)
    options = SaveOptions(backend="zarr", timeout_secs=60)

    def save_array(name: str) -> dict[str, torch.Tensor]:
        job.step()
        expected = job.bits()
        save_training_state(home / name, job.state, saver=saver, options=options)
        return expected

    expected = {name: save_array(name) for name in ("a", "b", "a")}
    saver.drain()
    differing = [d for name in expected for d in same_bits(job.loaded(home / name), expected[name])]
    dist.barrier()
    pid = worker_pid(saver)
    assert pid is not None
    if rank == 1:
        os.kill(pid, signal.SIGSTOP)
    save_array("bad")
    if rank == 1:
        os.kill(pid, signal.SIGKILL)
    told = message_of(saver.drain)
    again = save_array("bad")
    saver.close()
    return told, differing, same_bits(job.loaded(home / "bad"), again)


def test_formats_that_write_by_themselves_do_so_too(tmp_path: Path) -> None:
    """Zarr: exact, in order, and a killed worker is told to all; nothing of its save is left."""
    first, second = run_ranks(saves_arrays, 2, str(tmp_path))
    assert first == second
    assert "SIGKILL" in first[0]
    assert first[1:] == ([], [])
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["a", "b", "bad"]


def refuses_others(rank: int, size: int, folder: str) -> str:
    class Elsewhere:
        """Ranks that meet, but in no store."""

        def __init__(self) -> None:
            from dist_ckpt._comm import default_communicator

            self._inner = default_communicator(timeout_secs=60)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._inner, name)

    job, saver = Job(rank, size), saver_of()
    comm: Any = Elsewhere()
    told = message_of(
        lambda: save_training_state(
            Path(folder, "c"), job.state, saver=saver, communicator=comm, options=PATIENT
        )
    )
    saver.close()
    return told


def test_ranks_that_meet_in_no_store_are_refused(tmp_path: Path) -> None:
    """At once and on all: they could not be told of a failure."""
    first, second = run_ranks(refuses_others, 2, str(tmp_path))
    assert first == second
    assert "ranks that meet in a store" in first
    assert list(tmp_path.iterdir()) == []


def saves_past_the_saver(rank: int, size: int, folder: str) -> list[str]:
    job, saver, home = Job(rank, size), saver_of(), Path(folder)
    save(saver, job, home / "c")
    saver.drain()
    pid = worker_pid(saver)
    assert pid is not None
    dist.barrier()  # rank 0's worker tells the others how it ended: it may not be stopped before
    if rank == 0:
        os.kill(pid, signal.SIGSTOP)
        (home / "link").symlink_to("c")
    expected = save(saver, job, home / "c")
    before = sorted(home.iterdir())
    again = home / "link" / ".." / "c"
    problems = []
    with BackgroundSaver(timeout_secs=60) as other:
        calls = [
            lambda: save_training_state(again, job.state, options=PATIENT),
            lambda: save_training_state(home / "c", job.state, saver=other, options=PATIENT),
            *[lambda: remove_checkpoint(home / "c")] * (rank == 0),
        ]
        for call in calls:
            told = message_of(call)
            if "wait(path)" not in told or "still writing" not in told:
                problems.append(told)
        dist.barrier()
    if rank == 0 and sorted(home.iterdir()) != before:
        problems.append(f"{before} became {sorted(home.iterdir())}")
    dist.barrier()
    if rank == 0:
        os.kill(pid, signal.SIGCONT)
    saver.wait(home / "c")
    problems += same_bits(job.loaded(home / "c"), expected)
    save_training_state(home / "c", job.state, options=PATIENT)
    saver.close()
    return problems


def test_a_path_in_flight_is_written_and_removed_by_nobody_else(tmp_path: Path) -> None:
    """Every rank is told what to wait for, and nothing is written; afterwards it may be saved to."""
    assert run_ranks(saves_past_the_saver, 2, str(tmp_path)) == [[], []]
    assert is_checkpoint(tmp_path / "c")
    assert hidden_entries([tmp_path]) == []


def fails_and_raises(rank: int, size: int, folder: str) -> str:
    job = Job(rank, size)
    with pytest.raises(AsyncSaveError) as caught, saver_of() as saver, failing_to("stage"):
        save(saver, job, Path(folder, "c"))
    return f"{sorted(caught.value.failures)}"


def test_a_failure_has_what_each_rank_failed_with(tmp_path: Path) -> None:
    """By rank, in ``failures``, on every rank."""
    assert run_ranks(fails_and_raises, 2, str(tmp_path)) == ["[0, 1]", "[0, 1]"]


# -- permissions -----------------------------------------------------------------------------------


def modes(path: Path) -> dict[str, str]:
    inside = {one.relative_to(path): one for one in path.rglob("*")}
    return {str(name): oct(one.stat().st_mode) for name, one in (inside | {Path(): path}).items()}


@both_kinds
@pytest.mark.parametrize("backend", ["torch_dist", "zarr"])
def test_files_have_the_umask_of_the_save(tmp_path: Path, worker: Kind, backend: str) -> None:
    """Not that of the worker's start: files and directories are as a synchronous save makes them."""
    options = SaveOptions(backend=backend)  # type: ignore[arg-type]  # one of the two
    job = Job(rank=0, size=1)
    job.step()
    before = os.umask(0o022)
    try:
        with saver_of(worker=worker) as saver:
            for mask in (0o022, 0o077, 0o007):
                os.umask(mask)
                place = tmp_path / oct(mask)
                save_training_state(place / "background", job.state, saver=saver, options=options)
                saver.drain()
                save_training_state(place / "blocking", job.state, options=options)

                assert modes(place / "background") == modes(place / "blocking")
                assert all(int(mode, 8) & mask == 0 for mode in modes(place / "blocking").values())
    finally:
        os.umask(before)
