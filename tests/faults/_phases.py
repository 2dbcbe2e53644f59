"""The phases of a save and of a load, and how to make one rank fail in one of them.

Here: the table of phases and ``sabotage``. Not here: tests. Used with ranks that are threads and
with ranks that are processes; what ranks do is the same.
"""

from __future__ import annotations

import contextlib
import importlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from dist_ckpt import LoadOptions, SaveOptions, ShardedTensor, ShardedTensorFactory, load, save
from dist_ckpt.errors import CorruptedCheckpointError, StorageError
from dist_ckpt.types import Communicator


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A function that a phase calls; ``everywhere`` if all ranks call it, else rank 0 alone."""

    name: str
    call: str  # "save" or "load"
    target: str
    everywhere: bool
    error: Exception


PHASES = (
    Phase(name="describe", call="save", target="dist_ckpt._saving.describe:split_for_save",
          everywhere=True, error=ValueError("boom in describe")),
    Phase(name="plan", call="save", target="dist_ckpt._formats.torch_dist.format:assign_writers",
          everywhere=False, error=KeyError("boom in plan")),
    Phase(name="begin", call="save", target="dist_ckpt.storage.commit:make_directory",
          everywhere=False, error=PermissionError(13, "boom in begin")),
    Phase(name="write", call="save", target="dist_ckpt.storage.local:_write_all",
          everywhere=True, error=OSError(28, "boom in write")),
    Phase(name="sync", call="save", target="dist_ckpt._formats.torch_dist.write:fsync_directory",
          everywhere=True, error=OSError(5, "boom in sync")),
    Phase(name="documents", call="save", target="dist_ckpt._saving.publish:write_documents",
          everywhere=False, error=StorageError("boom in documents")),
    Phase(name="publish", call="save", target="dist_ckpt.storage.commit:_replace",
          everywhere=False, error=OSError(5, "boom in publish")),
    Phase(name="open", call="load", target="dist_ckpt._loading.open:open_contents",
          everywhere=False, error=CorruptedCheckpointError("boom in open")),
    Phase(name="match", call="load", target="dist_ckpt._loading.execute:split_for_load",
          everywhere=True, error=ZeroDivisionError("boom in match")),
    Phase(name="agree", call="load", target="dist_ckpt._loading.execute:check_sharding",
          everywhere=False, error=RuntimeError("boom in agree")),
    Phase(name="read", call="load", target="dist_ckpt.storage.local:_read_all",
          everywhere=True, error=OSError(5, "boom in read")),
    Phase(name="merge", call="load", target="dist_ckpt._loading.execute:merge_after_load",
          everywhere=True, error=MemoryError("boom in merge")),
)  # fmt: skip


def state(rank: int, size: int, value: float) -> dict[str, Any]:
    """Return rank's part of a state: a cut tensor, a replicated one, common values."""
    return {
        "cut": ShardedTensor.from_rank_offsets("cut", torch.full((8,), value), (0, rank, size)),
        "all": ShardedTensor.from_rank_offsets("all", torch.full((5,), value), replica_id=rank),
        "step": value,
    }


def save_at(path: Path, comm: Communicator, value: float) -> None:
    """Save ``state``; collective."""
    options = SaveOptions(thread_count=1)
    save(state(comm.rank, comm.size, value), path, communicator=comm, options=options)


def load_at(path: Path, comm: Communicator) -> float:
    """Load and return the one value that everything has; collective."""
    request = state(comm.rank, comm.size, -1.0)
    loaded = load(request, path, communicator=comm, options=LoadOptions(thread_count=1))
    values = {*loaded["cut"].tolist(), *loaded["all"].tolist(), loaded["step"]}
    assert len(values) == 1, f"a mixture: {values}"
    return float(values.pop())


@contextlib.contextmanager
def sabotage(phase: Phase, here: Callable[[], bool]) -> Iterator[None]:
    """Make the phase's function raise where ``here()`` is true."""
    module_name, name = phase.target.split(":")
    module = importlib.import_module(module_name)
    original = getattr(module, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        if here():
            raise phase.error
        return original(*args, **kwargs)

    with mock.patch.object(module, name, call):
        yield


def on_thread_of(rank: int) -> Callable[[], bool]:
    """Return whether this is the thread of ``rank`` in a ``ThreadWorld``."""
    return lambda: threading.current_thread().name == f"rank-{rank}"


def check_error(phase: Phase, rank: int, error: BaseException | None) -> None:
    """Assert that an error tells what happened where."""
    from dist_ckpt import CheckpointingException

    assert isinstance(error, CheckpointingException), repr(error)
    text = str(error)
    assert f"rank {rank}" in text
    assert f"boom in {phase.name}" in text or phase.error.args[-1] in text
    assert set(error.failures) == {rank}
    if phase.name in ("write", "read") and "index.bin" not in text:  # each rank reads that, too
        assert ".distcp" in text
        assert "'cut'" in text or "'all'" in text


def traces(path: Path) -> list[str]:
    """Return what lies beside the checkpoint."""
    return sorted(entry.name for entry in path.parent.iterdir() if entry != path)


def failing_factory(key: str, where: str, *, here: bool) -> ShardedTensorFactory:
    """Return a factory that fails in ``build`` or in ``merge``, if it is ``here``."""

    def build(name: str, data: torch.Tensor, replica_id: Any) -> dict[str, ShardedTensor]:
        if here and where == "build":
            raise ValueError("boom in build")
        return {"x": ShardedTensor.from_rank_offsets(name, data, replica_id=replica_id)}

    def merge(loaded: dict[str, torch.Tensor]) -> torch.Tensor:
        if here and where == "merge":
            raise ValueError("boom in merge")
        return loaded["x"]

    return ShardedTensorFactory(key, torch.ones(3), build, merge)
