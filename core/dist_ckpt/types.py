"""Names for types that cross module borders.

Here: aliases, the ``Communicator`` port, and the users' own types of values. Not here:
implementations (``dist_ckpt._comm``), the codec that writes values (``dist_ckpt._codec``).
"""

from __future__ import annotations

import os
import re
import threading
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
    "ValueType",
    "ValueTypes",
    "Writer",
    "register_value_type",
    "value_types",
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


@dataclass(slots=True)
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


@dataclass(frozen=True, slots=True)
class ValueType:
    """A class of the user whose values are stored without pickle.

    Attributes:
        cls: The class; subclasses are other classes.
        tag: Its name in checkpoints.
        dump: Makes something simpler of a value: numbers, text, containers, tensors, or values of
            other registered types.
        load: Makes the value of that again.
    """

    cls: type
    tag: str
    dump: Callable[[Any], Any]
    load: Callable[[Any], Any]


_TAG = re.compile(r"[A-Za-z_][A-Za-z0-9_.:-]{0,199}", re.ASCII)


class ValueTypes:
    """The users' types of one process, by class and by tag; for several threads."""

    def __init__(self) -> None:
        """Begin with none."""
        self._lock = threading.Lock()
        self._by_class: dict[type, ValueType] = {}
        self._by_tag: dict[str, ValueType] = {}

    def register(self, one: ValueType) -> None:
        """Add a type.

        Raises:
            ConfigError: The class or the tag is taken, or is none.
        """
        cls: Any = one.cls
        tag: Any = one.tag
        if not isinstance(cls, type) or cls.__module__ == "builtins":
            raise ConfigError(f"{one.cls!r} is not a class of your own.")
        if not isinstance(tag, str) or not _TAG.fullmatch(tag):
            raise ConfigError(
                f"tag {one.tag!r} of {one.cls.__qualname__} is not a name.",
                hint="use the package and the class: 'mylib.Schedule'.",
            )
        if not all(map(callable, (one.dump, one.load))):
            raise ConfigError(f"dump and load of {one.tag!r} must be functions.")
        with self._lock:
            taken = self._by_class.get(one.cls) or self._by_tag.get(one.tag)
            if taken is not None:
                raise ConfigError(
                    f"cannot register {one.cls.__qualname__} as {one.tag!r}: "
                    f"{taken.cls.__qualname__} is registered as {taken.tag!r}.",
                    hint="a class has one tag, and a tag one class.",
                )
            self._by_class[one.cls] = self._by_tag[one.tag] = one

    def of_class(self, cls: type) -> ValueType | None:
        """Return the type of a class, None if there is none."""
        return self._by_class.get(cls)

    def of_tag(self, tag: str) -> ValueType | None:
        """Return the type of a tag, None if there is none."""
        return self._by_tag.get(tag)


value_types = ValueTypes()
"""What ``register_value_type`` has registered in this process."""


def register_value_type(
    cls: type[T], *, tag: str, dump: Callable[[T], Any], load: Callable[[Any], T]
) -> None:
    """Let values of a class be stored without pickle. Not collective; once per process.

    Register before the first save, and before a load in every process that loads: a checkpoint
    names the tag only. ``load`` gets what is in the file: it should check it.

    Args:
        cls: The class, exactly: its subclasses are other classes.
        tag: Its name in checkpoints, ``mylib.Schedule``; keep it when the class moves.
        dump: Makes something simpler of a value: numbers, text, containers, tensors, values of
            other registered types.
        load: Makes the value of that again.

    Raises:
        ConfigError: The class or the tag is registered already, or is none.
    """
    value_types.register(ValueType(cls, tag, dump, load))


class ForeignValue:
    """Stands for a value of a class that is not imported here.

    Of another library's pickle, or of an enum or a named tuple of the program that saved.

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
