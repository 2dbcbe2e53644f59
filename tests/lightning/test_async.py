"""Saving in the background under every layout, and what goes wrong there: with real ranks."""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812 - as its documents write it
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from dist_ckpt.errors import AsyncSaveError
from dist_ckpt.training_state import is_checkpoint
from tests.faults._leaks import Holdings
from tests.lightning._flight import (
    WAIT_SECS,
    At,
    fill_disk,
    make_async,
    tell_worker,
    visible,
    wait_until_idle,
)
from tests.lightning._training import (
    LAYOUTS,
    Tiny,
    differences,
    every_3_steps,
    loader,
    make_trainer,
    stored,
)
from tests.multiprocess._world import run_ranks

KINDS: dict[str, dict[str, Any]] = {
    "process": {},
    "overlap": {"overlap": True, "max_in_flight": 2},
    "thread": {"worker": "thread"},
}


def left(before: Holdings) -> list[str]:
    """Return what of ours is still held: descriptors of Lightning's own groups may be."""
    gc.collect()  # errors and their frames hold each other
    found = Holdings.now().beyond(before)
    return [one for one in found if not one.startswith("descriptor") or "memfd" in one]


def train(rank: int, world_size: int, layout: str, root: str) -> list[str]:
    """Train as usual and in the background, and resume from what was saved."""
    folder = Path(root)
    first = make_trainer(layout, root, callbacks=[every_3_steps(folder / "sync")])
    first.fit(Tiny(), loader(layout))
    before = Holdings.now()
    for kind, settings in KINDS.items():
        if kind == "thread" and layout != "ddp":
            continue
        whole = make_async(layout, root, settings, callbacks=[every_3_steps(folder / kind)])
        whole.fit(Tiny(), loader(layout))
        again = make_async(layout, root, settings, callbacks=[every_3_steps(folder / f"{kind}2")])
        again.fit(Tiny(1), loader(layout), ckpt_path=folder / kind / "step=3.ckpt")
    return left(before)


@pytest.mark.parametrize("layout", ["single", "ddp", "fsdp1", "fsdp2"])
def test_the_same_bits_as_when_waiting(tmp_path: Path, layout: str) -> None:
    """Checkpoints and what resumes from them are those of a run that waits; nothing is left."""
    held = run_ranks(train, LAYOUTS[layout], layout, str(tmp_path))

    assert held == [[]] * LAYOUTS[layout]
    runs = {path.name for path in tmp_path.iterdir()}
    assert runs == {"sync", "process", "process2", "overlap", "overlap2"} | (
        {"thread", "thread2"} if layout == "ddp" else set()
    )
    for run in runs:
        steps = {"step=6.ckpt"} | (set() if run.endswith("2") else {"step=3.ckpt"})
        assert {path.name for path in (tmp_path / run).iterdir()} == steps
        for step in steps:
            expected = stored(tmp_path / "sync" / step)
            assert not differences(stored(tmp_path / run / step), expected), (run, step)


def keep_the_last(rank: int, world_size: int, root: str) -> list[Any]:
    """Keep one checkpoint and a link to it, waiting and in the background; tell what is there."""
    found = []
    for kind in ("sync", "async"):
        folder = Path(root, kind)
        checkpoint = ModelCheckpoint(
            folder, "{step}", monitor="step", mode="max", save_last="link", every_n_train_steps=1
        )
        make = make_async if kind == "async" else make_trainer
        make("ddp", root, callbacks=[checkpoint]).fit(Tiny(), loader("ddp"))
        # Now, on every rank: what rank 0 does behind the commit is done, too.
        links = {path.name: str(path.readlink()) for path in folder.iterdir() if path.is_symlink()}
        best = Path(checkpoint.best_model_path)
        found.append((visible(folder), links, best.name, is_checkpoint(best)))
    return found


def test_all_ranks_see_the_end(tmp_path: Path) -> None:
    """When ``fit`` returns on any rank, links are flipped and removals done."""
    expected = {"step=6.ckpt", "last.ckpt"}, {"last.ckpt": "step=6.ckpt"}, "step=6.ckpt", True

    assert run_ranks(keep_the_last, 2, str(tmp_path)) == [[expected] * 2] * 2


# -- failures


def at_step(step: int, rank: int, do: Any) -> Any:
    """Return a hook that does something once, on one rank."""

    def hook(trainer: L.Trainer) -> None:
        if trainer.global_step == step and trainer.global_rank == rank:
            do(trainer)

    return hook


def stop(trainer: L.Trainer) -> None:
    """Keep this rank's worker from doing anything: what is saved next stays in flight."""
    wait_until_idle(trainer)
    tell_worker(trainer, signal.SIGSTOP)


def go_on(trainer: L.Trainer) -> None:
    tell_worker(trainer, signal.SIGCONT)


def kill(trainer: L.Trainer) -> None:
    tell_worker(trainer, signal.SIGKILL)


