"""Saves that block tell their sinks what background saves tell: the same events, true numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from dist_ckpt import SaveOptions, ShardedTensor
from dist_ckpt.background import BackgroundOptions, BackgroundSaver
from dist_ckpt.errors import CheckpointingException, StorageError
from dist_ckpt.events import Event
from dist_ckpt.manager import CheckpointManager
from dist_ckpt.retention import KeepLast
from dist_ckpt.training_state import TrainingState, save_training_state
from tests.faults._background import Told

_BYTES = {"Written", "Committed"}


class Broken:
    """A sink that raises."""

    def emit(self, event: Event) -> None:
        raise RuntimeError(f"lost {event}")


def numbers(told: Told) -> list[tuple[str, int, int | None]]:
    """Return name, number of the save and bytes of each event; removals apart."""
    found = [(type(one).__name__, one) for one in told.events]
    return [
        (name, one.save, getattr(one, "nbytes", None) if name in _BYTES else None)
        for name, one in found
        if name != "Pruned"
    ]


def sharded() -> dict[str, Any]:
    return {"w": ShardedTensor.from_rank_offsets("w", torch.arange(300.0)), "n": 3}


def live() -> TrainingState:
    return TrainingState(models=[torch.nn.Linear(20, 30)], common={"n": 3}, per_rank=[1])


@pytest.mark.parametrize("backend", ["torch_dist", "zarr"])
@pytest.mark.parametrize("state", [live, sharded], ids=["live", "sharded"])
def test_a_manager_tells_the_same_of_both(tmp_path: Path, state: Any, backend: str) -> None:
    """Names, order, numbers of saves, and bytes; those are what lies on the disk."""
    options = SaveOptions(backend=backend)
    told: dict[bool, Told] = {}
    for is_async in (False, True):
        heard = told[is_async] = Told()
        saver = BackgroundSaver(BackgroundOptions(worker="thread"), sinks=[heard])
        with CheckpointManager(
            tmp_path / str(is_async),
            save_options=options,
            retention=KeepLast(1),
            saver=saver if is_async else None,
            sinks=[Broken()] if is_async else [Broken(), heard],
        ) as manager:
            for step in (1, 2):
                manager.save(step, state())
        saver.close()
    assert numbers(told[False]) == numbers(told[True])
    kinds = ["SaveStarted", "Staged", "Written", "Committed"]
    assert told[False].kinds(1) == told[False].kinds(2) == kinds
    for is_async, heard in told.items():
        removed = [one for one in heard.events if type(one).__name__ == "Pruned"]
        assert [Path(one.path).name for one in removed] == ["step_1"]
        assert {one.is_async for one in heard.events} == {is_async}
    if backend == "torch_dist":
        files = (tmp_path / "False" / "step_2").glob("*.distcp")
        assert numbers(told[False])[-1][2] == sum(one.stat().st_size for one in files)


def test_numbers_of_a_save_that_blocks(tmp_path: Path) -> None:
    """The caller is blocked for all of it; nothing is copied; writing is a part."""
    told = Told()
    save_training_state(tmp_path / "c", live(), sinks=[told])
    _, staged, written, committed = told.events
    assert (staged.wait_secs, staged.copy_secs, staged.nbytes) == (0, 0, 0)
    assert 0 < written.secs <= staged.stall_secs == committed.secs
    assert [one.time for one in told.events] == sorted(one.time for one in told.events)


@pytest.mark.parametrize("when", ["planning", "writing"])
def test_a_failure_is_told_by_both(tmp_path: Path, when: str) -> None:
    """With the phase and the error; what failed to be planned was not staged."""

    def build() -> TrainingState:
        if when == "planning":
            raise ValueError("no state")
        return live()

    told = Told(), Told()
    boom = StorageError("no space")
    with (
        mock.patch("dist_ckpt.storage.local.LocalStore.write", side_effect=boom),
        mock.patch("dist_ckpt.storage.local.LocalStore.writer", side_effect=boom),
        BackgroundSaver(BackgroundOptions(worker="thread"), sinks=[told[1]]) as saver,
    ):
        for heard, use in zip(told, (None, saver), strict=True):
            with pytest.raises((CheckpointingException, ValueError)):
                save_training_state(tmp_path / "c", build, saver=use, sinks=[heard])
                saver.drain()
    expected = (
        ["SaveStarted", "Failed"] if when == "planning" else ["SaveStarted", "Staged", "Failed"]
    )
    assert told[0].kinds(1) == told[1].kinds(1) == expected
    failed = told[0].events[-1]
    assert failed.phase == when
    assert ("no state" if when == "planning" else "no space") in failed.error
