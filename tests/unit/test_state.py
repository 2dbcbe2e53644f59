"""A state dict taken apart and put together: positions survive, nothing lent is changed."""

from __future__ import annotations

import collections
import sys
from typing import Any

import pytest
import torch

from dist_ckpt import (
    InvalidShardingError,
    LocalNonpersistentObject,
    MismatchError,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
)
from dist_ckpt._sharding.split import merge_after_load, split_for_load, split_for_save
from dist_ckpt.mapping import ShardedBase

HOLE = {"__sharded__": True}


def tensor(key: str) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets(key, torch.ones(1))


def merged(request: Any, common: Any, *, without: tuple[str, ...] = ()) -> Any:
    """Load with each tensor replaced by its key."""
    parts = split_for_load(request)
    tensors = {id(t): t.key for t in parts.tensors if t.key not in without}
    return merge_after_load(parts, common, tensors, {id(o): o.key for o in parts.objects})


def test_a_save_in_parts() -> None:
    """Common values keep their places, sharded leaves their order."""
    state = {
        "a": tensor("a"), "b": {"c": 1, "d": tensor("d")}, "l": [tensor("l"), 2, [3, tensor("m")]],
        "s": [tensor("s0"), tensor("s1")], "o": ShardedObject("o", 1, (1,), (0,)),
        "n": LocalNonpersistentObject(1), "e": [],
    }  # fmt: skip

    parts = split_for_save(state)

    assert parts.common == {"b": {"c": 1}, "l": [HOLE, 2, [3, HOLE]], "e": []}
    assert [t.key for t in parts.tensors] == ["a", "d", "l", "m", "s0", "s1"]
    assert [o.key for o in parts.objects] == ["o"]


def test_factories_are_built_in_a_copy() -> None:
    """The caller's factory stays where it is; its parts are merged in its place."""
    factory = ShardedTensorFactory(
        "f",
        torch.ones(1),
        lambda key, *_: {"x": tensor(key)},
        lambda loaded: ("merged", loaded["x"]),
    )  # type: ignore[arg-type, return-value]
    state = {"f": factory, "l": [0, factory]}

    assert [t.key for t in split_for_save(state).tensors] == ["f", "f"]
    assert state == {"f": factory, "l": [0, factory]}
    assert merged(state, {"l": [7, HOLE]}) == {"f": ("merged", "f"), "l": [7, ("merged", "f")]}


@pytest.mark.parametrize(
    ("request_", "common", "expected"),
    [
        ({"a": tensor("a")}, {"b": 1}, {"a": "a", "b": 1}),
        ({"d": {"x": tensor("x")}}, {"d": {"y": 2}}, {"d": {"x": "x", "y": 2}}),
        ({"d": {"x": tensor("x")}}, {"d": 5}, {"d": {"x": "x"}}),
        ({"l": [0, tensor("x")]}, {"l": [9, HOLE]}, {"l": [9, "x"]}),
        ({"l": [tensor("x"), tensor("y")]}, {}, {"l": ["x", "y"]}),
        ({"l": [tensor("x")]}, {"l": []}, {"l": ["x"]}),
        ({"l": [0, 0]}, {"l": [1, 2, 3]}, {"l": [1, 2, 3]}),
        ({"l": []}, {"l": [1, HOLE]}, {"l": [1, None]}),
        ({"l": []}, {}, {"l": []}),
        ({"v": 1, "d": {"v": 1}}, {}, {"d": {}}),
        ({"v": 1}, {"v": 2}, {"v": 2}),
        ({"n": LocalNonpersistentObject([1])}, {"n": 3}, {"n": [1]}),
        ({1: tensor("x")}, {1: {"a": 1}, "1": 2}, {1: "x", "1": 2}),
    ],
    ids=range(13),
)
def test_a_load_put_together(request_: Any, common: Any, expected: Any) -> None:
    """Sharded leaves of the request in the common part of the checkpoint."""
    assert merged(request_, common) == expected


