"""Wrappers that share out the saving and loading of replicas among the ranks that hold them.

Here: the two wrappers and the distribution they keep. Not here: who gets what and how tensors move
(``exchange_utils``). Both are collective over all ranks of the job, as the wrapped strategy is;
each rank passes the group within which its shards are replicated.

Source of the names: the API documentation of Megatron-Core 0.7 to 0.20. Unlike there, the caller's
shards are not changed, and a kept distribution is used only while every rank's shards are those for
which it was made.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from dist_ckpt._comm import default_communicator, group_communicator
from dist_ckpt._comm.outcome import agree, attempt
from dist_ckpt._comm.tensors import can_be_filled, exchange_tensors
from dist_ckpt._staging_pool.memory import cast, copy_cast
from dist_ckpt.dict_utils import dict_list_map_outplace, nested_values
from dist_ckpt.errors import ConfigError, MismatchError
from dist_ckpt.exchange_utils import (
    ShardDistribution,
    ShardId,
    agree_on_cached,
    determine_main_replica_uniform_distribution,
    shard_facts,
    shard_id,
)
from dist_ckpt.mapping import ShardedBase, ShardedObject, ShardedTensor
from dist_ckpt.strategies.base import (
    AsyncSaveShardedStrategy,
    LoadShardedStrategy,
    handles_objects,
)
from dist_ckpt.validation import shortened

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import torch
    from torch.distributed import ProcessGroup

    from dist_ckpt.strategies.async_utils import AsyncRequest
    from dist_ckpt.strategies.base import SaveShardedStrategy
    from dist_ckpt.types import ShardedStateDict, StateDict

__all__ = [
    "DistributionCache",
    "FullyParallelLoadStrategyWrapper",
    "FullyParallelSaveStrategyWrapper",
    "distribute_main_replicas_with_precomputed_distribution",
    "load_and_exchange",
]


_KEPT_DISTRIBUTIONS = 8
"""Model and optimizer may be saved in turn; more than a few kinds of state are not expected."""


class FullyParallelSaveStrategyWrapper(AsyncSaveShardedStrategy):
    """Saves with another strategy, of which each rank of a group gets about as many bytes to write.

    Only descriptions are exchanged: of the replicas of a shard, another one becomes the main one.
    Sharded objects stay with their main replicas; they are stored once as they are.

    Args:
        strategy: Saves main replicas only.
        parallelization_group: Ranks that hold the same shards; None is the default group.
        do_cache_distribution: Whether to keep the distribution for the next save. It is made anew
            on all ranks as soon as the shards of one of them have changed.
    """

    def __init__(
        self,
        strategy: SaveShardedStrategy,
        parallelization_group: ProcessGroup | None = None,
        do_cache_distribution: bool = False,  # noqa: FBT001, FBT002 - signature of Megatron-Core
    ) -> None:
        """Take backend and version from the strategy."""
        super().__init__(strategy.backend, strategy.version)
        self.base_strategy = strategy
        self.parallelization_group = parallelization_group
        self.do_cache_distribution = do_cache_distribution
        self._cache = DistributionCache(enabled=do_cache_distribution)

    @property
    def can_handle_sharded_objects(self) -> bool:
        """Whether the wrapped strategy saves sharded objects."""
        return handles_objects(self.base_strategy)

    @property
    def cached_distribution(self) -> ShardDistribution | None:
        """The distribution of the last save, if it is kept."""
        return self._cache.distribution

    def async_save(
        self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path
    ) -> AsyncRequest:
        """Share out, then let the wrapped strategy plan and copy. Collective.

        Raises:
            ConfigError: The wrapped strategy cannot save asynchronously.
        """
        if not isinstance(self.base_strategy, AsyncSaveShardedStrategy):
            raise ConfigError(
                f"Cannot apply async_save to non-async base strategy {self.base_strategy}.",
                hint="use save, or wrap an AsyncSaveShardedStrategy.",
            )
        shared = self.apply_saving_parallelization(sharded_state_dict)
        return self.base_strategy.async_save(shared, checkpoint_dir)

    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path) -> Any:
        """Share out, then let the wrapped strategy save. Collective."""
        shared = self.apply_saving_parallelization(sharded_state_dict)
        return self.base_strategy.save(shared, checkpoint_dir)

    def apply_saving_parallelization(
        self, sharded_state_dict: ShardedStateDict
    ) -> ShardedStateDict:
        """Return the same nesting with other replica ids; the argument is not changed. Collective.

        Raises:
            InvalidShardingError: Ranks of the group disagree on a shard; on every rank of the job.
        """
        group = self.parallelization_group
        distribution = self._cache.distribution_of(sharded_state_dict, group, ignore_groups=False)
        return distribute_main_replicas_with_precomputed_distribution(
            sharded_state_dict, group, distribution
        )


def distribute_main_replicas_with_precomputed_distribution(
    sharded_state_dict: ShardedStateDict,
    parallelization_group: ProcessGroup | None,
    precomputed_distribution: ShardDistribution | None,
) -> ShardedStateDict:
    """Return a state dict in which the ranks of a distribution have the main replicas.

    Not collective. Shards that belong to another group, objects, and replicas that may differ
    (``writer="first"``) stay as they are. Unlike in Megatron-Core, the argument is not changed.

    Args:
        sharded_state_dict: This rank's shards.
        parallelization_group: The group; None is the default one.
        precomputed_distribution: None changes nothing.
    """
    if precomputed_distribution is None:
        return sharded_state_dict
    rank = group_communicator(parallelization_group).rank
    given: set[ShardId] = set()

    def shared(leaf: Any) -> Any:
        if not isinstance(leaf, ShardedTensor) or leaf.writer == "first":
            return leaf
        shard = shard_id(leaf)
        main = precomputed_distribution.main_rank_for_shard.get(shard)
        if main is None:
            return leaf
        # A shard that stands in the dict twice is still saved once.
        is_main = main == rank and shard not in given
        given.add(shard)
        return replace(leaf, replica_id=0 if is_main else 1)

    found: ShardedStateDict = dict_list_map_outplace(shared, sharded_state_dict)
    return found


class FullyParallelLoadStrategyWrapper(LoadShardedStrategy):
    """Loads with another strategy, each byte once in a group; ranks then hand on what they read.

    Sharded objects are small and are read by each rank for itself: what comes from a checkpoint
    need not be picklable.

    Args:
        strategy: Loads what a rank is given to read.
        parallelization_group: Ranks that want the same shards; None is the default group.
        do_cache_distribution: Whether to keep the distribution for the next load, as for saves.
        exchange_algo: ``broadcast``, ``gather_rounds`` or ``gather_object``.
    """

    def __init__(
        self,
        strategy: LoadShardedStrategy,
        parallelization_group: ProcessGroup | None = None,
        do_cache_distribution: bool = False,  # noqa: FBT001, FBT002 - signature of Megatron-Core
        exchange_algo: str = "broadcast",
    ) -> None:
        """Remember the choices."""
        self.base_strategy = strategy
        self.parallelization_group = parallelization_group
        self.do_cache_distribution = do_cache_distribution
        self.exchange_algo = exchange_algo
        self._cache = DistributionCache(enabled=do_cache_distribution)

    @property
    def can_handle_sharded_objects(self) -> bool:
        """Whether the wrapped strategy loads sharded objects."""
        return handles_objects(self.base_strategy)

    @property
    def cached_distribution(self) -> ShardDistribution | None:
        """The distribution of the last load, if it is kept."""
        return self._cache.distribution

    def load(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path) -> StateDict:
        """Return the same nesting with tensors and objects in place of the leaves. Collective.

        Data of a sharded tensor is filled in place; where there is none, a CPU tensor is made.

        Raises:
            NotImplementedError: The exchange algorithm is unknown.
            MismatchError: The wrapped strategy did not load what it was asked for.
            CheckpointingException: What the wrapped strategy raises, and failures of other ranks.
        """
        return load_and_exchange(
            lambda: self.base_strategy,
            sharded_state_dict,
            checkpoint_dir,
            self.parallelization_group,
            cache=self._cache,
            exchange_algo=self.exchange_algo,
        )

    def load_tensors_metadata(self, checkpoint_dir: str | Path) -> dict[str, ShardedTensor]:
        """Return what the wrapped strategy finds. Not collective."""
        return self.base_strategy.load_tensors_metadata(checkpoint_dir)

    def load_sharded_metadata(
        self, checkpoint_dir: str | Path
    ) -> dict[str, ShardedTensor | ShardedObject]:
        """Return what the wrapped strategy finds. Not collective."""
        return self.base_strategy.load_sharded_metadata(checkpoint_dir)

    def remove_sharded_tensors(self, checkpoint_dir: str | Path, key_prefix: str) -> None:
        """Let the wrapped strategy remove them. Call it on one rank."""
        self.base_strategy.remove_sharded_tensors(checkpoint_dir, key_prefix)

    def check_backend_compatibility(self, loaded_backend: str) -> None:
        """Ask the wrapped strategy."""
        self.base_strategy.check_backend_compatibility(loaded_backend)

    def check_version_compatibility(self, loaded_version: int) -> None:
        """Ask the wrapped strategy."""
        self.base_strategy.check_version_compatibility(loaded_version)


def load_and_exchange(
    find_strategy: Callable[[], LoadShardedStrategy],
    sharded_state_dict: ShardedStateDict,
    checkpoint_dir: str | Path,
    group: ProcessGroup | None,
    *,
    cache: DistributionCache,
    exchange_algo: str,
    on_host: bool = False,
) -> StateDict:
    """Read this rank's share with a strategy and get the rest from the group. Collective.

    ``find_strategy`` is called where its error can be told to all ranks.
    """
    leaves = [x for x in nested_values(sharded_state_dict) if isinstance(x, ShardedBase)]
    shards: dict[ShardId, ShardedTensor] = {}
    own: list[ShardedBase] = []  # what this rank reads for itself
    for leaf in leaves:
        if not isinstance(leaf, ShardedTensor):
            own.append(leaf)
        elif shard_facts(shards.setdefault(shard_id(leaf), leaf)) != shard_facts(leaf):
            own.append(leaf)  # wanted here in two shapes or dtypes
    shared: ShardedStateDict = {str(number): leaf for number, leaf in enumerate(shards.values())}
    distribution = cache.distribution_of(shared, group, ignore_groups=True)
    rank = group_communicator(group).rank
    mine: dict[ShardId, ShardedTensor] = {}
    theirs: dict[ShardId, ShardedTensor] = {}
    for shard, leaf in shards.items():
        is_mine = distribution is None or distribution.main_rank_for_shard[shard] == rank
        (mine if is_mine else theirs)[shard] = leaf
    tensors, values = _read(find_strategy, mine, own, checkpoint_dir)
    found = exchange_tensors(
        tensors,
        theirs,
        {} if distribution is None else distribution.main_rank_for_shard,
        group,
        exchange_algo=exchange_algo,
        on_host=on_host,
    )

    def value(leaf: Any) -> Any:
        if id(leaf) in values:
            given = values[id(leaf)]
            if not isinstance(leaf, ShardedTensor):
                return given
            return _placed(cast(given, leaf.dtype), leaf)
        if not isinstance(leaf, ShardedTensor):
            return leaf
        shard = shard_id(leaf)
        placed = _placed(found[shard], leaf)
        # Two places without memory of their own must not share what was read for the first.
        is_shared = placed is found[shard] and leaf is not shards[shard]
        return placed.clone() if is_shared and leaf.data is not placed else placed

    loaded: StateDict = dict_list_map_outplace(value, sharded_state_dict)
    return loaded


def _read(
    find_strategy: Callable[[], LoadShardedStrategy],
    tensors: dict[ShardId, ShardedTensor],
    own: list[ShardedBase],
    checkpoint_dir: str | Path,
) -> tuple[dict[ShardId, torch.Tensor], dict[int, Any]]:
    """Read with a strategy. Collective over all ranks, if only to report errors.

    Returns:
        The tensors by shard, and what was read of ``own`` by id.
    """
    # The strategy sees a main replica in all that this rank reads, whatever it is in training.
    leaves: dict[str, Any] = {f"t{i}": leaf for i, leaf in enumerate(tensors.values())}
    leaves |= {f"o{i}": leaf for i, leaf in enumerate(own)}
    request: ShardedStateDict = {k: replace(leaf, replica_id=0) for k, leaf in leaves.items()}
    loaded: StateDict = {}
    who = ""
    error: BaseException | None = None
    read: dict[ShardId, torch.Tensor] = {}
    try:
        # Outside of our exchange: the strategy may have exchanges of its own.
        strategy = find_strategy()
        who = type(strategy).__name__
        loaded = strategy.load(request, checkpoint_dir)
    except BaseException as raised:  # noqa: BLE001 - told to all ranks below, interrupts too
        error = raised

    def verdict() -> None:
        if error is not None:
            raise error
        lacking = sorted({leaf.key for name, leaf in request.items() if name not in loaded})
        if lacking:
            raise MismatchError(
                "Missing shards after fully parallel loading: "
                f"{who} did not return {shortened(lacking)}."
            )

        for i, (shard, leaf) in enumerate(tensors.items()):
            # A user's strategy may return the stored dtype, not the requested one.
            read[shard] = cast(loaded[f"t{i}"], leaf.dtype)

    agree(default_communicator(), f"reading {checkpoint_dir}", attempt(verdict))
    return read, {id(leaf): loaded[f"o{i}"] for i, leaf in enumerate(own)}


def _placed(tensor: torch.Tensor, leaf: ShardedTensor) -> torch.Tensor:
    """Return the shard's own tensor with the loaded values, or the loaded one if there is none."""
    data = leaf.data
    if data is None or data is tensor or not can_be_filled(data):
        return tensor
    if data.shape != tensor.shape:
        return tensor  # a strategy that gives what is stored, not what was asked for
    copy_cast(data.detach(), tensor)
    return data


