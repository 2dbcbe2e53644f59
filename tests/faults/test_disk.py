"""After a crash or an error of the disk at any point, the old checkpoint is there, or the new."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dist_ckpt import (
    CheckpointingException,
    CheckpointNotFoundError,
    SaveOptions,
    ShardedTensor,
    StorageError,
    load,
    save,
)
from dist_ckpt.storage.commit import locate
from dist_ckpt.training_state import is_checkpoint, remove_checkpoint
from tests.faults._disk import Disk

ONE_THREAD = SaveOptions(thread_count=1)


def state(value: float) -> dict[str, object]:
    tensors = {
        k: ShardedTensor.from_rank_offsets(k, torch.full((64,), value)) for k in ("a", "b", "c")
    }
    return {**tensors, "value": value, "plain": torch.full((3,), value)}


def value_at(path: Path) -> float | None:
    """Return what stands at ``path``, all of one piece; None if no checkpoint is committed."""
    try:
        loaded = load(state(-1.0), path)
    except CheckpointNotFoundError:
        return None
    values = {float(v) for k in ("a", "b", "c", "plain") for v in loaded[k]} | {loaded["value"]}
    assert len(values) == 1, f"a mixture: {values}"
    return values.pop()


def leftovers(directory: Path) -> list[str]:
    return [entry.name for entry in directory.iterdir() if entry.name.startswith(".dist-ckpt")]


@pytest.fixture(params=["exchange", "two renames"])
def disk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Disk:
    disk = Disk(monkeypatch)
    if request.param == "two renames":
        disk.without_exchange()
    return disk


@pytest.mark.parametrize("old", [None, 1.0], ids=["first save", "re-save"])
def test_a_crash_at_any_point_leaves_the_old_or_the_new(
    tmp_path: Path, disk: Disk, old: float | None
) -> None:
    """A copy of the disk after each operation loads as one of the two; and can be saved to again.

    Once the new one has been seen, the old one never comes back.
    """
    home, copies = tmp_path / "home", tmp_path / "copies"
    home.mkdir()
    if old is not None:
        save(state(old), home / "c", options=ONE_THREAD)
    seen: list[float | None] = []

    def crash(operation: str) -> None:
        copy = copies / str(len(seen))
        shutil.copytree(home, copy)
        seen.append(value_at(copy / "c"))
        assert seen[-1] in (old, 2.0), operation
        assert is_checkpoint(copy / "c") == (seen[-1] is not None)

    disk.after = crash
    with disk.watched():
        save(state(2.0), home / "c", options=ONE_THREAD)

    assert seen[0] == old
    assert seen[-1] == 2.0
    assert seen.index(2.0) + seen.count(2.0) == len(seen)
    assert leftovers(home) == []
    for copy in copies.iterdir():
        save(state(3.0), copy / "c", options=ONE_THREAD)
        assert value_at(copy / "c") == 3.0
        remove_checkpoint(copy / "c")
        assert not is_checkpoint(copy / "c"), "an older one came back"


@pytest.mark.parametrize("old", [None, 1.0], ids=["first save", "re-save"])
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC], ids=["EIO", "ENOSPC"])
def test_an_error_at_any_point_leaves_the_old_or_the_new(
    tmp_path: Path, disk: Disk, old: float | None, code: int
) -> None:
    """A save that raises has changed nothing; one that returns has saved. Nothing else."""
    with disk.watched():
        save(state(0.0), tmp_path / "count" / "c", options=ONE_THREAD)
        if old is not None:
            save(state(0.0), tmp_path / "count" / "c", options=ONE_THREAD)
    for number in range(len(disk.done)):
        home = tmp_path / f"{number}"
        home.mkdir()
        if old is not None:
            save(state(old), home / "c", options=ONE_THREAD)
        raised = None
        with disk.watched(fail_at=number, code=code):
            try:
                save(state(2.0), home / "c", options=ONE_THREAD)
            except CheckpointingException as error:
                raised = error
        assert value_at(home / "c") == (old if raised else 2.0), disk.done
        if raised is not None:
            assert leftovers(home) == [], disk.done
            assert isinstance(raised, StorageError)
        if len(disk.done) <= number:
            break
    else:
        pytest.fail("the failing operation was never past the end of a save")


@pytest.mark.parametrize("target", ["c", "deep/er/c"])
def test_a_failed_save_leaves_the_directory_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    """No attempt, no marker, no half of a file stays behind."""
    disk = Disk(monkeypatch)
    with disk.watched(fail_at=12), pytest.raises(StorageError):
        save(state(2.0), tmp_path / target, options=ONE_THREAD)

    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    assert not (tmp_path / target).exists()


def test_what_stood_aside_does_not_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash behind the second rename leaves the old one aside; the next save sweeps it."""
    disk = Disk(monkeypatch)
    disk.without_exchange()
    save(state(1.0), tmp_path / "c")
    aside = tmp_path / "aside"

    def keep(operation: str) -> None:
        if operation == "rename" and not aside.exists() and not (tmp_path / "c").exists():
            shutil.copytree(locate(tmp_path / "c"), aside)

    disk.after = keep
    with disk.watched():
        save(state(2.0), tmp_path / "c")
    previous = locate_name(tmp_path / "c")
    shutil.copytree(aside, previous)

    assert value_at(tmp_path / "c") == 2.0
    remove_checkpoint(tmp_path / "c")

    assert value_at(tmp_path / "c") is None
    assert leftovers(tmp_path) == []


