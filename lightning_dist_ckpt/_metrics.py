"""Sinks for the events of a Trainer's saves: the log, the file of events, and the loggers.

Here: the sinks, and one that keeps numbers for the loggers until the training thread passes them
on, as loggers are not thread-safe. Not here: the events (``dist_ckpt.events``), when loggers are
called (``_fit_saves``, ``_overrides``).
"""

from __future__ import annotations

import logging
from collections import deque
from typing import TYPE_CHECKING, Any, TypeAlias

from dist_ckpt.events import Committed, Failed, SaveStarted, Staged, Written, sinks_of

if TYPE_CHECKING:
    from dist_ckpt.config import DistCkptConfig
    from dist_ckpt.events import Event

__all__ = ["OTHERS_KEPT", "SaveEvents", "SaveMetrics"]

logger = logging.getLogger(__name__)

OTHERS_KEPT = "others are kept"
"""Why a callback's checkpoint was removed."""

_Save: TypeAlias = "tuple[bool, int]"
"""Whether it is in the background, and its number."""


class SaveEvents:
    """The sinks of a Trainer's saves, on one rank.

    Args:
        trainer: The Trainer.
        config: The plugin's choices.

    Attributes:
        sinks: For all of its saves, in the background or not.
    """

    def __init__(self, trainer: Any, config: DistCkptConfig) -> None:
        """Write nothing yet."""
        self._trainer = trainer
        wants_metrics = config.log_metrics and trainer.is_global_zero and trainer.loggers
        self._metrics = SaveMetrics() if wants_metrics else None
        extra = [] if self._metrics is None else [self._metrics]
        self.sinks = sinks_of(config.events_file, trainer.global_rank, extra)

    def begin(self) -> None:
        """Note the step of the save that begins."""
        if self._metrics is not None:
            self._metrics.step = self._trainer.global_step

    @property
    def has_rows(self) -> bool:
        """Whether there is something for ``log``."""
        return self._metrics is not None and self._metrics.has_rows

    def log(self) -> None:
        """Pass new numbers to the loggers; the failure of a logger is logged, not raised."""
        rows = [] if self._metrics is None else self._metrics.take()
        if not rows:
            return
        for one in self._trainer.loggers:
            try:
                for step, values in rows:
                    one.log_metrics(values, step=step)
                one.save()
            except Exception:
                logger.exception("a logger failed to log the metrics of saves: %s", rows)


class SaveMetrics:
    """One row for each committed save; seconds, and GB (10**9 bytes) of this rank by second.

    Attributes:
        step: Optimizer steps at the save that begins next; set by who saves.
    """

    def __init__(self) -> None:
        """Know of no save."""
        self.step = 0
        self._steps: dict[_Save, int] = {}
        self._values: dict[_Save, dict[str, float]] = {}
        self._rows: deque[tuple[int, dict[str, float]]] = deque()

    @property
    def has_rows(self) -> bool:
        """Whether ``take`` returns any."""
        return bool(self._rows)

    def take(self) -> list[tuple[int, dict[str, float]]]:
        """Return step and values of each save committed since."""
        return [self._rows.popleft() for _ in range(len(self._rows))]

    def emit(self, event: Event) -> None:
        """Note an event; from any thread, those of one save in their order."""
        save = event.is_async, event.save
        match event:
            case SaveStarted():
                self._steps[save], self._values[save] = self.step, {}
            case Staged():
                self._note(save, stall_secs=event.stall_secs)
            case Written():
                self._note(save, write_secs=event.secs)
                if event.secs > 0:
                    self._note(save, gb_per_sec=event.nbytes / event.secs / 1e9)
            case Committed() | Failed():
                step, values = self._steps.pop(save, 0), self._values.pop(save, {})
                if isinstance(event, Committed):
                    self._rows.append((step, values))

    def _note(self, save: _Save, **values: float) -> None:
        known = self._values.get(save)
        if known is not None:
            known.update({f"checkpoint/{name}": value for name, value in values.items()})
