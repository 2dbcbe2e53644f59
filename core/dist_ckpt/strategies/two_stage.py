"""The load strategy of old Megatron-Core: read once in a data-parallel group, then hand on.

Here: its name and parameters. Not here: the work (``strategies.fully_parallel``). Collective over
all ranks of the job.

Source of the names: the API documentation of Megatron-Core 0.4 to 0.15. Unlike there, the ranks of
a group share the reading, tensors that have no data yet are made, no group is created, and shards
are handed on in large pieces instead of one by one.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, cast

from dist_ckpt.core import maybe_load_config
from dist_ckpt.errors import UnknownStrategyError
from dist_ckpt.strategies.base import LoadShardedStrategy, StrategyAction, get_default_strategy
from dist_ckpt.strategies.fully_parallel import DistributionCache, load_and_exchange

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from dist_ckpt.mapping import ShardedObject, ShardedTensor
    from dist_ckpt.types import ShardedStateDict, StateDict

__all__ = ["TwoStageDataParallelLoadShardedStrategy"]

_UNNAMED_BACKEND = ("torch_dist", 1)
"""What a checkpoint without ``metadata.json`` is: torch's DCP writes none."""


_VERSIONS = range(1, 10)
"""Versions that a backend is looked for in; formats have had one or two."""


class TwoStageDataParallelLoadShardedStrategy(LoadShardedStrategy):
    """Loads with the default strategy of the checkpoint's backend, each byte once in a group.

    Args:
        data_parallel_group: Ranks that want the same shards; None is the default group.
        cpu_transfer: Whether shards are handed on in host memory. A group that moves only device
            memory (NCCL alone) uses that in any case. False leaves the choice to where tensors lie.
    """

    def __init__(
        self,
        data_parallel_group: ProcessGroup | None,
        cpu_transfer: bool = True,  # noqa: FBT001, FBT002 - signature of Megatron-Core
    ) -> None:
        """Remember the choices; nothing is exchanged."""
        self.data_parallel_group = data_parallel_group
        self.cpu_transfer = cpu_transfer
        self._loaded_backend = _UNNAMED_BACKEND[0]

    @property
    def can_handle_sharded_objects(self) -> bool:
        """True: they go to the default strategy, as tensors do."""
        return True

    def load(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path) -> StateDict:
        """Return the same nesting with tensors and objects in place of the leaves. Collective.

        Data of a sharded tensor is filled in place; where there is none, a CPU tensor is made.

        Raises:
            UnknownStrategyError: Nobody handles the checkpoint's backend.
            CheckpointingException: What that backend's strategy raises, and other ranks' failures.
        """
        return load_and_exchange(
            lambda: _strategy_of(checkpoint_dir),
            sharded_state_dict,
            checkpoint_dir,
            self.data_parallel_group,
            cache=DistributionCache(enabled=False),
            exchange_algo="broadcast",
            on_host=self.cpu_transfer,
        )

    def load_tensors_metadata(self, checkpoint_dir: str | Path) -> dict[str, ShardedTensor]:
        """Return what the default strategy finds. Not collective."""
        return _strategy_of(checkpoint_dir).load_tensors_metadata(checkpoint_dir)

    def load_sharded_metadata(
        self, checkpoint_dir: str | Path
    ) -> dict[str, ShardedTensor | ShardedObject]:
        """Return what the default strategy finds. Not collective."""
        return _strategy_of(checkpoint_dir).load_sharded_metadata(checkpoint_dir)

    def remove_sharded_tensors(self, checkpoint_dir: str | Path, key_prefix: str) -> None:
        """Let the default strategy remove them. Call it on one rank."""
        _strategy_of(checkpoint_dir).remove_sharded_tensors(checkpoint_dir, key_prefix)

    def check_backend_compatibility(self, loaded_backend: str) -> None:
        """Raise if nobody handles the backend, in any version; remember it for the next question.

        Raises:
            UnknownStrategyError: Nobody does.
        """
        self._loaded_backend = loaded_backend
        for version in _VERSIONS:
            with contextlib.suppress(UnknownStrategyError):
                get_default_strategy(StrategyAction.LOAD_SHARDED, loaded_backend, version)
                return
        get_default_strategy(StrategyAction.LOAD_SHARDED, loaded_backend, _VERSIONS[0])

    def check_version_compatibility(self, loaded_version: int) -> None:
        """Raise if nobody handles this version of the backend that was asked about last.

        Raises:
            UnknownStrategyError: Nobody does.
        """
        get_default_strategy(StrategyAction.LOAD_SHARDED, self._loaded_backend, loaded_version)


def _strategy_of(checkpoint_dir: str | Path) -> LoadShardedStrategy:
    """Return the default load strategy of a checkpoint. Not collective.

    Raises:
        UnknownStrategyError: Nobody handles it.
        CorruptedCheckpointError: ``metadata.json`` is damaged.
    """
    config = maybe_load_config(Path(checkpoint_dir))
    backend, version = _UNNAMED_BACKEND
    if config is not None:
        backend, version = config.sharded_backend, config.sharded_backend_version
    found = get_default_strategy(StrategyAction.LOAD_SHARDED, backend, version)
    return cast("LoadShardedStrategy", found)
