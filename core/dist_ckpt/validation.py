"""Agreement of all ranks, and what happens when request and checkpoint differ.

Here: strict handling, and checks over all ranks' descriptions that raise. Not here: the checks
themselves (``_sharding``), the exchange (``_comm``). The functions run on rank 0 inside an
exchange, so whatever they raise is raised on every rank.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from dist_ckpt._sharding.coverage import (
    agreement_problems,
    coverage_problems,
    storage_problems,
)
from dist_ckpt._sharding.proofs import agreeing_keys, storable_keys, tiled_keys
from dist_ckpt._sharding.shard_info import dtype_from_name, dtype_name
from dist_ckpt._sharding.together import JobTable
from dist_ckpt.errors import CoordinationError, InvalidShardingError, MismatchError
from dist_ckpt.mapping import ShardedObject, is_main_replica

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Mapping, Sequence

    from numpy.typing import NDArray
    from torch import nn

    from dist_ckpt._sharding.shard_info import ShardInfo

__all__ = [
    "RankView",
    "StrictHandling",
    "StrictPolicy",
    "casts_into",
    "check_casts",
    "check_formats",
    "check_objects",
    "check_policies",
    "check_sharding",
    "check_storable",
    "parse_strict_flag",
    "warn_of_casts",
]

logger = logging.getLogger(__name__)

_SHOWN = 20


class StrictHandling(Enum):
    """What to do about keys that only the request or only the checkpoint has.

    *Unexpected*: requested by this rank, not in the checkpoint. *Missing*: in the checkpoint,
    requested by no rank.
    """

    ASSUME_OK_UNEXPECTED = "assume_ok_unexpected"
    LOG_UNEXPECTED = "log_unexpected"
    LOG_ALL = "log_all"
    RAISE_UNEXPECTED = "raise_unexpected"
    RAISE_ALL = "raise_all"
    RETURN_UNEXPECTED = "return_unexpected"
    RETURN_ALL = "return_all"
    IGNORE_ALL = "ignore_all"

    @staticmethod
    def requires_explicit_ckpt_mismatch_check(val: StrictHandling) -> bool:
        """Whether requested and stored keys are compared before anything is read."""
        return val is not StrictHandling.ASSUME_OK_UNEXPECTED

    @staticmethod
    def requires_global_app_metadata(val: StrictHandling) -> bool:
        """Whether a rank must know what the other ranks request."""
        return val.value.endswith("_all")

    @staticmethod
    def requires_returning_mismatch_keys(val: StrictHandling) -> bool:
        """Whether ``load`` returns a triple: state dict, missing and unexpected keys."""
        return val.value.startswith("return_")


@dataclass(frozen=True, slots=True, kw_only=True)
class StrictPolicy:
    """The three things that a ``StrictHandling`` means."""

    reaction: Literal["raise", "log", "return", "ignore"]
    check_missing: bool

    @classmethod
    def of(cls, strict: StrictHandling) -> StrictPolicy:
        """Return the policy of a flag.

        ``ASSUME_OK_UNEXPECTED`` does not look for missing keys, but a key that is not there cannot
        be read, so it is an error there too.
        """
        name = strict.value
        word = name.split("_", maxsplit=1)[0]
        reactions: dict[str, Literal["raise", "log", "return", "ignore"]] = {
            "assume": "raise",
            "log": "log",
            "raise": "raise",
            "return": "return",
            "ignore": "ignore",
        }
        return cls(
            reaction=reactions[word],
            check_missing=name.endswith("_all") and name != "ignore_all",
        )


def parse_strict_flag(strict: str | StrictHandling) -> StrictHandling:
    """Return the flag of that name or value.

    Raises:
        ValueError: ``Invalid strict flag``.
    """
    if isinstance(strict, StrictHandling):
        return strict
    try:
        return StrictHandling(strict)
    except ValueError:
        names = ", ".join(repr(flag.value) for flag in StrictHandling)
        raise ValueError(f"Invalid strict flag: {strict!r}; one of {names}") from None


@dataclass(frozen=True, slots=True)
class RankView:
    """What one rank tells the others of its request: descriptions, no data.

    ``formats`` are the backends and versions of a save, of the sharded and of the common part.
    ``host`` is the machine of a rank that saves; equal for ranks that share its memory.
    ``casts`` are the keys of a load whose stored and requested dtype, in this order, differ.
    ``common`` is a digest of the common part of a save, if ranks are to have the same; it differs
    from save to save, so it is no part of what makes two descriptions equal.
    ``unexpected`` has one line for each key that is requested and not stored; ``policy`` is what a
    load does about them.
    """

    shards: Sequence[ShardInfo]
    objects: tuple[ShardedObject, ...]
    formats: tuple[tuple[str, int], ...] = ()
    host: str = ""
    casts: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    unexpected: tuple[str, ...] = ()
    common: bytes = field(default=b"", compare=False)
    policy: StrictPolicy | None = None


def check_formats(views: Sequence[RankView]) -> None:
    """Raise if ranks would save in different formats: none could read what they make together.

    Raises:
        CoordinationError: Naming the formats and who chose them.
    """
    _check_equal(
        [view.formats for view in views],
        "ranks save in different formats (sharded, common)",
        hint="give all ranks the same strategies and options.",
    )


def check_policies(views: Sequence[RankView]) -> None:
    """Raise if ranks handle keys that only one side has in different ways: one way is followed.

    Raises:
        CoordinationError: Naming the ways and who chose them.
    """
    _check_equal(
        [view.policy for view in views],
        "ranks load with different strict handling",
        hint="give all ranks the same strict.",
    )


def _check_equal(choices: Sequence[Hashable], problem: str, *, hint: str) -> None:
    """Raise ``CoordinationError`` unless all ranks, by position, have chosen the same."""
    by_choice: dict[Hashable, list[int]] = defaultdict(list)
    for rank, choice in enumerate(choices):
        by_choice[choice].append(rank)
    if len(by_choice) > 1:
        listed = "; ".join(f"{choice} on ranks {ranks}" for choice, ranks in by_choice.items())
        raise CoordinationError(f"{problem}: {listed}.", hint=hint)


def check_sharding(views: JobTable | Sequence[Sequence[ShardInfo]], *, coverage: bool) -> None:
    """Raise if ranks disagree on a tensor or, with ``coverage``, if shards do not tile it.

    Raises:
        InvalidShardingError: With every problem found, of every key.
    """
    job = JobTable.of(views)
    problems = agreement_problems(_open(job, agreeing_keys(job)))
    if coverage and not problems:
        found = coverage_problems(_open(job, tiled_keys(job)))
        problems = [f"Invalid access pattern for {one}" for one in found]
    if problems:
        raise InvalidShardingError(
            f"Invalid sharding pattern validation. Errors: {shortened(problems)}",
            hint="exactly one rank must save each element: replica_id is 0 (or all 0) on it alone.",
        )


def _open(job: JobTable, accepted: NDArray[np.bool_]) -> list[list[ShardInfo]]:
    """Return what is to be looked at one by one: the descriptions of keys that are not accepted."""
    return job.only(np.flatnonzero(~accepted).tolist())


def check_storable(views: JobTable | Sequence[Sequence[ShardInfo]]) -> None:
    """Raise if these shards would make a checkpoint that cannot be read back.

    Raises:
        InvalidShardingError: With every problem found, of every key.
    """
    job = JobTable.of(views)
    problems = storage_problems(_open(job, storable_keys(job)))
    if problems:
        raise InvalidShardingError(shortened(problems))


def check_objects(views: Sequence[Sequence[ShardedObject]]) -> None:
    """Raise if sharded objects are duplicated or incomplete.

    Raises:
        InvalidShardingError: Naming the keys.
    """
    mains: dict[str, list[int]] = defaultdict(list)
    shapes: dict[str, dict[tuple[int, ...], set[tuple[int, ...]]]] = defaultdict(dict)
    for rank, view in enumerate(views):
        for one in view:
            shapes[one.key].setdefault(tuple(one.global_shape), set())
            if is_main_replica(one.replica_id):
                mains[one.unique_key].append(rank)
                shapes[one.key][tuple(one.global_shape)].add(tuple(one.global_offset))
    problems = [
        f"Duplicate ShardedObject keys: {key!r} has main replicas on ranks {ranks}"
        for key, ranks in sorted(mains.items())
        if len(ranks) > 1
    ]
    for key, found in sorted(shapes.items()):
        if len(found) > 1:
            problems.append(f"{key!r}: ranks disagree on the object's shape: {sorted(found)}")
        for shape, offsets in found.items():
            lacking = math.prod(shape) - len(offsets)
            if lacking:
                problems.append(
                    f"Invalid access pattern: {lacking} ShardedObject are missing. "
                    f"Key {key!r}, shape {shape}"
                )
    if problems:
        raise InvalidShardingError(shortened(problems))


def of_ranks(lines: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of all ranks, each once; a line of some ranks only names these ranks."""
    ranks: dict[str, list[int]] = defaultdict(list)
    for rank, its_lines in enumerate(lines):
        for line in its_lines:
            ranks[line].append(rank)
    return [
        line if len(found) == len(lines) else f"{line} ({_ranks(found)})"
        for line, found in ranks.items()
    ]


