"""What fails on one rank, in any phase, is raised on all: with rank, key or file, and errno.

Here: a table of system calls that fail, of values and hooks that raise, and of ranks that vanish.
Phases by function, and disks that fill up while training goes on, stand in ``test_phases`` and
``test_background_faults``. Most ranks are threads; where a backend or a death matters, processes.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dist_ckpt import CheckpointingException, LoadOptions, SaveOptions, ShardedTensor, load, save
from dist_ckpt._comm import store as store_comm
from dist_ckpt._comm import tensors as exchange
from dist_ckpt.background import BackgroundOptions, BackgroundSaver
from dist_ckpt.errors import (
    AsyncSaveError,
    BarrierTimeoutError,
    CoordinationError,
    InvalidShardingError,
    StorageError,
)
from dist_ckpt.exchange_utils import (
    determine_main_replica_uniform_distribution,
    exchange_by_distribution,
    shard_id,
)
from dist_ckpt.recovery import verify_checkpoint
from dist_ckpt.serialization import all_processes, get_default_load_sharded_strategy
from dist_ckpt.strategies.fully_parallel import FullyParallelLoadStrategyWrapper
from dist_ckpt.strategies.two_stage import TwoStageDataParallelLoadShardedStrategy
from dist_ckpt.tensor_aware_state_dict import MCoreTensorAwareStateDict
from dist_ckpt.testing import ThreadWorld
from dist_ckpt.training_state import CheckpointView, TrainingState, save_training_state
from dist_ckpt.types import Communicator
from tests.faults._phases import on_thread_of, traces
from tests.multiprocess._world import run_ranks

SIZE = 3
TIMEOUT_SECS = 60.0


# -- system calls ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A system call that fails on one rank, and what must be told.

    Attributes:
        name: The function of ``os``.
        code: The errno.
        ranks: On which of the ranks it is tried, one after the other.
        names_key: Whether a key can be named: else the file is.
    """

    name: str
    code: int
    ranks: tuple[int, ...] = (0, SIZE - 1)
    names_key: bool = False


SAVING = (
    Call(name="open", code=errno.EMFILE),
    Call(name="pwrite", code=errno.ENOSPC, names_key=True),
    Call(name="pwrite", code=errno.EDQUOT),
    Call(name="fsync", code=errno.EIO),
    Call(name="mkdir", code=errno.EROFS, ranks=(0,)),
)
LOADING = (
    Call(name="open", code=errno.ESTALE),
    Call(name="preadv", code=errno.EIO, names_key=True),
)


@contextlib.contextmanager
def failing(call: Call, here: Callable[[], bool], *, below: str = "") -> Iterator[list[str]]:
    """Let a function of ``os`` fail here; yield the files that it was asked for."""
    original, seen = getattr(os, call.name), []

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        told = " to ".join(map(str, args))
        if here() and (below in told or isinstance(args[0], int)):
            seen.append(told)
            raise OSError(call.code, os.strerror(call.code))
        return original(*args, **kwargs)

    with mock.patch.object(os, call.name, wrapper):
        yield seen


def state(comm: Communicator, value: float) -> dict[str, Any]:
    return {
        "cut": ShardedTensor.from_rank_offsets(
            "cut", torch.full((8,), value), (0, comm.rank, comm.size)
        ),
        "step": value,
    }


def save_as(backend: Any, path: Path, value: float) -> Callable[[Communicator], None]:
    options = SaveOptions(thread_count=1, backend=backend)
    return lambda comm: save(state(comm, value), path, communicator=comm, options=options)


def load_from(path: Path) -> Callable[[Communicator], Any]:
    def load_it(comm: Communicator) -> Any:
        options = LoadOptions(thread_count=1)
        return load(state(comm, -1.0), path, communicator=comm, options=options)["step"]

    return load_it


def check(errors: dict[int, BaseException], rank: int, call: Call, *, num_ranks: int = SIZE) -> str:
    """Assert that all ranks tell the same: who, where and why; return it."""
    assert set(errors) == set(range(num_ranks)), f"not raised everywhere: {errors}"
    (text,) = {str(error) for error in errors.values()}
    assert all(isinstance(error, StorageError) for error in errors.values()), errors
    assert f"rank {rank}" in text
    assert errno.errorcode[call.code] in text, text
    return text


