"""What ranks tell each other when tensor-aware state dicts are made and read.

Here: the descriptions, and the checks over those of all ranks. Not here: the state dict itself
(``tensor_aware_state_dict``), moving tensors (``_comm.tensors``). The ``check_`` functions and
``answers`` run on rank 0 inside an exchange, so what they raise is raised on every rank.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from dist_ckpt._comm import group_communicator
from dist_ckpt._comm.tensors import EXCHANGE_ALGOS, ShardId
from dist_ckpt._sharding.match import describe_unexpected
from dist_ckpt._sharding.table import local_shards
from dist_ckpt.dict_utils import dict_list_map_outplace, nested_values
from dist_ckpt.errors import CoordinationError, InvalidShardingError, MismatchError
from dist_ckpt.exchange_utils import (
    ShardDistribution,
    describe_shards,
    describes_rank,
    shard_facts,
    shard_id,
    without_data,
)
from dist_ckpt.mapping import ShardedBase, ShardedObject, ShardedTensor
from dist_ckpt.utils import extract_sharded_base
from dist_ckpt.validation import (
    RankView,
    StrictPolicy,
    check_objects,
    check_sharding,
    react,
    shortened,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from dist_ckpt.types import Communicator, ShardedStateDict

__all__ = [
    "ALGOS",
    "ELSEWHERE",
    "HERE",
    "Answer",
    "Ask",
    "Choices",
    "Taken",
    "TakenVerdict",
    "answers",
    "ask_for",
    "check_algo",
    "check_taken",
    "check_views",
    "copied_containers",
    "data_by_id",
    "fitting_cache",
    "match_together",
    "own_leaves",
    "present_device",
    "view_of",
]

logger = logging.getLogger(__name__)

ALGOS = ("atomic", "fully_parallel")
HERE = "the tensor-aware state dict"


class _Place(Enum):
    """Stands for data that is not here; None may be an object's data in its own right."""

    ELSEWHERE = 0


ELSEWHERE = _Place.ELSEWHERE


def check_algo(algo: str) -> None:
    """Raise NotImplementedError for an algorithm that there is not."""
    if algo not in ALGOS:
        raise NotImplementedError(
            'Only "atomic" and "fully_parallel" sharding algorithms are supported.'
        )


# -- making one ------------------------------------------------------------------------------------


class Taken(NamedTuple):
    """One rank's choice and shards; ``view`` is None if its cached distribution fits."""

    algo: str
    view: RankView | None


class TakenVerdict(NamedTuple):
    """The algorithm of all ranks, or one that is unknown; whether only some ranks sent a view."""

    algo: str
    is_partial: bool


def own_leaves(tree: ShardedStateDict) -> ShardedStateDict:
    """Return the sharded part of ``tree`` with copies of its leaves, which share their data.

    Raises:
        InvalidShardingError: A sharded tensor has no data.
    """
    part, _ = extract_sharded_base(tree)
    leaves = [leaf for leaf in nested_values(part) if isinstance(leaf, ShardedTensor)]
    lacking = sorted({x.key for x in leaves if x.data is None and 0 not in x.data_shape})
    if lacking:
        raise InvalidShardingError(f"sharded tensors have no data: {shortened(lacking)}.")
    copies: dict[int, Any] = {}

    def copied(leaf: Any) -> Any:
        return copies.setdefault(id(leaf), copy.copy(leaf))

    found: ShardedStateDict = dict_list_map_outplace(copied, part)
    for leaf in copies.values():
        if isinstance(leaf, ShardedTensor):
            leaf.init_data("cpu")  # only shards without elements have no data here
    return found


def view_of(tree: ShardedStateDict, *, with_data: bool) -> RankView:
    """Return the description of all shards in ``tree``."""
    leaves = [leaf for leaf in nested_values(tree) if isinstance(leaf, ShardedBase)]
    tensors = [leaf for leaf in leaves if isinstance(leaf, ShardedTensor)]
    if not with_data:
        tensors = [without_data(leaf) for leaf in tensors]
    return RankView(
        tuple(shard.info for shard in local_shards(tensors)),
        tuple(without_data(leaf) for leaf in leaves if isinstance(leaf, ShardedObject)),
    )


def check_taken(takens: Sequence[Taken]) -> TakenVerdict:
    """Check what all ranks took apart.

    Raises:
        CoordinationError: Ranks ask for different algorithms.
        InvalidShardingError: Shards overlap or leave gaps.
    """
    algos = [taken.algo for taken in takens]
    unknown = [algo for algo in algos if algo not in ALGOS]
    if unknown:
        return TakenVerdict(unknown[0], is_partial=False)
    if len(set(algos)) > 1:
        raise CoordinationError(f"ranks ask for different algorithms: {algos}.")
    views = [taken.view for taken in takens if taken.view is not None]
    if len(views) == len(takens):
        check_views(views)
    return TakenVerdict(algos[0], is_partial=0 < len(views) < len(takens))


