"""A synchronous save: plan, write, commit.

Here: the order of the steps, and the events of such a save. Not here: the steps (``_saving.plan``,
``_saving.execute``), saves in the background (``background``). Collective.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dist_ckpt import events
from dist_ckpt._comm.outcome import Outcome, attempt
from dist_ckpt._saving.execute import commit, write_part
from dist_ckpt._saving.plan import Planner
from dist_ckpt._saving.publish import with_dcp_metadata
from dist_ckpt.events import Committed, Event, Failed, SaveStarted, Staged, emit_to

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from dist_ckpt._formats.base import Written
    from dist_ckpt._saving.memory import SaveMemory
    from dist_ckpt._saving.request import SaveCall
    from dist_ckpt.events import EventSink

__all__ = ["run_save"]


def run_save(
    call: SaveCall, memory: SaveMemory | None = None, sinks: Iterable[EventSink] = ()
) -> None:
    """Save, with the plan of the last save if it still fits. Collective.

    On any failure nothing is committed and every rank raises.

    Args:
        call: What to save, and how.
        memory: Has the plan of the last save; None to plan anew.
        sinks: Receive the same events as those of a background save.
    """
    number = 1 if memory is None else memory.count()
    planner = Planner(remembers=False) if memory is None else memory.planner
    encode = with_dcp_metadata if memory is None else memory.with_dcp_metadata
    progress = _SaveEvents(tuple(sinks), call.target, call.comm.rank, number)
    try:
        planned = planner.plan(call)
        progress.planned()
        written = attempt(write_part, planned)
        progress.wrote(written)
        commit(call.comm, planned, written, encode)
    except BaseException as error:
        progress.end(error)
        raise
    progress.end(None)


class _SaveEvents:
    """Emits the events of a save that blocks.

    How long it has blocked is known only at its end, and that event precedes ``Written``, as in a
    background save: all but the first event are emitted at the end.
    """

    def __init__(self, sinks: tuple[EventSink, ...], target: Path, rank: int, number: int) -> None:
        """Emit ``SaveStarted``."""
        self._sinks = sinks
        self._common: Any = {"path": str(target), "rank": rank, "save": number, "is_async": False}
        self._asked = self._begun = time.monotonic()
        self._phase = "planning"
        self._written: events.Written | None = None
        emit_to(sinks, SaveStarted(**self._common))

    def planned(self) -> None:
        """Note that planning has ended and writing begins."""
        self._begun, self._phase = time.monotonic(), "writing"

    def wrote(self, written: Outcome[Written]) -> None:
        """Note what this rank has written; a failure is reported by the commit."""
        if written.value is not None:
            secs, nbytes = time.monotonic() - self._begun, written.value.nbytes
            self._written = events.Written(**self._common, secs=secs, nbytes=nbytes)

    def end(self, error: BaseException | None) -> None:
        """Emit the remaining events.

        Args:
            error: Why the save failed; None if it is committed.
        """
        secs, emitted = time.monotonic() - self._asked, list[Event]()
        if self._phase != "planning":
            emitted.append(
                Staged(**self._common, stall_secs=secs, wait_secs=0.0, copy_secs=0.0, nbytes=0)
            )
        if self._written is not None:
            emitted.append(replace(self._written, time=time.time()))
        if error is None:
            nbytes = 0 if self._written is None else self._written.nbytes
            emitted.append(Committed(**self._common, secs=secs, nbytes=nbytes))
        else:
            text = str(error) or repr(error)
            emitted.append(Failed(**self._common, secs=secs, phase=self._phase, error=text))
        for event in emitted:
            emit_to(self._sinks, event)
