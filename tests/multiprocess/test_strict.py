"""Strict handling, casts and whole reads on several ranks: what each of them is told."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import pytest
import torch

from dist_ckpt import (
    LoadOptions,
    MismatchError,
    ShardedObject,
    ShardedTensor,
    load,
    load_plain_tensors,
    save,
)
from dist_ckpt.errors import CoordinationError
from dist_ckpt.strategies.fully_parallel import FullyParallelLoadStrategyWrapper
from dist_ckpt.strategies.torch import TorchDistLoadShardedStrategy, TorchDistSaveShardedStrategy
from dist_ckpt.validation import StrictHandling
from tests.multiprocess._world import run_ranks

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.multiprocess


class Lines(logging.Handler):
    """Keeps the warnings of the library's logger."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []
        logging.getLogger("dist_ckpt").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one."""
        self.lines.append(record.getMessage())


def rows(key: str, rank: int, size: int, dtype: torch.dtype = torch.float32) -> ShardedTensor:
    data = torch.full((2, 3), rank + 1).to(dtype)
    return ShardedTensor.from_rank_offsets(key, data, (0, rank, size))


def stored(rank: int, size: int) -> dict[str, Any]:
    return {
        "both": rows("both", rank, size),
        "stale": rows("stale", rank, size),
        "dropped": ShardedObject("dropped", rank, (size,), (rank,)),
    }


def saves(rank: int, size: int, path: str) -> None:
    save(stored(rank, size), path)


def loads(rank: int, size: int, path: str, strict: str) -> tuple[Any, list[str]]:
    """Load with a key of its own that is not stored; return what came, and what was logged."""
    logged = Lines()
    request = {
        "both": rows("both", rank, size),
        "new": ShardedTensor.from_rank_offsets(f"new{rank}", torch.zeros(2)),
        "object": ShardedObject(f"object{rank}", None, (1,), (0,)),
    }
    try:
        result = load(request, path, strict=strict, validate_access_integrity=False)
    except MismatchError as error:
        return str(error), logged.lines
    return result, logged.lines


@pytest.mark.parametrize("strict", [flag.value for flag in StrictHandling])
def test_every_rank_is_told(tmp_path: Path, strict: str) -> None:
    """Logs and returned sets on each rank; errors on each with the keys of all."""
    path = str(tmp_path / "c")
    run_ranks(saves, 2, path)

    results = run_ranks(loads, 2, path, strict)

    with_missing = strict.endswith("_all") and strict != "ignore_all"
    for rank, (result, logged) in enumerate(results):
        own, other = ({f"new{r}", f"object{r}"} for r in (rank, 1 - rank))
        if strict.startswith(("raise", "assume")):
            assert all(f"'{key}' is not stored" in result for key in own | other)
            assert f"(rank {rank})" in result
            assert ("dropped" in result) is ("stale" in result) is with_missing
            assert logged == []
            continue
        loaded = result
        if strict.startswith("return"):
            loaded, missing, unexpected = result
            assert unexpected == own
            assert missing == ({"stale", "dropped"} if with_missing else set())
        assert loaded["both"].tolist() == [[rank + 1] * 3] * 2
        if not strict.startswith("log"):
            assert logged == []
            continue
        (line,) = logged
        assert all(f"'{key}' is not stored" in line for key in own)
        assert not any(f"'{key}'" in line for key in other)
        assert ("dropped; stale" in line) is with_missing


def loads_as_it_likes(rank: int, size: int, path: str) -> str:
    try:
        load({}, path, strict=("ignore_all", "raise_all")[rank])
    except CoordinationError as error:
        return str(error)
    return "nothing raised"


def test_ranks_must_be_strict_alike(tmp_path: Path) -> None:
    """What one rank asks for is not passed over because rank 0 asks for something else."""
    path = str(tmp_path / "c")
    saves(0, 1, path)

    for told in run_ranks(loads_as_it_likes, 2, path):
        assert "different strict handling" in told
        assert "reaction='raise'" in told


def casts(rank: int, size: int, path: str, how: str) -> tuple[Any, list[str]]:
    logged = Lines()
    dtype = torch.bfloat16 if rank == 0 else torch.float64
    request = {
        "both": rows("both", rank, size, torch.bfloat16),
        "own": ShardedTensor("stale", None, dtype, (2, 3), (4, 3), (2 * rank, 0), None),
    }
    strategy: Any = None
    options = LoadOptions()
    if how == "wrapped":
        strategy = FullyParallelLoadStrategyWrapper(TorchDistLoadShardedStrategy())
    elif how == "error":
        options = LoadOptions(cast="error")
    try:
        loaded = load(request, path, strategy, validate_access_integrity=False, options=options)
    except MismatchError as error:
        return str(error), logged.lines
    return (loaded["both"], loaded["own"]), logged.lines


@pytest.mark.parametrize("how", ["plain", "wrapped", "error"])
def test_one_rank_warns_of_casts(tmp_path: Path, how: str) -> None:
    """One warning in the job, of rank 0, with the keys of all ranks; an error is of all ranks."""
    path = str(tmp_path / "c")
    run_ranks(saves, 2, path)

    results = run_ranks(casts, 2, path, how)

    for rank, (result, logged) in enumerate(results):
        if how == "error":
            assert "'both': bfloat16 is expected, float32 is stored" in result
            continue
        both, own = result
        assert both.dtype is torch.bfloat16
        assert own.dtype is (torch.bfloat16, torch.float64)[rank]
        assert both.tolist() == own.tolist() == [[rank + 1] * 3] * 2
        assert len(logged) == (rank == 0)
    if how != "error":
        (line,) = results[0][1]
        assert "float32 -> bfloat16: 'both'; 'stale'" in line
        assert "float32 -> float64: 'stale'" in line


def reads_whole(rank: int, size: int, path: str) -> dict[str, Any]:
    return {key: value.tolist() for key, value in load_plain_tensors(path).items()}


def test_plain_tensors_are_whole_on_every_rank(tmp_path: Path) -> None:
    """Whatever the number of ranks that reads them; objects are none."""
    path = str(tmp_path / "c")
    run_ranks(saves, 2, path)

    whole = [[1.0] * 3] * 2 + [[2.0] * 3] * 2
    assert run_ranks(reads_whole, 2, path) == [{"both": whole, "stale": whole}] * 2
    assert reads_whole(0, 1, path) == {"both": whole, "stale": whole}


def saves_common(rank: int, size: int, path: str, how: str) -> tuple[list[str], Any]:
    """Save twice, with a common part that differs between ranks; return what was logged."""
    logged = Lines()
    strategy = TorchDistSaveShardedStrategy() if how == "remembered" else None
    seen: list[Any] = []

    def without_rank(common: dict[str, Any]) -> dict[str, Any]:
        seen.append(sorted(common))
        common["args"].pop("rank")  # of a copy
        del common["tags"], common["mine"]
        return common

    for step in range(2):
        state = {
            "w": rows("w", rank, size),
            "args": {"lr": 0.1, "rank": 0 if how == "equal" else rank},
            "tags": {"a", "b"},
            "step": torch.tensor(step, dtype=torch.int64 if rank else torch.int32),
            "mine": [1] if rank == 0 or how == "equal" else [1, 2],
        }
        save(
            state,
            path,
            strategy,
            preprocess_common_before_consistancy_check=(
                without_rank if how == "preprocessed" else None
            ),
            validate_access_integrity=how != "unchecked",
        )
        assert set(state) == {"w", "args", "tags", "step", "mine"}
        assert "rank" in state["args"]
    assert seen == ([["args", "mine", "step", "tags"]] * 2 if how == "preprocessed" else [])
    return logged.lines, load({}, path, validate_access_integrity=False)


@pytest.mark.parametrize("how", ["plain", "remembered", "equal", "preprocessed", "unchecked"])
def test_common_parts_that_differ_are_told(tmp_path: Path, how: str) -> None:
    """At each save, on rank 0 and on the rank that differs, with the places; rank 0's is stored."""
    results = run_ranks(saves_common, 2, str(tmp_path / "c"), how)

    for rank, (lines, loaded) in enumerate(results):
        assert loaded["args"] == {"lr": 0.1, "rank": 0}
        assert loaded["mine"] == [1]
        if how not in ("plain", "remembered"):
            assert lines == []
            continue
        assert len(lines) == 2, rank
        for line in lines:
            assert "rank 1: " in line
            assert "not on rank 0: 'mine.1'" in line
            assert "other values: 'args.rank'" in line
            assert "step" not in line
            assert "tags" not in line
