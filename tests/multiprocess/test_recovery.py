"""The newest good checkpoint and the manager, with ranks that are processes."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from dist_ckpt import CorruptedCheckpointError, ShardedTensor
from dist_ckpt.manager import CheckpointManager
from dist_ckpt.recovery import latest, sweep, verify_checkpoint
from dist_ckpt.retention import KeepLast
from dist_ckpt.storage.owners import owner_of
from tests.multiprocess._world import run_ranks

pytestmark = pytest.mark.multiprocess


def rows(rank: int, size: int, value: float) -> dict[str, Any]:
    data = torch.full((12 // size, 6), value)
    return {"w": ShardedTensor.from_rank_offsets("w", data, (0, rank, size)), "value": value}


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def save_steps(rank: int, size: int, folder: str, steps: list[int], is_async: bool) -> list[int]:
    with CheckpointManager(folder, retention=KeepLast(2), async_save=is_async) as manager:
        for step in steps:
            manager.save(step, rows(rank, size, float(step)), metrics={"loss": float(step)})
    return CheckpointManager(folder).steps()


def load_newest(rank: int, size: int, folder: str) -> tuple[str, float, bool]:
    manager = CheckpointManager(folder)
    found = manager.latest()
    loaded = manager.load(rows(rank, size, 0.0))
    assert found is not None
    return found.name, loaded["value"], bool((loaded["w"] == loaded["value"]).all())


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_saved_on_three_resumed_on_two(tmp_path: Path, is_async: bool) -> None:
    """The newest is damaged on the share of the last rank: all take the one before, and say so."""
    assert run_ranks(save_steps, 3, str(tmp_path), [1, 2, 3], is_async) == [[2, 3]] * 3
    assert names(tmp_path) == ["step_2", "step_3"]
    flip(tmp_path / "step_3" / "__2_0.distcp")

    assert run_ranks(load_newest, 2, str(tmp_path)) == [("step_2", 2.0, True)] * 2

    assert [name for name in names(tmp_path) if not name.startswith(".")] == ["step_2"]
    assert len(list(tmp_path.glob(".dist-ckpt-*.damaged"))) == 1


def verify_and_look(rank: int, size: int, folder: str) -> list[str]:
    told = []
    for check in (lambda: verify_checkpoint(Path(folder) / "step_1"), lambda: latest(folder)):
        try:
            check()
        except CorruptedCheckpointError as error:
            told.append(str(error))
    return told


def test_none_good_is_told_on_every_rank(tmp_path: Path) -> None:
    """With file, offset and both checksums; whichever rank has found it."""
    run_ranks(save_steps, 3, str(tmp_path), [1], False)
    flip(tmp_path / "step_1" / "__1_0.distcp")

    for told in run_ranks(verify_and_look, 3, str(tmp_path)):
        assert len(told) == 2
        assert all("__1_0.distcp: bytes 0 to" in one for one in told)
        assert all("is expected" in one for one in told)
    assert names(tmp_path) == ["step_1"]


def die_in_a_save(rank: int, size: int, folder: str) -> None:
    import os

    from dist_ckpt._saving import publish as _publishing

    manager = CheckpointManager(folder)
    manager.save(1, rows(rank, size, 1.0))

    def killed(*_: object, **__: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    _publishing.write_documents = killed  # type: ignore[assignment]
    manager.save(2, rows(rank, size, 2.0))


def test_what_a_killed_rank_leaves_is_swept(tmp_path: Path) -> None:
    """By the next job, once it is old enough; the document beside it too. What was there is good."""
    (outcome,) = run_ranks(die_in_a_save, 1, str(tmp_path), expect_errors=True)
    assert outcome.exit_code == -signal.SIGKILL
    (attempt,), (hooks,) = tmp_path.glob("*.attempt"), tmp_path.glob("*.hooks")
    assert owner_of(attempt) == owner_of(hooks) is not None

    assert sweep(tmp_path) == []
    assert len(sweep(tmp_path, older_than_secs=-60)) == 2

    assert names(tmp_path) == ["step_1"]
    assert run_ranks(load_newest, 1, str(tmp_path)) == [("step_1", 1.0, True)]


def two_jobs(rank: int, size: int, folder: str, rounds: int) -> list[float]:
    """Each rank is a job of its own; both save, prune and look in one folder."""
    from dist_ckpt.serialization import single_process

    manager = CheckpointManager(folder, retention=KeepLast(2), communicator=single_process())
    found = []
    for step in range(rounds):
        value = float(10 * step + rank)
        manager.save(step * 2 + rank, {"w": rows(0, 1, value)["w"], "value": value})
        loaded = manager.load(rows(0, 1, 0.0))
        assert bool((loaded["w"] == loaded["value"]).all())
        found.append(loaded["value"])
    return found


def test_two_jobs_in_one_folder(tmp_path: Path) -> None:
    """Neither breaks the other, whatever they remove: each always finds a newest that is whole."""
    for found in run_ranks(two_jobs, 2, str(tmp_path), 12):
        assert len(found) == 12

    left = names(tmp_path)
    assert all(name.startswith("step_") for name in left), left
    assert "step_23" in left
