"""Saving in the background with one process: its ends, its metrics, its configuration."""

from __future__ import annotations

import contextlib
import copy
import gc
import json
import logging
import os
import pickle
import signal
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker
from accelerate.utils import ProjectConfiguration

from accelerate_dist_ckpt import DistCkptIO
from accelerate_dist_ckpt.lifetime import _OPEN
from dist_ckpt.errors import (
    AsyncSaveError,
    BarrierTimeoutError,
    ConfigError,
    StorageError,
)
from dist_ckpt.storage.local import LocalStore
from dist_ckpt.training_state import is_checkpoint
from tests.accelerate._async_jobs import async_job, fail_one, loaded_from, wait_settled
from tests.accelerate._jobs import (
    Net,
    build,
    differing,
    reset,
    state_of,
    step,
    train,
)
from tests.accelerate._traces import (
    hidden,
    saver_of,
    stopped_worker,
    traces,
    worker_pid,
)
from tests.multiprocess._world import run_program

pytestmark = pytest.mark.usefixtures("nothing_left")


def batch() -> torch.Tensor:
    return torch.arange(8.0).view(2, 4)


# -- ends ------------------------------------------------------------------------------------------


def by_removing(job: Any) -> None:
    job.handle.remove()


def by_registering_another(job: Any) -> None:
    job.accelerator.register_checkpoint_io(DistCkptIO())


def by_end_training(job: Any) -> None:
    job.accelerator.end_training()


def by_freeing(job: Any) -> None:
    job.accelerator.free_memory()


def by_clearing(job: Any) -> None:
    job.accelerator.clear()


ENDS = [by_removing, by_registering_another, by_end_training, by_freeing, by_clearing]


@pytest.mark.parametrize("end", ENDS)
def test_every_end_waits_for_what_is_in_flight(tmp_path: Path, end: Any) -> None:
    """And leaves nothing behind, which the fixture of this file looks at."""
    job = build(seed=1, io=DistCkptIO(async_save=True))
    job.accelerator.save_state(tmp_path / "ckpt")
    end(job)

    assert is_checkpoint(tmp_path / "ckpt")
    assert hidden(tmp_path) == []


@pytest.mark.parametrize("end", ENDS)
def test_every_end_tells_of_a_failure_and_is_done_all_the_same(tmp_path: Path, end: Any) -> None:
    """AsyncSaveError comes out; again, there is nothing to tell."""
    job = async_job(tmp_path)
    fail_one(job, tmp_path / "bad")

    with pytest.raises(AsyncSaveError, match="bad"):
        end(job)
    end(job)
    if end in (by_freeing, by_clearing):
        assert job.accelerator._models == []


def test_saving_goes_on_after_an_end(tmp_path: Path) -> None:
    """free_memory gives the memory back and ends the worker; the next save makes others."""
    job = async_job(tmp_path)
    first = worker_pid(job.accelerator)
    job.accelerator.free_memory()
    job.accelerator.prepare(Net())
    job.accelerator.save_state(tmp_path / "second")
    assert worker_pid(job.accelerator) != first
    job.accelerator.end_training()
    assert is_checkpoint(tmp_path / "second")


def test_an_end_beside_another_error_only_logs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A user's exception is never replaced by ours, in `finally` as in a `with` block."""
    job = async_job(tmp_path)
    fail_one(job, tmp_path / "bad")
    with pytest.raises(KeyError, match="users"):
        try:
            raise KeyError("users")
        finally:
            job.accelerator.end_training()
    assert "bad" in caplog.text
    caplog.clear()
    other = async_job(tmp_path)
    other.handle.remove()
    with (
        pytest.raises(KeyError, match="users"),
        other.accelerator.register_checkpoint_io(DistCkptIO(async_save=True)),
    ):
        other.accelerator.save_state(tmp_path / "first")
        saver_of(other.accelerator).wait()
        fail_one(other, tmp_path / "worse")
        raise KeyError("users")
    assert "worse" in caplog.text
    assert not [one for one in tmp_path.iterdir() if one.name != "first"]


def test_an_end_has_a_bound(tmp_path: Path) -> None:
    """A worker that does nothing: the error names the path, and everything is put away."""
    job = async_job(tmp_path, drain_timeout_secs=0.3)
    with stopped_worker(job.accelerator) as pid:
        job.accelerator.save_state(tmp_path / "slow")
        with pytest.raises(BarrierTimeoutError, match=r"slow did not end within 0\.3 s"):
            saver_of(job.accelerator).drain()
        os.kill(pid, signal.SIGKILL)
    wait_settled(job.accelerator)
    with pytest.raises(AsyncSaveError):
        job.accelerator.end_training()
    assert [path.name for path in tmp_path.iterdir()] == ["first"]


