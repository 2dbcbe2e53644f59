"""Unit tests of dist_ckpt.mapping."""

from __future__ import annotations

import functools
import pickle
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from dist_ckpt import mapping
from dist_ckpt.box import Box
from dist_ckpt.dict_utils import ListPart
from dist_ckpt.errors import CheckpointingException, InvalidShardingError
from dist_ckpt.mapping import (
    LocalNonpersistentObject,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    apply_factories,
    apply_factory_merges,
    is_main_replica,
)


def make(**changes: Any) -> ShardedTensor:
    """Build the second of two shards of a (4, 3) tensor, with changes."""
    fields: dict[str, Any] = {
        "key": "w",
        "data": None,
        "dtype": torch.float32,
        "local_shape": (2, 3),
        "global_shape": (4, 3),
        "global_offset": (2, 0),
        "axis_fragmentations": (2, 1),
    }
    return ShardedTensor(**{**fields, **changes})


def flat(data: torch.Tensor | None = None, **changes: Any) -> ShardedTensor:
    """Build a flattened range [1, 5) of that shard."""
    return make(data=data, flattened_range=slice(1, 5), **changes)


class FakeDTensor(torch.Tensor):
    """A tensor that, like a DTensor, has a local part."""

    def to_local(self) -> torch.Tensor:
        """Return the local part."""
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Fields that contradict each other, and what the error says."""

    id: str
    changes: dict[str, Any]
    says: str


INVALID = [
    Case(id="dtype", changes={"data": torch.zeros(2, 3).double()}, says="torch.float64"),
    Case(id="shape", changes={"data": torch.zeros(3, 2)}, says=r"\(3, 2\), expected \(2, 3\)"),
    Case(id="not-a-tensor", changes={"data": [1]}, says="must be a tensor, not list"),
    Case(id="not-a-dtype", changes={"dtype": "float32"}, says="must be a torch.dtype"),
    Case(id="axes", changes={"local_shape": (2,)}, says="as many axes"),
    Case(id="prepend", changes={"prepend_axis_num": 1}, says="prepend_axis_num 1"),
    Case(id="negative-prepend", changes={"prepend_axis_num": -1}, says="prepend_axis_num -1"),
    Case(id="offset-axes", changes={"global_offset": (2,)}, says=r"global_offset \(2,\)"),
    Case(id="fragm-axes", changes={"axis_fragmentations": (2,)}, says=r"fragmentations \(2,\)"),
    Case(id="fragm-zero", changes={"axis_fragmentations": (0, 1)}, says="must be positive"),
    Case(id="negative", changes={"global_offset": (-2, 0)}, says="must not be negative"),
    Case(id="outside", changes={"global_shape": (3, 3)}, says="axis 0: offset 2 . extent 2 exc"),
    Case(id="grid", changes={"global_offset": (1, 0)}, says="not a multiple of the extent 2"),
    Case(id="writer", changes={"writer": "last"}, says="'main', 'any' or 'first'"),
    Case(id="floats", changes={"global_shape": (4.0, 3)}, says="global_shape must hold integers"),
    Case(id="replica", changes={"replica_id": "a"}, says="replica_id must hold integers"),
    Case(id="range-step", changes={"flattened_range": slice(0, 4, 2)}, says="without step"),
    Case(id="range-end", changes={"flattened_range": slice(0, 7)}, says="6 elements"),
    Case(id="range-order", changes={"flattened_range": slice(3, 1)}, says=r"slice\(3, 1"),
    Case(
        id="flat-data",
        changes={"flattened_range": slice(1, 5), "data": torch.zeros(2, 3)},
        says=r"\(2, 3\), expected \(4,\)",
    ),
]


@pytest.mark.parametrize("case", INVALID, ids=lambda case: case.id)
def test_contradicting_fields_are_refused(case: Case) -> None:
    """The error names the key and is of our tree and a ValueError."""
    with pytest.raises(InvalidShardingError, match=case.says) as caught:
        make(**case.changes)

    assert "'w'" in str(caught.value)
    assert isinstance(caught.value, CheckpointingException)
    assert isinstance(caught.value, ValueError)


def test_all_problems_are_reported_at_once() -> None:
    """One error lists every point."""
    with pytest.raises(InvalidShardingError) as caught:
        make(data=torch.zeros(3).int(), global_shape=(3, 2), writer="x")

    for part in ("axis 0", "axis 1", "torch.int32", "(3,)", "writer"):
        assert part in str(caught.value)


def test_dtensor_data_is_refused_with_the_way_out() -> None:
    """The hint names dist_ckpt.derive."""
    data = torch.zeros(2, 3).as_subclass(FakeDTensor)

    with pytest.raises(InvalidShardingError, match=r"DTensor.*hint: .*derive"):
        make(data=data)


def test_what_is_valid_though_it_looks_odd() -> None:
    """Empty, 0-dim, irregular and larger-than-stored shards pass."""
    make(local_shape=(0, 3), global_offset=(3, 0))
    make(local_shape=(), global_shape=(), global_offset=(), axis_fragmentations=())
    make(global_offset=(1, 0), axis_fragmentations=None)
    make(global_shape=(3, 3), allow_shape_mismatch=True)
    make(flattened_range=slice(4, 4), data=torch.zeros(0))


def test_fields_become_plain() -> None:
    """torch.Size, lists and numpy integers do not survive; open ranges are closed."""
    x = make(
        local_shape=torch.Size([2, 3]),
        global_shape=[np.int64(4), 3],
        replica_id=[np.int32(0), 1],
        flattened_range=slice(None, None),
    )

    assert type(x.local_shape) is tuple
    assert [type(n) for n in x.global_shape] == [int, int]
    assert x.replica_id == (0, 1)
    assert type(make(replica_id=np.int64(3)).replica_id) is int
    assert x.flattened_range == slice(0, 6)


def test_repr_hides_data_and_pickle_keeps_all() -> None:
    """The data of a large tensor is not printed."""
    x = make(data=torch.full((2, 3), 7.5), writer="any")
    copy = pickle.loads(pickle.dumps(x))

    assert "7.5" not in repr(x)
    assert torch.equal(copy.data, x.data)
    assert copy.without_data() == x.without_data()


def test_from_rank_offsets() -> None:
    """Prepended axes count, have extent 1 and may be fragmented."""
    data = torch.zeros(2, 3)

    x = ShardedTensor.from_rank_offsets(
        "w", data, (0, 1, 5), (2, 2, 4), prepend_axis_num=1, replica_id=(0, 1), writer="first"
    )

    assert x.data is data
    assert (x.global_shape, x.global_offset) == ((5, 2, 12), (1, 0, 6))
    assert x.axis_fragmentations == (5, 1, 4)
    assert (x.local_shape, x.replica_id, x.writer) == ((2, 3), (0, 1), "first")


@pytest.mark.parametrize(
    ("offsets", "says"),
    [
        (((0, 0, 2), (0, 1, 2)), "Duplicated axis specified: 0"),
        (((0, 2, 2),), "offset 2 is not in"),
        (((0, -1, 2),), "offset -1"),
        (((0, 0, 0),), "offset 0 is not in"),
        (((2, 0, 1),), "axis 2 does not exist"),
        (((-1, 0, 1),), "axis -1 does not exist"),
    ],
)
def test_impossible_rank_offsets_are_refused(
    offsets: tuple[tuple[int, int, int], ...], says: str
) -> None:
    """Duplicate axes too, which upstream lost the check for."""
    with pytest.raises(InvalidShardingError, match=f"Invalid rank offsets.*{says}"):
        ShardedTensor.from_rank_offsets("w", torch.zeros(2, 3), *offsets)


def test_from_rank_offsets_refuses_flattened_range() -> None:
    """It is a ValueError that names the right constructor."""
    with pytest.raises(ValueError, match="from_rank_offsets_flat"):
        ShardedTensor.from_rank_offsets("w", torch.zeros(2), flattened_range=slice(0, 1))  # type: ignore[arg-type]


def test_from_rank_offsets_flat() -> None:
    """The grid is that of the shape before flattening."""
    data = torch.zeros(4)

    x = ShardedTensor.from_rank_offsets_flat(
        "w", data, (2, 3), (1, 1, 2), flattened_range=slice(1, 5), prepend_axis_num=1, replica_id=3
    )

    assert (x.local_shape, x.global_shape, x.global_offset) == ((2, 3), (1, 4, 3), (0, 2, 0))
    assert (x.data, x.flattened_range, x.replica_id) == (data, slice(1, 5), 3)


@pytest.mark.parametrize(
    ("data", "flattened_range", "says"),
    [
        (torch.zeros(4), None, "Cannot instantiate a non-flat"),
        (torch.zeros(2, 2), slice(0, 4), "requires 1D data"),
        (torch.zeros(3), slice(0, 4), r"expected \(4,\)"),
        (torch.zeros(4), slice(0, 4, 2), "without step"),
    ],
)
def test_from_rank_offsets_flat_refuses(
    data: torch.Tensor, flattened_range: slice | None, says: str
) -> None:
    """Range and data must be there and fit."""
    with pytest.raises(InvalidShardingError, match=says):
        ShardedTensor.from_rank_offsets_flat("w", data, (2, 3), flattened_range=flattened_range)


def test_global_slice_indexes_the_global_tensor() -> None:
    """Prepended axes are integers, so the result has the local shape."""
    whole = torch.arange(24).reshape(2, 4, 3)
    x = make(prepend_axis_num=1, global_shape=(2, 4, 3), global_offset=(1, 2, 0),
             axis_fragmentations=(2, 2, 1))  # fmt: skip

    assert x.global_slice() == (1, slice(2, 4), slice(0, 3))
    assert whole[x.global_slice()].shape == (2, 3)


def test_coordinates_of_a_flattened_range() -> None:
    """Both kinds address exactly the elements of the range."""
    whole = np.arange(24).reshape(2, 4, 3)
    x = flat(prepend_axis_num=1, global_shape=(2, 4, 3), global_offset=(1, 2, 0),
             axis_fragmentations=(2, 2, 1))  # fmt: skip

    local = whole[1, 2:4]
    assert local[x.local_coordinates()].tolist() == local.reshape(-1)[1:5].tolist()
    assert whole[x.global_coordinates()].tolist() == local.reshape(-1)[1:5].tolist()


def test_coordinates_cost_what_the_range_costs() -> None:
    """Not what the shard would: this one has a terabyte of elements."""
    side = 1 << 20
    x = make(local_shape=(side, side), global_shape=(2 * side, side), global_offset=(side, 0),
             flattened_range=slice(side * side - 2, side * side))  # fmt: skip

    assert [c.tolist() for c in x.local_coordinates()] == [[side - 1] * 2, [side - 2, side - 1]]
    assert x.global_coordinates()[0].tolist() == [2 * side - 1] * 2


def test_coordinates_of_scalars_and_empty_tensors() -> None:
    """A 0-dim tensor has no axis; an empty one no coordinate."""
    scalar = make(local_shape=(), global_shape=(), global_offset=(), axis_fragmentations=(),
                  flattened_range=slice(0, 1))  # fmt: skip
    empty = make(local_shape=(0, 3), global_offset=(0, 0), flattened_range=slice(0, 0))

    assert scalar.local_coordinates() == scalar.global_coordinates() == ()
    assert [c.tolist() for c in empty.global_coordinates()] == [[], []]


@pytest.mark.parametrize("name", ["global_coordinates", "local_coordinates"])
def test_coordinates_need_a_flattened_range(name: str) -> None:
    """Without one they are undefined."""
    with pytest.raises(InvalidShardingError, match=f"`{name}` is undefined"):
        getattr(make(), name)()


def test_grid_queries() -> None:
    """Chunks are counted per axis; a shard is a whole number of allowed chunks."""
    x = make()
    empty = make(local_shape=(0, 3), global_shape=(0, 3), global_offset=(0, 0))

    assert x.has_regular_grid
    assert x.local_chunk_offset_in_global() == (1, 0)
    assert x.max_allowed_chunks() == (2, 3)
    assert empty.local_chunk_offset_in_global() == (0, 0)


def test_max_allowed_chunks_of_an_uneven_axis() -> None:
    """It is an error unless the shape may differ."""
    with pytest.raises(InvalidShardingError, match="not divisible by axis fragmentation"):
        make(axis_fragmentations=(3, 1)).max_allowed_chunks()

    relaxed = make(axis_fragmentations=(3, 1), allow_shape_mismatch=True)
    assert relaxed.max_allowed_chunks() == (1, 3)


@pytest.mark.parametrize("name", ["local_chunk_offset_in_global", "max_allowed_chunks"])
def test_grid_queries_need_a_regular_grid(name: str) -> None:
    """They are undefined for axis_fragmentations=None."""
    x = make(axis_fragmentations=None)

    assert not x.has_regular_grid
    with pytest.raises(InvalidShardingError, match="irregular"):
        getattr(x, name)()


def test_init_data() -> None:
    """It allocates what is held, a range only as much as the range, and keeps what is there."""
    x, part = make(), flat()
    x.init_data(torch.device("cpu"), torch.ones)
    part.init_data("cpu")
    before = x.data
    x.init_data("cpu", torch.zeros)

    assert x.data is before
    assert torch.equal(before, torch.ones(2, 3)) if before is not None else False
    assert part.data is not None
    assert part.data.shape == (4,)
    assert part.data.untyped_storage().nbytes() == 16


def test_piece_of_a_normal_shard_is_a_view() -> None:
    """Prepended axes are put in front; writing to the piece writes to a parameter's data."""
    data = torch.nn.Parameter(torch.zeros(3, 2).t())
    x = make(data=data, prepend_axis_num=1, global_shape=(2, 4, 3), global_offset=(1, 2, 0),
             axis_fragmentations=(2, 2, 1))  # fmt: skip

    [(box, view)] = x.pieces()

    assert box == Box((1, 2, 0), (1, 2, 3))
    assert view is not None
    view.fill_(5)
    assert torch.equal(data.detach(), torch.full((2, 3), 5.0))


