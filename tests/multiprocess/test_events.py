"""Events of two ranks: each tells its own bytes, and all tell of a save that failed on one."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from dist_ckpt.background import BackgroundOptions, BackgroundSaver
from dist_ckpt.errors import CheckpointingException, StorageError
from dist_ckpt.training_state import SaveMemory, TrainingState, save_training_state
from tests.faults._background import Job, Told
from tests.multiprocess._world import run_ranks

pytestmark = pytest.mark.multiprocess


class Broken:
    """A sink that raises."""

    def emit(self, event: Any) -> None:
        raise RuntimeError(f"lost {event}")


def failing_disk() -> contextlib.ExitStack:
    stack, boom = contextlib.ExitStack(), StorageError("no space")
    for name in ("write", "writer"):
        stack.enter_context(
            mock.patch(f"dist_ckpt.storage.local.LocalStore.{name}", side_effect=boom)
        )
    return stack


def job_of_saves(rank: int, size: int, folder: str, is_async: bool) -> list[tuple[Any, ...]]:
    """Save twice; fail on rank 1 while planning, then while writing; return what was told."""
    job, told, memory = Job(rank, size), Told(), SaveMemory()
    sinks = [Broken(), told]
    saver = BackgroundSaver(BackgroundOptions(worker="thread"), sinks=sinks, timeout_secs=60)
    use = saver if is_async else None

    def save(name: str, state: Any) -> None:
        job.step()
        save_training_state(Path(folder, name), state, saver=use, memory=memory, sinks=sinks)
        saver.drain()

    def broken() -> TrainingState:
        if rank == 1:
            raise ValueError("no state")
        return job.state

    save("1", job.state)
    save("2", job.state)
    with pytest.raises(CheckpointingException, match="no state"):
        save("3", broken)
    with (
        failing_disk() if rank == 1 else contextlib.nullcontext(),
        pytest.raises(CheckpointingException, match="no space"),
    ):
        save("4", job.state)
    saver.close()
    return [
        (
            type(one).__name__,
            one.save,
            one.rank,
            one.nbytes if hasattr(one, "nbytes") and not hasattr(one, "stall_secs") else None,
        )
        for one in told.events
    ]


def test_both_ways_tell_the_same_on_each_rank(tmp_path: Path) -> None:
    """Events and bytes of saves with a new plan, with a known one, and of those that fail."""
    told = {}
    for is_async in (False, True):
        folder = tmp_path / str(is_async)
        folder.mkdir()
        told[is_async] = run_ranks(job_of_saves, 2, str(folder), is_async)
    assert told[False] == told[True]
    for rank, events in enumerate(told[False]):
        kinds = [[name for name, save, *_ in events if save == number] for number in range(1, 5)]
        whole = ["SaveStarted", "Staged", "Written", "Committed"]
        parts = whole[:3] if rank == 0 else whole[:2]
        assert kinds == [whole, whole, ["SaveStarted", "Failed"], [*parts, "Failed"]]
    nbytes = [events[2][3] for events in told[False]]
    files = (tmp_path / "False" / "1").glob("*.distcp")
    assert sum(nbytes) == sum(one.stat().st_size for one in files)
    assert min(nbytes) > 0
