"""A snapshot of a state dict in memory that the checkpoint process can see.

Here: ``CheckpointStager`` and ``DefaultStager``. Not here: the process (``checkpoint_process``).
Local, on every rank. The names are those of torch's ``_experimental`` checkpointer (torch 2.13).
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

import torch

from dist_ckpt._saving.rank_state import (
    GlobalTensor,
    Path,
    map_tree,
    memory_of,
    render,
    with_global_leaves,
)
from dist_ckpt._staging_pool.arena import Arena
from dist_ckpt._staging_pool.copying import Copier, Copy
from dist_ckpt._staging_pool.handover import is_plain_tensor
from dist_ckpt._staging_pool.pool import StagingPool
from dist_ckpt.errors import BarrierTimeoutError, ConfigError, InvalidShardingError
from dist_ckpt.mapping import ShardedObject, ShardedTensor

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dist_ckpt.types import STATE_DICT

__all__ = [
    "CheckpointStager",
    "CheckpointStagerConfig",
    "DefaultStager",
    "StagedStateDict",
]


class StagedStateDict(dict[str, Any]):
    """A snapshot; ``arena`` is the shared memory that its tensors lie in, if they do."""

    arena: Arena | None = None


class CheckpointStager(ABC):
    """Makes the snapshot of which a checkpoint is written while training goes on."""

    @abstractmethod
    def stage(self, state_dict: STATE_DICT, **kwargs: Any) -> STATE_DICT | Future[STATE_DICT]:
        """Return a copy of the state dict, or a future of one.

        Until the future is done the caller must not change what the state dict refers to.

        Args:
            state_dict: This rank's state.
            kwargs: What was given to ``AsyncCheckpointer.save``.
        """

    @abstractmethod
    def close(self) -> None:
        """Let go of everything; the stager is not used afterwards."""


@dataclass(slots=True)
class CheckpointStagerConfig:
    """How to stage. On a machine without an accelerator only the two in the middle matter.

    Attributes:
        use_pinned_memory: Copy from an accelerator into page-locked memory.
        use_shared_memory: Copy into memory that the checkpoint process shares; otherwise the copy
            is copied once more when it is handed over.
        use_async_staging: Copy in a thread and return a future. The caller must then wait for it
            before anything in the state dict changes.
        use_non_blocking_copy: A field of torch's config; copies from an accelerator are always
            enqueued, and waited for once, at the end.
    """

    use_pinned_memory: bool = True
    use_shared_memory: bool = True
    use_async_staging: bool = False
    use_non_blocking_copy: bool = True


class DefaultStager(CheckpointStager):
    """Copies every tensor to the host and every value with ``copy.deepcopy``.

    Shared memory is used again for a later snapshot once nobody holds the snapshot that lies in it,
    nor any tensor of it; two pieces of it are kept at most.

    Tensors that are the same elements in the state dict are one copy in the snapshot. DTensors and
    factories come out as what they store (see ``AsyncCheckpointer``). Also a context manager.

    Args:
        config: How to stage.
    """

    def __init__(self, config: CheckpointStagerConfig | None = None) -> None:
        """Start a thread if the config asks for one."""
        self._config = config or CheckpointStagerConfig()
        self._executor = (
            ThreadPoolExecutor(1, thread_name_prefix="staging")
            if self._config.use_async_staging
            else None
        )
        self._pool = StagingPool(use_pinned=self._config.use_pinned_memory)
        self._copier = Copier()
        self._closed = False

    def __enter__(self) -> Self:
        """Return the stager."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()

    def stage(self, state_dict: STATE_DICT, **kwargs: Any) -> STATE_DICT | Future[STATE_DICT]:
        """Return a snapshot, or a future of one with ``use_async_staging``.

        Raises:
            InvalidShardingError: Something has no copy, or has no boxes.
            StorageError: There is not enough memory.
            ConfigError: The stager is closed.
        """
        del kwargs  # they are the writer's
        if self._closed:
            raise ConfigError("the stager is closed.")
        if self._executor is not None:
            return self._executor.submit(self._stage, state_dict)
        return self._stage(state_dict)

    def close(self) -> None:
        """Wait for a snapshot that is being made; nothing is staged afterwards.

        Snapshots stay as they are; memory that none lies in is given back.
        """
        self._closed = True
        if self._executor is not None:
            self._executor.shutdown(wait=True)
        self._copier.close()
        self._pool.retire()

    def _stage(self, state_dict: Mapping[str, Any]) -> StagedStateDict:
        tree = with_global_leaves(state_dict)
        snapshot = _Snapshot(tree, self._config, self._pool)
        staged = StagedStateDict(map_tree(snapshot.copy_leaf, tree))
        staged.arena = snapshot.arena
        self._copier.run(snapshot.copies)
        return staged


