"""Our own formats are what the conformance kit asks of every backend."""

from __future__ import annotations

from dist_ckpt.strategies.torch import TorchDistLoadShardedStrategy, TorchDistSaveShardedStrategy
from dist_ckpt.strategies.zarr import ZarrLoadShardedStrategy, ZarrSaveShardedStrategy
from dist_ckpt.testing import StrategyConformance, StrategyMatrix


class TestTorchDist(StrategyConformance):
    save_strategy = ("torch_dist", 1)
    dispensable = (".metadata",)  # only DCP's own tools need it


class TestZarr2(StrategyConformance):
    save_strategy = ("zarr", 1)


class TestZarr3(StrategyConformance):
    save_strategy = ("zarr", 2)
    load_strategy = ("zarr", 2)


class TestTorchDistAsObjects(StrategyMatrix):
    save_strategy = TorchDistSaveShardedStrategy(thread_count=1)
    load_strategy = TorchDistLoadShardedStrategy()
    worlds = ((2, 4),)


class TestZarrAsObjectsBesideAnotherCommonPart(StrategyMatrix):
    save_strategy = ZarrSaveShardedStrategy("zarr", 2)
    load_strategy = ZarrLoadShardedStrategy()
    common_strategy = ("torch", 1)
    worlds = ((4, 3),)
