"""Strategies that exchange through the default process group: real ranks run the conformance kit."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from dist_ckpt import ShardedObject, ShardedTensor, load, save
from dist_ckpt.errors import StorageError
from dist_ckpt.serialization import all_processes
from dist_ckpt.strategies.async_utils import AsyncCallsQueue
from dist_ckpt.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from dist_ckpt.strategies.torch import TorchDistLoadShardedStrategy, TorchDistSaveShardedStrategy
from dist_ckpt.strategies.zarr import ZarrLoadShardedStrategy, ZarrSaveShardedStrategy
from dist_ckpt.testing import StrategyMatrix
from tests.conformance._npz import NpzLoadStrategy, NpzSaveStrategy
from tests.multiprocess._world import RankOutcome, run_ranks

pytestmark = pytest.mark.multiprocess


def on_this_rank(rank: int, world_size: int, fn: Any) -> Any:
    return fn(all_processes(timeout_secs=60))


def told(outcome: RankOutcome) -> Any:
    if outcome.ok:
        return outcome.value
    return outcome.error or AssertionError(outcome.describe())


class InProcesses(StrategyMatrix):
    """The kit with real gloo ranks, and few of its cases: the others run with threads."""

    cases = ("flattened", "replicated", "objects")
    worlds = ((2, 4),)

    def run(self, fn: Any, world_size: int) -> list[Any]:
        outcomes = run_ranks(on_this_rank, world_size, fn, expect_errors=True)
        return [told(outcome) for outcome in outcomes]


class TestTorchDist(InProcesses):
    save_strategy = ("torch_dist", 1)


class TestZarr3(InProcesses):
    save_strategy = ("zarr", 2)


class TestFullyParallelTorchDist(InProcesses):
    save_strategy = FullyParallelSaveStrategyWrapper(TorchDistSaveShardedStrategy())
    load_strategy = FullyParallelLoadStrategyWrapper(TorchDistLoadShardedStrategy())
    cases = ("plain", "uneven", "flattened", "replicated", "factories", "objects")
    worlds = ((2, 4), (4, 3))


class TestFullyParallelZarr2(InProcesses):
    save_strategy = FullyParallelSaveStrategyWrapper(ZarrSaveShardedStrategy())
    load_strategy = FullyParallelLoadStrategyWrapper(
        ZarrLoadShardedStrategy(), exchange_algo="gather_rounds"
    )


class TestFullyParallelZarr3(InProcesses):
    save_strategy = FullyParallelSaveStrategyWrapper(ZarrSaveShardedStrategy("zarr", 2))
    load_strategy = FullyParallelLoadStrategyWrapper(
        ZarrLoadShardedStrategy(), exchange_algo="gather_object"
    )


class TestFullyParallelThirdParty(InProcesses):
    save_strategy = FullyParallelSaveStrategyWrapper(NpzSaveStrategy("npz", 1))
    load_strategy = FullyParallelLoadStrategyWrapper(NpzLoadStrategy())


WRAPPED = {
    "native": TorchDistSaveShardedStrategy,
    "wrapped": lambda: FullyParallelSaveStrategyWrapper(TorchDistSaveShardedStrategy()),
    "wrapped zarr": lambda: FullyParallelSaveStrategyWrapper(ZarrSaveShardedStrategy("zarr", 2)),
}


def state(rank: int, size: int) -> dict[str, Any]:
    return {
        "all": ShardedTensor.from_rank_offsets("all", torch.full((64,), 1.0), replica_id=rank),
        "cut": ShardedTensor.from_rank_offsets("cut", torch.full((8,), 1.0), (0, rank, size)),
        "object": ShardedObject("object", [rank], (size,), (rank,)),
        "plain": torch.full((3,), 1.0),
        "values": {"step": [1]},
    }


def save_later(rank: int, world_size: int, path: str, kind: str, fail: bool) -> int:
    """Save asynchronously and change all that was given; rank 1's disk may fail meanwhile."""
    given = state(rank, world_size)
    request = save(given, path, WRAPPED[kind](), async_sharded_save=True)
    for tensor in (given["all"].data, given["cut"].data, given["plain"]):
        tensor.fill_(9.0)
    given["values"]["step"].append(9)
    given["object"].data.append(9)
    assert not Path(path).exists()
    queue = AsyncCallsQueue()

    def broken(*_: Any, **__: Any) -> None:
        raise OSError(5, "the disk of rank 1")

    broken_disk = mock.patch("dist_ckpt._formats.torch_dist.write.write_shards", broken)
    broken_array = mock.patch("dist_ckpt._formats.zarr.format.write_arrays", broken)
    if fail and rank == 1 and kind == "native":
        # Written by another process: a file that is there already is in its way.
        (attempt,) = Path(path).parent.glob("*.attempt")
        for number in range(2):
            (attempt / f"__1_{number}.distcp").write_text("in the way")
        queue.schedule_async_request(request)
        finished = finish(queue)
    elif fail and rank == 1:
        with broken_disk, broken_array:
            queue.schedule_async_request(request)
            finished = finish(queue)
    else:
        queue.schedule_async_request(request)
        finished = finish(queue)
    return finished


