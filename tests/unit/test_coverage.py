"""What is told of gaps and overlaps: key, place and ranks, a few of each."""

from __future__ import annotations

from dist_ckpt._sharding.coverage import (
    agreement_problems,
    coverage_problems,
    overlaps,
    storage_problems,
)
from dist_ckpt._sharding.shard_info import ShardInfo
from dist_ckpt.box import Box


def info(offset: tuple[int, ...], shape: tuple[int, ...], size: tuple[int, ...],
         **options: object) -> ShardInfo:  # fmt: skip
    fields = {"key": "x", "dtype": "int8", "is_main": True, "writer": "main", "has_data": True}
    return ShardInfo(**{**fields, "box": Box(offset, shape), "global_shape": size, **options})  # type: ignore[arg-type]


def test_a_hole_in_the_middle() -> None:
    """The gap itself is told, not all that surrounds it."""
    size = (3, 3)
    ring = [info((0, 0), (1, 3), size), info((2, 0), (1, 3), size), info((1, 0), (1, 1), size),
            info((1, 2), (1, 1), size)]  # fmt: skip

    assert coverage_problems([ring]) == [
        "'x': [1:2, 1:2] is saved by no main replica (global shape (3, 3), ranks 0)"
    ]
    assert coverage_problems([[*ring, info((1, 1), (1, 1), size)]]) == []


def test_an_overlap_that_makes_up_for_a_gap() -> None:
    """Numbers of elements agree; places do not."""
    size = (4,)
    views = [[info((0,), (2,), size)], [info((1,), (2,), size)]]

    problems = coverage_problems(views)

    assert any("[0:2] and [1:3] overlap" in p for p in problems)
    assert any("[3:4] is saved by no main replica" in p for p in problems)


def test_0_dim_and_empty_tensors() -> None:
    """A value has one main replica; a tensor without elements needs none."""
    assert coverage_problems([[info((), (), ())]]) == []
    assert coverage_problems([[info((0, 0), (0, 3), (0, 3), is_main=False)]]) == []
    twice = coverage_problems([[info((), (), ())], [info((), (), ())]])
    assert twice == [
        "'x': the value has main replicas on ranks [0, 1] (global shape (), ranks 0, 1)"
    ]
    assert "the value is saved by no" in coverage_problems([[info((), (), (), is_main=False)]])[0]


def test_many_problems_stay_readable() -> None:
    """A few gaps of each tensor, a few ranks."""
    views = [[info((2 * i,), (1,), (1000,))] for i in range(40)]

    problems = coverage_problems(views)

    assert len(problems) <= 8
    assert "(40 in all)" in problems[0]


def test_agreement_of_ranks() -> None:
    """Dtype, shape and role, with the ranks of each opinion."""
    views = [[info((0,), (2,), (4,))], [info((2,), (2,), (4,), dtype="int16")],
             [info((2,), (2,), (4,))]]  # fmt: skip

    assert agreement_problems(views) == [
        "'x': ranks disagree on dtype: int8 on ranks [0, 2], int16 on ranks [1]"
    ]
    assert "also that of an object" in agreement_problems(
        [[info((0,), (2,), (2,)), info((0,), (2,), (2,), role="part")]]
    )[0]  # fmt: skip


def test_what_cannot_be_stored() -> None:
    """Places outside of the tensor, and main replicas without data."""
    assert storage_problems([[info((0,), (2,), (4,))]]) == []
    assert "outside of (4,)" in storage_problems([[info((3,), (2,), (4,), is_main=False)]])[0]
    assert "has no data" in storage_problems([[info((0,), (2,), (4,), has_data=False)]])[0]
    assert storage_problems([[info((0,), (2,), (4,), has_data=False, is_main=False)]]) == []


def test_overlaps_on_any_axis() -> None:
    """The axis that sorts best is not the one that overlaps."""
    boxes = [Box((i, 0), (1, 3)) for i in range(5)]

    assert overlaps([*boxes, Box((4, 2), (1, 2))]) == [(Box((4, 0), (1, 3)), Box((4, 2), (1, 2)))]
    assert overlaps([*boxes, Box((4, 3), (1, 2))]) == []
