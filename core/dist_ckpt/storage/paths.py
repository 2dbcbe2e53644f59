"""Queries about a path: whether it exists, its kind, its identity, what is in it.

Here: questions that change nothing. Not here: reading files (``storage.local``), changing what is
there (``storage.trees``, ``storage.commit``). Any rank, any thread; no torch: the process that
writes in the background uses it too.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from dist_ckpt.errors import StorageError
from dist_ckpt.storage.failures import storage_errors

__all__ = [
    "Entry",
    "Kind",
    "Stamp",
    "absolute",
    "check_is_shared",
    "entries_of",
    "exists",
    "is_directory",
    "is_empty",
    "is_file",
    "is_link",
    "is_link_to_sibling",
    "is_taken",
    "kind_of",
    "names_below",
    "real_path",
    "sizes_below",
    "stamp_of",
]

Kind: TypeAlias = Literal["directory", "file", "link", "other"]
"""``other`` is a device, a pipe or a socket."""


@dataclass(frozen=True, slots=True)
class Stamp:
    """Identifies a file or directory, as another one may later have the same path."""

    device: int
    inode: int
    nbytes: int
    mtime_ns: int


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of a directory; ``nbytes`` is -1 for directories and without ``with_sizes``."""

    name: str
    is_folder: bool
    is_link: bool
    nbytes: int


def absolute(path: str | os.PathLike[str]) -> Path:
    """Return a path from the root on. Links stay: a link may be the name of a checkpoint."""
    return Path(os.path.abspath(path))  # noqa: PTH100 - resolve() would follow a link


def real_path(path: str | os.PathLike[str]) -> str:
    """Return what is equal for two paths of one place, also if links lead there."""
    return os.path.realpath(path)


def is_taken(path: Path) -> bool:
    """Whether the name is taken, be it by a link that leads nowhere. False if that is not known."""
    return os.path.lexists(path)


def exists(path: Path) -> bool:
    """Whether there is a file or directory, or a link to one.

    Raises:
        OSError: The system cannot tell.
    """
    return path.exists()


def is_file(path: Path) -> bool:
    """Whether there is a regular file, or a link to one.

    Raises:
        OSError: The system cannot tell.
    """
    return path.is_file()


def is_link(path: Path) -> bool:
    """Whether a symbolic link is there.

    Raises:
        OSError: The system cannot tell.
    """
    return path.is_symlink()


def is_link_to_sibling(path: Path) -> bool:
    """Whether a link is there that leads to another name in its own directory."""
    return path.is_symlink() and path.resolve().parent == path.parent.resolve()


def is_directory(path: Path) -> bool:
    """Whether a directory is there, or a link to one.

    Raises:
        StorageError: The system cannot tell, which must not be taken for "no".
    """
    with storage_errors("look at", path):
        try:
            return stat.S_ISDIR(path.stat().st_mode)
        except ValueError:  # no name that a file can have
            return False
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                return False
            raise


def is_empty(directory: Path) -> bool:
    """Whether a directory holds nothing.

    Raises:
        OSError: It cannot be listed.
    """
    return not any(directory.iterdir())


def kind_of(path: Path) -> Kind | None:
    """Return what bears the name, no link followed; None if nothing does.

    Raises:
        OSError: The system cannot tell.
    """
    if not os.path.lexists(path):
        return None
    mode = path.lstat().st_mode
    if stat.S_ISDIR(mode):
        return "directory"
    if stat.S_ISREG(mode):
        return "file"
    return "link" if stat.S_ISLNK(mode) else "other"


def stamp_of(path: Path, *, follow_links: bool = True) -> Stamp:
    """Return which file or directory is there.

    Raises:
        OSError: None is, or the system cannot tell.
    """
    found = path.stat() if follow_links else os.lstat(path)
    return Stamp(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


def entries_of(directory: Path, *, with_sizes: bool = False) -> Iterator[Entry]:
    """Yield what a directory holds, in no order; links are not followed.

    Raises:
        OSError: It cannot be listed.
    """
    with os.scandir(directory) as entries:
        for entry in entries:
            is_folder, nbytes = entry.is_dir(follow_symlinks=False), -1
            if with_sizes and not is_folder:  # a call for each file: not all callers need it
                nbytes = entry.stat(follow_symlinks=False).st_size
            yield Entry(entry.name, is_folder, entry.is_symlink(), nbytes)


def names_below(directory: Path, pattern: str = "*") -> list[str]:
    """Return the names, relative to a directory, of all below it whose last part matches."""
    return [path.relative_to(directory).as_posix() for path in sorted(directory.rglob(pattern))]


def sizes_below(directory: Path) -> dict[str, int]:
    """Return the size of each file below a directory, by its name relative to it."""
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return {path.relative_to(directory).as_posix(): path.stat().st_size for path in files}


def check_is_shared(directory: Path, rank: int) -> None:
    """Raise if a rank does not see the directory that rank 0 made.

    Raises:
        StorageError: It does not, or the system cannot tell.
    """
    if not is_directory(directory):
        raise StorageError(
            f"{directory} was made by rank 0 but is not there for rank {rank}.",
            hint="the checkpoint directory must be on a file system that all ranks share.",
        )
