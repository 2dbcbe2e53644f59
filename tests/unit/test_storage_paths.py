"""What stands at a path, directories, and files in place of others: ``storage`` without a store."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dist_ckpt.errors import CheckpointNotFoundError, StorageError
from dist_ckpt.storage import LocalStore, paths, replace, trees


def test_a_link_that_leads_nowhere_takes_a_name_but_is_no_file(tmp_path: Path) -> None:
    """A save may not write there, and a load finds nothing there."""
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "gone")

    assert paths.is_taken(link)
    assert not paths.exists(link)
    assert not paths.is_file(link)
    assert paths.kind_of(link) == "link"
    assert not paths.is_taken(tmp_path / "gone")
    assert paths.kind_of(tmp_path / "gone") is None


def test_kinds(tmp_path: Path) -> None:
    """No link is followed; what is neither file nor directory is told apart."""
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "folder")

    kinds = {path.name: paths.kind_of(path) for path in tmp_path.iterdir()}

    assert kinds == {"file": "file", "folder": "directory", "pipe": "other", "link": "link"}


def test_entries_do_not_follow_links(tmp_path: Path) -> None:
    """Sizes are of files, and only if they are asked for."""
    (tmp_path / "file").write_bytes(b"abc")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "folder")

    found = {one.name: one for one in paths.entries_of(tmp_path, with_sizes=True)}

    assert found["file"] == paths.Entry("file", is_folder=False, is_link=False, nbytes=3)
    assert found["folder"] == paths.Entry("folder", is_folder=True, is_link=False, nbytes=-1)
    assert found["link"].is_link
    assert not found["link"].is_folder
    assert {one.nbytes for one in paths.entries_of(tmp_path)} == {-1}


def test_a_link_to_a_sibling(tmp_path: Path) -> None:
    """Such a link would only be looked at twice; others lead to checkpoints elsewhere."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b" / "c").mkdir(parents=True)
    (tmp_path / "to_a").symlink_to("a")
    (tmp_path / "to_c").symlink_to("b/c")

    assert paths.is_link_to_sibling(tmp_path / "to_a")
    assert not paths.is_link_to_sibling(tmp_path / "to_c")
    assert not paths.is_link_to_sibling(tmp_path / "a")


def test_a_replaced_file_has_another_stamp(tmp_path: Path) -> None:
    """Also if it has the same size and time."""
    (tmp_path / "a").write_bytes(b"1")
    (tmp_path / "b").write_bytes(b"2")
    before = paths.stamp_of(tmp_path / "a")
    os.utime(tmp_path / "b", ns=(before.mtime_ns, before.mtime_ns))
    (tmp_path / "b").replace(tmp_path / "a")

    assert paths.stamp_of(tmp_path / "a") != before
    assert paths.stamp_of(tmp_path / "a").mtime_ns == before.mtime_ns


def test_a_directory_that_was_removed_does_not_come_back(tmp_path: Path) -> None:
    """An attempt that rank 0 gave up meanwhile stays gone, whoever still writes into it."""
    (tmp_path / "c").mkdir()
    trees.make_folder(tmp_path / "c" / "w")
    trees.make_folder(tmp_path / "c" / "w")
    assert (tmp_path / "c" / "w").is_dir()

    with pytest.raises(CheckpointNotFoundError, match="cannot create"):
        trees.make_folder(tmp_path / "gone" / "w")
    with pytest.raises(CheckpointNotFoundError, match="cannot make"):
        trees.make_folders(tmp_path / "gone", ["w"])
    assert not (tmp_path / "gone").exists()


def test_what_is_moved_in_never_replaces_anything(tmp_path: Path) -> None:
    """Nothing is moved if one name is taken."""
    source, target = tmp_path / "source", tmp_path / "target"
    for folder in (source, target):
        folder.mkdir()
        (folder / "taken").write_text(folder.name)
    (source / "free").touch()

    with pytest.raises(StorageError, match="the checkpoint has taken itself"):
        trees.move_into(source, target)

    assert (target / "taken").read_text() == "target"
    assert sorted(path.name for path in source.iterdir()) == ["free", "taken"]


def test_a_file_that_cannot_be_replaced_is_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the way back, also after the rename; no temporary file stays in either case."""
    store = LocalStore(tmp_path)
    store.create("name", b"old")
    calls: list[Path] = []

    def fail_at_last(path: Path) -> None:
        calls.append(path)
        if len(calls) > 1:
            raise OSError(5, "boom")

    monkeypatch.setattr(replace, "fsync_directory", fail_at_last)
    with pytest.raises(StorageError, match="cannot publish .*boom"):
        replace.publish_file(store, tmp_path, "name", b"new")
    assert store.read("name", max_nbytes=9) == b"old"

    with pytest.raises(StorageError, match="cannot write .*boom"):
        replace.replace_file(store, tmp_path, "name", b"new")
    assert store.read("name", max_nbytes=9) == b"new"  # its name may not outlive a crash
    assert [path.name for path in tmp_path.iterdir()] == ["name"]
