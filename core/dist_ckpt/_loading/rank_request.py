"""What one rank wants of a checkpoint, compared with what its part has.

Here: from a template and a stored tree to the leaves to read, and where they go. Not here: reading
(``checkpoint_reader``). Local; pure until the steps that ``place`` returns are run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, TypeAlias

import torch
from torch.distributed.tensor import DTensor  # noqa: TID251 - recognised by its class

from dist_ckpt._saving.rank_state import (
    Path,
    StoredLeaf,
    as_global,
    global_key,
    map_tree,
    memory_of,
    render,
    whole,
)
from dist_ckpt._staging_pool.handover import is_plain_tensor
from dist_ckpt._staging_pool.memory import copy_bits
from dist_ckpt.dict_utils import diff, nested_values
from dist_ckpt.errors import MismatchError
from dist_ckpt.mapping import (
    LocalNonpersistentObject,
    ShardedBase,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["RankRequest", "is_all_global"]

Loaded: TypeAlias = "Mapping[str, Any]"
Finish: TypeAlias = "Callable[[Mapping[str, Any]], Any]"
"""Returns the new value of one place, given what was loaded, by number."""


class _Absent:
    """Stands for a place that the stored tree does not have."""


_ABSENT: Final = _Absent()


def is_all_global(template: Any) -> bool:
    """Whether a template asks for nothing but leaves that no rank owns."""
    found: list[bool] = []
    map_tree(lambda _, leaf: found.append(_is_global(leaf)), template)
    return all(found)


def _is_global(leaf: Any) -> bool:
    return isinstance(leaf, (ShardedBase, DTensor, LocalNonpersistentObject))


class RankRequest:
    """Leaves to read, and what does not fit.

    Args:
        stored: What the checkpoint has, without data: tensors by key, objects by unique key.
        map_location: Where fresh tensors go, as in ``torch.load``.
    """

    def __init__(
        self, stored: Mapping[str, ShardedTensor | ShardedObject], map_location: Any
    ) -> None:
        """Want nothing yet."""
        self.wanted: dict[str, Any] = {}
        self.missing: list[str] = []
        self.problems: list[str] = []
        self._stored, self._map_location = stored, map_location
        self._fresh: dict[str, str] = {}
        self._filled: dict[tuple[Any, ...], tuple[str, str]] = {}

    def place(self, target: Any, source: Any, path: Path) -> Finish:  # noqa: PLR0911 - one for each kind of place
        """Compare one place of the template with the stored tree, and note what to read.

        Args:
            target: What stands there; None for all that is stored.
            source: What is stored there.
            path: Where.

        Returns:
            What puts the loaded values into ``target`` and returns it, or what replaces it.
        """
        if _is_global(target):
            return self._global(target, source, path)
        if isinstance(source, _Absent):
            return self._absent(target, path)
        if target is None:
            return self._all_of(source)
        if isinstance(target, dict):
            return self._dict(target, source, path)
        if isinstance(target, list) or type(target) is tuple:
            return self._sequence(target, source, path)
        if isinstance(source, StoredLeaf):
            return self._leaf(target, source, path)
        if not isinstance(target, type(source)):
            return self._refuse(target, f"a {type(source).__name__}", path)
        return lambda _: source

    def _refuse(self, target: Any, found: str, path: Path) -> Finish:
        self.problems.append(
            f"{render(path)!r}: a {type(target).__name__} is expected, {found} is stored"
        )
        return lambda _: target

    def _absent(self, target: Any, path: Path) -> Finish:
        if isinstance(target, dict) and any(map(_is_global, nested_values(target))):
            return self._dict(target, {}, path)
        if isinstance(target, list) and any(map(_is_global, nested_values(target))):
            return self._sequence(target, [], path)
        self.missing.append(render(path))
        return lambda _: target

    def _dict(self, target: dict[Any, Any], source: Any, path: Path) -> Finish:
        if not isinstance(source, dict):
            return self._refuse(target, _name_of(source), path)
        steps = {
            key: self.place(value, source.get(key, _ABSENT), (*path, ("key", key)))
            for key, value in target.items()
        }

        def finish(loaded: Loaded) -> Any:
            for key, step in steps.items():
                target[key] = step(loaded)
            return target

        return finish

    def _sequence(self, target: Any, source: Any, path: Path) -> Finish:
        """Positions that only the stored sequence has are read too: it has no other keys."""
        if not isinstance(source, list | tuple) or isinstance(target, list) != isinstance(
            source, list
        ):
            return self._refuse(target, _name_of(source), path)
        pairs = [
            (
                target[i] if i < len(target) else None,
                source[i] if i < len(source) else _ABSENT,
            )
            for i in range(max(len(target), len(source)))
        ]
        steps = [self.place(t, s, (*path, ("at", i))) for i, (t, s) in enumerate(pairs)]

        def finish(loaded: Loaded) -> Any:
            items = [step(loaded) for step in steps]
            if isinstance(target, tuple):
                return tuple(items)
            target[:] = items
            return target

        return finish

    def _leaf(self, target: Any, source: StoredLeaf, path: Path) -> Finish:
        """Read a stored tensor into the one that is there."""
        stored = self._stored.get(source.key)
        if not isinstance(stored, ShardedTensor) or not is_plain_tensor(target):
            found = "an object" if isinstance(stored, ShardedObject) else "a tensor"
            return self._refuse(target, found, path)
        expected, found_ = (tuple(target.shape), target.dtype), (stored.global_shape, stored.dtype)
        if expected != found_:
            self.problems.append(
                f"{render(path)!r}: shape {expected[0]} and {expected[1]} are expected, "
                f"{found_[0]} and {found_[1]} are stored"
            )
            return lambda _: target
        memory = memory_of(target)
        key, number = self._filled.setdefault(memory, (source.key, str(len(self.wanted))))
        if number not in self.wanted:
            self.wanted[number] = whole(source.key, target.detach(), target)
        elif key != source.key:
            # Tied here, not when it was saved: read aside, and compared.
            aside = self._want(whole(source.key, None, stored))
            return lambda loaded: _check_same(target, loaded[aside], path)
        return lambda loaded: _settle(target, loaded[number], path)

    def _all_of(self, source: Any) -> Finish:
        """Return all that is stored below, as new objects."""
        steps: list[Finish] = []

        def note(_: Path, leaf: Any) -> None:
            steps.append(self._anew(leaf))

        map_tree(note, source)

        def finish(loaded: Loaded) -> Any:
            rest = iter(steps)
            return map_tree(lambda _, __: next(rest)(loaded), source)

        return finish

    def _anew(self, leaf: Any) -> Finish:
        if not isinstance(leaf, StoredLeaf):
            return lambda _: leaf
        stored = self._stored.get(leaf.key)
        if stored is None:
            self.problems.append(f"{leaf.key!r} is in the part but not in the checkpoint")
            return lambda _: None
        if isinstance(stored, ShardedObject):
            number = self._want(stored)
            return lambda loaded: loaded[number]
        if leaf.key not in self._fresh:
            self._fresh[leaf.key] = self._want(self._fresh_target(stored))
        number = self._fresh[leaf.key]
        if leaf.trains is None:
            return lambda loaded: loaded[number]
        trains = leaf.trains
        return lambda loaded: torch.nn.Parameter(loaded[number], requires_grad=trains)

    def _fresh_target(self, stored: ShardedTensor) -> ShardedTensor:
        data = torch.empty(stored.global_shape, dtype=stored.dtype)
        return whole(stored.key, _located(data, self._map_location), stored)

    def _global(self, target: Any, source: Any, path: Path) -> Finish:
        if isinstance(target, LocalNonpersistentObject):
            return lambda _: target.unwrap()
        if isinstance(target, DTensor):
            key = source.key if isinstance(source, StoredLeaf) else global_key(path)
            shards: Any = list(as_global(target, key, path).shards)
        else:
            shards = target
        if any(one not in self._stored for one in _keys_of(shards)):
            self.missing.append(render(path))
            return lambda _: target
        number = self._want(shards)
        if isinstance(target, DTensor):
            return lambda loaded: _settle_all(target, shards, loaded.get(number, ()), path)
        return lambda loaded: loaded[number]

    def _want(self, leaf: Any) -> str:
        number = str(len(self.wanted))
        self.wanted[number] = leaf
        return number


def _keys_of(leaf: Any) -> list[str]:
    if isinstance(leaf, ShardedTensorFactory):
        return [key for one in nested_values([leaf.build()]) for key in _keys_of(one)]
    if isinstance(leaf, list):
        return [key for one in leaf for key in _keys_of(one)]
    if isinstance(leaf, ShardedObject):
        return [leaf.unique_key]
    return [leaf.key] if isinstance(leaf, ShardedBase) else []


def _name_of(source: Any) -> str:
    return "a tensor or object" if isinstance(source, StoredLeaf) else f"a {type(source).__name__}"


def _settle(target: torch.Tensor, value: torch.Tensor, path: Path) -> torch.Tensor:
    """Return ``target``, with ``value`` in it where it could not be read in place.

    Raises:
        MismatchError: Elements that share memory in the target differ in the checkpoint.
    """
    if value.data_ptr() != target.data_ptr():
        shared = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in target.stride())
        copy_bits(target.detach()[shared], value[shared])
        _check_same(target, value, path)
    return target


def _check_same(target: torch.Tensor, value: torch.Tensor, path: Path) -> torch.Tensor:
    if any(diff([target], [value])):
        raise MismatchError(
            f"{render(path)!r}: elements that differ in the checkpoint share memory in the target."
        )
    return target


def _settle_all(target: DTensor, shards: list[ShardedTensor], values: Any, path: Path) -> DTensor:
    for shard, value in zip(shards, values, strict=True):
        if shard.data is not None:
            _settle(shard.data, value, path)
    return target


def _located(data: torch.Tensor, map_location: Any) -> torch.Tensor:
    """Return memory where ``map_location`` wants it; what is stored counts as of the CPU."""
    if isinstance(map_location, dict):
        map_location = map_location.get("cpu")
    if map_location is None:
        return data
    if callable(map_location) and not isinstance(map_location, torch.device):
        storage: torch.UntypedStorage | None = map_location(data.untyped_storage(), "cpu")
        if storage is None:
            return data
        moved = torch.empty(0, dtype=data.dtype, device=storage.device)
        moved.set_(storage, 0, data.shape, data.stride())
        return moved
    return data.to(map_location)