def finish(queue: AsyncCallsQueue) -> int:
    try:
        return len(queue.maybe_finalize_async_calls(blocking=True))
    finally:
        queue.close()


def load_it(rank: int, world_size: int, path: str, wrapped: bool) -> dict[str, Any]:
    request = state(rank, world_size)
    for key in ("all", "cut", "object"):
        request[key] = request[key].without_data()
    strategy = FullyParallelLoadStrategyWrapper(TorchDistLoadShardedStrategy()) if wrapped else None
    loaded = load(request, path, strategy)
    return {
        "tensors": {float(v) for key in ("all", "cut", "plain") for v in loaded[key]},
        "values": loaded["values"],
        "object": loaded["object"],
    }


@pytest.mark.parametrize("kind", WRAPPED)
def test_an_asynchronous_save_stores_what_was_there(tmp_path: Path, kind: str) -> None:
    """Changes behind the call reach neither tensors nor objects nor the common part."""
    path = str(tmp_path / "c")

    assert run_ranks(save_later, 2, path, kind, False) == [1, 1]

    for rank, found in enumerate(run_ranks(load_it, 2, path, False)):
        assert found == {"tensors": {1.0}, "values": {"step": [1]}, "object": [rank]}
    assert [entry.name for entry in tmp_path.iterdir()] == ["c"]


@pytest.mark.parametrize("kind", WRAPPED)
def test_a_failure_in_the_background_is_told_to_all(tmp_path: Path, kind: str) -> None:
    """Every rank raises when the save is finished, none waits; nothing stays."""
    outcomes = run_ranks(save_later, 2, str(tmp_path / "c"), kind, True, expect_errors=True)

    for outcome in outcomes:
        assert not outcome.ok
        assert "rank 1" in outcome.message
        wanted = "__1_0.distcp: File exists" if kind == "native" else "the disk of rank 1"
        assert wanted in outcome.message
    assert list(tmp_path.iterdir()) == []


def save_natively(rank: int, world_size: int, path: str) -> None:
    save(state(rank, world_size), path)


def test_a_wrapper_reads_what_was_saved_without_one(tmp_path: Path) -> None:
    """Tensors of the common part too, which the wrapped strategy knows nothing of."""
    path = str(tmp_path / "c")
    run_ranks(save_natively, 2, path)

    for rank, found in enumerate(run_ranks(load_it, 2, path, True)):
        assert found == {"tensors": {1.0}, "values": {"step": [1]}, "object": [rank]}


def save_with_a_bad_disk(rank: int, world_size: int, path: str, kind: str) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise StorageError("the disk of rank 1")

    if rank == 1:
        mock.patch("dist_ckpt._formats.torch_dist.write.write_shards", broken).start()
        mock.patch("dist_ckpt._formats.zarr.format.write_arrays", broken).start()
    save(state(rank, world_size), path, WRAPPED[kind]())


@pytest.mark.parametrize("kind", WRAPPED)
def test_a_failure_through_a_wrapper_is_told_to_all(tmp_path: Path, kind: str) -> None:
    """Nothing is committed: no directory, no attempt, no marker."""
    outcomes = run_ranks(save_with_a_bad_disk, 2, str(tmp_path / "c"), kind, expect_errors=True)

    assert ["the disk of rank 1" in outcome.message for outcome in outcomes] == [True, True]
    assert [outcome.ok for outcome in outcomes] == [False, False]
    assert list(tmp_path.iterdir()) == []
