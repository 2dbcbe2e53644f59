"""``DistCkptIO(preemption=True)``: SIGTERM leads to one more save, and the next run goes on there."""
# ruff: noqa: ARG002 - the arguments of hooks are Lightning's

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L  # noqa: N812 - as its documents write it
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException

from dist_ckpt.errors import CheckpointingException
from dist_ckpt.preemption import PreemptionGuard
from dist_ckpt.training_state import is_checkpoint
from lightning_dist_ckpt import DistCkptIO, _fit_saves, _overrides
from tests.lightning._flight import At, Gate, visible
from tests.lightning._training import LAYOUTS, Tiny, make_trainer
from tests.multiprocess._world import run_ranks

MOST_STEPS = 7


class Stream:
    """The same three batches in each epoch, from where it was saved."""

    def __init__(self) -> None:
        self.data = torch.randn(3, 2, 5, generator=torch.Generator().manual_seed(1))
        self.at = 0

    def __len__(self) -> int:
        return len(self.data)

    def __iter__(self) -> Iterator[torch.Tensor]:
        for i in range(self.at, len(self.data)):
            self.at = i + 1
            yield self.data[i]
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def to_self() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def told_in(step: int) -> At:
    """Return a callback that gets the signal in a step, counted from 1."""
    return At(batch_start=lambda trainer: trainer.global_step == step - 1 and to_self())


def trainer_of(
    layout: str, root: Path | str, *callbacks: Any, io: dict[str, Any] | None = None, **kwargs: Any
) -> L.Trainer:
    settings = {"timeout_secs": 60, "preemption": True} | (io or {})
    kwargs = {"max_steps": MOST_STEPS} | kwargs
    plugins = [DistCkptIO(**settings)]
    return make_trainer(layout, root, callbacks=list(callbacks), plugins=plugins, **kwargs)


def fit_until_told(trainer: L.Trainer, **kwargs: Any) -> int:
    """Fit, and return after how many steps the job was stopped."""
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SIGTERMException) as caught:
        trainer.fit(Tiny(), Stream(), **kwargs)
    assert caught.value.code == (143 if trainer.local_rank == 0 else 0)
    assert signal.getsignal(signal.SIGTERM) == handler
    assert trainer.strategy.dist_ckpt_binding.preemption is None
    assert not [one for one in trainer.callbacks if type(one).__name__ == "StopCallback"]
    return trainer.global_step


def bits(module: Tiny) -> dict[str, torch.Tensor]:
    return {
        name: (value.full_tensor() if hasattr(value, "full_tensor") else value).clone()
        for name, value in module.state_dict().items()
    }


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """Return what training comes to if nobody interrupts it."""
    module = Tiny()
    root = tmp_path_factory.mktemp("straight")
    trainer_of("single", root, ModelCheckpoint(root)).fit(module, Stream())
    return bits(module)


KEEPERS = {
    "plain": {},
    "save_last": {"save_last": True},
    "often": {"every_n_train_steps": 3, "save_last": True},
    "link": {"every_n_train_steps": 3, "save_last": "link"},
    "all": {"every_n_train_steps": 2, "save_top_k": -1},
    "weights": {"save_weights_only": True},
}


@pytest.mark.parametrize(
    ("hook", "sanity_steps"), [("validation_start", 1), ("train_start", 1), ("train_start", 0)]
)
def test_a_signal_before_the_first_batch(tmp_path: Path, hook: str, sanity_steps: int) -> None:
    """Whether ours or Lightning's handler has it, there is one batch, a save, and an exit code."""
    told = At(**{hook: lambda _: to_self()})
    trainer = trainer_of(
        "single", tmp_path, told, ModelCheckpoint(tmp_path), num_sanity_val_steps=sanity_steps
    )

    assert fit_until_told(trainer, val_dataloaders=Stream()) == 1
    assert is_checkpoint(tmp_path / "last.ckpt")


# -- where it saves, and that the next run goes on there -------------------------------------------


