"""Leftovers of dead processes, and damaged checkpoints.

Here: removing leftovers, setting damaged checkpoints aside. Not here: who owns a leftover
(``storage.owners``), which checkpoint is damaged (``recovery``). Runs on one rank.

The law: nothing is removed that may still be needed. Only entries are removed that have a temporary
name of this library, whose owner has certainly ended, and in which nothing has changed for long. A
``.previous`` whose target is missing is the only copy of a checkpoint and stays; so does
``.damaged``.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import time
import uuid
from contextlib import suppress
from typing import TYPE_CHECKING

from dist_ckpt.errors import CheckpointNotFoundError, StorageError
from dist_ckpt.storage.commit import ASIDE_SUFFIX, attempt_prefix, locate, remove_tree
from dist_ckpt.storage.failures import storage_errors
from dist_ckpt.storage.owners import OWNER_SUFFIX, Owner, forget_owner, owner_of, record_of
from dist_ckpt.storage.trees import fsync_directory

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["DAMAGED_FILE", "has_target", "move_aside", "sweep_leftovers"]

logger = logging.getLogger(__name__)

DAMAGED_FILE = "damaged.json"
_DAMAGED_SUFFIX = ".damaged"
_OWNED = (".attempt", ".previous", ".trash", ".hooks")
"""What may share one record: an attempt, what becomes of it, and what it replaces."""

_DIRECTORY = re.compile(r"\.dist-ckpt-([0-9a-f]{10}-)?[0-9a-f]{12}\.(attempt|previous|trash|hooks)")
_RECORD = re.compile(r"\.dist-ckpt-([0-9a-f]{10}-)?[0-9a-f]{12}\.owner")
_ENTRY = re.compile(r"\..+\.[0-9a-f]{12}\.(link|part)")
"""A link or file under its temporary name, before it replaces another; made by the adapters."""


def sweep_leftovers(folder: Path, *, older_than_secs: float, any_owner: bool) -> list[Path]:
    """Remove what dead processes left directly in ``folder``; return what was removed.

    Args:
        folder: Where checkpoints or attempts are made; nothing happens if it is not there.
        older_than_secs: Entries that changed within this time stay.
        any_owner: Whether to remove old entries of any owner; only if no other job uses the folder.
    """
    here, limit = Owner.here(), time.time() - older_than_secs
    removed = []
    for path in _entries(folder):
        owner = owner_of(path)
        is_dead = owner is not None and owner.is_gone(here)
        if not (is_dead or any_owner) or not _is_untouched(path, limit):
            continue
        if path.suffix == ASIDE_SUFFIX and not has_target(path):
            logger.warning("%s is the only copy of its checkpoint and stays.", path)
            continue
        if _remove(path):
            logger.info("removed %s, which %s left behind.", path, _told(owner))
            removed.append(path)
    return removed


def _told(owner: Owner | None) -> str:
    if owner is None:
        return "somebody"
    return f"process {owner.pid} on {owner.host or 'some host'}"


def _entries(folder: Path) -> Iterator[Path]:
    """Yield the entries with a temporary name of ours; records only if nothing else is left."""
    try:
        names = sorted(os.listdir(folder))  # noqa: PTH208 - names are matched
    except OSError:
        return
    stems = {os.path.splitext(name)[0] for name in names if not _RECORD.fullmatch(name)}  # noqa: PTH122 - of many
    for name in names:
        path = folder / name
        if _DIRECTORY.fullmatch(name):
            if path.is_dir() and not path.is_symlink():
                yield path
        elif _ENTRY.fullmatch(name) and (path.is_symlink() or path.is_file()):
            yield path
    for name in names:
        if _RECORD.fullmatch(name) and name.removesuffix(OWNER_SUFFIX) not in stems:
            yield folder / name


def _is_untouched(path: Path, limit: float) -> bool:
    """Whether nothing of it, its record included, has changed since ``limit``."""
    return all(changed < limit for changed in _changes(path))


def _changes(path: Path) -> Iterator[float]:
    """Yield when things were last changed: the record, the entry itself, all that is in it."""
    with suppress(OSError):  # there is none
        yield os.lstat(record_of(path)).st_mtime
    try:
        found = os.lstat(path)
        # A rename does not change the mtime, but the ctime: what was just put aside is not old.
        yield max(found.st_mtime, found.st_ctime if path.suffix == ASIDE_SUFFIX else 0.0)
        if path.is_symlink() or not path.is_dir():
            return
        for parent, folders, files in os.walk(path):
            for name in (*folders, *files):
                yield os.lstat(os.path.join(parent, name)).st_mtime  # noqa: PTH118 - of many
    except OSError:
        yield float("inf")  # it is being changed


def has_target(aside: Path) -> bool:
    """Whether the checkpoint that stands aside has been replaced."""
    return any(aside.name.startswith(attempt_prefix(entry)) for entry in aside.parent.iterdir())


def _remove(path: Path) -> bool:
    """Remove one leftover and its record; return whether this call has removed it."""
    try:
        if path.suffix == ASIDE_SUFFIX:
            remove_tree(path)  # renames it first: a half of it must not look like a checkpoint
        elif path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    except FileNotFoundError:
        return False  # another process has removed it
    except OSError as error:
        logger.warning("%s was left behind and cannot be removed: %s", path, error)
        return False
    if not any(path.with_suffix(suffix).exists() for suffix in _OWNED):
        forget_owner(path)
    return True


def move_aside(path: Path, reason: str) -> Path:
    """Rename a damaged checkpoint so that it is not taken for a good one; return its new path.

    The rename is durable when this returns. The reason is written into ``damaged.json`` inside, if
    that is possible.

    Raises:
        CheckpointNotFoundError: Nothing is there.
        StorageError: It cannot be renamed.
    """
    found = locate(path)
    with storage_errors("set aside", found):
        is_there = not found.is_symlink() and found.is_dir()
    if not is_there:
        raise (CheckpointNotFoundError if not os.path.lexists(found) else StorageError)(
            f"cannot set {path} aside: it is no directory."
        )
    name = f"{attempt_prefix(path)}{uuid.uuid4().hex[:12]}{_DAMAGED_SUFFIX}"
    aside = found.with_name(name)
    with storage_errors("set aside", found):
        found.rename(aside)
        fsync_directory(aside.parent)
    story = {"name": path.name, "reason": reason, "time": time.time()}
    try:
        with (aside / DAMAGED_FILE).open("xb") as file:
            file.write(json.dumps(story, indent=1).encode())
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        logger.warning("%s: what was wrong with it could not be noted: %s", aside, error)
    return aside
