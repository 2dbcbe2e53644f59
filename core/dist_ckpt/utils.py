"""Sharded state dicts: take out leaves by kind, change the prefixes of their keys.

Here: functions over whole sharded state dicts, and ``wrap_future``, whose home in torch's
``_experimental`` is a module of the same name. Not here: the kinds of leaves
(``dist_ckpt.mapping``), walking a tree (``dist_ckpt.dict_utils``). Called on any rank, locally.
"""

from __future__ import annotations

from concurrent.futures import CancelledError, Future
from typing import TYPE_CHECKING, Any, TypeVar, cast

from dist_ckpt.dict_utils import extract_matching_values, find_hidden_leaves, nested_values
from dist_ckpt.errors import InvalidShardingError
from dist_ckpt.mapping import (
    LocalNonpersistentObject,
    ShardedBase,
    ShardedTensor,
    ShardedTensorFactory,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from dist_ckpt.types import ShardedStateDict, StateDict

__all__ = [
    "add_prefix_for_sharding",
    "apply_prefix_mapping",
    "extract_nonpersistent",
    "extract_sharded_base",
    "extract_sharded_tensors",
    "extract_sharded_tensors_and_factories",
    "extract_sharded_tensors_or_nonpersistent",
    "follow",
    "reject_hidden_leaves",
    "replace_prefix_for_sharding",
    "wrap_future",
]

T = TypeVar("T")


def extract_sharded_tensors(
    sharded_state_dict: ShardedStateDict,
) -> tuple[ShardedStateDict, StateDict]:
    """Split into a dict of the ShardedTensors and a dict of the rest, both of the same nesting.

    As for all ``extract_`` functions here, ``dict_utils.merge`` of the two gives the original.

    Raises:
        InvalidShardingError: If a sharded leaf hides in a tuple or another leaf.
    """
    return _extract(sharded_state_dict, ShardedTensor)


def extract_sharded_tensors_and_factories(
    sharded_state_dict: ShardedStateDict,
) -> tuple[ShardedStateDict, StateDict]:
    """Split into a dict of the ShardedTensors and ShardedTensorFactories and a dict of the rest.

    Raises:
        InvalidShardingError: If a sharded leaf hides in a tuple or another leaf.
    """
    return _extract(sharded_state_dict, ShardedTensor, ShardedTensorFactory)


def extract_sharded_tensors_or_nonpersistent(
    sharded_state_dict: ShardedStateDict,
) -> tuple[ShardedStateDict, StateDict]:
    """Split into a dict of ShardedTensors, factories and non-persistent objects and the rest.

    Raises:
        InvalidShardingError: If a sharded leaf hides in a tuple or another leaf.
    """
    kinds = (ShardedTensor, ShardedTensorFactory, LocalNonpersistentObject)
    return _extract(sharded_state_dict, *kinds)


def extract_sharded_base(
    sharded_state_dict: ShardedStateDict,
) -> tuple[ShardedStateDict, StateDict]:
    """Split into a dict of all sharded leaves, of any kind, and a dict of the rest.

    Raises:
        InvalidShardingError: If a sharded leaf hides in a tuple or another leaf.
    """
    return _extract(sharded_state_dict, ShardedBase)


def extract_nonpersistent(
    sharded_state_dict: ShardedStateDict,
) -> tuple[ShardedStateDict, StateDict]:
    """Split into a dict of the LocalNonpersistentObjects and a dict of the rest.

    Raises:
        InvalidShardingError: If a sharded leaf hides in a tuple or another leaf.
    """
    return _extract(sharded_state_dict, LocalNonpersistentObject)


def _extract(
    sharded_state_dict: ShardedStateDict, *kinds: type
) -> tuple[ShardedStateDict, StateDict]:
    reject_hidden_leaves(sharded_state_dict)
    parts = extract_matching_values(sharded_state_dict, lambda x: isinstance(x, kinds))
    return cast("tuple[ShardedStateDict, StateDict]", parts)


def reject_hidden_leaves(sharded_state_dict: ShardedStateDict) -> None:
    """Check that no sharded or non-persistent leaf stands in a tuple, dataclass or set.

    Only dicts and lists are containers; inside anything else the leaf would be stored as a plain
    object.

    Raises:
        InvalidShardingError: With the paths of all such leaves.
    """
    kinds = (ShardedBase, LocalNonpersistentObject)
    hidden = find_hidden_leaves(sharded_state_dict, lambda x: isinstance(x, kinds))
    if hidden:
        where = ", ".join(
            f"{type(leaf).__name__} {getattr(leaf, 'key', '')!r} at {'.'.join(map(str, path))}"
            for path, leaf in hidden
        )
        raise InvalidShardingError(
            f"sharded leaves stand inside tuples, sets or dataclasses: {where}; only dicts and "
            "lists are containers.",
            hint="use a list or a dict there.",
        )


def add_prefix_for_sharding(sharded_state_dict: ShardedStateDict, prefix: str) -> None:
    """Put ``prefix`` before the key of each sharded leaf, in place.

    An object that is referenced several times gets the prefix once.

    Raises:
        InvalidShardingError: If a sharded leaf hides in a tuple or another leaf.
    """
    for leaf in _distinct_sharded_leaves(sharded_state_dict):
        leaf.key = f"{prefix}{leaf.key}"


def replace_prefix_for_sharding(
    sharded_state_dict: ShardedStateDict, old_prefix: str, new_prefix: str
) -> None:
    """Replace the prefix in the key of each sharded leaf, in place; all or none.

    Raises:
        ValueError: If any key does not begin with ``old_prefix``; then no key has changed.
        InvalidShardingError: If a sharded leaf hides in a tuple or another leaf.
    """
    leaves = _distinct_sharded_leaves(sharded_state_dict)
    wrong = [leaf.key for leaf in leaves if not leaf.key.startswith(old_prefix)]
    if wrong:
        raise ValueError(f"Expected {', '.join(wrong)} to begin with prefix {old_prefix}")
    for leaf in leaves:
        leaf.key = f"{new_prefix}{leaf.key.removeprefix(old_prefix)}"


def apply_prefix_mapping(
    sharded_state_dict: ShardedStateDict, prefix_map: Mapping[str, str]
) -> None:
    """Replace prefixes in the keys of sharded leaves, in place.

    The first prefix of ``prefix_map`` (old to new), in its order, that a key begins with is
    replaced; keys that begin with none stay.

    Raises:
        InvalidShardingError: If a sharded leaf hides in a tuple or another leaf.
    """
    for leaf in _distinct_sharded_leaves(sharded_state_dict):
        old = next((p for p in prefix_map if leaf.key.startswith(p)), None)
        if old is not None:
            leaf.key = f"{prefix_map[old]}{leaf.key.removeprefix(old)}"


def _distinct_sharded_leaves(sharded_state_dict: ShardedStateDict) -> list[ShardedBase]:
    if isinstance(sharded_state_dict, ShardedBase):  # contract: one leaf will do
        return [sharded_state_dict]
    reject_hidden_leaves(sharded_state_dict)
    leaves = (leaf for leaf in nested_values(sharded_state_dict) if isinstance(leaf, ShardedBase))
    return list({id(leaf): leaf for leaf in leaves}.values())


def wrap_future(original_result: Any) -> Future[None]:
    """Return a future that ends when ``original_result`` does, without its result.

    Args:
        original_result: A future, whose failure is passed on; or anything else, which is done.
    """
    wrapped: Future[None] = Future()
    if isinstance(original_result, Future):
        follow(original_result, wrapped, lambda _: None)
    else:
        wrapped.set_result(None)
    return wrapped


def follow(original: Future[Any], target: Future[T], convert: Callable[[Any], T]) -> None:
    """End ``target`` when ``original`` ends, with its failure or its converted result."""
    # From now on `target` cannot be cancelled: that would stop nothing, and hide how it ended.
    target.set_running_or_notify_cancel()

    def finish(ended: Future[Any]) -> None:
        if ended.cancelled():
            target.set_exception(CancelledError())
        elif (error := ended.exception()) is not None:
            target.set_exception(error)
        else:
            target.set_result(convert(ended.result()))

    original.add_done_callback(finish)
