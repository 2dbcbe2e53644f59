"""What is accepted at once has no problem; whole checks say what they say one by one."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_ckpt._sharding.coverage import (
    agreement_problems,
    coverage_problems,
    overlaps,
    storage_problems,
)
from dist_ckpt._sharding.proofs import agreeing_keys, disjoint_keys, storable_keys, tiled_keys
from dist_ckpt._sharding.shard_info import ShardInfo
from dist_ckpt._sharding.together import JobTable
from dist_ckpt.box import Box, boxes_of_flat_range
from dist_ckpt.errors import InvalidShardingError
from dist_ckpt.validation import check_sharding, check_storable

SHAPES = [(), (0,), (5,), (4, 3), (2, 0), (2, 3, 2)]


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    offset = [draw(st.integers(0, n)) for n in shape]
    extent = [draw(st.integers(0, n - o + 1)) for n, o in zip(shape, offset, strict=True)]
    return Box(tuple(offset), tuple(extent))


@st.composite
def tilings(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """A grid of straight cuts, or the pieces of a cut row-major run."""
    if draw(st.booleans()):
        cuts = [sorted({0, n, *draw(st.sets(st.integers(0, n)))}) for n in shape]
        axes = [list(itertools.pairwise(one)) for one in cuts]
        return [
            Box(tuple(a for a, _ in cell), tuple(b - a for a, b in cell))
            for cell in itertools.product(*axes)
        ]
    total = int(np.prod(shape, dtype=np.int64))
    at = sorted({0, total, *draw(st.sets(st.integers(0, total), max_size=3))})
    return [box for a, b in itertools.pairwise(at) for _, box in boxes_of_flat_range(shape, a, b)]


@st.composite
def views(draw: st.DrawFn) -> list[list[ShardInfo]]:
    """Several tensors on several ranks: right ones, replicated ones, wrong ones."""
    found: list[list[ShardInfo]] = [[] for _ in range(draw(st.integers(1, 3)))]
    for key in ("a", "b", "c"):
        shape = draw(st.sampled_from(SHAPES))
        pieces = draw(tilings(shape) if draw(st.booleans()) else st.lists(boxes(shape), max_size=4))
        writer = draw(st.sampled_from(["main", "first", "any"]))
        for box in pieces:
            ranks = sorted(draw(st.sets(st.integers(0, len(found) - 1), min_size=1)))
            for rank in ranks:
                main = rank == ranks[0] if draw(st.integers(0, 5)) else draw(st.booleans())
                data = bool(draw(st.integers(0, 5)))
                whole = shape if draw(st.integers(0, 20)) else tuple(n + 1 for n in shape)
                found[rank].append(ShardInfo(key, box, whole, "int8", main, writer, data))
    return found


@given(views())
def test_what_is_accepted_has_no_problem(case: list[list[ShardInfo]]) -> None:
    """Key by key."""
    job = JobTable(case)
    agreed = set(np.flatnonzero(agreeing_keys(job)).tolist())
    for number, key in enumerate(job.keys):
        alone = [[one for one in view if one.key == key] for view in case]
        assert (agreement_problems(alone) == []) == (number in agreed)
        if number in agreed:
            assert not (storable_keys(job)[number] and storage_problems(alone))
            assert not (tiled_keys(job)[number] and coverage_problems(alone))


@given(views(), st.booleans())
def test_a_check_says_what_the_exact_ones_say(case: list[list[ShardInfo]], coverage: bool) -> None:
    """With and without the columns."""
    exact = agreement_problems(case)
    exact = exact or (coverage_problems(case) if coverage else [])

    assert bool(exact) == _refuses(lambda: check_sharding(case, coverage=coverage))
    if not agreement_problems(case):
        assert bool(storage_problems(case)) == _refuses(lambda: check_storable(case))


def _refuses(check: object) -> bool:
    try:
        check()  # type: ignore[operator]  # a function
    except InvalidShardingError:
        return True
    return False


@given(st.data())
def test_disjoint_is_proved_for_grids_and_runs(data: st.DataObject) -> None:
    """All of them; and never for boxes that overlap or lie outside."""
    shapes = data.draw(st.lists(st.sampled_from(SHAPES), min_size=1, max_size=3))
    pieces = [
        [box for box in data.draw(tilings(shape)) if box.numel]
        for shape in shapes
    ]  # fmt: skip
    others = [
        [box for box in data.draw(st.lists(boxes(shape), max_size=3)) if box.numel]
        for shape in shapes
    ]

    assert _disjoint(shapes, pieces).all()
    proved = _disjoint(shapes, others)
    for shape, found, is_proved in zip(shapes, others, proved, strict=True):
        if is_proved:
            assert all(box.within(shape) for box in found)
            assert overlaps(found) == []
            assert len(set(found)) == len(found)


def _disjoint(shapes: list[tuple[int, ...]], pieces: list[list[Box]]) -> np.ndarray:  # type: ignore[type-arg]  # of bool
    depth = max(map(len, shapes))
    rows = [(number, box) for number, found in enumerate(pieces) for box in found]

    def padded(sizes: list[tuple[int, ...]], fill: int) -> np.ndarray:  # type: ignore[type-arg]  # of int64
        full = [(*size, *(fill,) * (depth - len(size))) for size in sizes]
        return np.array(full, dtype=np.int64).reshape(len(sizes), depth)

    return disjoint_keys(
        np.array([number for number, _ in rows], dtype=np.int64),
        padded([box.offset for _, box in rows], 0),
        padded([box.shape for _, box in rows], 1),
        padded(shapes, 1),
    )


@pytest.mark.parametrize("whole", [(1 << 62, 4), (1 << 40, 1 << 40), (1, 1 << 62)])
def test_what_64_bits_do_not_hold_is_left_to_the_exact_check(whole: tuple[int, ...]) -> None:
    """Nothing wraps around into a proof."""
    half = Box((0, 0), (whole[0] // 2 or 1, whole[1]))

    assert not _disjoint([whole], [[half]]).any()
    with pytest.raises(InvalidShardingError, match="saved by no main replica"):
        check_sharding(
            [[ShardInfo("x", Box((0, 0), (1, 2)), whole, "int8", True, "main", True)]],
            coverage=True,
        )
