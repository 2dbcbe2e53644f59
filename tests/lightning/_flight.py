"""Holds on what goes on in the background, so that tests need no luck and no clock.

Here: gates for a thread that writes, and signals to a process that does. Not here: tests.
"""
# ruff: noqa: ARG002 - the arguments of hooks are Lightning's

from __future__ import annotations

import contextlib
import math
import os
import resource
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812 - as its documents write it
import pytest
from lightning.pytorch.callbacks import Callback

from dist_ckpt._staging_pool import copying
from dist_ckpt._staging_pool.copying import CopyTask
from dist_ckpt._worker.orders import FileOrder
from dist_ckpt.background import BackgroundSaver
from tests.lightning._training import make_trainer, names

WAIT_SECS = 60.0


def saver_of(trainer: L.Trainer) -> BackgroundSaver:
    """Return the saver of the fit that is running."""
    return trainer.strategy.dist_ckpt_binding.saves._saver


def worker_pid(trainer: L.Trainer) -> int:
    """Return the process that writes for this rank."""
    return saver_of(trainer)._machinery.worker.pid


def wait_until_idle(trainer: L.Trainer) -> None:
    """Wait until the worker is there and all saves have ended, without being told how."""
    saver_of(trainer)._machinery.worker._link.wait_until_ready(WAIT_SECS)
    queue = saver_of(trainer)._queue
    queue.wait_for(queue.is_idle, WAIT_SECS, "a test")


def tell_worker(trainer: L.Trainer, number: signal.Signals) -> None:
    """Send a signal to this rank's worker, if it is still there."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(worker_pid(trainer), number)


def fill_disk(trainer: L.Trainer, nbytes: int = 16) -> None:
    """Let this rank's worker write no more than some bytes to any file, from the next save on."""
    wait_until_idle(trainer)
    limits = (nbytes, resource.RLIM_INFINITY)
    resource.prlimit(worker_pid(trainer), resource.RLIMIT_FSIZE, limits)


def visible(folder: Path | str) -> set[str]:
    """Return the names that are no attempts of saves."""
    return {name for name in names(Path(folder)) if not name.startswith(".")}


class At(Callback):
    """Does something in a hook, before ModelCheckpoint's turn."""

    def __init__(self, **hooks: Callable[[L.Trainer], None]) -> None:
        self.hooks = hooks

    def _do(self, name: str, trainer: L.Trainer) -> None:
        if name in self.hooks:
            self.hooks[name](trainer)

    def on_train_start(self, trainer: Any, *_: Any) -> None:
        self._do("train_start", trainer)

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        self._do("batch_start", trainer)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self._do("batch_end", trainer)

    def on_train_epoch_start(self, trainer: Any, *_: Any) -> None:
        self._do("epoch_start", trainer)

    def on_train_epoch_end(self, trainer: Any, *_: Any) -> None:
        self._do("epoch_end", trainer)

    def on_validation_start(self, trainer: Any, *_: Any) -> None:
        self._do("validation_start", trainer)

    def on_train_end(self, trainer: Any, *_: Any) -> None:
        self._do("train_end", trainer)

    def on_exception(self, trainer: Any, *_: Any) -> None:
        self._do("exception", trainer)


class Gate(At):
    """Keeps saves of thread workers in flight until the next batch starts.

    Attributes:
        failing: Parts of paths; what is saved there fails.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(batch_start=self.let_pass, train_end=self.open, exception=self.open)
        self.failing: tuple[str, ...] = ()
        self._passed, self._most = 0, 0.0
        self._changed = threading.Condition()
        write = FileOrder.write

        def gated(order: FileOrder, staged: Any) -> Any:
            with self._changed:
                self._passed += 1  # thread workers write one save after the other
                if not self._changed.wait_for(lambda: self._passed <= self._most, WAIT_SECS):
                    raise TimeoutError("the gate did not open")
            report = write(order, staged)
            if any(part in order.target for part in self.failing):
                raise OSError(28, "No space left on device")
            return report

        monkeypatch.setattr(FileOrder, "write", gated)

    def let_pass(self, trainer: L.Trainer) -> None:
        """Let all saves pass that were asked for until now."""
        self._let(saver_of(trainer)._number)

    def open(self, trainer: L.Trainer) -> None:
        """Let all pass."""
        self._let(math.inf)

    def close(self) -> None:
        """Begin again, for another fit."""
        self._passed, self._most = 0, 0.0

    def _let(self, most: float) -> None:
        with self._changed:
            self._most = most
            self._changed.notify_all()


def copy_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let overlapped copies begin when somebody waits for them, the latest moment there is."""
    begun: dict[int, tuple[Any, threading.Event]] = {}  # with its owner: ids are used again
    work, wait, abandon = CopyTask.work, CopyTask.wait, CopyTask.abandon

    def of(task: CopyTask) -> threading.Event:
        return begun.setdefault(id(task._jobs), (task._jobs, threading.Event()))[1]

    def late_work(task: CopyTask) -> None:
        if task._watched:  # else somebody waits already
            of(task).wait(WAIT_SECS)
        work(task)

    def telling_wait(task: CopyTask, timeout_secs: float) -> None:
        of(task).set()
        wait(task, timeout_secs)

    def telling_abandon(task: CopyTask) -> None:
        of(task).set()
        abandon(task)

    monkeypatch.setattr(CopyTask, "work", late_work)
    monkeypatch.setattr(CopyTask, "wait", telling_wait)
    monkeypatch.setattr(CopyTask, "abandon", telling_abandon)
    monkeypatch.setattr(copying, "_SMALL_NBYTES", -1)  # no tensor is copied at once


def make_async(
    layout: str, root: Path | str, io: dict[str, Any] | None = None, **kwargs: Any
) -> L.Trainer:
    """Return a Trainer that saves in the background, with settings for the plugin and for itself."""
    from lightning_dist_ckpt import DistCkptIO

    settings = {"async_save": True, "timeout_secs": 60, "drain_timeout_secs": 60} | (io or {})
    return make_trainer(layout, root, plugins=[DistCkptIO(**settings)], **kwargs)
