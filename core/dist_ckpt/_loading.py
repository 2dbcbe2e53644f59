"""A load, step by step: open together, match together, read alone, merge.

Here: the steps and what is handed from one to the next. Not here: any step's own logic. Three
exchanges in all; reading itself waits for nobody.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dist_ckpt._engine.commit import locate
from dist_ckpt._engine.memory import fill_zero
from dist_ckpt._formats.torch_dist.contents import (
    COMMON_FILE,
    CheckpointContents,
    check_unchanged,
    open_contents,
)
from dist_ckpt._formats.torch_dist.foreign import foreign_common, read_foreign_object
from dist_ckpt._formats.torch_dist.objects import COMMON_KEY, decode_document
from dist_ckpt._formats.torch_dist.read import Destination, read_into
from dist_ckpt._geometry import Box
from dist_ckpt._integrity.match import content_problems, describe_unexpected, holes, wanted_box
from dist_ckpt._planning.describe import dtype_from_name, local_shards
from dist_ckpt._state import LoadParts, merge_after_load, split_for_load
from dist_ckpt.errors import CheckpointingException, CheckpointNotFoundError, MismatchError
from dist_ckpt.mapping import ShardedObject, ShardedTensor
from dist_ckpt.storage import LocalStore
from dist_ckpt.validation import (
    RankView,
    StrictPolicy,
    check_objects,
    check_sharding,
    react,
    shortened,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dist_ckpt.options import LoadOptions
    from dist_ckpt.types import Communicator, ShardedStateDict, StateDict

__all__ = [
    "LoadResult",
    "open_checkpoint",
    "open_together",
    "read_common",
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


@dataclass(frozen=True, slots=True)
class _Request:
    """This rank's request, after keys that are not stored were taken out."""

    parts: LoadParts
    tensors: list[ShardedTensor]
    objects: list[ShardedObject]
    unexpected: list[str]
    view: RankView


def open_checkpoint(checkpoint_dir: Path) -> CheckpointContents:
    """Recognise and index a checkpoint. Not collective."""
    checkpoint_dir = Path(os.path.abspath(checkpoint_dir))  # noqa: PTH100 - resolve() follows links
    found = locate(checkpoint_dir)
    try:
        return open_contents(found)
    except CheckpointingException:
        # A re-save without an atomic exchange moves the old one aside and back into nothing.
        again = locate(checkpoint_dir)
        if again == found:
            raise
        return open_contents(again)


def open_together(
    checkpoint_dir: Path, comm: Communicator, *, check: Callable[[], object] = lambda: None
) -> CheckpointContents:
    """Recognise and index a checkpoint on rank 0, for all. Collective.

    ``check`` looks at each rank's arguments first; what it raises on one is raised on all.
    """
    return comm.map_reduce(
        f"opening {checkpoint_dir}",
        lambda: check() is None,
        lambda _: open_checkpoint(checkpoint_dir),
    )


def run_load(
    build: Callable[[], ShardedStateDict],
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
        lambda views: _agree(views, contents, policy, check_coverage=check_coverage),
    )
    state_dict = functools.cache(lambda: _read(request(), contents, options, common))
    comm.map_reduce(f"reading {where}", lambda: state_dict() is None, lambda _: None)
    return LoadResult(state_dict(), frozenset(request().unexpected), missing)


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
    for key in contents.objects:
        if "/shard_" in key:
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
    store = LocalStore(contents.directory)
    read_into(wanted, contents.index, store, thread_count=options.thread_count)
    return tensors


def _match(
    sharded_state_dict: ShardedStateDict,
    contents: CheckpointContents,
    policy: StrictPolicy,
    options: LoadOptions,
) -> _Request:
    """Take the request apart and compare it with what is stored. Every rank."""
    parts = split_for_load(sharded_state_dict)
    tensor_keys = {k for k, t in contents.index.tensors.items() if t.role == "tensor"}
    object_keys = {k for k, t in contents.index.tensors.items() if t.role == "object"}
    object_keys |= set(contents.objects)
    tensors = [t for t in parts.tensors if t.key in tensor_keys]
    objects = [o for o in parts.objects if o.unique_key in object_keys]
    unexpected = sorted(
        {t.key for t in parts.tensors if t.key not in tensor_keys}
        | {o.unique_key for o in parts.objects if o.unique_key not in object_keys}
    )
    lines = describe_unexpected(unexpected, tensor_keys | object_keys)
    react(policy, str(contents.directory), lines, ())
    problems = content_problems(tensors, contents.index, cast=options.cast == "allow")
    if problems:
        raise MismatchError(f"{contents.directory}: {shortened(problems)}")
    view = RankView(
        tuple(shard.info for shard in local_shards([t.without_data() for t in parts.tensors])),
        tuple(one.without_data() for one in parts.objects),
    )
    return _Request(parts, tensors, objects, unexpected, view)


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


def _read(
    request: _Request,
    contents: CheckpointContents,
    options: LoadOptions,
    common: StateDict | None,
) -> StateDict:
    """Fill the requested tensors, decode objects and put it all together. Every rank."""
    filled = {id(tensor): _target(tensor) for tensor in request.tensors}
    destinations = [
        Destination(
            tensor.key, wanted, view[wanted.relative_to(box).slices()] if box.shape else view
        )
        for tensor in request.tensors
        for box, view, wanted in _wanted(filled[id(tensor)], contents)
    ]
    store = LocalStore(contents.directory)
    read_into(destinations, contents.index, store, thread_count=options.thread_count)
    objects = {id(one): read_object(one, contents, options) for one in request.objects}
    tensors = {key: tensor.data for key, tensor in filled.items()}
    if common is None:
        common = read_common(contents, options)
    check_unchanged(contents)
    return merge_after_load(request.parts, common, tensors, objects)


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
