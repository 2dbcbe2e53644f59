"""A rank that raises in any phase: all ranks raise one error that names it, nothing is committed.

Ranks are threads here; ``tests/multiprocess/test_faults.py`` does the same with processes.
"""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from dist_ckpt import CheckpointingException, ShardedTensor, load, save
from dist_ckpt._formats.torch_dist import write as torch_dist
from dist_ckpt._saving.plan import PlannedSave
from dist_ckpt.errors import BarrierTimeoutError, CoordinationError, RankFailedError
from dist_ckpt.storage import paths
from dist_ckpt.storage.paths import is_directory
from dist_ckpt.testing import ThreadWorld
from dist_ckpt.types import Communicator
from tests.faults._phases import (
    PHASES,
    Phase,
    check_error,
    failing_factory,
    load_at,
    on_thread_of,
    sabotage,
    save_at,
    state,
    traces,
)

SIZE = 3
CASES = [
    pytest.param(phase, rank, id=f"{phase.name}-{rank}")
    for phase in PHASES
    for rank in ((0, SIZE - 1) if phase.everywhere else (0,))
]


@pytest.mark.parametrize("old", [True, False], ids=["re-save", "first"])
@pytest.mark.parametrize(("phase", "rank"), CASES)
def test_one_rank_fails(tmp_path: Path, phase: Phase, rank: int, *, old: bool) -> None:
    """One error of the tree everywhere; the previous checkpoint is intact; nothing lies around."""
    world, path = ThreadWorld(SIZE), tmp_path / "c"
    exists = old or phase.call == "load"
    if exists:
        world.run(lambda comm: save_at(path, comm, 1.0))

    with sabotage(phase, on_thread_of(rank)):
        errors = world.errors(
            lambda comm: save_at(path, comm, 2.0) if phase.call == "save" else load_at(path, comm)
        )

    assert set(errors) == set(range(SIZE))
    assert len({str(error) for error in errors.values()}) == 1
    for error in errors.values():
        check_error(phase, rank, error)
    assert errors[rank].__cause__ is not None
    assert traces(path) == []
    assert path.exists() == exists
    if exists:
        assert world.run(lambda comm: load_at(path, comm)) == [1.0] * SIZE
    assert world.run(lambda comm: save_at(path, comm, 3.0)) == [None] * SIZE


@pytest.mark.parametrize("where", ["build", "merge"])
def test_a_factory_that_fails_on_one_rank(tmp_path: Path, where: str) -> None:
    """User code of one rank cannot hang the others."""
    path = tmp_path / "c"

    def run(comm: Communicator) -> None:
        factory = failing_factory(f"f{comm.rank}", where, here=comm.rank == 1)
        save({"f": factory}, path, communicator=comm)
        load({"f": factory}, path, communicator=comm)

    errors = ThreadWorld(2).errors(run)

    assert {type(error) for error in errors.values()} == {RankFailedError}
    assert all(f"ValueError: boom in {where}" in str(error) for error in errors.values())
    assert path.exists() == (where == "merge")


def test_several_ranks_fail_differently() -> None:
    """Each failure is told once, with its rank."""

    def run(comm: Communicator) -> None:
        def fail() -> None:
            if comm.rank:
                raise [KeyError, ValueError][comm.rank - 1](f"boom {comm.rank}")

        comm.map_reduce("x", fail, lambda _: None)

    errors = ThreadWorld(3).errors(run)

    assert set(errors) == {0, 1, 2}
    for error in errors.values():
        assert isinstance(error, RankFailedError)
        assert sorted(error.failures) == [1, 2]
        assert "rank 1: KeyError" in str(error)
        assert "rank 2: ValueError: boom 2" in str(error)


