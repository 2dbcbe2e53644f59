"""What ranks are told of a checkpoint, and what becomes of one that cannot read it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dist_ckpt import (
    CheckpointingException,
    LoadOptions,
    ShardedTensor,
    StorageError,
    load,
    save,
)
from dist_ckpt._formats.torch_dist.index_file import IndexFile
from tests.multiprocess._world import run_ranks

pytestmark = pytest.mark.multiprocess

COUNT = 40


def state(rank: int, size: int, value: float) -> dict[str, Any]:
    rows = torch.full((4, 3), value)
    return {
        f"w{i}": ShardedTensor.from_rank_offsets(f"w{i}", rows + i, (0, rank, size))
        for i in range(COUNT)
    }


def saved(rank: int, size: int, path: str) -> None:
    save(state(rank, size, 1.0), path)


def read_by_rank(rank: int, size: int, path: str) -> tuple[list[int], bool]:
    """Load, and tell how many bytes of the index were read besides its directory."""
    told: list[int] = []
    original = IndexFile._read

    def counted(self: IndexFile, position: int, nbytes: int) -> bytes:
        told.append(nbytes)
        return original(self, position, nbytes)

    IndexFile._read = counted  # type: ignore[method-assign]
    loaded = load(state(rank, size, 0.0), path)
    IndexFile._read = original  # type: ignore[method-assign]
    return told, all((loaded[f"w{i}"] == 1.0 + i).all() for i in range(COUNT))


def test_each_rank_reads_the_index_for_itself(tmp_path: Path) -> None:
    """A small one is read at once; rank 0 has it already."""
    run_ranks(saved, 2, str(tmp_path / "c"))

    (first, is_right), (second, is_right_too) = run_ranks(read_by_rank, 2, str(tmp_path / "c"))

    assert is_right
    assert is_right_too
    assert first == []
    assert len(second) == 1
    assert second[0] < (tmp_path / "c" / "index.bin").stat().st_size


def cannot_read(rank: int, size: int, path: str, how: str) -> str:
    """Load where rank 1 does not get of the index what rank 0 got; return what was raised."""
    if rank == 1:
        original = IndexFile._read

        def other(self: IndexFile, position: int, nbytes: int) -> bytes:
            if how == "unreadable":
                raise StorageError("no such mount")
            return original(self, position, nbytes)[:-1] + b"?"

        IndexFile._read = other  # type: ignore[method-assign]
    asked = state(rank, size, 0.0)
    try:
        load(asked, path, options=LoadOptions(timeout_secs=60))
    except CheckpointingException as error:
        assert all((asked[f"w{i}"].data == i).all() for i in range(COUNT))
        return type(error).__name__
    return "nothing"


@pytest.mark.parametrize(
    ("how", "error"), [("unreadable", "StorageError"), ("altered", "CorruptedCheckpointError")]
)
def test_a_rank_that_cannot_read_the_index_tells_all(tmp_path: Path, how: str, error: str) -> None:
    """None of them goes on alone, and nothing is filled."""
    run_ranks(saved, 2, str(tmp_path / "c"))

    assert run_ranks(cannot_read, 2, str(tmp_path / "c"), how) == [error] * 2
