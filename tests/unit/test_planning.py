"""Shard descriptions, the checkpoint index and the reads that resharding means."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from dist_ckpt import CorruptedCheckpointError, InvalidShardingError, ShardedTensor
from dist_ckpt._sharding.index import CheckpointIndex, StoredChunk, StoredTensor
from dist_ckpt._sharding.reads import byte_runs, plan_reads
from dist_ckpt._sharding.shard_info import dtype_from_name, dtype_name
from dist_ckpt._sharding.table import local_shards
from dist_ckpt.box import Box
from dist_ckpt.storage.sealed import sealed

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


def test_the_index_survives_json() -> None:
    """Any key, no chunks, 0-dim, and files named once."""
    tensors = {
        "\ud800 ü/.": StoredTensor("int8", (), (StoredChunk(Box((), ()), "f", 3, 1),), "part"),
        "none": StoredTensor("bool", (0, 3), ()),
        **INDEX.tensors,
    }

    data = CheckpointIndex(tensors).to_json()

    assert (
        CheckpointIndex.from_json(data, where="i", sizes={"f": 4, "__0_0.distcp": 200}).tensors
        == tensors
    )


def damaged(change: Any) -> bytes:
    document = json.loads(INDEX.to_json())
    document.pop("xxh3_64")
    change(document, document["tensors"]["x"])
    return sealed(document)


DAMAGES = {
    "version": lambda d, _: d.update(version=99),
    "no tensors": lambda d, _: d.pop("tensors"),
    "tensors are a list": lambda d, _: d.update(tensors=[1]),
    "dtype": lambda _, x: x.update(dtype="nn"),
    "role": lambda _, x: x.update(role="hero"),
    "negative shape": lambda _, x: x.update(shape=[-8, 6]),
    "float shape": lambda _, x: x.update(shape=[8.0, 6]),
    "bool shape": lambda _, x: x.update(shape=[True, 6]),
    "another shape": lambda _, x: x.update(shape=[5, 6]),
    "fewer axes": lambda _, x: x.update(shape=[48]),
    "position": lambda _, x: x["chunks"][0].__setitem__(3, 105),
    "negative position": lambda _, x: x["chunks"][0].__setitem__(3, -1),
    "size": lambda _, x: x["chunks"][0].__setitem__(4, 95),
    "file": lambda d, _: d.update(files=["../../etc/passwd"]),
    "no such file": lambda _, x: x["chunks"][0].__setitem__(2, 1),
    "negative file": lambda _, x: x["chunks"][0].__setitem__(2, -1),
    "too many chunks": lambda _, x: x.update(chunks=x["chunks"] * 3),
    "huge shape": lambda _, x: x.update(shape=[1 << 63, 0], chunks=[]),
    "object of floats": lambda _, x: x.update(role="object"),
    "short chunk": lambda _, x: x["chunks"][0].pop(),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_wrong_index_is_corruption(name: str) -> None:
    """Every size, name and offset is checked before anything is read."""
    with pytest.raises(CorruptedCheckpointError, match="where/index"):
        CheckpointIndex.from_json(
            damaged(DAMAGES[name]), where="where/index", sizes={"__0_0.distcp": 200}
        )


@pytest.mark.parametrize("data", [b"", b"[]", b"null", b"\xff", b"[" * 100000])
def test_no_index_at_all_is_corruption(data: bytes) -> None:
    """Whatever json makes of it."""
    with pytest.raises(CorruptedCheckpointError):
        CheckpointIndex.from_json(data, where="i", sizes={})


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