def check_views(views: Sequence[RankView]) -> None:
    """Check that shards and objects are complete and each has one main replica.

    Raises:
        InvalidShardingError: They are not.
    """
    check_objects([view.objects for view in views])
    check_sharding([view.shards for view in views], coverage=True)


def fitting_cache(
    cached: ShardDistribution | None, part: ShardedStateDict, group: ProcessGroup | None
) -> ShardDistribution | None:
    """Return the cached distribution if it is one and has just this rank's shards. Local."""
    comm = group_communicator(group)
    # What an atomic call returned is four times None.
    if cached is None or any(one is None for one in cached) or comm.size == 1:
        return None
    fits = describes_rank(ShardDistribution(*cached), part, rank=comm.rank, size=comm.size)
    return cached if fits else None


# -- reading one -----------------------------------------------------------------------------------


class Choices(NamedTuple):
    """What all ranks must choose alike."""

    algo: str
    exchange_algo: str
    policy: StrictPolicy
    validate: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What one rank wants and what it keeps.

    Attributes:
        choices: How it wants it.
        group: The ranks that it exchanges with.
        view: Its request, if that is to be checked.
        wanted: Names and facts of what it requests.
        names: Of everything that its state dict knows of.
        available: Facts of the shards whose data it keeps.
    """

    choices: Choices
    group: tuple[int, ...]
    view: RankView | None
    wanted: Mapping[ShardId, tuple[str, tuple[Any, ...]]]
    names: frozenset[str]
    available: Mapping[ShardId, tuple[Any, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What one rank learns: the choices of all, and the names that only one side has."""

    choices: Choices
    unexpected: frozenset[str] = frozenset()
    missing: frozenset[str] = frozenset()


def ask_for(
    request: ShardedStateDict,
    kept: ShardedStateDict,
    choices: Choices,
    comm: Communicator,
    group: ProcessGroup | None,
) -> Ask:
    """Return what this rank tells the others. Local."""
    leaves = [x for x in nested_values(request) if isinstance(x, ShardedTensor | ShardedObject)]
    own = [x for x in nested_values(kept) if isinstance(x, ShardedTensor | ShardedObject)]
    tensors, objects = data_by_id(kept)
    return Ask(
        choices=choices,
        group=_ranks(choices.algo, comm, group),
        view=view_of(request, with_data=False) if choices.validate else None,
        wanted=_wanted(leaves),
        names=frozenset(leaf.key for leaf in own),
        available={
            shard: shard_facts(leaf)
            for leaf in reversed(own)  # of equal shards the first counts, as in `data_by_id`
            if (shard := shard_id(leaf)) in tensors or shard in objects
        },
    )


def _wanted(
    leaves: Sequence[ShardedTensor | ShardedObject],
) -> dict[ShardId, tuple[str, tuple[Any, ...]]]:
    """Return names and facts of what is requested.

    Raises:
        InvalidShardingError: A shard is requested in two shapes or dtypes; one is kept.
    """
    describe_shards({str(number): leaf for number, leaf in enumerate(leaves)})
    return {shard_id(leaf): (leaf.key, shard_facts(leaf)) for leaf in leaves}


def _ranks(algo: str, comm: Communicator, group: ProcessGroup | None) -> tuple[int, ...]:
    if algo != "fully_parallel":
        return (comm.rank,)
    group_communicator(group)  # raises if this rank is not in it
    return tuple(range(comm.size) if group is None else dist.get_process_group_ranks(group))


