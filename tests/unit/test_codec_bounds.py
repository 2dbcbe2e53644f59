"""Documents that ask for more than they are, and values that hold more than their items."""

from __future__ import annotations

import collections
import json
from typing import Any

import pytest
import torch

from dist_ckpt._codec import decode, encode
from dist_ckpt.errors import (
    CheckpointingException,
    ConfigError,
    CorruptedCheckpointError,
    InvalidShardingError,
)

MANY = {"$range": [0, 10**15, 1]}
PRIME = 2**61 - 1
"""Integers that differ by a multiple of it have the same hash."""


def returned(value: object) -> Any:
    encoded = encode(value)
    return decode(json.loads(json.dumps(encoded.document)), encoded.tensors)


@pytest.mark.parametrize(
    "document",
    [
        {"$deque": [0, MANY]},
        {"$array": ["q", "<i8", MANY]},
        {"$random": {"$tuple": [2, MANY, None]}},
        {"$numpy_generator": {"bit_generator": "SFC64", "state": {"state": MANY}}},
        {"$numpy_generator": {"bit_generator": "SFC64", "state": {"state": [MANY]}}},
        {"$numpy_random_state": {"bit_generator": "MT19937", "state": {"key": MANY, "pos": 1}}},
        {"$fraction": ["1e999999999"]},
        {"$fraction": [{"$decimal": "1e999999999"}]},
    ],
    ids=str,
)
def test_a_few_bytes_are_not_unfolded(document: Any) -> None:
    """A range and a power of ten are short to write, and long to go through."""
    with pytest.raises(CorruptedCheckpointError, match="malformed"):
        decode(document, ())


@pytest.mark.parametrize("tag", ["$dict", "$ordered_dict", "$counter", "$set", "$frozenset"])
def test_equal_hashes_are_refused(tag: str) -> None:
    """A table of them would take the square of their number."""
    numbers = [{"$int": hex(n * PRIME)} for n in range(100_000)]
    items = numbers if "set" in tag else [[one, 0] for one in numbers]

    with pytest.raises(CorruptedCheckpointError, match="100000 keys or items have the same hash"):
        decode({tag: items}, ())


def test_large_numbers_are_keys_like_others() -> None:
    """What counts is that their hashes differ."""
    keys = [(n << 64) + n for n in range(1000)]

    assert returned(dict.fromkeys(keys, 1)) == dict.fromkeys(keys, 1)
    assert returned(set(keys)) == set(keys)


@pytest.mark.parametrize("name", ["America", "x" * 5000])
def test_a_zone_that_is_none(name: str) -> None:
    """A folder of zones, or a name that no file can have."""
    with pytest.raises(ConfigError, match="is not known on this system"):
        decode({"$zone": name}, ())


def test_a_state_dict_keeps_its_versions() -> None:
    """``load_state_dict`` converts what an older version of a module has written by them."""
    state = torch.nn.Sequential(torch.nn.BatchNorm1d(2)).state_dict()
    counts = collections.Counter("aab")
    counts.seen = 3  # type: ignore[attr-defined]  # any attribute

    loaded, loaded_counts = returned([state, counts])

    assert loaded._metadata == state._metadata  # type: ignore[attr-defined]
    assert type(loaded._metadata) is collections.OrderedDict
    assert list(loaded) == list(state)
    assert (loaded_counts, vars(loaded_counts)) == (counts, {"seen": 3})


@pytest.mark.parametrize(
    "payload",
    [[{"a": 1}, {"b": 1}], [{"$ordered_dict": []}, {"$dict": [[1, 1]]}], [{"$ordered_dict": []}]],
    ids=str,
)
def test_attributes_are_only_for_what_has_them(payload: Any) -> None:
    """And only under names."""
    with pytest.raises(CorruptedCheckpointError, match=r"malformed '\$attributes'"):
        decode({"$attributes": payload}, ())


class Marked(tuple[int, ...]):  # noqa: SLOT001 - that is the point
    """It has fields, as named tuples do, and attributes, as they do not."""

    _fields = ("a",)


def test_a_tuple_with_attributes_is_no_named_tuple() -> None:
    """Only its items would come back."""
    value = Marked((1,))
    value.more = 2  # type: ignore[attr-defined]  # any attribute
    encoded = encode(value)

    with pytest.raises(CheckpointingException, match="pickled"):
        decode(encoded.document, ())
    assert vars(decode(encoded.document, (), allow_pickle=True)) == {"more": 2}


def test_a_named_tuple_with_other_items_than_fields_is_pickled() -> None:
    """It could not be made again of what the document would say."""
    pair = collections.namedtuple("pair", ["a", "b"])  # noqa: PYI024 - as it is made at run time
    value = tuple.__new__(pair, (1,))

    with pytest.raises(InvalidShardingError, match="cannot be pickled"):
        encode(value)
