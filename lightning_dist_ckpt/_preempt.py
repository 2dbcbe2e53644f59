"""What a fit does when the job is told to go: one more save, then a clean stop.

Here: ``Preemption``, one for each fit, and the hooks of the callback that asks it, which is the
last of all. Not here: the signal, and at which batch it counts (``dist_ckpt.preemption``). On every
rank alike, in the main thread.

Lightning's own handler of SIGTERM makes a collective wherever training happens to be, so it is
taken out while batches are trained. What Lightning raises on SIGTERM is raised here, too.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from dist_ckpt.errors import BarrierTimeoutError, CheckpointingException
from dist_ckpt.preemption import PreemptionGuard
from dist_ckpt.serialization import all_processes
from lightning_dist_ckpt._candidates import model_checkpoints

if TYPE_CHECKING:
    from lightning_dist_ckpt._fit_saves import FitSaves
    from lightning_dist_ckpt.io import DistCkptIO

__all__ = ["Preemption", "StopHooks", "begin"]

logger = logging.getLogger(__name__)

_NAME = "last-preempted.ckpt"
"""What ``ckpt_path="last"`` finds beside a ``ModelCheckpoint``, whatever that is set to."""

_DRAIN_SHARE = 0.8
"""The part of what is left of the grace in which saves in flight may end."""

_ACCUMULATE_SHARE = 0.5
"""The part of the grace in which the batches of a step may be completed."""


class StopHooks:
    """Hooks of the last callback: all others have done what they do at the end of a batch.

    Attributes:
        stop: What Lightning raises on SIGTERM, under the callback's namespace.
    """

    stop: ClassVar[type[SystemExit]]

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Save and stop, if the job was told to go."""
        found = _preemption(trainer)
        if found is not None and found.is_due():
            found.save()
            raise self.stop(found.exit_code)


def _preemption(trainer: Any) -> Preemption | None:
    binding = getattr(trainer.strategy, "dist_ckpt_binding", None)
    found: Preemption | None = None if binding is None else binding.preemption
    return found


def begin(trainer: Any, io: DistCkptIO, callback: Any) -> None:
    """Let a Trainer that is about to fit stop when it is told to."""
    binding = trainer.strategy.dist_ckpt_binding
    if binding.preemption is not None:  # an exception has left a fit without its teardown
        binding.preemption.close()
        binding.io = io
    binding.preemption = Preemption(trainer, io, type(callback).stopper())


