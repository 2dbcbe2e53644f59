"""One rank's plain state dict, as a part of a checkpoint that all ranks make together.

Here: the key space of ``checkpointer`` (docs/decisions/0014-checkpointer.md), and the way from a
state dict to sharded leaves. Not here: staging, writing, reading. Local, on every rank.

A tensor or value of rank r is that rank's own. Sharded leaves and DTensors are global: the same on
every layout. Containers are dicts, lists and plain tuples; all else is a leaf.
"""

from __future__ import annotations

import collections
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch.distributed.tensor import DTensor  # noqa: TID251 - recognised by its class

from dist_ckpt._staging_pool.handover import is_plain_tensor
from dist_ckpt.derive.dtensor import dtensor_layout, local_of
from dist_ckpt.dict_utils import find_hidden_leaves
from dist_ckpt.errors import InvalidShardingError
from dist_ckpt.mapping import (
    LocalNonpersistentObject,
    ShardedBase,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from dist_ckpt.types import RankInfo, ShardedStateDict

__all__ = [
    "PART_KEY",
    "GlobalTensor",
    "Path",
    "StoredLeaf",
    "as_global",
    "global_key",
    "map_tree",
    "memory_of",
    "render",
    "thawed",
    "to_sharded",
    "whole",
    "with_global_leaves",
]

_PREFIX = "checkpointer/"
PART_KEY = f"{_PREFIX}rank"
"""Key of the sharded object whose cell r is the part of rank r: its tree, and its leaves' keys."""

_VERSION = 1

Step: TypeAlias = tuple[str, Any]
"""``("key", k)`` into a dict or ``("at", i)`` into a list or tuple."""
Path: TypeAlias = tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class GlobalTensor:
    """What a DTensor is without its mesh: this rank's boxes of a global tensor."""

    key: str
    shards: tuple[ShardedTensor, ...]


@dataclass(frozen=True, slots=True)
class StoredLeaf:
    """What stands in a stored tree for a leaf that lies elsewhere in the checkpoint.

    Attributes:
        key: Key of the tensor, or unique key of the object.
        trains: For a ``Parameter`` its ``requires_grad``; None for other tensors and objects.
    """

    key: str
    trains: bool | None = None


def map_tree(f: Callable[[Path, Any], Any], x: Any, path: Path = ()) -> Any:
    """Return a new tree of the same containers with each leaf replaced by ``f(path, leaf)``.

    ``OrderedDict``, ``defaultdict`` and ``Counter`` stay what they are; other classes of dicts and
    lists become plain ones.
    """
    if isinstance(x, dict):
        return _dict_like(x, {k: map_tree(f, v, (*path, ("key", k))) for k, v in x.items()})
    if isinstance(x, list) or type(x) is tuple:
        items = [map_tree(f, v, (*path, ("at", i))) for i, v in enumerate(x)]
        return items if isinstance(x, list) else tuple(items)
    return f(path, x)


def _dict_like(pattern: dict[Any, Any], items: dict[Any, Any]) -> dict[Any, Any]:
    if type(pattern) is collections.OrderedDict:
        return collections.OrderedDict(items)
    if isinstance(pattern, collections.defaultdict):
        return collections.defaultdict(pattern.default_factory, items)
    return collections.Counter(items) if type(pattern) is collections.Counter else items


def render(path: Path) -> str:
    """Return a path as people write it: ``model.layers[0].weight``."""
    text = "".join(f".{step}" if kind == "key" else f"[{step}]" for kind, step in path)
    return text.removeprefix(".")


def global_key(path: Path) -> str:
    """Return the key of the DTensor at ``path``, equal on all ranks and layouts.

    Raises:
        InvalidShardingError: A key of a dict on the way has no name that all ranks agree on.
    """
    steps = [_step_name(step) for step in path]
    if None in steps:
        raise InvalidShardingError(
            f"{render(path)!r} is a DTensor below a key that is neither text nor a number."
        )
    return f"{_PREFIX}global/{'/'.join(step for step in steps if step is not None)}"


def _step_name(step: Step) -> str | None:
    kind, value = step
    if kind == "at":
        return f"#{value}"
    if type(value) is str:
        return value.replace("~", "~0").replace("/", "~1").replace("#", "~2")
    if type(value) in (int, bool, float, type(None)):
        return f"#{type(value).__name__}:{value!r}"
    return None


def as_global(tensor: DTensor, key: str, path: Path) -> GlobalTensor:
    """Return a DTensor as shards that alias its local tensor."""
    shards = dtensor_layout(tensor, name=render(path)).shard(key, local_of(tensor))
    return GlobalTensor(key, tuple(shards) if isinstance(shards, list) else (shards,))


def with_global_leaves(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tree with factories built and DTensors as ``GlobalTensor``; the rest as it is.

    What comes out needs no process group and no code of the caller: it can go to another process.

    Raises:
        InvalidShardingError: A leaf has no boxes, hides in another object, or contains itself.
    """

    def convert(path: Path, leaf: Any) -> Any:
        if isinstance(leaf, ShardedTensorFactory):
            return map_tree(convert, leaf.build(), path)
        if isinstance(leaf, LocalNonpersistentObject):
            return None
        if isinstance(leaf, DTensor):
            return as_global(leaf, global_key(path), path)
        return leaf

    try:
        return dict(map_tree(convert, dict(state_dict)))
    except RecursionError as error:
        raise InvalidShardingError("the state dict contains itself or is too deep.") from error


def memory_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return a value that is equal for two tensors exactly if they share the same elements."""
    if not tensor.numel() or not is_plain_tensor(tensor):
        return (id(tensor),)
    where = (tensor.device, tensor.data_ptr(), tuple(tensor.shape), tensor.stride())
    return (*where, tensor.dtype, tensor.is_conj(), tensor.is_neg())


def whole(key: str, data: torch.Tensor | None, like: torch.Tensor | ShardedTensor) -> ShardedTensor:
    """Return the sharded tensor that is all of ``key``, shaped like ``like``."""
    shape = tuple(like.shape) if isinstance(like, torch.Tensor) else like.global_shape
    zeros, ones = (0,) * len(shape), (1,) * len(shape)
    return ShardedTensor(key, data, like.dtype, shape, shape, zeros, ones)


def to_sharded(state_dict: Mapping[str, Any], rank_info: RankInfo) -> ShardedStateDict:
    """Return a rank's state dict as a sharded one. Tensors are aliased, not copied.

    Raises:
        InvalidShardingError: Something in it cannot be stored.
    """
    tree = with_global_leaves(state_dict)
    _check_leaves(tree)
    rank, size = rank_info.global_rank, rank_info.global_world_size
    part = _Part(f"{PART_KEY}_{rank}/")
    frozen = map_tree(part.freeze, tree)
    cell = {"tree": frozen, "leaves": part.entries}
    return {
        "checkpointer": {"version": _VERSION, "world_size": size},
        "parts": {str(rank): ShardedObject(PART_KEY, cell, (size,), (rank,))},
        "leaves": {str(n): leaf for n, leaf in enumerate(part.leaves)},
    }


class _Part:
    """Takes the leaves that are stored by themselves out of a tree, and notes where they stood."""

    def __init__(self, prefix: str) -> None:
        self.leaves: list[ShardedBase] = []
        self.entries: list[list[Any]] = []
        self._prefix = prefix
        self._count = 0
        self._keys: dict[tuple[Any, ...], tuple[str, torch.Tensor]] = {}

    def freeze(self, path: Path, leaf: Any) -> Any:
        at, self._count = self._count, self._count + 1
        if isinstance(leaf, GlobalTensor):
            self.leaves += leaf.shards
            key = leaf.key
        elif isinstance(leaf, ShardedBase):
            self.leaves.append(leaf)
            key = leaf.unique_key if isinstance(leaf, ShardedObject) else leaf.key
        elif is_plain_tensor(leaf):
            key = self._own_key(path, leaf, at)
        else:
            return leaf
        trains = leaf.requires_grad if type(leaf) is torch.nn.Parameter else None
        self.entries.append([at, key, trains])
        return None

    def _own_key(self, path: Path, tensor: torch.Tensor, at: int) -> str:
        memory = memory_of(tensor)
        if memory in self._keys:
            return self._keys[memory][0]
        steps = [_step_name(step) for step in path]
        # A key that is not text has no name; the number of the leaf serves as one.
        name = f"#@{at}" if None in steps else "/".join(step for step in steps if step is not None)
        key = self._prefix + name
        self._keys[memory] = key, tensor
        self.leaves.append(whole(key, tensor.detach(), tensor))
        return key


def thawed(cell: Mapping[str, Any]) -> Any:
    """Return a stored part's tree with a ``StoredLeaf`` where a leaf was taken out.

    Raises:
        KeyError, TypeError, ValueError: The part is not as ``to_sharded`` makes it.
    """
    entries = {at: StoredLeaf(key, trains) for at, key, trains in cell["leaves"]}
    if not all(type(at) is int and type(one.key) is str for at, one in entries.items()):
        raise ValueError("a leaf without number or key")
    count = iter(range(1 << 62))
    return map_tree(lambda _, leaf: entries.get(next(count), leaf), cell["tree"])


def _check_leaves(tree: dict[str, Any]) -> None:
    """Raise for keys that are reserved, and for sharded leaves inside of other objects."""
    problems: list[str] = []

    def check(path: Path, leaf: Any) -> None:
        if isinstance(leaf, ShardedBase) and leaf.key.startswith(_PREFIX):
            problems.append(f"{render(path)}: keys that begin with {_PREFIX!r} are ours")
        kinds = (ShardedBase, DTensor, LocalNonpersistentObject)
        hidden = (
            ()
            if isinstance(leaf, (ShardedBase, GlobalTensor))
            else find_hidden_leaves([leaf], lambda x: isinstance(x, kinds))
        )
        problems.extend(
            f"{render(path)}: a {type(one).__name__} inside a {type(leaf).__name__}"
            for _, one in hidden
        )

    map_tree(check, tree)
    if problems:
        raise InvalidShardingError(
            f"cannot store {'; '.join(problems[:16])}.",
            hint="use dicts, lists and tuples for containers of sharded leaves.",
        )
