"""``load_state()`` finds the newest checkpoint that is whole and true, and says what it passed by."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from accelerate.utils import ProjectConfiguration

from accelerate_dist_ckpt import DistCkptIO, naming
from dist_ckpt import recovery
from dist_ckpt.errors import CheckpointNotFoundError, CorruptedCheckpointError, MismatchError
from dist_ckpt.training_state import is_checkpoint
from tests._damage import DAMAGES, aside, damage, data_file, flip
from tests.accelerate._jobs import build, differing, state_of, train
from tests.multiprocess._world import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:load_state.. loads:UserWarning")


def project(root: Path, *, seed: int = 9, mode: str = "single", **fields: Any) -> Any:
    """Return a job that names its checkpoints by number."""
    limit = fields.pop("total_limit", None)
    config = ProjectConfiguration(str(root), automatic_checkpoint_naming=True, total_limit=limit)
    return build(mode, seed=seed, io=DistCkptIO(timeout_secs=60, **fields), project_config=config)


def saved(root: Path, *, count: int = 3, mode: str = "single") -> list[dict[str, Any]]:
    """Save checkpoints ``0`` and so on; return what each of them has."""
    job, states = project(root, seed=1, mode=mode), []
    for _ in range(count):
        train(job, 1)
        job.accelerator.save_state()
        states.append(state_of(job))
    return states


def numbered(root: Path, number: int) -> Path:
    return root / "checkpoints" / f"checkpoint_{number}"


def names_in(root: Path) -> list[str]:
    return sorted(path.name for path in (root / "checkpoints").iterdir())


# -- the newest ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DAMAGES)
def test_the_one_before_is_loaded(tmp_path: Path, name: str) -> None:
    """What is damaged goes out of the folder; the next save takes its number."""
    states = saved(tmp_path)
    moved = damage(name, numbered(tmp_path, 2))
    job = project(tmp_path, events_file=str(tmp_path / "events.jsonl"))

    with pytest.warns(UserWarning, match=r"loads .*checkpoint_1: checkpoint_2 is (damaged|incom)"):
        job.accelerator.load_state()

    assert differing(states[1], state_of(job)) == []
    assert aside(tmp_path) == (["checkpoint_2"] if moved else [])
    kept = ["checkpoint_0", "checkpoint_1"] + ([] if moved else ["checkpoint_2"])
    assert names_in(tmp_path) == kept
    assert job.accelerator.save_iteration == 2
    told = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [one["event"] for one in told] == ["Skipped"] + (["SetAside"] if moved else [])
    assert all(one["path"] == str(numbered(tmp_path, 2)) for one in told)

    train(job, 1)
    expected = state_of(job)
    assert job.accelerator.save_state() == numbered(tmp_path, 2)
    again = project(tmp_path)
    again.accelerator.load_state()
    assert differing(expected, state_of(again)) == []
    assert names_in(tmp_path) == ["checkpoint_0", "checkpoint_1", "checkpoint_2"]


def test_all_damaged_is_an_error_each_time(tmp_path: Path) -> None:
    """Nothing is renamed, and nothing of the job is touched."""
    saved(tmp_path, count=2)
    for number in (0, 1):
        flip(data_file(numbered(tmp_path, number)))
    job = project(tmp_path)
    before = state_of(job)

    for _ in range(2):
        with pytest.raises(CorruptedCheckpointError, match="none of 2") as caught:
            job.accelerator.load_state()
        assert all(f"checkpoint_{n} (damaged)" in str(caught.value) for n in (0, 1))
    assert names_in(tmp_path) == ["checkpoint_0", "checkpoint_1"]
    assert aside(tmp_path) == aside(tmp_path / "checkpoints") == []
    assert differing(before, state_of(job)) == []


def test_files_only(tmp_path: Path) -> None:
    """At that level sizes decide: a flipped byte is found when it is read, not before."""
    states = saved(tmp_path)
    flip(data_file(numbered(tmp_path, 2)))
    job = project(tmp_path, verify_newest="files")

    with pytest.raises(CorruptedCheckpointError, match=r"__0_\d\.distcp"):
        job.accelerator.load_state()
    assert names_in(tmp_path) == ["checkpoint_0", "checkpoint_1", "checkpoint_2"]

    data_file(numbered(tmp_path, 2)).write_bytes(b"")
    job.accelerator.load_state()
    assert differing(states[1], state_of(job)) == []


def test_native_ones_count_as_good(tmp_path: Path) -> None:
    """They have no checksums; a damaged one of ours above them is passed by."""
    job = project(tmp_path, seed=1)
    with job.handle:
        pass
    train(job, 1)
    job.accelerator.save_state()
    expected = state_of(job)
    job = project(tmp_path, seed=1)
    job.accelerator.project_configuration.iteration = 1
    job.accelerator.save_state()
    flip(data_file(numbered(tmp_path, 1)))

    job = project(tmp_path)
    with pytest.warns(UserWarning, match=r"(?s)loads .*_0: .*checkpoint_1 \(damaged\)"):
        job.accelerator.load_state()
    assert differing(expected, state_of(job)) == []
    assert job.accelerator.save_state() == numbered(tmp_path, 2)


def test_a_newer_native_one_in_the_same_place(tmp_path: Path) -> None:
    """Nobody can tell which one is meant."""
    saved(tmp_path, count=1)
    native = numbered(tmp_path, 0) / "random_states_0.pkl"
    native.write_bytes(b"")
    later = (numbered(tmp_path, 0) / "metadata.json").stat().st_mtime + 1
    os.utime(native, (later, later))

    with pytest.raises(MismatchError, match="newer one that Accelerate itself wrote"):
        project(tmp_path).accelerator.load_state()


def test_numbers_that_are_taken_are_not_given_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a damaged one cannot be set aside, saving goes on behind it."""
    saved(tmp_path)
    flip(data_file(numbered(tmp_path, 2)))
    rename = Path.rename

    def refuse(self: Path, target: Any) -> Any:
        if str(target).endswith(".damaged"):
            raise OSError(30, "Read-only file system")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refuse)
    job = project(tmp_path)
    job.accelerator.load_state()

    assert job.accelerator.save_state() == numbered(tmp_path, 3)
    assert names_in(tmp_path) == [f"checkpoint_{n}" for n in range(4)]


