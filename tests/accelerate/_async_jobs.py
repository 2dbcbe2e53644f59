"""Jobs that save in the background, and ways to make such a save fail.

Here: what the tests of it share. Not here: tests. Runs in the test process.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from accelerate_dist_ckpt import DistCkptIO
from tests.accelerate._jobs import build, state_of, train
from tests.accelerate._traces import saver_of, stopped_worker


def async_job(tmp_path: Path, *, seed: int = 1, **fields: Any) -> Any:
    """Return a job whose worker has saved once, so that a test can get hold of it."""
    job = build(seed=seed, io=DistCkptIO(async_save=True, **fields))
    train(job, 1)
    job.accelerator.save_state(tmp_path / "first")
    saver_of(job.accelerator).wait()
    return job


def loaded_from(path: Path) -> dict[str, Any]:
    job = build(seed=99)
    job.accelerator.load_state(path)
    return state_of(job)


def fail_one(job: Any, *args: Any) -> None:
    """Save, and let the worker die before it has done anything."""
    with stopped_worker(job.accelerator) as pid:
        job.accelerator.save_state(*args)
        os.kill(pid, signal.SIGKILL)
    wait_settled(job.accelerator)


def wait_settled(accelerator: Accelerator) -> None:
    """Return when nothing is in flight, and raise nothing of it."""
    queue = saver_of(accelerator)._queue
    queue.wait_for(queue.is_idle, 60, "a test")
