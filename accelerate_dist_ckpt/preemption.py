"""What a script under Accelerate does when its job is told to go: one more save, then the end.

Here: ``Preemption``, one for each registration: after which step the job stops, where it saves,
what it raises. Not here: the signal, and how ranks agree (``dist_ckpt.preemption``), who calls
(``lifetime``). On every rank alike, in the main thread.

The calls that count are backward passes, which all ranks make equally often. The state is whole
when the next batch is asked for: optimizers and schedulers have made their step then, and the
script has counted it. So it is saved there, and the loop ended by ``Preempted``.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, cast

from accelerate.accelerator import Accelerator

from accelerate_dist_ckpt import naming
from dist_ckpt.errors import BarrierTimeoutError, CheckpointingException
from dist_ckpt.preemption import Preempted, PreemptionGuard
from dist_ckpt.serialization import all_processes

if TYPE_CHECKING:
    from accelerate_dist_ckpt.io import DistCkptIO

__all__ = ["Preemption"]

logger = logging.getLogger(__name__)

_NAME = "preempted"

_DRAIN_SHARE = 0.8
"""The part of what is left of the grace in which saves in flight may end."""

_ACCUMULATE_SHARE = 0.5
"""The part of the grace in which the batches of a step may be completed."""


class Preemption:
    """The guard of one registration, and the save that it leads to.

    Args:
        grace_secs: How long the process may go on after the signal.
    """

    def __init__(self, grace_secs: float) -> None:
        """Handle the signal from now on. Main thread."""
        self._guard = PreemptionGuard(grace_secs=grace_secs, ends_process=True).install()
        self._is_due = False
        self._is_saved = False
        self._place: Path | None = None
        self._stops_itself = False

    def close(self) -> None:
        """Put the earlier handlers back; again does nothing."""
        self._guard.close()

    def before_backward(self, accelerator: Accelerator) -> None:
        """Find out whether the step of this backward pass is the last."""
        if self._guard.poll() and not self._is_due:
            self._is_due = accelerator.sync_gradients or not self._waits()

    def should_stop(self) -> bool:
        """Whether a script that ends itself is to save and stop; True ever after."""
        self._stops_itself = True
        self._is_due = self._is_due or self._guard.poll()
        return self._is_due

    def was_at(self, path: Path, *, saved: bool) -> None:
        """Take note of a checkpoint that the script has saved or loaded."""
        self._place = path.parent
        self._is_saved = self._is_saved or (saved and self._is_due)

    def bounded(self, io: DistCkptIO) -> DistCkptIO:
        """Return choices for what is saved once it is due: no longer than the grace."""
        if not self._is_due:
            return io
        secs = self._guard.bounded(io.save_options(staging_dir=Path(), include_dir=None))
        bounded = copy.copy(io)
        bounded.config = io.config.model_copy(
            update={"timeout_secs": secs.timeout_secs, "async_save": False}
        )
        bounded.lone_rank_timeout_secs = min(io.lone_rank_timeout_secs, secs.timeout_secs / 2)
        return bounded

    def is_time(self) -> bool:
        """Whether to save and stop where the next batch is asked for."""
        return self._is_due and not self._stops_itself

    def stop(self, accelerator: Accelerator, drain: Callable[[float], None]) -> None:
        """Save, unless the script has done so since the last step, and end the loop. Collective.

        Args:
            accelerator: With the registration.
            drain: Waits so many seconds for what is in flight, and ends the worker.

        Raises:
            Preempted: Always, if the state is saved.
            CheckpointingException: It is not; the checkpoints before it are there.
        """
        self._stops_itself = True  # once
        is_saved = self._is_saved and self._drained(drain)
        if not self._is_saved:
            self._drained(drain)
        comm = all_processes(timeout_secs=self._guard.bounded().timeout_secs)
        is_saved, place = comm.map_reduce(
            "stopping",
            lambda: (
                is_saved,
                None if naming.is_automatic(accelerator) else self._target(accelerator),
            ),
            lambda ranks: (all(saved for saved, _ in ranks), ranks[0][1]),
        )
        if not is_saved:
            accelerator.save_state(None if place is None else str(place))
            if accelerator.is_main_process:
                logger.warning("preempted, saved to %s", place or "the next numbered checkpoint")
        raise Preempted(self._guard.exit_code)

    def _drained(self, drain: Callable[[float], None]) -> bool:
        try:
            drain(self._guard.remaining_secs * _DRAIN_SHARE)
        except BarrierTimeoutError:
            raise  # what is in flight would replace what is saved now
        except CheckpointingException:
            logger.exception("a save in the background failed; saving once more")
            return False
        return True

    def _target(self, accelerator: Accelerator) -> Path:
        """Return where to save if Accelerate names no checkpoints."""
        project_dir = cast("str | None", accelerator.project_dir)
        folder = self._place or Path() if project_dir is None else Path(project_dir)
        return folder.absolute() / _NAME

    def _waits(self) -> bool:
        """Whether there is time to complete the step whose gradients are being accumulated.

        Collective, as the clocks of ranks differ: made in the same backward pass.
        """
        guard = self._guard
        enough = guard.grace_secs * (1 - _ACCUMULATE_SHARE)
        try:
            comm = all_processes(timeout_secs=guard.bounded().timeout_secs)
            return comm.map_reduce("completing a step", lambda: guard.remaining_secs > enough, all)
        except CheckpointingException:
            return False
