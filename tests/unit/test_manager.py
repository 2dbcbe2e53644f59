"""The manager of one job's folder: steps, metrics, what is kept, what is found again."""

from __future__ import annotations

import errno
import logging
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from dist_ckpt import (
    CheckpointNotFoundError,
    ConfigError,
    CorruptedCheckpointError,
    LoadOptions,
    SaveOptions,
    ShardedTensor,
    StorageError,
)
from dist_ckpt.background import BackgroundSaver
from dist_ckpt.errors import AsyncSaveError
from dist_ckpt.events import Event, Pruned, SetAside, Skipped
from dist_ckpt.manager import CheckpointManager
from dist_ckpt.manager import _steps as _pruning
from dist_ckpt.options import BackgroundOptions
from dist_ckpt.recovery import sweep
from dist_ckpt.retention import AnyOf, CheckpointInfo, KeepBest, KeepEvery, KeepLast
from dist_ckpt.storage import commit
from dist_ckpt.storage.sealed import sealed
from dist_ckpt.testing.world import ThreadWorld
from dist_ckpt.training_state import TrainingState, is_checkpoint
from tests._peaks import Peak


def state(value: float) -> dict[str, Any]:
    return {"w": ShardedTensor.from_rank_offsets("w", torch.full((8,), value)), "value": value}


def value_of(manager: CheckpointManager, step: int | None = None) -> float | None:
    """What a step holds: the tensor's and the common part's agree."""
    request = {"w": ShardedTensor.from_rank_offsets("w", torch.zeros(8))}
    found = manager.load(request, step=step)
    if found is None:
        return None
    assert torch.equal(found["w"], torch.full((8,), found["value"]))
    return float(found["value"])


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


class Listener:
    def __init__(self) -> None:
        self.events: list[Event] = []

    def emit(self, event: Event) -> None:
        self.events.append(event)


@pytest.fixture
def saver() -> Iterator[BackgroundSaver]:
    saver = BackgroundSaver(BackgroundOptions(worker="thread"))
    yield saver
    saver.close()


def test_steps_are_saved_found_and_loaded(tmp_path: Path) -> None:
    """What was saved last is the latest; an earlier step can be asked for."""
    manager = CheckpointManager(tmp_path / "run")

    assert (manager.steps(), manager.latest(), value_of(manager)) == ([], None, None)
    for step in (0, 10, 9):
        assert manager.save(step, state(float(step))) == tmp_path / "run" / f"step_{step}"

    assert manager.steps() == [0, 9, 10]
    assert manager.latest() == tmp_path / "run" / "step_10"
    assert value_of(manager) == 10.0
    assert value_of(manager, 9) == 9.0
    assert names(tmp_path / "run") == ["step_0", "step_10", "step_9"]
    with pytest.raises(CheckpointNotFoundError, match="step_7"):
        manager.load(state(0.0), step=7)


def test_live_objects_are_restored_in_place(tmp_path: Path) -> None:
    """Models and optimizers of the same state that was saved; the rest is in the view."""
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    given = TrainingState(models=[model], optimizers=[optimizer], common={"epoch": 3}, per_rank=[7])
    manager = CheckpointManager(tmp_path)

    assert manager.restore(given) is None
    manager.save(1, lambda: given)
    with torch.no_grad():
        model.weight.zero_()
    optimizer.state.clear()
    view = manager.restore(given)

    assert view is not None
    assert (view.common, view.per_rank()) == ({"epoch": 3}, [7])
    assert all(torch.equal(saved[name], value) for name, value in model.state_dict().items())
    assert len(optimizer.state) == 2


def test_a_step_saved_again_is_replaced(tmp_path: Path) -> None:
    """In one step, metrics too; nothing of the old one stays."""
    manager = CheckpointManager(tmp_path)
    manager.save(1, state(1.0), metrics={"loss": 0.5})

    manager.save(1, state(2.0), metrics={"acc": 1})

    assert value_of(manager, 1) == 2.0
    assert [one.metrics for one in manager.checkpoints()] == [{"acc": 1.0}]
    assert names(tmp_path) == ["step_1"]


