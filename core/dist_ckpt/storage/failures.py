"""Errors of the operating system, turned into errors of ours that name action, path and errno.

Here: ``storage_errors``, and what a user can do about an errno. Not here: the tree of errors
(``dist_ckpt.errors``). No torch: the process that writes in the background uses this too.
"""

from __future__ import annotations

import errno
from pathlib import Path

from dist_ckpt.errors import CheckpointingException, CheckpointNotFoundError, StorageError

__all__ = ["hint_of_errno", "storage_errors"]

_HINTS = {
    errno.ENOSPC: "the disk is full; nothing of this save was committed.",
    errno.EDQUOT: "the quota is used up; nothing of this save was committed.",
    errno.EFBIG: "the file-size limit is reached; nothing of this save was committed.",
    errno.EROFS: "the file system is read-only.",
    errno.EACCES: "no permission.",
    errno.EPERM: "no permission.",
}


def hint_of_errno(code: int) -> str | None:
    """Return what a user can do about an error of the system, None if that is not known."""
    return _HINTS.get(code)


class storage_errors:  # noqa: N801 - used as a function; a generator takes longer than a small read
    """Turn an ``OSError`` inside into the error of our tree that names action, path and errno.

    Args:
        action: What cannot be done then.
        path: To what.
    """

    __slots__ = ("_action", "_path")

    def __init__(self, action: str, path: Path | str) -> None:
        """Remember both."""
        self._action, self._path = action, path

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Raise our error in place of an ``OSError``; other errors pass."""
        if not isinstance(error, OSError) or isinstance(error, CheckpointingException):
            return
        told = f"cannot {self._action} {self._path}"
        if isinstance(error, FileNotFoundError):
            raise CheckpointNotFoundError(f"{told}: no such file.") from error
        code = errno.errorcode.get(error.errno or 0, "?")
        hint = hint_of_errno(error.errno or 0)
        raise StorageError(f"{told}: {error.strerror} ({code}).", hint=hint) from error