@pytest.mark.parametrize("backend", ["torch_dist", "zarr"])
@pytest.mark.parametrize("call", SAVING, ids=lambda call: f"{call.name}-{call.code}")
def test_a_system_call_fails_in_a_save(tmp_path: Path, backend: str, call: Call) -> None:
    """The error names the rank, the file and errno; what was there before is whole."""
    world, path = ThreadWorld(SIZE, timeout_secs=TIMEOUT_SECS), tmp_path / "c"
    world.run(save_as(backend, path, 1.0))
    for rank in call.ranks:
        with failing(call, on_thread_of(rank), below=str(tmp_path)) as seen:
            errors = world.errors(save_as(backend, path, 2.0))
        if not seen and backend == "zarr":
            continue  # no chunk of this rank's own
        assert seen
        text = check(errors, rank, call)
        assert str(tmp_path) in text
        if call.names_key and backend == "torch_dist":
            assert "'cut'" in text
            assert ".distcp" in text
        assert traces(path) == []
        assert world.run(load_from(path)) == [1.0] * SIZE


@pytest.mark.parametrize("call", [
    Call(name="rename", code=errno.EACCES), Call(name="mkdir", code=errno.ENOSPC),
], ids=lambda call: call.name)  # fmt: skip
def test_a_system_call_fails_in_the_first_save(tmp_path: Path, call: Call) -> None:
    """Rank 0 begins and publishes for all: nothing is there then, no attempt either."""
    world = ThreadWorld(SIZE, timeout_secs=TIMEOUT_SECS)
    below = f" to {tmp_path / 'c'}" if call.name == "rename" else str(tmp_path)
    with failing(call, on_thread_of(0), below=below) as seen:
        errors = world.errors(save_as("torch_dist", tmp_path / "c", 1.0))
    assert seen
    check(errors, 0, call)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("backend", ["torch_dist", "zarr"])
@pytest.mark.parametrize("call", LOADING, ids=lambda call: f"{call.name}-{call.code}")
def test_a_system_call_fails_in_a_load(tmp_path: Path, backend: str, call: Call) -> None:
    """On the rank that opens for all, and on one that only reads."""
    world, path = ThreadWorld(SIZE, timeout_secs=TIMEOUT_SECS), tmp_path / "c"
    world.run(save_as(backend, path, 1.0))
    for rank in call.ranks:
        with failing(call, on_thread_of(rank), below=str(path)) as seen:
            errors = world.errors(load_from(path))
        assert seen
        text = check(errors, rank, call)
        assert str(path) in text
        assert world.run(load_from(path)) == [1.0] * SIZE


@pytest.mark.parametrize("rank", [0, SIZE - 1])
def test_a_system_call_fails_while_verifying(tmp_path: Path, rank: int) -> None:
    """By itself, and before a load."""
    call = Call(name="preadv", code=errno.EIO)
    world, path = ThreadWorld(SIZE, timeout_secs=TIMEOUT_SECS), tmp_path / "c"
    world.run(save_as("torch_dist", path, 1.0))
    options = LoadOptions(thread_count=1, verify="full")

    def verify(comm: Communicator) -> None:
        verify_checkpoint(path, options=options, communicator=comm)

    def load_verified(comm: Communicator) -> None:
        load(state(comm, -1.0), path, communicator=comm, options=options)

    for act in (verify, load_verified):
        with failing(call, on_thread_of(rank)):
            errors = world.errors(act)
        text = check(errors, rank, call)
        assert str(path) in text


# -- live objects ----------------------------------------------------------------------------------


