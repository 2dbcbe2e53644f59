"""How local tensors and objects map to global ones: the vocabulary of a sharded state dict.

Here: ``ShardedTensor``, ``ShardedObject``, ``ShardedTensorFactory`` and their checks on one rank.
Not here: finding the sharding of a model (``dist_ckpt.derive``), checks across ranks
(``dist_ckpt.validation``), moving bytes. Called on any rank, locally; nothing here communicates.
"""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from dist_ckpt.dict_utils import dict_list_map_inplace, matching_items
from dist_ckpt.errors import InvalidShardingError
from dist_ckpt.mapping._tensor import (
    ShardedBase,
    ShardedTensor,
    is_main_replica,
    plain_ints,
    plain_replica_id,
)
from dist_ckpt.types import ReplicaId, ShardedStateDict, StateDict

if TYPE_CHECKING:
    from collections.abc import Callable


__all__ = [
    "LocalNonpersistentObject",
    "LocalNonpersitentObject",
    "ReplicaId",
    "ShardedBase",
    "ShardedObject",
    "ShardedStateDict",
    "ShardedTensor",
    "ShardedTensorFactory",
    "StateDict",
    "apply_factories",
    "apply_factory_merges",
    "is_main_replica",
]


class LocalNonpersistentObject:
    """Wraps an object that is not stored: on load, the local one reappears at its place."""

    def __init__(self, obj: object) -> None:
        """Wrap ``obj``."""
        self.obj = obj

    def unwrap(self) -> Any:
        """Return the wrapped object."""
        return self.obj

    def __repr__(self) -> str:
        """Show the wrapped object."""
        return f"LocalNonpersistentObject({self.obj!r})"


LocalNonpersitentObject = LocalNonpersistentObject
"""The seeds' spelling of the same class."""


@dataclass
class ShardedObject(ShardedBase):
    """A local object as one cell of a global array of objects.

    Unlike tensors, objects cannot be cut: they load only with the sharding they were saved with.

    Args:
        key: Name of the global array.
        data: Local object; None to describe it only.
        global_shape: Shape of the global array.
        global_offset: Index of this object, in cells.
        replica_id: Tells equal objects of several ranks apart; 0 or all zeros is the main one.

    Raises:
        InvalidShardingError: If the offset is no index of the array.
    """

    key: str
    data: object = field(repr=False)
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    replica_id: ReplicaId = 0

    def __post_init__(self) -> None:
        """Turn the fields into plain tuples and ints, then check them."""
        where = f"ShardedObject {self.key!r}"
        self.global_shape = plain_ints(self.global_shape, where, "global_shape")
        self.global_offset = plain_ints(self.global_offset, where, "global_offset")
        self.replica_id = plain_replica_id(self.replica_id, where)
        self.validate_metadata_integrity()

    def validate_metadata_integrity(self) -> None:
        """Check that the offset is an index of the global array.

        Raises:
            InvalidShardingError: If it is not.
        """
        if len(self.global_offset) != len(self.global_shape) or not all(
            0 <= o < n for o, n in zip(self.global_offset, self.global_shape, strict=True)
        ):
            raise InvalidShardingError(
                f"ShardedObject {self.key!r}: offset {self.global_offset} is no index of an array "
                f"of shape {self.global_shape}."
            )

    def without_data(self) -> ShardedObject:
        """Return a copy whose ``data`` is None."""
        return replace(self, data=None)

    @property
    def unique_key(self) -> str:
        """Key of this one cell: ``{key}/shard_{offset}_{shape}``, numbers joined by dots."""
        offset = ".".join(map(str, self.global_offset))
        shape = ".".join(map(str, self.global_shape))
        return f"{self.key}/shard_{offset}_{shape}"

    @classmethod
    def empty_from_unique_key(cls, unique_key: str, replica_id: ReplicaId = 0) -> ShardedObject:
        """Return the object without data that has this ``unique_key``; the key may contain ``/``.

        Raises:
            InvalidShardingError: If it is not the unique key of any object.
        """
        match = re.fullmatch(r"(.*)/shard_([\d.]*)_([\d.]*)", unique_key, re.DOTALL | re.ASCII)
        try:
            if match is None:
                raise ValueError(unique_key)
            offset, shape = (
                tuple(int(n) for n in numbers.split(".")) if numbers else ()
                for numbers in match.groups()[1:]
            )
            return cls(match[1], None, shape, offset, replica_id)
        except ValueError as e:
            raise InvalidShardingError(
                f"{unique_key!r} is not the unique key of a ShardedObject, which looks like "
                "'some/key/shard_0.1_2.4'."
            ) from e