@pytest.mark.parametrize(
    ("keeper", "in_background"),
    [(keeper, False) for keeper in KEEPERS] + [("save_last", True), ("link", True)],
)
def test_the_next_run_ends_as_if_nothing_had_happened(
    tmp_path: Path, straight: dict[str, torch.Tensor], keeper: str, *, in_background: bool
) -> None:
    """In the middle and at the end of an epoch, whatever ModelCheckpoint is set to."""
    for step in (3, 5):
        root = tmp_path / str(step)
        io = {"async_save": in_background}

        def new(*more: Any, root: Path = root, io: dict[str, Any] = io) -> L.Trainer:
            callback = ModelCheckpoint(dirpath=root, filename="{step}", **KEEPERS[keeper])
            return trainer_of("single", root, *more, callback, io=io)

        told = new(told_in(step))
        assert fit_until_told(told) == step
        (callback,) = told.checkpoint_callbacks
        assert callback.save_last == KEEPERS[keeper].get("save_last")  # what it was lent
        last = root / ("last-preempted.ckpt" if keeper == "weights" else "last.ckpt")
        assert is_checkpoint(last)
        assert not list(root.glob(".dist-ckpt-*"))

        module, trainer = Tiny(9), new()
        trainer.fit(module, Stream(), ckpt_path="last")
        assert Path(str(trainer.ckpt_path)) == last
        assert same(bits(module), straight)


def test_preempted_again_and_again(tmp_path: Path, straight: dict[str, torch.Tensor]) -> None:
    """Each run makes two steps; one checkpoint stays."""
    for step in (2, 4, 6):
        callbacks = (told_in(step), ModelCheckpoint(dirpath=tmp_path, save_last=True, save_top_k=0))
        trainer = trainer_of("single", tmp_path, *callbacks)
        path = "last" if step > 2 else None
        assert fit_until_told(trainer, ckpt_path=path) == step
        assert visible(tmp_path) == {"last.ckpt"}
    module = Tiny(9)
    callback = ModelCheckpoint(dirpath=tmp_path, save_last=True, save_top_k=0)
    trainer_of("single", tmp_path, callback).fit(module, Stream(), ckpt_path="last")
    assert same(bits(module), straight)


def test_on_exception_checkpoint_saves_in_its_place(
    tmp_path: Path, straight: dict[str, torch.Tensor]
) -> None:
    """Lightning resumes from it by itself."""
    trainer = trainer_of("single", tmp_path, told_in(3), OnExceptionCheckpoint(tmp_path))
    assert fit_until_told(trainer) == 3
    assert visible(tmp_path) == {"on_exception.ckpt"}

    module = Tiny(9)
    trainer = trainer_of("single", tmp_path, OnExceptionCheckpoint(tmp_path))
    trainer.fit(module, Stream())
    assert same(bits(module), straight)


