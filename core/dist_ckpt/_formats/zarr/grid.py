"""Grids of chunks, such that no two writers share one.

Here: pure arithmetic: which grid suits the boxes that ranks hold, and how boxes are cut along it.
Not here: who writes what (``plan``), files. Runs on rank 0; cutting runs on every rank.

A *cell* is what one file holds: a chunk in zarr v2, a shard in zarr v3. A cell has *inner* chunks,
the smallest pieces that can be read: its own extent in v2, a part of it in v3.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dist_ckpt.box import Box

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["Grid", "around", "cell_box", "cells_of", "choose_grid", "split_on_grid", "whole_cells"]

_CELL_NBYTES = {2: 16 << 20, 3: 64 << 20}
"""Largest file: other readers hold a whole chunk of v2 to read a part of it; a file is also what
one thread writes at a time."""

_INNER_NBYTES = 2 << 20
"""Largest inner chunk of a v3 shard: what reading one element costs other readers."""

_SMALL_NBYTES = 256 << 10
"""Below it a file costs more than its bytes: smaller cells only where boxes are as small."""

_BORDER_PARTS = 16
"""Cells of boxes that no grid fits: about so many along an axis of the largest box. The more, the
less lies in cells that several ranks share."""


@dataclass(frozen=True, slots=True)
class Grid:
    """Extents of a cell and of its inner chunks, in elements; ``inner`` divides ``cell``."""

    cell: tuple[int, ...]
    inner: tuple[int, ...]


@dataclass(slots=True)
class _Axis:
    """``extent`` of a cell; where ``fixed``, cells must go on dividing it."""

    extent: int
    fixed: bool


def choose_grid(
    shape: tuple[int, ...], boxes: Sequence[Box], itemsize: int, zarr_format: int
) -> Grid:
    """Return a grid for a tensor of ``shape`` of which ranks write ``boxes``.

    If the boxes lie on a regular grid, cells lie on it too and each belongs to one box; large cells
    are cut further. Boxes that fit no grid of reasonable cells (flattened ranges, uneven cuts) get
    cells that most of each box fills; what is left at their borders shares cells with others.

    Args:
        shape: Global shape.
        boxes: Distinct boxes with elements, within the shape.
        itemsize: Bytes of an element.
        zarr_format: 2 or 3.

    Depends on the arguments alone. Memory and time do not grow with the number of cells.
    """
    if not math.prod(shape):
        extents = tuple(max(n, 1) for n in shape)
        return Grid(extents, extents)
    steps = [_step(shape, boxes, axis) for axis in range(len(shape))]
    axes = [_Axis(step or n, fixed=bool(step)) for step, n in zip(steps, shape, strict=True)]
    count = math.prod(-(-n // axis.extent) for n, axis in zip(shape, axes, strict=True))
    if count > max(1, len(boxes)) and _nbytes(axes, itemsize) < _SMALL_NBYTES:
        axes = _uneven(shape, max(boxes, key=lambda box: box.numel), steps, itemsize)
    _shrink(axes, itemsize, _CELL_NBYTES[zarr_format])
    cell = tuple(axis.extent for axis in axes)
    if zarr_format == 2:  # noqa: PLR2004 - of zarr
        return Grid(cell, cell)
    inner = _rows(axes, itemsize)
    return Grid(tuple(-(-c // i) * i for c, i in zip(cell, inner, strict=True)), inner)


def _step(shape: tuple[int, ...], boxes: Sequence[Box], axis: int) -> int:
    """Return the greatest common divisor of all cuts across an axis, 0 if there is none."""
    cuts = {n for box in boxes for n in (box.offset[axis], box.stop[axis])}
    return math.gcd(*(cuts - {0, shape[axis]}))


def _uneven(
    shape: tuple[int, ...], largest: Box, steps: Sequence[int], itemsize: int
) -> list[_Axis]:
    """Return cells that go a few times into the largest box and on whose grid boxes need not lie.

    The last axes, which flattened ranges hold in full, stay whole, so that their pieces are rows.
    """
    axes, loose = [], []
    for axis, (n, extent, step) in enumerate(zip(shape, largest.shape, steps, strict=True)):
        if step and extent < n and 2 * step >= extent:
            axes.append(_Axis(step, fixed=True))
            continue
        if step and extent < n:
            loose.append(axis)
        axes.append(_Axis(extent if step else n, fixed=False))
    if not loose:
        loose = [axis for axis, step in enumerate(steps) if step][:1]
        for axis in loose:
            axes[axis].fixed = False
    room = max(1, _nbytes(axes, itemsize) // _SMALL_NBYTES)
    parts = min(_BORDER_PARTS, int(room ** (1 / len(loose))) if loose else 1)
    for axis in loose:
        axes[axis].extent = -(-axes[axis].extent // parts)
    for axis in reversed(loose):
        factor = -(-_SMALL_NBYTES // _nbytes(axes, itemsize))
        axes[axis].extent = min(shape[axis], axes[axis].extent * max(1, factor))
    return axes


def _nbytes(axes: Sequence[_Axis], itemsize: int) -> int:
    return math.prod(axis.extent for axis in axes) * itemsize


def _shrink(axes: Sequence[_Axis], itemsize: int, limit: int) -> None:
    """Cut cells down to ``limit`` bytes along the outermost axes, so that they stay contiguous.

    A fixed axis without a divisor near what is needed is passed over for the next one; without any,
    it is left (a large prime): one large file, not many tiny ones.
    """
    for slack in (4, 32):
        for axis in axes:
            need = min(-(-_nbytes(axes, itemsize) // limit), axis.extent)
            if not axis.fixed:
                axis.extent = -(-axis.extent // need)
                continue
            axis.extent = _divided(axis.extent, need, slack)


def _divided(extent: int, need: int, slack: int) -> int:
    """Return an extent cut into equal parts, at least ``need`` and few more; whole if none fit."""
    most = min(extent, slack * need)
    return extent // next((n for n in range(need, most + 1) if not extent % n), 1)


def _rows(axes: Sequence[_Axis], itemsize: int) -> tuple[int, ...]:
    """Return the extents of inner chunks: runs of rows, so that a shard lies as a tensor does.

    One of each outer axis, a part of the next one, the others in full. The extents of fixed axes
    are divided without a rest, those of others rounded up.
    """
    inner = [axis.extent for axis in axes]
    for number, axis in enumerate(axes):
        most = max(1, _INNER_NBYTES // (math.prod(inner[number + 1 :]) * itemsize))
        need = -(-axis.extent // most)
        if not axis.fixed:
            inner[number] = -(-axis.extent // need)
        else:
            divided = (_divided(axis.extent, need, slack) for slack in (1, 4, 32))
            inner[number] = next((n for n in divided if n < axis.extent), axis.extent)
        if inner[number] > 1:
            break
    return tuple(inner)


def split_on_grid(box: Box, cell: tuple[int, ...], itemsize: int, max_nbytes: int) -> Iterator[Box]:
    """Cut ``box`` along the grid into boxes of at most ``max_nbytes``, or of one cell if larger.

    Cuts run along the outermost axes first; boxes come in row-major order.
    """
    if box.numel * itemsize <= max_nbytes:
        yield box
        return
    spans = list(zip(box.offset, box.stop, cell, strict=True))
    several = [axis for axis, (low, high, c) in enumerate(spans) if low // c < (high - 1) // c]
    if not several:
        yield box
        return
    axis = several[0]
    start, stop, c = spans[axis]
    row_nbytes = box.numel // box.shape[axis] * itemsize
    step = max(1, max_nbytes // (row_nbytes * c)) * c
    while start < stop:
        end = min(stop, start // c * c + step)
        offset = (*box.offset[:axis], start, *box.offset[axis + 1 :])
        extent = (*box.shape[:axis], end - start, *box.shape[axis + 1 :])
        yield from split_on_grid(Box(offset, extent), cell, itemsize, max_nbytes)
        start = end


def whole_cells(box: Box, cell: tuple[int, ...], shape: tuple[int, ...]) -> Box | None:
    """Return the largest part of ``box`` made of whole cells; cells at the tensor's end are cut."""
    offset, extent = [], []
    for start, stop, c, n in zip(box.offset, box.stop, cell, shape, strict=True):
        low = -(-start // c) * c
        high = stop if stop == n else stop // c * c
        if high <= low:
            return None
        offset.append(low)
        extent.append(high - low)
    return Box(tuple(offset), tuple(extent))


def around(box: Box, hole: Box | None) -> Iterator[Box]:
    """Cut what ``box`` has outside of ``hole``, which lies in it, into boxes."""
    if hole is None:
        yield box
        return
    offset, stop = list(box.offset), list(box.stop)
    for axis, (low, high) in enumerate(zip(hole.offset, hole.stop, strict=True)):
        for start, end in ((offset[axis], low), (high, stop[axis])):
            if start < end:
                corner = (*offset[:axis], start, *offset[axis + 1 :])
                far = (*stop[:axis], end, *stop[axis + 1 :])
                yield Box(corner, tuple(b - a for a, b in zip(corner, far, strict=True)))
        offset[axis], stop[axis] = low, high


def cells_of(box: Box, cell: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yield the numbers of the cells that ``box`` touches, in row-major order."""
    spans = zip(box.offset, box.stop, cell, strict=True)
    return itertools.product(*(range(start // c, -(-stop // c)) for start, stop, c in spans))


def cell_box(numbers: tuple[int, ...], cell: tuple[int, ...], shape: tuple[int, ...]) -> Box:
    """Return the part of the tensor that a cell holds."""
    offset = tuple(i * c for i, c in zip(numbers, cell, strict=True))
    extent = (min(c, n - o) for o, c, n in zip(offset, cell, shape, strict=True))
    return Box(offset, tuple(extent))
