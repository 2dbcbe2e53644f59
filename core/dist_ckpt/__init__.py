"""Distributed checkpoints for PyTorch: saved on any layout, loaded on any other.

The front door: the names most users need, imported on first use, so that ``import dist_ckpt`` is
free. Everything else stands in the public modules, see docs/way.md.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dist_ckpt.barriers import (
        Barrier,
        BarrierConfig,
        TCPStoreBarrier,
        create_barrier_from_config,
    )
    from dist_ckpt.builder import (
        CheckpointerConfig,
        make_async_checkpointer,
        make_sync_checkpointer,
    )
    from dist_ckpt.checkpoint_reader import CheckpointReader
    from dist_ckpt.checkpoint_writer import CheckpointWriter, CheckpointWriterConfig, WriterHook
    from dist_ckpt.checkpointer import AsyncCheckpointer, Checkpointer, SyncCheckpointer
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
    from dist_ckpt.staging import CheckpointStager, CheckpointStagerConfig, DefaultStager
    from dist_ckpt.training_state import load_model_and_optimizer, save_model_and_optimizer
    from dist_ckpt.types import STATE_DICT, RankInfo
    from dist_ckpt.utils import wrap_future

_HOME = {
    "AsyncCheckpointer": "checkpointer",
    "Barrier": "barriers",
    "BarrierConfig": "barriers",
    "BarrierTimeoutError": "errors",
    "CheckpointManager": "manager",
    "CheckpointNotFoundError": "errors",
    "CheckpointReader": "checkpoint_reader",
    "CheckpointStager": "staging",
    "CheckpointStagerConfig": "staging",
    "CheckpointWriter": "checkpoint_writer",
    "CheckpointWriterConfig": "checkpoint_writer",
    "Checkpointer": "checkpointer",
    "CheckpointerConfig": "builder",
    "CheckpointingException": "errors",
    "ConfigError": "errors",
    "CorruptedCheckpointError": "errors",
    "DefaultStager": "staging",
    "IncompleteCheckpointError": "errors",
    "InvalidShardingError": "errors",
    "LoadOptions": "serialization",
    "LocalNonpersistentObject": "mapping",
    "LocalNonpersitentObject": "mapping",
    "MismatchError": "errors",
    "RankFailedError": "errors",
    "RankInfo": "types",
    "STATE_DICT": "types",
    "SaveOptions": "serialization",
    "ShardedObject": "mapping",
    "ShardedTensor": "mapping",
    "ShardedTensorFactory": "mapping",
    "StorageError": "errors",
    "StrictHandling": "serialization",
    "SyncCheckpointer": "checkpointer",
    "TCPStoreBarrier": "barriers",
    "UnsafeContentError": "errors",
    "WriterHook": "checkpoint_writer",
    "check_is_distributed_checkpoint": "core",
    "create_barrier_from_config": "barriers",
    "load": "serialization",
    "load_common_state_dict": "serialization",
    "load_content_metadata": "serialization",
    "load_model_and_optimizer": "training_state",
    "load_plain_tensors": "serialization",
    "load_sharded_metadata": "serialization",
    "load_tensors_metadata": "serialization",
    "make_async_checkpointer": "builder",
    "make_sync_checkpointer": "builder",
    "remove_sharded_tensors": "serialization",
    "save": "serialization",
    "save_model_and_optimizer": "training_state",
    "sharded_state_dict": "derive",
    "wrap_future": "utils",
}

__version__ = "0.1.0.dev0"

__all__ = [
    "STATE_DICT",
    "AsyncCheckpointer",
    "Barrier",
    "BarrierConfig",
    "BarrierTimeoutError",
    "CheckpointManager",
    "CheckpointNotFoundError",
    "CheckpointReader",
    "CheckpointStager",
    "CheckpointStagerConfig",
    "CheckpointWriter",
    "CheckpointWriterConfig",
    "Checkpointer",
    "CheckpointerConfig",
    "CheckpointingException",
    "ConfigError",
    "CorruptedCheckpointError",
    "DefaultStager",
    "IncompleteCheckpointError",
    "InvalidShardingError",
    "LoadOptions",
    "LocalNonpersistentObject",
    "LocalNonpersitentObject",
    "MismatchError",
    "RankFailedError",
    "RankInfo",
    "SaveOptions",
    "ShardedObject",
    "ShardedTensor",
    "ShardedTensorFactory",
    "StorageError",
    "StrictHandling",
    "SyncCheckpointer",
    "TCPStoreBarrier",
    "UnsafeContentError",
    "WriterHook",
    "check_is_distributed_checkpoint",
    "create_barrier_from_config",
    "load",
    "load_common_state_dict",
    "load_content_metadata",
    "load_model_and_optimizer",
    "load_plain_tensors",
    "load_sharded_metadata",
    "load_tensors_metadata",
    "make_async_checkpointer",
    "make_sync_checkpointer",
    "remove_sharded_tensors",
    "save",
    "save_model_and_optimizer",
    "sharded_state_dict",
    "wrap_future",
]


def __getattr__(name: str) -> Any:
    """Import the home of ``name`` and return it."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    """Return the names of the front door."""
    return sorted(__all__)