@pytest.mark.parametrize("stride", [1, 3])
def test_pieces_of_a_flattened_range_are_views(stride: int) -> None:
    """Also of non-contiguous data; together they hold the range, in order."""
    storage = torch.zeros(4 * stride)
    data = storage[::stride]
    data.copy_(torch.arange(4.0))
    x = flat(data, prepend_axis_num=1, global_shape=(2, 4, 3), global_offset=(1, 2, 0),
             axis_fragmentations=(2, 2, 1))  # fmt: skip

    pieces = list(x.pieces())

    assert [box for box, _ in pieces] == [Box((1, 2, 1), (1, 1, 2)), Box((1, 3, 0), (1, 1, 2))]
    for box, view in pieces:
        assert view is not None
        assert view.shape == box.shape
        view.add_(10)
    assert storage[::stride].tolist() == [10, 11, 12, 13]


def test_pieces_without_data_and_of_nothing() -> None:
    """The boxes are known without data; an empty range has none, an empty shard an empty one."""
    assert list(make().pieces()) == [(Box((2, 0), (2, 3)), None)]
    assert [view for _, view in flat().pieces()] == [None, None]
    assert list(make(flattened_range=slice(2, 2)).pieces()) == []
    assert [box.numel for box, _ in make(local_shape=(0, 3)).pieces()] == [0]
    scalar = ShardedTensor.from_rank_offsets("s", torch.tensor(3.0))
    [(box, view)] = scalar.pieces()
    assert (box, view) == (Box((), ()), torch.tensor(3.0))


