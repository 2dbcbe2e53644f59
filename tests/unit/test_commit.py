"""Attempts: made beside the target, published by one rename, or gone."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from dist_ckpt import StorageError
from dist_ckpt.storage import commit
from dist_ckpt.storage.commit import Attempt, attempt_prefix, locate, put_back, remove_tree


def filled(attempt: Attempt, text: str) -> Attempt:
    (attempt.directory / "f").write_text(text)
    return attempt


@pytest.fixture(params=["exchange", "two renames"], autouse=True)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "two renames":

        def refused(a: Path, b: Path) -> None:
            raise OSError(errno.EINVAL, "no exchange")

        monkeypatch.setattr(commit, "_exchange", refused)
    return str(request.param)


def test_publish_and_replace(tmp_path: Path) -> None:
    """The new one is there, of the old one nothing; what the user put there stays."""
    target = tmp_path / "deep" / "er" / "c"
    filled(Attempt.begin(target, None), "1").publish(old_files=())
    (target / "mine").write_text("x")

    filled(Attempt.begin(target, None), "2").publish(old_files={"f"})

    assert (target / "f").read_text() == "2"
    assert (target / "mine").read_text() == "x"
    assert [entry.name for entry in target.parent.iterdir()] == ["c"]


def test_attempts_have_names_of_their_own(tmp_path: Path) -> None:
    """Frameworks list these directories and parse names: none begins like a checkpoint's."""
    first, second = (Attempt.begin(tmp_path / "step=1.ckpt", None) for _ in range(2))

    assert first.directory != second.directory
    assert first.checkpoint_id != second.checkpoint_id
    assert first.directory.parent == tmp_path
    assert first.directory.name.startswith(".dist-ckpt-")
    assert "step" not in first.directory.name
    first.abort()
    second.abort()
    assert list(tmp_path.iterdir()) == []
    long = Attempt.begin(tmp_path / ("k" * 255), None)
    filled(long, "1").publish(old_files=())
    assert (tmp_path / ("k" * 255) / "f").read_text() == "1"


def test_staging_elsewhere(tmp_path: Path) -> None:
    """Made in another directory of the same file system."""
    attempt = Attempt.begin(tmp_path / "c", tmp_path / "staging")

    assert attempt.directory.parent == tmp_path / "staging"
    filled(attempt, "1").publish(old_files=())
    assert (tmp_path / "c" / "f").read_text() == "1"
    assert list((tmp_path / "staging").iterdir()) == []


def test_a_failed_sync_is_undone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rename was there already: the old one comes back, and the attempt can be removed."""
    target = tmp_path / "c"
    original = commit.fsync_directory

    def fails(path: Path) -> None:
        if path == tmp_path:
            raise OSError(errno.EIO, "sync")
        original(path)

    for text in (None, "1"):
        if text:
            filled(Attempt.begin(target, None), text).publish(old_files=())
        attempt = filled(Attempt.begin(target, None), "2")
        with monkeypatch.context() as patch:
            patch.setattr(commit, "fsync_directory", fails)
            with pytest.raises(StorageError, match="EIO"):
                attempt.publish(old_files=())
        attempt.abort()

        assert target.exists() == (text is not None)
        assert [entry.name for entry in tmp_path.iterdir()] == (["c"] if text else [])
    assert (target / "f").read_text() == "1"


def test_what_stands_aside_is_found_and_put_back(tmp_path: Path) -> None:
    """After a crash between two renames, readers look aside and the next save puts it back."""
    target = tmp_path / "c"
    aside = tmp_path / f"{attempt_prefix(target)}0123.previous"
    aside.mkdir()
    (aside / "f").write_text("1")

    assert locate(target) == aside
    attempt = Attempt.begin(target, None)
    assert locate(target) == target
    assert (target / "f").read_text() == "1"
    attempt.abort()
    assert locate(tmp_path / "other") == tmp_path / "other"
    assert locate(tmp_path / "no" / "where") == tmp_path / "no" / "where"


def test_putting_back_keeps_no_save_from_its_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Whoever looks between the two renames of another process may take it for dead."""
    target = tmp_path / "c"
    filled(Attempt.begin(target, None), "1").publish(old_files=())
    attempt = filled(Attempt.begin(target, None), "2")
    original, seen = Path.rename, list[str]()

    def rename(self: Path, to: Path) -> Path:
        if to == target and "2" in seen:
            seen.remove("2")
            assert put_back(target)
        return original(self, to)

    seen += ["2", "2"]
    monkeypatch.setattr(Path, "rename", rename)

    attempt.publish(old_files={"f"})

    assert (target / "f").read_text() == "2"
    assert [entry.name for entry in tmp_path.iterdir()] == ["c"]
    assert put_back(target)
    assert not put_back(tmp_path / "other")
    if kind == "two renames":
        assert seen == []


def test_what_cannot_be_put_back_stays_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a disk that is read-only it is found there."""
    target = tmp_path / "c"
    aside = tmp_path / f"{attempt_prefix(target)}0123.previous"
    aside.mkdir()

    def refused(self: Path, to: Path) -> Path:
        raise OSError(errno.EROFS, "read-only")

    monkeypatch.setattr(Path, "rename", refused)

    assert not put_back(target)
    assert locate(target) == aside


def test_what_stands_aside_is_swept_by_a_commit(tmp_path: Path) -> None:
    """A crash behind the second rename left it: it is older than the target and must not return."""
    target = tmp_path / "c"
    filled(Attempt.begin(target, None), "1").publish(old_files=())
    (tmp_path / f"{attempt_prefix(target)}0123.previous").mkdir()

    filled(Attempt.begin(target, None), "2").publish(old_files=("f",))

    assert [entry.name for entry in tmp_path.iterdir()] == ["c"]


def test_what_vanishes_while_one_looks_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer may put the old one back between a reader's two looks."""
    target = tmp_path / "c"
    gone = tmp_path / f"{attempt_prefix(target)}0123.previous"
    monkeypatch.setattr(Path, "glob", lambda *_: iter([gone]))

    assert locate(target) == gone


