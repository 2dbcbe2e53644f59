"""Which rank of a group keeps which shard, and handing shards from rank to rank.

Here: ``ShardDistribution``, the greedy assignment behind it, and the exchange that follows it. Not
here: how tensors move (``_comm.tensors``), who saves or loads (``strategies.fully_parallel``,
``tensor_aware_state_dict``), the planning of our own saves (``_sharding.assign``).

Source of the names and of the order of the assignment: the API documentation of Megatron-Core 0.12
to 0.20.
"""

from __future__ import annotations

import copy
import hashlib
import logging
import math
from collections import defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from dist_ckpt._comm import group_communicator
from dist_ckpt._comm.tensors import (
    EXCHANGE_ALGOS,
    ShardId,
    exchange_tensors,
    group_text,
    sort_key,
)
from dist_ckpt._sharding.shard_info import dtype_name
from dist_ckpt.dict_utils import nested_values
from dist_ckpt.errors import InvalidShardingError
from dist_ckpt.mapping import ShardedObject, ShardedTensor, is_main_replica
from dist_ckpt.validation import shortened

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    import torch
    from torch.distributed import ProcessGroup

    from dist_ckpt.types import ShardedStateDict

__all__ = [
    "EXCHANGE_ALGOS",
    "ShardDistribution",
    "ShardId",
    "ShardView",
    "agree_on_cached",
    "build_distribution",
    "describe_shards",
    "describes_rank",
    "determine_main_replica_uniform_distribution",
    "distribute_shards_to_ranks",
    "exchange_by_distribution",
    "shard_facts",
    "shard_id",
    "without_data",
]

logger = logging.getLogger(__name__)

_OBJECT_NBYTES = 1
"""What an object counts for in the balance: its size is not known before it is pickled."""


Leaf = TypeVar("Leaf", bound=ShardedTensor | ShardedObject)


class ShardDistribution(NamedTuple):
    """Who keeps which shard of a group's ranks. Ranks are those within the group.

    Attributes:
        main_rank_for_shard: The one rank that saves, reads or keeps a shard.
        shards_in_this_group: Shards that this group is responsible for.
        shard_to_metadata: Each shard without data.
        all_ranks_for_shard: Every rank that holds or wants a shard, ascending.
    """

    main_rank_for_shard: dict[ShardId, int]
    shards_in_this_group: set[ShardId]
    shard_to_metadata: dict[ShardId, ShardedTensor | ShardedObject]
    all_ranks_for_shard: dict[ShardId, list[int]]


class ShardView(NamedTuple):
    """What a rank tells of one shard: it without data, and whether there is data."""

    shard: ShardedTensor | ShardedObject
    has_data: bool


def shard_id(shard: ShardedTensor | ShardedObject) -> ShardId:
    """Return what tells this shard from all others, on any rank; replicas have the same.

    A shard without elements has the range ``(0, 0)``: with uneven cuts it may begin where another
    rank's shard does.
    """
    if isinstance(shard, ShardedObject):
        return shard.key, shard.global_offset, ("object", *shard.global_shape)
    if not math.prod(shard.data_shape):
        return shard.key, shard.global_offset, (0, 0)
    part = shard.flattened_range
    return shard.key, shard.global_offset, None if part is None else (part.start, part.stop)


def distribute_shards_to_ranks(
    shard_to_ranks: Mapping[ShardId, Sequence[int]],
    shard_to_size: Mapping[ShardId, int],
    num_ranks: int,
    cross_parallelization_group_loads: Collection[ShardId] = (),
) -> dict[ShardId, int]:
    """Give each shard to one of the ranks that hold it, so that all get about as many bytes. Pure.

    Greedy: shards that belong to other groups last, then those with the fewest holders first, large
    ones first; each goes to the holder with the least so far, the lowest of them. Nothing depends
    on the order of the arguments. If all ranks hold all shards, no two ranks differ by more than
    the largest shard.

    Args:
        shard_to_ranks: The ranks that hold each shard, at least one.
        shard_to_size: Bytes of each shard.
        num_ranks: Number of ranks.
        cross_parallelization_group_loads: Shards that another group is responsible for.
    """

    def order(shard: ShardId) -> tuple[Any, ...]:
        foreign = shard in cross_parallelization_group_loads
        return foreign, len(shard_to_ranks[shard]), -shard_to_size[shard], sort_key(shard)

    load = [0] * num_ranks
    main_ranks = {}
    for shard in sorted(shard_to_ranks, key=order):
        main_ranks[shard] = min(shard_to_ranks[shard], key=lambda rank: (load[rank], rank))
        load[main_ranks[shard]] += shard_to_size[shard]
    return main_ranks