@pytest.mark.parametrize("backend", ["torch_dist", "zarr"])
def test_metrics_are_kept_with_the_checkpoint(tmp_path: Path, backend: Any) -> None:
    """Another manager, in another process or later, knows them, NaN and tensors too."""
    manager = CheckpointManager(tmp_path, save_options=SaveOptions(backend=backend))
    numbers = {"loss": 0.1, "nan": math.nan, "inf": math.inf, "t": torch.tensor(2.0)}
    manager.save(3, state(1.0), metrics=numbers)
    manager.save(4, state(1.0))

    first, second = CheckpointManager(tmp_path).checkpoints()

    assert first.step == 3
    assert {name: str(value) for name, value in first.metrics.items()} == {
        "loss": "0.1", "nan": "nan", "inf": "inf", "t": "2.0",
    }  # fmt: skip
    assert (second.step, second.metrics) == (4, {})
    assert first.time <= second.time


@pytest.mark.parametrize(
    "document",
    [
        {"metrics": {"loss": 10**400}, "time": "1"},
        {"metrics": {"loss": "low"}, "time": "1"},
        {"metrics": {}, "time": "nan"},
        {"metrics": [], "time": "1"},
        {"metrics": {"loss": None}, "time": "1"},
        {},
    ],
)
def test_a_document_that_says_nonsense_says_nothing(
    tmp_path: Path, document: dict[str, Any]
) -> None:
    """Whoever wrote it: its seal is right, its content is not."""
    manager = CheckpointManager(tmp_path)
    manager.save(1, state(1.0), metrics={"loss": 0.5})
    (tmp_path / "step_1" / "step.json").write_bytes(sealed(document))

    (info,) = manager.checkpoints()

    assert (info.step, info.metrics) == (1, {})
    assert math.isfinite(info.time)


def test_damaged_metrics_are_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A policy is not fooled by a flipped bit; the checkpoint does not verify either."""
    manager = CheckpointManager(tmp_path)
    manager.save(1, state(1.0), metrics={"loss": 0.5})
    flip(tmp_path / "step_1" / "step.json")

    (info,) = manager.checkpoints()

    assert (info.step, info.metrics) == (1, {})
    assert "no metrics" in caplog.text
    with pytest.raises(CorruptedCheckpointError, match=r"step\.json"):
        manager.latest()


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_the_policy_decides_what_stays(tmp_path: Path, saver: Any, is_async: bool) -> None:
    """Removed behind the commit, one after the other."""
    policy = AnyOf(KeepLast(1), KeepBest(1, "loss"), KeepEvery(steps=4))
    listener = Listener()
    manager = CheckpointManager(
        tmp_path, retention=policy, saver=saver if is_async else None, sinks=[listener]
    )

    for step, loss in enumerate([9, 8, 1, 7, 6, math.nan, 5]):
        manager.save(step, state(float(step)), metrics={"loss": loss})
    if is_async:
        saver.drain()

    assert manager.steps() == [0, 2, 4, 6]
    assert names(tmp_path) == ["step_0", "step_2", "step_4", "step_6"]
    assert value_of(manager, 2) == 2.0
    assert manager.latest() == tmp_path / "step_6"
    if not is_async:
        told = [one for one in listener.events if isinstance(one, Pruned)]
        assert [Path(one.path).name for one in told] == ["step_1", "step_3", "step_5"]


def test_the_newest_and_the_one_just_saved_stay(tmp_path: Path) -> None:
    """A policy that keeps neither is not asked about them: there is nothing else to resume from."""
    manager = CheckpointManager(tmp_path, retention=KeepBest(1, "loss"))
    manager.save(10, state(10.0), metrics={"loss": 1})
    manager.save(20, state(20.0), metrics={"loss": 2})
    assert manager.steps() == [10, 20]

    manager.save(15, state(15.0), metrics={"loss": 3})
    assert manager.steps() == [10, 15, 20]

    assert manager.prune() == [15]
    assert manager.steps() == [10, 20]


def test_nothing_goes_for_a_newest_that_is_damaged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It does not count, so the last good one is kept; and it is not removed: it is reported."""
    keep_all = CheckpointManager(tmp_path)
    for step in (1, 2, 3):
        keep_all.save(step, state(float(step)))
    next((tmp_path / "step_3").glob("*.distcp")).unlink()
    manager = CheckpointManager(tmp_path, retention=KeepLast(1))

    assert manager.prune() == [1]

    assert names(tmp_path) == ["step_2", "step_3"]
    assert "step_3 does not count" in caplog.text
    assert value_of(manager) == 2.0
    assert [name for name in names(tmp_path) if not name.startswith(".")] == ["step_2"]


