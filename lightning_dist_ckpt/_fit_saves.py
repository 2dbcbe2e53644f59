"""The background saves of one fit, on one rank.

Here: ``FitSaves``: which saves go on in the background, when failures are raised, what the end of a
fit and an exception wait for. Not here: Lightning's hooks that call it (``_hooks``,
``_overrides``), the saves themselves (``dist_ckpt.background``). Made and used alike on all ranks,
by the thread that trains.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dist_ckpt.background import saver_of
from dist_ckpt.errors import AsyncSaveError, CheckpointingException
from dist_ckpt.serialization import all_processes
from dist_ckpt.training_state import SaveMemory, save_training_state
from lightning_dist_ckpt._metrics import OTHERS_KEPT, SaveEvents
from lightning_dist_ckpt._model_checkpoint import (
    Memory,
    Outcome,
    still_needed,
    take_back,
    unwatch,
    watch,
)
from lightning_dist_ckpt._pending import Pending

if TYPE_CHECKING:
    from dist_ckpt.training_state import TrainingState
    from dist_ckpt.types import PathLike
    from lightning_dist_ckpt.io import DistCkptIO

__all__ = ["FitSaves"]

logger = logging.getLogger(__name__)

_INTERRUPT_SECS = 30.0
"""Who stops a program waits no longer: most schedulers kill it then."""

_GIVEN_UP_SECS = 1.0

_REQUEUE_NAME = re.compile(r"hpc_ckpt_\d+\.ckpt")


class FitSaves:
    """Saves of a Trainer from ``setup`` to ``teardown``.

    Args:
        trainer: The Trainer, with its process group.
        io: The plugin.
        memory: For the saves that block.

    Attributes:
        pending: What happens to names; only rank 0 does it.
        is_training: Whether saves go on in the background.
    """

    def __init__(self, trainer: Any, io: DistCkptIO, memory: SaveMemory) -> None:
        """Start the worker: it is there when the first save comes."""
        self._trainer, self._io = trainer, io
        self._events = SaveEvents(trainer, io.config)
        self._saver = saver_of(io.config, self._events.sinks)
        self.pending = Pending(self._saver.after_commit)
        self.is_training = False
        self._patience_secs: float | None = None
        self._ends = False
        self._asking: Memory | None = None
        self._memories: list[Memory] = []
        self._newest = Outcome()
        self._memory = memory
        self._to_tell: list[Any] = []
        self._watched = [callback for callback in trainer.checkpoint_callbacks if watch(callback)]
        self._saver.start()

    # -- saves

    @contextlib.contextmanager
    def asked_by(self, memory: Memory) -> Iterator[None]:
        """Keep what a callback knew with the saves in this block."""
        self._asking = memory
        try:
            yield
        finally:
            self._asking = None

    def save(self, target: Path, state: Callable[[], TrainingState]) -> None:
        """Save, in the background if training goes on. Collective.

        Raises:
            AsyncSaveError: A save before this one failed; this one is not begun.
            CheckpointingException: This one failed.
        """
        in_background = self._may_go_on(target)
        if not in_background:
            self._finish_before(target)
        options = self._io.save_options(target)
        number, was_link = self.pending.begin(target)
        if was_link:
            options = replace(options, replace="any")
        outcome = self._newest = Outcome()
        self._remember(target)

        def build() -> TrainingState:
            self.pending.wait_for(target, self._io.config.timeout_secs)
            return state()

        def settled(failure: BaseException | None) -> None:
            outcome.end(failure)
            self.pending.end(number, failure)

        self._events.begin()
        saver = self._saver if in_background else None
        try:
            save_training_state(
                target, build, options=options, saver=saver, on_settled=settled,
                memory=self._memory, sinks=self._events.sinks,
            )  # fmt: skip
        except BaseException as error:
            settled(error)
            raise
        if not in_background:
            settled(None)
            self._events.log()

    def _may_go_on(self, target: Path) -> bool:
        return self.is_training and not self._comes_last(target)

    def _comes_last(self, target: Path) -> bool:
        """Whether the program ends after this save, also if one before it has failed."""
        is_requeue = _REQUEUE_NAME.fullmatch(target.name)
        return bool(self._trainer.interrupted or self._ends or is_requeue)

    def _finish_before(self, target: Path) -> None:
        try:
            self.drain()
        except CheckpointingException:
            if not self._comes_last(target):
                raise
            logger.exception("an earlier save failed; saving %s all the same", target)

    def _remember(self, path: PathLike) -> None:
        """Keep what the callback that asks knew, for the case that the newest save fails."""
        if self._asking is not None:
            memory = self._asking.of(os.fspath(path), self._newest)
            self._memories = [*still_needed(self._memories), memory]

    # -- what waits behind them

    def remove(self, path: PathLike, run: Callable[[], bool]) -> None:
        """Let ``run`` remove ``path`` when what replaces it is committed. Rank 0 does it.

        It returns whether it did.
        """

        def remove() -> None:
            is_checkpoint = Path(path).is_dir() and not Path(path).is_symlink()
            if run() and is_checkpoint:
                self._saver.pruned(path, OTHERS_KEPT)

        if self._trainer.is_global_zero:
            self.pending.remove(path, remove)

    def link(self, target: PathLike, link: PathLike) -> None:
        """Let ``link`` lead to ``target`` when that is committed. Rank 0 does it."""
        self._remember(link)
        if self._trainer.is_global_zero and Path(target).absolute() != Path(link).absolute():
            self.pending.link(target, link)

    def tell_loggers_of(self, callback: Any) -> None:
        """Call the loggers' ``after_save_checkpoint`` when nothing is in flight. Rank 0 does it."""
        if self._trainer.is_global_zero:
            self._to_tell = [one for one in self._to_tell if one is not callback] + [callback]

    # -- touches

    def poll(self) -> None:
        """Raise the failure of a save that has ended, once. Cheap.

        Raises:
            AsyncSaveError: It failed; on every rank at the same batch.
        """
        self._saver.poll()
        if self._to_tell or self._events.has_rows:
            self._tell()

    def finish_staging(self) -> None:
        """Return when parameters may change in other ways than by the optimizer's step."""
        self._saver.finish_staging()

    def drain(self) -> None:
        """Wait until nothing is in flight, and all links and removals are done.

        Raises:
            AsyncSaveError: A save failed and nobody was told.
            BarrierTimeoutError: It takes longer than ``drain_timeout_secs``.
        """
        self._saver.drain(timeout_secs=self._patience_secs)

    def finish(self) -> None:
        """End the training: when this returns, all ranks see all checkpoints. Collective.

        Raises:
            AsyncSaveError: A save failed and nobody was told, on every rank.
            BarrierTimeoutError: What is in flight takes too long.
        """
        self.is_training = False
        failure: CheckpointingException | None = None
        try:
            self.drain()
        except CheckpointingException as error:
            failure = error
        told = "" if failure is None else str(failure)
        try:
            all_told = self._meet("ending the fit", told)
        except CheckpointingException:
            if failure is None:
                raise
        else:
            others = [f"rank {rank}: {text}" for rank, text in enumerate(all_told) if text]
            if failure is None and others:
                raise AsyncSaveError(f"saves did not end well; {'; '.join(others)}")
        if failure is not None:
            raise failure
        self._tell()

    def _meet(self, phase: str, told: str) -> list[str]:
        comm = all_processes(timeout_secs=self._io.config.timeout_secs)
        return comm.map_reduce(phase, lambda: told, list)

    def end_soon(self, io: DistCkptIO, patience_secs: float) -> None:
        """From now on, save at once and with this plugin; wait no longer for what is in flight."""
        self.is_training, self._ends = False, True
        self._io, self._patience_secs = io, patience_secs

    def interrupted(self, exception: BaseException) -> None:
        """Let saves end that are in flight, for a while. Local: the other ranks may be gone."""
        self.is_training = False
        stops = isinstance(exception, KeyboardInterrupt | SystemExit)
        if stops and not self._ends:
            self._patience_secs = min(self._saver.options.drain_timeout_secs, _INTERRUPT_SECS)
        try:
            self.finish_staging()
            self.drain()
        except Exception:
            self._patience_secs = _GIVEN_UP_SECS
            logger.exception("training was interrupted, and a save with it")

    def close(self) -> None:
        """End the worker; all that this fit had in this process is gone then.

        Raises:
            CheckpointingException: A save failed and nobody was told; not if training was
                interrupted: its exception matters more.
        """
        self.is_training = False
        try:
            # Whoever stops a program does not wait for long; the worker processes may.
            stops = bool(self._trainer.interrupted)
            self._saver.close(timeout_secs=self._patience_secs, leaves=stops)
        except Exception:
            if not self._trainer.interrupted:
                raise
            logger.exception("after training was interrupted")
        finally:
            take_back(self._memories)
            for callback in self._watched:
                unwatch(callback)

    def _tell(self) -> None:
        """Tell the loggers what is new: from this thread, as they are not made for others."""
        self._events.log()
        callbacks: list[Any] = []
        if self._to_tell and not self._saver.in_flight:
            callbacks, self._to_tell = self._to_tell, []
        for one in self._trainer.loggers:
            for callback in callbacks:
                one.after_save_checkpoint(weakref.proxy(callback))
