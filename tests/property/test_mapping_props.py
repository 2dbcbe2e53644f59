"""Laws of dist_ckpt.mapping, for any shape and any cut."""

from __future__ import annotations

import math
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from dist_ckpt.errors import InvalidShardingError
from dist_ckpt.mapping import ShardedObject, ShardedTensor

SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)
KEYS = st.text(max_size=8) | st.sampled_from(["a/b", "a/shard_0_1", "/", "shard_0_1/", "a.b\n"])


@st.composite
def cells(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Draw the shape of an array without empty axes, and an index of it."""
    shape = draw(st.lists(st.integers(1, 12), max_size=3).map(tuple))
    return shape, tuple(draw(st.integers(0, n - 1)) for n in shape)


@given(KEYS, cells())
def test_a_unique_key_has_one_object(
    key: str, cell: tuple[tuple[int, ...], tuple[int, ...]]
) -> None:
    """Whatever the key looks like, also like a unique key itself."""
    shape, offset = cell
    one = ShardedObject(key, None, shape, offset)

    assert ShardedObject.empty_from_unique_key(one.unique_key) == one


@st.composite
def grids(draw: st.DrawFn) -> tuple[torch.Tensor, list[tuple[int, int, int]], int]:
    """Draw a local tensor, its rank offsets in a regular grid, and how many axes are prepended."""
    shape = draw(SHAPES)
    prepended = draw(st.integers(0, 2))
    axes = draw(st.lists(st.integers(0, 4), unique=True, max_size=2))
    offsets = []
    for axis in axes:
        if axis < prepended + len(shape):
            fragments = draw(st.integers(1, 4))
            offsets.append((axis, draw(st.integers(0, fragments - 1)), fragments))
    return torch.arange(float(math.prod(shape))).reshape(shape), offsets, prepended


@given(grids())
def test_a_shard_knows_its_place(grid: tuple[torch.Tensor, list[Any], int]) -> None:
    """Slice, box and grid index are the same place; a shard is a whole number of chunks."""
    data, offsets, prepended = grid
    x = ShardedTensor.from_rank_offsets("w", data, *offsets, prepend_axis_num=prepended)
    whole = torch.full(x.global_shape, -1.0)

    whole[x.global_slice()] = data
    [(box, view)] = x.pieces()

    assert view is not None
    assert torch.equal(whole[tuple(map(slice, box.offset, box.stop))], view)
    chunks = zip(x.local_chunk_offset_in_global(), box.shape, strict=True)
    assert all(o == at * n or not n for o, (at, n) in zip(box.offset, chunks, strict=True))
    assert all(n % c == 0 for n, c in zip(box.shape, x.max_allowed_chunks(), strict=True) if c)


@given(grids(), st.data())
def test_a_flattened_range_knows_its_places(
    grid: tuple[torch.Tensor, list[Any], int], data: st.DataObject
) -> None:
    """Coordinates and boxes list the elements of the range, in order."""
    local, offsets, prepended = grid
    start = data.draw(st.integers(0, local.numel()))
    stop = data.draw(st.integers(start, local.numel()))
    x = ShardedTensor.from_rank_offsets_flat(
        "w", local.reshape(-1)[start:stop], tuple(local.shape), *offsets,
        flattened_range=slice(start, stop), prepend_axis_num=prepended,
    )  # fmt: skip
    whole = np.full(x.global_shape, -1.0)
    wanted = local.reshape(-1)[start:stop].tolist()

    whole[x.global_slice()] = local.numpy()

    if x.global_shape and local.ndim:
        assert whole[x.global_coordinates()].tolist() == wanted
        assert local.numpy()[x.local_coordinates()].tolist() == wanted
    in_boxes = [whole[tuple(map(slice, b.offset, b.stop))].reshape(-1) for b, _ in x.pieces()]
    assert np.concatenate([np.zeros(0), *in_boxes]).tolist() == wanted


@given(st.data())
def test_narrowed_shards_make_up_the_narrowed_tensor(data: st.DataObject) -> None:
    """Narrowing every shard of a grid alike leaves a grid without gap or overlap."""
    shape = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple))
    cut, dim = (data.draw(st.integers(0, len(shape) - 1)) for _ in range(2))
    fragments = data.draw(st.integers(1, 3))
    start = data.draw(st.integers(0, shape[dim] - 1))
    length = data.draw(st.integers(1, shape[dim] - start))
    shards = [
        ShardedTensor.from_rank_offsets("w", torch.full(shape, float(i)), (cut, i, fragments))
        for i in range(fragments)
    ]

    narrowed = [one for shard in shards for one in shard.narrow(dim, start, length)]

    whole = torch.full(narrowed[0].global_shape, -1.0)
    for one in narrowed:
        assert torch.all(whole[one.global_slice()] == -1)
        whole[one.global_slice()] = one.data  # type: ignore[assignment]
    locals_ = [shard.data.narrow(dim, start, length) for shard in shards]  # type: ignore[union-attr]
    assert torch.equal(whole, torch.cat(locals_, dim=cut))


SIZES = st.lists(st.integers(-1, 4) | st.sampled_from([True, np.int64(2)]), max_size=3)
TUPLES = SIZES.map(tuple) | SIZES | SIZES.map(lambda sizes: tuple(abs(int(n)) for n in sizes))


@st.composite
def fields(draw: st.DrawFn) -> tuple[Any, ...]:
    """Draw the fields of a shard: right ones, or anything."""
    if draw(st.booleans()):
        data, offsets, prepended = draw(grids())
        one = ShardedTensor.from_rank_offsets("x", data, *offsets, prepend_axis_num=prepended)
        place: tuple[Any, ...] = (one.local_shape, one.global_shape, one.global_offset)
        fragments: Any = one.axis_fragmentations
    else:
        local = draw(TUPLES)
        numel = tuple(max(0, int(n)) for n in local)
        data, prepended = torch.zeros(numel), draw(st.integers(0, 1))
        place = local, draw(TUPLES), draw(TUPLES)
        fragments = draw(TUPLES)
    dtype = draw(st.sampled_from([torch.float32, torch.float32, torch.int8, "float32"]))
    some = draw(st.sampled_from([None, data, data.view(*data.shape, 1), data.numpy()]))
    return (
        (some, dtype, *place, draw(st.sampled_from([None, fragments]))),
        {
            "replica_id": draw(st.sampled_from([0, 3, (0, 1), True, np.int64(1)])),
            "prepend_axis_num": prepended,
            "allow_shape_mismatch": draw(st.booleans()),
            "writer": draw(st.sampled_from(["main", "any", "first", "nobody"])),
        },
    )


@given(fields())
def test_a_quick_look_accepts_what_a_close_look_does(given_: tuple[Any, ...]) -> None:
    """The same fields of the same types come out, or the same error."""
    positional, named = given_

    def made() -> object:
        try:
            one = ShardedTensor("x", *positional, **named)
        except InvalidShardingError as error:
            return str(error)
        shapes = (one.local_shape, one.global_shape, one.global_offset, one.axis_fragmentations)
        return [
            [(type(part), part, [*map(type, part or ())]) for part in shapes],
            (type(one.replica_id), one.replica_id, one.dtype, one.writer),
            one.data is positional[0],
        ]

    quick = made()
    with patch.object(ShardedTensor, "_is_common_case", lambda _: False):
        close = made()

    assert quick == close