@pytest.mark.parametrize("what", ["saver", "preemption"])
def test_the_next_accelerator_closes_what_those_before_have_left(what: str) -> None:
    """Of those that are gone; what is still there keeps its own."""
    choices: dict[str, Any] = {
        "async_save" if what == "saver" else "preemption": True, "worker": "thread",
    }  # fmt: skip

    def started() -> Any:
        job = build(io=DistCkptIO(**choices))
        vars(job.accelerator)["_dist_ckpt_io"].start(job.accelerator)
        return job

    gone, kept = started(), started()
    orphan, other = (vars(one.accelerator)["_dist_ckpt_io"] for one in (gone, kept))
    assert {orphan, other} <= _OPEN
    del gone
    gc.collect()
    assert orphan.is_orphan
    last = started()
    assert orphan not in _OPEN
    assert other in _OPEN
    for job in (kept, last):
        job.handle.remove()


SCRIPT = """
import contextlib, sys
from pathlib import Path
from accelerate_dist_ckpt import DistCkptIO
from tests.accelerate._jobs import build, train
from tests.accelerate._traces import full_disk, saver_of

FULL = contextlib.ExitStack()  # to the end of the program

def main(root, how):
    job = build(seed=1, io=DistCkptIO(async_save=True))
    train(job, 1)
    job.accelerator.save_state(root / "first")
    if how == "bad":
        saver_of(job.accelerator).wait()
        FULL.enter_context(full_disk(job.accelerator))
        job.accelerator.save_state(root / "bad")
    if how == "raises":
        raise KeyError("users")
    if how == "orphan":
        del job
        import gc
        gc.collect()
        build(seed=2, io=DistCkptIO(async_save=True)).accelerator.save_state(root / "second")

if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
"""


@pytest.mark.parametrize("how", ["ends", "raises", "bad", "orphan"])
def test_a_program_that_just_ends_finishes_its_saves(tmp_path: Path, how: str) -> None:
    """At exit what is in flight is drained, and a failure is logged; no end_training needed."""
    done = run_program(SCRIPT, str(tmp_path), how)

    assert done.returncode == (1 if how == "raises" else 0), done.stderr
    assert ("KeyError: 'users'" in done.stderr) == (how == "raises")
    assert ("File too large" in done.stderr) == (how == "bad")
    expected = ["first", "second"] if how == "orphan" else ["first"]
    assert sorted(path.name for path in tmp_path.iterdir()) == expected
    assert is_checkpoint(tmp_path / "first")


# -- metrics ---------------------------------------------------------------------------------------


class Tracker(GeneralTracker):
    """Keeps what it is told, in order."""

    name = "kept"
    requires_logging_directory = False
    tracker = None

    def __init__(self) -> None:
        super().__init__()
        self.told: list[tuple[dict[str, Any], int | None]] = []
        self.error: Exception | None = None

    def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
        if self.error is not None:
            raise self.error
        self.told.append((values, step))


def tracked_job(tmp_path: Path, **fields: Any) -> tuple[Any, Tracker]:
    job = build(seed=1, io=DistCkptIO(async_save=True, **fields))
    tracker = Tracker()
    job.accelerator.trackers = [tracker]
    job.accelerator.log({"loss": 1.0}, step=7)
    job.accelerator.save_state(tmp_path / "ckpt")
    saver_of(job.accelerator).wait()
    return job, tracker


def test_trackers_are_told_what_a_save_costs(tmp_path: Path) -> None:
    """On the training thread, at the next batch, at the step that the user logged at last."""
    job, tracker = tracked_job(tmp_path)
    assert len(tracker.told) == 1
    step(job, batch())

    told = {key: value for values, _ in tracker.told[1:] for key, value in values.items()}
    assert {number for _, number in tracker.told} == {7}
    assert set(told) == {
        "checkpoint/stall_secs",
        "checkpoint/write_secs",
        "checkpoint/gb_per_sec",
    }
    assert all(value > 0 for value in told.values())
    job.accelerator.save_state(tmp_path / "ckpt")
    count = len(tracker.told)
    job.accelerator.end_training()  # what is left is told before the trackers end
    assert len(tracker.told) == count + 2


