"""Which strategy an argument of ``save`` or ``load`` means.

Here: None, a tuple or an object -> what the steps of a save and of a load work with. Not here:
those steps. Called inside of exchanges, so that a missing package on one rank is told to all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dist_ckpt._formats.native import new_format
from dist_ckpt._loading.execute import Source
from dist_ckpt._saving.request import CommonWriter, SaveRequest
from dist_ckpt.errors import ConfigError, UnknownStrategyError
from dist_ckpt.strategies.base import (
    LoadCommonStrategy,
    LoadShardedStrategy,
    SaveCommonStrategy,
    SaveShardedStrategy,
    StrategyAction,
    get_default_strategy,
)
from dist_ckpt.strategies.common import (
    JsonCommonLoadStrategy,
    JsonCommonSaveStrategy,
    TorchCommonLoadStrategy,
    TorchCommonSaveStrategy,
)
from dist_ckpt.strategies.generic import StrategyFormat, strategy_source
from dist_ckpt.strategies.native import NativeLoadShardedStrategy, NativeSaveShardedStrategy

if TYPE_CHECKING:
    from dist_ckpt._formats.documents import CheckpointContents
    from dist_ckpt.options import LoadOptions, SaveOptions
    from dist_ckpt.types import ShardedStateDict

__all__ = ["chosen_common", "chosen_save", "chosen_source", "resolved"]

_OWN_COMMON = ("json", 1)
_TORCH_COMMON = ("torch", 1)


def resolved(action: StrategyAction, strategy: Any, base: type) -> Any:
    """Return the strategy that an argument means; None stays None.

    Raises:
        UnknownStrategyError: Nobody handles the backend.
        ConfigError: The argument is neither a tuple nor a strategy.
    """
    if isinstance(strategy, tuple) and [type(one) for one in strategy] == [str, int]:
        found = get_default_strategy(action, *strategy)
        if not isinstance(found, base):
            raise ConfigError(
                f"the strategy for {action.value}, {strategy[0]}, {strategy[1]} is {found!r}, not "
                f"a {base.__name__}."
            )
        return found
    if strategy is None or isinstance(strategy, base):
        return strategy
    raise ConfigError(
        f"a strategy is a {base.__name__}, a (backend, version) tuple or None, not {strategy!r}."
    )


def chosen_save(
    sharded: Any, common: Any, options: SaveOptions, state_dict: ShardedStateDict
) -> SaveRequest:
    """Return what is asked of a save: the format, and how the common part is stored."""
    strategy = resolved(StrategyAction.SAVE_SHARDED, sharded, SaveShardedStrategy)
    other = resolved(StrategyAction.SAVE_COMMON, common, SaveCommonStrategy)
    if strategy is None or isinstance(strategy, NativeSaveShardedStrategy):
        fmt = new_format(*options.format) if strategy is None else strategy.new_format()
        own = other is None or isinstance(other, JsonCommonSaveStrategy)
        # zarr v2 has Megatron-Core's common part beside ours as it is.
        own |= fmt.common_backend == _TORCH_COMMON and isinstance(other, TorchCommonSaveStrategy)
        return SaveRequest(
            state_dict=state_dict,
            format=fmt,
            common=None if own else _writer(other),
            # A tuple says nothing of threads: the options do.
            thread_count=getattr(sharded, "thread_count", None),
        )
    other = other or JsonCommonSaveStrategy()
    fmt = StrategyFormat(strategy, other)
    return SaveRequest(state_dict=state_dict, format=fmt, common=_writer(other))


def _writer(strategy: SaveCommonStrategy) -> CommonWriter:
    return CommonWriter(strategy.backend, strategy.version, strategy.save_common)


def chosen_source(
    sharded: Any, common: Any, contents: CheckpointContents, options: LoadOptions
) -> Source:
    """Return what reads a checkpoint.

    Raises:
        UnknownStrategyError: A strategy is not known, or does not read this checkpoint's format.
    """
    strategy = resolved(StrategyAction.LOAD_SHARDED, sharded, LoadShardedStrategy)
    if strategy is None and not contents.is_indexed:
        strategy = get_default_strategy(StrategyAction.LOAD_SHARDED, *contents.backend)
    if strategy is not None:
        backend, version = contents.backend
        strategy.check_backend_compatibility(backend)
        strategy.check_version_compatibility(version)
    if isinstance(sharded, tuple) and sharded != contents.backend:
        raise UnknownStrategyError(
            f"{contents.directory} is stored as {contents.backend}, not as {sharded}.",
            hint="leave the strategy out: the checkpoint says which one it needs.",
        )
    other = chosen_common(common, contents, options)
    if strategy is None or (
        isinstance(strategy, NativeLoadShardedStrategy) and contents.is_indexed
    ):
        source = strategy_source(None, other, contents.directory)
        # A tuple says nothing of how to read: the options do.
        return source if strategy is not sharded or strategy is None else strategy.bound(source)
    return strategy_source(strategy, other, contents.directory)


def chosen_common(
    common: Any, contents: CheckpointContents, options: LoadOptions
) -> LoadCommonStrategy | None:
    """Return the strategy of the common part; None if it is stored our own way.

    Raises:
        UnknownStrategyError: Nobody handles it, or the given strategy does not.
    """
    backend, version = contents.common_backend
    own = contents.common_backend in (_OWN_COMMON, _TORCH_COMMON)
    # The tuple of what is stored means the same as None: the options hold for it.
    common = None if own and common == contents.common_backend else common
    given: LoadCommonStrategy | None = resolved(
        StrategyAction.LOAD_COMMON, common, LoadCommonStrategy
    )
    if contents.common is not None and (given is None or isinstance(given, JsonCommonLoadStrategy)):
        return None
    if given is not None:
        given.check_backend_compatibility(backend)
        given.check_version_compatibility(version)
    is_foreign = contents.is_indexed and not contents.checkpoint_id
    if is_foreign and (given is None or isinstance(given, TorchCommonLoadStrategy)):
        return None
    if given is not None:
        return given
    if contents.common_backend == _OWN_COMMON:
        return JsonCommonLoadStrategy(allow_pickle=options.allow_pickle)
    if contents.common_backend == _TORCH_COMMON:
        return TorchCommonLoadStrategy(allow_pickle=options.allow_pickle)
    found: LoadCommonStrategy = get_default_strategy(StrategyAction.LOAD_COMMON, backend, version)
    return found
