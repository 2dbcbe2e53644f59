"""A request beside what is stored."""

from __future__ import annotations

import torch

from dist_ckpt import ShardedTensor
from dist_ckpt._sharding.index import CheckpointIndex, StoredChunk, StoredTensor
from dist_ckpt._sharding.match import content_problems, describe_unexpected, holes, wanted_box
from dist_ckpt.box import Box


def stored(*rows: tuple[int, int]) -> StoredTensor:
    chunks = tuple(StoredChunk(Box((a, 0), (b - a, 2)), "f", 0, 8 * (b - a)) for a, b in rows)
    return StoredTensor("float32", (4, 2), chunks)


def request(shape: tuple[int, ...] = (4, 2), dtype: torch.dtype = torch.float32, *,
            loose: bool = False) -> ShardedTensor:  # fmt: skip
    offset = (0,) * len(shape)
    return ShardedTensor("x", None, dtype, shape, shape, offset, None, allow_shape_mismatch=loose)


def problems(tensor: ShardedTensor, *rows: tuple[int, int], cast: bool = False) -> list[str]:
    return content_problems([tensor], CheckpointIndex({"x": stored(*rows)}), cast=cast)


def test_agreement() -> None:
    """Complete, of the same shape and dtype; or of another where that is allowed."""
    assert problems(request(), (0, 1), (1, 4)) == []
    assert problems(request((9, 1), loose=True), (0, 4)) == []
    assert problems(request(dtype=torch.int8), (0, 4), cast=True) == []


def test_disagreement() -> None:
    """Each with the key, what is expected and what is stored."""
    assert problems(request((4, 3)), (0, 4)) == [
        "'x': global shape (4, 3) is expected, (4, 2) is stored"
    ]
    assert problems(request(dtype=torch.int8), (0, 4)) == [
        "'x': int8 is expected, float32 is stored"
    ]
    assert problems(request(), (0, 1), (2, 4)) == [
        "'x': 6 of the 8 elements at (0, 0) of shape (4, 2) are stored"
    ]
    assert len(problems(request((4, 2, 1), loose=True), (0, 4))) == 1


def test_holes_and_wanted_boxes() -> None:
    """0-dim values have no box to cut; nothing is missing from nothing."""
    value = StoredTensor("int8", (), (StoredChunk(Box((), ()), "f", 0, 1),))
    assert list(holes("x", Box((), ()), value)) == []
    assert list(holes("x", Box((), ()), StoredTensor("int8", (), ()))) != []
    assert list(holes("x", Box((0, 0), (0, 2)), stored())) == []
    assert wanted_box(Box((), ()), ()) == Box((), ())
    assert wanted_box(Box((3,), (5,)), (4,)) == Box((3,), (1,))
    assert wanted_box(Box((4,), (5,)), (4,)) is None


def test_unexpected_keys_come_with_the_nearest() -> None:
    """Looking for a near name is only worth it for the first few."""
    assert describe_unexpected(["wieght"], ["weight", "bias"]) == [
        "'wieght' is not stored (nearest: 'weight')"
    ]
    assert describe_unexpected(["zzz"], ["weight"]) == ["'zzz' is not stored"]
    many = describe_unexpected([f"weight{i}" for i in range(20)], ["weight"])
    assert len([line for line in many if "nearest" in line]) == 8