def test_removing(tmp_path: Path) -> None:
    """A tree, a file, a link (not what it points to), nothing."""
    (tmp_path / "tree" / "a").mkdir(parents=True)
    (tmp_path / "file").write_text("x")
    (tmp_path / "kept").mkdir()
    (tmp_path / "link").symlink_to("kept")

    for name in ("tree", "file", "link", "nothing"):
        remove_tree(tmp_path / name)

    assert [entry.name for entry in tmp_path.iterdir()] == ["kept"]


def test_a_name_is_gone_durably_before_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash must not bring it back with half of them. An attempt's name is believed by nobody."""
    told: list[str] = []
    synced, removed = commit.fsync_directory, commit.shutil.rmtree

    def sync(path: Path) -> None:
        assert [one.suffix for one in path.iterdir()].count(".trash") == 1
        told.append("synced")
        synced(path)

    def remove(path: Path, **kwargs: bool) -> None:
        told.append("removed")
        removed(path, **kwargs)

    (tmp_path / "c").mkdir()
    aside = tmp_path / f"{attempt_prefix(tmp_path / 'c')}0123456789ab.previous"
    aside.mkdir()
    attempt = Attempt.begin(tmp_path / "other", None)
    monkeypatch.setattr(commit, "fsync_directory", sync)
    monkeypatch.setattr(commit.shutil, "rmtree", remove)

    remove_tree(tmp_path / "c")
    remove_tree(aside)
    attempt.abort()

    assert told == ["synced", "removed", "synced", "removed", "removed"]
    assert list(tmp_path.iterdir()) == []


def test_a_removal_that_another_was_quicker_with_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two jobs prune one folder; and what cannot be removed is told."""
    (tmp_path / "c").mkdir()

    def fails(code: int) -> None:
        def rename(self: Path, target: Path) -> None:
            raise OSError(code, os.strerror(code), str(self))

        monkeypatch.setattr(Path, "rename", rename)

    fails(errno.ENOENT)
    remove_tree(tmp_path / "c")
    fails(errno.EACCES)
    remove_tree(tmp_path / "c", ignore_errors=True)
    with pytest.raises(PermissionError):
        remove_tree(tmp_path / "c")

    assert [entry.name for entry in tmp_path.iterdir()] == ["c"]


def test_users_files_are_kept_in_any_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders and links too; copied where linking is not possible."""
    target = tmp_path / "c"
    filled(Attempt.begin(target, None), "1").publish(old_files=())
    (target / "folder").mkdir()
    (target / "folder" / "x").write_text("x")
    (target / "link").symlink_to("folder/x")

    def refused(source: str, destination: str) -> None:
        raise OSError(errno.EPERM, "no links")

    monkeypatch.setattr(os, "link", refused)
    filled(Attempt.begin(target, None), "2").publish(old_files={"f"})

    assert (target / "f").read_text() == "2"
    assert (target / "link").is_symlink()
    assert (target / "link").read_text() == "x"


def test_a_folder_that_both_have_is_merged(tmp_path: Path) -> None:
    """The user's ``w`` is not lost when the new checkpoint has a ``w`` of its own."""
    target = tmp_path / "c"
    filled(Attempt.begin(target, None), "1").publish(old_files=())
    (target / "w" / "deep").mkdir(parents=True)
    (target / "w" / "notes").write_text("mine")
    (target / "w" / "deep" / "x").write_text("mine too")
    (target / "w" / "0").write_text("like a chunk")
    attempt = filled(Attempt.begin(target, None), "2")
    (attempt.directory / "w").mkdir()
    (attempt.directory / "w" / "0").write_text("new")

    attempt.publish(old_files={"f"})

    assert (target / "w" / "notes").read_text() == "mine"
    assert (target / "w" / "deep" / "x").read_text() == "mine too"
    assert (target / "w" / "0").read_text() == "new"


@pytest.mark.parametrize("metadata", [".zarray", "zarr.json"])
def test_two_arrays_are_never_merged(tmp_path: Path, metadata: str) -> None:
    """Of another checkpoint's array of this name nothing stays: chunks would meet."""
    target = tmp_path / "c"
    (target / "w").mkdir(parents=True)
    for name in (metadata, "9"):
        (target / "w" / name).write_text("old")
    attempt = filled(Attempt.begin(target, None), "2")
    (attempt.directory / "w").mkdir()
    (attempt.directory / "w" / "0").write_text("new")

    attempt.publish(old_files=())

    assert [entry.name for entry in (target / "w").iterdir()] == ["0"]


def test_a_failure_to_tidy_up_is_no_failure_of_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new one is there by then: an error would say that it is not."""
    target = tmp_path / "c"
    filled(Attempt.begin(target, None), "1").publish(old_files=())

    def broken(path: Path) -> None:
        raise OSError(errno.EIO, "broken", str(path))

    monkeypatch.setattr(commit, "forget_aside", broken)
    filled(Attempt.begin(target, None), "2").publish(old_files={"f"})

    assert (target / "f").read_text() == "2"


def test_a_relative_target_is_where_it_was_meant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Changing the directory between planning and commit moves nothing."""
    monkeypatch.chdir(tmp_path)
    attempt = filled(Attempt.begin(Path("c"), None), "1")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")

    attempt.publish(old_files=())

    assert (tmp_path / "c" / "f").read_text() == "1"