@pytest.mark.parametrize("dim", [0, -2])
def test_narrow(dim: int) -> None:
    """Shapes and offset shrink in proportion; the data is a view."""
    data = torch.arange(6.0).reshape(2, 3)

    [x] = make(data=data).narrow(dim, 1, 1)

    assert (x.local_shape, x.global_shape, x.global_offset) == ((1, 3), (2, 3), (1, 0))
    assert x.data is not None
    assert x.data.data_ptr() == data[1].data_ptr()
    assert make().narrow(1, 0, 2)[0].data is None


def test_narrow_counts_axes_without_the_prepended() -> None:
    """Axis 0 is the first of the local tensor."""
    x = ShardedTensor.from_rank_offsets("w", torch.zeros(2, 3), (0, 1, 2), prepend_axis_num=1)

    [narrowed] = x.narrow(0, 0, 1)

    assert narrowed.global_shape == (2, 1, 3)


def test_narrow_a_flattened_range() -> None:
    """The range is cut with it; nothing comes out when nothing is left."""
    data = torch.arange(1.0, 5.0)

    [first], [second] = flat(data).narrow(0, 0, 1), flat(data).narrow(0, 1, 1)

    assert (first.flattened_range, second.flattened_range) == (slice(1, 3), slice(0, 2))
    assert first.data is not None
    assert second.data is not None
    assert (first.data.tolist(), second.data.tolist()) == ([1, 2], [3, 4])
    assert flat().narrow(0, 0, 1)[0].data is None
    assert make(flattened_range=slice(0, 2)).narrow(0, 1, 1) == []


