"""What checksums cost a save and a load: ours with and without them, and DCP, which has none.

Here: the contenders, the rounds, the table. Not here: what the numbers mean (README.md). One
process, CPU tensors; every round runs each contender once, beginning with another one each time.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from run import gpt_like_state  # type: ignore[import-not-found]  # beside this file

from dist_ckpt import LoadOptions, SaveOptions, ShardedTensor, load, save
from dist_ckpt.storage import Extent, LocalStore, local

MIB = 1 << 20
State = dict[str, torch.Tensor]


class NoSums:
    """Stands for ``BlockSums``: what the write loop would be without them."""

    def add(self, position: int, data: memoryview) -> None:
        """Do nothing."""

    def finish(self, nbytes: int, read: object) -> None:
        """Return nothing."""


@contextmanager
def without_sums() -> Iterator[None]:
    """Let files be written without checksums; such a file belongs to no checkpoint."""
    kept = local.BlockSums
    local.BlockSums = NoSums  # type: ignore[assignment,misc]  # for this measurement only
    try:
        yield
    finally:
        local.BlockSums = kept  # type: ignore[misc]  # as it was


def write_loop(data: memoryview, directory: Path) -> None:
    """Write one large file as a save does, synced."""
    LocalStore(directory).write("f", [Extent(0, data)], nbytes=data.nbytes)


def as_sharded(state: State) -> dict[str, ShardedTensor]:
    """Describe tensors of one process."""
    return {key: ShardedTensor.from_rank_offsets(key, one) for key, one in state.items()}


def dcp_save(state: State, directory: Path) -> None:
    """Save through torch.distributed.checkpoint, synced."""
    import torch.distributed.checkpoint as dcp

    writer = dcp.FileSystemWriter(directory, thread_count=2, sync_files=True)
    dcp.save(dict(state), storage_writer=writer, no_dist=True)


def dcp_load(state: State, directory: Path) -> None:
    """Load through torch.distributed.checkpoint, in place."""
    import torch.distributed.checkpoint as dcp

    dcp.load(dict(state), storage_reader=dcp.FileSystemReader(directory), no_dist=True)


def timed(do: Callable[[], object]) -> float:
    """Return how long something takes, in seconds."""
    begin = time.perf_counter()
    do()
    return time.perf_counter() - begin


def measure(mib: int, rounds: int, root: Path) -> dict[str, list[float]]:
    """Return the times of each contender, the first round left out."""
    state = gpt_like_state(mib)
    into = {key: torch.empty_like(one) for key, one in state.items()}
    data = memoryview(bytearray(os.urandom(MIB)) * mib)  # zeros would share one page
    spent: dict[str, list[float]] = {}

    def fresh(name: str) -> Path:
        path = root / name
        shutil.rmtree(path, ignore_errors=True)
        return path

    def loop(name: str) -> float:
        path = fresh(name)
        path.mkdir()
        return timed(lambda: write_loop(data, path))

    def loop_without() -> float:
        with without_sums():
            return loop("loop")

    contenders: Mapping[str, Callable[[], float]] = {
        "write loop": lambda: loop("loop"),
        "write loop, no checksums": loop_without,
        "save": lambda: timed(
            lambda: save(as_sharded(state), fresh("ours"), options=SaveOptions(thread_count=2))
        ),
        "DCP save": lambda: timed(lambda: dcp_save(state, fresh("dcp"))),
        **{
            f'load, verify="{level}"': lambda level=level: timed(  # type: ignore[misc]  # bound
                lambda: load(as_sharded(into), root / "ours", options=LoadOptions(verify=level))
            )
            for level in ("read", "off", "full")
        },
        "DCP load": lambda: timed(lambda: dcp_load(into, root / "dcp")),
    }
    contenders["save"](), contenders["DCP save"]()
    names = list(contenders)
    for number in range(rounds + 1):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            secs = contenders[name]()
            if number:
                spent.setdefault(name, []).append(secs)
    assert all(torch.equal(into[key], one) for key, one in state.items())
    return spent


BESIDE = {
    "write loop": "write loop, no checksums",
    "save": "DCP save",
    'load, verify="read"': 'load, verify="off"',
    'load, verify="full"': 'load, verify="off"',
}


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--dir", type=Path, default=None)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=asked.dir) as root:
        spent = measure(asked.mib, asked.rounds, Path(root))
    print("|  | s (min-max) | ratio of each round, median |")
    print("| --- | --- | --- |")
    for name, secs in spent.items():
        other = BESIDE.get(name)
        pairs = zip(secs, spent[other], strict=True) if other else ()
        ratios = [mine / theirs for mine, theirs in pairs]
        ratio = f"{statistics.median(ratios):.2f} x {other}" if ratios else ""
        told = f"{statistics.median(secs):.3f} ({min(secs):.3f}-{max(secs):.3f})"
        print(f"| {name} | {told} | {ratio} |")


if __name__ == "__main__":
    main()
