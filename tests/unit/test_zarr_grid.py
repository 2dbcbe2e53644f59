"""Grids: one cell a box where boxes allow it, never tiny ones, never larger than the limit."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from dist_ckpt._formats.zarr.grid import (
    Grid,
    around,
    cells_of,
    choose_grid,
    split_on_grid,
    whole_cells,
)
from dist_ckpt.box import Box, boxes_of_flat_range

MIB = 1 << 20


def rows(shape: tuple[int, ...], *cuts: int, axis: int = 0) -> list[Box]:
    """Cut a tensor along one axis."""
    edges = [0, *cuts, shape[axis]]
    boxes = []
    for low, high in pairwise(edges):
        offset = [0] * len(shape)
        offset[axis] = low
        extent = list(shape)
        extent[axis] = high - low
        boxes.append(Box(tuple(offset), tuple(extent)))
    return boxes


@pytest.mark.parametrize("zarr_format", [2, 3])
@pytest.mark.parametrize(
    ("shape", "boxes", "cell"),
    [
        ((8, 6), rows((8, 6), 4), (4, 6)),
        ((10, 6), rows((10, 6), 3, 6, 9), (3, 6)),
        ((4, 8), rows((4, 8), 2, 4, 6, axis=1), (4, 2)),
        ((2, 3, 5), rows((2, 3, 5), 1), (1, 3, 5)),
        ((4, 4), [Box((i, j), (2, 2)) for i in (0, 2) for j in (0, 2)], (2, 2)),
        ((5,), [Box((0,), (5,))], (5,)),
        ((), [Box((), ())], ()),
        ((0, 3), [], (1, 3)),
    ],
)
def test_a_shard_of_a_small_tensor_is_a_cell(
    zarr_format: int, shape: tuple[int, ...], boxes: list[Box], cell: tuple[int, ...]
) -> None:
    """As Megatron-Core cut arrays; with a shorter one at the end where shards are uneven."""
    assert choose_grid(shape, boxes, 4, zarr_format) == Grid(cell, cell)


@pytest.mark.parametrize(
    "boxes",
    [
        rows((10, 4), 3, 6, 8),
        [box for r in ((0, 13), (13, 40)) for _, box in boxes_of_flat_range((10, 4), *r)],
    ],
    ids=["uneven", "flattened"],
)
def test_boxes_that_fit_no_grid_share_the_cells_of_a_small_tensor(boxes: list[Box]) -> None:
    """One file instead of one for every few bytes."""
    assert choose_grid((10, 4), boxes, 4, 2).cell == (10, 4)


def test_flattened_ranges_of_a_large_tensor_get_cells_of_rows() -> None:
    """Several whole rows each, most of them within one range."""
    shape = (4096, 1024)
    numel = math.prod(shape)
    cuts = [0, numel // 3 + 5, 2 * numel // 3 + 7, numel]
    ranges = [
        [box for _, box in boxes_of_flat_range(shape, low, high)] for low, high in pairwise(cuts)
    ]
    boxes = [box for of_range in ranges for box in of_range]

    for zarr_format in (2, 3):
        cell = choose_grid(shape, boxes, 4, zarr_format).cell
        inside = [b for b in (whole_cells(box, cell, shape) for box in boxes) if b]
        assert cell[1] == 1024
        assert math.prod(cell) * 4 >= 256 << 10
        assert sum(box.numel for box in inside) > 0.8 * numel


def test_uneven_columns_of_a_large_tensor_get_cells_of_columns() -> None:
    """The axis that no rank cuts stays whole."""
    shape = (4096, 1003)
    boxes = rows(shape, 335, 669, axis=1)

    cell = choose_grid(shape, boxes, 4, 2).cell

    assert cell[0] == 4096
    assert 16 <= cell[1] <= 32


@pytest.mark.parametrize(("zarr_format", "limit"), [(2, 16 * MIB), (3, 64 * MIB)])
@pytest.mark.parametrize(
    ("shape", "boxes"),
    [
        ((65536, 8192), rows((65536, 8192), 32768)),
        ((65536, 8192), rows((65536, 8192), 2048, 4096, 6144, axis=1)),
        ((3, 40000, 5000), rows((3, 40000, 5000), 1, 2)),
        ((1 << 30,), rows((1 << 30,), 1 << 28, 1 << 29)),
    ],
)
def test_large_shards_are_cut_without_leaving_the_grid(
    zarr_format: int, limit: int, shape: tuple[int, ...], boxes: list[Box]
) -> None:
    """Cells stay whole parts of shards, inner chunks whole parts of cells."""
    grid = choose_grid(shape, boxes, 4, zarr_format)

    assert math.prod(grid.cell) * 4 <= limit * 1.01
    assert all(whole_cells(box, grid.cell, shape) == box for box in boxes)
    assert all(c % i == 0 for c, i in zip(grid.cell, grid.inner, strict=True))
    inner_nbytes = math.prod(grid.inner) * 4
    assert inner_nbytes <= (2 * MIB if zarr_format == 3 else limit)
    assert inner_nbytes >= 256 << 10


def test_an_axis_with_better_divisors_is_cut() -> None:
    """233 rows are a prime number: columns are cut, not the rows into single ones."""
    shape = (932, 11184, 78)
    boxes = [Box((i * 233, j * 2796, 0), (233, 2796, 78)) for i in range(4) for j in range(4)]

    assert choose_grid(shape, boxes, 1, 2).cell == (233, 699, 78)


def test_a_shard_that_cannot_be_divided_stays_one_cell() -> None:
    """One large file rather than millions of one element each."""
    prime = 15_485_863
    boxes = rows((2 * prime,), prime)

    assert choose_grid((2 * prime,), boxes, 4, 2).cell == (prime,)


def test_pieces_end_on_the_grid() -> None:
    """At most so many bytes, or one cell."""
    box = Box((3, 0), (14, 10))
    pieces = list(split_on_grid(box, (4, 5), 1, 80))

    assert [piece.offset[0] for piece in pieces] == [3, 8, 16]
    assert sum(piece.numel for piece in pieces) == box.numel
    single = list(split_on_grid(box, (4, 5), 1, 1))
    assert len(single) == 10
    assert all(len(list(cells_of(piece, (4, 5)))) == 1 for piece in single)


def test_what_is_around_whole_cells_is_the_rest() -> None:
    """Boxes without whole cells are all rest."""
    box, cell, shape = Box((1, 2), (9, 8)), (4, 4), (10, 10)
    inside = whole_cells(box, cell, shape)

    assert inside == Box((4, 4), (6, 6))
    assert sum(part.numel for part in around(box, inside)) == box.numel - 36
    assert whole_cells(Box((1, 1), (2, 2)), cell, shape) is None
    assert list(around(box, None)) == [box]
