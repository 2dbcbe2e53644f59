"""One IO at one Accelerator, and the saver that writes its checkpoints in the background.

Here: when the saver is made, asked for failures, drained and closed, and when a job that was told
to go is stopped. Not here: the saver itself (``dist_ckpt.background``), what is saved (``saving``),
the stop (``preemption``), who calls (``registration``). On every rank.

A failure must be raised at the same call on all ranks, so those calls are counted that ranks make
equally often: backward passes, which wait for each other under every layout. Batches of dataloaders
count only in a loop that does without ``Accelerator.backward``, from its first save on: an
evaluation on rank 0 alone does not bring the others out of step.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from accelerate.accelerator import Accelerator

from accelerate_dist_ckpt.io import DistCkptIO
from accelerate_dist_ckpt.metrics import TrackerSink
from accelerate_dist_ckpt.preemption import Preemption
from dist_ckpt.background import BackgroundSaver, saver_of
from dist_ckpt.events import EventSink, sinks_of
from dist_ckpt.training_state import SaveMemory

__all__ = ["Registration", "before_batch", "before_epoch"]

logger = logging.getLogger(__name__)

# Kept alive here: when a script's last reference to its Accelerator goes, saves may be in flight.
_OPEN: set[Registration] = set()


class Registration:
    """An IO at an Accelerator, which holds it; copies of it begin without a saver.

    Args:
        io: The choices.
    """

    def __init__(self, io: DistCkptIO) -> None:
        """Start nothing yet."""
        self.io = io
        self.memory = SaveMemory()
        self.step: int | None = None  # the newest that the user logged at
        self.swept: set[Path] = set()  # where was looked for what dead saves left
        self._saver: BackgroundSaver | None = None
        self._trackers = TrackerSink()
        self._sinks: tuple[EventSink, ...] | None = None
        self._owner: Callable[[], Accelerator | None] = lambda: None
        self._calls_backward = False
        self._has_saved = False
        self._uneven = 0
        self._preemption: Preemption | None = None

    def __reduce__(self) -> tuple[type[Registration], tuple[DistCkptIO]]:
        """A copy, in a worker of a dataloader say, is as if it were registered there."""
        return Registration, (self.io,)

    def saver(self, accelerator: Accelerator) -> BackgroundSaver | None:
        """Return what saves in the background, made if need be; None if saves are to block.

        Raises:
            ConfigError: The choices do not agree with each other.
        """
        config = self.io.config
        if config.async_save and self._saver is None:
            close_orphans()
            self._saver = saver_of(config, self.sinks(accelerator))
            self._owner, self._has_saved = weakref.ref(accelerator), False
            _OPEN.add(self)
        return self._saver

    def sinks(self, accelerator: Accelerator) -> tuple[EventSink, ...]:
        """Return the sinks for the events of all saves; the same ones at each call."""
        if self._sinks is None:
            config, rank = self.io.config, accelerator.process_index
            trackers = [self._trackers] if config.log_metrics and rank == 0 else []
            self._sinks = sinks_of(config.events_file, rank, trackers)
        return self._sinks

    def start(self, accelerator: Accelerator) -> None:
        """Start the worker before it is needed, and handle the signal. Local, waits for nothing."""
        self._arm(accelerator)
        saver = self.saver(accelerator)
        if saver is not None:
            saver.start()

    def _arm(self, accelerator: Accelerator) -> None:
        if self.io.config.preemption and self._preemption is None:
            close_orphans()
            self._preemption = Preemption(self.io.config.grace_secs)
            self._owner = weakref.ref(accelerator)
            _OPEN.add(self)

    @property
    def bounded_io(self) -> DistCkptIO:
        """The choices; of a job that was told to go, within its grace."""
        return self.io if self._preemption is None else self._preemption.bounded(self.io)

    def has_saved(self) -> None:
        """Take note of a save in the background."""
        self._has_saved = True

    def was_at(self, path: Path, *, saved: bool) -> None:
        """Take note of a checkpoint that was saved or loaded."""
        if self._preemption is not None:
            self._preemption.was_at(path, saved=saved)

    def should_stop(self) -> bool:
        """Whether a script that ends itself is to save and stop."""
        return self._preemption is not None and self._preemption.should_stop()

    def before_backward(self, accelerator: Accelerator) -> None:
        """Raise the failure of a save; called at each backward pass.

        Raises:
            AsyncSaveError: A save failed; once, at the same call on all ranks.
        """
        self._calls_backward = True
        if self._owner() is accelerator:  # it was started, and may have been closed since
            self._arm(accelerator)
        if self._preemption is not None and not self._uneven:
            self._preemption.before_backward(accelerator)
        if self._saver is None:
            return
        if accelerator.has_lomo_optimizer:  # its parameters change in the backward pass
            self._saver.finish_staging()
        self.flush(accelerator)
        if not self._uneven:
            self._saver.poll()

    def before_batch(self) -> None:
        """Log what is known of saves; and raise failures, if no backward pass does so.

        Raises:
            AsyncSaveError: A save failed.
            Preempted: The job was told to go, and all is saved.
        """
        accelerator = self._owner()
        self.before_epoch()
        if self._saver is None or accelerator is None:
            return
        self.flush(accelerator)
        if self._has_saved and not self._calls_backward and not self._uneven:
            self._saver.poll()

    def before_epoch(self) -> None:
        """Save and stop, if the job was told to go and the last step is done.

        Raises:
            Preempted: All is saved.
            CheckpointingException: It could not be saved.
        """
        accelerator = self._owner()
        if accelerator is not None and self._preemption is not None and self._preemption.is_time():
            self._preemption.stop(accelerator, self._end_saver)

    @contextlib.contextmanager
    def uneven(self) -> Iterator[None]:
        """Raise nothing in a part of the program where ranks have different numbers of batches."""
        self._uneven += 1
        try:
            yield
        finally:
            self._uneven -= 1

    def drain(self) -> None:
        """Wait until nothing is in flight and everything queued is done.

        Raises:
            AsyncSaveError: A save failed and nobody was told.
            BarrierTimeoutError: It takes longer than ``drain_timeout_secs``.
        """
        if self._saver is not None:
            self._saver.drain()

    def close(self) -> None:
        """Drain, then end worker, threads and memory. The next save in the background starts anew.

        Raises:
            AsyncSaveError: A save failed and nobody was told; all is closed then, too.
            BarrierTimeoutError: What is in flight takes longer; it is given up.
        """
        preemption, self._preemption = self._preemption, None
        try:
            self._end_saver(None)
        finally:
            _OPEN.discard(self)
            if preemption is not None:
                preemption.close()

    def _end_saver(self, timeout_secs: float | None) -> None:
        saver, self._saver = self._saver, None
        if saver is None:
            return
        try:
            saver.close(timeout_secs=timeout_secs)
        finally:
            accelerator = self._owner()
            if accelerator is not None:
                self.flush(accelerator)

    def close_beside(self, error: BaseException | None) -> None:
        """Close; while another error is on its way, tell of a failure in the log only."""
        if error is None:
            self.close()
            return
        try:
            self.close()
        except Exception:
            logger.exception("a checkpoint was not finished")

    def flush(self, accelerator: Accelerator) -> None:
        """Pass new numbers to the trackers; called by the training thread."""
        self._trackers.flush(accelerator, self.step)

    @property
    def is_orphan(self) -> bool:
        """Whether the Accelerator is gone."""
        return self in _OPEN and self._owner() is None


def before_batch(_: Any = None) -> None:
    """Do what is to be done at each batch of any prepared dataloader.

    Raises:
        AsyncSaveError: A save failed, and the program makes no backward passes by Accelerate.
    """
    for one in tuple(_OPEN):
        one.before_batch()


def before_epoch() -> None:
    """Do what is to be done before the first batch of any prepared dataloader.

    Raises:
        Preempted: The job was told to go, and all is saved.
    """
    for one in tuple(_OPEN):
        one.before_epoch()


def close_orphans() -> None:
    """End savers of Accelerators that are gone; those that nobody ends before end at exit."""
    for one in tuple(_OPEN):
        if one.is_orphan:
            one.close_beside(RuntimeError("nobody is there to be told"))
