"""The boxes that a rank wants, beside what is stored of them: this *is* resharding.

Here: ``Wanted``, and which bytes of which files are one run both in the file and in the box. Not
here: what is asked of a request (``_sharding.match``), how bytes move (``_formats``). Pure; runs
on each rank for its own boxes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from dist_ckpt._sharding.columns import stored_columns
from dist_ckpt._sharding.overlaps import complete, matrix, numel_of, overlaps_of, padded

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from dist_ckpt._sharding.columns import Stored
    from dist_ckpt._sharding.index import StoredTensor
    from dist_ckpt._sharding.overlaps import Overlaps
    from dist_ckpt._sharding.table import ShardTable
    from dist_ckpt.box import Box

__all__ = ["Runs", "Wanted", "beside", "boxes_of", "runs_of", "wanted_of", "whole_tensors"]


@dataclass(frozen=True, slots=True, eq=False)
class Wanted:
    """Boxes that are wanted, and where the chunks are that have their elements.

    Attributes:
        stored: What is stored of the keys.
        tensor: Number of each box's key in ``stored``, ``[n]``.
        offset: Of each box, cut to what the stored tensor has, ``[n, D]`` elements; all columns
            have one D, and what a tensor has not is offset 0 and shape 1.
        shape: The same.
        is_cut: Whether a box reaches beyond the stored tensor, ``[n]``.
        overlaps: Boxes and chunks with common elements.
        is_complete: Whether all elements of the box are stored, ``[n]``; False is no proof.
    """

    stored: Stored
    tensor: NDArray[Any]
    offset: NDArray[np.int64]
    shape: NDArray[np.int64]
    is_cut: NDArray[np.bool_]
    overlaps: Overlaps
    is_complete: NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Runs:
    """Bytes of files that are wanted in one piece of memory each.

    Attributes:
        files: Names of files.
        file: Number of the file, ``[m]``.
        position: First byte in the file, ``[m]``.
        nbytes: How many, ``[m]``.
        box: Number of the wanted box, ``[m]``.
        start: First byte within the box's row-major elements, ``[m]``.
    """

    files: Sequence[str]
    file: NDArray[np.int64]
    position: NDArray[np.int64]
    nbytes: NDArray[np.int64]
    box: NDArray[np.intp]
    start: NDArray[np.int64]


def wanted_of(table: ShardTable, tensors: Mapping[str, StoredTensor]) -> Wanted:
    """Return the boxes of a request beside what is stored; keys need not be stored.

    Raises:
        CheckpointingException: The index cannot be read.
    """
    return _joined(stored_columns(tensors, table.keys), table.key, table.offset, table.shape)


def boxes_of(
    keys: Sequence[str], boxes: Sequence[Box], tensors: Mapping[str, StoredTensor]
) -> Wanted:
    """Return boxes of tensors beside what is stored; ``keys`` has one for each box.

    Raises:
        CheckpointingException: The index cannot be read.
    """
    number = {key: at for at, key in enumerate(dict.fromkeys(keys))}
    depth = max((len(box.shape) for box in boxes), default=0)
    return _joined(
        stored_columns(tensors, list(number)),
        np.array([number[key] for key in keys], dtype=np.int64),
        matrix([box.offset for box in boxes], depth, fill=0),
        matrix([box.shape for box in boxes], depth, fill=1),
    )


def whole_tensors(keys: Sequence[str], tensors: Mapping[str, StoredTensor]) -> Wanted:
    """Return whole stored tensors as what is wanted, in the order of ``keys``, each there once.

    Raises:
        CheckpointingException: The index cannot be read.
    """
    stored = stored_columns(tensors, keys)
    whole = stored.whole
    return _joined(stored, np.arange(len(keys)), np.zeros_like(whole), whole)


def beside(wanted: Wanted, stored: Stored) -> Wanted:
    """Return the same boxes beside other chunks of the same tensors, of the same number of axes."""
    return _joined(stored, wanted.tensor, wanted.offset, wanted.shape)


def _joined(
    stored: Stored, tensor: NDArray[Any], offset: NDArray[np.int64], shape: NDArray[np.int64]
) -> Wanted:
    depth = max(offset.shape[1], stored.whole.shape[1])
    stored = replace(
        stored,
        whole=padded(stored.whole, depth, fill=1),
        offset=padded(stored.offset, depth, fill=0),
        shape=padded(stored.shape, depth, fill=1),
    )
    offset, told = padded(offset, depth, fill=0), padded(shape, depth, fill=1)
    reach = stored.whole[tensor] - offset
    shape = np.minimum(told, np.maximum(reach, 0))
    number = np.where(stored.is_there[tensor], tensor, -1)
    overlaps = overlaps_of(number, offset, shape, stored)
    return Wanted(
        stored,
        tensor,
        offset,
        shape,
        (shape != told).any(axis=1),
        overlaps,
        complete(shape, overlaps),
    )


def runs_of(wanted: Wanted, chosen: NDArray[np.bool_]) -> tuple[Runs, NDArray[np.bool_]]:
    """Return runs that fill boxes, and which of the ``chosen`` boxes ``[n]`` they fill.

    A box is filled by runs if it is complete, its chunks are plain bytes, and what it shares with
    each of them is one run in both. The others are left to those who copy piece by piece.
    """
    chunks, pairs = wanted.stored, wanted.overlaps
    inner, outer = chunks.shape[pairs.chunk], wanted.shape[pairs.box]
    is_run = _is_run(pairs.shape, inner) & _is_run(pairs.shape, outer)
    filled = chosen & wanted.is_complete & ~wanted.is_cut
    filled &= chunks.is_raw[wanted.tensor]
    filled[pairs.box[~is_run]] = False
    taken = np.flatnonzero(filled[pairs.box])
    box, chunk = pairs.box[taken], pairs.chunk[taken]
    offset, shape = pairs.offset[taken], pairs.shape[taken]
    itemsize = chunks.itemsize[chunks.tensor[chunk]]
    first = _element(offset - chunks.offset[chunk], inner[taken])
    runs = Runs(
        chunks.files,
        chunks.file[chunk],
        chunks.position[chunk] + first * itemsize,
        numel_of(shape) * itemsize,
        box,
        _element(offset - wanted.offset[box], outer[taken]) * itemsize,
    )
    return runs, filled


def _is_run(part: NDArray[np.int64], whole: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Whether each part is one run of the row-major elements of its whole.

    It is if, from the first axis on which it has more than one element, it has all of the axes that
    follow.
    """
    count, depth = part.shape
    begun = np.zeros(count, dtype=bool)
    result = np.ones(count, dtype=bool)
    for axis in range(depth):
        result &= ~begun | (part[:, axis] == whole[:, axis])
        begun |= part[:, axis] > 1
    return result


def _element(offset: NDArray[np.int64], shape: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the row-major number of the element at ``offset`` in a box of ``shape``."""
    number = np.zeros(len(offset), dtype=np.int64)
    for axis in range(offset.shape[1]):
        number = number * shape[:, axis] + offset[:, axis]
    return number
