"""Describes what one rank saves, before anything is planned.

Here: splitting a request into parts and shards, and the checks over all ranks' descriptions.
Not here: the steps of a save (``_saving.execute``). ``prepare`` is local; ``check_views`` runs on
rank 0.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from dist_ckpt._formats.objects import DocumentPadding, encode_common, object_shards
from dist_ckpt._process.gc_pause import collector_paused
from dist_ckpt._saving.common_parts import digest_of, preprocessed
from dist_ckpt._sharding.split import SaveParts, split_for_save, without_marks
from dist_ckpt._sharding.table import LocalShards, local_shards
from dist_ckpt._sharding.together import JobTable
from dist_ckpt.storage.owners import host_identity
from dist_ckpt.validation import (
    RankView,
    check_formats,
    check_objects,
    check_sharding,
    check_storable,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dist_ckpt._saving.describe_live import Live
    from dist_ckpt._saving.request import SaveRequest
    from dist_ckpt.types import StateDict

__all__ = [
    "Prepared",
    "check_views",
    "common_backend",
    "prepare",
    "with_values_copied",
]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request taken apart; ``shards`` are in the order in which ``view`` describes them."""

    request: SaveRequest
    parts: SaveParts
    shards: LocalShards
    view: RankView
    common: bytes | None
    compared: StateDict | None = None


def prepare(request: SaveRequest, rank: int, padding: DocumentPadding | None = None) -> Prepared:
    """Split the state dict and describe its shards. Every rank.

    Args:
        request: What to save.
        rank: This rank.
        padding: Of the objects' documents; None to leave them as they are.
    """
    with collector_paused():
        parts = split_for_save(request.state_dict)
        shards = local_shards(parts.tensors)
    if request.live is not None:
        parts, shards = _with_live(request.live, parts, shards)
    common = None
    if request.format.stores_common:
        all_shards = [shards, object_shards(parts.objects, padding)]
        if rank == 0 and request.common is None:
            encoded = encode_common(parts.common)
            common = encoded.data
            all_shards.append(encoded.shards)
        shards = LocalShards.joined(all_shards)
    view = RankView(
        shards.table,
        tuple(leaf.without_data() for leaf in parts.objects),
        (
            (request.format.backend, request.format.version),
            common_backend(request),
        ),
        host_identity(),
    )
    compared = None
    if request.compares_common:
        common_part = parts.common if request.preprocess is None else without_marks(parts.common)
        compared = preprocessed(common_part, request.preprocess)
        view = replace(view, common=digest_of(compared))
    return Prepared(request, parts, shards, view, common, compared)


def _with_live(live: Live, parts: SaveParts, shards: LocalShards) -> tuple[SaveParts, LocalShards]:
    parts = SaveParts(
        common=_merged(live.parts.common, parts.common),
        tensors=(*live.parts.tensors, *parts.tensors),
        objects=(*live.parts.objects, *parts.objects),
    )
    return parts, LocalShards.joined([live.shards, shards])


def _merged(first: StateDict, second: StateDict) -> StateDict:
    """Return both nested dicts in one; they have no leaf in common."""
    merged = dict(first)
    for key, value in second.items():
        other = merged.get(key)
        both = isinstance(other, dict) and isinstance(value, dict)
        merged[key] = _merged(other, value) if both else value  # type: ignore[arg-type]  # looked at
    return merged


def common_backend(request: SaveRequest) -> tuple[str, int]:
    """Return format and version of the common part."""
    common = request.common
    return (common.backend, common.version) if common else request.format.common_backend


def check_views(views: Sequence[RankView], *, check_coverage: bool) -> JobTable:
    """Return the shards of all ranks; raise if they do not make one checkpoint. Rank 0.

    Raises:
        InvalidShardingError: Shards overlap, leave gaps or disagree, or cannot be stored.
        CoordinationError: Ranks would save in different formats.
    """
    check_formats(views)
    job = JobTable([view.shards for view in views])
    if check_coverage:
        # First, as its message is clearer: a duplicate object is also found as a duplicate tensor.
        check_objects([view.objects for view in views])
    check_sharding(job, coverage=check_coverage)
    check_storable(job)
    return job


def with_values_copied(prepared: Prepared) -> Prepared:
    """Return it with copies of the common part and of the objects, to be written later."""
    parts = prepared.parts
    objects = tuple(replace(one, data=_value_copied(one.data)) for one in parts.objects)
    return replace(
        prepared, parts=replace(parts, common=_value_copied(parts.common), objects=objects)
    )


def _value_copied(value: Any) -> Any:
    # deepcopy refuses tensors with a grad_fn, so these are copied here.
    return copy.deepcopy(value, {id(t): t.detach().clone() for t in _tensors_in(value)})


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(one)
