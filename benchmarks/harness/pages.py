"""The state of the page cache, which decides more than any library does.

Here: cold, warm and reused pages, made and verified. Not here: clocks.

* ``cold``: files are synced, their pages dropped, and ``mincore`` says that none is left.
* ``warm``: all pages of the files are in the cache.
* ``reused``: a scratch file of the same size has just been written and removed, so that a buffered
  write finds page-cache pages that the machine has touched before. On a virtual machine pages that
  were never touched cost several times as much.
* ``fresh``: new files, and nothing prepared: pages come from wherever the kernel has them.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

BLOCK_NBYTES = 8 << 20
_libc = ctypes.CDLL(None, use_errno=True)


def files_below(root: Path) -> Iterator[Path]:
    """Yield regular files."""
    return (path for path in sorted(root.rglob("*")) if path.is_file() and not path.is_symlink())


def size_below(root: Path) -> int:
    """Return the bytes of all files."""
    return sum(path.stat().st_size for path in files_below(root))


def make_cold(root: Path) -> int:
    """Sync all files, drop their pages, and return how many bytes are in the cache even so."""
    for path in files_below(root):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
    return cached_below(root)


def make_warm(root: Path) -> int:
    """Read all files, and return how many of their bytes are in the cache then."""
    buffer = memoryview(bytearray(BLOCK_NBYTES))
    for path in files_below(root):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return cached_below(root)


def reuse_pages(directory: Path, nbytes: int) -> None:
    """Write and remove a scratch file, so that the next ``nbytes`` of page cache were touched."""
    block = memoryview(bytearray(os.urandom(1 << 20)) * (BLOCK_NBYTES >> 20))
    path = directory / "scratch"
    with path.open("wb", buffering=0) as file:
        for start in range(0, nbytes, BLOCK_NBYTES):
            file.write(block[: min(BLOCK_NBYTES, nbytes - start)])
    path.unlink()


def sync_below(root: Path) -> None:
    """Make files and directories durable."""
    directories = [root.parent, root, *(path for path in root.rglob("*") if path.is_dir())]
    for path in [*files_below(root), *directories]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def cached_below(root: Path) -> int:
    """Return how many bytes of all files are in the page cache."""
    return sum(cached(path) for path in files_below(root))


def cached(path: Path) -> int:
    """Return how many bytes of a file are in the page cache, in whole pages."""
    size = path.stat().st_size
    if not size:
        return 0
    with path.open("rb") as file:
        flags, rights = mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE
        with mmap.mmap(file.fileno(), size, flags=flags, prot=rights) as mapped:
            first = ctypes.c_char.from_buffer(mapped)
            pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
            failed = _libc.mincore(
                ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(size), pages
            )
            del first
    if failed:
        raise OSError(ctypes.get_errno(), "mincore", str(path))
    return mmap.PAGESIZE * sum(1 for page in bytes(pages) if page & 1)
