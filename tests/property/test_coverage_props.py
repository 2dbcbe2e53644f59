"""Coverage checks agree with a count of every single element."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_ckpt._sharding import coverage
from dist_ckpt._sharding.assign import assign_writers
from dist_ckpt._sharding.coverage import coverage_problems, overlaps, storage_problems
from dist_ckpt._sharding.shard_info import ShardInfo
from dist_ckpt.box import Box

SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)


@st.composite
def boxes_in(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    offset = [draw(st.integers(0, n)) for n in shape]
    extent = [draw(st.integers(0, n - o)) for n, o in zip(shape, offset, strict=True)]
    return Box(tuple(offset), tuple(extent))


@st.composite
def held(draw: st.DrawFn) -> tuple[tuple[int, ...], list[list[ShardInfo]]]:
    """Random boxes on random ranks: mostly wrong, sometimes a tiling."""
    shape = draw(SHAPES)
    ranks = draw(st.integers(1, 3))
    views: list[list[ShardInfo]] = [[] for _ in range(ranks)]
    pieces = draw(st.lists(boxes_in(shape), max_size=4))
    if draw(st.booleans()) and shape and shape[0]:
        at = draw(st.integers(0, shape[0]))
        pieces = [Box((0, *(0 for _ in shape[1:])), (at, *shape[1:]))]
        pieces.append(Box((at, *(0 for _ in shape[1:])), (shape[0] - at, *shape[1:])))
    for box in pieces:
        for rank in draw(st.sets(st.integers(0, ranks - 1), min_size=1)):
            main = draw(st.booleans())
            views[rank].append(info("x", box, shape, is_main=main))
    if not any(views):
        views[0].append(info("x", Box((0,) * len(shape), (0,) * len(shape)), shape))
    return shape, views


def info(key: str, box: Box, shape: tuple[int, ...], *, is_main: bool = True) -> ShardInfo:
    return ShardInfo(key, box, shape, "float32", is_main, "main", has_data=True)


def cells(box: Box) -> set[tuple[int, ...]]:
    return set(itertools.product(*(range(o, s) for o, s in zip(box.offset, box.stop, strict=True))))


@given(held())
def test_a_verdict_is_that_of_counting(
    case: tuple[tuple[int, ...], list[list[ShardInfo]]],
) -> None:
    """No problem is reported exactly if each element has exactly one main holder."""
    shape, views = case
    count: Counter[tuple[int, ...]] = Counter()
    for one in itertools.chain(*views):
        if one.is_main:
            count.update(cells(one.box))

    whole = cells(Box((0,) * len(shape), shape))
    right = all(count[cell] == 1 for cell in whole)

    assert (coverage_problems(views) == []) == right


@given(held())
def test_what_may_be_stored_is_stored_once(
    case: tuple[tuple[int, ...], list[list[ShardInfo]]],
) -> None:
    """Even where gaps are allowed, the plan writes no element twice."""
    _, views = case
    if storage_problems(views):
        return
    written: Counter[tuple[int, ...]] = Counter()
    for items in assign_writers(views):
        for item in items:
            written.update(cells(item.box))

    mains = set[tuple[int, ...]]().union(
        *(cells(one.box) for one in itertools.chain(*views) if one.is_main)
    )
    assert set(written) == mains
    assert set(written.values()) <= {1}


@given(SHAPES.flatmap(lambda shape: st.lists(boxes_in(shape), max_size=6)))
def test_overlaps_are_found_wherever_they_are(boxes: list[Box]) -> None:
    """The sweep finds an overlap if and only if comparing all pairs does."""
    full = [box for box in boxes if box.numel and box.shape]
    pairs = any(a.intersect(b) for a, b in itertools.combinations(full, 2))

    assert bool(overlaps(full)) == pairs


@given(st.integers(1, 3).flatmap(lambda axes: st.lists(boxes_in((6,) * axes), max_size=40)))
def test_parting_loses_no_pair(boxes: list[Box]) -> None:
    """Parted or compared one by one: the verdict is that of comparing each with each."""
    boxes = [box for box in boxes if box.numel]
    pairs = itertools.combinations(boxes, 2)
    expected = any(a.intersect(b) is not None for a, b in pairs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(coverage, "_MANY", 0)
        found = overlaps(boxes)

    assert bool(found) == expected
    assert all(a.intersect(b) is not None for a, b in found)


@pytest.mark.parametrize(
    "boxes",
    [
        [Box((i, i), (20_000, 1)) for i in range(10_000)],
        [Box((0, i), (20_000, 1)) for i in range(10_000)]
        + [Box((20_000 + i, 0), (1, 20_000)) for i in range(10_000)],
        [Box((i // 10 % 100, i % 10, i // 1000), (1, 1, 1)) for i in range(10_000)],
    ],
    ids=["diagonal", "rows-and-columns", "cells"],
)
def test_boxes_that_a_sweep_would_hold_for_long(boxes: list[Box]) -> None:
    """A few hundred kilobytes of an index must not take minutes."""
    compared = 0

    def counted(a: Box, b: Box) -> Box | None:
        nonlocal compared
        compared += 1
        return intersect(a, b)

    intersect = Box.intersect
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Box, "intersect", counted)
        assert overlaps(boxes) == []
        assert overlaps([*boxes, boxes[7]]) == [(boxes[7], boxes[7])]
    assert compared < 200 * len(boxes)