def test_objects_come_back_as_they_are() -> None:
    """Containers in them are values: class, identity and circles stay, also in lists."""
    local: dict[str, Any] = collections.OrderedDict(a=1)
    circle: list[Any] = []
    circle.append(circle)
    request = {
        "local": LocalNonpersistentObject(local),
        "object": ShardedObject("o", None, (1,), (0,)),
        "list": [LocalNonpersistentObject(circle), 2],
    }
    parts = split_for_load(request)

    loaded = merge_after_load(
        parts, {"list": [HOLE, 2], "x": 3}, {}, {id(o): circle for o in parts.objects}
    )

    assert loaded["local"] is local
    assert loaded["object"] is circle
    assert loaded["list"][0] is circle
    assert (loaded["list"][1], loaded["x"]) == (2, 3)


def test_leaves_that_were_not_found() -> None:
    """They are left out of dicts, and None keeps their place in lists; no mark is seen."""
    request = {"a": tensor("a"), "b": tensor("b"), "l": [tensor("c"), 1, tensor("d")]}

    loaded = merged(request, {"l": [HOLE, 5, HOLE]}, without=("b", "d"))

    assert loaded == {"a": "a", "l": ["c", 5, None]}


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        ({}, {"l": [1, None, {"m": [None, 2]}], "d": {"n": [None]}}),
        ({"d": {}}, {"l": [1, None, {"m": [None, 2]}], "d": {"n": [None]}}),
        ({"l": [0, tensor("x"), {}]}, {"l": [1, "x", {"m": [None, 2]}], "d": {"n": [None]}}),
        ({"l": [0, tensor("x"), 3]}, {"l": [1, "x", {"m": [None, 2]}], "d": {"n": [None]}}),
        ({"d": {"n": [tensor("x")]}}, {"l": [1, None, {"m": [None, 2]}], "d": {"n": ["x"]}}),
    ],
    ids=range(5),
)
def test_no_mark_is_seen_of_what_is_not_asked_for(request_: Any, expected: Any) -> None:
    """None stands where a sharded leaf is stored, at any depth."""
    common = {"l": [1, HOLE, {"m": [HOLE, 2]}], "d": {"n": [HOLE]}}

    assert merged(request_, common) == expected


def pair(*keys: str) -> ShardedTensorFactory:
    def build(*_: Any) -> Any:
        return {"of": [tensor(key) for key in keys]}

    return ShardedTensorFactory("f", torch.ones(1), build, lambda loaded: ("merged", *loaded["of"]))  # type: ignore[arg-type, return-value, index]


def test_factories_of_which_nothing_was_found() -> None:
    """They are left out like a tensor; what they merge never sees a part of what they built."""
    state = {"a": pair("x", "y"), "l": [pair("y", "z"), 1], "d": {"b": pair("z", "w")}}

    nothing = merged(state, {"l": [HOLE, 5]}, without=("x", "y", "z", "w"))
    assert nothing == {"l": [None, 5], "d": {}}
    assert merged({"a": pair("x"), "b": pair()}, {}, without=("x",)) == {"b": ("merged",)}
    with pytest.raises(MismatchError, match="'f' cannot be merged: 'y' of what its factory"):
        merged({"a": [pair("x", "y")]}, {}, without=("y",))


def test_lists_must_agree_where_positions_count() -> None:
    """The path and both lengths are told."""
    with pytest.raises(MismatchError, match=r"'a.l': 1 elements are expected, 2 are stored"):
        merged({"a": {"l": [tensor("x")]}}, {"a": {"l": [1, HOLE]}})


class OtherKind(ShardedBase):
    """A sharded leaf that this library does not know."""

    key, data, replica_id = "other", None, 0

    def validate_metadata_integrity(self) -> None:
        pass

    def without_data(self) -> ShardedBase:
        return self


@pytest.mark.parametrize("split", [split_for_save, split_for_load])
def test_leaves_that_nothing_stores_are_refused(split: Any) -> None:
    """Other kinds, and factories within what a factory builds: they would be lost."""
    inner = ShardedTensorFactory("inner", torch.ones(1), lambda *_: {}, lambda x: x["a"])
    outer = ShardedTensorFactory("f", torch.ones(1), lambda *_: [inner], lambda x: x["a"])

    with pytest.raises(InvalidShardingError) as caught:
        split({"l": [OtherKind()], "f": outer, "ok": tensor("t")})

    assert "OtherKind 'other' at l.0" in str(caught.value)
    assert "ShardedTensorFactory 'inner' at f.0" in str(caught.value)


