"""Memory of this machine: files without a name that hold it.

Here: the ways to get shared memory, page-locking. Not here: how much there is (``available``), what
lies in it (``arena``), who may use it (``pool``). Used locally.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, TypeAlias

import torch

from dist_ckpt._process.available import available_nbytes
from dist_ckpt.errors import StorageError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "MAKERS",
    "Maker",
    "grow",
    "make_file",
    "pin",
    "unpin",
]

Maker: TypeAlias = Callable[[int], int]
"""Takes a size, returns the descriptor of a file of that size without a name; or ``OSError``."""

_SMALL_NBYTES = 16 << 20
"""Below, nobody asks how much memory there is: looking costs as much as the memory."""

_SHARED_DIR = "/dev/shm"  # noqa: S108 - files in it never have a name


# -- files -----------------------------------------------------------------------------------------


def _make_anonymous(nbytes: int) -> int:
    """Memory as a file that never had a name; not bounded by the size of ``/dev/shm``."""
    if not hasattr(os, "memfd_create"):
        raise OSError("this system has no memfd_create")
    return _sized(os.memfd_create("dist_ckpt", os.MFD_CLOEXEC), nbytes)


def _make_in_shared_memory(nbytes: int) -> int:
    """The same through ``/dev/shm``, which is small in containers."""
    state = os.statvfs(_SHARED_DIR)
    if (free := state.f_bavail * state.f_frsize) < nbytes:
        raise OSError(f"{_SHARED_DIR} has {free} bytes free")
    return _unnamed(_SHARED_DIR, nbytes)


def _make_in_temporary_directory(nbytes: int) -> int:
    """A file on a disk, seen through its cache: slower, and it is written back."""
    return _unnamed(None, nbytes)


MAKERS: Mapping[str, Maker] = {
    "memfd": _make_anonymous,
    "/dev/shm": _make_in_shared_memory,  # noqa: S108 - see above
    "a temporary file": _make_in_temporary_directory,
}
"""The ways to get memory that two processes can map, best first."""


def make_file(nbytes: int, makers: Mapping[str, Maker] = MAKERS) -> tuple[int, str]:
    """Return the descriptor of shared memory, and which way it was got.

    The descriptor is closed on ``exec``; all its bytes are there: memory that lacks later would end
    the process by a signal.

    Raises:
        StorageError: There is not enough memory, or no way works; tells of each.
    """
    available = available_nbytes() if nbytes >= _SMALL_NBYTES else None
    if available is not None and nbytes > available:
        raise _too_little(nbytes, f"{available} bytes are available")
    reasons = []
    for name, make in makers.items():
        try:
            return make(nbytes), name
        except OSError as error:
            reasons.append(f"{name}: {error}")
    raise _too_little(nbytes, "; ".join(reasons))


def grow(descriptor: int, nbytes: int, grown: int) -> None:
    """Make a file of ``nbytes`` one of ``grown``; what lies in it stays.

    Raises:
        StorageError: There is not enough memory; the file is as it was.
    """
    available = available_nbytes()
    if available is not None and grown - nbytes > available:
        raise _too_little(grown, f"{nbytes} are there, {available} more available")
    try:
        _size(descriptor, grown)
    except OSError as error:
        with suppress(OSError):
            os.ftruncate(descriptor, nbytes)
        raise _too_little(grown, str(error)) from error


def _too_little(nbytes: int, reason: str) -> StorageError:
    return StorageError(
        f"cannot get {nbytes} bytes of shared memory: {reason}.",
        hint="free memory, or save synchronously.",
    )


def _unnamed(folder: str | None, nbytes: int) -> int:
    with tempfile.TemporaryFile(dir=folder) as file:
        descriptor = os.dup(file.fileno())
    return _sized(descriptor, nbytes)


def _sized(descriptor: int, nbytes: int) -> int:
    try:
        _size(descriptor, nbytes)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _size(descriptor: int, nbytes: int) -> None:
    os.ftruncate(descriptor, nbytes)
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, nbytes)


# -- page-locking ----------------------------------------------------------------------------------

_PORTABLE = 1  # cudaHostRegisterPortable, driver_types.h


def pin(pointer: int, nbytes: int) -> bool:
    """Lock memory for the GPU; return whether that was done.

    Only in a process that already uses a GPU: asking would start the driver in all others.
    """
    if not nbytes or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return False
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    return int(runtime.cudaHostRegister(pointer, nbytes, _PORTABLE)) == 0


def unpin(pointer: int) -> None:
    """Undo ``pin``."""
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    runtime.cudaHostUnregister(pointer)
