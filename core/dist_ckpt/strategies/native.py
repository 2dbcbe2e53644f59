"""Strategies of our own formats.

Here: what the strategies of torch_dist and zarr share: all they do is to choose a format and call
the steps of a save or load. Not here: the steps (``_saving.execute``, ``_loading.execute``).
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dist_ckpt._comm import default_communicator
from dist_ckpt._comm.outcome import attempt
from dist_ckpt._formats.opening import open_sharded
from dist_ckpt._formats.removal import remove_tensors
from dist_ckpt._loading.execute import LoadRequest, Source, run_load, stored_keys
from dist_ckpt._saving.execute import SaveInSteps, commit, write_part
from dist_ckpt._saving.plan import Planner
from dist_ckpt._saving.request import SaveCall, SaveRequest
from dist_ckpt.errors import UnknownStrategyError
from dist_ckpt.mapping import ShardedTensor
from dist_ckpt.options import LoadOptions, SaveOptions
from dist_ckpt.strategies.async_utils import AsyncRequest
from dist_ckpt.strategies.base import AsyncSaveShardedStrategy, LoadShardedStrategy
from dist_ckpt.validation import StrictPolicy

if TYPE_CHECKING:
    from dist_ckpt._formats.base import SaveFormat
    from dist_ckpt._saving.plan import PlannedSave
    from dist_ckpt.mapping import ShardedObject
    from dist_ckpt.types import Communicator, ShardedStateDict, StateDict

__all__ = ["NativeLoadShardedStrategy", "NativeSaveShardedStrategy"]


class NativeSaveShardedStrategy(AsyncSaveShardedStrategy):
    """Saves in a format of ours.

    Args:
        backend: The format.
        version: Its version.
        thread_count: Files that each rank writes at a time.
    """

    def __init__(self, backend: str, version: int, *, thread_count: int = 2) -> None:
        """Remember the choices; nothing is imported yet."""
        super().__init__(backend, version)
        self.thread_count = thread_count
        self.memory: Any = None  # what one save with this strategy leaves for the next

    @property
    def can_handle_sharded_objects(self) -> bool:
        """True: objects are stored as typed JSON beside the tensors."""
        return True

    @abstractmethod
    def new_format(self) -> SaveFormat:
        """Return the format for one save."""

    def async_save(
        self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path
    ) -> AsyncRequest:
        """Plan and copy now; the request writes, and its last function finishes. Collective."""
        save = SaveInSteps(*self._planned(sharded_state_dict, checkpoint_dir))
        save.stage()
        return AsyncRequest(save.write, (), [save.commit])

    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path) -> None:
        """Save the sharded part into an existing directory, without a copy. Collective."""
        comm, planned = self._planned(sharded_state_dict, checkpoint_dir)
        commit(comm, planned, attempt(write_part, planned))

    def _planned(
        self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path
    ) -> tuple[Communicator, PlannedSave]:
        call = SaveCall(
            build=lambda: SaveRequest(state_dict=sharded_state_dict, format=self.new_format()),
            target=Path(checkpoint_dir),
            comm=default_communicator(),
            options=SaveOptions(thread_count=self.thread_count),
            check_coverage=False,
            shards_only=True,
        )
        return call.comm, Planner(remembers=False).plan(call)


class NativeLoadShardedStrategy(LoadShardedStrategy):
    """Loads a format of ours, and what other libraries wrote in it.

    Args:
        thread_count: Reads at a time on each rank.
        allow_pickle: Whether pickled objects may be loaded, see ``LoadOptions``.
        cast: What to do if stored and requested dtype differ, see ``LoadOptions``.
    """

    backend: str
    versions: tuple[int, ...]

    def __init__(
        self,
        *,
        thread_count: int = 2,
        allow_pickle: bool = False,
        cast: Literal["allow", "error"] = "allow",
    ) -> None:
        """Remember the choices."""
        self.thread_count = thread_count
        self._options = LoadOptions(thread_count=thread_count, allow_pickle=allow_pickle, cast=cast)

    def bound(self, source: Source) -> Source:
        """Return ``source`` with the choices of this strategy, also for other readers."""
        return replace(
            source,
            thread_count=self.thread_count,
            allow_pickle=self._options.allow_pickle,
            refuses_casts=self._options.cast == "error",
        )

    @property
    def can_handle_sharded_objects(self) -> bool:
        """True: objects lie beside the tensors."""
        return True

    def check_backend_compatibility(self, loaded_backend: str) -> None:
        """Raise if the checkpoint is of another backend.

        Raises:
            UnknownStrategyError: It is.
        """
        if loaded_backend != self.backend:
            raise UnknownStrategyError(
                f"{type(self).__name__} reads {self.backend!r}, not {loaded_backend!r}.",
                hint="leave the strategy out: the checkpoint says which one it needs.",
            )

    def check_version_compatibility(self, loaded_version: int) -> None:
        """Raise if the checkpoint is of a version that this strategy does not read.

        Raises:
            UnknownStrategyError: It is.
        """
        if loaded_version not in self.versions:
            raise UnknownStrategyError(
                f"{type(self).__name__} reads versions {self.versions} of {self.backend!r}, not "
                f"{loaded_version!r}.",
                hint="upgrade dist-ckpt.",
            )

    def load(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path) -> StateDict:
        """Return the same nesting with tensors and objects in place of the leaves. Collective.

        Raises:
            MismatchError: A key is not stored, or its shape or dtype differs.
        """
        comm = default_communicator()
        directory = Path(checkpoint_dir)
        contents = comm.broadcast(f"opening {directory}", lambda: open_sharded(directory))
        result = run_load(
            lambda: LoadRequest(state_dict=sharded_state_dict),
            contents,
            comm,
            self._options,
            StrictPolicy(reaction="raise", check_missing=False),
            check_coverage=False,
            common={},
        )
        return result.state_dict

    def load_tensors_metadata(self, checkpoint_dir: str | Path) -> dict[str, ShardedTensor]:
        """Return every stored tensor as an unsharded one without data, by key. Not collective."""
        found = self.load_sharded_metadata(checkpoint_dir)
        return {key: one for key, one in found.items() if isinstance(one, ShardedTensor)}

    def load_sharded_metadata(
        self, checkpoint_dir: str | Path
    ) -> dict[str, ShardedTensor | ShardedObject]:
        """Return tensors by key and objects by unique key, without data. Not collective."""
        return stored_keys(open_sharded(Path(checkpoint_dir)))

    def remove_sharded_tensors(self, checkpoint_dir: str | Path, key_prefix: str) -> None:
        """Remove all tensors whose key starts with ``key_prefix``. Call it on one rank.

        The checkpoint is replaced in one step by one without them; a file that also holds other
        tensors stays whole.
        """
        remove_tensors(Path(checkpoint_dir), key_prefix)