def break_worker(rank: int, world_size: int, layout: str, root: str, accident: str) -> Any:
    """Break the last rank's worker while step 6 is in flight; then train on from what is there."""
    last = world_size - 1
    hooks = {
        "killed": {"batch_end": at_step(6, last, stop), "batch_start": at_step(6, last, kill)},
        "full": {"batch_end": at_step(6, last, fill_disk)},
    }[accident]
    before = Holdings.now()
    told, step = "", 0
    trainer = make_async(
        layout, root, callbacks=[At(**hooks), every_3_steps(root)], max_steps=20_000
    )
    try:
        trainer.fit(Tiny(), loader(layout, 3000))
    except AsyncSaveError as error:
        told, step = str(error), trainer.global_step
    there = visible(root)
    again = make_async(layout, root, callbacks=[every_3_steps(root)], max_steps=9)
    again.fit(Tiny(1), loader(layout), ckpt_path=Path(root, "step=3.ckpt"))
    return step, told, there, left(before)


@pytest.mark.parametrize("accident", ["killed", "full"])
@pytest.mark.parametrize("layout", ["single", "ddp", "fsdp2"])
def test_a_worker_that_fails(tmp_path: Path, layout: str, accident: str) -> None:
    """All ranks raise at the same batch; the older checkpoint is intact, and the next fit works."""
    results = run_ranks(
        break_worker, LAYOUTS[layout], layout, str(tmp_path), accident, timeout_secs=60
    )

    steps, told, there, held = map(list, zip(*results, strict=True))
    assert steps == [steps[0]] * len(steps)
    assert 6 <= steps[0] <= 9  # there the next save would have to wait
    for text in told:
        assert "step=6.ckpt" in text
        assert {"killed": "SIGKILL", "full": "File too large"}[accident] in text
        assert f"rank {LAYOUTS[layout] - 1}" in text
    assert all(names == {"step=3.ckpt"} for names in there)
    assert held == [[]] * len(held)
    assert visible(tmp_path) == {"step=3.ckpt", "step=6.ckpt", "step=9.ckpt"}
    assert all(is_checkpoint(path) for path in tmp_path.glob("step*"))


# -- interruptions


def interrupted(rank: int, world_size: int, layout: str, root: str, what: str) -> str:
    """Interrupt the last rank while step 3 is in flight, and end it; return what comes out."""
    last = world_size - 1
    acts = {
        "error": lambda _: throw(ValueError("mine")),
        "ctrl-c": lambda _: throw(KeyboardInterrupt()),
        "SIGTERM": lambda _: os.kill(os.getpid(), signal.SIGTERM),
    }
    hooks = At(
        batch_end=at_step(3, last, stop),
        batch_start=at_step(3, last, acts[what]),
        exception=lambda trainer: go_on(trainer) if rank == last else None,
    )
    before = Holdings.now()
    trainer = make_async(layout, root, callbacks=[hooks, every_3_steps(Path(root, "c"))])
    try:
        trainer.fit(Tiny(), loader(layout, 4))
    except BaseException as error:
        came = f"{type(error).__name__}: {error}"
    if rank == last:
        Path(root, "told").write_text(f"{came} {visible(Path(root, 'c'))} {left(before)}")
        os._exit(7)  # as at the end of the program: the others notice
    return came


def throw(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize(
    ("layout", "what", "comes"),
    [
        ("single", "error", "ValueError: mine"),
        ("single", "ctrl-c", "SystemExit: 1"),
        ("single", "SIGTERM", "SIGTERMException: "),
        ("ddp", "error", "ValueError: mine"),
        ("fsdp2", "error", "ValueError: mine"),
    ],
)
def test_interrupted(tmp_path: Path, layout: str, what: str, comes: str) -> None:
    """What is in flight is committed before the exception leaves ``fit``, and hides nothing."""
    outcomes = run_ranks(
        interrupted, LAYOUTS[layout], layout, str(tmp_path), what, timeout_secs=60,
        expect_errors=True,
    )  # fmt: skip

    assert (tmp_path / "told").read_text() == f"{comes} {{'step=3.ckpt'}} []"
    assert outcomes[-1].exit_code == 7
    assert all(outcome.value for outcome in outcomes[:-1])
    assert visible(tmp_path / "c") == {"step=3.ckpt"}
    assert is_checkpoint(tmp_path / "c" / "step=3.ckpt")


def test_ctrl_c_on_the_rank_that_started_the_others(tmp_path: Path) -> None:
    """Rank 0 lets the save of all ranks come through before it kills the others."""
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.lightning._ctrl_c_job", str(tmp_path)],
        cwd=root, timeout=280, capture_output=True, text=True, check=False,
    )  # fmt: skip

    assert done.returncode == 1, done.stderr
    for rank in range(2):  # where processors are scarce, they go on after the program
        assert has_ended(int((tmp_path / f"worker-{rank}").read_text()))
    assert visible(tmp_path / "c") == {"step=3.ckpt", "step=6.ckpt"}
    assert is_checkpoint(tmp_path / "c" / "step=6.ckpt")


def has_ended(pid: int) -> bool:
    """Wait for a process that is no child of ours."""
    with contextlib.suppress(ProcessLookupError):
        descriptor = os.pidfd_open(pid)
        try:
            poll = select.poll()
            poll.register(descriptor, select.POLLIN)
            return bool(poll.poll(WAIT_SECS * 1000))
        finally:
            os.close(descriptor)
    return True