def test_narrow_an_empty_tensor() -> None:
    """It stays as it is."""
    x = make(local_shape=(0, 3), global_offset=(0, 0))

    assert x.narrow(0, 0, 0) == [x]


@pytest.mark.parametrize(
    ("changes", "args", "says"),
    [
        ({}, (2, 0, 1), "prepended axes"),
        ({}, (-3, 0, 1), "prepended axes"),
        ({}, (0, 1, 2), "it has 2"),
        ({}, (0, -1, 1), "it has 2"),
        ({}, (0, 0, -1), "it has 2"),
        ({"flattened_range": slice(0, 4)}, (1, 0, 1), "only be narrowed on axis 0"),
        ({"axis_fragmentations": None, "global_offset": (1, 0)}, (0, 0, 1), "differ in size"),
    ],
)
def test_narrow_refuses(changes: dict[str, Any], args: tuple[int, int, int], says: str) -> None:
    """What has no narrowed form is named."""
    with pytest.raises(InvalidShardingError, match=says):
        make(**changes).narrow(*args)


@pytest.mark.parametrize("key", ["rng", "a/b/shard_0_1", "", "x.y_z/ü\n"])
@pytest.mark.parametrize(("offset", "shape"), [((), ()), ((3,), (8,)), ((0, 11), (1, 12))])
def test_unique_key_can_be_reversed(
    key: str, offset: tuple[int, ...], shape: tuple[int, ...]
) -> None:
    """Also when the key contains slashes, where upstream takes the wrong part."""
    x = ShardedObject(key, "data", shape, offset, replica_id=2)

    back = ShardedObject.empty_from_unique_key(x.unique_key, replica_id=2)

    assert back == x.without_data()
    assert "data" not in repr(x).replace("data=", "")


