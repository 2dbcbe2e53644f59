"""Retention policies: pure, stable under removal, and never fooled by missing numbers."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_ckpt.errors import ConfigError
from dist_ckpt.retention import (
    AnyOf,
    CheckpointInfo,
    KeepBest,
    KeepEvery,
    KeepLast,
    RetentionPolicy,
)

INFOS = st.lists(
    st.builds(
        CheckpointInfo,
        step=st.integers(0, 200),
        metrics=st.dictionaries(
            st.sampled_from(["loss", "acc"]),
            st.one_of(st.floats(width=16), st.sampled_from([1.0, 2.0])),
        ),
        time=st.floats(0, 1e5),
    ),
    unique_by=lambda one: one.step,
    max_size=12,
)
SIMPLE = st.one_of(
    st.builds(KeepLast, st.integers(1, 5)),
    st.builds(KeepEvery, steps=st.integers(1, 60)),
    st.builds(KeepEvery, secs=st.floats(0.5, 1e4)),
    st.builds(
        KeepBest,
        st.integers(1, 4),
        st.sampled_from(["loss", "acc", "none"]),
        st.sampled_from(["min", "max"]),
    ),
)
POLICIES = st.one_of(
    SIMPLE, st.lists(SIMPLE, min_size=1, max_size=3).map(lambda policies: AnyOf(*policies))
)


def infos(*steps: int, **metrics: float) -> list[CheckpointInfo]:
    return [CheckpointInfo(step=step, metrics=metrics, time=10.0 * step) for step in steps]


@given(POLICIES, INFOS, st.randoms(use_true_random=False))
def test_only_what_is_there_in_any_order(
    policy: RetentionPolicy, found: list[CheckpointInfo], random: Any
) -> None:
    """A policy keeps a part of what it is given, and the order does not matter."""
    kept = policy.keep(found)
    shuffled = list(found)
    random.shuffle(shuffled)

    assert kept <= {one.step for one in found}
    assert policy.keep(shuffled) == kept


@given(POLICIES, INFOS, st.data())
def test_what_is_kept_stays_kept(
    policy: RetentionPolicy, found: list[CheckpointInfo], data: st.DataObject
) -> None:
    """Removing any of the others, as a crash in the middle of it would, dooms nothing."""
    kept = policy.keep(found)
    others = [one for one in found if one.step not in kept]
    removed = data.draw(st.lists(st.sampled_from(others), unique_by=id)) if others else []
    gone = {one.step for one in removed}

    again = policy.keep([one for one in found if one.step not in gone])

    assert kept <= again
    assert policy.keep([one for one in found if one.step in kept]) == kept


@given(st.integers(1, 5), INFOS)
def test_the_last(n: int, found: list[CheckpointInfo]) -> None:
    """As many as asked for, or all; none that is left is newer."""
    kept = KeepLast(n).keep(found)
    rest = {one.step for one in found} - kept

    assert len(kept) == min(n, len(found))
    assert not rest or min(kept) > max(rest)


@given(st.integers(1, 5), INFOS, st.sampled_from(["min", "max"]))
def test_the_best(n: int, found: list[CheckpointInfo], mode: Any) -> None:
    """Nothing that is left is better; what has no number is never kept."""
    kept = KeepBest(n, "loss", mode).keep(found)
    values = {one.step: one.metrics.get("loss", math.nan) for one in found}
    numbers = {step: value for step, value in values.items() if not math.isnan(value)}
    better: Callable[[float, float], bool] = (
        (lambda a, b: a < b) if mode == "min" else (lambda a, b: a > b)
    )

    assert len(kept) == min(n, len(numbers))
    assert all(step in numbers for step in kept)
    for left in numbers.keys() - kept:
        assert not any(better(numbers[left], numbers[one]) for one in kept)


def test_of_equal_values_the_later_one_is_the_best() -> None:
    """It has seen more."""
    assert KeepBest(1, "loss").keep(infos(1, 2, 3, loss=0.5)) == {3}
    assert KeepBest(1, "loss", "max").keep(infos(1, 2, 3, loss=0.5)) == {3}
    assert KeepBest(1, "loss").keep(infos(1, 2, loss=math.nan)) == frozenset()


def test_one_of_each_interval() -> None:
    """The first of each; saves need not fall on multiples."""
    assert KeepEvery(steps=100).keep(infos(30, 60, 90, 120, 150, 210, 400)) == {30, 120, 210, 400}
    assert KeepEvery(secs=300).keep(infos(10, 20, 30, 40, 59, 60)) == {10, 30, 60}


def test_any_of_is_the_union() -> None:
    """What one policy keeps is kept."""
    policy = AnyOf(KeepLast(1), KeepEvery(steps=10))

    assert policy.keep(infos(1, 5, 12, 15)) == {1, 12, 15}
    assert "KeepLast(n=1)" in repr(policy)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: KeepLast(0), id="none"),
        pytest.param(lambda: KeepLast(True), id="bool"),
        pytest.param(lambda: KeepLast(1.5), id="float"),
        pytest.param(lambda: KeepBest(0, "loss"), id="no-best"),
        pytest.param(lambda: KeepBest(1, "loss", "least"), id="mode"),
        pytest.param(KeepEvery, id="neither"),
        pytest.param(lambda: KeepEvery(steps=1, secs=1), id="both"),
        pytest.param(lambda: KeepEvery(steps=0), id="no-steps"),
        pytest.param(lambda: KeepEvery(secs=math.nan), id="nan"),
        pytest.param(AnyOf, id="empty"),
    ],
)
def test_what_keeps_nothing_is_refused(make: Callable[[], object]) -> None:
    """At once, not when everything is gone."""
    with pytest.raises(ConfigError):
        make()


def test_the_import_is_light() -> None:
    """Decisions need no framework."""
    code = (
        "import sys, dist_ckpt.retention; "
        "print([m for m in ('torch', 'numpy', 'pydantic', 'tensorstore') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300
    )

    assert done.stdout.strip() == "[]"