# -- what is named ---------------------------------------------------------------------------------


def test_what_is_named_is_never_replaced(tmp_path: Path) -> None:
    """A damaged directory is an error, with automatic naming too, and stays as it is."""
    saved(tmp_path)
    flip(data_file(numbered(tmp_path, 2)))
    job = project(tmp_path)
    before = state_of(job)

    with pytest.raises(CorruptedCheckpointError, match=r"__0_\d\.distcp"):
        job.accelerator.load_state(numbered(tmp_path, 2))
    (numbered(tmp_path, 1) / "metadata.json").unlink()
    with pytest.raises(CheckpointNotFoundError, match="checkpoint_1"):
        job.accelerator.load_state(numbered(tmp_path, 1))
    assert names_in(tmp_path) == ["checkpoint_0", "checkpoint_1", "checkpoint_2"]
    assert aside(tmp_path) == []
    assert differing(before, state_of(job)) == []


# -- what is removed -------------------------------------------------------------------------------


@pytest.mark.parametrize("async_save", [False, True], ids=["waiting", "background"])
def test_the_last_good_one_is_not_removed(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    *,
    async_save: bool,
) -> None:
    """``total_limit`` is exceeded where nothing that would stay is good."""
    job = project(tmp_path, seed=1, total_limit=1, async_save=async_save, worker="thread")
    job.accelerator.save_state()
    is_good = naming._is_good

    def tear_and_look(path: Path) -> bool:
        data_file(path).write_bytes(b"")
        return is_good(path)

    monkeypatch.setattr(naming, "_is_good", tear_and_look)
    job.accelerator.save_state()
    job.accelerator.end_training()
    assert names_in(tmp_path) == ["checkpoint_0", "checkpoint_1"]
    assert any("above total_limit are kept" in one for one in caplog.messages)

    monkeypatch.undo()
    job = project(tmp_path, total_limit=1)
    job.accelerator.load_state()
    job.accelerator.save_state()
    assert names_in(tmp_path) == ["checkpoint_1"]
    assert is_checkpoint(numbered(tmp_path, 1))


