"""Strategies of the common part, and of sharded objects where the other strategy leaves them out.

Here: typed JSON, ours, and ``common.pt``, Megatron-Core's. Not here: the common part of torch_dist
and zarr as we save them: it goes the same way as the tensors (``_saving.execute``).
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dist_ckpt._formats.documents import METADATA_FILE
from dist_ckpt._formats.object_files import files_below, objects_in_files
from dist_ckpt._formats.objects import decode_document, encode_alone
from dist_ckpt._formats.torch_dist.contents import open_foreign
from dist_ckpt._formats.torch_dist.foreign import COMMON_PT, foreign_common, read_foreign_object
from dist_ckpt._formats.torch_dist.unpickle import unpickled
from dist_ckpt._formats.torch_saved import torch_saved
from dist_ckpt.dict_utils import dict_list_map_outplace, nested_values
from dist_ckpt.errors import (
    CheckpointNotFoundError,
    InvalidShardingError,
    UnknownStrategyError,
)
from dist_ckpt.mapping import ShardedObject, is_main_replica
from dist_ckpt.storage import open_store
from dist_ckpt.storage.base import checked_name
from dist_ckpt.storage.paths import is_file, names_below
from dist_ckpt.storage.trees import make_parents
from dist_ckpt.strategies.base import (
    LoadCommonStrategy,
    SaveCommonStrategy,
    StrategyAction,
    register_default_strategy,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from dist_ckpt.types import ShardedStateDict, StateDict

__all__ = [
    "JsonCommonLoadStrategy",
    "JsonCommonSaveStrategy",
    "TorchCommonLoadStrategy",
    "TorchCommonSaveStrategy",
    "register_default_common_strategies",
]

_MAX_NBYTES = 1 << 31
_COMMON_JSON = "common_document.json"


class _CommonLoadStrategy(LoadCommonStrategy):
    """What the two load strategies share; each reads version 1 of its backend."""

    backend: str

    def __init__(self, *, allow_pickle: bool = False) -> None:
        """Remember the choice."""
        self._allow_pickle = allow_pickle

    @property
    def can_handle_sharded_objects(self) -> bool:
        """True."""
        return True

    def check_backend_compatibility(self, loaded_backend: str) -> None:
        """Raise if the common part is of another backend.

        Raises:
            UnknownStrategyError: It is.
        """
        if loaded_backend != self.backend:
            raise UnknownStrategyError(
                f"{type(self).__name__} reads {self.backend!r}, not {loaded_backend!r}."
            )

    def check_version_compatibility(self, loaded_version: int) -> None:
        """Raise if it is of another version than 1.

        Raises:
            UnknownStrategyError: It is.
        """
        if loaded_version != 1:
            raise UnknownStrategyError(
                f"{type(self).__name__} reads version 1, not {loaded_version!r}.",
                hint="upgrade dist-ckpt.",
            )


class JsonCommonSaveStrategy(SaveCommonStrategy):
    """Saves values as typed JSON, and the tensors among them in a file of tensors beside it.

    Args:
        backend: ``json``.
        version: 1.
    """

    def __init__(self, backend: str = "json", version: int = 1) -> None:
        """Remember both."""
        super().__init__(backend, version)

    @property
    def can_handle_sharded_objects(self) -> bool:
        """True."""
        return True

    def save_common(self, common_state_dict: StateDict, checkpoint_dir: str | Path) -> None:
        """Save the common part. Called on rank 0."""
        _save_document(common_state_dict, _COMMON_JSON, "common", Path(checkpoint_dir))

    def save_sharded_objects(
        self, sharded_objects_state_dict: ShardedStateDict, checkpoint_dir: str | Path
    ) -> None:
        """Save this rank's main replicas, a file each. Called on every rank."""
        for one in _main_objects(sharded_objects_state_dict):
            _save_document(one.data, f"{one.unique_key}.json", one.key, Path(checkpoint_dir))


class JsonCommonLoadStrategy(_CommonLoadStrategy):
    """Loads what ``JsonCommonSaveStrategy`` saved; nothing is unpickled unless allowed.

    Args:
        allow_pickle: Whether values that JSON could not carry may be unpickled.
    """

    backend = "json"

    def load_common(self, checkpoint_dir: str | Path) -> StateDict:
        """Return the common part. Not collective."""
        common: StateDict = self._load(Path(checkpoint_dir), _COMMON_JSON, "common")
        return common

    def load_sharded_objects(
        self, sharded_objects_state_dict: ShardedStateDict, checkpoint_dir: str | Path
    ) -> StateDict:
        """Return the same nesting with objects in place of the sharded objects."""

        def load(one: ShardedObject) -> Any:
            return self._load(Path(checkpoint_dir), f"{one.unique_key}.json", one.key)

        return _objects_loaded(sharded_objects_state_dict, load)

    def load_sharded_metadata(self, checkpoint_dir: str | Path) -> dict[str, ShardedObject]:
        """Return the stored sharded objects without data, by unique key."""
        return _stored_objects(Path(checkpoint_dir))

    def _load(self, directory: Path, name: str, key: str) -> Any:
        store = open_store(directory)

        def fetch(keys: Sequence[str]) -> Sequence[torch.Tensor]:
            if not keys:
                return []
            data = store.read(_tensors_name(name), max_nbytes=_MAX_NBYTES)
            where = str(directory / _tensors_name(name))
            tensors = unpickled(data, what=key, where=where, allow_pickle=False)
            return [tensors[number] for number, _ in enumerate(keys)]

        return decode_document(
            store.read(name, max_nbytes=_MAX_NBYTES),
            key=key,
            where=str(directory / name),
            allow_pickle=self._allow_pickle,
            fetch=fetch,
        )