def test_without_callbacks_the_log_names_the_path(
    tmp_path: Path, straight: dict[str, torch.Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    trainer = trainer_of("single", tmp_path, told_in(3), enable_checkpointing=False)
    assert fit_until_told(trainer) == 3
    path = tmp_path / "checkpoints" / "last-preempted.ckpt"
    assert f'resume with ckpt_path="{path}"' in caplog.text

    module = Tiny(9)
    trainer = trainer_of("single", tmp_path, enable_checkpointing=False)
    trainer.fit(module, Stream(), ckpt_path=path)
    assert same(bits(module), straight)


def test_gradients_are_not_left_half_accumulated(tmp_path: Path) -> None:
    """The step that is under way is completed first."""
    told = At(batch_start=lambda trainer: trainer.fit_loop.total_batch_idx == 3 and to_self())
    settings = {"accumulate_grad_batches": 3, "max_steps": 3}
    trainer = trainer_of("single", tmp_path, told, ModelCheckpoint(tmp_path), **settings)
    assert fit_until_told(trainer) == 2
    assert trainer.fit_loop.total_batch_idx == 5


# -- saves in flight, more signals -----------------------------------------------------------------


@pytest.mark.parametrize("step", [3, 4])
def test_a_save_of_this_very_step_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """What ModelCheckpoint has just begun is waited for; nothing is saved twice."""
    saved = []
    save = _fit_saves.save_training_state
    monkeypatch.setattr(
        _fit_saves,
        "save_training_state",
        lambda target, *args, **kwargs: (
            saved.append(Path(target).name),
            save(target, *args, **kwargs),
        ),
    )
    gate = Gate(monkeypatch)
    keeper = ModelCheckpoint(tmp_path, every_n_train_steps=3, save_top_k=0, save_last=True)
    opens = At(batch_end=lambda trainer: trainer.global_step == step and gate.open(trainer))
    io = {"async_save": True, "worker": "thread"}
    trainer = trainer_of("single", tmp_path, gate, told_in(step), opens, keeper, io=io)
    assert fit_until_told(trainer) == step
    assert saved == ["last.ckpt"] * (1 if step == 3 else 2)
    assert visible(tmp_path) == {"last.ckpt"}


def test_a_save_that_failed_is_made_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The save of this step that was in flight fails: it is saved once more, and that is told."""
    gate = Gate(monkeypatch)
    gate.failing = ("last.ckpt",)
    keeper = ModelCheckpoint(tmp_path, every_n_train_steps=3, save_top_k=0, save_last=True)
    opens = At(batch_end=gate.open)
    io = {"async_save": True, "worker": "thread"}
    trainer = trainer_of("single", tmp_path, gate, told_in(3), opens, keeper, io=io)
    assert fit_until_told(trainer) == 3
    assert is_checkpoint(tmp_path / "last.ckpt")


def test_a_second_signal_does_not_end_the_save(
    tmp_path: Path, straight: dict[str, torch.Tensor]
) -> None:
    """Not while it is saved, and not while callbacks hear of the end."""
    sync = os.fsync

    def told_sync(descriptor: int) -> None:
        to_self()
        sync(descriptor)

    again = At(exception=lambda _: to_self())
    with mock.patch.object(os, "fsync", told_sync):
        trainer = trainer_of("single", tmp_path, told_in(3), again, ModelCheckpoint(tmp_path))
        assert fit_until_told(trainer) == 3
    module = Tiny(9)
    trainer_of("single", tmp_path, ModelCheckpoint(tmp_path)).fit(
        module, Stream(), ckpt_path="last"
    )
    assert same(bits(module), straight)


def test_a_save_that_fails_is_an_error(tmp_path: Path) -> None:
    """It is raised in place of the stop; the checkpoint before is there."""
    keeper = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=2)
    trainer = trainer_of("single", tmp_path, told_in(3), keeper)
    save = _overrides.save_training_state

    def fail(target: Path, *args: Any, **kwargs: Any) -> None:
        if "last" in Path(target).name:
            args = (lambda: 1 / 0, *args[1:])
        save(target, *args, **kwargs)

    before = signal.getsignal(signal.SIGTERM)
    with (
        mock.patch.object(_overrides, "save_training_state", fail),
        pytest.raises((CheckpointingException, ZeroDivisionError)),
    ):
        trainer.fit(Tiny(), Stream())
    assert visible(tmp_path) == {"step=2.ckpt"}
    assert signal.getsignal(signal.SIGTERM) == before


# -- off, and what is left -------------------------------------------------------------------------


def test_off_nothing_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PreemptionGuard, "install", lambda _: pytest.fail("installed"))
    seen = []
    look = At(batch_start=lambda trainer: seen.append(len(trainer.callbacks)))
    trainer = trainer_of(
        "single", tmp_path, look, ModelCheckpoint(tmp_path), io={"preemption": False}, max_steps=2
    )
    trainer.fit(Tiny(), Stream())
    assert seen == [3, 3]


def test_a_fit_without_a_signal_leaves_nothing(tmp_path: Path) -> None:
    """And a second fit of the same Trainer has it again."""
    before = signal.getsignal(signal.SIGTERM)
    trainer = trainer_of("single", tmp_path, ModelCheckpoint(tmp_path), max_steps=2)
    callbacks = list(trainer.callbacks)
    trainer.fit(Tiny(), Stream())
    assert signal.getsignal(signal.SIGTERM) == before
    assert trainer.callbacks == callbacks
    trainer.callbacks.insert(0, told_in(4))
    trainer.fit_loop.epoch_loop.max_steps = 9
    assert fit_until_told(trainer) == 4


# -- ranks -----------------------------------------------------------------------------------------


class Timed(At):
    """Sends the signal to its own rank, some time after training has begun."""

    def __init__(self, secs: float | None) -> None:
        super().__init__(batch_start=self._begin)
        self._secs = secs

    def _begin(self, trainer: L.Trainer) -> None:
        secs, self._secs = self._secs, None
        if secs is not None:
            threading.Timer(secs, to_self).start()


def stop_ranks(
    rank: int, size: int, layout: str, folder: str, told: tuple[int, ...]
) -> tuple[int, bool]:
    """Be stopped at some time, go on, and compare with a run that was not."""
    torch.manual_seed(0)
    secs = 0.05 * (1 + rank) if rank in told else None
    root, io = Path(folder), {"async_save": layout == "ddp"}
    keeper = ModelCheckpoint(root, save_last=True, save_top_k=0)
    trainer = trainer_of(layout, root, Timed(secs), keeper, io=io, max_steps=100_000)
    steps = fit_until_told(trainer)
    most = steps + 4
    module = Tiny(9)
    keeper = ModelCheckpoint(root, save_last=True, save_top_k=0)
    trainer = trainer_of(layout, root, keeper, io=io, max_steps=most)
    trainer.fit(module, Stream(), ckpt_path="last")
    whole = Tiny()
    trainer_of(layout, root / "w", ModelCheckpoint(root / "w"), max_steps=most).fit(whole, Stream())
    return steps, same(bits(module), bits(whole))


@pytest.mark.parametrize(
    ("layout", "told"), [("ddp", (0,)), ("ddp", (1,)), ("ddp", (0, 1)), ("fsdp2", (1,))]
)
def test_all_ranks_stop_after_the_same_step(
    tmp_path: Path, layout: str, told: tuple[int, ...]
) -> None:
    """Lightning's own handler would exchange in the middle of a step, and hang."""
    found = run_ranks(stop_ranks, LAYOUTS[layout], layout, str(tmp_path), told)
    assert len({steps for steps, _ in found}) == 1, found
    assert all(is_same for _, is_same in found)


def hang(_: int) -> None:
    threading.Event().wait()


def save_while_storage_hangs(rank: int, size: int, folder: str, step: int) -> None:
    def told(trainer: L.Trainer) -> None:
        if trainer.global_step == step - 1:
            mock.patch.object(os, "fsync", hang).start()
            to_self()

    keeper = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=2)
    io = {"grace_secs": 2.0}
    trainer_of("single", folder, At(batch_start=told), keeper, io=io).fit(Tiny(), Stream())


@pytest.mark.parametrize("step", [3, 4])
def test_with_storage_that_hangs_the_process_ends_after_the_grace(
    tmp_path: Path, step: int
) -> None:
    """In our save or in one that comes before; nothing else could be taken for a checkpoint."""
    (outcome,) = run_ranks(
        save_while_storage_hangs, 1, str(tmp_path), step, expect_errors=True, timeout_secs=60
    )
    assert outcome.exit_code == 143, outcome.describe()
    assert "the grace is over, and this process has not stopped" in outcome.log
    assert visible(tmp_path) == {"step=2.ckpt"}
    assert is_checkpoint(tmp_path / "step=2.ckpt")


def test_ranks_that_lightning_has_started(tmp_path: Path) -> None:
    """The signal comes to the program alone, which exits as one that was told to; all end."""
    program = [sys.executable, "-W", "ignore", "-m", "tests.lightning._preempted_job"]
    job = subprocess.Popen(
        [*program, str(tmp_path)], cwd=Path(__file__).parents[2], stderr=subprocess.PIPE,
        text=True, start_new_session=True,
    )  # fmt: skip
    try:
        wait_for(tmp_path / "rank-0", tmp_path / "rank-1")
        job.send_signal(signal.SIGTERM)
        _, told = job.communicate(timeout=300)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
    assert job.returncode == 143, told
    assert is_checkpoint(tmp_path / "c" / "last.ckpt")


def wait_for(*paths: Path) -> None:
    deadline = time.monotonic() + 60
    while not all(path.exists() for path in paths):
        assert time.monotonic() < deadline, "the job did not begin"
        threading.Event().wait(0.05)
