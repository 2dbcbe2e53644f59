"""The process harness itself: results, errors, deaths and hangs."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import sys
import threading
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.multiprocess._world import WorldError, run_ranks

pytestmark = pytest.mark.multiprocess


def all_reduce(rank: int, world_size: int, start: torch.Tensor) -> torch.Tensor:
    value = start + rank
    dist.all_reduce(value)
    assert len(list(Path("/proc/self/task").iterdir())) >= 1
    return value * world_size


def raise_on_one(rank: int, world_size: int) -> int:
    if rank == 1:
        raise ValueError("only rank 1")
    dist.barrier()
    return rank


def die_on_one(rank: int, world_size: int) -> int:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return rank


def spawned(pipe: Connection, code: int) -> None:
    atexit.register(print, "left", os.getpid())
    pipe.send((os.environ["SPAWNED_BY"], str(Path.cwd()), os.getpgrp(), os.umask(0)))
    if code < 0:
        os.kill(os.getpid(), -code)
    sys.exit(code)


def spawn_two(rank: int, world_size: int, folder: str) -> list[object]:
    """Return what spawned processes have of this one, and how they ended."""
    os.chdir(folder)
    os.umask(0o27)
    os.environ["SPAWNED_BY"] = str(rank)
    mine = (str(rank), folder, os.getpgrp(), 0o27)
    found: list[object] = []
    for code in (3, -signal.SIGKILL):
        ours, theirs = multiprocessing.Pipe()
        process = multiprocessing.get_context("spawn").Process(target=spawned, args=(theirs, code))
        process.start()
        found.append(ours.recv() == mine)
        process.join()
        found.append(process.exitcode)
    log = Path("/proc/self/fd/1").read_text()
    return [*found, log.count("left"), f"left {process.pid}" in log]


def hang_on_one(rank: int, world_size: int) -> int:
    if rank == 1:
        threading.Event().wait()
    return rank


def own_group(rank: int, world_size: int) -> int:
    dist.init_process_group("gloo", init_method="env://")
    assert dist.get_world_size() == world_size
    dist.barrier()
    return rank


def test_results_come_back_by_rank() -> None:
    """Values travel both ways and collectives work, at several world sizes."""
    for size in (1, 2, 3):
        results = run_ranks(all_reduce, size, torch.ones(2))

        total = size + sum(range(size))
        assert [r.tolist() for r in results] == [[total * size] * 2] * size


def test_an_error_names_the_rank() -> None:
    """One failing rank fails the run, with its own traceback."""
    with pytest.raises(WorldError, match=r"(?s)rank\(s\).*rank 1: ValueError: only rank 1"):
        run_ranks(raise_on_one, 2)


def test_outcomes_tell_errors_and_deaths() -> None:
    """With expect_errors each rank's fate is returned."""
    first, second = run_ranks(die_on_one, 2, expect_errors=True)

    assert first.ok
    assert first.value == 0
    assert not second.finished
    assert second.exit_code == -signal.SIGKILL


def test_a_hang_shows_the_stacks() -> None:
    """A rank that does not finish is killed and its stacks are in the report."""
    with pytest.raises(WorldError, match=r"(?s)\[1\] did not finish.*hang_on_one"):
        run_ranks(hang_on_one, 2, timeout_secs=2)


def test_spawned_processes_are_as_their_parent(tmp_path: Path) -> None:
    """In ranks they are forks: with its environment, folder, group, umask and output."""
    expected = [True, 3, True, -signal.SIGKILL, 1, False]

    assert run_ranks(spawn_two, 2, str(tmp_path)) == [expected] * 2


def test_ranks_can_make_their_own_group() -> None:
    """The env:// rendezvous works without further settings."""
    assert run_ranks(own_group, 2, init_process_group=False) == [0, 1]