class Moody(nn.Module):
    """A module whose hooks fail on one rank."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank, self.failing = rank, ""
        self.inner = nn.Linear(3, 2)

    def _maybe(self, what: str) -> None:
        if what == self.failing and self.rank == 1:
            raise OSError(errno.EIO, f"boom in {what}")

    def get_extra_state(self) -> dict[str, int]:
        self._maybe("get_extra_state")
        return {"a": 1}

    def set_extra_state(self, _: Any) -> None:
        self._maybe("set_extra_state")


@pytest.mark.parametrize(
    "what", ["state", "get_extra_state", "set_extra_state", "shape", "optimizer"]
)
def test_live_objects_fail_on_one_rank(tmp_path: Path, what: str) -> None:
    """Users' code and users' mistakes on one rank are told to all, in the same call."""
    path, calls = tmp_path / "c", []

    def run(comm: Communicator) -> None:
        model = Moody(comm.rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model.failing = what

        def build() -> TrainingState:
            if what == "state" and comm.rank == 1:
                raise OSError(errno.EIO, "boom in state")
            return TrainingState(models=[model], optimizers=[optimizer], replicas="equal")

        save_training_state(path, build, communicator=comm)
        view = CheckpointView.open(path, communicator=comm)
        if what == "shape" and comm.rank == 1:
            model.inner = nn.Linear(4, 2)
        if what == "optimizer" and comm.rank == 1:
            optimizer.param_groups[0]["params"].pop()
        view.load_model(0, model)
        calls.append(comm.rank)
        view.load_optimizer(0, optimizer, [model])

    errors = ThreadWorld(SIZE, timeout_secs=TIMEOUT_SECS).errors(run)

    assert set(errors) == set(range(SIZE))
    (text,) = {str(error) for error in errors.values()}
    assert all(isinstance(error, CheckpointingException) for error in errors.values())
    assert "rank 1" in text
    if what in ("state", "get_extra_state", "set_extra_state"):
        assert f"[Errno {errno.EIO}] boom in {what}" in text
    if what == "shape":
        assert "inner.weight" in text
    assert path.exists() == (what not in ("state", "get_extra_state"))
    assert sorted(calls) == (list(range(SIZE)) if what == "optimizer" else [])


# -- ranks that hand shards to each other ----------------------------------------------------------


def replicated() -> dict[str, Any]:
    data, rank = torch.full((9,), 1.0), dist.get_rank()
    names = ("a", "b", "c", "d")
    return {n: ShardedTensor.from_rank_offsets(n, data, replica_id=rank) for n in names}


def told(act: Callable[[], Any]) -> tuple[str, str]:
    """Return class and text of what is raised."""
    try:
        act()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def broken_exchanges(rank: int, size: int, folder: str) -> dict[str, tuple[str, str]]:
    """Let each way of loading fail on rank 1; all ranks go on to the next one together."""
    path, found = Path(folder, "c"), {}
    request = {key: one.without_data() for key, one in replicated().items()}
    save(replicated(), path)
    bad = Call(name="preadv", code=errno.EIO)
    parallel = FullyParallelLoadStrategyWrapper(get_default_load_sharded_strategy(path))
    loads = {
        "fully parallel": lambda: parallel.load(dict(request), path),
        "two stage": lambda: TwoStageDataParallelLoadShardedStrategy(None).load(
            dict(request), path
        ),
    }
    for name, act in loads.items():
        with failing(bad, lambda: rank == 1):
            found[name] = told(act)
        dist.barrier()

    def refuse(*_: Any) -> None:
        raise MemoryError(f"boom on rank {rank}")

    with mock.patch.object(exchange, "_region", refuse if rank == 1 else exchange._region):
        for algo in exchange.EXCHANGE_ALGOS:
            distribution = determine_main_replica_uniform_distribution(replicated(), None)
            assert distribution is not None
            mains = distribution.main_rank_for_shard
            leaves = replicated().values()
            mine = {shard_id(x): x.data for x in leaves if mains[shard_id(x)] == rank}
            theirs = {shard_id(x): x.without_data() for x in leaves if shard_id(x) not in mine}
            found[algo] = told(
                lambda algo=algo, have=mine, need=theirs, of=distribution: exchange_by_distribution(
                    have, need, of, None, algo
                )
            )
            dist.barrier()
    broken = {**replicated(), "x": lambda: None} if rank == 1 else replicated()
    broken |= {"a": ShardedTensor.from_rank_offsets("a", torch.ones(9 + rank), replica_id=rank)}
    found["tensor-aware"] = told(lambda: MCoreTensorAwareStateDict.from_state_dict(broken))
    dist.barrier()
    return found


def test_exchanges_fail_on_one_rank(tmp_path: Path) -> None:
    """While it reads, while tensors move, while state dicts are taken apart: nobody waits."""
    results = run_ranks(broken_exchanges, SIZE, str(tmp_path), timeout_secs=60)
    for name in results[0]:
        texts = {found[name] for found in results}
        assert len(texts) == 1, (name, texts)
        error, text = texts.pop()
        assert error, f"{name}: not raised"
        if name == "tensor-aware":
            assert error == InvalidShardingError.__name__
            assert "'a': ranks disagree on global_shape: (9,) on ranks [0], (10,) on ranks" in text
            continue
        assert "rank 1" in text, text
        if name in ("fully parallel", "two stage"):
            assert error == StorageError.__name__
            assert "EIO" in text
            assert str(tmp_path) in text
        else:
            assert "MemoryError: boom on rank 1" in text


# -- in the background -----------------------------------------------------------------------------


def fail_in_background(rank: int, size: int, folder: str) -> tuple[str, str]:
    path, gone = Path(folder, "c"), threading.Event()
    full = Call(name="pwrite", code=errno.ENOSPC)
    saver = BackgroundSaver(BackgroundOptions(worker="thread"), timeout_secs=TIMEOUT_SECS)
    with failing(full, lambda: rank == 1):
        model = nn.Linear(50, 50)
        built = TrainingState(models=[model], replicas="equal")
        save_training_state(path, built, saver=saver, on_settled=lambda _: gone.set())
        assert gone.wait(TIMEOUT_SECS)
        dist.barrier()
        found = told(saver.drain)
    saver.close()
    return found


def test_a_save_in_the_background_fails_on_one_rank(tmp_path: Path) -> None:
    results = run_ranks(fail_in_background, 2, str(tmp_path), timeout_secs=60)
    for error, text in results:
        assert error == AsyncSaveError.__name__
        assert "rank 1" in text
        assert "ENOSPC" in text
    assert list(tmp_path.iterdir()) == []


# -- ranks that vanish -----------------------------------------------------------------------------

GONE = {
    "plan": "dist_ckpt._saving.describe.split_for_save",
    "write": "dist_ckpt._saving.save.write_part",
    "open": "dist_ckpt.serialization.open_together",
    "match": "dist_ckpt._loading.execute.split_for_load",
    "read": "dist_ckpt.storage.local._read_all",
    "merge": "dist_ckpt._loading.execute.merge_after_load",
}


def die(*_: Any, **__: Any) -> None:
    os._exit(9)


def vanish(rank: int, size: int, folder: str, phase: str, who: int) -> tuple[str, str]:
    path, store_comm._GRACE_SECS = Path(folder, "c"), 1.0
    comm = all_processes(timeout_secs=2.0)
    if phase not in ("plan", "write"):
        save(state(comm, 1.0), path)
    options = {"save": SaveOptions(timeout_secs=2.0), "load": LoadOptions(timeout_secs=2.0)}

    def act() -> None:
        if phase in ("plan", "write"):
            save(state(comm, 1.0), path, options=options["save"])
        else:
            load(state(comm, -1.0), path, options=options["load"])

    if rank == who:
        with mock.patch(GONE[phase], die):
            act()
    return told(act)


@pytest.mark.parametrize(
    ("phase", "who"), [(phase, 1) for phase in GONE] + [("write", 0), ("read", 0)]
)
def test_a_rank_vanishes(tmp_path: Path, phase: str, who: int) -> None:
    """The others name it within the time-out, and of a save nothing is visible."""
    outcomes = run_ranks(vanish, 3, str(tmp_path), phase, who, expect_errors=True, timeout_secs=60)
    assert outcomes[who].exit_code == 9
    for survivor in (one for one in outcomes if one.rank != who):
        error, text = survivor.value
        assert error == BarrierTimeoutError.__name__, text
        assert f"ranks [{who}]" in text
    assert (tmp_path / "c").exists() == (phase not in ("plan", "write"))


class Gone:
    """A store whose host has died, from some call on."""

    def __init__(self, store: Any) -> None:
        self.store, self.is_gone = store, False

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.store, name)

        def call(*args: Any) -> Any:
            if self.is_gone:
                raise dist.DistNetworkError("Connection reset by peer")
            return found(*args)

        return call


@pytest.mark.parametrize("last", ["add", "set", "check", "get", "delete_key"])
def test_the_store_of_the_ranks_is_gone(last: str) -> None:
    """Whatever call finds that out: it is an error of ours; tidying up behind an exchange is none."""
    store = Gone(dist.HashStore())
    comm = store_comm.StoreCommunicator(store, rank=0, size=1, timeout_secs=1.0)  # type: ignore[arg-type]
    assert comm.map_reduce("x", lambda: 1, sum) == 1
    store.is_gone = True
    acts: dict[str, Callable[[], Any]] = {
        "add": lambda: comm.map_reduce("x", lambda: 1, sum),
        "set": lambda: comm.post_note("x", 1),
        "check": lambda: comm.has_note("x"),
        "get": lambda: comm._get("x"),
        "delete_key": lambda: comm.delete_note("x"),
    }
    with pytest.raises(CoordinationError, match="the store through which ranks meet is gone"):
        acts[last]()
    comm._forget(5)
