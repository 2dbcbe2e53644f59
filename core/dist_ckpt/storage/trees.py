"""Directories and what is below them: making, syncing, summing up, moving, removing.

Here: what changes a directory that is nobody's checkpoint yet, or none at all. Not here: the way
from an attempt to a checkpoint (``storage.commit``), single files (``storage.local``). No torch:
the process that writes in the background uses it too.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from dist_ckpt.errors import StorageError
from dist_ckpt.storage.checksums import FileSum, sum_of_file
from dist_ckpt.storage.failures import storage_errors
from dist_ckpt.storage.owners import forget_owner, record_owner

__all__ = [
    "fsync_directory",
    "link_files",
    "make_directory",
    "make_folder",
    "make_folders",
    "make_parents",
    "make_temporary",
    "move_into",
    "remove_temporary",
    "synced_files",
]


def fsync_directory(path: Path) -> None:
    """Make the names in directory ``path`` durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_directory(directory: Path) -> None:
    """Make a directory and its missing parents, each name durable; nothing if it is there.

    Raises:
        StorageError: It cannot be made.
    """
    with storage_errors("create", directory):
        missing = [one for one in (directory, *directory.parents) if not one.exists()]
        directory.mkdir(parents=True, exist_ok=True)
        for one in missing:
            fsync_directory(one.parent)


def make_folder(path: Path) -> None:
    """Make a directory in one that is there; nothing happens if it is there itself.

    Missing parents are not made: an attempt that was removed meanwhile must not come back.

    Raises:
        StorageError: It cannot be made.
    """
    with storage_errors("create", path):
        path.mkdir(exist_ok=True)


def make_folders(directory: Path, names: Iterable[str]) -> None:
    """Make directories below ``directory``, in this order; those that are there stay.

    Raises:
        StorageError: One cannot be made.
    """
    with storage_errors("make a directory in", directory):
        for name in names:
            with suppress(FileExistsError):
                os.mkdir(f"{directory}/{name}")  # noqa: PTH102 - thousands, and a path costs more


def make_parents(directory: Path, name: str) -> None:
    """Make the directories on the way to the file ``name`` below ``directory``.

    Raises:
        StorageError: One cannot be made.
    """
    with storage_errors("create", directory / name):
        (directory / name).parent.mkdir(parents=True, exist_ok=True)


def make_temporary(directory: Path) -> None:
    """Make a directory with a temporary name, whose owner is recorded beside it.

    Raises:
        StorageError: It cannot be made; the record may be there then.
    """
    record_owner(directory)
    with storage_errors("make", directory):
        directory.mkdir()


def remove_temporary(directory: Path) -> None:
    """Remove a directory of ``make_temporary`` and the record of its owner, as far as possible."""
    shutil.rmtree(directory, ignore_errors=True)
    forget_owner(directory)


def link_files(source: Path, destination: Path, names: Iterable[str]) -> None:
    """Give files below ``source`` the same names below ``destination`` too, durably.

    The names directly in ``destination`` are made durable when it is published.

    Raises:
        StorageError: One cannot be linked.
    """
    with storage_errors("link", destination):
        for name in names:
            target = destination / name
            target.parent.mkdir(parents=True, exist_ok=True)
            os.link(source / name, target)
        for path in sorted(destination.rglob("*")):
            if path.is_dir():
                fsync_directory(path)


def synced_files(directory: Path) -> dict[str, FileSum]:
    """Return all files below ``directory`` with their sums, after making them durable.

    Raises:
        StorageError: One cannot be read or synced.
    """
    with storage_errors("sync", directory):
        _sync_tree(directory)
        return _sums_below(directory, directory)


def move_into(source: Path, destination: Path) -> dict[str, FileSum]:
    """Move what is in ``source`` into ``destination``, durably; return its files with their sums.

    Raises:
        StorageError: A name is taken there, or an entry cannot be moved.
    """
    with storage_errors("include", source):
        entries = sorted(source.iterdir())
        taken = [entry.name for entry in entries if os.path.lexists(destination / entry.name)]
        if taken:
            raise StorageError(
                f"cannot include {source}: the checkpoint has {', '.join(taken)} itself.",
                hint="give what is included another name.",
            )
        files: dict[str, FileSum] = {}
        for entry in entries:
            moved = destination / entry.name
            shutil.move(entry, moved)
            _sync_tree(moved)
            files |= _sums_below(moved, destination)
        return files


def _sync_tree(path: Path) -> None:
    """Make a file, or a directory with all that is in it, durable."""
    if path.is_symlink():
        return
    if path.is_dir():
        for entry in path.iterdir():
            _sync_tree(entry)
        fsync_directory(path)  # after what is in it, as the attempt itself is synced last
        return
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _sums_below(path: Path, root: Path) -> dict[str, FileSum]:
    """Return the sums of a file, or of all regular files of a directory, by name below ``root``."""
    found = sorted(path.rglob("*")) if path.is_dir() and not path.is_symlink() else [path]
    return {
        one.relative_to(root).as_posix(): sum_of_file(one)
        for one in found
        if stat.S_ISREG(one.lstat().st_mode)
    }
