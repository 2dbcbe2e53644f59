"""The process harness itself: results, errors, deaths and hangs."""

from __future__ import annotations

import os
import signal
import threading
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


def test_ranks_can_make_their_own_group() -> None:
    """The env:// rendezvous works without further settings."""
    assert run_ranks(own_group, 2, init_process_group=False) == [0, 1]
