"""Checkpointers of several real ranks, whose checkpoint processes meet without them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from dist_ckpt import ShardedTensor
from dist_ckpt.barriers import Barrier, BarrierConfig, DistBarrier
from dist_ckpt.builder import CheckpointerConfig, make_async_checkpointer, make_sync_checkpointer
from dist_ckpt.checkpoint_process import CheckpointProcessConfig
from dist_ckpt.checkpoint_reader import CheckpointReader
from dist_ckpt.checkpoint_writer import CheckpointWriter, CheckpointWriterConfig
from dist_ckpt.dict_utils import diff
from dist_ckpt.errors import CheckpointingException, CheckpointNotFoundError, ConfigError
from dist_ckpt.types import RankInfo
from tests._checkpoint_hooks import Fails, Gate
from tests.multiprocess._world import run_ranks

pytestmark = pytest.mark.multiprocess

GRID = torch.arange(30.0).reshape(6, 5)


def patient(timeout_secs: float = 60) -> CheckpointerConfig:
    """Return a config for machines on which a process takes its time to start."""
    return CheckpointerConfig(
        writer_config=CheckpointWriterConfig(write_barrier_timeout_secs=timeout_secs),
        process_config=CheckpointProcessConfig(subprocess_init_timeout_secs=90),
    )


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def own(rank: int, step: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(100 * rank + step)
    big = torch.randn(50 + rank, 7, generator=generator)
    return {
        "w": big.t(),
        "bits": torch.randint(0, 256, (rank * 3,), dtype=torch.uint8, generator=generator),
        "half": big[::2].to(torch.bfloat16),
        "values": {"rank": rank, "step": step, "list": [step] * (rank + 1)},
    }


def outcome(call: Any) -> str:
    """Return what a call raises, as text; empty if it does not."""
    try:
        call()
    except CheckpointingException as error:
        return f"{type(error).__name__}: {error}"
    return ""


def save_and_wait(checkpointer: Any, state: dict[str, Any], path: str) -> None:
    for future in checkpointer.save(state, path) or ():
        future.result()


def save_own(rank: int, size: int, folder: str, kind: str) -> list[str]:
    make: Any = make_sync_checkpointer if kind == "sync" else make_async_checkpointer
    checkpointer = make(patient())
    for step in range(3):
        state = own(rank, step)
        futures = checkpointer.save(state, f"{folder}/{step}")
        for tensor in (state["w"], state["half"]):
            tensor.zero_()  # training goes on
    for future in futures or ():
        future.result()
    problems = [
        f"{step}: {differences}"
        for step in range(3)
        if any(differences := diff(checkpointer.load(f"{folder}/{step}"), own(rank, step)))
    ]
    checkpointer.close()
    return problems


@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize("size", [1, 2])
def test_each_rank_gets_its_own_back(kind: str, size: int, tmp_path: Path) -> None:
    """Bit for bit, on one and on two ranks; another process reads each rank's part; no litter."""
    assert run_ranks(save_own, size, str(tmp_path), kind) == [[]] * size

    assert names(tmp_path) == ["0", "1", "2"]
    for rank in range(size):
        state, _ = CheckpointReader(RankInfo(rank, size)).read(tmp_path / "2")
        assert diff(state, own(rank, 2)) == ([], [], [])
    with pytest.raises(CheckpointNotFoundError, match=f"no part of rank {size}"):
        CheckpointReader(RankInfo(size, size + 1)).read(tmp_path / "2")


def sharded(rank: int, size: int, *, filled: bool, dim: int = 0) -> dict[str, Any]:
    grid = GRID if filled else torch.zeros_like(GRID)
    mesh = init_device_mesh("cpu", (size,))
    start, stop = 5 * rank // size, 5 * (rank + 1) // size
    columns = grid[:, start:stop].clone()
    return {
        "model": {
            "cut": distribute_tensor(grid, mesh, [Shard(dim)]),
            "param": torch.nn.Parameter(distribute_tensor(grid, mesh, [Shard(dim)])),
            "same": distribute_tensor(grid, mesh, [Replicate()]),
        },
        "columns": ShardedTensor(
            "columns", columns, columns.dtype, (6, stop - start), (6, 5), (0, start), None
        ),
    }


