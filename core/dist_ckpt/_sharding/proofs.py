"""Proofs for many boxes at once that all is well; what is not proved here is looked at one by one.

Here: pure checks over columns that accept a tensor or leave it open. Not here: the exact checks,
which find and name what is wrong (``_sharding.coverage``). Accepting is a proof; not accepting
says nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from dist_ckpt._sharding.table import DATA, MAIN
from dist_ckpt._sharding.together import LARGEST, JobTable

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["agreeing_keys", "disjoint_keys", "storable_keys", "tiled_keys"]

_WRITER_BITS = 3 << 2


def disjoint_keys(
    tensor: NDArray[Any],
    offset: NDArray[np.int64],
    shape: NDArray[np.int64],
    global_shape: NDArray[np.int64],
) -> NDArray[np.bool_]:
    """Return for which tensors it is proved that their boxes lie inside and share no element.

    Two proofs: each box is one run of the row-major elements, and the runs follow each other; or
    the boxes are different cells of one grid of straight cuts.

    Args:
        tensor: Number of each box's tensor, ``[n]``.
        offset: Of each box, which has elements, ``[n, D]``; what a tensor has not is 0.
        shape: The same; what a tensor has not is 1.
        global_shape: Of each tensor, ``[t, D]``; what it has not is 1.

    Returns:
        ``[t]``; True for tensors without boxes.
    """
    count, depth = global_shape.shape
    rejected = np.prod(global_shape.astype(np.float64), axis=1) >= LARGEST
    rejected |= (global_shape < 0).any(axis=1)
    whole = global_shape[tensor]
    outside = ((offset < 0) | (shape < 1) | (shape > whole - offset)).any(axis=1)
    rejected[tensor[outside]] = True
    rows = np.flatnonzero(~rejected[tensor])
    tensor, offset, shape = tensor[rows], offset[rows], shape[rows]
    strides = np.ones((count, depth), dtype=np.int64)
    for axis in range(depth - 2, -1, -1):
        strides[:, axis] = strides[:, axis + 1] * np.where(rejected, 1, global_shape[:, axis + 1])
    first = (offset * strides[tensor]).sum(axis=1)
    end = first + ((shape - 1) * strides[tensor]).sum(axis=1) + 1
    no_runs = np.zeros(count, dtype=bool)
    no_runs[tensor[end - first != shape.prod(axis=1)]] = True
    order = _sorted(tensor, first)
    near = order[1:], order[:-1]
    clash = (tensor[near[0]] == tensor[near[1]]) & (first[near[0]] < end[near[1]])
    no_runs[tensor[near[0][clash]]] = True
    left = np.flatnonzero(no_runs[tensor])
    if len(left):
        cells = _cells_of_grid(tensor[left], offset[left], shape[left], first[left], global_shape)
        no_runs &= ~cells
    proved: NDArray[np.bool_] = ~(rejected | no_runs)
    return proved


def _sorted(tensor: NDArray[Any], first: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the order by tensor and first element; what is stored mostly has it already."""
    rising = (tensor[1:] > tensor[:-1]) | ((tensor[1:] == tensor[:-1]) & (first[1:] >= first[:-1]))
    return np.arange(len(tensor)) if rising.all() else np.lexsort((first, tensor))


def _cells_of_grid(
    tensor: NDArray[Any],
    offset: NDArray[np.int64],
    shape: NDArray[np.int64],
    first: NDArray[np.int64],
    global_shape: NDArray[np.int64],
) -> NDArray[np.bool_]:
    """Return for which tensors each box reaches, on each axis, to where the next cut is.

    Boxes with different corners are different cells then.
    """
    is_grid = np.ones(len(global_shape), dtype=bool)
    order = _sorted(tensor, first)
    same = (tensor[order[1:]] == tensor[order[:-1]]) & (first[order[1:]] == first[order[:-1]])
    is_grid[tensor[order[1:]][same]] = False
    for axis in range(offset.shape[1]):
        order = np.lexsort((offset[:, axis], tensor))
        owner, at = tensor[order], offset[order, axis]
        is_new = np.ones(len(at), dtype=bool)
        is_new[1:] = (owner[1:] != owner[:-1]) | (at[1:] != at[:-1])
        cuts, owners = at[is_new], owner[is_new]
        following = global_shape[owners, axis]
        inner = owners[1:] == owners[:-1]
        following[:-1][inner] = cuts[1:][inner]
        reached = at + shape[order, axis] == following[np.cumsum(is_new) - 1]
        is_grid[owner[~reached]] = False
    return is_grid


def agreeing_keys(job: JobTable) -> NDArray[np.bool_]:
    """Return on which keys all ranks tell the same dtype, global shape and role. Exact."""
    agreed = np.ones(len(job.keys), dtype=bool)
    first = job.first_rows[job.key]
    differs = (job.dtype != job.dtype[first]) | (job.ndim != job.ndim[first])
    differs |= (job.flags >> 4) != (job.flags[first] >> 4)
    differs |= (job.sizes[2] != job.sizes[2, first]).any(axis=1)
    agreed[job.key[differs]] = False
    return agreed


def storable_keys(job: JobTable) -> NDArray[np.bool_]:
    """Return for which keys ``coverage.storage_problems`` is sure to find nothing."""
    holders = job.flags[job.boxes.rows]
    accepted = _boxes_disjoint(job)
    no_data = (holders & DATA) == 0
    accepted[job.key[job.boxes.rows[no_data]]] = False
    mains, has_main_writer = _mains(job)
    accepted[job.key[job.boxes.first[has_main_writer & (mains == 0)]]] = False
    return accepted


def tiled_keys(job: JobTable) -> NDArray[np.bool_]:
    """Return for which keys ``coverage.coverage_problems`` is sure to find nothing."""
    accepted = _boxes_disjoint(job)
    boxes = job.boxes
    mains, has_main_writer = _mains(job)
    accepted[job.key[boxes.first[has_main_writer & (mains != 1)]]] = False
    whole = job.sizes[2, job.first_rows]
    numel = np.where(accepted, whole.prod(axis=1), 0)
    stored = np.zeros(len(job.keys), dtype=np.int64)
    sizes = job.sizes[1, boxes.first]
    of_key = job.key[boxes.first]
    fine = accepted[of_key]
    np.add.at(stored, of_key[fine], sizes[fine].prod(axis=1))
    tiled: NDArray[np.bool_] = accepted & (stored == numel)
    return tiled


def _boxes_disjoint(job: JobTable) -> NDArray[np.bool_]:
    first = job.boxes.first
    whole = job.sizes[2, job.first_rows]
    return disjoint_keys(job.key[first], job.sizes[0, first], job.sizes[1, first], whole)


def _mains(job: JobTable) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    """Return for each box how many main replicas it has, and whether only those may write it."""
    boxes = job.boxes
    if not len(boxes.starts):
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=bool)
    flags = job.flags[boxes.rows]
    mains = np.add.reduceat((flags & MAIN) != 0, boxes.starts, dtype=np.int64)
    return mains, np.logical_or.reduceat((flags & _WRITER_BITS) == 0, boxes.starts)
