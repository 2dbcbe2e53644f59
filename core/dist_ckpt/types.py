"""Names for types that cross module borders.

Here: aliases and the ``Communicator`` port. Not here: implementations (``dist_ckpt._comm``).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol, TypeAlias, TypeVar

__all__ = ["Communicator", "PathLike", "ReplicaId", "ShardedStateDict", "StateDict", "Writer"]

StateDict: TypeAlias = dict[str, Any]
"""Nested dicts and lists with tensors and other objects as leaves."""

ShardedStateDict: TypeAlias = dict[str, Any]
"""A state dict whose leaves may be ``ShardedBase`` objects."""

ReplicaId: TypeAlias = int | tuple[int, ...]
PathLike: TypeAlias = str | os.PathLike[str]

Writer: TypeAlias = Literal["main", "any", "first"]
"""Who may write a shard that several ranks hold: the main replica; any of them (all are equal,
so the work is spread by bytes); or the lowest rank (they may differ)."""

T = TypeVar("T")
R = TypeVar("R")


class Communicator(Protocol):
    """The one door to the other ranks. Every method is collective over all of its ranks.

    Whatever a callback raises on any rank is raised on every rank, as one error of the tree in
    ``dist_ckpt.errors`` that names rank and cause. ``phase`` is a short human name of the step;
    it stands in errors, and ranks that meet in different phases are told so.
    """

    @property
    def rank(self) -> int:
        """This process's rank within the communicator."""
        ...

    @property
    def size(self) -> int:
        """Number of ranks."""
        ...

    def broadcast(self, phase: str, produce: Callable[[], R]) -> R:
        """Run ``produce`` on rank 0 and return its result on every rank."""
        ...

    def map_reduce(
        self, phase: str, local: Callable[[], T], combine: Callable[[Sequence[T]], R]
    ) -> R:
        """Run ``local`` on every rank, ``combine`` on rank 0; return its result everywhere."""
        ...

    def map_scatter(
        self, phase: str, local: Callable[[], T], combine: Callable[[Sequence[T]], Sequence[R]]
    ) -> R:
        """Like ``map_reduce``, but ``combine`` returns one result for each rank, in rank order."""
        ...