def without_data(shard: Leaf) -> Leaf:
    """Return a copy without data; it was checked when it was made and is not checked again."""
    new = copy.copy(shard)
    new.data = None
    return new


def describe_shards(sharded_state_dict: ShardedStateDict) -> list[ShardView]:
    """Return this rank's tensors and objects without data, each shard once.

    Raises:
        InvalidShardingError: A shard stands there twice, with two shapes or dtypes: one would be
            taken for the other.
    """
    views: dict[ShardId, ShardView] = {}
    problems = []
    for leaf in nested_values(sharded_state_dict):
        if isinstance(leaf, ShardedTensor | ShardedObject):
            view = ShardView(without_data(leaf), leaf.data is not None)
            first = views.setdefault(shard_id(leaf), view).shard
            if _nbytes(first) and shard_facts(first) != shard_facts(leaf):
                problems.append(
                    f"{leaf.key!r} at {leaf.global_offset} is {shard_facts(first)} and "
                    f"{shard_facts(leaf)} on one rank"
                )
    if problems:
        raise InvalidShardingError(f"replicas of a shard must be alike: {shortened(problems)}.")
    return list(views.values())


def build_distribution(
    views: Sequence[Sequence[ShardView]], *, ignore_groups: bool
) -> ShardDistribution:
    """Return the distribution of the shards that all ranks of a group described. Pure.

    Args:
        views: Each rank's shards, in rank order.
        ignore_groups: Whether shards without a main replica in this group are distributed too.

    Raises:
        InvalidShardingError: Ranks disagree on shape or dtype of a shard; with every such shard.
    """
    held: dict[ShardId, list[tuple[int, ShardView]]] = defaultdict(list)
    for rank, view in enumerate(views):
        for one in view:
            held[shard_id(one.shard)].append((rank, one))
    ordered = sorted(held.items(), key=_held_order)
    problems = [text for _, holders in ordered if (text := _disagreement(holders))]
    if problems:
        raise InvalidShardingError(f"replicas of a shard must be alike: {shortened(problems)}.")
    mains = {
        shard
        for shard, holders in held.items()
        if any(is_main_replica(one.shard.replica_id) for _, one in holders)
    }
    ours = set(held) if ignore_groups else mains
    main_ranks = distribute_shards_to_ranks(
        {shard: _candidates(held[shard], saving=not ignore_groups) for shard in ours},
        {shard: _nbytes(held[shard][0][1].shard) for shard in ours},
        len(views),
        ours - mains,
    )
    return ShardDistribution(
        main_ranks,
        ours,
        {shard: holders[0][1].shard for shard, holders in held.items()},
        {shard: [rank for rank, _ in holders] for shard, holders in held.items()},
    )


def _held_order(item: tuple[ShardId, Any]) -> tuple[str, tuple[int, ...], str]:
    return sort_key(item[0])


def _disagreement(holders: list[tuple[int, ShardView]]) -> str | None:
    rank, (first, _) = holders[0]
    if not _nbytes(first):
        return None
    facts = shard_facts(first)
    for other_rank, (other, _) in holders[1:]:
        if shard_facts(other) != facts:
            return (
                f"{first.key!r} at {first.global_offset} is {facts} on rank {rank} of the group "
                f"and {shard_facts(other)} on rank {other_rank}"
            )
    return None


def shard_facts(shard: ShardedTensor | ShardedObject) -> tuple[Any, ...]:
    """Return what replicas of a shard must have in common."""
    if isinstance(shard, ShardedObject):
        return ("object", shard.global_shape)
    return (dtype_name(shard.dtype), shard.local_shape, shard.global_shape)


def _nbytes(shard: ShardedTensor | ShardedObject) -> int:
    if isinstance(shard, ShardedObject):
        return _OBJECT_NBYTES
    return math.prod(shard.data_shape) * shard.dtype.itemsize


def _candidates(holders: list[tuple[int, ShardView]], *, saving: bool) -> list[int]:
    with_data = [(rank, one) for rank, one in holders if one.has_data or not saving]
    ranks = [rank for rank, _ in with_data or holders]
    first = any(isinstance(s, ShardedTensor) and s.writer == "first" for _, (s, _) in holders)
    # Replicas that may differ are not interchangeable: the lowest rank's is the one that counts.
    return ranks[:1] if first else ranks


