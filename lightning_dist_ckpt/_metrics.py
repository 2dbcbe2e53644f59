"""What the Trainer's loggers are told about background saves.

Here: a sink that keeps numbers until the thread that trains takes them, as loggers are not made for
other threads. Not here: the events (``dist_ckpt.events``), when loggers are called
(``_fit_saves``). On rank 0.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from dist_ckpt.events import Committed, Failed, SaveStarted, Staged, Written

if TYPE_CHECKING:
    from dist_ckpt.events import Event

__all__ = ["SaveMetrics"]


class SaveMetrics:
    """One row for each committed save; seconds, and GB (10**9 bytes) of this rank by second.

    Attributes:
        step: Optimizer steps at the save that begins next; set by who saves.
    """

    def __init__(self) -> None:
        """Know of no save."""
        self.step = 0
        self._steps: dict[int, int] = {}
        self._values: dict[int, dict[str, float]] = {}
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
        match event:
            case SaveStarted():
                self._steps[event.save], self._values[event.save] = self.step, {}
            case Staged():
                self._note(event.save, stall_secs=event.stall_secs)
            case Written():
                self._note(event.save, write_secs=event.secs)
                if event.secs > 0:
                    self._note(event.save, gb_per_sec=event.nbytes / event.secs / 1e9)
            case Committed() | Failed():
                step, values = self._steps.pop(event.save, 0), self._values.pop(event.save, {})
                if isinstance(event, Committed):
                    self._rows.append((step, values))

    def _note(self, save: int, **values: float) -> None:
        known = self._values.get(save)
        if known is not None:
            known.update({f"checkpoint/{name}": value for name, value in values.items()})
