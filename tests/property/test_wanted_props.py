"""Columns of wanted boxes and stored chunks say what the exact code says of each."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dist_ckpt._sharding import overlaps
from dist_ckpt._sharding.index import CheckpointIndex, StoredChunk, StoredTensor
from dist_ckpt._sharding.match import holes
from dist_ckpt._sharding.reads import byte_runs, plan_reads
from dist_ckpt._sharding.wanted import Wanted, boxes_of, runs_of, whole_tensors
from dist_ckpt.box import Box
from tests._samples import sample

Asked = list[tuple[str, Box]]
ITEMSIZES = {"int8": 1, "float32": 4, "float64": 8}


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    cuts = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in shape]
    return Box(tuple(a for a, _ in cuts), tuple(b - a for a, b in cuts))


@st.composite
def tensors(draw: st.DrawFn, at: int) -> StoredTensor:
    """Cut a tensor by rows, or into a grid, and leave out some of the chunks."""
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
    dtype = draw(st.sampled_from(sorted(ITEMSIZES)))
    cells = [Box((0,) * len(shape), shape)] if math.prod(shape) else []
    for _ in range(draw(st.integers(0, 4)) if cells and shape else 0):
        box = cells.pop(draw(st.integers(0, len(cells) - 1)))
        axis = draw(st.integers(0, len(shape) - 1))
        cut = draw(st.integers(0, box.shape[axis]))
        for start, stop in ((0, cut), (cut, box.shape[axis])):
            extent = (*box.shape[:axis], stop - start, *box.shape[axis + 1 :])
            offset = (*box.offset[:axis], box.offset[axis] + start, *box.offset[axis + 1 :])
            cells += [Box(offset, extent)] if stop > start else []
    chunks = []
    for number, box in enumerate(cells):
        if draw(st.integers(0, 5)):
            nbytes = box.numel * ITEMSIZES[dtype]
            chunks.append(StoredChunk(box, f"f{number % 2}", 10_000 * at + 1000 * number, nbytes))
    return StoredTensor(dtype, shape, tuple(chunks))


@st.composite
def requests(draw: st.DrawFn) -> tuple[CheckpointIndex, Asked]:
    stored = {str(at): draw(tensors(at)) for at in range(draw(st.integers(0, 4)))}
    keys = st.sampled_from(sorted(stored)) if stored else st.nothing()
    asked = draw(st.lists(keys, max_size=6)) if stored else []
    return CheckpointIndex(stored), [(key, draw(boxes(stored[key].shape))) for key in asked]


def compared(asked: Asked, index: CheckpointIndex) -> Wanted:
    return boxes_of([key for key, _ in asked], [box for _, box in asked], index.tensors)


@pytest.mark.parametrize("pairs", [1, 1 << 18])
def test_columns_and_exact_code_agree(pairs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which chunks, which part of them, which bytes, and whether that is all; in any batches."""
    monkeypatch.setattr(overlaps, "_PAIRS", pairs)

    @given(requests())
    @settings(max_examples=sample(40, 480))
    def check(request: tuple[CheckpointIndex, Asked]) -> None:
        index, asked = request
        exact = {
            (read.request, read.chunk.file, read.chunk.position, read.region): byte_runs(read)
            for reads in plan_reads(asked, index).values()
            for read in reads
        }

        wanted = compared(asked, index)
        runs, filled = runs_of(wanted, np.ones(len(asked), dtype=bool))

        stored, found = wanted.stored, wanted.overlaps
        ndim = stored.ndim[stored.tensor[found.chunk]].tolist()
        told = {
            (int(box), stored.files[stored.file[chunk]], int(stored.position[chunk]),
             Box(tuple(offset[:axes].tolist()), tuple(shape[:axes].tolist())))
            for box, chunk, offset, shape, axes in zip(
                found.box, found.chunk, found.offset, found.shape, ndim, strict=True)
        }  # fmt: skip
        assert told == set(exact)
        for (key, box), complete in zip(asked, wanted.is_complete.tolist(), strict=True):
            assert complete == (not list(holes(key, box, index.tensors[key])))
        by_run = {
            (number, file): {(first, length) for first in positions}
            for (number, file, _, _), (length, positions) in exact.items()
            if filled[number]
        }
        for box, file, position, nbytes in zip(
            runs.box.tolist(), runs.file.tolist(), runs.position.tolist(), runs.nbytes.tolist(),
            strict=True,
        ):  # fmt: skip
            assert filled[box]
            assert (box, runs.files[file]) in by_run
            assert nbytes > 0
            assert position >= 0
        assert_bytes_fill_boxes(wanted, asked, filled.tolist())

    check()


def assert_bytes_fill_boxes(wanted: Wanted, asked: Asked, filled: list[bool]) -> None:
    """Each byte of a filled box comes from the place where its element is stored, once."""
    runs, _ = runs_of(wanted, np.ones(len(asked), dtype=bool))
    stored = wanted.stored
    places: list[dict[int, tuple[str, int]]] = [{} for _ in asked]
    columns = (runs.box, runs.file, runs.position, runs.nbytes, runs.start)
    for box, file, position, nbytes, start in zip(*(c.tolist() for c in columns), strict=True):
        for at in range(nbytes):
            assert start + at not in places[box]
            places[box][start + at] = runs.files[file], position + at
    for number, (_, box) in enumerate(asked):
        if not filled[number]:
            assert places[number] == {}
            continue
        tensor = int(wanted.tensor[number])
        itemsize = int(stored.itemsize[tensor])
        expected = {}
        rows = np.flatnonzero(stored.tensor == tensor).tolist()
        for element, index in enumerate(np.ndindex(*box.shape) if box.numel else ()):
            where = [o + i for o, i in zip(box.offset, index, strict=True)]
            for row in rows:
                offset = stored.offset[row, : len(where)].tolist()
                shape = stored.shape[row, : len(where)].tolist()
                if all(o <= w < o + n for w, o, n in zip(where, offset, shape, strict=True)):
                    inside = [w - o for w, o in zip(where, offset, strict=True)]
                    flat = int(np.ravel_multi_index(inside, shape)) if shape else 0
                    first = int(stored.position[row]) + flat * itemsize
                    for byte in range(itemsize):
                        expected[element * itemsize + byte] = (
                            stored.files[stored.file[row]],
                            first + byte,
                        )
        assert places[number] == expected


@given(requests())
@settings(max_examples=sample(20, 240))
def test_whole_tensors_are_boxes_of_all(request: tuple[CheckpointIndex, Asked]) -> None:
    """In the order of the keys; what is not stored has nothing."""
    index, _ = request
    keys = [*sorted(index.tensors, reverse=True), "absent"]

    wanted = whole_tensors(keys, index.tensors)

    assert wanted.stored.is_there.tolist() == [True] * len(index.tensors) + [False]
    assert [wanted.stored.shape_of(at) for at in range(len(keys) - 1)] == [
        index.tensors[key].shape for key in keys[:-1]
    ]
    assert not wanted.is_cut.any()
    assert not (wanted.tensor[wanted.overlaps.box] == len(keys) - 1).any()