class TorchCommonSaveStrategy(SaveCommonStrategy):
    """Saves by ``torch.save``, as Megatron-Core reads it: ``common.pt``, and a file an object.

    Args:
        backend: ``torch``.
        version: 1.
    """

    def __init__(self, backend: str = "torch", version: int = 1) -> None:
        """Remember both."""
        super().__init__(backend, version)

    @property
    def can_handle_sharded_objects(self) -> bool:
        """True."""
        return True

    def save_common(self, common_state_dict: StateDict, checkpoint_dir: str | Path) -> None:
        """Save the common part. Called on rank 0."""
        open_store(Path(checkpoint_dir)).create(COMMON_PT, torch_saved(common_state_dict))

    def save_sharded_objects(
        self, sharded_objects_state_dict: ShardedStateDict, checkpoint_dir: str | Path
    ) -> None:
        """Save this rank's main replicas, a file each. Called on every rank."""
        for one in _main_objects(sharded_objects_state_dict):
            name = checked_name(f"{one.unique_key}.pt")
            make_parents(Path(checkpoint_dir), name)
            open_store(Path(checkpoint_dir)).create(name, torch_saved(one.data))


class TorchCommonLoadStrategy(_CommonLoadStrategy):
    """Loads ``common.pt`` and the files of objects, restricted to tensors and plain values.

    Args:
        allow_pickle: Whether anything may be unpickled; that runs code from the checkpoint.
    """

    backend = "torch"

    def load_common(self, checkpoint_dir: str | Path) -> StateDict:
        """Return the common part. Not collective.

        Raises:
            CheckpointNotFoundError: ``Common file ... does not exist``.
            UnsafeContentError: It holds more than tensors and plain values.
        """
        directory = Path(checkpoint_dir)
        if not is_file(directory / COMMON_PT) and is_file(directory / METADATA_FILE):
            # Newer releases store it as one more object of the sharded part.
            return foreign_common(open_foreign(directory), allow_pickle=self._allow_pickle)
        if not is_file(directory / COMMON_PT):
            raise CheckpointNotFoundError(f"Common file {directory / COMMON_PT} does not exist.")
        data = open_store(directory).read(COMMON_PT, max_nbytes=_MAX_NBYTES)
        common: StateDict = unpickled(
            data,
            what=COMMON_PT,
            where=str(directory / COMMON_PT),
            allow_pickle=self._allow_pickle,
        )
        return common

    def load_sharded_objects(
        self, sharded_objects_state_dict: ShardedStateDict, checkpoint_dir: str | Path
    ) -> StateDict:
        """Return the same nesting with objects in place of the sharded objects.

        Raises:
            CheckpointNotFoundError: ``Object shard ... not found``.
        """
        directory = Path(checkpoint_dir)
        stored = objects_in_files(files_below(directory))

        def load(one: ShardedObject) -> Any:
            key = one.unique_key
            if key not in stored:
                raise CheckpointNotFoundError(f"Object shard {directory / key}.pt not found.")
            return read_foreign_object(directory, key, stored[key], allow_pickle=self._allow_pickle)

        return _objects_loaded(sharded_objects_state_dict, load)

    def load_sharded_metadata(self, checkpoint_dir: str | Path) -> dict[str, ShardedObject]:
        """Return the stored sharded objects without data, by unique key."""
        keys = objects_in_files(files_below(Path(checkpoint_dir)))
        return {key: ShardedObject.empty_from_unique_key(key) for key in keys}


def _save_document(value: Any, name: str, key: str, directory: Path) -> None:
    document, tensors = encode_alone(value, key)
    name = checked_name(name)
    make_parents(directory, name)
    store = open_store(directory)
    if tensors:
        store.create(_tensors_name(name), torch_saved(list(tensors)))
    store.create(name, document)


def _tensors_name(name: str) -> str:
    return f"{name.removesuffix('.json')}.tensors.pt"


def _main_objects(state_dict: ShardedStateDict) -> list[ShardedObject]:
    found = (one for one in nested_values(state_dict) if isinstance(one, ShardedObject))
    return [one for one in found if is_main_replica(one.replica_id)]


def _objects_loaded(
    state_dict: ShardedStateDict, load: Callable[[ShardedObject], Any]
) -> StateDict:
    loaded: StateDict = dict_list_map_outplace(
        lambda leaf: load(leaf) if isinstance(leaf, ShardedObject) else leaf, state_dict
    )
    return loaded


def _stored_objects(directory: Path) -> dict[str, ShardedObject]:
    found = {}
    for file in names_below(directory, "shard_*.json"):
        name = file.removesuffix(".json")
        with contextlib.suppress(InvalidShardingError):  # a file of the sharded strategy
            found[name] = ShardedObject.empty_from_unique_key(name)
    return found


def register_default_common_strategies() -> None:
    """Register the strategies of the common part, which are found without this, too."""
    register_default_strategy(StrategyAction.LOAD_COMMON, "torch", 1, TorchCommonLoadStrategy())
    register_default_strategy(
        StrategyAction.SAVE_COMMON, "torch", 1, TorchCommonSaveStrategy("torch", 1)
    )
