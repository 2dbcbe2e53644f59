"""Orders for workers under test. Imported in the worker too: no torch here, and no pytest.

Gates are named pipes: opening one waits for the other side, so no test has to sleep.
"""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from dist_ckpt._saving.publish import Publication
from dist_ckpt._staging_pool.runs import Run
from dist_ckpt._worker.orders import FileOrder, Staged
from dist_ckpt.core import CheckpointingConfig
from dist_ckpt.storage.commit import Attempt


@dataclass(frozen=True)
class ReportOrder:
    """Does not commit: its report is what ``write`` finds."""

    what: str = "modules"
    target: str = "nothing"
    commits: bool = False

    def write(self, staged: Staged) -> Any:
        runs = list(staged.runs())
        if self.what == "modules":
            return sorted(sys.modules)
        if self.what == "bytes":
            return [bytes(staged.memory()[r.offset : r.offset + r.nbytes]) for r in runs]
        if self.what == "descriptor":
            return os.fstat(staged.descriptor()).st_size
        if self.what == "lambda":
            return lambda: None
        if self.what == "pid":
            return os.getpid(), os.getppid(), os.getsid(0), os.nice(0)
        raise ValueError(self.what)

    def publish(self, reports: Sequence[Any]) -> None:
        raise AssertionError(reports)

    def abort(self) -> None:
        raise AssertionError


@dataclass(frozen=True)
class GatedOrder:
    """A file order that waits at a gate before it writes, or before it publishes."""

    order: FileOrder
    gate: Path
    when: str = "write"
    commits: bool = True

    @property
    def target(self) -> str:
        return self.order.target

    def write(self, staged: Staged) -> Any:
        if self.when == "write":
            pass_gate(self.gate)
        return self.order.write(staged)

    def publish(self, reports: Sequence[Any]) -> None:
        if self.when == "publish":
            pass_gate(self.gate)
        self.order.publish(reports)

    def abort(self) -> None:
        self.order.abort()


@dataclass(frozen=True)
class FailingOrder:
    """A file order that raises."""

    order: FileOrder
    when: str = "write"
    commits: bool = True

    @property
    def target(self) -> str:
        return self.order.target

    def write(self, staged: Staged) -> Any:
        if self.when == "write":
            raise ValueError("no such luck")
        return self.order.write(staged)

    def publish(self, reports: Sequence[Any]) -> None:
        if self.when == "publish":
            raise OSError("the network is down")
        self.order.publish(reports)

    def abort(self) -> None:
        self.order.abort()


class UnreadableOrder(FileOrder):
    """An order that cannot be unpickled in the worker."""

    __slots__ = ()

    def __reduce__(self) -> Any:
        return _explode, ()


@dataclass(frozen=True)
class LimitedOrder:
    """A file order in a process whose files may not be larger than this."""

    order: FileOrder
    limit: int
    commits: bool = True

    @property
    def target(self) -> str:
        return self.order.target

    def write(self, staged: Staged) -> Any:
        _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (self.limit, most))
        try:
            return self.order.write(staged)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))

    def publish(self, reports: Sequence[Any]) -> None:
        self.order.publish(reports)

    def abort(self) -> None:
        self.order.abort()


def _explode() -> None:
    raise ImportError("no module of that name here")


def make_gate(folder: Path, name: str = "gate") -> Path:
    """Return a gate: two named pipes."""
    gate = folder / name
    os.mkfifo(gate.with_suffix(".reached"))
    os.mkfifo(gate.with_suffix(".open"))
    return gate


def pass_gate(gate: Path) -> None:
    """Say that the gate is reached, and wait until it is opened. In the worker."""
    gate.with_suffix(".reached").open("w").close()
    with gate.with_suffix(".open").open() as file:
        file.read()


def wait_at_gate(gate: Path) -> None:
    """Wait until the worker has reached the gate."""
    with gate.with_suffix(".reached").open() as file:
        file.read()


def open_gate(gate: Path) -> None:
    """Let the worker pass."""
    gate.with_suffix(".open").open("w").close()


class Memory:
    """An arena for tests: a file in memory, and its bytes.

    Args:
        data: What it holds.
    """

    def __init__(self, data: bytes) -> None:
        self.nbytes = len(data)
        self.descriptor = os.memfd_create("test")
        os.write(self.descriptor, data)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.descriptor)


def file_orders(
    target: Path, size: int, *, nbytes: int = 1000, files: int = 2, commits: bool = True
) -> Iterator[FileOrder]:
    """Yield the order of each rank: so many files of so many bytes."""
    attempt = Attempt.begin(target, None)
    publication = Publication(
        attempt=attempt,
        documents={"index.json": b"{}"},
        files={},
        config=CheckpointingConfig("torch_dist"),
        world_size=size,
    )
    for rank in range(size):
        yield FileOrder(
            directory=attempt.directory,
            files=tuple((f"__{rank}_{n}.distcp", nbytes) for n in range(files)),
            rank=rank,
            publication=publication if rank == 0 else None,
            commits=commits,
        )


def runs_of(order: FileOrder) -> list[Run]:
    """Return runs that fill the order's files from one arena, one after the other."""
    runs, offset = [], 0
    for number, (_, nbytes) in enumerate(order.files):
        runs.append(Run(number, 0, offset, nbytes))
        offset += nbytes
    return runs


def bytes_of(order: FileOrder) -> bytes:
    """Return an arena's content for ``order``, other for each rank."""
    total = sum(nbytes for _, nbytes in order.files)
    return bytes((i * 7 + order.rank) % 251 for i in range(total))


__all__ = [
    "FailingOrder",
    "GatedOrder",
    "LimitedOrder",
    "Memory",
    "ReportOrder",
    "UnreadableOrder",
    "bytes_of",
    "file_orders",
    "make_gate",
    "open_gate",
    "pass_gate",
    "runs_of",
    "wait_at_gate",
]