@dataclass
class ShardedTensorFactory(ShardedBase):
    """A tensor that is stored in another form: built before a save, merged after a load.

    The same factory serves a parameter and its optimizer state (see ``dist_ckpt.optimizer``).

    Args:
        key: Name of the tensor.
        data: Local tensor in its original form.
        build_fn: Called with key, data and replica_id, and with the flattened range as the fourth
            argument if there is one or if the function cannot be called without it; returns the
            sharded state dict to store.
        merge_fn: Called with the loaded state dict of the same nesting; returns the tensor.
        replica_id: Passed on to ``build_fn``.
        flattened_range: ``data`` holds only this slice of the flattened tensor.
    """

    key: str
    data: torch.Tensor | None = field(repr=False)
    build_fn: Callable[..., Any]
    merge_fn: Callable[[Any], torch.Tensor]
    replica_id: ReplicaId = 0
    flattened_range: slice | None = None

    def build(self) -> Any:
        """Return the sharded state dict that stands for the tensor.

        Raises:
            InvalidShardingError: If there is a flattened range and ``build_fn`` does not take it.
        """
        arguments = (self.key, self.data, self.replica_id)
        if self.flattened_range is None and _takes(self.build_fn, len(arguments)):
            return self.build_fn(*arguments)
        if not _takes(self.build_fn, len(arguments) + 1):
            raise InvalidShardingError(
                f"ShardedTensorFactory {self.key!r}: build_fn must take key, data, replica_id and "
                f"flattened_range, which is {self.flattened_range}."
            )
        return self.build_fn(*arguments, self.flattened_range)

    def validate_metadata_integrity(self) -> None:
        """Accept: what ``build`` returns checks itself."""

    def without_data(self) -> ShardedTensorFactory:
        """Return a copy whose ``data`` is None."""
        return replace(self, data=None)


def _takes(function: Callable[..., Any], num_arguments: int) -> bool:
    """Whether ``function`` can be called with so many positional arguments."""
    try:
        inspect.signature(function).bind(*range(num_arguments))
    except TypeError:
        return False
    except ValueError:  # a builtin does not tell
        return True
    return True


def apply_factories(sharded_state_dict: ShardedStateDict) -> None:
    """Replace each factory by what it builds, in place; what it builds is not searched again."""
    dict_list_map_inplace(
        lambda x: x.build() if isinstance(x, ShardedTensorFactory) else x, sharded_state_dict
    )


def apply_factory_merges(x1: Any, x2: Any, key: tuple[Any, ...] = ()) -> Any:
    """Replace what factories had built by what they merge it to, in place.

    Args:
        x1: Loaded state dict.
        x2: Factories at the places where they had stood in the sharded state dict; a list may be
            given as a dict from index to element, or as a ``ListPart``.
        key: Path to ``x1`` and ``x2``; used in messages only.

    Returns:
        ``x1``, or the merged tensor where ``x2`` is a factory.

    Raises:
        ValueError: If ``x1`` has nothing at a place where ``x2`` has a factory.
    """
    if isinstance(x2, ShardedTensorFactory):
        return x2.merge_fn(x1)
    if isinstance(x1, dict) and isinstance(x2, dict):
        if not x2.keys() <= x1.keys():
            raise ValueError(
                "Different dict keys encountered in `apply_factory_merges` "
                f"({x1.keys()}, {x2.keys()}, at level {key})"
            )
        for k, v2 in x2.items():
            x1[k] = apply_factory_merges(x1[k], v2, (*key, k))
    elif isinstance(x1, list) and isinstance(x2, list | dict):
        for index, position, v2 in matching_items(x1, x2, key):
            x1[index] = apply_factory_merges(x1[index], v2, (*key, position))
    else:
        raise ValueError(  # noqa: TRY004 - contract
            "Duplicate non-dict and non-list values encountered: "
            f"{type(x1).__name__} and {type(x2).__name__} (at level {key})"
        )
    return x1
