"""From an attempt to a checkpoint: written beside the target, made durable, renamed into place.

Here: the attempt directory, its publication by one rename, and where a reader looks. Not here: what
the files mean. Runs on rank 0 alone; other ranks only write into the attempt directory.

The law: at every instant the target path is the old checkpoint, or the new one, or nothing (if
there was no old one). A file system without an atomic exchange of two names has one more state,
for the moment between two renames: the old checkpoint stands beside the target under a name that
``locate`` knows. See docs/decisions/0003-commit-by-rename.md.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import logging
import os
import shutil
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

from dist_ckpt.errors import StorageError
from dist_ckpt.storage.failures import storage_errors
from dist_ckpt.storage.owners import forget_owner, record_of, record_owner
from dist_ckpt.storage.paths import absolute, is_directory
from dist_ckpt.storage.trees import fsync_directory, make_directory

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

__all__ = [
    "ASIDE_SUFFIX",
    "ATTEMPT_SUFFIX",
    "TRASH_SUFFIX",
    "Attempt",
    "Replace",
    "asides_of",
    "attempt_name",
    "attempt_prefix",
    "discard",
    "forget_aside",
    "forget_trash",
    "locate",
    "put_back",
    "remove_tree",
]

logger = logging.getLogger(__name__)

Replace: TypeAlias = Literal["checkpoint", "any"]
"""What a save may replace at its target: only an older checkpoint, or anything. Files of a
directory that belong to no checkpoint are kept beside the new one."""

ATTEMPT_SUFFIX, ASIDE_SUFFIX, TRASH_SUFFIX = ".attempt", ".previous", ".trash"
"""Suffixes of what a save writes, of what it replaces, and of what is being removed. They share one
stem, so that one record of the owner is enough."""

_PREFIX = ".dist-ckpt-"
_EXCHANGE = 2  # RENAME_EXCHANGE, linux/fs.h
_AT_FDCWD = -100  # fcntl.h
_NO_EXCHANGE = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EPERM)


@dataclass(frozen=True, slots=True)
class Attempt:
    """A save that is not committed: ``directory`` will become ``target`` or be removed."""

    target: Path
    directory: Path
    checkpoint_id: str

    @classmethod
    def begin(cls, target: Path, staging_dir: Path | None) -> Attempt:
        """Make a fresh attempt directory beside the target, or in ``staging_dir``.

        The directory must be on the target's file system. Its name is unique, so a dead attempt is
        never mistaken for this one and never has to be cleared first. Its owner is recorded beside
        it. If this fails or is interrupted, neither is left behind.
        """
        # The worker that publishes may have another working directory by now.
        target = absolute(target)
        parent = target.parent if staging_dir is None else absolute(staging_dir)
        checkpoint_id = uuid.uuid4().hex
        directory = parent / attempt_name(target, checkpoint_id)
        with storage_errors("create", target.parent):
            make_directory(target.parent)
            _recover(target)
        with storage_errors("create", directory):
            make_directory(parent)
            try:
                record_owner(directory)
                directory.mkdir()
                return cls(target, directory, checkpoint_id)
            except BaseException:
                with suppress(OSError):
                    directory.rmdir()
                forget_owner(directory)
                raise

    def publish(self, *, old_files: Collection[str]) -> None:
        """Make the attempt the target. It must be complete and durable, marker included.

        Args:
            old_files: Names in the old target that belong to the old checkpoint; anything else
                there is the user's and is kept beside the new one.
        """
        with storage_errors("publish", self.target):
            # The order is the law: first the names in the attempt are durable, then it is renamed,
            # then the rename is durable. Nothing of the old checkpoint is removed before that.
            fsync_directory(self.directory)
            if self.target.is_dir() and not self.target.is_symlink():
                _carry_over(self.target, self.directory, old_files)
            old = _replace(self.directory, self.target)
            try:
                fsync_directory(self.target.parent)
            except BaseException:
                # A failed save leaves the old checkpoint in place, at this late point too.
                _put_back(self.directory, self.target, old)
                raise
        try:
            if old is not None:
                remove_tree(old, ignore_errors=True)
            if not _is_left(self.directory, self.target.parent):
                forget_owner(self.directory)
            forget_aside(self.target)
        except Exception:
            # The new checkpoint is committed: what fails from here on must not fail the save.
            logger.warning("%s: what it replaced was not removed", self.target, exc_info=True)

    def abort(self) -> None:
        """Remove the attempt; what cannot be removed has no marker and is never read."""
        discard(self.target, self.directory)


def discard(target: Path, directory: Path) -> None:
    """Remove the directory of an attempt that has failed, as far as possible."""
    remove_tree(directory, ignore_errors=True)
    if not _is_left(directory, target.parent):
        forget_owner(directory)


def attempt_name(target: Path, checkpoint_id: str) -> str:
    """Return the name of the directory in which a checkpoint of this id is written."""
    return f"{attempt_prefix(target)}{checkpoint_id[:12]}{ATTEMPT_SUFFIX}"


def attempt_prefix(target: Path) -> str:
    """Return the prefix of the names of this target's attempts.

    The target's own name is not part of it: frameworks parse such names (``hpc_ckpt_*``,
    ``checkpoint*``, ``*.ckpt``) and list the directory.
    """
    digest = hashlib.sha256(os.fsencode(target.name)).hexdigest()
    return f"{_PREFIX}{digest[:10]}-"


def locate(target: Path) -> Path:
    """Return where the checkpoint of ``target`` is: there, or aside after a crash in a rename."""
    if os.path.lexists(target):
        return target
    aside = asides_of(target)
    return aside[-1] if aside else target


def forget_aside(target: Path) -> None:
    """Remove old checkpoints that crashed saves left aside; ``locate`` would find them otherwise.

    Raises:
        OSError: It cannot be removed.
    """
    for path in asides_of(target):
        remove_tree(path)


def forget_trash(target: Path, directory: Path) -> None:
    """Remove what a dead process had begun to remove, beside the target or the attempt."""
    for parent in {target.parent, directory.parent}:
        for trash in parent.glob(f"{attempt_prefix(target)}*{TRASH_SUFFIX}"):
            shutil.rmtree(trash, ignore_errors=True)
            if not trash.exists():
                forget_owner(trash)


def remove_tree(path: Path, *, ignore_errors: bool = False) -> None:
    """Remove a checkpoint, file or link so that at no instant a part of it looks like a checkpoint.

    A directory is renamed first, durably, and its files are removed under the new name.
    """
    try:
        if path.is_symlink() or path.is_file():
            path.unlink()
        elif path.is_dir():
            _remove_directory(path, ignore_errors=ignore_errors)
    except FileNotFoundError:
        return  # another process has removed it
    except OSError:
        if not ignore_errors:
            raise


def _remove_directory(path: Path, *, ignore_errors: bool) -> None:
    is_ours = path.name.startswith(_PREFIX) and path.suffix in (ATTEMPT_SUFFIX, ASIDE_SUFFIX)
    stem = path.stem if is_ours else f"{attempt_prefix(path)}{uuid.uuid4().hex[:12]}"
    trash = path.with_name(f"{stem}{TRASH_SUFFIX}")
    is_owned = record_of(trash).exists()
    try:
        if not is_owned:
            record_owner(trash)
        path.rename(trash)
        if not is_ours or path.suffix != ATTEMPT_SUFFIX:
            # After a crash the name must not come back with a part of its files. This matters only
            # for names that readers look at, not for an attempt.
            fsync_directory(path.parent)
        shutil.rmtree(trash, ignore_errors=ignore_errors)
    finally:
        if not is_owned and not trash.exists():
            forget_owner(trash)


def _is_left(directory: Path, parent: Path) -> bool:
    """Whether anything of an attempt is left: itself, what it replaced, or its remains."""
    places = {directory.parent, parent}
    suffixes = (ATTEMPT_SUFFIX, ASIDE_SUFFIX, TRASH_SUFFIX)
    return any(
        (one / f"{directory.stem}{suffix}").exists() for one in places for suffix in suffixes
    )


def asides_of(target: Path) -> list[Path]:
    """Return the old checkpoints of a target that crashed saves left aside, the newest last.

    Raises:
        StorageError: The folder cannot be listed.
    """
    pattern = f"{attempt_prefix(target)}*{ASIDE_SUFFIX}"
    if not is_directory(target.parent):
        return []
    with storage_errors("list", target.parent):
        return sorted(target.parent.glob(pattern), key=_mtime_ns)


def _mtime_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:  # another process has just put it back or removed it
        return 0


def put_back(target: Path) -> bool:
    """Rename what a crash has left aside to its target; return whether the target exists.

    For readers that look for a checkpoint by its path. A failure is only logged.
    """
    try:
        _recover(target)
    except (OSError, StorageError) as error:
        logger.debug("%s stays aside: %s", target, error)
    return os.path.lexists(target)


def _recover(target: Path) -> None:
    found = locate(target)
    if found != target:
        found.rename(target)


def _replace(new: Path, target: Path) -> Path | None:
    """Rename ``new`` to ``target`` and return where the old target is now, if there was one."""
    if not os.path.lexists(target):
        new.rename(target)
        return None
    if target.is_dir() and not target.is_symlink() and not any(target.iterdir()):
        new.rename(target)  # rename(2) replaces an empty directory
        return None
    try:
        _exchange(new, target)
    except OSError as error:
        if error.errno not in _NO_EXCHANGE:
            raise
    else:
        return new
    aside = target.parent / f"{new.stem}{ASIDE_SUFFIX}"
    for is_last in (False, False, True):
        target.rename(aside)
        try:
            new.rename(target)
        except OSError as error:
            with suppress(FileNotFoundError):
                aside.rename(target)
            # Another process took this for a crash and has put the old one back: try again.
            if is_last or error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        else:
            break
    return aside


def _put_back(new: Path, target: Path, old: Path | None) -> None:
    """Undo ``_replace``, so that ``new`` is an attempt again."""
    if old == new:
        _exchange(new, target)
        return
    target.rename(new)
    if old is not None:
        old.rename(target)


def _exchange(a: Path, b: Path) -> None:
    """Swap two names in one step (renameat2(2), Linux)."""
    call: Callable[..., int] | None = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    if call(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _EXCHANGE) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(b))


def _carry_over(old: Path, new: Path, old_files: Collection[str]) -> None:
    """Link (or copy) the user's files of ``old`` into ``new``, before the names are swapped."""
    folders = {parent for name in old_files for parent in _parents(name)}
    _carry_folder(old, new, "", old_files, folders)
    fsync_directory(new)


