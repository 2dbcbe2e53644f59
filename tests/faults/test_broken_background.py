"""What broke background saves once: stale descriptions, threads that ended, memory nobody gave."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from dist_ckpt import SaveOptions
from dist_ckpt.background import BackgroundOptions, BackgroundSaver
from dist_ckpt.errors import AsyncSaveError
from dist_ckpt.events import Event, Staged
from dist_ckpt.training_state import CheckpointView, is_checkpoint, save_model_and_optimizer
from tests.faults._background import worker_pid
from tests.faults._leaks import hidden_entries

_SECS = 60.0


@pytest.fixture
def make() -> Iterator[Callable[..., BackgroundSaver]]:
    made: list[BackgroundSaver] = []

    def of(*sinks: Any, **options: Any) -> BackgroundSaver:
        chosen = BackgroundOptions(**{"worker": "thread", "drain_timeout_secs": _SECS, **options})
        made.append(BackgroundSaver(chosen, sinks=sinks, timeout_secs=_SECS))
        return made[-1]

    yield of
    for saver in made:
        with contextlib.suppress(AsyncSaveError):
            saver.close(timeout_secs=_SECS)


def stored(path: Path) -> dict[str, torch.Tensor]:
    return CheckpointView.open(path).full_model(0)


class Shared(nn.Module):
    """Two names for the first child."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(2, 2)
        self.b = self.a
        self.c = nn.Linear(2, 2)


def test_a_shared_child_that_moves_is_noticed(make: Any, tmp_path: Path) -> None:
    """The same modules are there, in the same order; but ``b`` is another one of them."""
    model, saver = Shared(), make()
    save_model_and_optimizer(tmp_path / "first", model, saver=saver)
    model.b = model.c
    save_model_and_optimizer(tmp_path / "second", model, saver=saver)
    saver.drain()

    found = stored(tmp_path / "second")
    for name, expected in model.state_dict().items():
        assert torch.equal(found[name], expected), name


def test_a_lazy_conjugate_is_noticed(make: Any, tmp_path: Path) -> None:
    """The same memory, shape and strides; read with another sign."""
    model, saver = nn.Linear(2, 2, dtype=torch.complex64), make()
    save_model_and_optimizer(tmp_path / "first", model, saver=saver)
    model.weight.data = model.weight.data.conj()
    save_model_and_optimizer(tmp_path / "second", model, saver=saver)
    saver.drain()

    assert torch.equal(stored(tmp_path / "second")["weight"], model.weight.resolve_conj())


@pytest.mark.parametrize("worker", ["process", "thread"])
def test_relative_directories_are_those_of_the_call(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, worker: str
) -> None:
    """The program changes its directory after the worker was started."""
    (tmp_path / "later" / "extra").mkdir(parents=True)
    (tmp_path / "later" / "extra" / "note").write_text("kept")
    monkeypatch.chdir(tmp_path)
    model, saver = nn.Linear(2, 2), make(worker=worker)
    save_model_and_optimizer("first", model, saver=saver)
    saver.drain()
    monkeypatch.chdir(tmp_path / "later")
    options = SaveOptions(staging_dir=Path("aside"), include_dir=Path("extra"))
    save_model_and_optimizer("second", model, saver=saver, options=options)
    saver.drain()

    assert (tmp_path / "later" / "second" / "note").read_text() == "kept"
    assert hidden_entries([tmp_path / "later" / "aside"]) == []


def test_an_action_that_exits_ends_no_thread(make: Any, tmp_path: Path) -> None:
    """``SystemExit`` of code that runs behind a commit is logged like any failure."""
    model, saver = nn.Linear(2, 2), make()
    save_model_and_optimizer(tmp_path / "first", model, saver=saver)
    saver.after_commit(lambda: sys.exit(3), what="a script")
    saver.drain()
    save_model_and_optimizer(tmp_path / "second", model, saver=saver)
    saver.after_commit(lambda: sys.exit(3), what="a script")
    saver.drain()

    assert is_checkpoint(tmp_path / "second")


