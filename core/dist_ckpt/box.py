"""Boxes: axis-aligned pieces of a global tensor, in elements.

Here: pure arithmetic on tuples of python ints (no torch, so no overflow). Not here: who holds or
stores a box (``_sharding``), whether boxes cover a tensor (``_sharding``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["Box", "boxes_of_flat_range", "is_regular_place", "split_box"]

_INT = {int}
_TUPLE = {tuple}


@dataclass(frozen=True, slots=True, order=True)
class Box:
    """A box of a global tensor: ``offset`` and ``shape`` per axis, in elements.

    A 0-dim tensor is the box with empty tuples and holds one element.
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        """Refuse boxes that no tensor has."""
        if len(self.offset) != len(self.shape):
            raise ValueError(f"offset {self.offset} and shape {self.shape} differ in length")
        if self.shape and min(*self.offset, *self.shape) < 0:
            raise ValueError(f"negative extent in box {self.offset} {self.shape}")

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def stop(self) -> tuple[int, ...]:
        """First coordinate past the box, per axis."""
        return tuple(o + n for o, n in zip(self.offset, self.shape, strict=True))

    def within(self, global_shape: tuple[int, ...]) -> bool:
        """Whether the box lies inside a tensor of ``global_shape``."""
        return len(global_shape) == len(self.shape) and all(
            stop <= size for stop, size in zip(self.stop, global_shape, strict=True)
        )

    def intersect(self, other: Box) -> Box | None:
        """Return the common box, or None when no element is common."""
        offset, shape = [], []
        for a, n, b, m in zip(self.offset, self.shape, other.offset, other.shape, strict=True):
            start, stop = max(a, b), min(a + n, b + m)
            if stop <= start:
                return None
            offset.append(start)
            shape.append(stop - start)
        return Box(tuple(offset), tuple(shape))

    def relative_to(self, outer: Box) -> Box:
        """Return the same box with coordinates counted from ``outer``'s corner."""
        return Box(tuple(a - b for a, b in zip(self.offset, outer.offset, strict=True)), self.shape)

    def slices(self) -> tuple[slice, ...]:
        """Return one slice per axis, to index a tensor with."""
        return tuple(slice(o, o + n) for o, n in zip(self.offset, self.shape, strict=True))


def is_regular_place(
    shape: tuple[int, ...],
    global_shape: tuple[int, ...],
    offset: tuple[int, ...],
    fragmentations: tuple[int, ...] | None,
) -> bool:
    """Whether these are plain tuples of ints, and a box of ``shape`` can lie there.

    Not negative, within the global shape and, where ``fragmentations`` (all positive) say that the
    boxes are a regular grid, at a multiple of its own shape. Nothing is said of other types.
    """
    cells = (1,) * len(shape) if fragmentations is None else fragmentations
    fields = (shape, global_shape, offset, cells)
    if set(map(type, fields)) != _TUPLE or len(set(map(len, fields))) != 1:
        return False
    numbers = shape + global_shape + offset + cells
    if numbers and (set(map(type, numbers)) != _INT or min(numbers) < 0 or 0 in cells):
        return False
    if shape == global_shape and not any(offset):
        return True
    return all(
        o + n <= size and (fragmentations is None or n == 0 or o % n == 0)
        for o, n, size in zip(offset, shape, global_shape, strict=True)
    )


def boxes_of_flat_range(shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[int, Box]]:
    """Cut the range ``[start, stop)`` of a row-major flattened tensor into boxes of the tensor.

    Yields ``(position, box)`` in order: the box holds the elements of the range from ``position``
    (counted from ``start``) on, in row-major order, so each box is contiguous in the range. At most
    ``2 * len(shape) - 1`` boxes come out, one for a 0-dim tensor.
    """
    if not 0 <= start <= stop <= math.prod(shape):
        raise ValueError(f"range [{start}, {stop}) does not lie in a tensor of shape {shape}")
    if start == stop:
        return
    if not shape:
        yield 0, Box((), ())
        return
    at = start
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    while at < stop:
        # The outermost axis whose stride divides the position and fits: take as many rows as lie
        # before the end of the range and before the next row of the axis outside of it.
        axis = next(a for a, s in enumerate(strides) if at % s == 0 and at + s <= stop)
        stride = strides[axis]
        index = tuple(at // s % n for s, n in zip(strides, shape, strict=True))
        count = min((stop - at) // stride, shape[axis] - index[axis])
        extent = (*(1 for _ in shape[:axis]), count, *shape[axis + 1 :])
        yield at - start, Box((*index[: axis + 1], *(0 for _ in shape[axis + 1 :])), extent)
        at += count * stride


def split_box(box: Box, itemsize: int, max_nbytes: int) -> Iterator[Box]:
    """Cut ``box`` into boxes of at most ``max_nbytes``, in row-major order.

    Cuts run along the outermost axes first, so each piece is contiguous within ``box``.
    """
    if box.numel * itemsize <= max_nbytes or box.numel <= 1:
        yield box
        return
    axis = next(i for i, n in enumerate(box.shape) if n > 1)
    row = box.numel // box.shape[axis] * itemsize
    step = max(1, max_nbytes // row)
    for start in range(0, box.shape[axis], step):
        count = min(step, box.shape[axis] - start)
        offset = (*box.offset[:axis], box.offset[axis] + start, *box.offset[axis + 1 :])
        shape = (*box.shape[:axis], count, *box.shape[axis + 1 :])
        yield from split_box(Box(offset, shape), itemsize, max_nbytes)