@pytest.mark.parametrize("absent", [0, 2])
def test_a_rank_that_never_comes_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, absent: int
) -> None:
    """The others raise within the timeout, and nothing is committed."""
    monkeypatch.setattr("dist_ckpt._comm.store._GRACE_SECS", 0.5)
    path = tmp_path / "c"

    errors = ThreadWorld(3, timeout_secs=0.5).errors(
        lambda comm: save_at(path, comm, 1.0) if comm.rank != absent else None
    )

    assert set(errors) == {0, 1, 2} - {absent}
    for error in errors.values():
        assert isinstance(error, BarrierTimeoutError)
        assert f"[{absent}" in str(error)
    assert list(tmp_path.iterdir()) == []


def test_a_rank_that_dies_between_planning_and_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its data is missing: rank 0 does not commit, removes the attempt and says who it was."""
    monkeypatch.setattr("dist_ckpt._comm.store._GRACE_SECS", 0.5)
    path = tmp_path / "c"
    world = ThreadWorld(2, timeout_secs=0.5)
    world.run(lambda comm: save_at(path, comm, 1.0))
    gone = threading.Event()

    def die(comm: Communicator) -> None:
        with contextlib.suppress(CheckpointingException):
            comm.map_scatter(
                f"planning the save to {path}", lambda: _view(comm), lambda v: [None] * len(v)
            )
        gone.set()

    def run(comm: Communicator) -> None:
        die(comm) if comm.rank else save_at(path, comm, 2.0)

    errors = world.errors(run)

    assert gone.is_set()
    assert isinstance(errors[0], BarrierTimeoutError)
    assert "[1]" in str(errors[0])
    assert traces(path) == []
    assert world.run(lambda comm: load_at(path, comm)) == [1.0, 1.0]


def _view(comm: Communicator) -> object:
    from dist_ckpt._formats.native import new_format
    from dist_ckpt._saving.describe import prepare
    from dist_ckpt._saving.request import SaveRequest

    request = SaveRequest(
        state_dict=state(comm.rank, comm.size, 2.0), format=new_format("torch_dist", 1)
    )
    return 0, prepare(request, comm.rank).view  # it remembers no plan


def test_ranks_in_different_calls_are_told(tmp_path: Path) -> None:
    """A save here and a load there is an error that names both, not a hang."""
    path = tmp_path / "c"
    world = ThreadWorld(2)
    world.run(lambda comm: save_at(path, comm, 1.0))

    errors = world.errors(
        lambda comm: load_at(path, comm) if comm.rank else save_at(path, comm, 2.0)
    )

    assert set(errors) == {0, 1}
    for error in errors.values():
        assert isinstance(error, CoordinationError)
        assert "planning the save" in str(error)
        assert "rank 1 is in 'opening" in str(error)
    assert traces(path) == []
    assert world.run(lambda comm: load_at(path, comm)) == [1.0, 1.0]


def test_what_was_not_written_is_not_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that returns without proof of each planned chunk fails the save."""
    original, here = torch_dist.write_shards, on_thread_of(1)
    monkeypatch.setattr(
        torch_dist, "write_shards", lambda *a, **k: original(*a, **k) if not here() else []
    )

    errors = ThreadWorld(2).errors(lambda comm: save_at(tmp_path / "c", comm, 1.0))

    assert set(errors) == {0, 1}
    assert all("were planned" in str(error) for error in errors.values())
    assert list(tmp_path.iterdir()) == []


def test_different_paths_are_told(tmp_path: Path) -> None:
    """Ranks that disagree on the path get an error with both paths."""
    errors = ThreadWorld(2).errors(lambda comm: save_at(tmp_path / f"c{comm.rank}", comm, 1.0))

    for error in errors.values():
        assert "c0" in str(error)
        assert "c1" in str(error)
    assert list(tmp_path.iterdir()) == []


class Interrupt(BaseException):
    """Like KeyboardInterrupt, which pytest would take for itself."""


