"""Every box goes to one rank that may write it; what all hold is shared out by bytes."""

from __future__ import annotations

from typing import Any

from dist_ckpt._sharding.assign import WriteItem, assign_writers
from dist_ckpt._sharding.shard_info import ShardInfo
from dist_ckpt.box import Box

MIB = 1 << 20


def info(
    key: str, n: int, *, main: bool = False, writer: Any = "any", data: bool = True
) -> ShardInfo:
    return ShardInfo(key, Box((0,), (n,)), (n,), "uint8", main, writer, data)


def written(plans: list[list[WriteItem]]) -> list[int]:
    return [sum(item.box.numel for item in plan) for plan in plans]


def test_who_writes() -> None:
    """The main replica; the lowest holder; nobody where there is nothing."""
    views = [
        [
            info("main", 5, writer="main"),
            info("first", 3, writer="first", data=False),
            info("none", 0),
        ],
        [info("main", 5, writer="main", main=True), info("first", 3, writer="first")],
        [info("first", 3, writer="first"), info("main", 5, writer="main")],
    ]

    plans = assign_writers(views)

    assert plans == [[], [WriteItem(1, Box((0,), (3,))), WriteItem(0, Box((0,), (5,)))], []]


def test_the_strictest_word_counts() -> None:
    """One holder that says ``main`` means that replicas may differ."""
    views = [
        [info("x", 4)],
        [info("x", 4, writer="main", main=True)],
        [info("x", 4, writer="first")],
    ]

    assert written(assign_writers(views)) == [0, 4, 0]


def test_equal_replicas_are_balanced_around_fixed_work() -> None:
    """A rank with shards of its own gets less of what all hold."""
    common = [info(f"c{i}", MIB) for i in range(30)]
    views = [[info("own", 10 * MIB, main=True), *common], common, common, common]

    assert written(assign_writers(views)) == [10 * MIB] * 4


def test_a_large_replica_is_cut() -> None:
    """One embedding that all hold does not fall to one rank."""
    views = [[info("embedding", 100 * MIB)]] * 4

    sizes = written(assign_writers(views))

    assert sum(sizes) == 100 * MIB
    assert max(sizes) - min(sizes) <= 16 * MIB


def test_the_plan_does_not_depend_on_order_or_hash() -> None:
    """Ranks may list their shards in any order."""
    keys = [f"k{i}" for i in range(50)]
    views = [[info(k, 10 + len(k)) for k in keys], [info(k, 10 + len(k)) for k in reversed(keys)]]

    plans = assign_writers(views)
    names = [[views[r][item.shard].key for item in plan] for r, plan in enumerate(plans)]

    assert sorted(names[0] + names[1]) == sorted(keys)
    assert plans == assign_writers(views)
    swapped = assign_writers([views[0], views[0]])
    assert [[views[0][item.shard].key for item in plan] for plan in swapped] == names