class _Snapshot:
    """One snapshot: its memory, and the copies of tensors that are still to be made."""

    def __init__(
        self, tree: dict[str, Any], config: CheckpointStagerConfig, pool: StagingPool
    ) -> None:
        self._config = config
        self._targets: dict[tuple[Any, ...], torch.Tensor] = {}
        self.copies: list[Copy] = []
        self.arena: Arena | None = None
        if config.use_shared_memory:
            found: dict[tuple[Any, ...], torch.Tensor] = {}
            map_tree(lambda _, leaf: found.update(_tensors_of(leaf)), tree)
            self.arena = _memory(pool, Arena.nbytes_for(found.values()))

    def copy_leaf(self, path: Path, leaf: Any) -> Any:
        try:
            return self._copied(render(path), leaf)
        except NotImplementedError as error:
            raise InvalidShardingError(f"{render(path)!r} cannot be copied: {error}") from error
        except (TypeError, RuntimeError) as error:
            # deepcopy of what has none: locks, generators, tensors with a history.
            raise InvalidShardingError(
                f"{render(path)!r}, a {type(leaf).__name__}, cannot be copied: {error}"
            ) from error

    def _copied(self, name: str, leaf: Any) -> Any:
        if isinstance(leaf, GlobalTensor):
            return GlobalTensor(leaf.key, tuple(self._shard(name, one) for one in leaf.shards))
        if isinstance(leaf, ShardedTensor):
            return self._shard(name, leaf)
        if isinstance(leaf, ShardedObject):
            return replace(leaf, data=copy.deepcopy(leaf.data))
        if not isinstance(leaf, torch.Tensor):
            return copy.deepcopy(leaf)
        tensor = self._tensor(name, leaf)
        if type(leaf) is torch.nn.Parameter:
            return torch.nn.Parameter(tensor, requires_grad=leaf.requires_grad)
        return tensor

    def _shard(self, name: str, shard: ShardedTensor) -> ShardedTensor:
        return shard if shard.data is None else replace(shard, data=self._tensor(name, shard.data))

    def _tensor(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if not is_plain_tensor(tensor):
            return tensor.detach().clone()  # sparse, quantized: pickled when handed over
        memory = memory_of(tensor)
        if memory not in self._targets:
            target = self._targets[memory] = self._target_for(tensor)
            self.copies.append(Copy(tensor, target, name))
        return self._targets[memory]

    def _target_for(self, tensor: torch.Tensor) -> torch.Tensor:
        shape = tuple(tensor.shape)
        if self.arena is not None:
            return self.arena.take(shape, tensor.dtype)
        pinned = self._config.use_pinned_memory and tensor.device.type != "cpu"
        return torch.empty(shape, dtype=tensor.dtype, pin_memory=pinned)


def _memory(pool: StagingPool, nbytes: int) -> Arena:
    """Return memory of the pool, which comes back to it when the snapshot is gone."""
    try:
        lease = pool.acquire(nbytes, timeout_secs=0, what="a snapshot", may_be_less=False)
    except BarrierTimeoutError:
        # Earlier snapshots are still held, by whom it is not known: waiting could be for ever.
        return Arena(nbytes)
    return lease.lend()


def _tensors_of(leaf: Any) -> dict[tuple[Any, ...], torch.Tensor]:
    shards = leaf.shards if isinstance(leaf, GlobalTensor) else (leaf,)
    data = [one.data if isinstance(one, ShardedTensor) else one for one in shards]
    return {
        memory_of(one): one
        for one in data
        if isinstance(one, torch.Tensor) and is_plain_tensor(one)
    }
