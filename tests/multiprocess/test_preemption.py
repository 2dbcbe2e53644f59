"""SIGTERM to one rank or to all, at any moment: all stop after the same step, with one save."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from dist_ckpt.background import BackgroundOptions, BackgroundSaver
from dist_ckpt.errors import BarrierTimeoutError
from dist_ckpt.preemption import PreemptionGuard
from dist_ckpt.training_state import is_checkpoint, save_training_state
from tests.faults._background import Job, same_bits, worker_pid
from tests.multiprocess._world import run_ranks

MOST_STEPS = 100_000


def new_job(rank: int, size: int) -> Job:
    """Return the same job each time."""
    torch.manual_seed(0)
    return Job(rank, size, width=20)


def meet() -> None:
    """Do what gradients do in a step: no rank is a whole step ahead of another."""
    dist.all_reduce(torch.ones(1))


def later(secs: float, act: Callable[[], None]) -> threading.Thread:
    """Do something in the middle of whatever the main thread does then."""
    thread = threading.Timer(secs, act)
    thread.start()
    return thread


def to_self() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def train_until_told(job: Job, guard: PreemptionGuard, delay: float | None) -> int:
    """Train; the signal comes after ``delay`` seconds, if it comes to this rank."""
    timer = None if delay is None else later(delay, to_self)
    for _ in range(MOST_STEPS):
        job.step()
        meet()
        if guard.poll():
            if timer is not None:
                timer.join()
            return job.step_number
    raise AssertionError("never told")


# -- at any moment ---------------------------------------------------------------------------------


def many_rounds(rank: int, size: int, folder: str, seed: int) -> tuple[list[int], list[str]]:
    random_delays, problems, stopped = torch.Generator().manual_seed(seed), [], []
    for number in range(6):
        told = [*({rank} for rank in range(size)), set(range(size))][number % (size + 1)]
        secs = (torch.rand(size, generator=random_delays) / 5).tolist()
        job, path = new_job(rank, size), Path(folder, str(number))
        with PreemptionGuard(grace_secs=30.0) as guard:
            stopped.append(train_until_told(job, guard, secs[rank] if rank in told else None))
            save_training_state(path, job.state, options=guard.bounded())
            assert 20 < guard.remaining_secs <= 30
        saved = job.bits()
        problems += same_bits(new_job(rank, size).loaded(path), saved)
        straight = new_job(rank, size)
        for _ in range(stopped[-1]):
            straight.step()
        problems += same_bits(saved, straight.bits())
    return stopped, problems


@pytest.mark.parametrize("size", [1, 2, 3])
def test_all_ranks_stop_after_the_same_step(tmp_path: Path, size: int) -> None:
    """Six times, told to one of the ranks or to all: one checkpoint each, bit for bit."""
    results = run_ranks(many_rounds, size, str(tmp_path), 11 + size)
    assert [problems for _, problems in results] == [[]] * size
    assert len({tuple(stopped) for stopped, _ in results}) == 1, results
    assert {path.name for path in tmp_path.iterdir()} == {str(n) for n in range(6)}
    assert all(is_checkpoint(path) for path in tmp_path.iterdir())


# -- while something is being saved ----------------------------------------------------------------


def told_again_while_saving(rank: int, size: int, folder: str) -> list[str]:
    job = new_job(rank, size)
    with PreemptionGuard() as guard:
        train_until_told(job, guard, 0.0)

        def state() -> Any:
            to_self()
            return job.state()

        sync = os.fsync

        def told_sync(descriptor: int) -> None:
            to_self()
            sync(descriptor)

        with mock.patch.object(os, "fsync", told_sync):
            save_training_state(Path(folder, "a"), state, options=guard.bounded())
    return same_bits(new_job(rank, size).loaded(Path(folder, "a")), job.bits())


def test_a_second_signal_does_not_end_the_save(tmp_path: Path) -> None:
    assert run_ranks(told_again_while_saving, 2, str(tmp_path)) == [[], []]


def told_with_one_in_flight(rank: int, size: int, folder: str) -> list[str]:
    """The signal comes to every process of the job, the workers included, as in SLURM."""
    job = new_job(rank, size)
    saver = BackgroundSaver(BackgroundOptions(), timeout_secs=60)
    with PreemptionGuard() as guard, saver:
        save_training_state(Path(folder, "first"), job.state, saver=saver)
        saver.wait()
        pid = worker_pid(saver)
        assert pid is not None
        os.kill(pid, signal.SIGSTOP if rank == 1 else signal.SIGTERM)
        job.step()
        save_training_state(Path(folder, "in flight"), job.state, saver=saver)
        in_flight = job.bits()
        assert saver.in_flight
        os.kill(pid, signal.SIGTERM)
        train_until_told(job, guard, 0.0)
        os.kill(pid, signal.SIGCONT)
        saver.drain(timeout_secs=guard.remaining_secs)
        save_training_state(Path(folder, "last"), job.state, options=guard.bounded())
    found = new_job(rank, size)
    return [
        *same_bits(found.loaded(Path(folder, "in flight")), in_flight),
        *same_bits(found.loaded(Path(folder, "last")), job.bits()),
    ]


def test_what_is_in_flight_ends_before_the_last_save(tmp_path: Path) -> None:
    assert run_ranks(told_with_one_in_flight, 2, str(tmp_path)) == [[], []]
    assert {path.name for path in tmp_path.iterdir()} == {"first", "in flight", "last"}


# -- what goes wrong -------------------------------------------------------------------------------


def told_alone(rank: int, size: int, folder: str) -> str:
    """Rank 1 has left the loop without a word."""
    job = new_job(rank, 1)
    guard = PreemptionGuard(grace_secs=4.0).install()
    if rank == 1:
        guard.close()
        dist.distributed_c10d._get_default_store().wait(["over"])
        return ""
    to_self()
    assert guard.poll()
    with pytest.raises(BarrierTimeoutError) as caught:
        save_training_state(Path(folder, "a"), job.state, options=guard.bounded())
    guard.close()
    dist.distributed_c10d._get_default_store().set("over", "")
    return str(caught.value)


def test_without_the_others_the_save_fails_within_the_grace(tmp_path: Path) -> None:
    told, _ = run_ranks(told_alone, 2, str(tmp_path))
    assert "ranks [1] of 2 did not arrive" in told
    assert not list(tmp_path.iterdir())


def save_while_storage_hangs(rank: int, size: int, folder: str) -> None:
    job = new_job(rank, size)
    guard = PreemptionGuard(grace_secs=2.0, ends_process=True).install()
    save_training_state(Path(folder, "before"), job.state)
    train_until_told(job, guard, 0.0)

    def hang(descriptor: int) -> None:
        threading.Event().wait()

    with mock.patch.object(os, "fsync", hang):
        save_training_state(Path(folder, "after"), job.state, options=guard.bounded())


@pytest.mark.parametrize("size", [1, 2])
def test_with_storage_that_hangs_the_process_ends_after_the_grace(
    tmp_path: Path, size: int
) -> None:
    """It exits as one that the signal has ended; of the save that hung nothing is visible."""
    outcomes = run_ranks(
        save_while_storage_hangs, size, str(tmp_path), expect_errors=True, timeout_secs=60
    )
    assert [outcome.exit_code for outcome in outcomes] == [143] * size
    for outcome in outcomes:
        assert "the grace is over, and this process has not stopped" in outcome.log
    assert {path.name for path in tmp_path.iterdir() if not path.name.startswith(".")} == {"before"}
    assert is_checkpoint(tmp_path / "before")
