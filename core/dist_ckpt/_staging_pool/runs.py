"""Staged bytes that are ready to be written: which file they belong to, and where they lie."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Run"]


@dataclass(frozen=True, slots=True)
class Run:
    """Bytes that are staged and ready.

    Attributes:
        file: Number of the file in the order.
        position: First byte in that file.
        offset: First byte in the arena.
        nbytes: How many.
    """

    file: int
    position: int
    offset: int
    nbytes: int
