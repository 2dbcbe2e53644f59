"""Workers whose training process ends: what was staged is committed all the same."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.unit._orders import make_gate, open_gate, wait_at_gate

ROOT = Path(__file__).parents[2]

TRAINING = """
import os, sys
from pathlib import Path
from dist_ckpt._saving.publish import CommitPoint
from dist_ckpt._worker.worker import Worker
from tests.unit._orders import GatedOrder, Memory, bytes_of, file_orders, runs_of

folder, mode = Path(sys.argv[1]), sys.argv[2]
team = [Worker(kind="process", rank=rank, heartbeat_secs=0.1) for rank in range(2)]
address = team[0].serve_hub(["127.0.0.1"], 60)
orders = list(file_orders(folder / "c", 2))
saves = []
for rank, (worker, order) in enumerate(zip(team, orders)):
    memory = Memory(bytes_of(order))
    save = worker.begin(
        1, GatedOrder(order, folder / "gate") if rank == 1 else order,
        descriptor=memory.descriptor, arena_key=1, nbytes=memory.nbytes,
        point=CommitPoint(address, "save", rank, 2, 60.0),
    )
    for run in runs_of(order):
        save.staged(run)
    if mode != "half staged" or rank == 0:
        save.all_staged()
    saves.append(save)
if mode == "child" and os.fork() == 0:
    sys.stdin.read()  # a data loader, say: it has inherited all that is open
    os._exit(0)
print(*(worker.pid for worker in team), flush=True)
if mode == "close":
    (folder / "closing").touch()
    for worker in reversed(team):
        worker.close(60)
    print(*(save.outcome.result(0) for save in saves), flush=True)
os._exit(3)
"""


@contextmanager
def training(folder: Path, mode: str) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """Run the training process; yield it and a descriptor for each worker's end."""
    process = subprocess.Popen(
        [sys.executable, "-c", TRAINING, str(folder), mode],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    ended: list[int] = []
    with process:
        assert process.stdout is not None
        pids = [int(pid) for pid in process.stdout.readline().split()]
        ended += [os.pidfd_open(pid) for pid in pids]
        try:
            yield process, ended
        finally:
            process.kill()
            for descriptor in ended:
                os.close(descriptor)


def wait_until(ended: list[int]) -> None:
    for descriptor in ended:
        assert select.select([descriptor], [], [], 60)[0], "a worker did not end"


@pytest.mark.parametrize("mode", ["gone", "child"])
def test_training_ends_and_the_save_is_committed(tmp_path: Path, mode: str) -> None:
    """Also if a child of the training process has inherited its end of the channel."""
    gate = make_gate(tmp_path)
    with training(tmp_path, mode) as (process, ended):
        assert process.wait(60) == 3
        wait_at_gate(gate)
        assert not (tmp_path / "c").exists()
        open_gate(gate)

        wait_until(ended)

    assert (tmp_path / "c" / "metadata.json").exists()
    assert [p for p in tmp_path.iterdir() if p.name.startswith(".dist-ckpt")] == []


def test_training_ends_while_it_stages(tmp_path: Path) -> None:
    """What is not all staged is given up on all ranks; nothing is left."""
    gate = make_gate(tmp_path)
    with training(tmp_path, "half staged") as (process, ended):
        assert process.wait(60) == 3
        wait_at_gate(gate)
        open_gate(gate)

        wait_until(ended)

    assert sorted(p.name for p in tmp_path.iterdir()) == ["gate.open", "gate.reached"]


def test_closing_waits_for_the_save(tmp_path: Path) -> None:
    """``close`` returns when all is settled; no worker outlives it."""
    gate = make_gate(tmp_path)
    with training(tmp_path, "close") as (process, ended):
        wait_at_gate(gate)
        open_gate(gate)
        assert process.stdout is not None
        assert process.stdout.readline() == "None None\n"
        assert select.select(ended, [], [], 0)[0] == ended
        assert process.wait(60) == 3

    assert (tmp_path / "c" / "metadata.json").exists()
