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
"""Most names: parts of ASCII that begin like words; what these may not be needs no look."""


class FileWriter(Protocol):
    """A file under way. One thread at a time; it must end with ``finish`` or ``abandon``."""

    def write_at(self, position: int, data: memoryview) -> None:
        """Write bytes, which are a flat view; no byte twice. Nothing keeps ``data``."""
        ...

    def finish(self) -> FileSum:
        """Give the file its size and make it durable; return what it has become."""
        ...

    def abandon(self) -> None:
        """Let go of it, complete or not; may be called again, and after ``finish``."""
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
        What is written is summed up in the same pass.
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
    """Let a store keep ``name`` open for what this thread reads of it inside, if it can.

    A store that has a method of this name is asked; all others open the file for each call.
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
    os.fsencode(name)  # no name of a file, if it cannot be: UnicodeEncodeError is a ValueError
    return name