class Preemption:
    """The guard of one fit, and the save that it leads to.

    Args:
        trainer: The Trainer, with its process group.
        io: The plugin.
        stopper: The callback; it is the Trainer's last until this is closed.
    """

    def __init__(self, trainer: Any, io: DistCkptIO, stopper: Any) -> None:
        """Install nothing yet: Lightning's handlers come after callbacks are set up."""
        self._trainer, self._io, self._stopper = trainer, io, stopper
        self._guard: PreemptionGuard | None = None
        trainer.callbacks = [*trainer.callbacks, stopper]

    def install(self) -> None:
        """Handle SIGTERM in Lightning's place."""
        if self._guard is not None:
            return
        # The handler before Lightning's: where the guard puts it back, Lightning does so, too.
        connector = self._trainer._signal_connector  # noqa: SLF001 - Lightning has no public way
        before = connector._original_handlers.get(signal.SIGTERM)  # noqa: SLF001 - same
        if before is not None:
            signal.signal(signal.SIGTERM, before)
        guard = PreemptionGuard(grace_secs=self._io.config.grace_secs, ends_process=True)
        self._guard = guard.install()
        if connector.received_sigterm:  # since Lightning's handlers are there; it would not save
            connector.received_sigterm = False
            guard.request()

    def close(self) -> None:
        """Put handlers, plugin and callbacks back; again does nothing."""
        self._trainer.strategy.dist_ckpt_binding.io = self._io
        self._trainer.callbacks = [
            one for one in self._trainer.callbacks if one is not self._stopper
        ]
        if self._guard is not None:
            self._guard.close()

    @property
    def exit_code(self) -> int:
        """What this process should end with."""
        environment = self._trainer._accelerator_connector.cluster_environment  # noqa: SLF001 - same
        if type(environment).__name__ == "LightningEnvironment" and self._trainer.local_rank:
            # Rank 0 has started this one, and kills itself and all when one of them fails.
            return 0
        return 143 if self._guard is None else self._guard.exit_code

    def is_due(self) -> bool:
        """Whether to save and stop at this batch; the same on all ranks."""
        return self._guard is not None and self._guard.poll() and not self._waits(self._guard)

    def _waits(self, guard: PreemptionGuard) -> bool:
        """Whether gradients are being accumulated, which are not saved, and there is time for it.

        Collective, as the clocks of ranks differ.
        """
        if not self._trainer.fit_loop.epoch_loop._should_accumulate():  # noqa: SLF001 - Lightning's
            return False
        enough = guard.grace_secs * (1 - _ACCUMULATE_SHARE)
        try:
            comm = all_processes(timeout_secs=guard.bounded().timeout_secs)
            waits = comm.map_reduce("completing a step", lambda: guard.remaining_secs > enough, all)
        except CheckpointingException:
            waits = False
        if not waits:
            logger.warning("stopping in the middle of a step: the gradients so far are lost")
        return waits

    # -- the save

    def save(self) -> None:
        """Save to where ``ckpt_path="last"`` finds it, within the grace. Collective.

        Raises:
            CheckpointingException: It failed; the checkpoints before it are there.
        """
        guard, trainer = self._guard, self._trainer
        assert guard is not None  # noqa: S101 - it is due
        trainer._signal_connector.received_sigterm = True  # noqa: SLF001 - it is read by callbacks
        binding = trainer.strategy.dist_ckpt_binding
        binding.io = _bounded(self._io, guard)
        is_whole = self._drain(binding.saves, binding.io, guard)
        if trainer.fast_dev_run or _saves_on_exception(trainer):
            return
        keeper = _keeper(trainer)
        if keeper is None:
            path = _path_beside(trainer)
            trainer.save_checkpoint(path)
        elif not (is_whole and _is_saved(trainer, keeper)):
            with _as_last(keeper):
                keeper._save_last_checkpoint(trainer, keeper._monitor_candidates(trainer))  # noqa: SLF001 - Lightning's
        if trainer.is_global_zero:
            path = path if keeper is None else Path(keeper.last_model_path)
            how = 'ckpt_path="last"' if _has_callback(trainer) else f'ckpt_path="{path}"'
            logger.warning("preempted after step %d, saved to %s: resume with %s",
                           trainer.global_step, path, how)  # fmt: skip

    def _drain(self, saves: FitSaves | None, io: DistCkptIO, guard: PreemptionGuard) -> bool:
        """Let saves in flight end; return whether they did so well."""
        if saves is None:
            return True
        saves.end_soon(io, guard.remaining_secs * _DRAIN_SHARE)
        try:
            saves.drain()
        except BarrierTimeoutError:
            raise  # what is in flight would replace what is saved now
        except CheckpointingException:
            logger.exception("a save in the background failed; saving once more")
            return False
        return True


def _bounded(io: DistCkptIO, guard: PreemptionGuard) -> DistCkptIO:
    """Return a plugin whose ranks wait for each other no longer than the grace."""
    bounded = copy.copy(io)
    secs = guard.bounded(io.save_options(Path())).timeout_secs
    bounded.config = io.config.model_copy(update={"timeout_secs": secs})
    return bounded


def _has_callback(trainer: Any) -> bool:
    """Whether Lightning can find the last checkpoint by itself."""
    return any(hasattr(one, "_find_last_checkpoints") for one in trainer.checkpoint_callbacks)


def _saves_on_exception(trainer: Any) -> bool:
    """Whether a callback saves when the stop is raised, where ``"last"`` finds it."""
    names = {base.__name__ for one in trainer.checkpoint_callbacks for base in type(one).__mro__}
    return "OnExceptionCheckpoint" in names


def _keeper(trainer: Any) -> Any:
    """Return the ModelCheckpoint that keeps the last checkpoint, or could; None without one."""
    found = [callback for callback in model_checkpoints(trainer) if not callback.save_weights_only]
    return next((one for one in found if one.save_last), found[0] if found else None)


def _path_beside(trainer: Any) -> Path:
    """Return where to save without the help of a callback."""
    known = [getattr(callback, "dirpath", None) for callback in trainer.checkpoint_callbacks]
    folders = [folder for folder in known if folder and isinstance(folder, str | os.PathLike)]
    return Path(folders[0] if folders else Path(trainer.default_root_dir, "checkpoints"), _NAME)


def _is_saved(trainer: Any, keeper: Any) -> bool:
    """Whether the last checkpoint is one of this very step."""
    step = keeper._last_global_step_saved  # noqa: SLF001 - Lightning's
    return bool(keeper.save_last and keeper.last_model_path and step == trainer.global_step)


@contextlib.contextmanager
def _as_last(keeper: Any) -> Iterator[None]:
    """Let a ModelCheckpoint keep a last checkpoint, and not as a link to an older one."""
    save_last, keeper.save_last = keeper.save_last, True
    try:
        yield
    finally:
        keeper.save_last = save_last
