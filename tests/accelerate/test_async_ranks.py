"""Saving in the background on two ranks: resumes, and failures that all ranks hear of together."""

from __future__ import annotations

import os
import random
import signal
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from accelerate.data_loader import DataLoaderShard
from accelerate.utils import ProjectConfiguration
from torch.utils.data import TensorDataset

from accelerate_dist_ckpt import DistCkptIO
from dist_ckpt.errors import AsyncSaveError, ConfigError
from dist_ckpt.training_state import CheckpointView, is_checkpoint
from tests.accelerate._jobs import add_loader, build, differing, run_epochs, state_of, train
from tests.accelerate._traces import full_disk, hidden, saver_of, stopped_worker, traces
from tests.multiprocess._world import run_ranks

pytestmark = pytest.mark.multiprocess


def wait_settled(job: Any) -> None:
    """Return when nothing is in flight on any rank, and raise nothing of it."""
    queue = saver_of(job.accelerator)._queue
    queue.wait_for(queue.is_idle, 60, "a test")
    dist.barrier()


# -- resume ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """How two ranks train and save."""

    id: str
    mode: str = "ddp"
    overlap: bool = False


RESUMES = (
    Resume(id="ddp"),
    Resume(id="ddp, overlap", overlap=True),
    Resume(id="fsdp2", mode="fsdp2"),
    Resume(id="fsdp2, overlap", mode="fsdp2", overlap=True),
)


def resume_job(rank: int, world_size: int, path: str, case: Resume, resume: bool) -> Any:
    io = DistCkptIO(async_save=not resume, overlap=case.overlap)
    before = traces()
    job = build(case.mode, seed=5, io=io)
    add_loader(job)
    random.seed(rank)
    np.random.seed(rank)
    torch.manual_seed(rank)
    if resume:
        job.accelerator.load_state(path)
        seen = run_epochs(job, epochs=1, skip=3)
        seen += run_epochs(job, epochs=2, first_epoch=1)
    else:
        seen = run_epochs(job, epochs=2, save_after=3, path=path)[3:]
    job.handle.remove()
    return seen, float(torch.rand(())), state_of(job), before == traces()


@pytest.mark.parametrize("case", RESUMES, ids=lambda case: case.id)
def test_a_resume_is_equal_to_the_bit(tmp_path: Path, case: Resume) -> None:
    """What was saved while training went on is the state at the call, on each rank."""
    path = str(tmp_path / "ckpt")
    straight = run_ranks(resume_job, 2, path, case, False)
    assert [one.name for one in tmp_path.iterdir()] == ["ckpt"]

    resumed = run_ranks(resume_job, 2, path, case, True)

    for (seen, drawn, state, clean), (seen2, drawn2, state2, _) in zip(
        straight, resumed, strict=True
    ):
        assert seen == seen2
        assert drawn == drawn2
        assert differing(state, state2) == []
        assert clean  # no process, thread, file or memory is left by `remove`


# -- failures --------------------------------------------------------------------------------------


def steps_until_told(job: Any, limit: int = 20) -> tuple[int, str]:
    """Train until a failure is raised; return at which step, and which."""
    for number in range(limit):
        try:
            train(job, 1)
        except AsyncSaveError as error:
            return number, str(error)
    return limit, ""


def project_of(root: str, **fields: Any) -> Any:
    config = ProjectConfiguration(root, automatic_checkpoint_naming=True, total_limit=1)
    job = build("ddp", seed=1, io=DistCkptIO(async_save=True, **fields), project_config=config)
    train(job, 1)
    job.accelerator.save_state()
    saver_of(job.accelerator).drain()
    return job


def lose_workers(rank: int, world_size: int, root: str) -> Any:
    job = project_of(root)
    kept = state_of(job)
    told = []
    for loser in (1, 0):
        train(job, 1)
        if rank == loser:
            with stopped_worker(job.accelerator) as pid:
                job.accelerator.save_state()
                os.kill(pid, signal.SIGKILL)
        else:
            job.accelerator.save_state()
        told.append(steps_until_told(job, limit=2000))
        dist.barrier()
    names = sorted(path.name for path in Path(root, "checkpoints").iterdir())
    dist.barrier()
    job.accelerator.save_state()
    expected = state_of(job)
    train(job, 1)
    job.accelerator.load_state()
    wrong = differing(expected, state_of(job))
    job.handle.remove()
    return told, names, wrong, bool(differing(kept, expected))


def test_a_workers_death_is_told_at_the_same_batch(tmp_path: Path) -> None:
    """On both ranks, whoever lost its worker; the older checkpoint stands, the next save works."""
    first, second = run_ranks(lose_workers, 2, str(tmp_path))

    assert [step for step, _ in first[0]] == [step for step, _ in second[0]]
    for told, names, wrong, moved in (first, second):
        assert ["SIGKILL" in text for _, text in told] == [True, True]
        assert "checkpoint_1" in told[0][1]
        assert "checkpoint_2" in told[1][1]
        assert names == ["checkpoint_0"]  # total_limit=1 removed nothing
        assert (wrong, moved) == ([], True)
    assert hidden(tmp_path) == []
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["checkpoint_3"]


