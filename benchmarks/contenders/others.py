"""Peers that run where they are installed, and TensorStore without us.

Here: Megatron-Core, torchsnapshot, raw TensorStore. Not here: their asynchronous saves.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from async_peers import cuda_or_none
from harness.pages import sync_below
from harness.states import Shard

from contenders.base import Contender


class Megatron(Contender):
    """``dist_checkpointing`` with torch_dist; with ``parallel``, replicas share the work."""

    def __init__(self, *, parallel: bool = False, **given: Any) -> None:
        super().__init__(**given)
        self._parallel = parallel
        self._described: dict[str, Any] = {}

    def bind(self, shards: Sequence[Shard]) -> None:
        from megatron.core.dist_checkpointing.mapping import ShardedTensor

        super().bind(shards)
        for shard in shards:
            cuts = [] if shard.axis is None else [(shard.axis, shard.part, shard.parts)]
            self._described[shard.key] = ShardedTensor.from_rank_offsets(
                shard.key, shard.data, *cuts, replica_id=self.rank if shard.axis is None else 0
            )

    def save(self, at: Path) -> None:
        from megatron.core import dist_checkpointing
        from megatron.core.dist_checkpointing.strategies import fully_parallel
        from megatron.core.dist_checkpointing.strategies import torch as torch_dist

        at.mkdir(exist_ok=True)
        strategy = torch_dist.TorchDistSaveShardedStrategy(
            "torch_dist", 1, thread_count=self.threads
        )
        if self._parallel:
            strategy = fully_parallel.FullyParallelSaveStrategyWrapper(strategy)
        with cuda_or_none():
            dist_checkpointing.save(dict(self._described), str(at), strategy)
        if self.rank == 0:
            sync_below(at)

    def load(self, at: Path) -> None:
        from megatron.core import dist_checkpointing
        from megatron.core.dist_checkpointing.strategies import fully_parallel
        from megatron.core.dist_checkpointing.strategies import torch as torch_dist

        strategy = torch_dist.TorchDistLoadShardedStrategy()
        if self._parallel:
            strategy = fully_parallel.FullyParallelLoadStrategyWrapper(strategy)
        with cuda_or_none():
            loaded = dist_checkpointing.load(dict(self._described), str(at), strategy)
        for shard in self.shards:
            if loaded[shard.key].data_ptr() != shard.data.data_ptr():
                shard.data.copy_(loaded[shard.key])


class Snapshot(Contender):
    """``torchsnapshot.Snapshot``, synced by us."""

    def save(self, at: Path) -> None:
        import torchsnapshot

        torchsnapshot.Snapshot.take(str(at), {"state": torchsnapshot.StateDict(**self.tensors)})
        sync_below(at)

    def load(self, at: Path) -> None:
        import torchsnapshot

        state = torchsnapshot.StateDict(**self.tensors)
        torchsnapshot.Snapshot(str(at)).restore({"state": state})
        for shard in self.shards:
            if state[shard.key].data_ptr() != shard.data.data_ptr():
                shard.data.copy_(state[shard.key])


class TensorStore(Contender):
    """zarr v3 arrays in our layout, without us: all begun at once, as TensorStore's users do."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        import tensorstore

        limit = {"limit": self.threads}
        self._context = tensorstore.Context(
            {"file_io_concurrency": limit, "data_copy_concurrency": limit}
        )
        self._documents: dict[str, dict[str, Any]] = {}

    def bind(self, shards: Sequence[Shard]) -> None:
        from dist_ckpt._formats.zarr.grid import choose_grid
        from dist_ckpt._formats.zarr.metadata import array_metadata
        from dist_ckpt.box import Box

        super().bind(shards)
        self._documents = {}
        for shard in shards:
            whole = Box((0,) * len(shard.shape), shard.shape)
            grid = choose_grid(shard.shape, [whole], shard.data.itemsize, 3)
            self._documents[shard.key] = array_metadata(shard.shape, "float32", grid, 3)

    def save(self, at: Path) -> None:
        opened = [self._open(at, shard, create=True) for shard in self.shards]
        writes = [
            array.result().write(shard.data.numpy(), can_reference_source_data_indefinitely=True)
            for array, shard in zip(opened, self.shards, strict=True)
        ]
        for write in writes:
            write.result()
        sync_below(at)

    def load(self, at: Path) -> None:
        import tensorstore

        opened = [self._open(at, shard, create=False) for shard in self.shards]
        reads = [
            tensorstore.array(shard.data.numpy(), write=True).write(array.result())
            for array, shard in zip(opened, self.shards, strict=True)
        ]
        for read in reads:
            read.result()

    def _open(self, at: Path, shard: Shard, *, create: bool) -> Any:
        import tensorstore

        name = hashlib.sha256(shard.key.encode()).hexdigest()[:16]
        kvstore = {"driver": "file", "path": str(at / name)}
        spec: dict[str, Any] = {"driver": "zarr3", "kvstore": kvstore}
        if create:
            ours = self._documents[shard.key]
            spec["metadata"] = {k: v for k, v in ours.items() if k != "attributes"}
        return tensorstore.open(spec, create=create, open=not create, context=self._context)