def locate_name(target: Path) -> Path:
    from dist_ckpt.storage.commit import attempt_prefix

    return target.parent / f"{attempt_prefix(target)}000000000000.previous"


def test_the_users_files_beside_a_checkpoint_survive(tmp_path: Path, disk: Disk) -> None:
    """A file, a folder and a link of the user are kept when ``replace`` allows what stands there.

    Old data files are not.
    """
    save(state(1.0), tmp_path / "c")
    (tmp_path / "c" / "notes.txt").write_text("mine")
    (tmp_path / "c" / "folder").mkdir()
    (tmp_path / "c" / "folder" / "x").write_text("mine too")
    (tmp_path / "c" / "link").symlink_to("notes.txt")
    (tmp_path / "c" / "__9_0.distcp").write_text("of nobody")

    save(state(2.0), tmp_path / "c")

    assert value_at(tmp_path / "c") == 2.0
    assert (tmp_path / "c" / "link").read_text() == "mine"
    assert (tmp_path / "c" / "folder" / "x").read_text() == "mine too"


def damage_truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def damage_remove(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("__0_0.distcp", damage_truncate),
        ("__0_0.distcp", damage_remove),
        ("index.bin", damage_truncate),
        ("index.bin", damage_remove),
        ("common.json", damage_truncate),
        ("common.json", damage_remove),
        ("manifest.json", damage_truncate),
        ("manifest.json", damage_remove),
        (".metadata", damage_truncate),  # without it, it is whole: tests/unit/test_copies.py
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, name: str, damage: Callable[[Path], None]) -> None:
    """A short or missing file is corruption, with its name; it is never half a success."""
    from dist_ckpt import CorruptedCheckpointError

    save(state(1.0), tmp_path / "c")
    damage(tmp_path / "c" / name)

    with pytest.raises(CorruptedCheckpointError, match=name.replace(".", "[.]")):
        load(state(0.0), tmp_path / "c")


def test_a_checkpoint_without_marker_is_incomplete(tmp_path: Path) -> None:
    """``metadata.json`` alone makes a checkpoint one."""
    from dist_ckpt import IncompleteCheckpointError

    save(state(1.0), tmp_path / "c")
    (tmp_path / "c" / "metadata.json").unlink()

    with pytest.raises(IncompleteCheckpointError, match="never finished"):
        load(state(0.0), tmp_path / "c")
