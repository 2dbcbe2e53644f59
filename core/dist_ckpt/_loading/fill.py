"""Tensors filled with what is stored of them.

Here: the memory that a request offers, and fresh memory where it offers none. Not here: whether
request and checkpoint agree (``_loading.execute``), which bytes go where (``_sharding.wanted``),
reading them (``_formats.reading``). Not collective; runs on every rank for its own tensors.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from dist_ckpt._formats.documents import check_unchanged
from dist_ckpt._formats.reading import Destination, Target, read_wanted
from dist_ckpt._sharding.match import holes, same_dtype, wanted_box
from dist_ckpt._sharding.overlaps import numel_of
from dist_ckpt._sharding.shard_info import dtype_from_name, missing_memory
from dist_ckpt._sharding.table import local_shards
from dist_ckpt._sharding.wanted import wanted_of, whole_tensors
from dist_ckpt._staging_pool.memory import fill_zero, is_plain_memory
from dist_ckpt.box import Box
from dist_ckpt.errors import (
    CheckpointNotFoundError,
    CorruptedCheckpointError,
    InvalidShardingError,
    MismatchError,
)
from dist_ckpt.validation import shortened

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from dist_ckpt._formats.documents import CheckpointContents
    from dist_ckpt._sharding.table import ShardTable
    from dist_ckpt._sharding.wanted import Wanted
    from dist_ckpt.mapping import ShardedTensor
    from dist_ckpt.options import LoadOptions

__all__ = ["fill_tensors", "read_whole"]

_TENSORS = (torch.Tensor, torch.nn.Parameter)


def fill_tensors(
    tensors: Sequence[ShardedTensor],
    contents: CheckpointContents,
    options: LoadOptions,
    *,
    known: tuple[ShardTable, Wanted] | None = None,
) -> list[torch.Tensor]:
    """Return the data of tensors, filled in place where there is some.

    The keys, shapes and dtypes have been compared before.

    Args:
        tensors: What is wanted.
        contents: What is stored.
        options: How to read.
        known: The description of the same tensors, and that beside what is stored.

    Raises:
        CheckpointingException: What is stored cannot be read.
    """
    if known is None:
        table = local_shards(tensors, with_data=False).table
        known = table, wanted_of(table, contents.index.tensors)
    table, wanted = known
    data, plain = _memory(tensors)
    owner, first = _owners(tensors, table)
    numel = numel_of(table.shape)
    before = np.cumsum(numel) - numel
    start = (before - before[first]) * table.itemsize
    address = np.array(plain, dtype=np.int64)[owner]
    address = np.where((address != 0) & same_dtype(table, wanted), address + start, 0)

    def destinations(rows: Sequence[int]) -> Iterator[Destination]:
        for row in rows:
            tensor = replace(tensors[owner[row]], data=data[owner[row]])
            pieces = list(tensor.pieces())
            if not pieces:  # an empty range of a tensor without axes
                continue
            box, view = pieces[row - int(first[row])]
            stored = contents.index.tensors[tensor.key].shape
            inside = wanted_box(box, stored)
            if view is None:
                continue
            if inside != box:
                # allow_shape_mismatch: what the checkpoint does not have is zero.
                fill_zero(view)
            if inside is not None:
                part = view[inside.relative_to(box).slices()] if box.shape else view
                yield Destination(tensor.key, inside, part)

    has_elements = (table.shape != 0).all(axis=1)
    _fill(wanted, Target(address, has_elements, destinations), contents, options)
    return data


def read_whole(
    contents: CheckpointContents, keys: Sequence[str], options: LoadOptions
) -> list[torch.Tensor]:
    """Return whole tensors on the CPU. Not collective.

    Raises:
        CheckpointNotFoundError: A key is not stored.
        MismatchError: Only a part of a tensor is stored.
    """
    names = list(dict.fromkeys(keys))
    wanted = whole_tensors(names, contents.index.tensors)
    stored = wanted.stored
    if not stored.is_there.all():
        absent = [names[at] for at in np.flatnonzero(~stored.is_there).tolist()]
        raise CheckpointNotFoundError(f"{contents.directory}: {shortened(absent)} not stored.")
    boxes = [Box((0,) * len(shape), shape) for shape in map(stored.shape_of, range(len(names)))]
    problems = [
        problem
        for at in np.flatnonzero(~wanted.is_complete).tolist()
        for problem in holes(names[at], boxes[at], contents.index.tensors[names[at]])
    ]
    if problems:
        raise MismatchError(f"{contents.directory}: {shortened(problems)}")
    dtypes = [dtype_from_name(name) for name in stored.dtypes]
    tensors = [
        torch.empty(box.shape, dtype=dtypes[number])
        for box, number in zip(boxes, stored.dtype.tolist(), strict=True)
    ]
    address = np.array([one.data_ptr() for one in tensors], dtype=np.int64)

    def destinations(rows: Sequence[int]) -> Iterator[Destination]:
        return (Destination(names[row], boxes[row], tensors[row]) for row in rows)

    has_elements = (wanted.shape != 0).all(axis=1)
    _fill(wanted, Target(address, has_elements, destinations), contents, options)
    by_name = dict(zip(names, tensors, strict=True))
    given: set[str] = set()
    found = []
    for key in keys:
        found.append(by_name[key].clone() if key in given else by_name[key])
        given.add(key)
    return found


def _fill(
    wanted: Wanted, target: Target, contents: CheckpointContents, options: LoadOptions
) -> None:
    try:
        read_wanted(
            wanted,
            target,
            contents.index,
            contents.directory,
            files={} if options.verify == "off" else contents.files,
            thread_count=options.thread_count,
        )
    except (CorruptedCheckpointError, CheckpointNotFoundError):
        check_unchanged(contents)  # what was replaced meanwhile is no damage
        raise


def _owners(
    tensors: Sequence[ShardedTensor], table: ShardTable
) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return for each row of a description its tensor, and the first row of that tensor."""
    if len(table) == len(tensors):  # each has at least one
        rows = np.arange(len(table))
        return rows, rows
    counts = [
        1 if one.flattened_range is None else max(1, sum(1 for _ in one.without_data().pieces()))
        for one in tensors
    ]
    first = np.cumsum([0, *counts[:-1]])
    return np.repeat(np.arange(len(tensors)), counts), np.repeat(first, counts)