def _ranks(found: Sequence[int]) -> str:
    return f"rank {found[0]}" if len(found) == 1 else f"ranks {found}"


def react(
    policy: StrictPolicy, where: str, unexpected: Sequence[str], missing: Collection[str]
) -> None:
    """Raise or log differences, as ``policy`` says.

    Args:
        policy: What to do.
        where: Path of the checkpoint.
        unexpected: One line for each requested key that is not stored.
        missing: Stored keys that no rank requested.

    Raises:
        MismatchError: With all keys, if the policy says so.
    """
    told = []
    if unexpected:
        told.append(f"Unexpected keys (not found in the checkpoint): {shortened(unexpected)}")
    if missing:
        told.append(
            f"Missing keys (in the checkpoint, requested by no rank): {shortened(sorted(missing))}"
        )
    if not told:
        return
    if policy.reaction == "raise":
        raise MismatchError(f"{where}: {'. '.join(told)}")
    if policy.reaction == "log":
        logger.warning("%s: %s", where, ". ".join(told))


def warn_of_casts(casts: Sequence[Mapping[str, tuple[str, str]]], where: str) -> None:
    """Log one warning that names the keys that a load converts, and both dtypes. Rank 0.

    Args:
        casts: Of each rank: key -> stored and requested dtype.
        where: Path of the checkpoint.
    """
    keys: dict[tuple[str, str], dict[str, None]] = defaultdict(dict)
    for of_rank in casts:
        for key, pair in of_rank.items():
            keys[pair][key] = None
    if not keys:
        return
    groups = [
        f"{stored} -> {requested}{_loss(stored, requested)}: "
        + shortened([repr(name) for name in names])
        for (stored, requested), names in keys.items()
    ]
    logger.warning(
        "%s: the dtypes of the checkpoint and of the request differ, values are converted. %s. "
        'LoadOptions(cast="error") refuses such a load.',
        where,
        ". ".join(groups),
    )


