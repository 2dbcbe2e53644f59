"""The store port: eight operations on named files, and no idea of tensors or ranks.

Here: the protocol and its one data type. Not here: implementations (one file each beside this).
"""

from __future__ import annotations

import os
import re
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from contextlib import AbstractContextManager

    from dist_ckpt.storage.checksums import FileSum

__all__ = ["Extent", "FileWriter", "Store", "checked_name", "held"]


@dataclass(frozen=True, slots=True)
class Extent:
    """Bytes at a position of a file: to be written from ``buffer``, or read into it."""

    position: int
    buffer: memoryview | bytes


_PLAIN = re.compile(r"[A-Za-z0-9_%][!-.0-~ ]*(?:/[A-Za-z0-9_%][!-.0-~ ]*)*")
"""Most names: plain ASCII parts, which need no further check."""


class FileWriter(Protocol):
    """A file that is being written, by one thread at a time; ends by ``finish`` or ``abandon``."""

    def write_at(self, position: int, data: memoryview) -> None:
        """Write a flat view of bytes; no byte twice. ``data`` is not kept after the call."""
        ...

    def finish(self) -> FileSum:
        """Set the file's size and make it durable; return its checksums."""
        ...

    def abandon(self) -> None:
        """Close it, complete or not; may be called again, and after ``finish``."""
        ...


class Store(Protocol):
    """Named files below one root. Names are relative, ``/``-separated and confined to the root.

    Every method raises ``StorageError`` naming the file; ``CheckpointNotFoundError`` for a file
    that is not there. All are safe to call from several threads on different files.
    """

    def writer(self, name: str, *, nbytes: int) -> FileWriter:
        """Create ``name``, which will have ``nbytes`` bytes; an error if it exists."""
        ...

    def write(self, name: str, extents: Iterable[Extent], *, nbytes: int) -> FileSum:
        """Create ``name`` with ``nbytes`` bytes from ``extents`` and make it durable.

        Extents are taken one at a time, so an iterator may make each just before it is needed.
        The checksums are computed in the same pass.
        """
        ...

    def create(self, name: str, data: bytes) -> FileSum:
        """Create ``name`` with ``data``, durably; an error if it exists."""
        ...

    def read(self, name: str, *, max_nbytes: int) -> bytes:
        """Return a whole small file; an error if it is longer than ``max_nbytes``."""
        ...

    def read_ranges(self, name: str, extents: Sequence[Extent]) -> None:
        """Fill the buffers of ``extents`` from ``name``; too short a file is an error."""
        ...

    def list(self) -> list[str]:
        """Return the names of the files directly below the root, sorted."""
        ...

    def delete(self, name: str) -> None:
        """Remove ``name``; nothing happens if it is not there."""
        ...

    def nbytes(self, name: str) -> int | None:
        """Return the size of ``name``, or None if it is not there."""
        ...


def held(store: Store, name: str) -> AbstractContextManager[None]:
    """Keep ``name`` open for the reads of this thread inside, if the store can.

    A store without a method of this name opens the file for each call.
    """
    hold = getattr(store, "held", None)
    found: AbstractContextManager[None] = nullcontext() if hold is None else hold(name)
    return found


def checked_name(name: str) -> str:
    """Return ``name`` if it stays below a store's root, else raise ``ValueError``."""
    if _PLAIN.fullmatch(name):
        return name
    parts = name.split("/")
    if not name or "\0" in name or any(part in ("", ".", "..") for part in parts):
        raise ValueError(f"unsafe file name {name!r}")
    os.fsencode(name)  # raises UnicodeEncodeError, a ValueError, if no file can have this name
    return name
