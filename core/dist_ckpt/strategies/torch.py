"""Strategies of torch_dist, the format of torch's DCP.

Here: the names that Megatron-Core's users know. Not here: the format (``_formats.torch_dist``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dist_ckpt._formats.native import new_format
from dist_ckpt.errors import ConfigError
from dist_ckpt.strategies.base import StrategyAction, register_default_strategy
from dist_ckpt.strategies.native import NativeLoadShardedStrategy, NativeSaveShardedStrategy

if TYPE_CHECKING:
    from dist_ckpt._formats.base import SaveFormat
    from dist_ckpt._formats.torch_dist.planners import MCoreLoadPlanner, MCoreSavePlanner

__all__ = [
    "MCoreLoadPlanner",
    "MCoreSavePlanner",
    "TorchDistLoadShardedStrategy",
    "TorchDistSaveShardedStrategy",
    "register_default_torch_strategies",
]


class TorchDistSaveShardedStrategy(NativeSaveShardedStrategy):
    """Saves as torch_dist; parameters as in Megatron-Core.

    Args:
        backend: ``torch_dist``.
        version: 1.
        keep_only_main_replica: True: each element is stored once. Another value is refused: two
            copies of an element may differ.
        thread_count: Files that each rank writes at a time.
        cached_metadata: Accepted, without effect: nothing is cached that could be out of date.
        separation_hint: Tensors whose key begins with it get files of their own.
    """

    def __init__(  # noqa: PLR0917 - the lineage's signature
        self,
        backend: str = "torch_dist",
        version: int = 1,
        keep_only_main_replica: bool = True,  # noqa: FBT001, FBT002 - the lineage's signature
        thread_count: int = 2,
        cached_metadata: bool = False,  # noqa: FBT001, FBT002, ARG002 - the lineage's signature
        separation_hint: str | None = None,
    ) -> None:
        """Remember the choices."""
        super().__init__(backend, version, thread_count=thread_count)
        if not keep_only_main_replica:
            raise ConfigError(
                "keep_only_main_replica=False is not supported: each element is stored once."
            )
        self.separation_hint = separation_hint

    def new_format(self) -> SaveFormat:
        """Return the format for one save."""
        return new_format(self.backend, self.version, separation_hint=self.separation_hint)


class TorchDistLoadShardedStrategy(NativeLoadShardedStrategy):
    """Loads torch_dist: ours, torch's DCP's and Megatron-Core's."""

    backend = "torch_dist"
    versions = (1,)

    def __init__(
        self,
        cached_metadata: bool = False,  # noqa: FBT001, FBT002, ARG002 - the lineage's signature
        **options: Any,
    ) -> None:
        """Remember the choices; ``cached_metadata`` is accepted, without effect."""
        super().__init__(**options)


def register_default_torch_strategies() -> None:
    """Register the strategies of torch_dist, which are found without this, too."""
    register_default_strategy(
        StrategyAction.LOAD_SHARDED, "torch_dist", 1, TorchDistLoadShardedStrategy()
    )
    register_default_strategy(
        StrategyAction.SAVE_SHARDED, "torch_dist", 1, TorchDistSaveShardedStrategy("torch_dist", 1)
    )


def __getattr__(name: str) -> Any:
    """Import the planners when they are asked for: they load torch.distributed.checkpoint."""
    if name in ("MCoreLoadPlanner", "MCoreSavePlanner"):
        from dist_ckpt._formats.torch_dist import planners  # noqa: PLC0415 - heavy

        return getattr(planners, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