def _carry_folder(
    old: Path, new: Path, inside: str, old_files: Collection[str], folders: Collection[str]
) -> bool:
    """Carry over one folder, durably; return whether there was anything.

    Folders that both have, or that were the old checkpoint's, are looked into.
    """
    is_any = False
    for entry in sorted(os.scandir(old / inside), key=lambda e: e.name):
        name = f"{inside}{entry.name}"
        destination = new / name
        if name in old_files:
            continue
        is_folder = entry.is_dir(follow_symlinks=False)
        is_shared = is_folder and destination.is_dir() and not _is_array(Path(entry.path))
        if is_folder and (name in folders or is_shared):
            is_any |= _carry_folder(old, new, f"{name}/", old_files, folders)
            continue
        if os.path.lexists(destination):
            continue
        is_any = True
        destination.parent.mkdir(parents=True, exist_ok=True)
        if is_folder:
            shutil.copytree(entry.path, destination, symlinks=True, copy_function=_link_or_copy)
            for folder, _, _ in os.walk(destination):
                fsync_directory(Path(folder))
        elif entry.is_symlink():
            destination.symlink_to(Path(entry.path).readlink())
        else:
            _link_or_copy(entry.path, os.fspath(destination))
    if is_any and inside:
        # The old folder is removed next: its files must be durable here first.
        fsync_directory(new / inside)
    return is_any


def _is_array(folder: Path) -> bool:
    """Whether a folder is an array of another checkpoint: two in one would read as neither."""
    return any(os.path.lexists(folder / name) for name in (".zarray", "zarr.json"))


def _parents(name: str) -> list[str]:
    parts = name.split("/")
    return ["/".join(parts[:n]) for n in range(1, len(parts))]


def _link_or_copy(source: str, destination: str) -> str:
    try:
        os.link(source, destination)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise StorageError(
                f"cannot keep {source} beside the new checkpoint: {error}"
            ) from error
        shutil.copy2(source, destination)
        with suppress(PermissionError), Path(destination).open("rb") as file:
            os.fsync(file.fileno())
    return destination