def test_dead_saves_are_swept_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first save looks where it prepares and where it puts; a failure to do so is no matter."""
    swept = []

    def sweep(folder: Path, *, older_than_secs: float) -> None:
        swept.append((folder, older_than_secs))
        raise OSError(5, "a test")

    monkeypatch.setattr(recovery, "sweep", sweep)
    job = project(tmp_path, sweep_after_secs=60.0)
    for _ in range(2):
        job.accelerator.save_state()

    assert sorted(swept) == [(tmp_path, 60.0), (tmp_path / "checkpoints", 60.0)]


def test_files_of_hooks_have_an_owner_while_they_are_there(tmp_path: Path) -> None:
    """What a job that dies leaves of them is swept; one that lives leaves nothing."""
    job, seen = project(tmp_path), []

    def look(models: Any, weights: Any, folder: str) -> None:
        seen.append(sorted(path.suffix for path in Path(folder).parent.iterdir()))

    job.accelerator.register_save_state_pre_hook(look)
    job.accelerator.save_state()

    assert seen == [[".hooks", ".owner"]]
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoints"]


# -- in the background, and on several ranks -------------------------------------------------------


def test_in_the_background(tmp_path: Path) -> None:
    """The newest is looked for when nothing is in flight any more."""
    states = saved(tmp_path)
    flip(data_file(numbered(tmp_path, 2)))
    job = project(tmp_path, async_save=True, worker="thread")
    job.accelerator.load_state()
    assert differing(states[1], state_of(job)) == []

    job.accelerator.save_state()
    job.accelerator.end_training()
    assert names_in(tmp_path) == ["checkpoint_0", "checkpoint_1", "checkpoint_2"]


def on_ranks(rank: int, world_size: int, mode: str, root: str) -> dict[str, Any]:
    """Save, damage, and load in all the ways that need ranks to agree."""
    told: dict[str, Any] = {}
    good, bad = Path(root, "good"), Path(root, "bad")
    states = saved(good, mode=mode)
    if rank == 0:
        shutil.copytree(good, bad)
        flip(data_file(numbered(good, 2)))
        for number in range(3):
            flip(data_file(numbered(bad, number)))
    dist.barrier()

    told["files"] = error_of(project(good, mode=mode, verify_newest="files"))
    told["named"] = error_of(project(good, mode=mode), numbered(good, 2))
    told["all bad"] = error_of(project(bad, mode=mode))
    job = project(good, mode=mode)
    told["automatic"] = error_of(job)
    told["differing"] = differing(states[1], state_of(job))
    told["saved"] = job.accelerator.save_state().name
    return told


def error_of(job: Any, *path: Any) -> str:
    """Return the name of what a load raises."""
    try:
        job.accelerator.load_state(*path)
    except Exception as error:
        return type(error).__name__
    return ""


@pytest.mark.multiprocess
@pytest.mark.parametrize("mode", ["ddp", "fsdp2"])
def test_all_ranks_agree(tmp_path: Path, mode: str) -> None:
    """The same checkpoint, or the same error, on each rank."""
    told = run_ranks(on_ranks, 2, mode, str(tmp_path))

    bad = "CorruptedCheckpointError"
    expected = {
        "files": bad, "named": bad, "all bad": bad,
        "automatic": "", "differing": [], "saved": "checkpoint_2",
    }  # fmt: skip
    assert told == [expected] * 2
    assert aside(tmp_path / "good") == ["checkpoint_2"]
    assert aside(tmp_path / "bad") == []
    assert names_in(tmp_path / "bad") == ["checkpoint_0", "checkpoint_1", "checkpoint_2"]