def test_unique_key_text() -> None:
    """The text is part of the seeds' file format."""
    assert ShardedObject("rng", None, (1, 8), (0, 3)).unique_key == "rng/shard_0.3_1.8"


@pytest.mark.parametrize("text", ["rng", "rng/shard_0.3_1", "rng/shard_.1_2.3", "rng/shard_4_2"])
def test_malformed_unique_keys_are_refused(text: str) -> None:
    """Truncated ones too."""
    with pytest.raises(InvalidShardingError, match="is not the unique key"):
        ShardedObject.empty_from_unique_key(text)


@pytest.mark.parametrize(
    ("shape", "offset"), [((2,), (0, 0)), ((2,), (2,)), ((2,), (-1,)), ((2,), (0.5,))]
)
def test_sharded_object_offset_is_an_index(shape: Any, offset: Any) -> None:
    """Any other is refused."""
    with pytest.raises(InvalidShardingError, match="ShardedObject 'o'"):
        ShardedObject("o", 1, shape, offset)


def test_local_nonpersistent_object() -> None:
    """Both spellings are one class."""
    assert mapping.LocalNonpersitentObject is LocalNonpersistentObject
    assert LocalNonpersistentObject([1]).unwrap() == [1]
    assert repr(LocalNonpersistentObject(3)) == "LocalNonpersistentObject(3)"


def split(key: str, data: Any, replica_id: Any, *rest: Any) -> list[Any]:
    """Build two halves, and tell what else was passed."""
    return [
        ShardedTensor.from_rank_offsets(f"{key}.{i}", half, replica_id=replica_id)
        for i, half in enumerate(data.chunk(2))
    ] + list(rest)


def factory(**changes: Any) -> ShardedTensorFactory:
    """Build a factory that stores two halves."""
    fields = {"key": "w", "data": torch.arange(4), "build_fn": split, "merge_fn": torch.cat}
    return ShardedTensorFactory(**{**fields, **changes})


def test_factory_passes_its_range_only_if_it_has_one() -> None:
    """build_fn is called with three arguments, or four."""
    built = factory(replica_id=1).build()

    assert [(x.key, x.replica_id) for x in built] == [("w.0", 1), ("w.1", 1)]
    assert factory(flattened_range=slice(0, 4)).build()[2] == slice(0, 4)
    assert factory().without_data().data is None
    factory().validate_metadata_integrity()


def takes_three(key: str, data: Any, replica_id: Any) -> list[Any]:
    return split(key, data, replica_id)


def takes_four(key: str, data: Any, replica_id: Any, flattened_range: slice | None) -> list[Any]:
    return split(key, data, replica_id, flattened_range)


