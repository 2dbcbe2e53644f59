"""Names for types that cross module borders.

Here: aliases and the ``Communicator`` port. Not here: implementations (``dist_ckpt._comm``).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias, TypeVar

from dist_ckpt.errors import ConfigError

__all__ = [
    "STATE_DICT",
    "Communicator",
    "ForeignValue",
    "PathLike",
    "RankInfo",
    "ReplicaId",
    "ShardedStateDict",
    "StateDict",
    "Writer",
]

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


STATE_DICT: TypeAlias = dict[str, Any]
"""What a ``Checkpointer`` saves and loads: this rank's own nested state (torch's name for it)."""


@dataclass(frozen=True, slots=True)
class RankInfo:
    """Which rank of how many this process is.

    Attributes:
        global_rank: From 0 to ``global_world_size - 1``.
        global_world_size: Number of ranks that save together.
    """

    global_rank: int
    global_world_size: int

    def __post_init__(self) -> None:
        """Refuse what is no rank.

        Raises:
            ConfigError: The rank is not within the world.
        """
        if not 0 <= self.global_rank < self.global_world_size:
            raise ConfigError(
                f"rank {self.global_rank} is not one of {self.global_world_size} ranks.",
                hint="ranks count from 0.",
            )


class ForeignValue:
    """Stands for a value that another library pickled by its class, which is not imported here.

    Attributes:
        type_name: The class, with its module.
        arguments: What it was made from; for a member of an enum, its value.
    """

    __slots__ = ("arguments", "type_name")

    def __init__(self, type_name: str, *arguments: Any) -> None:
        """Keep both; nothing is called."""
        self.type_name, self.arguments = type_name, arguments

    def __eq__(self, other: object) -> bool:
        """Whether the other one stands for the same."""
        if not isinstance(other, ForeignValue):
            return NotImplemented
        return (self.type_name, self.arguments) == (other.type_name, other.arguments)

    def __hash__(self) -> int:
        """Return a hash of what it stands for."""
        return hash((self.type_name, self.arguments))

    def __repr__(self) -> str:
        """Return it as it would be called."""
        arguments = ", ".join(map(repr, self.arguments))
        return f"<{self.type_name}({arguments}), not imported>"