@pytest.mark.parametrize("split", [split_for_save, split_for_load])
def test_what_cannot_be_split(split: Any) -> None:
    """Sharded leaves in tuples and sets, and things that are no dict."""
    with pytest.raises(InvalidShardingError, match=r"ShardedTensor 'x' at t.1, .* at u.0.a.0;"):
        split(
            {"t": (1, tensor("x")), "u": [{"a": (LocalNonpersistentObject(1),)}]} | {"ok": (1, 2)}
        )
    with pytest.raises(InvalidShardingError, match="is a dict, found list"):
        split([tensor("x")])


@pytest.mark.parametrize("split", [split_for_save, split_for_load])
def test_what_a_factory_builds_hides_nothing_either(split: Any) -> None:
    """A tuple of shards would be taken for a plain value."""
    factory = ShardedTensorFactory("f", torch.ones(1), lambda *_: (tensor("x"),), lambda x: x[0])

    with pytest.raises(InvalidShardingError, match=r"'x' at f.0;"):
        split({"f": factory})


class OwnTensor(ShardedTensor):
    """A sharded tensor of the user's own class."""


def test_leaves_of_other_classes_are_looked_at_closely() -> None:
    """A subclass is what it is; what is hidden is found behind any number of plain leaves."""
    data = torch.ones(1)
    own = OwnTensor("own", data, data.dtype, (1,), (1,), (0,), None)
    plain: dict[str, Any] = {str(i): i for i in range(50)}

    assert split_for_save({**plain, "o": own}).tensors == (own,)
    assert split_for_load({**plain, "o": [own]}).tensors == (own,)
    for hidden in ((own,), {"x": ({1: own},)}, [(tensor("t"),)], collections.deque([tensor("t")])):
        with pytest.raises(InvalidShardingError, match="tuples, sets or dataclasses"):
            split_for_save({**plain, "h": hidden})


def test_what_a_factory_hides_is_found() -> None:
    """Also when there was nothing to hide before it was built."""
    factory = ShardedTensorFactory(
        "f",
        torch.ones(1),
        lambda key, *_: {"x": (tensor(key),)},
        lambda loaded: loaded,  # type: ignore[arg-type, return-value]
    )

    for split in (split_for_save, split_for_load):
        with pytest.raises(InvalidShardingError, match="tuples, sets or dataclasses"):
            split({"f": [factory]})


def test_loaded_tensors_stand_where_the_common_part_has_something_else() -> None:
    """A tensor takes the place of whatever is stored there."""
    request = {"a": tensor("a"), "b": {"c": tensor("c")}}
    parts = split_for_load(request)
    values = {id(one): torch.full((1,), 3.0) for one in parts.tensors}

    loaded = merge_after_load(parts, {"a": HOLE, "b": {"c": [1, 2], "d": 4}}, values, {})

    assert loaded == {
        "a": values[id(request["a"])],
        "b": {"c": values[id(parts.tensors[1])], "d": 4},
    }


def endless() -> dict[str, Any]:
    inner: dict[str, Any] = {"value": 1}
    inner["list"] = [0, {"again": inner}]
    return {"common": {"scheduler": inner}}


def bottomless() -> dict[str, Any]:
    tree: dict[str, Any] = {}
    inner = tree
    for _ in range(sys.getrecursionlimit() + 10):
        inner["x"] = {}
        inner = inner["x"]
    return tree


@pytest.mark.parametrize("split", [split_for_save, split_for_load])
def test_a_cycle_is_named_with_its_path(split: Any) -> None:
    """What contains itself is our error, with the place and what stands there again."""
    with pytest.raises(InvalidShardingError) as caught:
        split(endless())

    assert "common.scheduler.list[1].again is common.scheduler again" in str(caught.value)


@pytest.mark.parametrize("split", [split_for_save, split_for_load])
def test_nesting_that_is_too_deep_is_named(split: Any) -> None:
    """A tree that Python cannot walk through is our error, with the begin of its path."""
    with pytest.raises(InvalidShardingError, match=r"x\.x\.x.*\.\.\. is \d+ levels deep"):
        split(bottomless())