def save_sharded(rank: int, size: int, path: str, kind: str) -> None:
    make: Any = make_sync_checkpointer if kind == "sync" else make_async_checkpointer
    checkpointer = make(patient())
    state = {**sharded(rank, size, filled=True), "own": torch.tensor(rank)}
    for future in checkpointer.save(state, path) or ():
        future.result()
    checkpointer.close()


def load_sharded(rank: int, size: int, path: str, dim: int) -> list[str]:
    checkpointer = make_sync_checkpointer()
    target = sharded(rank, size, filled=False, dim=dim)
    before = target["model"]["cut"]
    loaded = checkpointer.load(path, target, strict=True)
    expected = sharded(rank, size, filled=True, dim=dim)
    problems = [
        name
        for name, tensor in loaded["model"].items()
        if not isinstance(tensor, DTensor)
        or not torch.equal(tensor.to_local(), expected["model"][name].to_local())
    ]
    if not torch.equal(loaded["columns"], expected["columns"].data):
        problems.append("columns")
    if loaded["model"]["cut"] is not before:
        problems.append("identity")
    return problems


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_sharded_leaves_load_on_other_layouts(kind: str, tmp_path: Path) -> None:
    """DTensors and sharded tensors saved by two ranks load cut otherwise, on more and on fewer."""
    path = tmp_path / "c"
    run_ranks(save_sharded, 2, str(path), kind)

    assert run_ranks(load_sharded, 3, str(path), 0) == [[]] * 3
    assert run_ranks(load_sharded, 2, str(path), 1) == [[]] * 2
    assert run_ranks(load_sharded, 1, str(path), 0) == [[]]
    alone, missing = CheckpointReader(RankInfo(1, 2)).read(path)
    assert missing == []
    assert torch.equal(alone["model"]["cut"], GRID)
    assert torch.equal(alone["columns"], GRID)
    assert alone["own"] == 1


def killed_while_writing(rank: int, size: int, folder: str) -> list[tuple[list[str], float]]:
    """Kill rank 0's process in one save and rank 1's in another; return what was told of each."""
    gate = Gate(Path(folder, f"gate{rank}"), (f"bad{rank}",))
    checkpointer = make_async_checkpointer(
        patient(timeout_secs=600), checkpoint_writer_init_args=writer_args(gate, 600)
    )
    checkpointer.save(own(rank, 0), f"{folder}/before")[1].result()
    found = []
    for victim in range(size):
        bad, after = Path(folder, f"bad{victim}"), f"{folder}/after{victim}"
        _, written = checkpointer.save(own(rank, 1), bad)
        if rank == victim:
            with gate.pipe.open("wb"):
                process = checkpointer._checkpoint_process.process
                assert process is not None
                os.kill(process.pid or 0, signal.SIGKILL)
                told = outcome(written.result)
        started = time.monotonic()
        told = outcome(written.result)
        waited = time.monotonic() - started
        dist.barrier()
        there = ["it is there"] if bad.exists() else []
        next_told = outcome(checkpointer.save(own(rank, 2), after)[1].result)
        differs = ["after"] if any(diff(checkpointer.load(after), own(rank, 2))) else []
        found.append(([told, *there, next_told, *differs], waited))
    checkpointer.close()
    return found


def writer_args(hook: Any, timeout_secs: float) -> dict[str, Any]:
    config = CheckpointWriterConfig(write_barrier_timeout_secs=timeout_secs)
    return {"commit_hook": hook, "config": config}


def test_a_killed_process_fails_the_save_on_all_ranks(tmp_path: Path) -> None:
    """At once, not after the timeout; nothing is committed; the next save works on both."""
    outcomes = run_ranks(killed_while_writing, 2, str(tmp_path))

    for rank, found in enumerate(outcomes):
        for victim, (told, waited) in enumerate(found):
            kind = "CheckpointProcessError" if rank == victim else "CoordinationError"
            assert told[0].startswith(kind)
            assert "terminated unexpectedly" in told[0]
            assert "SIGKILL" in told[0]
            assert told[1:] == [""]
            assert waited < 60
    left = [name for name in names(tmp_path) if not name.startswith("gate")]
    assert left == ["after0", "after1", "before"]


