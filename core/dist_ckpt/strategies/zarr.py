"""Strategies of zarr: version 1 is zarr v2 as Megatron-Core wrote it, version 2 is zarr v3.

Here: the names that Megatron-Core's users know. Not here: the format (``_formats.zarr``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dist_ckpt._formats.native import new_format
from dist_ckpt.strategies.base import StrategyAction, register_default_strategy
from dist_ckpt.strategies.native import NativeLoadShardedStrategy, NativeSaveShardedStrategy

if TYPE_CHECKING:
    from dist_ckpt._formats.base import SaveFormat

__all__ = [
    "ZarrLoadShardedStrategy",
    "ZarrSaveShardedStrategy",
    "register_default_zarr_strategies",
]


class ZarrSaveShardedStrategy(NativeSaveShardedStrategy):
    """Saves one zarr array for each tensor, written by all ranks in parallel.

    Args:
        backend: ``zarr``.
        version: 1 for zarr v2, which older Megatron-Core reads; 2 for zarr v3.
        thread_count: Chunks that each rank writes at a time.
    """

    def __init__(self, backend: str = "zarr", version: int = 1, *, thread_count: int = 2) -> None:
        """Remember the choices."""
        super().__init__(backend, version, thread_count=thread_count)

    def new_format(self) -> SaveFormat:
        """Return the format for one save."""
        return new_format(self.backend, self.version)


class ZarrLoadShardedStrategy(NativeLoadShardedStrategy):
    """Loads zarr arrays, ours and Megatron-Core's; each rank reads the chunks it needs."""

    backend = "zarr"
    versions = (1, 2)


def register_default_zarr_strategies() -> None:
    """Register the strategies of zarr, which are found without this, too."""
    register_default_strategy(StrategyAction.LOAD_SHARDED, "zarr", 1, ZarrLoadShardedStrategy())
    register_default_strategy(
        StrategyAction.SAVE_SHARDED, "zarr", 1, ZarrSaveShardedStrategy("zarr", 1)
    )
