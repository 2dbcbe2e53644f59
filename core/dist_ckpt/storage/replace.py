"""One small file in place of an older one, in one step.

Here: replacing a file by a rename, with or without the way back. Not here: whole checkpoints
(``storage.commit``). One process at a time for each file.
"""

from __future__ import annotations

import logging
import shutil
import uuid
from typing import TYPE_CHECKING

from dist_ckpt.errors import CheckpointingException
from dist_ckpt.storage.failures import storage_errors
from dist_ckpt.storage.trees import fsync_directory

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from dist_ckpt.storage.base import Store

__all__ = ["delete_quietly", "publish_file", "replace_file"]

logger = logging.getLogger(__name__)


def replace_file(store: Store, directory: Path, name: str, data: bytes) -> None:
    """Create or replace the small file ``name`` durably; a crash leaves no part of it there.

    Args:
        store: The files below ``directory``.
        directory: Where the file is.
        name: Its name.
        data: All of its bytes.

    Raises:
        StorageError: It could not be written.
    """
    temporary = f".{name}.{uuid.uuid4().hex}"
    try:
        store.create(temporary, data)
        with storage_errors("write", directory / name):
            (directory / temporary).replace(directory / name)
            fsync_directory(directory)
    except BaseException:
        store.delete(temporary)
        raise


def publish_file(store: Store, directory: Path, name: str, data: bytes) -> None:
    """Replace ``name``, which commits; should that fail at any point, the old file is there again.

    Args:
        store: The files below ``directory``.
        directory: Where the file is.
        name: Its name.
        data: All of its bytes.

    Raises:
        StorageError: It could not be written; the old file, if there was one, has its name.
    """
    path, unique = directory / name, uuid.uuid4().hex[:12]
    new, old = path.with_name(f"{name}.{unique}.tmp"), path.with_name(f"{name}.{unique}.old")
    is_replaced = False
    try:
        store.create(new.name, data)
        with storage_errors("publish", path):
            if path.exists():
                shutil.copyfile(path, old)
            # What is committed must be found after a crash: the names before the commit.
            fsync_directory(directory)
            is_replaced = True
            new.replace(path)
            fsync_directory(directory)
    except BaseException:
        if old.exists():
            old.replace(path)
        elif is_replaced:
            path.unlink(missing_ok=True)
        raise
    finally:
        delete_quietly(store, (new.name, old.name))


def delete_quietly(store: Store, names: Iterable[str]) -> None:
    """Remove files that are not needed any more; a failure is only logged."""
    for name in sorted(names):
        try:
            store.delete(name)
        except CheckpointingException as error:
            logger.warning("left behind: %s", error)
