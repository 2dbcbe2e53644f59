"""Unit tests of dist_ckpt.dict_utils."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections import OrderedDict, deque, namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch

from dist_ckpt.dict_utils import (
    ListPart,
    dict_list_map_inplace,
    dict_list_map_outplace,
    dict_map,
    dict_map_with_key,
    diff,
    extract_matching_values,
    find_hidden_leaves,
    full_length,
    inspect_types,
    map_reduce,
    merge,
    nested_items_iter,
    nested_items_with_path,
    nested_values,
    positions,
)
from dist_ckpt.mapping import ShardedObject, ShardedTensor

NAN = float("nan")
Pair = namedtuple("Pair", ["left", "right"])  # noqa: PYI024 - the untyped kind is tested


@dataclass
class Box:
    """A dataclass leaf with a field that may be unset."""

    inside: Any
    unset: Any = field(init=False)


def is_str(x: object) -> bool:
    """Return whether x is what the tests look for."""
    return isinstance(x, str)


def tree() -> dict[str, Any]:
    """Build a tree with all kinds of places."""
    return {"a": 1, "b": {"c": [2, {"d": 3}, []]}, "e": (4, 5), "f": {}}


def part() -> ListPart:
    """Build elements 1 and 3 of a list of four."""
    return ListPart([10, 30], positions=[1, 3], length=4)


def test_map_inplace_keeps_containers() -> None:
    """The same dicts and lists hold the new leaves; tuples are leaves; empty ones stay."""
    x = tree()
    inner = x["b"]["c"]

    result = dict_list_map_inplace(lambda v: v * 2, x)

    assert result is x
    assert x == {"a": 2, "b": {"c": [4, {"d": 6}, []]}, "e": (4, 5, 4, 5), "f": {}}
    assert x["b"]["c"] is inner
    assert dict_list_map_inplace(str, 5) == "5"


def test_map_outplace_makes_new_plain_containers() -> None:
    """The input stays; subclasses are lost, except ListPart, which merge needs."""
    x = OrderedDict(a=1, b=[2, part()])

    result = dict_list_map_outplace(str, x)

    assert type(result) is dict
    assert result == {"a": "1", "b": ["2", ["10", "30"]]}
    assert result["b"][1].positions == (1, 3)
    assert x == {"a": 1, "b": [2, [10, 30]]}


def test_dict_map_works_in_place_and_returns_none() -> None:
    """All nested leaves are replaced; new containers are not walked into."""
    x = tree()

    dict_map(lambda v: [v], x)

    assert x == {"a": [1], "b": {"c": [[2], {"d": [3]}, []]}, "e": [(4, 5)], "f": {}}


def test_dict_map_with_key_passes_two_arguments() -> None:
    """The innermost key, or the index in a list, and the value."""
    x = {"a": 1, "b": [{"c": 2}, 3]}

    dict_map_with_key(lambda k, v: (k, v), x)

    assert x == {"a": ("a", 1), "b": [{"c": ("c", 2)}, (1, 3)]}


def test_nested_iteration() -> None:
    """Leaves only, with where to find them."""
    x = tree()

    assert list(nested_values(x)) == [1, 2, 3, (4, 5)]
    assert all(container[key] is value for container, key, value in nested_items_iter(x))
    assert [key for _, key, _ in nested_items_iter([part()])] == [0, 1]
    assert list(nested_items_with_path(x)) == [
        (("a",), 1), (("b", "c", 0), 2), (("b", "c", 1, "d"), 3), (("e",), (4, 5)),
    ]  # fmt: skip
    assert list(nested_items_with_path([part()])) == [((0, 1), 10), ((0, 3), 30)]
    assert list(nested_items_with_path(5)) == [((), 5)]


def test_hidden_leaves_are_found_in_every_kind_of_leaf() -> None:
    """With paths; what stands in dicts and lists, or matches itself, is not hidden."""
    x = {
        "plain": ["seen"],
        "tuple": (1, ("a", ["b"])),
        "named": Pair(left={"k": "c"}, right=2),
        "set": {"d"},
        "frozen": frozenset({"e"}),
        "deque": deque(["f"]),
        "data": Box(inside=["g"]),
        "mapping": MappingProxyType({"k": "h"}),
        "class": Box,
    }

    found = find_hidden_leaves(x, is_str)

    assert found == [
        (("tuple", 1, 0), "a"),
        (("tuple", 1, 1, 0), "b"),
        (("named", "left", "k"), "c"),
        (("set", 0), "d"),
        (("frozen", 0), "e"),
        (("deque", 0), "f"),
        (("data", "inside", 0), "g"),
        (("mapping", "k"), "h"),
    ]


def test_hidden_leaves_in_cycles() -> None:
    """A cycle below a leaf ends the search."""
    loop: list[Any] = ["a"]
    loop.append(loop)

    assert find_hidden_leaves({"t": (loop,)}, is_str) == [(("t", 0, 0), "a")]


def test_extract_keeps_the_hierarchy() -> None:
    """Empty containers go to the rest; the input is unchanged."""
    x = {"a": "A", "b": {"c": "C", "d": 1}, "e": {"f": "F"}, "g": {}, "h": [], "t": ("no",)}
    before = copy.deepcopy(x)

    matching, rest = extract_matching_values(x, is_str)

    assert matching == {"a": "A", "b": {"c": "C"}, "e": {"f": "F"}}
    assert rest == {"b": {"d": 1}, "g": {}, "h": [], "t": ("no",)}
    assert x == before


def test_extract_compacts_lists_that_still_know_their_positions() -> None:
    """So a list of sharded and common leaves can be merged back, which upstream refuses."""
    x = {"l": ["A", 1, "B", {"c": "C", "d": 2}, []]}

    matching, rest = extract_matching_values(x, is_str)

    assert matching == {"l": ["A", "B", {"c": "C"}]}
    assert rest == {"l": [1, {"d": 2}, []]}
    assert isinstance(matching, dict)
    assert matching["l"].positions == (0, 2, 3)
    assert merge(matching, rest) == x
    assert type(matching["l"]) is list


def test_extract_leaves_whole_lists_plain() -> None:
    """Nothing is lost in them."""
    matching, rest = extract_matching_values([["A", "B"], [1], [{"a": "A", "b": 1}]], is_str)

    assert type(matching[0]) is list
    assert rest == [[1], [{"b": 1}]]
    assert type(rest[1]) is list


def test_extract_with_lists_as_dicts() -> None:
    """All lists of both trees become dicts from index to element."""
    matching, rest = extract_matching_values({"l": ["A", 1, ["B"]]}, is_str, True)

    assert matching == {"l": {0: "A", 2: {0: "B"}}}
    assert rest == {"l": {1: 1}}


def test_extract_from_a_part_counts_in_the_whole_list() -> None:
    """Splitting a part again gives smaller parts of the same list."""
    x = ListPart(["A", 1], positions=[1, 3], length=4)

    matching, rest = extract_matching_values(x, is_str)
    as_dict, _ = extract_matching_values(x, is_str, True)

    assert isinstance(matching, ListPart)
    assert (matching.positions, full_length(matching)) == ((1,), 4)
    assert as_dict == {1: "A"}
    merged = merge(matching, rest)
    assert (merged, positions(merged)) == (x, (1, 3))


@pytest.mark.parametrize("x", [(1, 2), 5, None])
def test_extract_needs_a_container(x: Any) -> None:
    """Anything else is a ValueError."""
    with pytest.raises(ValueError, match="Unexpected top-level object type"):
        extract_matching_values(x, is_str)


def test_parts_survive_copying_and_pickling() -> None:
    """With their positions."""
    for same in (copy.copy(part()), copy.deepcopy(part()), pickle.loads(pickle.dumps(part()))):
        assert (same, same.positions, same.length) == ([10, 30], (1, 3), 4)


def test_a_part_that_has_grown_is_refused() -> None:
    """Its positions no longer belong to its elements."""
    x = part()
    x.append(50)

    with pytest.raises(ValueError, match="3 elements but 2 positions"):
        merge(x, part())


def test_merge_works_in_place() -> None:
    """Dicts and plain lists of the left tree are kept."""
    x1 = {"a": {"b": 1}, "l": [{"c": 2}]}
    inner = x1["l"]

    merged = merge(x1, {"a": {"d": 3}, "l": [{"e": 4}], "f": 5})

    assert merged is x1
    assert x1 == {"a": {"b": 1, "d": 3}, "l": [{"c": 2, "e": 4}], "f": 5}
    assert x1["l"] is inner
    assert merge(inner, ListPart([{"g": 6}], positions=[0], length=1)) is inner


@pytest.mark.parametrize(
    ("x1", "x2", "says"),
    [
        ({"a": [1]}, {"a": [1, 2]}, r"different lengths \(1 and 2, .*\('a',\)"),
        ([1, 2, 3], part(), r"different lengths \(3 and 4"),
        ({"a": 1}, {"a": 1}, r"Duplicate non-dict and non-list values .*int 1.*\('a',\)"),
        (part(), part(), r"Duplicate .*\(1,\)"),
        ({"a": {}}, {"a": []}, "Duplicate non-dict and non-list"),
        ({"a": torch.zeros(2)}, {"a": 1}, r"Tensor of shape \(2,\)"),
    ],
)
def test_merge_refuses_what_does_not_fit(x1: Any, x2: Any, says: str) -> None:
    """With the place."""
    with pytest.raises(ValueError, match=says):
        merge(x1, x2)


def test_map_reduce() -> None:
    """Groups keep the order of their values."""
    words = ["apple", "bee", "ant"]

    assert map_reduce(words, lambda w: w[0], len, tuple) == {"a": (5, 3), "b": (3,)}
    assert map_reduce([2, 1, 2]) == {2: [2, 2], 1: [1]}


def test_inspect_types(capsys: pytest.CaptureFixture[str]) -> None:
    """Types and short values are printed, nested by indentation."""
    inspect_types({"a": {"b": "x" * 99}, "l": [torch.zeros(2), part()]})

    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == ["", "> a: ", f"    > b: <class 'str'>: '{'x' * 29}..."]
    assert lines[4] == "    > [0]: <class 'torch.Tensor'>: torch.float32 (2,)"
    assert lines[-1] == "        > [3]: <class 'int'>: 30"


def test_diff_reports_places_with_their_prefix() -> None:
    """In lists too, where old releases drop the prefix and give wrong sides."""
    left = {"a": 1, "l": [1, 2, 3], "m": [1], "d": {"x": 1}}
    right = {"b": 1, "l": [1, 5], "m": [1, 2, 3], "d": {"x": "1"}}

    only_left, only_right, mismatch = diff(left, right, ("root",))

    assert only_left == [("root", "a"), ("root", "l", 2)]
    assert only_right == [("root", "b"), ("root", "m", 1), ("root", "m", 2)]
    assert mismatch == [(("root", "l", 1), int, int), (("root", "d", "x"), int, str)]


def test_diff_of_parts_compares_by_position() -> None:
    """Position 3 is not position 2."""
    other = ListPart([10, 20], positions=[1, 2], length=4)

    assert diff(part(), other) == ([(3,)], [(2,)], [])


F32 = torch.float32
EQUAL: list[tuple[Any, Any]] = [
    (torch.zeros(2, 3), torch.zeros(2, 3)),
    (torch.tensor([NAN, 1.0]), torch.tensor([NAN, 1.0])),
    (torch.tensor([0.0, NAN]), torch.tensor([-0.0, NAN])),
    (torch.tensor([1j, complex(NAN, 0)]), torch.tensor([1j, complex(NAN, 0)])),
    (torch.tensor([1 + 2j]).conj(), torch.tensor([1 - 2j])),
    (torch.tensor(1.0), torch.tensor(1.0)),
    (torch.zeros(0, 2), torch.zeros(0, 2)),
    (torch.arange(6).reshape(2, 3).t(), torch.tensor([[0, 3], [1, 4], [2, 5]])),
    (torch.nn.Parameter(torch.ones(1)), torch.nn.Parameter(torch.ones(1))),
    (torch.tensor([0.0]).to(torch.float8_e4m3fn), torch.tensor([-0.0]).to(torch.float8_e4m3fn)),
    (torch.ones(2), torch.ones(2, dtype=torch.int64)),
    (torch.zeros(2), torch.zeros(2, dtype=torch.float64)),
    (torch.tensor([1.5, NAN]), torch.tensor([1.5, NAN]).to(torch.bfloat16)),
    (torch.tensor([0.5]).to(torch.float8_e4m3fn), torch.tensor([0.5])),
    (torch.tensor([True]), torch.tensor([1], dtype=torch.uint16)),
    (torch.tensor([2.0]), torch.tensor([2 + 0j])),
    (NAN, float("nan")),
    (1, 1.0),
    (5, np.int64(5)),
    (np.float64(NAN), np.float64(NAN)),
    (np.array([1.0, NAN]), np.array([1.0, NAN])),
    ((1, torch.zeros(2)), (1, torch.zeros(2))),
    ({"a": []}, {"a": []}),
]
UNEQUAL: list[tuple[Any, Any]] = [
    (torch.zeros(2), torch.ones(2)),
    (torch.zeros(2), torch.zeros(3)),
    (torch.zeros(2, 1), torch.zeros(1, 2)),
    (torch.ones(2), torch.tensor([1, 2])),
    (torch.tensor([0.1]), torch.tensor([0.1], dtype=torch.float64)),
    (torch.tensor([2**24 + 1]), torch.tensor([2.0**24])),
    (torch.tensor([-1]), torch.tensor([2**64 - 1], dtype=torch.uint64)),
    (torch.ones(2), torch.ones(1, 2, dtype=torch.int64)),
    (torch.tensor([1.0]), torch.tensor([1 + 1j])),
    (torch.tensor([NAN]), torch.tensor([1.0])),
    (torch.tensor([0x7FC00001], dtype=torch.int32).view(F32), torch.tensor([NAN])),
    (torch.tensor([1, 2]), torch.tensor([1, 3])),
    (torch.zeros(2), 0),
    (torch.zeros(()), None),
    (NAN, 1.0),
    (np.zeros(2), np.zeros((1, 2))),
    (np.zeros(2), np.zeros(3)),
    (np.array([1.0, NAN]), np.array([NAN, 1.0])),
    ((1, torch.zeros(2)), (1, torch.ones(2))),
    ((1,), (1, 2)),
    ({"a": 1}, [1]),
    ({}, 1),
]


@pytest.mark.parametrize(("x1", "x2"), EQUAL, ids=range(len(EQUAL)))
def test_diff_of_equal_leaves_is_empty(x1: Any, x2: Any) -> None:
    """NaN with the same bits is equal, and so are both zeros."""
    assert diff(x1, x2) == ([], [], [])


@pytest.mark.parametrize(("x1", "x2"), UNEQUAL, ids=range(len(UNEQUAL)))
def test_diff_of_unequal_leaves(x1: Any, x2: Any) -> None:
    """Other shapes are mismatches, never errors; of other dtypes the elements count."""
    assert diff(x1, x2, ("k",)) == ([], [], [(("k",), type(x1), type(x2))])


def shard(data: torch.Tensor, **changes: Any) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets("w", data, (0, 0, 2), **changes)


def test_diff_of_sharded_leaves_compares_their_data() -> None:
    """Element by element, NaN included; the replica does not count, the place does."""
    data = torch.tensor([NAN, 1.0])
    left = {"t": shard(data, replica_id=1), "o": ShardedObject("o", {"x": data}, (1,), (0,), 1)}
    same = {"t": shard(data.clone()), "o": ShardedObject("o", {"x": data.clone()}, (1,), (0,))}
    other = {"t": shard(data + 1), "o": ShardedObject("o", {"x": data + 1}, (1,), (0,))}
    moved = ShardedTensor.from_rank_offsets("w", data, (0, 1, 2))

    assert diff(left, same) == ([], [], [])
    assert [path for path, *_ in diff(left, other)[2]] == [("t",), ("o",)]
    assert diff(left["t"], moved)[2] == [((), ShardedTensor, ShardedTensor)]


@dataclass(eq=False)
class Identity:
    """A dataclass that is equal to itself only."""

    inside: int = 1


def test_diff_of_dataclasses() -> None:
    """By fields, where the class compares so; unset fields are alike; classes are values."""
    same, other = Box(inside=(1, torch.zeros(2))), Box(inside=(1, torch.ones(2)))

    assert diff(Box(inside=(1, torch.zeros(2))), same) == ([], [], [])
    assert diff(other, same)[2] == [((), Box, Box)]
    assert diff(Identity(), Identity())[2] == [((), Identity, Identity)]
    assert diff(Box, Box) == ([], [], [])
    assert diff(Box, Identity)[2] == [((), type, type)]


DTYPES = sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str)
SUBBYTE_OR_QUANTIZED = ("bits", "qint", "quint", *(f"int{n}" for n in range(1, 8)))
WHOLE_DTYPES = [d for d in DTYPES if str(d).split(".")[1].lstrip("u") not in SUBBYTE_OR_QUANTIZED
                and "bits" not in str(d) and "qu" not in str(d)]  # fmt: skip


@pytest.mark.parametrize("dtype", WHOLE_DTYPES, ids=str)
def test_diff_of_every_dtype(dtype: torch.dtype) -> None:
    """A tensor equals its copy whatever its elements are; one other bit is a mismatch."""
    x, y = torch.zeros(2, 16, dtype=torch.uint8)
    y[-1] = 1

    assert diff(x.view(dtype), x.clone().view(dtype)) == ([], [], [])
    assert len(diff(x.view(dtype), y.view(dtype))[2]) == 1


def quantised(scale: float, zero: float = 0.0) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(torch.ones(2, 2) * scale, scale, int(zero), torch.qint8)


def quantised_by_row(scale: float) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scales, zeros = torch.tensor([1.0, scale]), torch.zeros(2, dtype=torch.int64)
        return torch.quantize_per_channel(torch.ones(2, 2), scales, zeros, 0, torch.qint8)


def sparse(layout: torch.layout, last: float) -> torch.Tensor:
    size = (1, 1) if layout in (torch.sparse_bsr, torch.sparse_bsc) else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dense = torch.diag(torch.tensor([1.0, last]))
        return dense.to_sparse(layout=layout, blocksize=size)


def nested(last: float) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([torch.ones(2), torch.full((3,), last)])


KINDS: dict[str, Callable[[float], torch.Tensor]] = {
    "quantised": quantised,
    "quantised by row": quantised_by_row,
    "nested": nested,
    "meta": lambda last: torch.empty(int(last), device="meta"),
    **{
        str(layout): partial(sparse, layout)
        for layout in (
            torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc
        )
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_diff_of_tensors_without_plain_memory(kind: str) -> None:
    """They are compared by what they consist of; torch has no comparison, or crashes."""
    make = KINDS[kind]

    assert diff(make(2), make(2)) == ([], [], [])
    assert len(diff({"x": make(2)}, {"x": make(4)})[2]) == 1
    assert len(diff(make(2), torch.eye(2))[2]) == 1
    assert len(diff(torch.eye(2), make(2))[2]) == 1


class Incomparable:
    """An object whose comparison fails."""

    __hash__ = None  # type: ignore[assignment]

    def __ne__(self, other: object) -> bool:
        """Refuse."""
        raise TypeError

    def __eq__(self, other: object) -> bool:
        """Refuse."""
        raise TypeError


def test_diff_of_incomparable_leaves_is_a_mismatch() -> None:
    """Unless they are the same object."""
    x = Incomparable()

    assert diff(x, x) == ([], [], [])
    assert diff(x, Incomparable())[2] == [((), Incomparable, Incomparable)]


def test_diff_across_devices() -> None:
    """Where a tensor lies does not matter."""
    meta = torch.zeros(2, device="meta")
    moved = torch.zeros(2)
    # No second real device on every machine: a subclass claims to lie elsewhere.
    claimed = moved.as_subclass(ElsewhereTensor)

    assert claimed.device == meta.device
    assert diff(claimed, moved) == ([], [], [])


class ElsewhereTensor(torch.Tensor):
    """A tensor on the CPU that says it is on another device."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Return the wrong device."""
        return torch.device("meta")

    def cpu(self) -> torch.Tensor:  # type: ignore[override]
        """Return the plain tensor."""
        return self.as_subclass(torch.Tensor)
