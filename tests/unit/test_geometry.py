"""Unit tests of dist_ckpt.box."""

from __future__ import annotations

import pytest

from dist_ckpt.box import Box, boxes_of_flat_range, split_box


def test_a_box_knows_its_extent() -> None:
    """Elements, end and slices."""
    box = Box((1, 2), (3, 4))

    assert (box.numel, box.stop) == (12, (4, 6))
    assert box.slices() == (slice(1, 4), slice(2, 6))
    assert (Box((), ()).numel, Box((), ()).slices()) == (1, ())


@pytest.mark.parametrize(
    ("offset", "shape", "says"),
    [((1,), (1, 2), "differ in length"), ((-1,), (1,), "negative"), ((0,), (-1,), "negative")],
)
def test_impossible_boxes_are_refused(
    offset: tuple[int, ...], shape: tuple[int, ...], says: str
) -> None:
    """No tensor has them."""
    with pytest.raises(ValueError, match=says):
        Box(offset, shape)


@pytest.mark.parametrize(
    ("global_shape", "inside"), [((4, 6), True), ((4, 5), False), ((4,), False), ((9, 9), True)]
)
def test_within(global_shape: tuple[int, ...], *, inside: bool) -> None:
    """The end counts, and so does the number of axes."""
    assert Box((1, 2), (3, 4)).within(global_shape) is inside


def test_intersect() -> None:
    """Boxes that only touch have nothing in common."""
    box = Box((0, 0), (4, 4))

    assert box.intersect(Box((2, 3), (9, 9))) == Box((2, 3), (2, 1))
    assert box.intersect(Box((4, 0), (1, 1))) is None
    assert box.intersect(Box((1, 1), (0, 2))) is None
    assert Box((), ()).intersect(Box((), ())) == Box((), ())
    with pytest.raises(ValueError, match="argument"):
        box.intersect(Box((0,), (1,)))


def test_relative_to() -> None:
    """Coordinates are counted from the corner of the outer box."""
    assert Box((3, 5), (1, 2)).relative_to(Box((2, 5), (4, 4))) == Box((1, 0), (1, 2))


def test_boxes_of_a_flat_range() -> None:
    """A ragged beginning, whole rows, a ragged end."""
    assert list(boxes_of_flat_range((4, 3), 2, 10)) == [
        (0, Box((0, 2), (1, 1))),
        (1, Box((1, 0), (2, 3))),
        (7, Box((3, 0), (1, 1))),
    ]


def test_boxes_of_special_ranges() -> None:
    """Nothing, a scalar, and all."""
    assert list(boxes_of_flat_range((4, 3), 5, 5)) == []
    assert list(boxes_of_flat_range((0, 3), 0, 0)) == []
    assert list(boxes_of_flat_range((), 0, 1)) == [(0, Box((), ()))]
    assert list(boxes_of_flat_range((4, 3), 0, 12)) == [(0, Box((0, 0), (4, 3)))]


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (0, 13)])
def test_ranges_outside_are_refused(start: int, stop: int) -> None:
    """Before anything is yielded."""
    with pytest.raises(ValueError, match="does not lie in a tensor of shape"):
        next(boxes_of_flat_range((4, 3), start, stop))


def test_split_box_cuts_along_the_outermost_axes() -> None:
    """Each part is within the limit and contiguous in the box; small boxes stay whole."""
    box = Box((5, 0), (3, 4))

    assert list(split_box(box, 2, 24)) == [box]
    assert list(split_box(box, 2, 16)) == [Box((5, 0), (2, 4)), Box((7, 0), (1, 4))]
    assert [b.shape for b in split_box(box, 2, 4)] == [(1, 2)] * 6
    assert [b.offset for b in split_box(Box((1,), (2,)), 8, 1)] == [(1,), (2,)]
    assert list(split_box(Box((), ()), 8, 1)) == [Box((), ())]