def test_a_slow_action_keeps_nobody_from_hearing_of_the_next_save(
    make: Any, tmp_path: Path
) -> None:
    """Other ranks ask this one's thread at which poll a failure is raised, and not for long."""
    model, saver, goes_on = nn.Linear(2, 2), make(), threading.Event()
    save_model_and_optimizer(tmp_path / "first", model, saver=saver)
    saver.after_commit(lambda: goes_on.wait(2 * _SECS), what="an upload")
    try:
        with mock.patch("dist_ckpt._worker.submit._stage", side_effect=OSError("boom")):
            save_model_and_optimizer(tmp_path / "second", model, saver=saver)
        with pytest.raises(AsyncSaveError, match="boom"):
            saver.wait()
    finally:
        goes_on.set()


class Interrupted:
    """A sink in which Ctrl-C arrives, once."""

    def __init__(self) -> None:
        self.is_next = True

    def emit(self, event: Event) -> None:
        if isinstance(event, Staged) and self.is_next:
            self.is_next = False
            raise KeyboardInterrupt


def test_an_interrupt_in_a_sink_leaves_the_saver_whole(make: Any, tmp_path: Path) -> None:
    """The worker has the save by then: it is settled, and its memory comes back."""
    model, saver = nn.Linear(2, 2), make(Interrupted())
    with pytest.raises(KeyboardInterrupt):
        save_model_and_optimizer(tmp_path / "first", model, saver=saver)
    options = SaveOptions(timeout_secs=_SECS)
    save_model_and_optimizer(tmp_path / "second", model, saver=saver, options=options)
    saver.drain()

    assert is_checkpoint(tmp_path / "first")
    assert is_checkpoint(tmp_path / "second")


@pytest.mark.parametrize("has_ended", [False, True])
def test_waiting_for_a_path_does_not_tell_of_another(
    make: Any, tmp_path: Path, has_ended: bool
) -> None:
    """Whether the path was in flight still differs from rank to rank; what is raised must not."""
    model, saver = nn.Linear(2, 2), make(worker="process", max_in_flight=2)
    saver.start()
    saver._machinery.worker._started().wait_until_ready()
    pid = worker_pid(saver)
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    wait_for = saver._queue.wait_for

    def going_on(*args: Any) -> float:
        os.kill(pid, signal.SIGCONT)  # only now: the path was in flight when it was looked up
        return float(wait_for(*args))

    with mock.patch("dist_ckpt._worker.submit._stage", side_effect=OSError("boom")):
        save_model_and_optimizer(tmp_path / "bad", model, saver=saver)
    save_model_and_optimizer(tmp_path / "good", model, saver=saver)
    if has_ended:
        going_on(saver._queue.is_idle, _SECS, "both saves")
    with mock.patch.object(saver._queue, "wait_for", going_on):
        saver.wait(tmp_path / "good")

    assert is_checkpoint(tmp_path / "good")
    with pytest.raises(AsyncSaveError, match="boom"):
        saver.wait(tmp_path / "bad")


def test_a_thread_that_cannot_start_fails_one_save(make: Any, tmp_path: Path) -> None:
    """Processes may run out of threads; it is told before anything is handed over."""
    model, saver = nn.Linear(2, 2), make()
    saver.start()
    start = threading.Thread.start

    def refused(thread: threading.Thread) -> None:
        if thread.name == "dist_ckpt-saves":
            raise RuntimeError("can't start new thread")
        start(thread)

    with (
        mock.patch.object(threading.Thread, "start", refused),
        pytest.raises(Exception, match="new thread"),
    ):
        save_model_and_optimizer(tmp_path / "first", model, saver=saver)
    save_model_and_optimizer(tmp_path / "second", model, saver=saver)
    saver.drain()

    assert is_checkpoint(tmp_path / "second")
    assert hidden_entries([tmp_path]) == []
