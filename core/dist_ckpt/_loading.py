"""A load, step by step: open together, match together, read alone, merge.

Here: the steps and what is handed from one to the next. Not here: any step's own logic. Three
exchanges in all; reading itself waits for nobody.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from dist_ckpt._engine.memory import fill_zero
from dist_ckpt._formats.documents import COMMON_FILE, CheckpointContents, check_unchanged
from dist_ckpt._formats.objects import COMMON_KEY, decode_document
from dist_ckpt._formats.reading import Destination, read_into
from dist_ckpt._formats.torch_dist.foreign import (
    foreign_common,
    read_foreign_object,
    sharded_object_keys,
)
from dist_ckpt._geometry import Box
from dist_ckpt._integrity.match import content_problems, describe_unexpected, holes, wanted_box
from dist_ckpt._planning.describe import dtype_from_name, dtype_name, local_shards
from dist_ckpt._planning.index import CheckpointIndex, StoredChunk, StoredTensor
from dist_ckpt._state import LoadParts, merge_after_load, split_for_load
from dist_ckpt.errors import (
    CheckpointNotFoundError,
    CorruptedCheckpointError,
    MismatchError,
)
from dist_ckpt.mapping import ShardedObject, ShardedTensor
from dist_ckpt.validation import (
    RankView,
    StrictPolicy,
    check_objects,
    check_sharding,
    react,
    shortened,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

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
        stored: Returns what is stored, without data: tensors by key, objects by unique key.
        read: Returns the values of tensors and objects, in order; called on every rank, and may
            exchange with other ranks by itself. None: read as our own formats.
        read_common: Returns the common part. None: read as our own.
        thread_count: Reads at a time, in place of the options'.
    """

    stored: Callable[[], Mapping[str, ShardedTensor | ShardedObject]] | None = None
    read: (
        Callable[[Sequence[ShardedTensor], Sequence[ShardedObject]], tuple[list[Any], list[Any]]]
        | None
    ) = None
    read_common: Callable[[], StateDict] | None = None
    thread_count: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRequest:
    """What one rank brings to a load; made inside of an exchange, so that all hear if it fails."""

    state_dict: ShardedStateDict
    source: Source = Source()


