"""Descriptions in columns say the same as objects do."""

from __future__ import annotations

import pickle

import pytest
import torch

from dist_ckpt._sharding.shard_info import ShardInfo
from dist_ckpt._sharding.table import LocalShards, ShardTable, local_shards
from dist_ckpt._sharding.together import JobTable
from dist_ckpt.box import Box
from dist_ckpt.errors import InvalidShardingError
from dist_ckpt.mapping import ShardedTensor

INFOS = [
    ShardInfo("b", Box((0, 2), (3, 2)), (3, 4), "float32", True, "main", True),
    ShardInfo("a", Box((), ()), (), "bfloat16", False, "any", True),
    ShardInfo("b", Box((0, 0), (3, 2)), (3, 4), "float32", False, "first", False),
    ShardInfo("o", Box((0,), (7,)), (7,), "uint8", True, "main", True, "object"),
    ShardInfo("e", Box((1, 0, 0), (0, 2, 2)), (0, 2, 2), "int8", True, "main", True, "part"),
]


def test_a_table_gives_back_what_it_was_made_of() -> None:
    """One by one, as slices, and after pickling."""
    table = ShardTable.of(INFOS)

    assert list(table) == INFOS
    assert table[1:3] == INFOS[1:3]
    assert table[-1] == INFOS[-1]
    assert table == pickle.loads(pickle.dumps(table)) == INFOS
    assert ShardTable.of(table) is table
    assert table.itemsize.tolist() == [4, 2, 4, 1, 1]


@pytest.mark.parametrize("number", range(len(INFOS)))
def test_tables_that_differ_in_one_row_differ(number: int) -> None:
    """In any field of it."""
    one = INFOS[number]
    changes = {
        "key": "z", "dtype": "int64", "is_main": not one.is_main, "has_data": not one.has_data,
        "global_shape": tuple(n + 1 for n in one.global_shape) or None,
        "role": "tensor" if one.role != "tensor" else "part",
    }  # fmt: skip
    for name, value in changes.items():
        if value is None:
            continue
        fields = {field: getattr(one, field) for field in one.__slots__} | {name: value}
        assert ShardTable.of([*INFOS[:number], ShardInfo(**fields), *INFOS[number + 1 :]]) != (
            ShardTable.of(INFOS)
        ), name


def test_shards_are_joined_with_their_data() -> None:
    """Keys and dtypes are numbered anew; fewer axes are filled up."""
    first = local_shards([_whole("a", torch.ones(2, 3)), _whole("b", torch.ones(()))])
    second = local_shards(
        [_whole("c", torch.ones(4, dtype=torch.int8)), _whole("a", torch.ones(2, 3))]
    )

    both = first + second

    assert [shard.info for shard in both] == [shard.info for shard in [*first, *second]]
    assert both.data == [*first.data, *second.data]
    assert LocalShards.joined([first, local_shards([])]) is first
    assert len(LocalShards.joined([])) == 0


def test_a_view_is_detached_and_shares_memory() -> None:
    """Writing through it is no operation of autograd."""
    parameter = torch.nn.Parameter(torch.zeros(3))
    shards = local_shards([_whole("p", parameter)])

    view = shards.view(0)

    assert view is not None
    assert not view.requires_grad
    assert view.data_ptr() == parameter.data_ptr()
    assert shards.without_data().view(0) is None


def test_data_that_is_not_what_is_told_is_refused() -> None:
    """Fields may be changed after they were checked; a write would go past the tensor's memory."""
    one = _whole("x", torch.zeros(4))
    one.data = torch.zeros(3)
    other = _whole("y", torch.zeros(4))
    other.data = torch.zeros(4, dtype=torch.int8)

    with pytest.raises(InvalidShardingError, match=r"'x'.*\(3,\).*\(4,\).*'y'.*int8.*float32"):
        local_shards([one, other])


def test_a_job_has_every_distinct_box_once() -> None:
    """Sorted by key, offset and shape; holders in rank order."""
    job = JobTable([INFOS[:2], [INFOS[1], INFOS[0], INFOS[2]], []])

    found = [(job.keys[job.key[row]], job.views[job.rank[row]][job.index[row]].box)
             for row in job.boxes.first.tolist()]  # fmt: skip

    assert found == [("a", INFOS[1].box), ("b", INFOS[2].box), ("b", INFOS[0].box)]
    assert job.boxes.counts.tolist() == [2, 1, 2]
    assert job.rank[job.boxes.rows].tolist() == [0, 1, 1, 0, 1]
    assert job.boxes_with_data.counts.tolist() == [2, 2]
    assert [list(view) for view in job.only([job.keys.index("a")])] == [[INFOS[1]], [INFOS[1]], []]


def test_a_size_of_more_than_63_bits_is_refused() -> None:
    """No tensor has it."""
    with pytest.raises(InvalidShardingError, match="elements"):
        ShardTable.of(
            [ShardInfo("x", Box((0,), (1 << 63,)), (1 << 63,), "int8", True, "main", True)]
        )


def _whole(key: str, tensor: torch.Tensor) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets(key, tensor)
