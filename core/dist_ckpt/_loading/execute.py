"""A load, step by step: open together, match together, read alone, merge.

Here: the steps and what is handed from one to the next. Not here: any step's own logic. Three
exchanges in all; reading itself waits for nobody.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from dist_ckpt._comm.outcome import agree, attempt, reduce
from dist_ckpt._formats.documents import COMMON_FILE, CheckpointContents, check_unchanged
from dist_ckpt._formats.objects import COMMON_KEY, decode_document
from dist_ckpt._formats.torch_dist.foreign import (
    foreign_common,
    read_foreign_object,
    sharded_object_keys,
)
from dist_ckpt._loading.fill import fill_tensors, read_whole
from dist_ckpt._process.gc_pause import collector_paused
from dist_ckpt._sharding.index import CheckpointIndex, StoredChunk, StoredTensor
from dist_ckpt._sharding.match import (
    agreeing_boxes,
    content_problems,
    describe_unexpected,
    differing_dtypes,
    key_of_object,
)
from dist_ckpt._sharding.shard_info import dtype_from_name, dtype_name
from dist_ckpt._sharding.split import LoadParts, merge_after_load, split_for_load
from dist_ckpt._sharding.table import ShardTable, local_shards
from dist_ckpt._sharding.wanted import wanted_of
from dist_ckpt._staging_pool.memory import can_cast
from dist_ckpt.box import Box
from dist_ckpt.errors import (
    MismatchError,
)
from dist_ckpt.mapping import ShardedObject, ShardedTensor
from dist_ckpt.validation import (
    RankView,
    StrictPolicy,
    check_objects,
    check_policies,
    check_sharding,
    of_ranks,
    react,
    shortened,
    warn_of_casts,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from dist_ckpt._sharding.wanted import Wanted
    from dist_ckpt.options import LoadOptions
    from dist_ckpt.types import Communicator, ShardedStateDict, StateDict

__all__ = [
    "LoadRequest",
    "LoadResult",
    "Source",
    "index_of",
    "read_common",
    "read_leaves",
    "read_object",
    "read_whole",
    "run_load",
    "stored_keys",
]


_reading: ContextVar[bool] = ContextVar("dist_ckpt_reading", default=False)
"""Whether a load is in its last step: differing dtypes have been reported by then."""


@dataclass(frozen=True, slots=True)
class LoadResult:
    """A loaded state dict, the keys that were not found, and the keys that no rank asked for."""

    state_dict: StateDict
    unexpected: frozenset[str]
    missing: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where sharded leaves and the common part come from, if not from our own formats.

    Attributes:
        stored: Returns what is stored, without data: tensors by key, objects by unique key. A
            source that cannot tell of its objects returns those that it is given; given None, it
            raises NotImplementedError.
        read: Returns the values of tensors and objects, in order; called on every rank, and may
            exchange with other ranks by itself. None: read as our own formats.
        read_common: Returns the common part. None: read as our own.
        thread_count: Reads at a time, in place of the options'.
        allow_pickle: Whether pickled objects may be loaded even if the options do not say so.
        refuses_casts: Whether another dtype is an error even if the options allow it.
    """

    stored: (
        Callable[[Sequence[ShardedObject] | None], Mapping[str, ShardedTensor | ShardedObject]]
        | None
    ) = None
    read: (
        Callable[[Sequence[ShardedTensor], Sequence[ShardedObject]], tuple[list[Any], list[Any]]]
        | None
    ) = None
    read_common: Callable[[], StateDict] | None = None
    thread_count: int | None = None
    allow_pickle: bool = False
    refuses_casts: bool = False

    def chosen(self, options: LoadOptions) -> LoadOptions:
        """Return the options for the sharded part, with what this source says of them."""
        return replace(
            options,
            thread_count=self.thread_count or options.thread_count,
            allow_pickle=self.allow_pickle or options.allow_pickle,
            cast="error" if self.refuses_casts else options.cast,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRequest:
    """What one rank brings to a load; made inside of an exchange, so that all hear if it fails."""

    state_dict: ShardedStateDict
    source: Source = Source()


@dataclass(frozen=True, slots=True)
class _Request:
    """This rank's request, after keys that are not stored were taken out.

    ``known`` has an index of what the source says is stored; ``contents`` that of the checkpoint.
    ``wanted`` is the description of ``tensors``, and that beside what ``contents`` has; None if
    that was not made.
    """

    source: Source
    contents: CheckpointContents
    known: CheckpointContents
    parts: LoadParts
    tensors: tuple[ShardedTensor, ...]
    objects: list[ShardedObject]
    unexpected: list[str]
    view: RankView
    wanted: tuple[ShardTable, Wanted] | None


def run_load(
    build: Callable[[], LoadRequest],
    contents: CheckpointContents,
    comm: Communicator,
    options: LoadOptions,
    policy: StrictPolicy,
    *,
    check_coverage: bool,
    common: StateDict | None = None,
) -> LoadResult:
    """Load collectively; whatever fails on one rank is raised on all.

    What ``build``, which makes this rank's request, raises on one rank is raised on all. ``common``
    is the common part, if it was read before.
    """
    where = contents.directory
    # A strategy that reads for this load may call this function again.
    is_inner = _reading.get()

    own = attempt(_matched, build, contents, options, policy)
    missing = reduce(
        comm,
        f"matching the request with {where}",
        own.then(attrgetter("view")),
        lambda views: _agree(
            views,
            own.get().known,
            policy,
            check_coverage=check_coverage,
            warns_of_casts=not is_inner,
        ),
    )
    request = own.get()
    if policy.reaction == "log":
        react(policy, str(where), request.view.unexpected, missing)
    token = _reading.set(True)
    try:
        # Outside of an exchange: what reads may exchange with other ranks by itself.
        read = attempt(_read, request, options, common)
    finally:
        _reading.reset(token)
    state_dict = agree(comm, f"reading {where}", read)
    return LoadResult(state_dict, frozenset(request.unexpected), missing)


def index_of(stored: Mapping[str, ShardedTensor | ShardedObject]) -> CheckpointIndex:
    """Return an index of what a strategy says is stored: which keys and shapes, not where."""
    tensors = {}
    for key, one in stored.items():
        if isinstance(one, ShardedTensor):
            box = Box((0,) * len(one.global_shape), one.global_shape)
            chunk = StoredChunk(box, "", 0, 0)
            tensors[key] = StoredTensor(dtype_name(one.dtype), box.shape, (chunk,))
        else:
            tensors[key] = StoredTensor("uint8", (0,), (), "object")
    return CheckpointIndex(tensors)


def stored_keys(contents: CheckpointContents) -> dict[str, ShardedTensor | ShardedObject]:
    """Return all that is stored, without data: tensors by key, objects by unique key."""
    found: dict[str, ShardedTensor | ShardedObject] = {}
    for key, stored in contents.index.tensors.items():
        if stored.role == "tensor":
            shape = stored.shape
            dtype = dtype_from_name(stored.dtype)
            found[key] = ShardedTensor(
                key, None, dtype, shape, shape, (0,) * len(shape), (1,) * len(shape)
            )
        elif stored.role == "object":
            found[key] = ShardedObject.empty_from_unique_key(key)
    for key in sharded_object_keys(contents):
        found[key] = ShardedObject.empty_from_unique_key(key)
    return found


def read_common(contents: CheckpointContents, options: LoadOptions) -> StateDict:
    """Return the common part. Not collective; every rank reads it for itself.

    Raises:
        CheckpointNotFoundError: The checkpoint was replaced or removed meanwhile.
    """
    if contents.common is None:
        return foreign_common(contents, allow_pickle=options.allow_pickle)
    common: StateDict = decode_document(
        contents.common,
        key=COMMON_KEY,
        where=str(contents.directory / COMMON_FILE),
        allow_pickle=options.allow_pickle,
        fetch=lambda keys: read_whole(contents, keys, options),
    )
    # The document was read when the checkpoint was opened, its tensors only now.
    check_unchanged(contents)
    return common


def _matched(
    build: Callable[[], LoadRequest],
    contents: CheckpointContents,
    options: LoadOptions,
    policy: StrictPolicy,
) -> _Request:
    asked = build()
    with collector_paused():
        return _match(asked, contents, options, policy)


def _match(
    asked: LoadRequest, contents: CheckpointContents, options: LoadOptions, policy: StrictPolicy
) -> _Request:
    """Take the request apart and compare it with what is stored. Every rank."""
    source, known = asked.source, contents
    parts = split_for_load(asked.state_dict)
    if source.stored is not None:
        # Missing keys are known only to who knows all that is stored.
        all_of_it = source.stored(None if policy.check_missing else parts.objects)
        known = replace(contents, index=index_of(all_of_it))
    table = local_shards(parts.tensors, with_data=False).table
    wanted = wanted_of(table, known.index.tensors)
    absent = {table.keys[at] for at in np.flatnonzero(~wanted.stored.is_tensor).tolist()}
    stored = {*known.index.keys_of("object"), *known.objects} if parts.objects else set()
    objects = [leaf for leaf in parts.objects if leaf.unique_key in stored]
    unexpected, lines = absent, list[str]()
    tensors = parts.tensors
    if absent or len(objects) < len(parts.objects):
        tensors = tuple(one for one in parts.tensors if one.key not in absent)
        lacking = [leaf for leaf in parts.objects if leaf.unique_key not in stored]
        unexpected, lines = _unexpected(absent, lacking, known)
    cast = source.chosen(options).cast == "allow"
    if not agreeing_boxes(table, wanted, cast=cast).all():
        problems = content_problems(tensors, known.index, cast=cast)
        if problems:
            raise MismatchError(f"{contents.directory}: {shortened(problems)}")
    casts = differing_dtypes(table, wanted)
    _check_conversions(casts, str(contents.directory))
    view = RankView(
        table,
        tuple(leaf.without_data() for leaf in parts.objects),
        casts=casts,
        unexpected=tuple(lines),
        policy=policy,
    )
    found = (table, wanted) if known is contents and not absent else None
    return _Request(
        source, contents, known, parts, tensors, objects, sorted(unexpected), view, found
    )


def _unexpected(
    absent: set[str], lacking: Sequence[ShardedObject], known: CheckpointContents
) -> tuple[set[str], list[str]]:
    """Return the requested keys that are not stored, and one line for each.

    Args:
        absent: Keys of tensors that are not stored.
        lacking: Objects that are not stored.
        known: What is stored.

    Raises:
        MismatchError: A key is stored, but as something else, or on another grid: that is no
            difference of keys, so no policy lets it pass.
    """
    shards = [*known.index.keys_of("object"), *known.objects]
    objects = {key_of_object(shard): shard for shard in shards}
    tensors = set(known.index.keys_of("tensor"))
    problems = [
        f"{key!r}: a tensor is expected, an object is stored" for key in sorted(absent & {*objects})
    ]
    for leaf in lacking:
        if leaf.key in objects:
            problems.append(
                f"Object shard {leaf.unique_key} not found: {objects[leaf.key]} is stored"
            )
        elif leaf.key in tensors:
            problems.append(f"{leaf.key!r}: an object is expected, a tensor is stored")
    if problems:
        raise MismatchError(
            f"{known.directory}: {shortened(list(dict.fromkeys(problems)))}.",
            hint="load_sharded_metadata() shows what is stored.",
        )
    unexpected = absent | {leaf.key for leaf in lacking}
    return unexpected, describe_unexpected(sorted(unexpected), {*tensors, *objects})


def _check_conversions(casts: Mapping[str, tuple[str, str]], where: str) -> None:
    """Raise for dtypes that torch cannot convert, before anything is filled.

    Raises:
        MismatchError: With all keys.
    """
    possible = {pair: can_cast(*map(dtype_from_name, pair)) for pair in set(casts.values())}
    problems = [
        f"{key!r}: {pair[0]} is stored, {pair[1]} is expected, and torch does not convert it"
        for key, pair in casts.items()
        if not possible[pair]
    ]
    if problems:
        raise MismatchError(
            f"{where}: {shortened(problems)}.", hint="request the stored dtype, and convert then."
        )


def _agree(
    views: Sequence[RankView],
    contents: CheckpointContents,
    policy: StrictPolicy,
    *,
    check_coverage: bool,
    warns_of_casts: bool,
) -> frozenset[str]:
    """Check what only all requests together show; return the missing keys. Rank 0."""
    check_policies(views)
    missing = _missing(views, contents) if policy.check_missing else frozenset()
    if policy.reaction == "raise":
        unexpected = of_ranks([view.unexpected for view in views])
        react(policy, str(contents.directory), unexpected, missing)
    if check_coverage:
        check_sharding([view.shards for view in views], coverage=True)
        check_objects([view.objects for view in views])
    if warns_of_casts:
        warn_of_casts([view.casts for view in views], str(contents.directory))
    return missing


def _missing(views: Sequence[RankView], contents: CheckpointContents) -> frozenset[str]:
    """Return the stored keys that no rank asks for. Rank 0."""
    asked = {key for view in views for key in ShardTable.of(view.shards).keys}
    asked |= {leaf.key for view in views for leaf in view.objects}
    objects = [*contents.index.keys_of("object"), *sharded_object_keys(contents)]
    stored = {*contents.index.keys_of("tensor"), *map(key_of_object, objects)}
    return frozenset(stored - asked)


def _read(request: _Request, options: LoadOptions, common: StateDict | None) -> StateDict:
    """Fill the requested tensors, decode objects and put it all together. Every rank."""
    source, contents = request.source, request.contents
    chosen = source.chosen(options)
    if source.read is None:
        tensors: list[Any] = [
            *fill_tensors(request.tensors, contents, chosen, known=request.wanted)
        ]
        objects = [read_object(leaf, contents, chosen) for leaf in request.objects]
    else:
        tensors, objects = source.read(request.tensors, request.objects)
    if common is None:
        # Pickle is allowed for the strategy's own part only.
        chosen = replace(chosen, allow_pickle=options.allow_pickle)
        common = source.read_common() if source.read_common else read_common(contents, chosen)
    check_unchanged(contents)
    return merge_after_load(
        request.parts,
        common,
        {id(one): value for one, value in zip(request.tensors, tensors, strict=True)},
        {id(one): value for one, value in zip(request.objects, objects, strict=True)},
    )


def read_leaves(
    tensors: Sequence[ShardedTensor],
    objects: Sequence[ShardedObject],
    contents: CheckpointContents,
    options: LoadOptions,
) -> tuple[list[Any], list[Any]]:
    """Return the data of tensors, filled in place where there is some, and of objects.

    Not collective. The keys, shapes and dtypes have been compared before.
    """
    filled = fill_tensors(tensors, contents, options)
    return filled, [read_object(one, contents, options) for one in objects]


def read_object(one: ShardedObject, contents: CheckpointContents, options: LoadOptions) -> Any:
    """Return one stored object. Not collective."""
    key = one.unique_key
    if key in contents.objects:
        return read_foreign_object(
            contents.directory, key, contents.objects[key], allow_pickle=options.allow_pickle
        )
    (document,) = read_whole(contents, [key], options)
    return decode_document(
        document.numpy().tobytes(),
        key=key,
        where=one.key,
        allow_pickle=options.allow_pickle,
        fetch=lambda keys: read_whole(contents, keys, options),
    )
