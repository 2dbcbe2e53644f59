"""``DistCkptIO(preemption=True)``: SIGTERM leads to one more save, and the next run goes on there."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from accelerate.utils import ProjectConfiguration

from accelerate_dist_ckpt import DistCkptIO
from dist_ckpt import preemption
from dist_ckpt.errors import CheckpointingException
from dist_ckpt.preemption import Preempted, PreemptionGuard
from dist_ckpt.training_state import is_checkpoint
from tests.accelerate._jobs import Job, add_loader, build, differing, reset, state_of, step
from tests.accelerate._traces import saver_of, stopped_worker
from tests.multiprocess._world import run_ranks

PER_EPOCH, MOST_STEPS = 5, 12


class Count:
    """What scripts count for themselves."""

    def __init__(self) -> None:
        self.steps = 0

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.steps = state["steps"]


def to_self() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def script(
    folder: Path | str | None,
    *,
    mode: str = "single",
    io: dict[str, Any] | None = None,
    **kwargs: Any,
) -> Job:
    """Return a job with a loader and a counter, whose checkpoints are numbered in a folder."""
    if folder is not None:
        kwargs["project_config"] = ProjectConfiguration(
            project_dir=str(folder), automatic_checkpoint_naming=True
        )
    choices = DistCkptIO(**{"preemption": True, "timeout_secs": 60, **(io or {})})
    job = build(mode, io=choices, **kwargs)
    add_loader(job, length=PER_EPOCH * job.accelerator.num_processes)
    job.extra["count"] = Count()
    job.accelerator.register_for_checkpointing(job.extra["count"])
    return job


def run(job: Job, *, told_in: int | None = None, most: int = MOST_STEPS, each: Any = None) -> None:
    """Train on from where the counter stands, as scripts do it."""
    count = job.extra["count"]
    while count.steps < most:
        loader = job.loader
        if count.steps % PER_EPOCH:
            loader = job.accelerator.skip_first_batches(job.loader, count.steps % PER_EPOCH)
        for batch in loader:
            if count.steps + 1 == told_in:
                to_self()
            step(job, batch)
            count.steps += 1
            if each is not None:
                each(job)
            if count.steps >= most:
                break


def run_until_told(job: Job, **kwargs: Any) -> int:
    """Train until the job is stopped; return after how many steps."""
    with pytest.raises(Preempted) as caught:
        run(job, **kwargs)
    assert caught.value.code == 143
    return job.extra["count"].steps


def saved_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.glob("checkpoints/*"))


@pytest.fixture(autouse=True)
def _handler_is_back() -> Any:
    before, others = signal.getsignal(signal.SIGTERM), set(threading.enumerate())
    yield
    assert signal.getsignal(signal.SIGTERM) == before
    left = set(threading.enumerate()) - others
    assert not [one for one in left if one.name.startswith("dist_ckpt-")]


@pytest.fixture(scope="module")
def straight() -> dict[str, Any]:
    """Return what training comes to if nobody interrupts it."""
    job = script(None)
    run(job)
    job.handle.remove()
    found = state_of(job)
    reset()
    return found


# -- where it saves, and that the next run goes on there -------------------------------------------


@pytest.mark.parametrize("in_background", [False, True])
def test_the_next_run_ends_as_if_nothing_had_happened(
    tmp_path: Path, straight: dict[str, Any], *, in_background: bool
) -> None:
    """In the middle, at the end and at the beginning of an epoch."""
    for told in (2, 5, 6):
        folder, io = tmp_path / str(told), {"async_save": in_background}
        job = script(folder, io=io)
        assert run_until_told(job, told_in=told) == told
        job.handle.remove()
        assert saved_in(folder) == ["checkpoints/checkpoint_0"]

        job = script(folder, io=io, seed=3)
        job.accelerator.load_state()
        assert job.extra["count"].steps == told
        run(job)
        job.handle.remove()
        assert not differing(state_of(job), straight)


def test_without_numbers_it_saves_beside_the_others(
    tmp_path: Path, straight: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """The log names the place."""

    def each(job: Job) -> None:
        if job.extra["count"].steps == 2:
            job.accelerator.save_state(tmp_path / "run" / "step_2")

    job = script(None)
    assert run_until_told(job, told_in=4, each=each) == 4
    job.handle.remove()
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"step_2", "preempted"}
    assert f"preempted, saved to {tmp_path}/run/preempted" in caplog.text

    job = script(None, seed=3)
    job.accelerator.load_state(tmp_path / "run" / "preempted")
    run(job)
    job.handle.remove()
    assert not differing(state_of(job), straight)


@pytest.mark.parametrize("has_project", [True, False])
def test_before_the_first_save_it_saves_to_the_project_or_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, has_project: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    kwargs = {"project_dir": "project"} if has_project else {}
    job = script(None, **kwargs)
    assert run_until_told(job, told_in=1) == 1
    job.handle.remove()
    assert is_checkpoint(tmp_path / ("project/preempted" if has_project else "preempted"))


def test_a_step_under_way_is_completed(tmp_path: Path) -> None:
    """Gradients that are being accumulated are not saved."""
    job = script(tmp_path, gradient_accumulation_steps=2)
    assert run_until_told(job, told_in=3) == 4
    job.handle.remove()
    assert saved_in(tmp_path) == ["checkpoints/checkpoint_0"]


# -- the script's own saves ------------------------------------------------------------------------


@pytest.mark.parametrize("in_background", [False, True])
def test_a_save_of_this_very_step_counts(tmp_path: Path, *, in_background: bool) -> None:
    """It is waited for, and nothing is saved twice."""
    job = script(tmp_path, io={"async_save": in_background})
    each = lambda job: job.accelerator.save_state()
    assert run_until_told(job, told_in=2, each=each) == 2
    assert saved_in(tmp_path) == ["checkpoints/checkpoint_0", "checkpoints/checkpoint_1"]
    job.handle.remove()


def test_what_is_in_flight_ends_first(tmp_path: Path) -> None:
    """And if it fails, it is saved all the same."""
    job = script(tmp_path, io={"async_save": True})
    job.accelerator.save_state()
    saver_of(job.accelerator).wait()

    def each(job: Job) -> None:
        with stopped_worker(job.accelerator) as pid:
            job.accelerator.save_state()
            os.kill(pid, signal.SIGKILL)

    with pytest.raises(Preempted):
        run(job, told_in=1, each=each)
    assert saved_in(tmp_path) == ["checkpoints/checkpoint_0", "checkpoints/checkpoint_2"]
    job.handle.remove()


def test_a_script_may_end_by_itself(tmp_path: Path) -> None:
    """Then nothing is done by itself."""
    job = script(None)
    batch = torch.arange(8.0).view(2, 4)
    for number in range(10):
        if number == 3:
            to_self()
        step(job, batch)
        if job.handle.should_stop():
            job.accelerator.save_state(tmp_path / "mine")
            break
    assert number == 3
    assert job.handle.should_stop()
    for _ in job.loader:  # an evaluation at the end
        pass
    job.accelerator.end_training()
    assert {path.name for path in tmp_path.iterdir()} == {"mine"}


# -- what goes wrong, and what is left -------------------------------------------------------------


def test_a_second_signal_does_not_end_the_save(tmp_path: Path) -> None:
    sync = os.fsync

    def told_sync(descriptor: int) -> None:
        to_self()
        sync(descriptor)

    job = script(tmp_path)
    with mock.patch.object(os, "fsync", told_sync):
        assert run_until_told(job, told_in=2) == 2
    to_self()  # until the handle is removed, or the program ends
    job.handle.remove()
    assert saved_in(tmp_path) == ["checkpoints/checkpoint_0"]


def test_a_save_that_fails_is_an_error(tmp_path: Path) -> None:
    job = script(tmp_path)
    job.accelerator.save_state()
    failing = mock.patch.object(os, "fsync", side_effect=OSError(5, "boom"))
    with failing, pytest.raises(CheckpointingException, match="boom"):
        run(job, told_in=2)
    job.handle.remove()
    assert saved_in(tmp_path) == ["checkpoints/checkpoint_0"]


def test_off_nothing_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PreemptionGuard, "install", lambda _: pytest.fail("installed"))
    job = script(None, io={"preemption": False})
    run(job, most=3)
    assert not job.handle.should_stop()
    job.handle.remove()


def test_it_is_on_again_after_free_memory(tmp_path: Path) -> None:
    job = script(tmp_path)
    before = signal.getsignal(signal.SIGTERM)
    job.accelerator.free_memory()
    assert signal.getsignal(signal.SIGTERM) != before
    job.model, job.optimizer, job.scheduler, job.loader = job.accelerator.prepare(
        job.model, job.optimizer.optimizer, job.scheduler.scheduler, job.loader
    )
    run(job, most=1)
    assert run_until_told(job, told_in=3) == 3
    job.handle.remove()


def test_with_another_io_there_is_one_guard(tmp_path: Path) -> None:
    """The one that is replaced gives the signal back first."""
    job = script(tmp_path)
    second = job.accelerator.register_checkpoint_io(DistCkptIO(preemption=True, grace_secs=9.0))
    assert run_until_told(job, told_in=2) == 2
    second.remove()
    job.handle.remove()


# -- ranks -----------------------------------------------------------------------------------------


def stop_ranks(
    rank: int, size: int, mode: str, folder: str, told: tuple[int, ...]
) -> tuple[int, list[str]]:
    """Be stopped at some time, go on, and compare with a run that was not."""
    io = {"async_save": mode == "ddp"}
    job = script(folder, mode=mode, io=io)
    if rank in told:
        threading.Timer(0.1 * (1 + rank), to_self).start()
    steps = run_until_told(job, most=100_000)
    job.handle.remove()

    job = script(folder, mode=mode, io=io, seed=3)
    job.accelerator.load_state()
    run(job, most=steps + 3)
    found = state_of(job)
    job.handle.remove()

    job = script(None, mode=mode)
    run(job, most=steps + 3)
    job.handle.remove()
    return steps, differing(found, state_of(job))


@pytest.mark.parametrize(
    ("mode", "told"), [("ddp", (0,)), ("ddp", (1,)), ("ddp", (0, 1)), ("fsdp2", (1,))]
)
def test_all_ranks_stop_after_the_same_step(
    tmp_path: Path, mode: str, told: tuple[int, ...]
) -> None:
    results = run_ranks(stop_ranks, 2, mode, str(tmp_path), told)
    assert len({steps for steps, _ in results}) == 1, results
    assert [wrong for _, wrong in results] == [[], []]
    assert saved_in(tmp_path) == ["checkpoints/checkpoint_0"]


def hang(_: int) -> None:
    threading.Event().wait()


def save_while_storage_hangs(rank: int, size: int, folder: str) -> None:
    job = script(folder, io={"grace_secs": 2.0})
    job.accelerator.save_state()
    if rank == 1:
        mock.patch.object(os, "fsync", hang).start()
    else:  # may tell of it, however busy the machine is
        mock.patch.object(preemption, "_LATE_SECS", 60.0).start()
    run(job, told_in=2)


def test_with_storage_that_hangs_the_processes_end_after_the_grace(tmp_path: Path) -> None:
    """Of one rank only: the other one is told within the same time."""
    outcomes = run_ranks(
        save_while_storage_hangs, 2, str(tmp_path), expect_errors=True, timeout_secs=60
    )
    assert outcomes[1].exit_code == 143
    assert "the grace is over, and this process has not stopped" in outcomes[1].log
    assert outcomes[0].error_type == "BarrierTimeoutError", outcomes[0].describe()
    assert "ranks [1] of 2 did not arrive" in outcomes[0].message
    assert saved_in(tmp_path) == ["checkpoints/checkpoint_0"]


def evaluate_on_rank_0(rank: int, size: int, folder: str) -> int:
    """Rank 0 asks for more batches than the others; the step counts, not the batch."""
    job = script(folder)

    def each(job: Job) -> None:
        if rank == 0:
            for _ in job.extra["eval"]:
                pass

    data = torch.utils.data.DataLoader(torch.arange(12.0).view(3, 4))
    job.extra["eval"] = job.accelerator.prepare(data)
    if rank == 1:
        threading.Timer(0.1, to_self).start()
    steps = run_until_told(job, most=100_000, each=each)
    job.handle.remove()
    return steps


def test_an_evaluation_on_rank_0_does_not_bring_ranks_out_of_step(tmp_path: Path) -> None:
    first, second = run_ranks(evaluate_on_rank_0, 2, str(tmp_path))
    assert first == second
    assert saved_in(tmp_path) == ["checkpoints/checkpoint_0"]
