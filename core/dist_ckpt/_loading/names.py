"""Checkpoints whose names differ from the job's, seen under the job's names.

Here: the renaming of keys and of names in the common part, pure. Not here: reading
(``_formats.torch_dist``), deciding for all ranks (``training_state``).

A model may be an attribute on one side and the whole model on the other: a LightningModule's
``net.weight`` is the ``weight`` of the bare ``net`` under Accelerate. Checkpoints of torch's DCP:
``_loading.dcp_names``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dist_ckpt._sharding.index import CheckpointIndex, LazyTensors

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

    from dist_ckpt._formats.documents import CheckpointContents
    from dist_ckpt._sharding.index import StoredTensor
    from dist_ckpt._sharding.shard_info import Role
    from dist_ckpt.types import StateDict

__all__ = ["Prefixes", "find_prefixes", "rename", "renamed_index"]


def renamed_index(index: CheckpointIndex, name: Callable[[str], str]) -> CheckpointIndex:
    """Return the same tensors under other keys."""
    return CheckpointIndex(_Renamed({name(key): key for key in index.tensors}, index.tensors))


class _Renamed(LazyTensors):
    """Tensors under other keys.

    Args:
        keys: The stored key of each new one.
        tensors: By stored key.
    """

    def __init__(self, keys: Mapping[str, str], tensors: Mapping[str, StoredTensor]) -> None:
        self._keys, self._tensors = keys, tensors

    def load(self) -> None:
        if isinstance(self._tensors, LazyTensors):
            self._tensors.load()

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __contains__(self, key: object) -> bool:
        return key in self._keys

    def __getitem__(self, key: str) -> StoredTensor:
        return self._tensors[self._keys[key]]

    def keys_of(self, role: Role) -> list[str]:
        of_role = set(CheckpointIndex(self._tensors).keys_of(role))
        return [key for key, stored in self._keys.items() if stored in of_role]


@dataclass(frozen=True, slots=True)
class Prefixes:
    """What stands before every name on one side only; one of the two is empty."""

    stored: str
    own: str

    def __call__(self, name: str) -> str:
        """Return the job's name of a stored one."""
        return self.own + name.removeprefix(self.stored)


def find_prefixes(own: Collection[str], stored: Collection[str]) -> Prefixes | None:
    """Return the prefix that makes all of the job's names stored ones; None if there is none.

    Only for names that have nothing in common: as soon as one name agrees, nothing is renamed.
    Two prefixes that both fit (two copies of a model in one checkpoint) are none.
    """
    if not own or not set(own).isdisjoint(stored):
        return None
    first = min(own)
    found = [
        Prefixes(name.removesuffix(first), "") for name in stored if name.endswith(f".{first}")
    ]
    found += [
        Prefixes("", first.removesuffix(name)) for name in stored if first.endswith(f".{name}")
    ]
    names = set(stored)
    fits = [
        one
        for one in found
        if all(n.startswith(one.own) and one.stored + n.removeprefix(one.own) in names for n in own)
    ]
    return fits[0] if len(fits) == 1 else None


def rename(
    contents: CheckpointContents, tree: StateDict, i: int, name: Callable[[str], str]
) -> tuple[CheckpointContents, StateDict]:
    """Return contents and optimizers' values with the names of model ``i`` changed by ``name``."""
    index = renamed_index(contents.index, lambda key: _renamed_key(key, i, name))
    changed = dict(tree)
    changed["optimizers"] = {
        j: _renamed_optimizer(saved, f"{i}.", name)
        for j, saved in tree.get("optimizers", {}).items()
    }
    return replace(contents, index=index), changed


def _renamed_key(key: str, i: int, name: Callable[[str], str]) -> str:
    head, _, rest = key.partition(".")
    if head == "models" and rest.startswith(f"{i}."):
        return f"models.{i}.{name(rest.removeprefix(f'{i}.'))}"
    # optimizers.{j}.state.{state}.{i}.{name} and optimizers.{j}.opaque.{i}.{name}
    parts = key.split(".", 5)
    if head != "optimizers" or len(parts) < 5:  # noqa: PLR2004 - the shorter of the two forms
        return key
    at = {"state": 4, "opaque": 3}.get(parts[2], 0)
    if not 0 < at < len(parts) - 1 or parts[at] != str(i):
        return key
    parameter = ".".join(parts[at + 1 :])
    return ".".join((*parts[: at + 1], name(parameter)))


def _renamed_optimizer(saved: StateDict, mark: str, name: Callable[[str], str]) -> StateDict:
    def parameter(one: str) -> str:
        return mark + name(one.removeprefix(mark)) if one.startswith(mark) else one

    changed = dict(saved)
    changed["state"] = {parameter(k): v for k, v in saved.get("state", {}).items()}
    changed["param_groups"] = [
        {**group, "params": [parameter(one) for one in group.get("params", ())]}
        for group in saved.get("param_groups", [])
    ]
    return changed
