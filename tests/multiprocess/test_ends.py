"""A rank that has returned from a call may leave: no other rank's verdict depends on it."""

from __future__ import annotations

import contextlib
import datetime as dt
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dist_ckpt import ShardedTensor, load, save
from dist_ckpt.background import BackgroundSaver
from dist_ckpt.errors import AsyncSaveError, CheckpointNotFoundError
from dist_ckpt.options import BackgroundOptions
from dist_ckpt.serialization import all_processes, load_plain_tensors
from tests.faults._background import worker_pid
from tests.faults._leaks import hidden_entries
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
        assert "deleteKey" not in outcome.log  # torch complains with a stack trace
    left = {"save": ["c"], "close": ["c"], "drain": ["c"], "load": ["there"]}
    assert sorted(one.name for one in tmp_path.iterdir()) == left.get(name, [])


def lose_rank_0(rank: int, size: int, folder: str, is_committed: bool) -> str:
    """Save in the background; rank 0 loses its worker, then it ends, and its store with it."""
    path = Path(folder, "c")
    with group_of_rank_0(rank, size):
        saver = BackgroundSaver()
        saver.save(state(rank, size, 1.0), path)
        saver.drain()
        dist.barrier()  # the worker of rank 0 has told the other one how that save ended
        old, pid = path.stat().st_ino, worker_pid(saver)
        assert pid is not None
        if rank == 0 and is_committed:
            for n in range(3000):  # the user's own: they take the worker some time to put away
                (path / f"note-{n}").touch()
        if rank == 0 and not is_committed:
            os.kill(pid, signal.SIGSTOP)
        dist.barrier()
        saver.save(state(rank, size, 2.0), path)
        if rank == 0:
            deadline = time.monotonic() + 60
            while is_committed and path.stat().st_ino == old and time.monotonic() < deadline:
                pass
            os.kill(pid, signal.SIGKILL)
            os._exit(0)
        told = ""
        try:
            saver.drain()
        except AsyncSaveError as error:
            told = str(error)
        saver.close()
    return told


@pytest.mark.parametrize("is_committed", [True, False])
def test_a_rank_that_can_ask_nobody_looks_at_the_disk(tmp_path: Path, is_committed: bool) -> None:
    """What has been committed did not fail, and what did not commit has failed for good."""
    outcomes = run_ranks(
        lose_rank_0, 2, str(tmp_path), is_committed, init_process_group=False, expect_errors=True
    )

    assert outcomes[1].ok, outcomes[1].describe()
    told = outcomes[1].value
    assert (told == "") == is_committed, told
    value = 2.0 if is_committed else 1.0
    found = load_plain_tensors(tmp_path / "c")["w"]
    assert found[:, 0].tolist() == [value] * 5 + [value + 1] * 5
    assert hidden_entries([tmp_path]) == []


SCRIPT = """
    import sys
    import threading
    from pathlib import Path

    import torch.distributed as dist

    from dist_ckpt._saving.plan import PlannedSave
    from dist_ckpt._saving.publish import CommitPoint
    from dist_ckpt._worker.hub import HubAddress
    from dist_ckpt._comm.store import StoreCommunicator
    from dist_ckpt._worker.result import SaveInFlight
    from dist_ckpt.background import BackgroundOptions, BackgroundSaver
    from dist_ckpt.preemption import PreemptionGuard

    port, folder = int(sys.argv[1]), Path(sys.argv[2])
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    comm = StoreCommunicator(store, rank=1, size=2, timeout_secs=600)
    guard = PreemptionGuard(communicator=comm)
    guard.__enter__()
    saver = BackgroundSaver(BackgroundOptions(drain_timeout_secs=0.1))
    nobody = HubAddress(("127.0.0.1",), port=1, token=b"x")
    point = CommitPoint(nobody, "s/1", rank=1, size=2, timeout_secs=600)
    planned = PlannedSave(
        phase="writing", target=folder / "c", directory=folder / "a", rank=1, world_size=2,
        options=None, prepared=None, saver="s", number=1, point=point,
    )
    save = SaveInFlight(number=1, path=folder / "c", comm=comm, planned=planned, error=OSError("boom"))
    saver._queue.add(save)
    while store.num_keys() and not saver._queue._is_finishing:
        pass
    names = {one.name for one in threading.enumerate()}
    assert {"dist_ckpt-saves", "dist_ckpt-preemption"} <= names, names

    class Last:  # collected when the interpreter is finalised
        def __del__(self, enumerate=threading.enumerate, write=sys.stdout.write):
            write(" ".join(one.name for one in enumerate()))

    last = Last()
"""


def test_no_thread_asks_a_store_while_the_interpreter_is_finalised(tmp_path: Path) -> None:
    """It would end the process: ``terminate called without an active exception``.

    A rank ends while its saver waits for the word of rank 0, which never comes, and while its guard
    looks for requests; neither was closed.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT), str(store.port), str(tmp_path)],
        capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip

    assert "terminate called" not in done.stderr
    assert done.returncode == 0, done.stderr
    assert done.stdout == "MainThread", done.stderr