def test_nothing_goes_if_nothing_is_good(tmp_path: Path) -> None:
    """Half a checkpoint is more than none."""
    manager = CheckpointManager(tmp_path, retention=KeepLast(1))
    keep_all = CheckpointManager(tmp_path)
    for step in (1, 2):
        keep_all.save(step, state(float(step)))
        (tmp_path / f"step_{step}" / "index.bin").unlink()

    assert manager.prune() == []
    assert names(tmp_path) == ["step_1", "step_2"]


def test_what_is_no_step_is_left_alone(tmp_path: Path) -> None:
    """Other names, files, links and unfinished directories are neither listed nor removed."""
    manager = CheckpointManager(tmp_path, retention=KeepLast(1))
    manager.save(1, state(1.0))
    for name in (
        "step_01",
        "step_x",
        "step_-1",
        "other",
        "step_5",
        "step_\N{ARABIC-INDIC DIGIT SEVEN}",
    ):
        (tmp_path / name).mkdir()
    (tmp_path / "step_0").write_text("a file")
    before = names(tmp_path)

    manager.save(2, state(2.0))

    assert manager.steps() == [2]
    assert names(tmp_path) == sorted({*before, "step_2"} - {"step_1"})
    assert manager.latest() == tmp_path / "step_2"


def test_a_step_that_is_no_good_is_saved_again(tmp_path: Path) -> None:
    """What was there is set aside: a save refuses what it does not know for a checkpoint."""
    manager = CheckpointManager(tmp_path)
    for step, name in ((1, "metadata.json"), (2, "manifest.json"), (3, "index.bin")):
        manager.save(step, state(1.0))
        (tmp_path / f"step_{step}" / name).unlink()

        manager.save(step, state(2.0))

        assert value_of(manager, step) == 2.0
    assert len(list(tmp_path.glob("*.damaged"))) == 3


def test_a_directory_of_somebody_else_is_not_saved_over(tmp_path: Path) -> None:
    """Nor moved."""
    (tmp_path / "step_1").mkdir()
    (tmp_path / "step_1" / "mine").write_text("x")

    with pytest.raises(StorageError, match="not empty"):
        CheckpointManager(tmp_path).save(1, state(1.0))

    assert names(tmp_path) == ["step_1"]
    assert names(tmp_path / "step_1") == ["mine"]


def test_skipped_and_set_aside_are_told(tmp_path: Path) -> None:
    """To the sinks, with the reason."""
    listener = Listener()
    manager = CheckpointManager(tmp_path, sinks=[listener])
    manager.save(1, state(1.0))
    manager.save(2, state(2.0))
    listener.events.clear()
    flip(next((tmp_path / "step_2").glob("*.distcp")))

    assert value_of(manager) == 1.0

    kinds = [type(one) for one in listener.events]
    assert kinds == [Skipped, SetAside]
    assert all(one.path == str(tmp_path / "step_2") for one in listener.events)
    assert manager.steps() == [1]


def test_a_failed_save_removes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And leaves nothing of itself, the document for the policy included."""
    manager = CheckpointManager(tmp_path, retention=KeepLast(1))
    manager.save(1, state(1.0))

    with pytest.raises(StorageError):
        manager.save(2, broken)

    assert names(tmp_path) == ["step_1"]
    assert value_of(manager) == 1.0


def broken() -> Any:
    raise StorageError("broken")


def test_a_failed_background_save_removes_nothing(tmp_path: Path, saver: Any) -> None:
    """What was due behind its commit is not done; nothing of it stays."""
    options = SaveOptions(staging_dir=tmp_path / "staging")
    folder = tmp_path / "run"
    manager = CheckpointManager(folder, retention=KeepLast(1), saver=saver, save_options=options)
    manager.save(1, state(1.0))
    saver.drain()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dist_ckpt._saving.publish.write_documents", fails)
        manager.save(2, state(2.0))
        with pytest.raises(AsyncSaveError, match="no space"):
            saver.drain()

    assert names(folder) == ["step_1"]
    assert names(tmp_path / "staging") == []
    assert value_of(manager) == 1.0


def fails(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, "no space")


def test_a_failure_to_prune_is_no_failure_of_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is logged by ``save``, and raised by ``prune``."""
    manager = CheckpointManager(tmp_path, retention=KeepLast(1))
    manager.save(1, state(1.0))

    def refused(path: Path) -> None:
        raise PermissionError(errno.EACCES, "no", str(path))

    monkeypatch.setattr(_pruning, "remove_checkpoint", refused)
    manager.save(2, state(2.0))

    assert "was not pruned" in caplog.text
    assert manager.steps() == [1, 2]
    with pytest.raises(StorageError, match="step_1"):
        manager.prune()