def answers(asks: Sequence[Ask]) -> list[Answer]:
    """Match what ranks want with what they keep; return what each is told.

    Raises:
        CoordinationError: Ranks choose differently.
        InvalidShardingError: The request is wrong.
        MismatchError: A shard is kept by nobody who could give it, or has another shape or dtype;
            or keys differ and the policy is to raise.
    """
    all_choices = [ask.choices for ask in asks]
    for choices in all_choices:
        if choices.algo not in ALGOS or choices.exchange_algo not in EXCHANGE_ALGOS:
            return [Answer(choices=choices) for _ in asks]
    if len(set(all_choices)) > 1:
        raise CoordinationError(f"ranks choose differently: {shortened(_as_text(all_choices))}.")
    views = [ask.view for ask in asks if ask.view is not None]
    if views:
        check_views(views)
    policy = asks[0].choices.policy
    missing = _missing(asks) if policy.check_missing else frozenset()
    pools: dict[tuple[int, ...], _Pool] = {}
    unexpected, problems = [], list[str]()
    for ask in asks:
        if ask.group not in pools:
            pools[ask.group] = _Pool.of([asks[rank] for rank in ask.group])
        pool = pools[ask.group]
        unexpected.append(frozenset(n for n, _ in ask.wanted.values() if n not in pool.names))
        problems += pool.problems(ask)
    if policy.reaction == "raise":
        known = frozenset[str]().union(*(ask.names for ask in asks))
        strange = sorted(frozenset[str]().union(*unexpected))
        react(policy, HERE, describe_unexpected(strange, known), missing)
    if problems:
        raise MismatchError(
            f"{HERE} cannot give {shortened(sorted(set(problems)))}.",
            hint="request the shards that were kept; after from_state_dict(algo='fully_parallel') "
            "call to_state_dict with the same algo and group.",
        )
    return [
        Answer(choices=ask.choices, unexpected=names, missing=missing)
        for ask, names in zip(asks, unexpected, strict=True)
    ]


def match_together(ask: Callable[[], Ask], comm: Communicator) -> Answer:
    """Let all ranks ask, and return what this one is told. Collective.

    Raises:
        NotImplementedError: An algorithm is unknown; on all ranks, whoever asked for it.
        CheckpointingException: What ``answers`` raises.
    """
    answer = comm.map_scatter(f"matching the request with {HERE}", ask, answers)
    check_algo(answer.choices.algo)
    if answer.choices.exchange_algo not in EXCHANGE_ALGOS:
        raise NotImplementedError(f"exchange_algo must be one of {', '.join(EXCHANGE_ALGOS)}.")
    if answer.choices.policy.reaction == "log":
        lines = [f"{name!r} is not stored" for name in sorted(answer.unexpected)]
        react(answer.choices.policy, HERE, lines, answer.missing)
    return answer


def _as_text(values: Sequence[object]) -> list[str]:
    """Return the distinct values as text, in order."""
    return list(dict.fromkeys(map(str, values)))


def _missing(asks: Sequence[Ask]) -> frozenset[str]:
    stored = frozenset[str]().union(*(ask.names for ask in asks))
    return stored - {name for ask in asks for name, _ in ask.wanted.values()}


@dataclass(frozen=True, slots=True)
class _Pool:
    """What the ranks of a group keep together."""

    names: frozenset[str]
    available: Mapping[ShardId, tuple[Any, ...]]

    @classmethod
    def of(cls, asks: Sequence[Ask]) -> _Pool:
        available: dict[ShardId, tuple[Any, ...]] = {}
        for ask in reversed(asks):
            available |= ask.available
        return cls(frozenset[str]().union(*(ask.names for ask in asks)), available)

    def problems(self, ask: Ask) -> list[str]:
        """Return what this rank wants, by a name that is known, and cannot get."""
        found = []
        for shard, (name, facts) in ask.wanted.items():
            if name not in self.names or shard[2] == (0, 0):
                continue
            if shard not in self.available:
                found.append(f"{name!r} at {shard[1]}: no such shard is kept")
            elif self.available[shard] != facts:
                found.append(
                    f"{name!r} at {shard[1]}: {facts} is wanted, {self.available[shard]} is kept"
                )
        return found


def data_by_id(
    part: ShardedStateDict,
) -> tuple[dict[ShardId, torch.Tensor], dict[ShardId, Any]]:
    """Return the tensors and the objects that are kept here."""
    tensors: dict[ShardId, torch.Tensor] = {}
    objects: dict[ShardId, Any] = {}
    for leaf in nested_values(part):
        if isinstance(leaf, ShardedTensor) and leaf.data is not None:
            tensors.setdefault(shard_id(leaf), leaf.data)
        elif isinstance(leaf, ShardedObject) and leaf.data is not ELSEWHERE:
            objects.setdefault(shard_id(leaf), leaf.data)
    return tensors, objects


# -- small things ----------------------------------------------------------------------------------


def copied_containers(node: Any) -> Any:
    """Return ``node`` with new dicts and lists, of the same classes; the leaves are the same."""
    if not isinstance(node, dict | list):
        return node
    new = copy.copy(node)
    for key, value in node.items() if isinstance(node, dict) else enumerate(node):
        new[key] = copied_containers(value)
    return new


def present_device(kind: str) -> torch.device:
    """Return the device of that type, or the CPU if this process has none."""
    module = getattr(torch, kind, None)
    if kind not in ("cpu", "meta") and not (module is not None and module.is_available()):
        logger.warning("there is no %s here; tensors stay in host memory.", kind)
        return torch.device("cpu")
    return torch.device(kind)
