"""Base classes of strategies, and the strategy of a backend.

Here: the names of Megatron-Core's ``dist_checkpointing.strategies.base``. Not here: strategies (one
file for each backend beside this), where they are looked up (``strategies.registry``).

Source: the API documentation of Megatron-Core 0.5 to 0.18. Unlike there, compatibility checks
reject what does not fit, and ``can_handle_sharded_objects`` is a property everywhere.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from enum import Enum
from typing import TYPE_CHECKING, Any

from dist_ckpt.errors import UnknownStrategyError

if TYPE_CHECKING:
    from pathlib import Path

    from dist_ckpt.mapping import ShardedObject, ShardedTensor
    from dist_ckpt.strategies.async_utils import AsyncRequest
    from dist_ckpt.types import ShardedStateDict, StateDict

__all__ = [
    "AsyncSaveShardedStrategy",
    "LoadCommonStrategy",
    "LoadShardedStrategy",
    "LoadStrategyBase",
    "SaveCommonStrategy",
    "SaveShardedStrategy",
    "SaveStrategyBase",
    "StrategyAction",
    "default_strategies",
    "get_default_strategy",
    "handles_objects",
    "register_default_strategy",
]

logger = logging.getLogger(__name__)


class StrategyAction(Enum):
    """What a strategy does: load or save, the common or the sharded part."""

    LOAD_COMMON = "load_common"
    LOAD_SHARDED = "load_sharded"
    SAVE_COMMON = "save_common"
    SAVE_SHARDED = "save_sharded"


def handles_objects(strategy: LoadStrategyBase | SaveStrategyBase) -> bool:
    """Return ``can_handle_sharded_objects``, also where a class overrides it as a method.

    A bound method is true, whatever it returns.
    """
    found: Any = strategy.can_handle_sharded_objects
    return bool(found() if callable(found) else found)


class LoadStrategyBase(ABC):
    """What every load strategy answers before it loads."""

    @abstractmethod
    def check_backend_compatibility(self, loaded_backend: str) -> None:
        """Raise if this strategy does not read ``loaded_backend``.

        Raises:
            CheckpointingException: It does not.
        """

    @abstractmethod
    def check_version_compatibility(self, loaded_version: int) -> None:
        """Raise if this strategy does not read ``loaded_version`` of its backend.

        Raises:
            CheckpointingException: It does not.
        """

    @property
    def can_handle_sharded_objects(self) -> bool:
        """Whether sharded objects are loaded by this strategy, not by the common one."""
        return False


class SaveStrategyBase(ABC):  # noqa: B024 - as in the seeds; its children have them
    """What every save strategy has.

    Args:
        backend: Name of the format, stored in ``metadata.json``.
        version: Its version, likewise.
    """

    def __init__(self, backend: str, version: int) -> None:
        """Remember both."""
        self.backend = backend
        self.version = version

    @property
    def can_handle_sharded_objects(self) -> bool:
        """Whether sharded objects are saved by this strategy, not by the common one."""
        return False

    def __str__(self) -> str:
        """Return class, backend and version."""
        return f"{type(self).__name__}({self.backend}, {self.version})"


class LoadCommonStrategy(LoadStrategyBase):
    """Loads the part of a checkpoint that is the same on all ranks."""

    @abstractmethod
    def load_common(self, checkpoint_dir: str | Path) -> StateDict:
        """Return the common part. Not collective."""

    @abstractmethod
    def load_sharded_objects(
        self, sharded_objects_state_dict: ShardedStateDict, checkpoint_dir: str | Path
    ) -> StateDict:
        """Return the same nesting with objects in place of the sharded objects. Not collective."""

    def load_sharded_metadata(self, checkpoint_dir: str | Path) -> dict[str, ShardedObject]:
        """Return the stored sharded objects without data, by unique key. Not collective.

        Raises:
            NotImplementedError: The strategy stores objects, and its class says nothing here.
        """
        if not handles_objects(self):
            return {}
        raise NotImplementedError(f"{type(self).__name__}.load_sharded_metadata({checkpoint_dir})")


class LoadShardedStrategy(LoadStrategyBase):
    """Loads the sharded part of a checkpoint."""

    @abstractmethod
    def load(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path) -> StateDict:
        """Return the same nesting with tensors in place of the sharded tensors. Collective.

        Args:
            sharded_state_dict: Sharded tensors (and objects, if ``can_handle_sharded_objects``)
                only; factories are built, all else is taken out.
            checkpoint_dir: The checkpoint.
        """

    @abstractmethod
    def load_tensors_metadata(self, checkpoint_dir: str | Path) -> dict[str, ShardedTensor]:
        """Return every stored tensor as an unsharded one without data, by key. Not collective."""

    def load_sharded_metadata(
        self, checkpoint_dir: str | Path
    ) -> dict[str, ShardedTensor | ShardedObject]:
        """Return stored tensors by key, and objects by unique key, without data. Not collective.

        Raises:
            NotImplementedError: The strategy stores objects, and its class says nothing here.
        """
        if not handles_objects(self):
            return dict(self.load_tensors_metadata(checkpoint_dir))
        raise NotImplementedError(f"{type(self).__name__}.load_sharded_metadata({checkpoint_dir})")

    def remove_sharded_tensors(self, checkpoint_dir: str | Path, key_prefix: str) -> None:
        """Remove all tensors whose key starts with ``key_prefix``. Call it on one rank.

        Raises:
            NotImplementedError: The class does not say how.
        """
        raise NotImplementedError(
            f"{type(self).__name__}.remove_sharded_tensors({checkpoint_dir}, {key_prefix!r})"
        )


class SaveCommonStrategy(SaveStrategyBase):
    """Saves the part of a state dict that is the same on all ranks."""

    @abstractmethod
    def save_common(self, common_state_dict: StateDict, checkpoint_dir: str | Path) -> None:
        """Save the common part. Called on rank 0."""

    def save_sharded_objects(
        self, sharded_objects_state_dict: ShardedStateDict, checkpoint_dir: str | Path
    ) -> None:
        """Save this rank's main replicas of sharded objects. Called on every rank.

        Raises:
            NotImplementedError: The class does not say how.
        """
        raise NotImplementedError(
            f"{type(self).__name__}.save_sharded_objects({checkpoint_dir}): "
            f"{len(sharded_objects_state_dict)} entries"
        )


class SaveShardedStrategy(SaveStrategyBase):
    """Saves the sharded part of a state dict."""

    @abstractmethod
    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path) -> Any:
        """Save the sharded part into an existing directory. Collective.

        Args:
            sharded_state_dict: Sharded tensors (and objects, if ``can_handle_sharded_objects``)
                only; factories are built, all else is taken out.
            checkpoint_dir: The directory; the commit marker is the caller's business.
        """


class AsyncSaveShardedStrategy(SaveShardedStrategy):
    """A save strategy whose writing can be done later."""

    @abstractmethod
    def async_save(
        self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path
    ) -> AsyncRequest:
        """Plan and copy now; return what writes and what finishes. Collective.

        The caller schedules the request, e.g. on an ``AsyncCallsQueue``.
        """

    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path) -> Any:
        """Save at once: each asynchronous strategy is a synchronous one too. Collective."""
        self.async_save(sharded_state_dict, checkpoint_dir).execute_sync()


default_strategies: dict[str, dict[tuple[str, int], Any]] = {
    action.value: {} for action in StrategyAction
}
"""What ``register_default_strategy`` was given: action -> (backend, version) -> strategy."""


def register_default_strategy(
    action: StrategyAction, backend: str, version: int, strategy: Any
) -> None:
    """Make ``strategy`` the one of its backend in this process; it stands before built-in ones.

    Args:
        action: What it does.
        backend: Its backend.
        version: Its version.
        strategy: An instance; every caller gets this one.
    """
    default_strategies[action.value][backend, version] = strategy


def get_default_strategy(action: StrategyAction, backend: str, version: int) -> Any:
    """Return the strategy of a backend: registered, built in, or of an installed entry point.

    Raises:
        UnknownStrategyError: Nobody handles it, or its package is not installed.
    """
    from dist_ckpt.strategies.registry import find_strategy  # noqa: PLC0415 - it imports this

    registered = default_strategies[action.value].get((backend, version))
    if registered is not None:
        return registered
    found = find_strategy(action.value, backend, version)
    if found is None:
        raise UnknownStrategyError(
            f"Cannot find a default strategy for: {action.value}, {backend}, {version}.",
            hint="install the package that has it, or call register_default_strategy.",
        )
    return found
