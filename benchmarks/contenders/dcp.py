"""torch.distributed.checkpoint, and its ``_experimental`` checkpointers.

Here: their synchronous saves and loads. Not here: asynchronous ones (``async_peers``).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from harness.pages import sync_below
from harness.states import Shard

from contenders.base import Contender, copy_into


class TorchDcp(Contender):
    """``dcp.save`` with two threads and synced files; shards as DTensors, replicas as tensors."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self._state: dict[str, torch.Tensor] = {}

    def bind(self, shards: Sequence[Shard]) -> None:
        super().bind(shards)
        self._state = self.tensors
        if any(shard.axis is not None for shard in shards):
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.tensor import DTensor
            from torch.distributed.tensor import Shard as Cut

            mesh = init_device_mesh("cpu", (self.world,))
            self._state = {
                shard.key: DTensor.from_local(shard.data, mesh, [Cut(shard.axis or 0)])
                for shard in shards
            }

    def save(self, at: Path) -> None:
        import torch.distributed.checkpoint as dcp

        writer = dcp.FileSystemWriter(at, thread_count=self.threads, sync_files=True)
        dcp.save(self._state, storage_writer=writer, no_dist=self.world == 1)

    def load(self, at: Path) -> None:
        import torch.distributed.checkpoint as dcp

        reader = dcp.FileSystemReader(at)
        dcp.load(self._state, storage_reader=reader, no_dist=self.world == 1)


class TorchExperimental(Contender):
    """``make_sync_checkpointer`` of ``_experimental``: one ``torch.save`` a rank, synced by us."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        from torch.distributed.checkpoint._experimental import builder

        self._checkpointer = builder.make_sync_checkpointer()

    def save(self, at: Path) -> None:
        self._checkpointer.save(str(at), self.tensors)
        sync_below(at)

    def load(self, at: Path) -> None:
        state = self.tensors
        loaded = self._checkpointer.load(str(at))
        copy_into(state, loaded)

    def close(self) -> None:
        self._checkpointer.close()
