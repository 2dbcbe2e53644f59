"""What saves cost, told to the trackers of an Accelerator.

Here: ``TrackerSink``: numbers wait for the thread that trains, which logs them. Not here: the
events (``dist_ckpt.events``), when they are logged (``lifetime``). On rank 0, as trackers are.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import Final

from accelerate.accelerator import Accelerator

from dist_ckpt.events import Event, Staged, Written

__all__ = ["TrackerSink"]

logger = logging.getLogger(__name__)

_MOST_KEPT: Final = 1024


class TrackerSink:
    """Takes events from any thread; trackers are called by the training thread only."""

    def __init__(self) -> None:
        """Nothing is known yet."""
        self._waiting: deque[dict[str, float]] = deque(maxlen=_MOST_KEPT)

    def emit(self, event: Event) -> None:
        """Keep the numbers of an event."""
        if isinstance(event, Staged):
            self._waiting.append({"checkpoint/stall_secs": event.stall_secs})
        elif isinstance(event, Written):
            values = {"checkpoint/write_secs": event.secs}
            if event.secs > 0:
                values["checkpoint/gb_per_sec"] = event.nbytes / event.secs / 1e9
            self._waiting.append(values)

    def flush(self, accelerator: Accelerator, step: int | None) -> None:
        """Log what waits; a tracker that fails is not the training's trouble.

        Args:
            accelerator: Without trackers, the numbers are dropped.
            step: To log at.
        """
        while self._waiting:
            values = self._waiting.popleft()
            if not accelerator.trackers:
                continue
            try:
                accelerator.log(values, step=step)
            except Exception:
                logger.exception("a tracker did not take %s", values)