def determine_main_replica_uniform_distribution(
    sharded_state_dict: ShardedStateDict,
    parallelization_group: ProcessGroup | None,
    ignore_groups: bool = False,  # noqa: FBT001, FBT002 - signature of Megatron-Core
) -> ShardDistribution | None:
    """Decide which rank of a group saves, reads or keeps which shard. Collective over the group.

    Args:
        sharded_state_dict: Sharded tensors and objects; other leaves are not looked at.
        parallelization_group: The group; None is the default one.
        ignore_groups: False to save: only shards with a main replica in this group count, and only
            ranks with data. True to load: every shard that some rank of the group has.

    Returns:
        The distribution, the same on all ranks; None if the group has one rank.

    Raises:
        InvalidShardingError: Ranks disagree on shape or dtype of a shard.
        CoordinationError: This process is not in the group, or ranks failed or vanished.
    """
    comm = group_communicator(parallelization_group)
    if comm.size == 1:
        return None
    return comm.map_reduce(
        f"sharing out shards in {group_text(parallelization_group)}",
        lambda: describe_shards(sharded_state_dict),
        lambda views: build_distribution(views, ignore_groups=ignore_groups),
    )


def describes_rank(
    distribution: ShardDistribution, sharded_state_dict: ShardedStateDict, *, rank: int, size: int
) -> bool:
    """Return whether a distribution has just these shards for a rank of a group. Not collective."""
    holders = distribution.all_ranks_for_shard
    if not holders or any(ranks[-1] >= size for ranks in holders.values()):
        return False
    mine = {shard_id(shard): shard_facts(shard) for shard, _ in describe_shards(sharded_state_dict)}
    known = distribution.shard_to_metadata
    return {shard for shard, ranks in holders.items() if rank in ranks} == set(mine) and all(
        0 in facts[1] or shard_facts(known[shard]) == facts for shard, facts in mine.items()
    )


def agree_on_cached(
    cached: ShardDistribution | None, parallelization_group: ProcessGroup | None
) -> bool:
    """Return whether all ranks may use the distribution they kept. Collective over the group.

    Args:
        cached: This rank's, or None if it has none or its state dict has changed. One such rank, or
            two that kept different ones, is enough: nobody may use it.
        parallelization_group: The group; None is the default one.
    """
    return group_communicator(parallelization_group).map_reduce(
        f"comparing cached distributions in {group_text(parallelization_group)}",
        lambda: None if cached is None else _digest(cached),
        lambda digests: None not in digests and len(set(digests)) == 1,
    )


def _digest(distribution: ShardDistribution) -> str:
    known = distribution.shard_to_metadata
    # Facts too: each rank's shards fit its own, and are alike only if the distributions are.
    items = [
        (shard, distribution.main_rank_for_shard.get(shard), ranks, shard_facts(known[shard]))
        for shard, ranks in sorted(distribution.all_ranks_for_shard.items(), key=_held_order)
    ]
    return hashlib.sha256(repr(items).encode()).hexdigest()


def exchange_by_distribution(
    loaded_tensors: Mapping[ShardId, torch.Tensor],
    unloaded_shards: Mapping[ShardId, ShardedTensor],
    shard_distribution: ShardDistribution | None,
    parallelization_group: ProcessGroup | None,
    exchange_algo: str = "broadcast",
) -> dict[ShardId, torch.Tensor]:
    """Give every rank the tensors that it wants and another rank has. Collective over the group.

    Only tensors that some rank wants and does not have are moved, in pieces: no rank has more than
    256 MiB of buffers. ``broadcast`` sends a piece to the ranks that want it;
    ``gather_rounds`` and ``gather_object`` give it to all of them, and need fewer, larger steps.

    Args:
        loaded_tensors: What this rank has, of any dtype, shape and device.
        unloaded_shards: What it wants. ``data`` is filled in place where there is some; otherwise
            a CPU tensor is made (the shard itself is not changed).
        shard_distribution: Tells who gives what; a shard whose main rank does not have it is given
            by the lowest rank that has. None if the group has one rank.
        parallelization_group: The group; None is the default one.
        exchange_algo: ``broadcast``, ``gather_rounds`` or ``gather_object``.

    Returns:
        ``loaded_tensors`` and what was received, by shard id.

    Raises:
        NotImplementedError: Another algorithm; on all ranks, also if only one asks for it.
        MismatchError: Nobody has a shard that is wanted, or it has another shape or dtype.
        CoordinationError: Ranks failed, vanished or asked for different algorithms.
    """
    mains = {} if shard_distribution is None else shard_distribution.main_rank_for_shard
    return exchange_tensors(
        loaded_tensors, unloaded_shards, mains, parallelization_group, exchange_algo=exchange_algo
    )
