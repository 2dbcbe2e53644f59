"""Plans for arrays: every element by one rank, every cell by one rank, whatever ranks hold."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dist_ckpt import ShardedTensor
from dist_ckpt._formats.zarr import grid as grids
from dist_ckpt._formats.zarr.grid import (
    around,
    cell_box,
    cells_of,
    choose_grid,
    split_on_grid,
    whole_cells,
)
from dist_ckpt._formats.zarr.layout import is_by_rows
from dist_ckpt._formats.zarr.names import paths_of_keys
from dist_ckpt._formats.zarr.plan import plan_arrays
from dist_ckpt._sharding.shard_info import ShardInfo
from dist_ckpt.box import Box, boxes_of_flat_range
from dist_ckpt.storage.base import checked_name
from tests._samples import sample
from tests.unit._zarr import boxes_of, read_box, save_ranks

SHAPES = st.lists(st.integers(1, 9), min_size=0, max_size=3).map(tuple)


@st.composite
def partitions(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """A shape and boxes that tile it: guillotine cuts, or flattened ranges."""
    shape = draw(SHAPES)
    if draw(st.booleans()):
        numel = math.prod(shape)
        cuts = sorted(draw(st.lists(st.integers(0, numel), max_size=4)))
        edges = [0, *cuts, numel]
        ranges = pairwise(edges)
        return shape, [box for r in ranges for _, box in boxes_of_flat_range(shape, *r)]
    boxes = [Box((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 5)) if shape else 0):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        axis = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, box.shape[axis]))
        low, high = list(box.shape), list(box.shape)
        low[axis], high[axis] = at, box.shape[axis] - at
        corner = list(box.offset)
        corner[axis] += at
        halves = [Box(box.offset, tuple(low)), Box(tuple(corner), tuple(high))]
        boxes += [half for half in halves if half.numel]
    return shape, boxes


@contextmanager
def limits(draw: st.DataObject) -> Iterator[None]:
    """Let a few bytes count as much, so that small tensors meet every rule of large ones."""
    small = draw.draw(st.sampled_from([1, 4, 16, 64, 1 << 20]), label="small")
    large = draw.draw(st.sampled_from([4, 32, 256, 1 << 20]), label="large")
    with (
        mock.patch.object(grids, "_SMALL_NBYTES", small),
        mock.patch.object(grids, "_INNER_NBYTES", max(4, large // 4)),
        mock.patch.dict(grids._CELL_NBYTES, {2: large, 3: large}),
    ):
        yield


def info(key: str, box: Box, shape: tuple[int, ...], *, is_main: bool, anyone: bool) -> ShardInfo:
    return ShardInfo(
        key,
        box,
        shape,
        "float32",
        is_main=is_main,
        writer="any" if anyone else "main",
        has_data=True,
    )


@settings(max_examples=sample(80, 1200))
@given(
    data=st.data(), layout=partitions(), size=st.integers(1, 4), zarr_format=st.sampled_from([2, 3])
)
def test_each_element_and_each_cell_has_one_writer(
    data: st.DataObject, layout: tuple[tuple[int, ...], list[Box]], size: int, zarr_format: int
) -> None:
    """Owners hold or receive all that lies in their cells, from where it was put down."""
    shape, boxes = layout
    views: list[list[ShardInfo]] = [[] for _ in range(size)]
    for box in boxes:
        anyone = data.draw(st.booleans())
        main = data.draw(st.integers(0, size - 1))
        others = data.draw(st.sets(st.integers(0, size - 1)))
        for rank in sorted({main} | others):
            views[rank].append(info("w", box, shape, is_main=rank == main, anyone=anyone))
    with limits(data):
        plan = plan_arrays(views, zarr_format)
        again = plan_arrays(views, zarr_format)

    assert plan == again
    array = plan.arrays["w"]
    seen = torch.zeros(shape, dtype=torch.int32)
    owners: dict[tuple[int, ...], int] = {}
    put_down = {
        (rank, position): item.box
        for rank, work in enumerate(plan.work)
        for position, item in _positions(work.passed_on)
    }
    for rank, work in enumerate(plan.work):
        for _, item in work.whole:
            held = views[rank][item.shard].box
            assert held.intersect(item.box) == item.box
            assert whole_cells(item.box, array.grid.cell, shape) == item.box
            seen[item.box.slices()] += 1
            for cell in cells_of(item.box, array.grid.cell):
                assert owners.setdefault(cell, rank) == rank
        for shared in work.shared:
            (cell,) = cells_of(shared.box, array.grid.cell)
            assert owners.setdefault(cell, rank) == rank
            assert shared.own
            for own in shared.own:
                assert views[rank][own.shard].box.intersect(own.box) == own.box
                assert shared.box.intersect(own.box) == own.box
                seen[own.box.slices()] += 1
            for received in shared.received:
                assert put_down.pop((received.rank, received.position)) == received.box
                assert received.rank != rank
                seen[received.box.slices()] += 1
    assert (seen == 1).all()
    assert not put_down


def _positions(items: tuple[object, ...]) -> Iterator[tuple[int, object]]:
    at = 0
    for item in items:
        yield at, item
        at += item.box.numel * 4  # type: ignore[attr-defined]


@settings(max_examples=sample(60, 800))
@given(data=st.data(), layout=partitions(), zarr_format=st.sampled_from([2, 3]))
def test_grids_are_fit_for_their_boxes(
    data: st.DataObject, layout: tuple[tuple[int, ...], list[Box]], zarr_format: int
) -> None:
    """Inner chunks divide cells; what is whole, what is around it, and what splits make, tile."""
    shape, boxes = layout
    with limits(data):
        grid = choose_grid(shape, boxes, 4, zarr_format)

    assert all(c >= 1 and c % i == 0 for c, i in zip(grid.cell, grid.inner, strict=True))
    assert is_by_rows(grid.cell, grid.inner)
    for box in boxes:
        inside = whole_cells(box, grid.cell, shape)
        rest = list(around(box, inside))
        assert sum(part.numel for part in rest) + (inside.numel if inside else 0) == box.numel
        most = data.draw(st.integers(1, 200))
        pieces = list(split_on_grid(box, grid.cell, 4, most))
        seen = torch.zeros(shape, dtype=torch.int32)
        for piece in pieces:
            seen[piece.slices()] += 1
            assert piece.numel * 4 <= most or len(list(cells_of(piece, grid.cell))) == 1
        assert int(seen.sum()) == box.numel
        assert (seen[box.slices()] == 1).all()
        for cell in cells_of(box, grid.cell):
            assert cell_box(cell, grid.cell, shape).intersect(box) is not None


@settings(max_examples=sample(60, 800))
@given(
    shape=st.lists(st.integers(1, 1 << 20), min_size=1, max_size=3).map(tuple),
    parts=st.lists(st.integers(1, 9), min_size=3, max_size=3),
    itemsize=st.sampled_from([1, 2, 4, 8, 16]),
    zarr_format=st.sampled_from([2, 3]),
)
def test_regular_boxes_of_any_size_are_whole_cells(
    shape: tuple[int, ...], parts: list[int], itemsize: int, zarr_format: int
) -> None:
    """Of a reasonable size unless the boxes are small themselves; in no time."""
    steps = [-(-n // p) for n, p in zip(shape, parts, strict=False)]
    edges = [range(0, n, s) for n, s in zip(shape, steps, strict=True)]
    boxes = [Box((), ())]
    for axis_edges, n, step in zip(edges, shape, steps, strict=True):
        boxes = [
            Box((*box.offset, at), (*box.shape, min(step, n - at)))
            for box in boxes
            for at in axis_edges
        ]

    grid = choose_grid(shape, boxes, itemsize, zarr_format)

    assert all(whole_cells(box, grid.cell, shape) == box for box in boxes)
    cell_nbytes = math.prod(grid.cell) * itemsize
    box_nbytes = math.prod(steps) * itemsize
    assert cell_nbytes >= min(box_nbytes, 256 << 10)


@settings(max_examples=sample(20, 240), deadline=None)
@given(data=st.data(), layout=partitions(), size=st.integers(1, 3), version=st.sampled_from([1, 2]))
def test_what_is_saved_in_parts_is_read_in_others(
    data: st.DataObject, layout: tuple[tuple[int, ...], list[Box]], size: int, version: int
) -> None:
    """Any partition, any limits, any part."""
    shape, boxes = layout
    tensor = torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape)
    ranks: list[list[ShardedTensor]] = [[] for _ in range(size)]
    for box in boxes:
        ranks[data.draw(st.integers(0, size - 1))] += boxes_of(tensor, "k/w", [box])
    part_start = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
    part = Box(
        part_start,
        tuple(data.draw(st.integers(1, n - o)) for o, n in zip(part_start, shape, strict=True)),
    )
    with TemporaryDirectory() as directory, limits(data):
        index = save_ranks(Path(directory), ranks, version)
        loaded = read_box(Path(directory), index, "k/w", part)

    assert torch.equal(loaded, tensor[part.slices()])


@settings(max_examples=sample(80, 1200))
@given(st.lists(st.text(alphabet=st.sampled_from("ab./%~ \0é_-"), max_size=8), max_size=12))
def test_paths_are_safe_and_distinct(keys: list[str]) -> None:
    """Whatever keys there are: no array meets another, its chunks, or a document."""
    paths = paths_of_keys(keys)

    assert set(paths) == set(keys)
    assert len(set(paths.values())) == len(paths)
    for path in paths.values():
        assert checked_name(path) == path
        assert not any(part.startswith(".") for part in path.split("/"))
        assert not any(other.startswith(f"{path}/") for other in paths.values())