PLACES = ("staging", "handing over", "writing")


def failing(rank: int, size: int, folder: str) -> tuple[dict[str, list[str]], list[str]]:
    """Fail on rank 1 in every place, then on both with one that looks; one process for all."""
    bad = ("unseen", *(["writing"] if rank == 1 else []))
    checkpointer = make_async_checkpointer(
        patient(timeout_secs=600), checkpoint_writer_init_args=writer_args(Fails(before=bad), 600)
    )
    found = {}
    for place in PLACES:
        state: dict[str, Any] = own(rank, 0)
        if rank == 1 and place == "staging":
            state["no copy"] = (n for n in ())
        if rank == 1 and place == "handing over":
            state["no pickle"] = outcome.__class__(outcome.__code__, {}, "nowhere")
        told = [outcome(functools.partial(save_and_wait, checkpointer, state, f"{folder}/{place}"))]
        for step in range(3):
            path = f"{folder}/{place}-{step}"
            told.append(outcome(checkpointer.save(own(rank, step), path)[1].result))
            differences = diff(checkpointer.load(path), own(rank, step))
            told += ["differs"] if any(differences) else []
        found[place] = told
    _, written = checkpointer.save(own(rank, 0), f"{folder}/unseen")
    if rank == 0:
        outcome(written.result)  # only rank 0 looks
    after = [
        outcome(functools.partial(save_and_wait, checkpointer, own(rank, 1), f"{folder}/lost"))
    ]
    after.append(outcome(checkpointer.save(own(rank, 2), f"{folder}/good")[1].result))
    checkpointer.close()
    return found, after


def test_a_failure_on_one_rank_is_told_to_all_once(tmp_path: Path) -> None:
    """Wherever it happens, both ranks hear of it, at once; three good saves follow.

    If one rank has seen a failure and one has not, the next save fails on both; then all is well.
    """
    (first, first_after), (second, second_after) = run_ranks(failing, 2, str(tmp_path))

    for place in PLACES:
        assert "rank 1" in first[place][0]
        assert second[place][0]
        assert first[place][1:] == second[place][1:] == ["", "", ""]
    assert "rank 1 gave up the save" in first_after[0]
    assert "no unseen" in second_after[0]
    assert first_after[1] == second_after[1] == ""
    good = [f"{place}-{step}" for place in PLACES for step in range(3)]
    assert names(tmp_path) == sorted(["good", *good])


def one_stays_away(rank: int, size: int, folder: str) -> list[str]:
    checkpointer = make_async_checkpointer(patient(timeout_secs=3))
    # Both processes are there before the clock starts.
    checkpointer.save(own(rank, 0), f"{folder}/first")[1].result()
    told = []
    if rank == 0:
        told.append(outcome(checkpointer.save(own(rank, 1), f"{folder}/alone")[1].result))
    dist.barrier()
    checkpointer.close()
    return told


def test_the_writers_timeout_reaches_the_process(tmp_path: Path) -> None:
    """A rank that does not save is named after ``write_barrier_timeout_secs``."""
    told = run_ranks(one_stays_away, 2, str(tmp_path))

    assert "BarrierTimeoutError" in told[0][0]
    assert "ranks [1] of 2 did not arrive within 3 s" in told[0][0]
    assert names(tmp_path) == ["first"]


def without_group(rank: int, size: int, folder: str) -> list[str]:
    checkpointer = make_async_checkpointer(patient(), RankInfo(rank, size))
    told = [outcome(checkpointer.save(own(rank, 0), f"{folder}/c")[1].result)]
    checkpointer.close()
    return told


def group_by_file(rank: int, size: int, folder: str) -> list[str]:
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=size
    )
    told = without_group(rank, size, folder)
    dist.destroy_process_group()
    return told