def casts_into(module: nn.Module, entries: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Return what ``module.load_state_dict(entries)`` converts: name -> both dtypes, as above."""
    held = {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }
    return {
        name: (dtype_name(entry.dtype), dtype_name(held[name].dtype))
        for name, entry in entries.items()
        if isinstance(entry, torch.Tensor) and name in held and entry.dtype != held[name].dtype
    }


def check_casts(casts: Mapping[str, tuple[str, str]], where: str) -> None:
    """Refuse a load that converts.

    Raises:
        MismatchError: Naming all keys, of one rank.
    """
    found = [f"{k!r}: {want} is expected, {have} is stored" for k, (have, want) in casts.items()]
    if found:
        raise MismatchError(f"{where}: {'; '.join(found)}", hint='cast="allow" converts.')


def _loss(stored: str, requested: str) -> str:
    """Return the loss of a conversion, in brackets; empty if there is none."""
    have, want = dtype_from_name(stored), dtype_from_name(requested)
    if want is torch.bool:
        return " (only whether it is zero is kept)"
    if have.is_complex and not want.is_complex:
        return " (the imaginary part is dropped)"
    if have.is_floating_point and not (want.is_floating_point or want.is_complex):
        return " (fractions are dropped, what is out of range is undefined)"
    if any(
        dtype.is_floating_point or dtype.is_complex or dtype is torch.bool for dtype in (have, want)
    ):
        return ""
    before, after = torch.iinfo(have), torch.iinfo(want)
    is_narrower = before.max > after.max or before.min < after.min
    return " (what is out of range wraps around)" if is_narrower else ""


def shortened(problems: Collection[str]) -> str:
    """Return the first problems as one text, and how many more there are."""
    shown = list(problems)[:_SHOWN]
    more = len(problems) - len(shown)
    return "; ".join(shown) + (f"; and {more} more" if more else "")
