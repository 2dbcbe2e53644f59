"""A sharded state dict taken apart for a save, and put together after a load.

Here: which leaf is common, sharded, an object or not persistent, and how positions survive. Not
here: what happens to the parts. Runs on every rank for itself; the caller's containers are never
changed.
"""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from dist_ckpt._codec.names import render
from dist_ckpt.dict_utils import (
    dict_list_map_outplace,
    extract_matching_values,
    find_hidden_leaves,
    nested_items_with_path,
    nested_values,
)
from dist_ckpt.errors import InvalidShardingError, MismatchError
from dist_ckpt.mapping import (
    LocalNonpersistentObject,
    ShardedBase,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    apply_factories,
)
from dist_ckpt.utils import reject_hidden_leaves

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator, Mapping

    from dist_ckpt.types import ShardedStateDict, StateDict

T = TypeVar("T")

__all__ = [
    "LoadParts",
    "SaveParts",
    "merge_after_load",
    "split_for_load",
    "split_for_save",
    "without_marks",
]

_HOLE_KEY = "__sharded__"
"""In a list of the common part, ``{"__sharded__": true}`` keeps the place of a sharded leaf."""


class _Absent:
    """Stands for a leaf that is not to be loaded; only its identity counts."""


_ABSENT = _Absent()

_MOST_STEPS = 12
"""Most steps of a path that an error names."""

_COMMON = frozenset({torch.Tensor, bool, bytes, float, int, str, type(None)})
"""Leaves that are common values, with nothing inside."""

_CONTAINERS = frozenset({dict, list})
"""Classes of the containers that may have had sharded leaves in them."""