def by_barrier(rank: int, size: int, folder: str, ports: list[int]) -> list[str]:
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    told, held = [], []
    for name, port in zip(("sync", "async"), ports, strict=True):
        make: Any = make_sync_checkpointer if name == "sync" else make_async_checkpointer
        arguments = {"tcpstore_port": port, "master_address": "127.0.0.1"}
        config = dataclasses.replace(
            patient(), barrier_config=BarrierConfig("tcp_store", arguments)
        )
        checkpointer = make(config, RankInfo(rank, size))
        held.append(checkpointer)  # rank 0 serves the store as long as it has this
        told.append(
            outcome(
                functools.partial(save_and_wait, checkpointer, own(rank, 0), f"{folder}/{name}")
            )
        )
    for checkpointer in held:
        checkpointer.close()
    return told


def test_ranks_without_a_process_group_meet_by_environment(tmp_path: Path) -> None:
    """MASTER_ADDR and MASTER_PORT are enough."""
    assert run_ranks(without_group, 2, str(tmp_path), init_process_group=False) == [[""]] * 2
    assert names(tmp_path) == ["c"]


def test_a_group_that_met_in_a_file(tmp_path: Path) -> None:
    """Rank 0 serves a store."""
    assert run_ranks(group_by_file, 2, str(tmp_path), init_process_group=False) == [[""]] * 2
    state, _ = CheckpointReader(RankInfo(1, 2)).read(tmp_path / "c")
    assert diff(state, own(1, 0)) == ([], [], [])


def test_ranks_that_are_told_where_to_meet(tmp_path: Path) -> None:
    """A store of the checkpointer's own, served by rank 0, with no other sign of a job."""
    ports = free_ports(2)
    told = run_ranks(by_barrier, 2, str(tmp_path), ports, init_process_group=False)

    assert told == [["", ""]] * 2
    assert names(tmp_path) == ["async", "sync"]


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def swapped(rank: int, size: int) -> str:
    return outcome(functools.partial(make_async_checkpointer, patient(), RankInfo(1 - rank, size)))


def test_ranks_that_are_others_in_the_group() -> None:
    """They are told on all ranks, and no process is started."""
    told = run_ranks(swapped, 2)

    assert all("rank 1 is rank 0 in the process group" in text for text in told)


def barriers(rank: int, size: int) -> list[str]:
    DistBarrier(timeout_secs=60).execute_barrier()
    config = CheckpointerConfig(barrier_config=BarrierConfig("dist_barrier"))
    checkpointer = make_sync_checkpointer(config)
    assert isinstance(checkpointer._writer._barrier, DistBarrier)
    try:
        make_async_checkpointer(config)
    except ConfigError as error:
        return [str(error)]
    return []


class BrokenOnOne(Barrier):
    """Fails on rank 1."""

    def execute_barrier(self) -> None:
        if dist.get_rank() == 1:
            raise TimeoutError("nobody came")


def broken_barrier(rank: int, size: int, folder: str) -> str:
    config = CheckpointWriterConfig(write_barrier_timeout_secs=60)
    writer = CheckpointWriter(config, RankInfo(rank, size), BrokenOnOne())
    with pytest.raises((CheckpointingException, TimeoutError)) as caught:
        writer.write(own(rank, 0), f"{folder}/c")
    return f"{type(caught.value).__name__}: {caught.value}"


def test_a_barrier_of_ones_own_that_fails_on_one_rank(tmp_path: Path) -> None:
    """All ranks are told, and nothing is committed."""
    told = run_ranks(broken_barrier, 2, str(tmp_path))

    assert told[0].startswith("RankFailedError")
    assert all("nobody came" in text for text in told)
    assert names(tmp_path) == []


def test_the_barrier_of_the_group(tmp_path: Path) -> None:
    """It holds ranks of a group; processes without one cannot use it, which is said at once."""
    told = run_ranks(barriers, 2)

    assert all("cannot meet through 'dist_barrier'" in text for one in told for text in one)
    assert all(told)