class DistributionCache:
    """Distributions of the last calls, by what this rank's shards were then."""

    def __init__(self, *, enabled: bool) -> None:
        """Keep nothing yet."""
        self._enabled = enabled
        self._kept: dict[str, ShardDistribution | None] = {}
        self.distribution: ShardDistribution | None = None

    def distribution_of(
        self,
        sharded_state_dict: ShardedStateDict,
        group: ProcessGroup | None,
        *,
        ignore_groups: bool,
    ) -> ShardDistribution | None:
        """Return the kept distribution if all ranks may use it, else a new one. Collective.

        Whatever fails in one group is raised on all ranks of the job: the others would go on to
        the wrapped strategy and wait there.
        """

        def find() -> ShardDistribution | None:
            if not self._enabled:
                return determine_main_replica_uniform_distribution(
                    sharded_state_dict, group, ignore_groups
                )
            fingerprint = _fingerprint(sharded_state_dict, group)
            found = self._kept.pop(fingerprint, None)
            if not agree_on_cached(found, group):
                found = determine_main_replica_uniform_distribution(
                    sharded_state_dict, group, ignore_groups
                )
            self._kept[fingerprint] = self.distribution = found
            for oldest in list(self._kept)[:-_KEPT_DISTRIBUTIONS]:
                del self._kept[oldest]
            return found

        return _on_all_ranks("sharing out shards", find, group)


def _on_all_ranks(
    phase: str, find: Callable[[], ShardDistribution | None], group: ProcessGroup | None
) -> ShardDistribution | None:
    world = default_communicator()
    if group is None or (world.size > 1 and dist.get_world_size(group) == world.size):
        return find()
    return agree(world, f"{phase} in every group", attempt(find))


def _fingerprint(sharded_state_dict: ShardedStateDict, group: ProcessGroup | None) -> str:
    """Return what this rank's shards and group are, in a few bytes."""
    shards = sorted(
        repr(leaf.without_data()) + str(leaf.data is None)
        for leaf in nested_values(sharded_state_dict)
        if isinstance(leaf, ShardedBase)
    )
    ranks = None if group is None else dist.get_process_group_ranks(group)
    return hashlib.sha256(repr((ranks, shards)).encode()).hexdigest()