def test_saves_that_block_tell_the_same(tmp_path: Path) -> None:
    """Trackers and file of events hear of each save, also of one that fails, and of removals."""
    events, rows = {}, {}
    for is_async in (False, True):
        folder = tmp_path / str(is_async)
        file = folder / "events.jsonl"
        io = DistCkptIO(async_save=is_async, worker="thread", events_file=str(file))
        config = ProjectConfiguration(str(folder), automatic_checkpoint_naming=True, total_limit=1)
        job, tracker = build(seed=1, io=io, project_config=config), Tracker()
        job.accelerator.trackers = [tracker]
        boom = StorageError("full")
        for number in range(3):
            broken = (
                contextlib.nullcontext()
                if number != 1
                else mock.patch.multiple(
                    LocalStore,
                    write=mock.Mock(side_effect=boom),
                    writer=mock.Mock(side_effect=boom),
                )
            )
            with broken, contextlib.suppress(AsyncSaveError, StorageError):
                job.accelerator.save_state()
                job.handle._registration.drain()
        rows[is_async] = [tuple(values) for values, _ in tracker.told]
        job.accelerator.end_training()
        rows[is_async] = [tuple(values) for values, _ in tracker.told]
        told = [json.loads(line) for line in file.read_text().splitlines()]
        events[is_async] = [
            (one["event"], None if one["event"] == "Staged" else one.get("nbytes")) for one in told
        ]
    assert rows[False] == rows[True]
    assert len(rows[False]) == 5  # two of a save, one of that which failed
    assert events[False] == events[True]
    whole = ["SaveStarted", "Staged", "Written", "Committed"]
    failed = ["SaveStarted", "Staged", "Failed"]
    assert [name for name, _ in events[False]] == [*whole, *failed, *whole, "Pruned"]


def test_no_metrics_if_not_wanted(tmp_path: Path) -> None:
    """log_metrics=False: trackers hear of the user's values only."""
    job, tracker = tracked_job(tmp_path, log_metrics=False)
    step(job, batch())
    job.accelerator.end_training()
    assert len(tracker.told) == 1


def test_a_tracker_that_fails_is_not_the_trainings_trouble(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is logged, and training goes on."""
    job, tracker = tracked_job(tmp_path)
    tracker.error = OSError("no network")
    with caplog.at_level(logging.ERROR):
        step(job, batch())
    assert "no network" in caplog.text
    job.accelerator.end_training()


# -- registration and configuration ----------------------------------------------------------------


def test_the_choices_come_from_yaml_and_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each field can be a line of YAML, a variable, or an argument; the last of these wins."""
    file = tmp_path / "ckpt.yaml"
    file.write_text(
        "dist_ckpt:\n  async_save: true\n  worker: thread\n  max_in_flight: 2\n"
        "  staging_budget_mib: 64\n  drain_timeout_secs: 30\n  log_metrics: false\n"
        "  page_cache: drop\n"
    )
    monkeypatch.setenv("DIST_CKPT_OVERLAP", "true")
    monkeypatch.setenv("DIST_CKPT_MAX_IN_FLIGHT", "3")
    io = DistCkptIO.from_yaml(file, drain_timeout_secs=5.0)
    config = io.config
    assert (config.async_save, config.overlap, config.worker) == (True, True, "thread")
    assert (config.max_in_flight, config.staging_budget_mib) == (3, 64)
    assert (config.drain_timeout_secs, config.log_metrics) == (5.0, False)
    assert io.save_options(staging_dir=tmp_path, include_dir=None).page_cache == "drop"
    with pytest.raises(ConfigError, match="worker"):
        DistCkptIO(worker="fork")  # type: ignore[arg-type]

    job = build(seed=1, io=io)
    job.accelerator.save_state(tmp_path / "ckpt")
    expected = state_of(job)
    train(job, 1)
    job.accelerator.end_training()
    assert differing(expected, loaded_from(tmp_path / "ckpt")) == []


def test_without_async_save_no_worker_is_started(tmp_path: Path) -> None:
    """Nor with it, where checkpoints are Accelerate's own."""
    before = traces()
    job = build(seed=1, io=DistCkptIO())
    job.accelerator.save_state(tmp_path / "ckpt")
    build(io=DistCkptIO(async_save=True, enabled=False))
    assert traces() == before


def test_an_io_holds_choices_only(tmp_path: Path) -> None:
    """It is pickled and registered twice; each Accelerator has a worker of its own, a copy none."""
    io = pickle.loads(pickle.dumps(DistCkptIO(async_save=True)))
    reset()
    first, second = Accelerator(cpu=True), Accelerator(cpu=True)
    for accelerator in (first, second):
        accelerator.register_checkpoint_io(io)
        accelerator.prepare(Net())
        accelerator.save_state(tmp_path / "ckpt")
        saver_of(accelerator).wait()
    assert worker_pid(first) != worker_pid(second)
    again = copy.deepcopy(vars(first)["_dist_ckpt_io"])
    assert again.io.config == io.config
    assert again._saver is None
    first.end_training()
    assert saver_of(second).in_flight == ()
    second.save_state(tmp_path / "other")
    second.end_training()
    assert is_checkpoint(tmp_path / "other")