def _memory(tensors: Sequence[ShardedTensor]) -> tuple[list[torch.Tensor], list[int]]:
    """Return what to read into, and where that is if it is plain host memory as described, else 0.

    What to read into is the tensor's own data, or fresh memory.

    Raises:
        InvalidShardingError: Data has no memory that could be filled.
    """
    found, addresses = [], []
    simple: dict[torch.dtype, bool] = {}
    for tensor in tensors:
        data, dtype, shape = tensor.data, tensor.dtype, tensor.data_shape
        if data is None:
            data = torch.empty(shape, dtype=dtype)
        elif data.layout is torch.strided and (missing := missing_memory(data)) is not None:
            raise InvalidShardingError(f"{tensor.key!r}: {missing}.")
        elif not data.is_contiguous() and _overlaps_itself(data):
            data = torch.empty(shape, dtype=dtype, device=data.device)
        if dtype not in simple:
            simple[dtype] = not dtype.is_complex and not str(dtype).startswith("torch.q")
        is_plain = (
            data.is_cpu
            and type(data) in _TENSORS
            and data.layout is torch.strided
            and data.dtype is dtype
            and data.shape == shape
            and data.is_contiguous()
            and not data.is_neg()
            and (simple[dtype] or is_plain_memory(data))
        )
        found.append(data)
        addresses.append(data.data_ptr() if is_plain else 0)
    return found, addresses


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
