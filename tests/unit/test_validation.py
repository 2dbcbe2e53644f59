"""Strict policies, and checks over the descriptions of all ranks."""

from __future__ import annotations

import logging

import pytest

from dist_ckpt import InvalidShardingError, MismatchError, ShardedObject
from dist_ckpt._sharding.shard_info import ShardInfo
from dist_ckpt.box import Box
from dist_ckpt.validation import (
    StrictHandling,
    StrictPolicy,
    check_objects,
    check_sharding,
    check_storable,
    of_ranks,
    parse_strict_flag,
    react,
    shortened,
)


def info(start: int, stop: int, *, size: int = 4, main: bool = True, data: bool = True,
         writer: str = "main", dtype: str = "float32") -> ShardInfo:  # fmt: skip
    return ShardInfo("x", Box((start,), (stop - start,)), (size,), dtype, main, writer, data)  # type: ignore[arg-type]


def cell(offset: int, size: int = 2, replica: int = 0) -> ShardedObject:
    return ShardedObject("o", None, (size,), (offset,), replica)


def test_flags_by_name_and_value() -> None:
    """A flag is itself or its value; nothing else."""
    assert parse_strict_flag("log_all") is StrictHandling.LOG_ALL
    assert parse_strict_flag(StrictHandling.RAISE_ALL) is StrictHandling.RAISE_ALL
    for wrong in ("LOG_ALL", "", "raise"):
        with pytest.raises(ValueError, match="Invalid strict flag"):
            parse_strict_flag(wrong)


@pytest.mark.parametrize("flag", list(StrictHandling))
def test_missing_keys_are_looked_for_by_the_all_modes_only(flag: StrictHandling) -> None:
    """``ignore_all`` has no use for them."""
    policy = StrictPolicy.of(flag)

    assert policy.check_missing == (flag.value in ("log_all", "raise_all", "return_all"))


@pytest.mark.parametrize("flag", list(StrictHandling))
def test_what_a_flag_requires(flag: StrictHandling) -> None:
    """Asked of the class, by name."""
    explicit = StrictHandling.requires_explicit_ckpt_mismatch_check(flag)
    others = StrictHandling.requires_global_app_metadata(flag)
    triple = StrictHandling.requires_returning_mismatch_keys(flag)

    assert explicit == (flag.name != "ASSUME_OK_UNEXPECTED")
    assert others == (flag.name in ("LOG_ALL", "RAISE_ALL", "RETURN_ALL", "IGNORE_ALL"))
    assert triple == (flag.name in ("RETURN_UNEXPECTED", "RETURN_ALL"))


def test_a_tiling_passes() -> None:
    """Uneven boxes, replicas of both kinds, and ranks without anything."""
    views = [
        [info(0, 3), info(0, 0)],
        [info(0, 3, main=False), info(3, 4, writer="any", main=False)],
        [],
        [info(3, 4, writer="any", main=False)],
    ]

    check_sharding(views, coverage=True)
    check_storable(views)


@pytest.mark.parametrize(
    ("views", "message"),
    [
        ([[info(0, 2)], [info(3, 4)]], r"\[2:3\] is saved by no main replica"),
        ([[info(0, 3)], [info(2, 4)]], r"\[0:3\] and \[2:4\] overlap"),
        ([[info(0, 4)], [info(0, 4)]], r"\[0:4\] has main replicas on ranks \[0, 1\]"),
        ([[info(0, 4, main=False)], [info(0, 4, main=False)]], "saved by no main replica"),
        ([[info(0, 4)], [info(0, 4, main=False, dtype="int8")]], "ranks disagree on dtype"),
        ([[info(0, 4)], [info(0, 4, main=False, size=5)]], "ranks disagree on global_shape"),
    ],
    ids=["gap", "overlap", "two mains", "no main", "dtype", "shape"],
)
def test_no_tiling_is_refused(views: list[list[ShardInfo]], message: str) -> None:
    """Each with key, place and ranks."""
    with pytest.raises(InvalidShardingError, match=f"'x': .*{message}") as caught:
        check_sharding(views, coverage=True)

    assert str(caught.value).startswith("Invalid sharding pattern validation. Errors: ")
    assert ("Invalid access pattern for 'x'" in str(caught.value)) == (
        "ranks disagree" not in message
    )


def test_data_of_a_replica_is_enough_only_where_replicas_are_equal() -> None:
    """A main replica without data is not replaced by another one that may differ."""
    check_storable([[info(0, 4, data=False, writer="any")], [info(0, 4, writer="any")]])

    with pytest.raises(InvalidShardingError, match="no data"):
        check_storable([[info(0, 4, data=False)], [info(0, 4, main=False)]])


def test_objects() -> None:
    """Complete arrays pass; holes, doubles and other shapes do not."""
    check_objects([[cell(0)], [cell(1), cell(0, replica=1)]])
    check_objects([[ShardedObject("o", None, (), ())]])

    for views, message in (
        ([[cell(0)], [cell(0), cell(1)]], "Duplicate ShardedObject keys"),
        ([[cell(0)], []], "Invalid access pattern: 1 ShardedObject are missing. Key 'o'"),
        ([[cell(0), cell(1)], [cell(0, 1, 1)]], "disagree on the object's shape"),
    ):
        with pytest.raises(InvalidShardingError, match=message):
            check_objects(views)


def test_reactions(caplog: pytest.LogCaptureFixture) -> None:
    """Raise with both sides in one message, log, or be quiet."""
    policy = {
        r: StrictPolicy(reaction=r, check_missing=True)
        for r in ("raise", "log", "ignore", "return")
    }  # type: ignore[arg-type]
    react(policy["raise"], "c", [], ())
    with pytest.raises(MismatchError, match=r"c: Unexpected keys.*a.*Missing keys.*b"):
        react(policy["raise"], "c", ["a"], {"b"})
    with caplog.at_level(logging.WARNING):
        react(policy["ignore"], "c", ["a"], {"b"})
        react(policy["return"], "c", ["a"], {"b"})
        assert caplog.text == ""
        react(policy["log"], "c", ["a"], {"b"})
    assert "Unexpected keys" in caplog.text


def test_long_lists_are_shortened() -> None:
    """The count says how many more there are."""
    text = shortened([f"p{i}" for i in range(25)])

    assert text.endswith("p19; and 5 more")
    assert shortened(["a", "b"]) == "a; b"


def test_lines_of_ranks_are_told_once() -> None:
    """With the ranks, where not all have them."""
    found = of_ranks([["all", "first", "two"], ["all"], ["all", "two"]])
    assert found == ["all", "first (rank 0)", "two (ranks [0, 2])"]