@dataclass(frozen=True, slots=True)
class _Request:
    """This rank's request, after keys that are not stored were taken out.

    ``known`` has an index of what the source says is stored; ``contents`` that of the checkpoint.
    """

    source: Source
    contents: CheckpointContents
    known: CheckpointContents
    parts: LoadParts
    tensors: list[ShardedTensor]
    objects: list[ShardedObject]
    unexpected: list[str]
    view: RankView


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

    ``build`` makes this rank's request inside an exchange, so that what it raises on one rank is
    raised on all. ``common`` is the common part, if it was read before.
    """
    where = contents.directory
    request = functools.cache(lambda: _match(build(), contents, policy, options))
    missing = comm.map_reduce(
        f"matching the request with {where}",
        lambda: request().view,
        lambda views: _agree(views, request().known, policy, check_coverage=check_coverage),
    )
    read = _attempted(lambda: _read(request(), options, common))
    state_dict: StateDict = {}
    comm.map_reduce(f"reading {where}", lambda: state_dict.update(read()), lambda _: None)
    return LoadResult(state_dict, frozenset(request().unexpected), missing)


def _attempted(do: Callable[[], StateDict]) -> Callable[[], StateDict]:
    """Run ``do`` now, outside of an exchange; return what gives its result or raises its error."""
    try:
        result = do()
    except BaseException as error:  # noqa: BLE001 - raised inside the exchange, for all ranks
        caught = error

        def fail() -> StateDict:
            raise caught

        return fail
    return lambda: result


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


def read_whole(
    contents: CheckpointContents, keys: Sequence[str], options: LoadOptions
) -> list[torch.Tensor]:
    """Return whole tensors on the CPU. Not collective.

    Raises:
        CheckpointNotFoundError: A key is not stored.
        MismatchError: Only a part of a tensor is stored.
    """
    absent = [key for key in keys if key not in contents.index.tensors]
    if absent:
        raise CheckpointNotFoundError(f"{contents.directory}: {shortened(absent)} not stored.")
    stored = [contents.index.tensors[key] for key in keys]
    problems = [
        problem
        for key, one in zip(keys, stored, strict=True)
        for problem in holes(key, Box((0,) * len(one.shape), one.shape), one)
    ]
    if problems:
        raise MismatchError(f"{contents.directory}: {shortened(problems)}")
    tensors = [torch.empty(one.shape, dtype=dtype_from_name(one.dtype)) for one in stored]
    wanted = [
        Destination(key, Box((0,) * len(one.shape), one.shape), tensor)
        for key, one, tensor in zip(keys, stored, tensors, strict=True)
    ]
    _fill(wanted, contents, options)
    return tensors


def _fill(
    destinations: Sequence[Destination], contents: CheckpointContents, options: LoadOptions
) -> None:
    try:
        read_into(
            destinations,
            contents.index,
            contents.directory,
            files={} if options.verify == "off" else contents.files,
            thread_count=options.thread_count,
        )
    except (CorruptedCheckpointError, CheckpointNotFoundError):
        check_unchanged(contents)  # what was replaced meanwhile is no damage
        raise


def _match(
    asked: LoadRequest, contents: CheckpointContents, policy: StrictPolicy, options: LoadOptions
) -> _Request:
    """Take the request apart and compare it with what is stored. Every rank."""
    source, known = asked.source, contents
    if source.stored is not None:
        known = replace(contents, index=index_of(source.stored()))
    parts = split_for_load(asked.state_dict)
    tensor_keys = {k for k, t in known.index.tensors.items() if t.role == "tensor"}
    object_keys = {k for k, t in known.index.tensors.items() if t.role == "object"}
    object_keys |= set(known.objects)
    tensors = [t for t in parts.tensors if t.key in tensor_keys]
    objects = [o for o in parts.objects if o.unique_key in object_keys]
    unexpected = sorted(
        {t.key for t in parts.tensors if t.key not in tensor_keys}
        | {o.unique_key for o in parts.objects if o.unique_key not in object_keys}
    )
    lines = describe_unexpected(unexpected, tensor_keys | object_keys)
    react(policy, str(contents.directory), lines, ())
    problems = content_problems(tensors, known.index, cast=options.cast == "allow")
    if problems:
        raise MismatchError(f"{contents.directory}: {shortened(problems)}")
    view = RankView(
        tuple(shard.info for shard in local_shards([t.without_data() for t in parts.tensors])),
        tuple(one.without_data() for one in parts.objects),
    )
    return _Request(source, contents, known, parts, tensors, objects, unexpected, view)


def _agree(
    views: Sequence[RankView],
    contents: CheckpointContents,
    policy: StrictPolicy,
    *,
    check_coverage: bool,
) -> frozenset[str]:
    """Check what only all requests together show; return the missing keys. Rank 0."""
    if check_coverage:
        check_sharding([view.shards for view in views], coverage=True)
        check_objects([view.objects for view in views])
    if not policy.check_missing:
        return frozenset()
    asked = {info.key for view in views for info in view.shards}
    asked |= {one.unique_key for view in views for one in view.objects}
    missing = frozenset(set(stored_keys(contents)) - asked)
    react(policy, str(contents.directory), (), missing)
    return missing


def _read(request: _Request, options: LoadOptions, common: StateDict | None) -> StateDict:
    """Fill the requested tensors, decode objects and put it all together. Every rank."""
    source, contents = request.source, request.contents
    options = replace(options, thread_count=source.thread_count or options.thread_count)
    if source.read is None:
        tensors, objects = read_leaves(request.tensors, request.objects, contents, options)
    else:
        tensors, objects = source.read(request.tensors, request.objects)
    if common is None:
        common = source.read_common() if source.read_common else read_common(contents, options)
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
    filled = [_target(tensor) for tensor in tensors]
    destinations = [
        Destination(
            tensor.key, wanted, view[wanted.relative_to(box).slices()] if box.shape else view
        )
        for tensor in filled
        for box, view, wanted in _wanted(tensor, contents)
    ]
    _fill(destinations, contents, options)
    values = [read_object(one, contents, options) for one in objects]
    return [tensor.data for tensor in filled], values


def _target(tensor: ShardedTensor) -> ShardedTensor:
    """Return the sharded tensor with data to read into: its own, or fresh memory."""
    data = tensor.data
    if data is not None and not _overlaps_itself(data):
        return tensor
    fresh = replace(tensor, data=None)
    fresh.init_data(torch.device("cpu") if data is None else data.device)
    return fresh


def _overlaps_itself(data: torch.Tensor) -> bool:
    """Whether two elements may share memory: filling one would change the other."""
    if data.numel() <= 1:
        return False
    reach = 0
    for stride, n in sorted(zip(data.stride(), data.shape, strict=True)):
        if n > 1:
            if stride <= reach:
                return True
            reach += (n - 1) * stride
    return False


def _wanted(
    tensor: ShardedTensor, contents: CheckpointContents
) -> list[tuple[Box, torch.Tensor, Box]]:
    stored = contents.index.tensors[tensor.key].shape
    wanted = []
    for box, view in tensor.pieces():
        if view is None:
            continue
        inside = wanted_box(box, stored)
        if inside != box:
            # allow_shape_mismatch: what the checkpoint does not have is zero.
            fill_zero(view)
        if inside is not None:
            wanted.append((box, view, inside))
    return wanted


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