def fill_one_disk(rank: int, world_size: int, root: str) -> Any:
    job = project_of(root)

    def hook(models: Any, weights: Any, output_dir: str) -> None:
        Path(output_dir, f"by-{rank}.txt").write_text("hook")

    job.accelerator.register_save_state_pre_hook(hook)
    if rank == 1:
        with full_disk(job.accelerator):
            job.accelerator.save_state()
            wait_settled(job)
    else:
        job.accelerator.save_state()
        wait_settled(job)
    left = hidden(Path(root))
    evaluated = 0
    if rank == 0:  # alone, between a failure and its telling
        evaluated = len(list(DataLoaderShard(TensorDataset(torch.zeros(5)))))
    told = steps_until_told(job)
    job.accelerator.save_state()
    job.accelerator.end_training()
    return told, left, evaluated


def test_one_full_disk_is_told_to_all(tmp_path: Path) -> None:
    """At one batch, with rank and cause, also if rank 0 read batches alone meanwhile."""
    first, second = run_ranks(fill_one_disk, 2, str(tmp_path))

    assert first[0][0] == second[0][0] < 3
    for (_, text), left, _ in (first, second):
        assert "rank 1" in text
        assert "File too large" in text
        assert left == []
    assert first[2] == 5
    last = tmp_path / "checkpoints" / "checkpoint_2"
    assert is_checkpoint(last)
    assert {"by-0.txt", "by-1.txt"} <= {path.name for path in last.iterdir()}
    assert [path.name for path in last.parent.iterdir()] == ["checkpoint_2"]
    assert hidden(tmp_path) == []


def leave_one_rank(rank: int, world_size: int, root: str) -> Any:
    job = build("ddp", seed=1, io=DistCkptIO(async_save=True, drain_timeout_secs=60.0))
    train(job, 1)
    with job.handle:
        job.accelerator.save_state(f"{root}/ckpt")
        if rank == 1:
            raise RuntimeError("only rank 1")
    return is_checkpoint(f"{root}/ckpt")


def test_an_exception_on_one_rank_lets_the_save_be_committed(tmp_path: Path) -> None:
    """The workers need nobody; the user's exception comes out unharmed, and nobody hangs."""
    first, second = run_ranks(leave_one_rank, 2, str(tmp_path), expect_errors=True, timeout_secs=60)

    assert first.value is True
    assert (second.error_type, second.message) == ("RuntimeError", "only rank 1")
    assert hidden(tmp_path) == []


# -- who is here -----------------------------------------------------------------------------------


def save_alone(rank: int, world_size: int, root: str) -> Any:
    io = DistCkptIO(async_save=True, lone_rank_timeout_secs=0.5)
    job = build("ddp", seed=1, io=io)
    train(job, 1)
    job.accelerator.save_state(f"{root}/last")
    train(job, 1)
    seen: list[bool] = []
    if rank == 0:
        with pytest.warns(UserWarning, match="rank 0 only"):
            job.accelerator.save_state(f"{root}/last")
        seen = [is_checkpoint(f"{root}/last"), saver_of(job.accelerator).in_flight == ()]
    expected = state_of(job)
    dist.barrier()
    train(job, 1)
    with pytest.warns(UserWarning, match="has no random state") if rank else nullcontext():
        job.accelerator.load_state(f"{root}/last")
    wrong = differing(expected, state_of(job))
    size = CheckpointView.open(f"{root}/last").world_size
    job.accelerator.save_state(f"{root}/all")
    job.handle.remove()
    return seen, wrong, size, is_checkpoint(f"{root}/all")


def test_rank_0_alone_blocks_and_comes_after_what_is_in_flight(tmp_path: Path) -> None:
    """A save of rank 0 only is there when it returns, and is not overwritten by an older one."""
    first, second = run_ranks(save_alone, 2, str(tmp_path))

    assert first[0] == [True, True]
    for _, wrong, size, after in (first, second):
        assert (wrong, size, after) == ([], 1, True)


def choose_differently(rank: int, world_size: int, root: str) -> Any:
    job = build("ddp", seed=1, io=DistCkptIO(async_save=rank == 1))
    told = ""
    try:
        job.accelerator.save_state(f"{root}/ckpt")
    except ConfigError as error:
        told = str(error)
    job.handle.remove()
    return told, job.accelerator.save_iteration


def test_ranks_that_choose_differently_are_told(tmp_path: Path) -> None:
    """An environment variable on one node only: no hang, nothing is written."""
    outcomes = run_ranks(choose_differently, 2, str(tmp_path), timeout_secs=60)

    for told, iteration in outcomes:
        assert "async_save is on for 1 of 2 ranks only, for rank 1 among them" in told
        assert iteration == 0
    assert list(tmp_path.iterdir()) == []