def test_build_functions_of_all_releases_are_called() -> None:
    """With three arguments, or with the flattened range as a required fourth."""
    assert len(factory(build_fn=takes_three).build()) == 2
    assert factory(build_fn=takes_four).build()[2] is None
    assert factory(build_fn=takes_four, flattened_range=slice(0, 4)).build()[2] == slice(0, 4)
    assert factory(build_fn=functools.partial(takes_four, flattened_range=7)).build()[2] == 7
    assert factory(build_fn=max, key=1, data=2, replica_id=3).build() == 3


def test_a_range_is_never_dropped() -> None:
    """A build function that cannot take it is refused with the key and the range."""
    with pytest.raises(InvalidShardingError, match=r"'w': build_fn must take .*slice\(0, 4"):
        factory(build_fn=takes_three, flattened_range=slice(0, 4)).build()


def test_an_error_within_a_build_function_is_its_own() -> None:
    """Also a TypeError: it does not lead to a second call."""
    calls = []

    def broken(*arguments: Any) -> None:
        calls.append(arguments)
        raise TypeError("inside")

    with pytest.raises(TypeError, match="inside"):
        factory(build_fn=broken).build()

    assert len(calls) == 1


def test_factories_are_applied_and_merged() -> None:
    """A tensor comes back as it was, at any place of dicts and lists."""
    state = {"a": factory(), "b": [1, factory()], "c": {"d": 5}}
    factories = {"a": state["a"], "b": ListPart([factory()], positions=[1], length=2)}
    apply_factories(state)
    loaded = {"a": [x.data for x in state["a"]], "b": [1, [x.data for x in state["b"][1]]]}

    merged = apply_factory_merges(loaded, factories)

    assert merged is loaded
    assert torch.equal(merged["a"], torch.arange(4))
    assert torch.equal(merged["b"][1], torch.arange(4))


def test_factories_of_a_list_may_come_as_dict_or_list() -> None:
    """As extract_matching_values with return_lists_as_dicts gives them."""
    halves = [torch.zeros(1), torch.ones(1)]

    by_dict = apply_factory_merges([1, list(halves)], {1: factory()})
    by_list = apply_factory_merges([list(halves)], [factory()])

    assert by_dict[1].tolist() == by_list[0].tolist() == [0, 1]


def test_built_factories_are_not_expanded_again() -> None:
    """A factory in the output of a factory stays."""
    inner = factory()
    state = {"a": factory(build_fn=lambda *_: {"inner": inner})}

    apply_factories(state)

    assert state["a"]["inner"] is inner  # type: ignore[index]


@pytest.mark.parametrize(
    ("x1", "x2", "says"),
    [
        ({"a": 1}, {"b": factory()}, "Different dict keys encountered in `apply_factory_merges`"),
        ([1, 2], [factory()], "Cannot merge two lists with different lengths .2 and 1"),
        ([1], {"a": factory()}, "Invalid dict key 'a' non-integer type"),
        ([1], {1: factory()}, "Dict key 1 out of bound for list of length 1"),
        ([1], {-1: factory()}, "Dict key -1 out of bound"),
        ({"a": 1}, {"a": 2}, r"Duplicate non-dict and non-list.*\('a',\)"),
    ],
)
def test_merges_that_do_not_fit_are_refused(x1: Any, x2: Any, says: str) -> None:
    """Each with its place; negative indices too."""
    with pytest.raises(ValueError, match=says):
        apply_factory_merges(x1, x2)


@pytest.mark.parametrize(
    ("replica_id", "is_main"),
    [(0, True), (1, False), ((), True), ((0, 0), True), ((0, 1), False), (np.int64(0), True),
     (np.int32(2), False), ((np.int64(0), 0), True), ([0], True), (-1, False)],
)  # fmt: skip
def test_is_main_replica(replica_id: Any, *, is_main: bool) -> None:
    """Numpy integers are integers, which upstream tries to iterate."""
    assert is_main_replica(replica_id) is is_main


def test_import_needs_torch_only() -> None:
    """The module names no heavier library; numpy is used inside two methods."""
    code = (
        "import torch, sys; before = set(sys.modules); import dist_ckpt.mapping;"
        "new = {m.split('.')[0] for m in set(sys.modules) - before};"
        "print(sorted(new - {'dist_ckpt'} - set(sys.stdlib_module_names)))"
    )

    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)

    assert done.stdout.strip() == "[]"
