"""save and load among real processes: cut, replicated and uneven state, on other world sizes."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from dist_ckpt import (
    LocalNonpersistentObject,
    MismatchError,
    ShardedObject,
    ShardedTensor,
    load,
    load_common_state_dict,
    load_plain_tensors,
    load_tensors_metadata,
    save,
)
from dist_ckpt._formats.opening import open_contents
from tests.multiprocess._world import run_ranks

pytestmark = pytest.mark.multiprocess

ROWS = 11
WHOLE = torch.arange(ROWS * 4, dtype=torch.float32).view(ROWS, 4)


def bounds(rank: int, size: int) -> tuple[int, int]:
    """Return uneven cuts: the first rank has next to nothing."""
    cuts = (
        [0, *(1 + (ROWS - 1) * i // (size - 1) for i in range(size - 1)), ROWS]
        if size > 1
        else [0, ROWS]
    )
    return cuts[rank], cuts[rank + 1]


def state(rank: int, size: int, *, filled: bool) -> dict[str, Any]:
    start, stop = bounds(rank, size)
    rows = WHOLE[start:stop].clone()
    flat = slice(*(ROWS * 4 * (rank + i) // size for i in (0, 1)))
    values: dict[str, torch.Tensor] = {
        "rows": rows,
        "columns": WHOLE[:, rank : rank + 1] if rank < 4 else WHOLE[:, :0],
        "flat": WHOLE.flatten()[flat].clone(),
        "same": torch.full((100,), 7.0),
        "stale": torch.full((3,), float(rank)),
    }
    if not filled:
        values = {name: torch.zeros_like(value) for name, value in values.items()}
    columns = values["columns"]
    return {
        "rows": ShardedTensor("rows", values["rows"], torch.float32, (stop - start, 4), (ROWS, 4),
                              (start, 0), None),
        "columns": ShardedTensor("columns", columns, torch.float32, (ROWS, columns.shape[1]),
                                 (ROWS, size), (0, rank), None),
        "flat": ShardedTensor("flat", values["flat"], torch.float32, (ROWS, 4), (ROWS, 4), (0, 0),
                              None, flattened_range=flat),
        "same": ShardedTensor.from_rank_offsets("same", values["same"], replica_id=rank,
                                                writer="any"),
        "stale": ShardedTensor.from_rank_offsets("stale", values["stale"], replica_id=rank,
                                                 writer="first"),
        "object": ShardedObject("object", [rank] if filled else None, (size,), (rank,)),
        "local": LocalNonpersistentObject(rank),
        "step": 5 if filled else None,
        "from": rank if filled else None,
        "plain": torch.full((2,), float(rank)),
    }  # fmt: skip


def save_all(rank: int, size: int, path: str) -> None:
    save(state(rank, size, filled=True), path)


def load_same(rank: int, size: int, path: str) -> None:
    """Load on the same world: everything is back, common values are rank 0's."""
    request = state(rank, size, filled=False)
    pointers = {k: v.data.data_ptr() for k, v in request.items() if isinstance(v, ShardedTensor)}
    loaded = load(request, path, strict="raise_all")
    expected = state(rank, size, filled=True)
    for name in ("rows", "columns", "flat", "same"):
        assert torch.equal(loaded[name], expected[name].data), name
        assert loaded[name].data_ptr() == pointers[name]
    assert loaded["stale"].tolist() == [0.0] * 3
    assert loaded["object"] == [rank]
    assert loaded["local"] == rank
    assert (loaded["step"], loaded["from"], loaded["plain"].tolist()) == (5, 0, [0.0, 0.0])


