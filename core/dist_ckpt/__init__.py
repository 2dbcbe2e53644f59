"""Distributed checkpoints for PyTorch: saved on any layout, loaded on any other.

The front door: the names most users need, imported on first use, so that ``import dist_ckpt`` is
free. Everything else stands in the public modules, see docs/way.md.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dist_ckpt.core import check_is_distributed_checkpoint
    from dist_ckpt.derive import sharded_state_dict
    from dist_ckpt.errors import (
        BarrierTimeoutError,
        CheckpointingException,
        CheckpointNotFoundError,
        ConfigError,
        CorruptedCheckpointError,
        IncompleteCheckpointError,
        InvalidShardingError,
        MismatchError,
        RankFailedError,
        StorageError,
        UnsafeContentError,
    )
    from dist_ckpt.manager import CheckpointManager
    from dist_ckpt.mapping import (
        LocalNonpersistentObject,
        LocalNonpersitentObject,
        ShardedObject,
        ShardedTensor,
        ShardedTensorFactory,
    )
    from dist_ckpt.serialization import (
        LoadOptions,
        SaveOptions,
        StrictHandling,
        load,
        load_common_state_dict,
        load_content_metadata,
        load_plain_tensors,
        load_sharded_metadata,
        load_tensors_metadata,
        remove_sharded_tensors,
        save,
    )
    from dist_ckpt.training_state import load_model_and_optimizer, save_model_and_optimizer

_HOME = {
    "BarrierTimeoutError": "errors",
    "CheckpointManager": "manager",
    "CheckpointNotFoundError": "errors",
    "CheckpointingException": "errors",
    "ConfigError": "errors",
    "CorruptedCheckpointError": "errors",
    "IncompleteCheckpointError": "errors",
    "InvalidShardingError": "errors",
    "LoadOptions": "serialization",
    "LocalNonpersistentObject": "mapping",
    "LocalNonpersitentObject": "mapping",
    "MismatchError": "errors",
    "RankFailedError": "errors",
    "SaveOptions": "serialization",
    "ShardedObject": "mapping",
    "ShardedTensor": "mapping",
    "ShardedTensorFactory": "mapping",
    "StorageError": "errors",
    "StrictHandling": "serialization",
    "UnsafeContentError": "errors",
    "check_is_distributed_checkpoint": "core",
    "load": "serialization",
    "load_common_state_dict": "serialization",
    "load_content_metadata": "serialization",
    "load_model_and_optimizer": "training_state",
    "load_plain_tensors": "serialization",
    "load_sharded_metadata": "serialization",
    "load_tensors_metadata": "serialization",
    "remove_sharded_tensors": "serialization",
    "save": "serialization",
    "save_model_and_optimizer": "training_state",
    "sharded_state_dict": "derive",
}

__version__ = "0.1.0.dev0"

__all__ = [
    "BarrierTimeoutError",
    "CheckpointManager",
    "CheckpointNotFoundError",
    "CheckpointingException",
    "ConfigError",
    "CorruptedCheckpointError",
    "IncompleteCheckpointError",
    "InvalidShardingError",
    "LoadOptions",
    "LocalNonpersistentObject",
    "LocalNonpersitentObject",
    "MismatchError",
    "RankFailedError",
    "SaveOptions",
    "ShardedObject",
    "ShardedTensor",
    "ShardedTensorFactory",
    "StorageError",
    "StrictHandling",
    "UnsafeContentError",
    "check_is_distributed_checkpoint",
    "load",
    "load_common_state_dict",
    "load_content_metadata",
    "load_model_and_optimizer",
    "load_plain_tensors",
    "load_sharded_metadata",
    "load_tensors_metadata",
    "remove_sharded_tensors",
    "save",
    "save_model_and_optimizer",
    "sharded_state_dict",
]


def __getattr__(name: str) -> Any:
    """Import the home of ``name`` and return it."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    """Return the names of the front door."""
    return sorted(__all__)