def test_a_removal_that_dies_leaves_nothing_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name is gone, durably, before the first file is; the rest is swept one day."""
    keep_all = CheckpointManager(tmp_path)
    keep_all.save(1, state(1.0))
    keep_all.save(2, state(2.0))
    synced: list[Path] = []

    class Died(BaseException):
        pass

    def dies(path: Path, **_: object) -> None:
        assert synced == [tmp_path]
        raise Died

    with monkeypatch.context() as patch, pytest.raises(Died):
        patch.setattr(commit, "fsync_directory", synced.append)
        patch.setattr(shutil, "rmtree", dies)
        CheckpointManager(tmp_path, retention=KeepLast(1)).prune()

    assert keep_all.steps() == [2]
    assert [name for name in names(tmp_path) if not name.startswith(".")] == ["step_2"]
    assert {Path(name).suffix for name in names(tmp_path)} == {"", ".trash", ".owner"}
    assert len(sweep(tmp_path, older_than_secs=-60, any_owner=True)) == 1
    assert names(tmp_path) == ["step_2"]


def test_a_replaced_step_is_not_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another job saves a step again between the decision and the removal: that one stays."""
    manager = CheckpointManager(tmp_path, retention=KeepLast(1))
    other = CheckpointManager(tmp_path)
    other.save(1, state(1.0))
    other.save(2, state(2.0))
    original = _pruning._is_good

    def and_meanwhile(path: Path, options: Any) -> bool:
        other.save(1, state(1.5))
        return original(path, options)

    monkeypatch.setattr(_pruning, "_is_good", and_meanwhile)

    assert manager.prune() == []
    assert value_of(other, 1) == 1.5


def test_what_is_being_saved_again_is_not_removed(tmp_path: Path) -> None:
    """Its replacement is on its way."""
    manager = CheckpointManager(tmp_path)
    for step in (1, 2, 3):
        manager.save(step, state(1.0))
    options = LoadOptions()

    removed = _pruning.prune_steps(
        tmp_path, KeepLast(1), spared=(), in_flight=(manager.path(1),), options=options
    )

    assert removed == [2]
    assert manager.steps() == [1, 3]