def load_other(rank: int, size: int, path: str) -> None:
    """Load on another world: rows, columns and flat ranges, each cut as the others were."""
    start, stop = bounds(rank, size)
    flat = slice(*(ROWS * 4 * (rank + i) // size for i in (0, 1)))
    request = {
        "rows from flat": ShardedTensor("flat", None, torch.float32, (stop - start, 4), (ROWS, 4),
                                        (start, 0), None),
        "flat from rows": ShardedTensor("rows", None, torch.float32, (ROWS, 4), (ROWS, 4), (0, 0),
                                        None, flattened_range=flat),
    }  # fmt: skip
    loaded = load(request, path)
    assert torch.equal(loaded["rows from flat"], WHOLE[start:stop])
    assert torch.equal(loaded["flat from rows"], WHOLE.flatten()[flat])


@pytest.mark.parametrize("size", [1, 2, 4])
def test_round_trips(tmp_path: Path, size: int) -> None:
    """Saved on some ranks; loaded on as many, and on others."""
    path = tmp_path / "c"
    run_ranks(save_all, size, str(path))

    run_ranks(load_same, size, str(path))
    for other in {1, 2, 3} - {size}:
        run_ranks(load_other, other, str(path))

    assert torch.equal(load_plain_tensors(path)["rows"], WHOLE)
    assert load_common_state_dict(path)["step"] == 5
    assert load_tensors_metadata(path)["columns"].global_shape == (ROWS, size)
    contents = open_contents(path)
    assert contents.world_size == size
    (same,) = contents.index.tensors["same"].chunks
    assert same.box.numel == 100


def differing_requests(rank: int, size: int, path: str) -> list[str]:
    """Ask for a wrong key on one rank; and for different keys on each rank."""
    x = ShardedTensor.from_rank_offsets("same", torch.zeros(100), replica_id=rank)
    wrong = ShardedTensor.from_rank_offsets(f"no{rank}", torch.zeros(2))
    messages = []
    for request in ({"x": x, "y": wrong}, {"x": x, **({"y": wrong} if rank else {})}):
        with pytest.raises(MismatchError) as caught:
            load(request, path)
        messages.append(str(caught.value))
    loaded, missing, unexpected = load(
        {"x": x, "y": wrong}, path, strict="return_all", validate_access_integrity=False
    )
    assert loaded["x"].tolist() == [7.0] * 100
    assert unexpected == {f"no{rank}"}
    assert missing >= {"rows", "columns", "flat", "stale", "object"}
    assert "same" not in missing
    return messages


def test_requests_that_differ(tmp_path: Path) -> None:
    """Unexpected keys of each rank are told to all; missing ones are those that no rank wants."""
    run_ranks(save_all, 2, str(tmp_path / "c"))

    first, second = run_ranks(differing_requests, 2, str(tmp_path / "c"))

    assert first == second
    assert "'no0'" in first[0]
    assert "'no1'" in first[0]
    assert "rank 1" in first[1]


def many_saves(rank: int, size: int, path: str) -> None:
    """Save over and over, loading between, with what each rank did before out of step."""
    generator = random.Random(rank)  # noqa: S311 - ranks shall differ, no secret
    for step in range(6):
        tensors = {"x": ShardedTensor.from_rank_offsets(
            "x", torch.full((50,), float(step)), (0, rank, size))}  # fmt: skip
        sum(generator.random() for _ in range(generator.randrange(20000)))
        save({**tensors, "step": step}, path)
        loaded = load(
            {"x": ShardedTensor.from_rank_offsets("x", torch.zeros(50), (0, rank, size))}, path
        )
        assert loaded["step"] == step
        assert loaded["x"].tolist() == [float(step)] * 50


def test_saving_again_and_again(tmp_path: Path) -> None:
    """Every save replaces the last; no file of an old one stays."""
    run_ranks(many_saves, 3, str(tmp_path / "c"))

    assert [entry.name for entry in tmp_path.iterdir()] == ["c"]
    names = {entry.name for entry in (tmp_path / "c").iterdir()}
    assert names == {
        "metadata.json", "manifest.json", "index.bin", "common.json", ".metadata",
        "__0_0.distcp", "__1_0.distcp", "__2_0.distcp",
    }  # fmt: skip
