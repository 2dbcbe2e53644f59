"""Memory of this machine: how much there is, and files without a name that hold it.

Here: what is available, the ways to get shared memory, page-locking. Not here: what lies in it
(``arena``), who may use it (``pool``). Used locally.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import torch

from dist_ckpt.errors import StorageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = [
    "MAKERS",
    "Maker",
    "available_nbytes",
    "cgroup_nbytes",
    "grow",
    "make_file",
    "meminfo_nbytes",
    "pin",
    "unpin",
]

Maker: TypeAlias = Callable[[int], int]
"""Takes a size, returns the descriptor of a file of that size without a name; or ``OSError``."""

_SMALL_NBYTES = 16 << 20
"""Below, nobody asks how much memory there is: looking costs as much as the memory."""

_SHARED_DIR = "/dev/shm"  # noqa: S108 - files in it never have a name


# -- how much --------------------------------------------------------------------------------------


def available_nbytes() -> int | None:
    """Return how much memory this process can still get; None if the system does not say."""
    found = (meminfo_nbytes(), cgroup_nbytes())
    return min((one for one in found if one is not None), default=None)


def meminfo_nbytes(path: Path = Path("/proc/meminfo")) -> int | None:
    """Return what the kernel takes for available (``MemAvailable``); None if it does not say."""
    with suppress(OSError, ValueError, IndexError):
        for line in path.read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    return None


def cgroup_nbytes(
    membership: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> int | None:
    """Return what the control groups of this process leave, of both versions; None without limit.

    Pages of files that nobody uses are counted as free: the kernel gives them up first.
    """
    rooms: list[int] = []
    with suppress(OSError):
        for line in membership.read_text(encoding="utf-8").splitlines():
            _, controllers, group = line.split(":", 2)
            if not controllers:
                rooms += _rooms(root, group, _VERSION_2)
            elif "memory" in controllers.split(","):
                rooms += _rooms(root / "memory", group, _VERSION_1)
    return min(rooms, default=None)


_VERSION_2 = ("memory.max", "memory.current", "inactive_file")
_VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def _rooms(root: Path, group: str, names: tuple[str, str, str]) -> Iterator[int]:
    """Yield what is left in a group and in each above it: the least of them is what counts.

    In a container the group's own path may be one of the host; then the root is what is seen.
    """
    limit_name, usage_name, idle_name = names
    parts = [part for part in group.split("/") if part not in ("", "..")]
    for count in range(len(parts), -1, -1):
        folder = root.joinpath(*parts[:count])
        # "max" is no number: no limit here.
        with suppress(OSError, ValueError):
            limit = int((folder / limit_name).read_text(encoding="ascii"))
            usage = int((folder / usage_name).read_text(encoding="ascii"))
            idle = int(_statistics(folder / "memory.stat").get(idle_name, 0))
            yield max(limit - max(usage - idle, 0), 0)


def _statistics(path: Path) -> Mapping[str, str]:
    with suppress(OSError, ValueError):
        return dict(line.split(" ", 1) for line in path.read_text(encoding="ascii").splitlines())
    return {}


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
