"""Laws of dist_ckpt.dict_utils, for any tree."""

from __future__ import annotations

import copy
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from dist_ckpt.dict_utils import (
    ListPart,
    dict_list_map_outplace,
    diff,
    extract_matching_values,
    merge,
    nested_items_with_path,
    nested_values,
)

LEAVES = st.integers(0, 99) | st.text(max_size=3) | st.none()
TREES = st.recursive(
    LEAVES,
    lambda below: st.lists(below, max_size=4) | st.dictionaries(st.text(max_size=2), below),
    max_leaves=20,
)
CONTAINERS = st.lists(TREES, max_size=5) | st.dictionaries(st.text(max_size=2), TREES, max_size=5)


def is_str(x: object) -> bool:
    """Return whether a leaf matches."""
    return isinstance(x, str)


def has_parts(x: Any) -> bool:
    """Return whether an incomplete list is left anywhere."""
    below = x.values() if isinstance(x, dict) else x if isinstance(x, list) else ()
    return isinstance(x, ListPart) or any(map(has_parts, below))


@given(CONTAINERS)
def test_merge_undoes_extract(x: Any) -> None:
    """Both ways round, and with nothing but plain lists in the end."""
    before = copy.deepcopy(x)
    for swap in (False, True):
        matching, rest = extract_matching_values(x, is_str)
        parts = (rest, matching) if swap else (matching, rest)

        merged = merge(*map(copy.deepcopy, parts))

        assert merged == before
        assert not has_parts(merged)
    assert x == before


@given(CONTAINERS)
def test_merge_undoes_a_threefold_extract(x: Any) -> None:
    """Parts of parts come together again, whichever are merged first."""
    strings, rest = extract_matching_values(x, is_str)
    numbers, nothing = extract_matching_values(rest, lambda v: isinstance(v, int))

    merged = merge(merge(copy.deepcopy(nothing), strings), numbers)

    assert merged == x
    assert not has_parts(merged)


@given(CONTAINERS)
def test_extract_parts_all_leaves(x: Any) -> None:
    """Each leaf goes to the side of its kind and keeps its path."""
    matching, rest = extract_matching_values(x, is_str)

    assert all(map(is_str, nested_values(matching)))
    assert not any(map(is_str, nested_values(rest)))
    paths = dict(nested_items_with_path(x))
    assert {**dict(nested_items_with_path(matching)), **dict(nested_items_with_path(rest))} == paths


@given(CONTAINERS)
def test_extract_with_lists_as_dicts_keeps_paths(x: Any) -> None:
    """The dicts have the original indices as keys."""
    matching, rest = extract_matching_values(x, is_str, True)

    both = [*nested_items_with_path(matching), *nested_items_with_path(rest)]
    assert dict(both) == dict(nested_items_with_path(x))


@given(CONTAINERS, CONTAINERS)
def test_diff_is_symmetric_and_empty_only_for_equals(x1: Any, x2: Any) -> None:
    """Sides swap; a tree does not differ from its copy."""
    left, right, mismatch = diff(x1, x2)
    left2, right2, mismatch2 = diff(x2, x1)

    assert (set(left), set(right)) == (set(right2), set(left2))
    assert {p for p, *_ in mismatch} == {p for p, *_ in mismatch2}
    assert (not any((left, right, mismatch))) == (x1 == x2)
    assert diff(x1, dict_list_map_outplace(lambda v: v, x1)) == ([], [], [])
