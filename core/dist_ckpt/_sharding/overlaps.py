"""Which stored chunks have elements of which wanted boxes, column by column.

Here: wanted boxes joined with chunks, and whether they are complete. Not here: where the columns of
the chunks come from (``_sharding.columns``), which bytes are read how (``_sharding.reads``).
Pure; runs on each rank for its own boxes.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from dist_ckpt._sharding.columns import Stored

__all__ = ["Overlaps", "clipped", "complete", "matrix", "numel_of", "overlaps_of", "padded"]

_PAIRS = 1 << 18
"""Pairs of box and chunk that are looked at together: some 20 MB for tensors of two axes."""

_HUGE = (1 << 63) - 1
_LARGEST = float(1 << 62)


@dataclass(frozen=True, slots=True, eq=False)
class Overlaps:
    """Pairs of a wanted box and a chunk with common elements, in the order of the boxes.

    Attributes:
        box: Number of the wanted box, ``[m]``.
        chunk: Row of the chunk, ``[m]``.
        offset: Of what is common, in elements of the global tensor, ``[m, D]``; D is that of the
            chunks.
        shape: The same.
    """

    box: NDArray[np.intp]
    chunk: NDArray[np.intp]
    offset: NDArray[np.int64]
    shape: NDArray[np.int64]


def padded(sizes: NDArray[np.int64], depth: int, *, fill: int) -> NDArray[np.int64]:
    """Return ``[n, d]`` as ``[n, depth]``; what is added is ``fill``."""
    count, have = sizes.shape
    if have >= depth:
        return sizes
    result = np.full((count, depth), fill, dtype=np.int64)
    result[:, :have] = sizes
    return result


def clipped(sizes: list[int]) -> NDArray[np.int64]:
    """Return sizes as a column; what other writers' metadata tell may be larger than fits."""
    try:
        return np.array(sizes, dtype=np.int64)
    except OverflowError:
        return np.array([min(max(n, -_HUGE), _HUGE) for n in sizes], dtype=np.int64)


def matrix(rows: Sequence[tuple[int, ...]], depth: int, *, fill: int) -> NDArray[np.int64]:
    """Return rows of different lengths as ``[n, depth]``; what a row has not is ``fill``."""
    result = np.full((len(rows), depth), fill, dtype=np.int64)
    there = np.arange(depth) < np.fromiter(map(len, rows), np.int64, len(rows))[:, None]
    result[there] = clipped(list(chain.from_iterable(rows)))
    return result


def numel_of(shape: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the number of elements of each box of ``[n, D]``."""
    found: NDArray[np.int64] = shape.prod(axis=1, dtype=np.int64)
    return found


def overlaps_of(
    tensor: NDArray[Any], offset: NDArray[np.int64], shape: NDArray[np.int64], chunks: Stored
) -> Overlaps:
    """Return where wanted boxes and chunks overlap.

    Args:
        tensor: Number of each box's tensor in ``chunks``, ``[n]``; below zero if it has none.
        offset: Of each box, ``[n, D]`` with the D of ``chunks``; no box reaches beyond 2 ** 62.
        shape: The same; a box may be empty.
        chunks: What is stored.
    """
    order, first, counts = _rows_by_tensor(chunks.tensor, len(chunks.keys))
    has_tensor = tensor >= 0
    wanted = np.where(has_tensor, tensor, 0)
    count = np.where(has_tensor & (shape > 0).all(axis=1), _at(counts, wanted), 0)
    begin = _at(first, wanted)
    wanted_axes = list(zip(offset.T, (offset + shape).T, strict=True))
    stored_axes = list(zip(chunks.offset.T, (chunks.offset + chunks.shape).T, strict=True))
    parts: list[tuple[NDArray[Any], ...]] = []
    for start, end in _batches(count):
        here = count[start:end]
        box = np.repeat(np.arange(start, end), here)
        row = order[
            np.repeat(begin[start:end] + here - np.cumsum(here), here) + np.arange(len(box))
        ]
        for (low, high), (first_stored, stored_end) in zip(wanted_axes, stored_axes, strict=True):
            common = (low[box] < stored_end[row]) & (first_stored[row] < high[box])
            if not common.all():
                box, row = box[common], row[common]
        from_ = np.maximum(offset[box], chunks.offset[row])
        to = np.minimum(offset[box] + shape[box], chunks.offset[row] + chunks.shape[row])
        parts.append((box, row, from_, to - from_))
    if len(parts) == 1:
        return Overlaps(*parts[0])
    depth = chunks.offset.shape[1]
    none = np.empty(0, np.intp), np.empty(0, np.intp)
    empty = (*none, np.empty((0, depth), np.int64), np.empty((0, depth), np.int64))
    return Overlaps(*(np.concatenate(columns) for columns in zip(empty, *parts, strict=True)))


def _rows_by_tensor(
    tensor: NDArray[np.int64], count: int
) -> tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.intp]]:
    """Return rows by tensor; for each tensor where its rows begin there, and how many it has."""
    counts = np.bincount(tensor, minlength=count)
    if bool((tensor[1:] >= tensor[:-1]).all()):
        order = np.arange(len(tensor))
    else:
        order = np.argsort(tensor, kind="stable")
    return order, np.cumsum(counts) - counts, counts


def _at(values: NDArray[np.intp], numbers: NDArray[Any]) -> NDArray[np.intp]:
    return values[numbers] if len(values) else np.zeros(len(numbers), np.intp)


def _batches(counts: NDArray[Any]) -> list[tuple[int, int]]:
    """Cut boxes into runs with at most ``_PAIRS`` pairs, or one box."""
    ends = np.cumsum(counts)
    cuts, start = [], 0
    while start < len(counts):
        before = int(ends[start - 1]) if start else 0
        end = max(int(np.searchsorted(ends, before + _PAIRS, side="right")), start + 1)
        cuts.append((start, end))
        start = end
    return cuts


def complete(shape: NDArray[np.int64], overlaps: Overlaps) -> NDArray[np.bool_]:
    """Return for which wanted boxes of ``shape`` all elements are stored.

    Chunks of a tensor share no element, so counting proves it. False is no proof: boxes too large
    to count are left to exact code.
    """
    have = np.zeros(len(shape), dtype=np.int64)
    np.add.at(have, overlaps.box, numel_of(overlaps.shape))
    small = np.prod(shape.astype(np.float64), axis=1) < _LARGEST
    found: NDArray[np.bool_] = small & (have == numel_of(shape))
    return found
