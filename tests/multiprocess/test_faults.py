"""A rank that raises, dies or never comes, among real processes."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dist_ckpt import BarrierTimeoutError, SaveOptions, save
from dist_ckpt.serialization import all_processes
from tests.faults._phases import (
    PHASES,
    Phase,
    check_error,
    load_at,
    sabotage,
    save_at,
    state,
    traces,
)
from tests.multiprocess._world import run_ranks

pytestmark = pytest.mark.multiprocess

SIZE = 2
CASES = [(p, rank) for p in PHASES for rank in ((0, SIZE - 1) if p.everywhere else (0,))]


def all_phases(rank: int, size: int, path: str) -> list[str]:
    """Fail in each phase on each rank in turn; return the phases that were seen to fail."""
    comm, target = all_processes(timeout_secs=60), Path(path, "c")
    save_at(target, comm, 0.0)
    seen = []
    for number, (phase, bad) in enumerate(CASES):
        save_at(target, comm, float(number))
        before = sorted(entry.name for entry in target.iterdir())
        error = _failing(phase, rank == bad, lambda phase=phase: _call(phase, target, comm))
        check_error(phase, bad, error)
        dist.barrier()
        assert traces(target) == []
        assert sorted(entry.name for entry in target.iterdir()) == before
        assert load_at(target, comm) == float(number)
        seen.append(f"{phase.name}-{bad}")
    return seen


def _call(phase: Phase, target: Path, comm: object) -> None:
    if phase.call == "save":
        save_at(target, comm, -5.0)  # type: ignore[arg-type]
    else:
        load_at(target, comm)  # type: ignore[arg-type]


def _failing(phase: Phase, here: bool, call: object) -> BaseException | None:
    with sabotage(phase, lambda: here):
        try:
            call()  # type: ignore[operator]
        except Exception as error:
            return error
    return None


def test_one_rank_fails_in_each_phase(tmp_path: Path) -> None:
    """All ranks raise one error that names it; the previous checkpoint is intact; no hang."""
    names = [f"{phase.name}-{rank}" for phase, rank in CASES]

    assert run_ranks(all_phases, SIZE, str(tmp_path)) == [names, names]


def first_ever(rank: int, size: int, path: str) -> None:
    comm, target = all_processes(timeout_secs=60), Path(path, "c")
    phase = next(p for p in PHASES if p.name == "write")
    error = _failing(phase, rank == 1, lambda: save_at(target, comm, 1.0))
    check_error(phase, 1, error)
    dist.barrier()
    assert list(Path(path).iterdir()) == []


def test_a_failed_first_save_leaves_nothing(tmp_path: Path) -> None:
    """No directory, no marker, no attempt."""
    run_ranks(first_ever, SIZE, str(tmp_path))


def absent(rank: int, size: int, path: str) -> str:
    if rank == 1:
        return ""
    options = SaveOptions(timeout_secs=1)
    with pytest.raises(BarrierTimeoutError) as caught:
        save(state(rank, size, 1.0), path, options=options)
    return str(caught.value)


def test_a_rank_that_never_comes_is_named(tmp_path: Path) -> None:
    """Within the timeout, by its number."""
    told, _ = run_ranks(absent, SIZE, str(tmp_path / "c"))

    assert "[1] of 2 did not arrive within 1 s" in told
    assert list(tmp_path.iterdir()) == []


def killed(rank: int, size: int, path: str) -> None:
    phase = next(p for p in PHASES if p.name == "write")
    save(state(rank, size, 1.0), path)

    def die() -> bool:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return False

    with sabotage(phase, die):
        save(state(rank, size, 2.0), path, options=SaveOptions(timeout_secs=1))


def test_a_rank_that_is_killed_while_it_writes(tmp_path: Path) -> None:
    """Rank 0 names it and commits nothing; the previous checkpoint loads."""
    path = tmp_path / "c"

    alive, dead = run_ranks(killed, SIZE, str(path), expect_errors=True)

    assert not dead.finished
    assert alive.error_type == "BarrierTimeoutError"
    assert "[1]" in alive.message
    assert traces(path) == []
    from dist_ckpt import load_plain_tensors

    assert torch.equal(load_plain_tensors(path)["cut"], torch.ones(16))


def replaced_group(rank: int, size: int, path: str) -> None:
    """A new process group is a new sequence: an old failure cannot confuse it."""
    phase = next(p for p in PHASES if p.name == "plan")
    comm = all_processes(timeout_secs=60)
    error = _failing(phase, rank == 0, lambda: save_at(Path(path), comm, 1.0))
    check_error(phase, 0, error)
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group(
        "gloo", init_method=f"file://{path}.rendezvous", rank=rank, world_size=size
    )
    comm = all_processes(timeout_secs=60)
    save_at(Path(path), comm, 2.0)
    assert load_at(Path(path), comm) == 2.0


def test_a_new_process_group_starts_afresh(tmp_path: Path) -> None:
    """After ``destroy_process_group`` ranks meet again in the new group's store."""
    run_ranks(replaced_group, SIZE, str(tmp_path / "c"))
