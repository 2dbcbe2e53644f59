"""A rank that has returned from a call may leave: no other rank's verdict depends on it."""

from __future__ import annotations

import contextlib
import datetime as dt
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dist_ckpt import ShardedTensor, load, save
from dist_ckpt.background import BackgroundSaver
from dist_ckpt.errors import CheckpointNotFoundError
from dist_ckpt.options import BackgroundOptions
from dist_ckpt.serialization import all_processes
from tests.multiprocess._world import run_ranks

pytestmark = pytest.mark.multiprocess


def state(rank: int, size: int, value: float) -> dict[str, Any]:
    """Return one shard of each rank."""
    data = torch.full((5, 7), value + rank)
    return {"w": ShardedTensor.from_rank_offsets("w", data, (0, rank, size))}


@contextlib.contextmanager
def group_of_rank_0(rank: int, size: int) -> Iterator[None]:
    """Make a process group whose store lives in rank 0."""
    outer = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
    limit = dt.timedelta(seconds=60)
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=limit)
        outer.set("port", str(store.port))
    else:
        port = int(outer.get("port"))
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=limit)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)
    try:
        yield
    finally:
        dist.destroy_process_group()


def save_one(rank: int, size: int, target: Path) -> None:
    save(state(rank, size, 1.0), target)


def load_one(rank: int, size: int, target: Path) -> None:
    loaded = load(state(rank, size, 0.0), target.parent / "there")
    assert float(loaded["w"][0, 0]) == 1.0 + rank


def load_nothing(rank: int, size: int, target: Path) -> None:
    with pytest.raises(CheckpointNotFoundError):
        load(state(rank, size, 0.0), target)


def exchange_one(rank: int, size: int, target: Path) -> None:
    scattered = all_processes().map_scatter("a step", lambda: rank, list)
    assert scattered == rank


def background_close(rank: int, size: int, target: Path) -> None:
    with BackgroundSaver(BackgroundOptions(worker="thread")) as saver:
        saver.save(state(rank, size, 1.0), target)


def background_drain(rank: int, size: int, target: Path) -> None:
    saver = BackgroundSaver()
    saver.save(state(rank, size, 1.0), target)
    saver.drain()


CALLS: dict[str, Callable[[int, int, Path], None]] = {
    "save": save_one,
    "load": load_one,
    "failing load": load_nothing,
    "scatter": exchange_one,
    "close": background_close,
    "drain": background_drain,
}


def end_process(rank: int, size: int, folder: str, name: str, leaver: int) -> int:
    """Make a call in a group whose store lives in rank 0; then one rank's process ends."""
    with group_of_rank_0(rank, size):
        if name == "load":
            save_one(rank, size, Path(folder, "there"))
        CALLS[name](rank, size, Path(folder, "c"))
        if rank == leaver:
            os._exit(0)
    return rank


@pytest.mark.parametrize(
    ("name", "size", "leaver"),
    [*((name, 2, 0) for name in CALLS), ("save", 3, 0), ("save", 2, 1), ("drain", 2, 1)],
)
def test_a_process_ends_when_its_call_has_returned(
    tmp_path: Path, name: str, size: int, leaver: int
) -> None:
    """It may host the store; the others get the same verdict, whether it is good or bad."""
    outcomes = run_ranks(
        end_process, size, str(tmp_path), name, leaver,
        init_process_group=False, expect_errors=True,
    )  # fmt: skip

    assert outcomes[leaver].exit_code == 0
    for outcome in outcomes:
        assert outcome.rank == leaver or outcome.ok, outcome.describe()
    left = {"save": ["c"], "close": ["c"], "drain": ["c"], "load": ["there"]}
    assert sorted(one.name for one in tmp_path.iterdir()) == left.get(name, [])
