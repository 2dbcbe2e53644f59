"""Unit tests of dist_ckpt.utils."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dist_ckpt.dict_utils import merge
from dist_ckpt.errors import InvalidShardingError
from dist_ckpt.mapping import (
    LocalNonpersistentObject,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
)
from dist_ckpt.utils import (
    add_prefix_for_sharding,
    apply_prefix_mapping,
    extract_nonpersistent,
    extract_sharded_base,
    extract_sharded_tensors,
    extract_sharded_tensors_and_factories,
    extract_sharded_tensors_or_nonpersistent,
    replace_prefix_for_sharding,
)

TENSOR = ShardedTensor.from_rank_offsets("t", torch.zeros(2))
OBJECT = ShardedObject("o", 1, (1,), (0,))
FACTORY = ShardedTensorFactory("f", torch.zeros(2), lambda *_: {}, lambda x: x["a"])
LOCAL = LocalNonpersistentObject(5)


def state() -> dict[str, Any]:
    """Build a state dict with each kind of leaf, some in a list."""
    return {"a": {"t": TENSOR, "o": OBJECT}, "l": [FACTORY, 7, LOCAL], "c": {"x": 1}}


@pytest.mark.parametrize(
    ("extract", "expected"),
    [
        (extract_sharded_tensors, {"a": {"t": TENSOR}}),
        (extract_sharded_tensors_and_factories, {"a": {"t": TENSOR}, "l": [FACTORY]}),
        (extract_sharded_tensors_or_nonpersistent, {"a": {"t": TENSOR}, "l": [FACTORY, LOCAL]}),
        (extract_sharded_base, {"a": {"t": TENSOR, "o": OBJECT}, "l": [FACTORY]}),
        (extract_nonpersistent, {"l": [LOCAL]}),
    ],
)
def test_extract(extract: Any, expected: dict[str, Any]) -> None:
    """Each kind is taken out in its place; merging gives the original again."""
    matching, rest = extract(state())

    assert matching == expected
    assert rest["c"] == {"x": 1}
    assert merge(rest, matching) == state()


@pytest.mark.parametrize(
    "function",
    [
        extract_sharded_tensors,
        extract_sharded_base,
        extract_nonpersistent,
        lambda x: add_prefix_for_sharding(x, "p."),
        lambda x: replace_prefix_for_sharding(x, "t", "p"),
        lambda x: apply_prefix_mapping(x, {"t": "p"}),
    ],
    ids=["tensors", "base", "nonpersistent", "add", "replace", "apply"],
)
def test_hidden_leaves_are_refused(function: Any) -> None:
    """All of them are named; upstream would store them as plain objects."""
    with pytest.raises(InvalidShardingError) as caught:
        function({"a": (TENSOR, [OBJECT]), "b": {"c": (LOCAL,)}})

    for part in ("ShardedTensor 't' at a.0", "ShardedObject 'o' at a.1.0", "at b.c.0;"):
        assert part in str(caught.value)


def named(*keys: str) -> list[ShardedObject]:
    """Build a leaf for each key."""
    return [ShardedObject(key, None, (1,), (0,)) for key in keys]


def test_an_object_gets_its_prefix_once() -> None:
    """Although it is referenced twice, where upstream adds the prefix twice."""
    [x, y] = named("x", "y")

    add_prefix_for_sharding({"a": x, "b": [x, {"c": y}], "n": 3}, "p.")

    assert (x.key, y.key) == ("p.x", "p.y")


def test_a_leaf_alone_gets_its_prefix() -> None:
    """A factory's function may have nothing but one shard at hand."""
    [x] = named("x")

    add_prefix_for_sharding(x, "p.")  # type: ignore[arg-type]
    replace_prefix_for_sharding(x, "p.", "q.")  # type: ignore[arg-type]
    apply_prefix_mapping(x, {"q.": "r."})  # type: ignore[arg-type]

    assert x.key == "r.x"


def test_replace_prefix() -> None:
    """Shared objects change once too; only the front is replaced."""
    [x, y] = named("old.old.x", "old.y")

    replace_prefix_for_sharding({"a": [x, y, x]}, "old.", "new.old.")

    assert (x.key, y.key) == ("new.old.old.x", "new.old.y")


def test_replace_prefix_changes_all_or_none() -> None:
    """Every key that does not fit is named before any is changed."""
    leaves = named("old.x", "other.y", "z")

    with pytest.raises(ValueError, match=r"Expected other\.y, z to begin with prefix old\."):
        replace_prefix_for_sharding({"a": leaves}, "old.", "new.")

    assert [leaf.key for leaf in leaves] == ["old.x", "other.y", "z"]


def test_apply_prefix_mapping_takes_the_first_that_fits() -> None:
    """In the order of the dict; other keys stay; shared objects change once."""
    leaves = named("a.b.x", "a.c.x", "d")

    apply_prefix_mapping({"l": [*leaves, *leaves]}, {"a.b.": "a.c.", "a.": "q.", "a.c.": "no."})

    assert [leaf.key for leaf in leaves] == ["a.c.x", "q.c.x", "d"]