_LEAVES = _COMMON | {LocalNonpersistentObject, ShardedObject, ShardedTensor}
"""Leaves that nothing hides in: most are of these types, and that is quickly seen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveParts:
    """What a save stores: the common tree, and the sharded leaves in the order they stand in."""

    common: StateDict
    tensors: tuple[ShardedTensor, ...]
    objects: tuple[ShardedObject, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadParts:
    """What a load asks for.

    Attributes:
        template: The request with factories built; containers are our own.
        factories: The same nesting with factories as leaves, lists as dicts by position.
        tensors: The sharded tensors of ``template``.
        objects: The sharded objects of ``template``.
    """

    template: ShardedStateDict
    factories: dict[Any, Any]
    tensors: tuple[ShardedTensor, ...]
    objects: tuple[ShardedObject, ...]


def _naming_recursion(split: Callable[[ShardedStateDict], T]) -> Callable[[ShardedStateDict], T]:
    """Turn the RecursionError of a walk over a state dict into an error that names the place."""

    @functools.wraps(split)
    def checked(sharded_state_dict: ShardedStateDict) -> T:
        try:
            return split(sharded_state_dict)
        except RecursionError:
            problem = _endless_place(sharded_state_dict)
        raise InvalidShardingError(
            f"the state dict is not a tree, or too deep: {problem}.",
            hint="a checkpoint holds trees: store references to parents as names or numbers.",
        )

    return checked


def _endless_place(tree: ShardedStateDict) -> str:
    """Return where a container holds itself; or the deepest place, if none does."""
    trail: list[object] = []
    parents: dict[int, int] = {id(tree): 0}  # each container we are inside of, and its depth
    walks = [(tree, _steps(tree))]
    deepest: list[object] = []
    while walks:
        step, inner = next(walks[-1][1], (None, None))
        if inner is None:
            done, _ = walks.pop()
            del parents[id(done)]
            trail = trail[: max(0, len(walks) - 1)]
            continue
        place = [*trail, step]
        if id(inner) in parents:
            start = trail[: parents[id(inner)]]
            whole = render("", start) or "the whole state dict"
            return f"{_brief(place)} is {whole} again, it contains itself"
        trail, parents[id(inner)] = place, len(place)
        walks.append((inner, _steps(inner)))
        deepest = max(deepest, place, key=len)
    return f"{_brief(deepest)} is {len(deepest)} levels deep"


def _steps(node: Any) -> Iterator[tuple[object, Any]]:
    """Yield the containers in a container, with the step to each."""
    items = node.items() if isinstance(node, dict) else enumerate(node)
    return ((step, inner) for step, inner in items if isinstance(inner, dict | list | tuple))


def _brief(trail: list[object]) -> str:
    cut = len(trail) > _MOST_STEPS
    return render("", trail[:_MOST_STEPS]) + ("..." if cut else "")


@_naming_recursion
def split_for_save(sharded_state_dict: ShardedStateDict) -> SaveParts:
    """Take a state dict apart; factories are built first.

    Raises:
        InvalidShardingError: A sharded leaf hides in a tuple, set or dataclass, or is of no known
            kind.
    """
    tree, leaves, _ = _built(sharded_state_dict)
    common = _common(tree)
    return SaveParts(
        common=common if isinstance(common, dict) else {},
        tensors=tuple(leaf for leaf in leaves if isinstance(leaf, ShardedTensor)),
        objects=tuple(leaf for leaf in leaves if isinstance(leaf, ShardedObject)),
    )


@_naming_recursion
def split_for_load(sharded_state_dict: ShardedStateDict) -> LoadParts:
    """Take a request apart; factories are built first.

    Raises:
        InvalidShardingError: A sharded leaf hides in a tuple, set or dataclass.
    """
    tree, leaves, has_factories = _built(sharded_state_dict)
    factories = _factories(sharded_state_dict) if has_factories else {}
    return LoadParts(
        template=tree,
        factories=factories,
        tensors=tuple(leaf for leaf in leaves if isinstance(leaf, ShardedTensor)),
        objects=tuple(leaf for leaf in leaves if isinstance(leaf, ShardedObject)),
    )


def _factories(sharded_state_dict: ShardedStateDict) -> dict[Any, Any]:
    found, _ = extract_matching_values(
        sharded_state_dict,
        lambda x: isinstance(x, ShardedTensorFactory),
        return_lists_as_dicts=True,
    )
    return found if isinstance(found, dict) else dict(enumerate(found))


def _built(sharded_state_dict: ShardedStateDict) -> tuple[ShardedStateDict, list[Any], bool]:
    """Return a copy with factories built, its leaves in order, and whether there were factories."""
    if not isinstance(sharded_state_dict, dict):
        raise InvalidShardingError(
            f"a sharded state dict is a dict, found {type(sharded_state_dict).__name__}"
        )
    tree: ShardedStateDict = _copied_items(sharded_state_dict)
    leaves: list[Any] = []
    _gather(tree, leaves)
    odd = [leaf for leaf in leaves if type(leaf) not in _LEAVES]
    has_factories = any(isinstance(leaf, ShardedTensorFactory) for leaf in odd)
    if has_factories:
        apply_factories(tree)  # what they build is checked with the rest
        leaves.clear()
        _gather(tree, leaves)
        odd = [leaf for leaf in leaves if type(leaf) not in _LEAVES]
    if find_hidden_leaves(odd, _is_sharded):
        reject_hidden_leaves(tree)
    if any(isinstance(leaf, ShardedBase) for leaf in odd):
        _refuse_unknown_leaves(tree)
    return tree, leaves, has_factories


def _gather(node: Any, leaves: list[Any]) -> None:
    """Add the leaves of a container, in order, without those that are common values."""
    for value in node.values() if isinstance(node, dict) else node:
        kind = type(value)
        if kind in _COMMON:
            continue
        if kind not in _LEAVES and isinstance(value, (dict, list)):
            _gather(value, leaves)
        else:
            leaves.append(value)


def _refuse_unknown_leaves(tree: ShardedStateDict) -> None:
    """Raise for sharded leaves that nothing stores: they would be lost without a word."""
    known = (ShardedTensor, ShardedObject)
    unknown = [
        f"{type(leaf).__name__} {leaf.key!r} at {'.'.join(map(str, path))}"
        for path, leaf in nested_items_with_path(tree)
        if isinstance(leaf, ShardedBase) and not isinstance(leaf, known)
    ]
    if unknown:
        raise InvalidShardingError(
            f"sharded leaves that cannot be stored: {', '.join(unknown)}.",
            hint="what a factory builds must be tensors and objects, not factories.",
        )


def _copied(node: Any) -> Any:
    """Return ``node`` with containers of our own; the leaves are the same objects."""
    if _is_value(node):
        return node
    if isinstance(node, dict):
        return _copied_items(node)
    if type(node) is list:
        return [one if type(one) in _LEAVES else _copied(one) for one in node]
    return dict_list_map_outplace(lambda leaf: leaf, node)


def _copied_items(node: dict[Any, Any]) -> dict[Any, Any]:
    return {key: one if type(one) in _LEAVES else _copied(one) for key, one in node.items()}


def _is_value(node: object) -> bool:
    """Whether this is a dict of another class (Counter, OrderedDict) with nothing sharded in it.

    It is stored as one value, as what it is: a scheduler breaks without its Counter.
    """
    if not isinstance(node, dict) or type(node) is dict:
        return False
    return not any(_is_sharded(leaf) for leaf in nested_values(node))


def _is_sharded(leaf: object) -> bool:
    return isinstance(leaf, ShardedBase | LocalNonpersistentObject)


def _common(node: Any) -> Any:
    """Return ``node`` without its sharded leaves, or ``_ABSENT`` if it is one.

    A list of nothing but sharded leaves goes as a whole: another layout may cut it differently.
    """
    if type(node) is ShardedTensor:
        return _ABSENT
    if isinstance(node, dict) and not _is_value(node):
        if _is_hole(node):
            raise InvalidShardingError(
                f"the dict {node!r} cannot be stored: it marks the place of a sharded leaf."
            )
        kept = {}
        for key, value in node.items():
            found = value if type(value) in _COMMON else _common(value)
            if found is not _ABSENT:
                kept[key] = found
        return kept
    if isinstance(node, list):
        values = [value if type(value) in _COMMON else _common(value) for value in node]
        if values and all(value is _ABSENT for value in values):
            return _ABSENT
        return [{_HOLE_KEY: True} if value is _ABSENT else value for value in values]
    return _ABSENT if _is_sharded(node) else node


def merge_after_load(
    parts: LoadParts,
    common: StateDict,
    tensors: Mapping[int, Any],
    objects: Mapping[int, Any],
) -> StateDict:
    """Put together what was loaded.

    Loaded and local objects are put in as they are: containers in them are values, not the state
    dict's, whatever their class and whoever else refers to them. Only where the common part has a
    dict or list at the same place are the two merged.

    Args:
        parts: The request.
        common: The common part; owned by the caller's load, may be reused.
        tensors: ``id(ShardedTensor)`` -> loaded tensor; a leaf that is missing here was dropped.
        objects: ``id(ShardedObject)`` -> loaded object, likewise.

    Raises:
        MismatchError: A list of the request and of the checkpoint differ in length, or only some
            of what a factory has built was loaded.
    """
    whole = {id(one) for one in objects.values()}

    def value(leaf: object) -> object:
        if isinstance(leaf, ShardedTensor):
            return tensors.get(id(leaf), _ABSENT)
        if isinstance(leaf, LocalNonpersistentObject):
            local = leaf.unwrap()
            whole.add(id(local))
            return local
        if isinstance(leaf, ShardedObject):
            return objects.get(id(leaf), _ABSENT)
        return _ABSENT

    loaded = _map_leaves(value, parts.template)
    if parts.factories:
        found = tensors.keys() | objects.keys()
        loaded = _with_factories(loaded, parts.template, parts.factories, found)
    merged = _merged(common, loaded, (), whole)
    return merged if isinstance(merged, dict) else {}


def _with_factories(loaded: Any, built: Any, factories: Any, found: Container[int]) -> Any:
    """Return ``loaded`` with what factories merge, in place.

    A factory is absent if nothing that it has built was loaded: a strict mode has dropped it.

    Args:
        loaded: Of the same nesting as ``built``.
        built: The request with factories built.
        factories: Factories as leaves, lists as dicts by position.
        found: The ids of the leaves of ``built`` that were loaded.

    Raises:
        MismatchError: Only some of its leaves were loaded.
    """
    if not isinstance(factories, ShardedTensorFactory):
        for key, below in factories.items():
            loaded[key] = _with_factories(loaded[key], built[key], below, found)
        return loaded
    leaves = [one for one in nested_values([built]) if isinstance(one, ShardedBase)]
    lacking = [one.key for one in leaves if id(one) not in found]
    if not lacking:
        return factories.merge_fn(loaded)
    if len(lacking) == len(leaves):
        return _ABSENT
    raise MismatchError(
        f"{factories.key!r} cannot be merged: {', '.join(map(repr, lacking))} of what its factory "
        "builds is not stored, the rest is."
    )


def without_marks(common: Any) -> Any:
    """Return a common part with None in lists where sharded leaves stood."""
    if type(common) is list:
        return [one if type(one) in _COMMON else without_marks(one) for one in common]
    if type(common) is not dict:
        return common
    if _is_hole(common):
        return None
    return {key: one if type(one) in _COMMON else without_marks(one) for key, one in common.items()}


def _map_leaves(f: Callable[[object], object], node: Any) -> Any:
    if isinstance(node, dict):
        return {
            key: f(value) if type(value) in _LEAVES else _map_leaves(f, value)
            for key, value in node.items()
        }
    if isinstance(node, list):
        return [_map_leaves(f, value) for value in node]
    return f(node)


def _merged(common: Any, loaded: Any, path: tuple[Any, ...], whole: set[int]) -> Any:
    """Return both together; ``whole`` has the ids of loaded values that are not to be entered."""
    if id(loaded) in whole and (common is _ABSENT or _is_hole(common)):
        return loaded
    if isinstance(loaded, dict):
        # A copy keeps the class: an OrderedDict or a Counter stays one.
        base = copy.copy(common) if isinstance(common, dict) and not _is_hole(common) else {}
        for key, value in base.items():
            if type(value) in _CONTAINERS and key not in loaded:
                base[key] = without_marks(value)
        for key, value in loaded.items():
            if isinstance(value, torch.Tensor):
                base[key] = value
                continue
            result = _merged(base.get(key, _ABSENT), value, (*path, key), whole)
            if result is not _ABSENT:
                base[key] = result
        return base
    if isinstance(loaded, list):
        return _merged_list(common, loaded, path, whole)
    return without_marks(common) if loaded is _ABSENT else loaded


def _merged_list(common: Any, loaded: list[Any], path: tuple[Any, ...], whole: set[int]) -> Any:
    if isinstance(common, list) and common:
        if _is_plain(loaded, whole) and len(loaded) != len(common):
            return without_marks(common)
        if len(loaded) != len(common):
            raise MismatchError(
                f"list at {'.'.join(map(str, path))!r}: {len(loaded)} elements are expected, "
                f"{len(common)} are stored"
            )
        pairs = enumerate(zip(common, loaded, strict=True))
        return [_merged(c, v, (*path, i), whole) for i, (c, v) in pairs]
    # A list of nothing but shards: rank 0 may have had none of them and stored an empty list.
    values = [_merged(_ABSENT, v, (*path, i), whole) for i, v in enumerate(loaded)]
    if values and all(value is _ABSENT for value in values):
        return without_marks(common)
    return [None if value is _ABSENT else value for value in values]


def _is_plain(loaded: Any, whole: set[int]) -> bool:
    """Whether nothing in this part of the request was sharded: the stored values stand for it."""
    if id(loaded) in whole:
        return False
    if isinstance(loaded, dict):
        return all(_is_plain(one, whole) for one in loaded.values())
    if isinstance(loaded, list):
        return all(_is_plain(one, whole) for one in loaded)
    return loaded is _ABSENT


def _is_hole(node: object) -> bool:
    return isinstance(node, dict) and set(node) == {_HOLE_KEY}
