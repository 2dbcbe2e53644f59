"""The name under which Megatron-Core's users know the TensorStore reader of zarr.

Here: one class. Not here: reading, which is the same as that of ``strategies.zarr``.
"""

from __future__ import annotations

from typing import Any

from dist_ckpt.strategies.base import StrategyAction, register_default_strategy
from dist_ckpt.strategies.zarr import ZarrLoadShardedStrategy

__all__ = [
    "TensorStoreLoadShardedStrategy",
    "register_default_tensorstore_strategies",
]


class TensorStoreLoadShardedStrategy(ZarrLoadShardedStrategy):
    """Loads zarr arrays through TensorStore, as ``ZarrLoadShardedStrategy`` does.

    Args:
        load_directly_on_device: Accepted, without effect: data that a sharded tensor has is always
            filled in place, on its device.
        thread_count: Reads at a time on each rank.
    """

    def __init__(
        self,
        load_directly_on_device: bool = False,  # noqa: FBT001, FBT002, ARG002 - the lineage's
        **options: Any,
    ) -> None:
        """Remember the choices."""
        super().__init__(**options)


def register_default_tensorstore_strategies() -> None:
    """Make the TensorStore reader the one of zarr; it reads as the other one does."""
    register_default_strategy(
        StrategyAction.LOAD_SHARDED, "zarr", 1, TensorStoreLoadShardedStrategy()
    )
