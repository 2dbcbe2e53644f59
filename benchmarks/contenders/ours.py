"""dist-ckpt, called as its users do.

Here: ``save`` and ``load`` of the core, and the manager. Not here: background saves
(``async_contenders``).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.states import Shard
from torch import nn

import dist_ckpt
from contenders.base import Contender, State
from dist_ckpt.manager import CheckpointManager
from dist_ckpt.training_state import TrainingState
from dist_ckpt.types import Writer


class Ours(Contender):
    """``dist_ckpt.save`` and ``dist_ckpt.load`` of a sharded state dict made before."""

    def __init__(
        self,
        *,
        strategy: Sequence[Any] | None = None,
        verify: str = "read",
        page_cache: str = "auto",
        **given: Any,
    ) -> None:
        super().__init__(**given)
        self._strategy = None if strategy is None else (str(strategy[0]), int(strategy[1]))
        self._save_options = dist_ckpt.SaveOptions(thread_count=self.threads, page_cache=page_cache)
        self._load_options = dist_ckpt.LoadOptions(thread_count=self.threads, verify=verify)
        self._described: dict[str, dist_ckpt.ShardedTensor] = {}

    def bind(self, shards: Sequence[Shard]) -> None:
        super().bind(shards)
        self._described = {shard.key: self._describe(shard) for shard in shards}

    def save(self, at: Path) -> None:
        dist_ckpt.save(self._described, at, self._strategy, options=self._save_options)

    def load(self, at: Path) -> None:
        dist_ckpt.load(self._described, at, options=self._load_options)

    def _describe(self, shard: Shard) -> dist_ckpt.ShardedTensor:
        cuts = [] if shard.axis is None else [(shard.axis, shard.part, shard.parts)]
        replica = self.rank if shard.axis is None else 0
        # As the adapters describe what DistributedDataParallel keeps equal on all ranks.
        writer: Writer = "any" if shard.axis is None and self.world > 1 else "main"
        return dist_ckpt.ShardedTensor.from_rank_offsets(
            shard.key, shard.data, *cuts, replica_id=replica, writer=writer
        )


class Described(Ours):
    """The same, with the sharded state dict made inside of the clock."""

    def save(self, at: Path) -> None:
        self.bind(self.shards)
        super().save(at)

    def load(self, at: Path) -> None:
        self.bind(self.shards)
        super().load(at)


class Bag(nn.Module):
    """Tensors as the parameters of a model."""

    def __init__(self, tensors: State) -> None:
        super().__init__()
        for key, tensor in tensors.items():
            name = key.replace(".", "-")
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))


class Managed(Ours):
    """A manager of a job, which remembers plans from one save to the next; one rank.

    The tensors are the parameters of a model, which the manager finds and describes in the clock;
    ``at`` is one of its steps.
    """

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self._managers: dict[Path, CheckpointManager] = {}

    def bind(self, shards: Sequence[Shard]) -> None:
        super().bind(shards)
        model = Bag(self.tensors)
        self._state = TrainingState(models=[model])
        self._described = {
            name: dist_ckpt.ShardedTensor.from_rank_offsets(f"models.0.{name}", one.data)
            for name, one in model.named_parameters()
        }

    def save(self, at: Path) -> None:
        manager = self._managers.get(at.parent)
        if manager is None:
            manager = CheckpointManager(at.parent, save_options=self._save_options)
            self._managers[at.parent] = manager
        made = manager.save(int(at.name.removeprefix("step_")), self._state)
        assert made == at

    def close(self) -> None:
        for manager in self._managers.values():
            manager.close()
