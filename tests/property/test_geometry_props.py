"""Laws of boxes, for any shape."""

from __future__ import annotations

import itertools
import math

from hypothesis import given
from hypothesis import strategies as st

from dist_ckpt.box import Box, boxes_of_flat_range, split_box


@st.composite
def boxes(draw: st.DrawFn, ndim: int) -> Box:
    """Draw a small box."""
    numbers = st.tuples(*[st.integers(0, 4)] * ndim)
    return Box(draw(numbers), draw(numbers))


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Box, Box]:
    """Draw two boxes of one tensor."""
    ndim = draw(st.integers(0, 3))
    return draw(boxes(ndim)), draw(boxes(ndim))


@st.composite
def ranges(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    """Draw a shape and a range of its elements."""
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=4)))
    ends = st.integers(0, math.prod(shape))
    start, stop = sorted((draw(ends), draw(ends)))
    return shape, start, stop


def points(box: Box) -> list[tuple[int, ...]]:
    """Return the coordinates in a box, in row-major order."""
    return list(itertools.product(*(range(s.start, s.stop) for s in box.slices())))


@given(pairs())
def test_intersect_holds_the_common_points(pair: tuple[Box, Box]) -> None:
    """All of them, nothing else, and None for none."""
    a, b = pair
    common = a.intersect(b)

    assert set(points(common) if common else []) == set(points(a)) & set(points(b))
    assert common == b.intersect(a)
    assert (common is None) == (not set(points(a)) & set(points(b)))


@given(pairs())
def test_intersect_is_idempotent_and_inside_of_both(pair: tuple[Box, Box]) -> None:
    """Cutting again changes nothing; relative coordinates lie in each box."""
    a, b = pair
    common = a.intersect(b)

    if common is not None:
        assert common.intersect(a) == common
        assert common.relative_to(a).within(a.shape)
        assert common.relative_to(b).within(b.shape)


@given(ranges())
def test_flat_range_boxes_tile_the_range_in_order(
    case: tuple[tuple[int, ...], int, int],
) -> None:
    """Box after box, row-major, they list exactly the elements of the range."""
    shape, start, stop = case
    whole = points(Box((0,) * len(shape), shape))
    found = list(boxes_of_flat_range(shape, start, stop))

    assert [p for _, box in found for p in points(box)] == whole[start:stop]
    sizes = [box.numel for _, box in found]
    assert [position for position, _ in found] == [sum(sizes[:i]) for i in range(len(sizes))]


@given(ranges())
def test_flat_range_boxes_are_few(case: tuple[tuple[int, ...], int, int]) -> None:
    """At most two for each axis but the outermost, and one for that; none is empty."""
    shape, start, stop = case
    found = list(boxes_of_flat_range(shape, start, stop))

    assert len(found) <= max(1, 2 * len(shape) - 1)
    assert all(box.numel and box.within(shape) for _, box in found)


@given(st.integers(0, 3).flatmap(boxes), st.integers(1, 8), st.integers(1, 200))
def test_split_box_tiles_the_box_in_order(box: Box, itemsize: int, max_nbytes: int) -> None:
    """Part after part lists the box's points; only a single element may exceed the limit."""
    parts = list(split_box(box, itemsize, max_nbytes))

    assert [p for part in parts for p in points(part)] == points(box)
    assert all(part.numel * itemsize <= max_nbytes or part.numel == 1 for part in parts)