def test_what_vanishes_while_it_is_loaded_is_looked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another job prunes: the next good one is loaded."""
    manager = CheckpointManager(tmp_path)
    manager.save(1, state(1.0))
    manager.save(2, state(2.0))
    original, tries = manager.latest, list[Path]()

    def then_gone() -> Path | None:
        found = original()
        tries.append(found or Path())
        if len(tries) == 1:
            shutil.rmtree(tmp_path / "step_2")
        return found

    monkeypatch.setattr(manager, "latest", then_gone)

    assert value_of(manager) == 1.0
    assert [one.name for one in tries] == ["step_2", "step_1"]


def test_what_was_saved_otherwise_counts_too(tmp_path: Path) -> None:
    """A step without the document has no metrics, and the time of its commit."""
    from dist_ckpt import save

    save(state(5.0), tmp_path / "step_5")

    (info,) = CheckpointManager(tmp_path).checkpoints()

    committed = (tmp_path / "step_5" / "manifest.json").stat().st_mtime
    assert info == CheckpointInfo(step=5, time=pytest.approx(committed))


def test_wrong_arguments_are_refused(tmp_path: Path, saver: Any) -> None:
    """Before anything is made."""
    manager = CheckpointManager(tmp_path / "run")
    bad: list[Mapping[str, Any]] = [
        {"step": -1}, {"step": True}, {"step": "1"}, {"metrics": {"loss": "low"}}, {"metrics": 3},
        {"metrics": {"loss": 10**400}},
    ]  # fmt: skip
    for one in bad:
        with pytest.raises(ConfigError):
            manager.save(**{"step": 1, "state": state(0.0), **one})
    with pytest.raises(ConfigError, match="one was given"):
        CheckpointManager(tmp_path, async_save=True, saver=saver)
    with pytest.raises(ConfigError, match="level"):
        CheckpointManager(tmp_path, verify_newest="some")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="sweep_after_secs"):
        CheckpointManager(tmp_path, sweep_after_secs=math.nan)
    with pytest.raises(ConfigError, match="include_dir"):
        CheckpointManager(tmp_path, save_options=SaveOptions(include_dir=tmp_path))
    manager.close()
    manager.close()
    with pytest.raises(ConfigError, match="closed"):
        manager.save(1, state(0.0))

    assert names(tmp_path) == []


def test_a_manager_of_its_own_saver(tmp_path: Path) -> None:
    """It starts at the first save and ends with the manager; loads wait for what is in flight."""
    with CheckpointManager(tmp_path, async_save=True, retention=KeepLast(2)) as manager:
        assert manager.saver is None
        for step in (1, 2, 3):
            manager.save(step, state(float(step)), metrics={"loss": step})
        assert value_of(manager) == 3.0
        assert manager.steps() == [2, 3]
        model = torch.nn.Linear(2, 2)
        manager.save(4, TrainingState(models=[model]))
        assert manager.latest() == tmp_path / "step_4"

    assert names(tmp_path) == ["step_3", "step_4"]
    assert CheckpointManager(tmp_path).checkpoints()[0].metrics == {"loss": 3.0}


def test_ranks_agree(tmp_path: Path) -> None:
    """One answer on all ranks, also when the newest is damaged; rank 0 removes."""

    def job(comm: Any) -> Any:
        manager = CheckpointManager(tmp_path, communicator=comm, retention=KeepLast(2))
        for step in (1, 2, 3):
            rows = ShardedTensor.from_rank_offsets(
                "w", torch.full((2, 4), float(step)), (0, comm.rank, comm.size)
            )
            manager.save(step, {"w": rows})
        comm.broadcast("damage", lambda: flip(next((tmp_path / "step_3").glob("__1_*"))))
        return manager.steps(), manager.latest(), manager.prune()

    assert ThreadWorld(2).run(job) == [([2, 3], tmp_path / "step_2", [])] * 2
    assert [name for name in names(tmp_path) if not name.startswith(".")] == ["step_2"]


def test_ranks_that_differ_are_told(tmp_path: Path) -> None:
    """Another step, or an error on one rank, is an error on all; nothing is left."""

    def job(comm: Any) -> None:
        manager = CheckpointManager(tmp_path / "run", communicator=comm)
        manager.save(comm.rank, state(0.0))

    assert {type(one) for one in ThreadWorld(2).errors(job).values()} == {ConfigError}

    def bad_step(comm: Any) -> None:
        step: Any = 1 if comm.rank else "1"
        CheckpointManager(tmp_path / "run", communicator=comm).save(step, state(0.0))

    assert {type(one) for one in ThreadWorld(2).errors(bad_step).values()} == {ConfigError}
    assert not (tmp_path / "run").exists()


def test_the_folder_is_swept_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """At the first save; and a failure to do so is no failure of the save."""
    caplog.set_level(logging.INFO)
    old = tmp_path / ".dist-ckpt-0123456789-0123456789ab.attempt"
    old.mkdir()
    record = old.with_suffix(".owner")
    from dist_ckpt.storage.owners import record_owner

    record_owner(old)
    text = record.read_text().replace(f'"pid": {os.getpid()}', '"pid": 4194305')
    record.write_text(text)
    os.utime(old, (1.0, 1.0))
    os.utime(record, (1.0, 1.0))
    kept = CheckpointManager(tmp_path, sweep_after_secs=None)
    kept.save(1, state(1.0))
    assert old.exists()

    manager = CheckpointManager(tmp_path)
    manager.save(2, state(2.0))

    assert not old.exists()
    assert not record.exists()
    assert f"removed {old}" in caplog.text
    assert is_checkpoint(tmp_path / "step_2")


def test_background_saves_need_no_more_of_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is removed behind a save is gone before the next one is written: two copies at most."""
    peaks = []
    for name in ("sync", "async"):
        folder = tmp_path / name
        saver = BackgroundSaver(BackgroundOptions(worker="thread")) if name == "async" else None
        with monkeypatch.context() as patch:
            peak = Peak(folder, patch)
            with CheckpointManager(folder, retention=KeepLast(1), saver=saver) as manager:
                for step in range(4):
                    manager.save(
                        step, {"w": ShardedTensor.from_rank_offsets("w", torch.ones(9999))}
                    )
                if saver is not None:
                    saver.close()
        peaks.append(peak.nbytes)
    one = sum(file.stat().st_size for file in (tmp_path / "sync" / "step_3").iterdir())
    assert [round(peak / one, 1) for peak in peaks] == [2.0, 2.0]