@pytest.mark.parametrize("rank", [0, 1])
def test_an_interrupt_reaches_all(tmp_path: Path, rank: int) -> None:
    """Ctrl-C on one rank in the middle of writing ends the save on all, and leaves no attempt."""
    path = tmp_path / "c"
    world = ThreadWorld(2)
    world.run(lambda comm: save_at(path, comm, 1.0))
    phase = Phase(
        name="write",
        call="save",
        target="dist_ckpt.storage.local:_write_all",
        everywhere=True,
        error=Interrupt("stop"),  # type: ignore[arg-type]
    )

    with sabotage(phase, on_thread_of(rank)):
        errors = world.errors(lambda comm: save_at(path, comm, 2.0))

    assert isinstance(errors[rank], Interrupt)
    assert isinstance(errors[1 - rank], CheckpointingException)
    assert f"rank {rank}" in str(errors[1 - rank])
    assert traces(path) == []
    assert world.run(lambda comm: load_at(path, comm)) == [1.0, 1.0]


def test_ranks_that_do_not_share_a_directory_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that does not see rank 0's attempt says so."""
    blind = on_thread_of(1)
    monkeypatch.setattr(paths, "is_directory", lambda path: not blind() and is_directory(path))

    errors = ThreadWorld(2).errors(lambda comm: save_at(tmp_path / "c", comm, 1.0))

    assert all("that all ranks share" in str(error) for error in errors.values())
    assert list(tmp_path.iterdir()) == []


def test_a_bad_shard_on_one_rank_is_raised_on_all(tmp_path: Path) -> None:
    """Gaps and overlaps that only all ranks together show are told to all, with key and ranks."""

    def run(comm: Communicator) -> None:
        x = torch.zeros(4)
        save({"x": ShardedTensor.from_rank_offsets("x", x)}, tmp_path / "c", communicator=comm)

    errors = ThreadWorld(2).errors(run)

    assert all("'x': [0:4] has main replicas on ranks [0, 1]" in str(e) for e in errors.values())
    assert list(tmp_path.iterdir()) == []


FORMATS = [("torch_dist", 1), ("zarr", 1), ("zarr", 2)]


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("other", FORMATS, ids=str)
def test_ranks_that_choose_different_formats_are_told(
    tmp_path: Path, fmt: tuple[str, int], other: tuple[str, int]
) -> None:
    """Chunks of zarr v2 in an array of v3 would be a commit that nobody can read."""
    path = tmp_path / "c"

    def save_as(comm: Communicator) -> None:
        shard = ShardedTensor.from_rank_offsets("w", torch.ones(2, 3), (0, comm.rank, 2))
        save({"w": shard}, path, other if comm.rank else fmt, communicator=comm)

    errors = ThreadWorld(2).errors(save_as)

    if fmt == other:
        assert not errors
        return
    assert set(errors) == {0, 1}
    for error in errors.values():
        assert isinstance(error, CoordinationError)
        assert f"{fmt}" in str(error)
        assert f"{other}" in str(error)
    assert list(tmp_path.iterdir()) == []


def test_a_failure_before_passing_on_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No rank waits for one that cannot even begin."""
    make_job = PlannedSave.job

    def broken(planned: PlannedSave) -> Any:
        if planned.rank == 1:
            raise MemoryError("no room")
        return make_job(planned)

    monkeypatch.setattr(PlannedSave, "job", broken)

    def save_flat(comm: Communicator) -> None:
        held = slice(3 * comm.rank, 3 * comm.rank + 3)
        shard = ShardedTensor.from_rank_offsets_flat(
            "w", torch.ones(3), (2, 3), flattened_range=held
        )
        shifted = ShardedTensor.from_rank_offsets_flat(
            "v", torch.ones(2 + 2 * comm.rank), (2, 3),
            flattened_range=(slice(0, 2), slice(2, 6))[comm.rank],
        )  # fmt: skip
        save({"w": shard, "v": shifted}, tmp_path / "c", ("zarr", 2), communicator=comm)

    errors = ThreadWorld(2, timeout_secs=60).errors(save_flat)

    assert set(errors) == {0, 1}
    assert all("passing on pieces" in str(error) for error in errors.values())
    assert all("no room" in str(error) for error in errors.values())
    assert list(tmp_path.iterdir()) == []
