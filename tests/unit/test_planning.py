"""Shard descriptions and the reads that resharding means."""

from __future__ import annotations

import pytest
import torch

from dist_ckpt import InvalidShardingError, ShardedTensor
from dist_ckpt._sharding.index import CheckpointIndex, StoredChunk, StoredTensor
from dist_ckpt._sharding.reads import byte_runs, plan_reads
from dist_ckpt._sharding.shard_info import dtype_from_name, dtype_name
from dist_ckpt._sharding.table import local_shards
from dist_ckpt.box import Box

CHUNK = StoredChunk(Box((2, 0), (4, 6)), "__0_0.distcp", 100, 96)
INDEX = CheckpointIndex({"x": StoredTensor("float32", (8, 6), (CHUNK,))})


def test_dtypes_by_name() -> None:
    """Names of dtypes, and no other attribute of torch."""
    assert dtype_name(torch.bfloat16) == "bfloat16"
    assert dtype_from_name("float8_e4m3fn") is torch.float8_e4m3fn
    for wrong in ("load", "float99", "", "nn.Module", "__doc__"):
        with pytest.raises(ValueError, match="unknown dtype"):
            dtype_from_name(wrong)


def test_every_shard_is_described() -> None:
    """Empty ones too: other ranks must know of the key. A flat range becomes boxes."""
    empty = ShardedTensor("e", torch.zeros(0, 3), torch.float32, (0, 3), (4, 3), (4, 0), None)
    flat = ShardedTensor("f", torch.arange(5.0), torch.float32, (3, 4), (3, 4), (0, 0), None,
                         flattened_range=slice(3, 8))  # fmt: skip
    nothing = ShardedTensor("n", torch.zeros(0), torch.float32, (3, 4), (3, 4), (0, 0), None,
                            flattened_range=slice(5, 5))  # fmt: skip

    shards = local_shards([empty, flat, nothing])

    assert [(s.info.key, s.info.box.numel) for s in shards] == [
        ("e", 0),
        ("f", 1),
        ("f", 4),
        ("n", 0),
    ]
    assert torch.equal(shards[2].view, torch.tensor([[1.0, 2, 3, 4]]))  # type: ignore[arg-type]
    assert shards[1].info.nbytes == 4


def test_all_bad_shards_are_told_at_once() -> None:
    """By key, with the reason."""
    bad = [
        ShardedTensor(k, torch.ones(2, device="meta"), torch.float32, (2,), (2,), (0,), None)
        for k in ("a", "b")
    ]

    with pytest.raises(InvalidShardingError, match=r"'a': .*meta.*'b': .*meta"):
        local_shards(bad)


@pytest.mark.parametrize(
    ("region", "run", "positions"),
    [
        (Box((2, 0), (4, 6)), 96, [100]),
        (Box((3, 0), (2, 6)), 48, [124]),
        (Box((3, 1), (2, 2)), 8, [128, 152]),
        (Box((5, 5), (1, 1)), 4, [192]),
    ],
)
def test_runs_of_bytes(region: Box, run: int, positions: list[int]) -> None:
    """Rows that follow each other are one run."""
    (read,) = plan_reads([("x", region)], INDEX)["__0_0.distcp"]

    length, found = byte_runs(read)

    assert (length, list(found)) == (run, positions)


def test_reads_are_cut_to_what_is_stored_and_wanted() -> None:
    """Nothing for empty or outer boxes; file order within a file."""
    reads = plan_reads(
        [("x", Box((4, 0), (4, 6))), ("x", Box((0, 0), (3, 6))), ("x", Box((0, 0), (2, 6))),
         ("x", Box((3, 0), (0, 6)))],
        INDEX,
    )  # fmt: skip

    assert [(r.request, r.region) for r in reads["__0_0.distcp"]] == [
        (1, Box((2, 0), (1, 6))),
        (0, Box((4, 0), (2, 6))),
    ]
