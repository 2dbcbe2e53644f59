"""What saves tell about themselves: typed events, and sinks that take them.

Here: one event per doorway a save passes, with seconds and bytes; the ``EventSink`` port; a sink
that logs and one that appends JSON lines. Not here: who emits (``background``; ``_saving.memory``
for saves that block), metrics of a framework's logger (the adapters).

A sink is told on the thread where the thing happens, the training thread among them: it must be
quick. What a sink raises is logged and never reaches a save (``emit_to``).
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time as clock
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Protocol

from dist_ckpt.errors import StorageError
from dist_ckpt.types import PathLike

__all__ = [
    "Committed",
    "Event",
    "EventSink",
    "Failed",
    "JsonLinesSink",
    "LoggingSink",
    "Pruned",
    "SaveStarted",
    "SetAside",
    "Skipped",
    "Staged",
    "Written",
    "emit_pruned",
    "emit_to",
    "json_line",
    "sinks_of",
]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """What all events have.

    Attributes:
        path: The checkpoint, as it was named.
        rank: Who tells.
        save: Number of the save: in its saver, or among those that block with one ``SaveMemory``;
            0 for what was not done by one.
        is_async: Whether it is written in the background.
        time: When it happened, in seconds of the Unix clock; now if not given.
    """

    path: str
    rank: int
    save: int
    is_async: bool
    time: float = field(default_factory=clock.time)


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveStarted(Event):
    """A save was asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged(Event):
    """The caller may change the state again.

    A save that blocks has this event, too: once it has ended, and before it says how.

    Attributes:
        stall_secs: How long the caller was blocked in all: for the whole of a save that blocks.
        wait_secs: Of these, how long for saves before this one.
        copy_secs: How long the copy took; with overlap, more than the caller was blocked for it. 0
            for a save that blocks.
        nbytes: Bytes copied on this rank; 0 for a save that blocks.
    """

    stall_secs: float
    wait_secs: float
    copy_secs: float
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Written(Event):
    """This rank's files are durable; the checkpoint is not visible yet.

    Attributes:
        secs: From the first byte to the last sync.
        nbytes: Bytes of this rank's files; 0 if a strategy does not say which these are.
    """

    secs: float
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed(Event):
    """The checkpoint is visible, with the bytes of all ranks.

    Attributes:
        secs: Since the save was asked for.
        nbytes: Bytes of the files that this rank has written.
    """

    secs: float
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed(Event):
    """The save failed; nothing of it is visible.

    Attributes:
        secs: Since the save was asked for.
        phase: What it was doing.
        error: What went wrong, as text.
    """

    secs: float
    phase: str
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Pruned(Event):
    """A checkpoint was removed.

    Attributes:
        reason: Why.
    """

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped(Event):
    """A checkpoint does not count as the newest one: it is damaged, or was never finished.

    Attributes:
        reason: What is wrong with it.
    """

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SetAside(Event):
    """A damaged checkpoint was renamed, so that nothing takes it for a good one.

    Attributes:
        reason: What is wrong with it.
        to: Where it is now.
    """

    reason: str
    to: str


class EventSink(Protocol):
    """Takes events; any thread may call it, several at a time."""

    def emit(self, event: Event) -> None:
        """Take one event; return soon. Not collective."""
        ...


def emit_to(sinks: Iterable[EventSink], event: Event) -> None:
    """Tell each sink; a sink that fails is logged and does not keep the others from hearing.

    Not collective. Nothing but an interrupt (Ctrl-C, an exit) gets through.
    """
    for sink in sinks:
        try:
            sink.emit(event)
        except Exception:
            logger.warning("%r: lost %s.", sink, type(event).__name__, exc_info=True)


def emit_pruned(sinks: Iterable[EventSink], path: PathLike, reason: str) -> None:
    """Emit ``Pruned`` for a checkpoint that rank 0 has removed, not behind a background save."""
    event = Pruned(path=os.fspath(path), rank=0, save=0, is_async=False, reason=reason)
    emit_to(sinks, event)


def sinks_of(
    events_file: PathLike | None, rank: int, extra: Iterable[EventSink] = ()
) -> tuple[EventSink, ...]:
    """Return the sinks for the events of a job's saves: the log, ``extra``, the file of events.

    Args:
        events_file: None for no file; ranks other than 0 write files of their own beside it.
        rank: Of this process.
        extra: Further sinks.
    """
    sinks: list[EventSink] = [LoggingSink(), *extra]
    if events_file is not None:
        path = Path(events_file)
        name = path if rank == 0 else path.with_name(f"{path.stem}-{rank}{path.suffix}")
        sinks.append(JsonLinesSink(name))
    return tuple(sinks)


def json_line(event: Event) -> bytes:
    """Return an event as one line of ASCII JSON: ``event`` is its class, then all of its fields.

    Raises:
        ValueError: A number is not finite: JSON has no name for it.
    """
    values = {one.name: getattr(event, one.name) for one in fields(event)}
    text = json.dumps({"event": type(event).__name__, **values}, allow_nan=False)
    return text.encode("ascii") + b"\n"


class JsonLinesSink:
    """Appends each event to a file, one JSON object a line.

    A line is one write to a file opened for appending, so that threads and processes may share the
    file on a local file system; on a network file system give each process its own. The file is
    open only while a line is written: nothing to close, and it may be moved away at any time.

    Args:
        path: The file; it is made with its directory when the first event comes.
    """

    def __init__(self, path: PathLike) -> None:
        """Remember the path; nothing is made yet."""
        self._path = Path(path)
        self._lock = threading.Lock()
        self._is_torn = False

    def __repr__(self) -> str:
        """Name the file: it stands in logs."""
        return f"JsonLinesSink({str(self._path)!r})"

    def emit(self, event: Event) -> None:
        """Append one line. Not collective.

        Raises:
            StorageError: Only a part of it could be written; the next event begins a line anew.
            OSError: The file cannot be opened or written.
        """
        line = json_line(event)
        with self._lock:
            descriptor = self._open()
            try:
                self._append(descriptor, line)
            finally:
                os.close(descriptor)

    def _open(self) -> int:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        try:
            return os.open(self._path, flags, 0o644)
        except FileNotFoundError:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            return os.open(self._path, flags, 0o644)

    def _append(self, descriptor: int, line: bytes) -> None:
        start = b"\n" if self._is_torn else b""
        written = os.write(descriptor, start + line)
        expected = len(start) + len(line)
        if written != expected:
            # At least the line break of a torn line before may have got through.
            self._is_torn = written > len(start) or (self._is_torn and not written)
            raise StorageError(
                f"{self._path}: wrote {written} of the {expected} bytes of an event.",
                hint="look for room on its disk; checkpoints do not depend on this file.",
            )
        self._is_torn = False


class LoggingSink:
    """Logs commits (INFO), failures (WARNING) and all else (DEBUG) as ``dist_ckpt.events``.

    What is skipped or set aside is among the rest: whoever decides that warns of it, sink or not.
    """

    _MOST_KEPT = 64
    """Stalls remembered until their save is settled; more only pile up if it never is."""

    def __init__(self) -> None:
        """Know of no save yet."""
        self._lock = threading.Lock()
        self._stalls: dict[tuple[str, int, int, bool], float] = {}

    def emit(self, event: Event) -> None:
        """Log one event. Not collective."""
        level = logging.DEBUG
        if isinstance(event, Committed):
            level = logging.INFO
        elif isinstance(event, Failed):
            level = logging.WARNING
        stall = self._stall(event)
        logger.log(level, "rank %d, %s: %s", event.rank, event.path, _told(event, stall))

    def _stall(self, event: Event) -> float | None:
        """Return for how long the caller was blocked by the save of a commit, if that is known."""
        key = event.path, event.rank, event.save, event.is_async
        with self._lock:
            if isinstance(event, Staged):
                self._stalls[key] = event.stall_secs
                while len(self._stalls) > self._MOST_KEPT:
                    del self._stalls[next(iter(self._stalls))]
                return None
            if isinstance(event, Committed | Failed):
                return self._stalls.pop(key, None)
            return None


def _told(event: Event, stall: float | None) -> str:
    """Return what stands in the log, with units."""
    if isinstance(event, Pruned):
        return f"removed ({event.reason})."
    if isinstance(event, Skipped):
        return f"skipped: {event.reason}"
    if isinstance(event, SetAside):
        return f"set aside as {event.to}: {event.reason}"
    match event:
        case Staged():
            told = (
                f"staged {_size(event.nbytes)} in {event.copy_secs:.3f} s; blocked the caller for "
                f"{event.stall_secs:.3f} s, {event.wait_secs:.3f} s of it for saves before"
            )
        case Written():
            told = f"wrote {_size(event.nbytes)} {_in(event.secs, event.nbytes)}"
        case Committed():
            blocked = "" if stall is None else f"; blocked the caller for {stall:.3f} s"
            told = f"committed {_size(event.nbytes)} {_in(event.secs, event.nbytes)}{blocked}"
        case Failed():
            told = f"failed after {event.secs:.3f} s ({event.phase}): {event.error}"
        case _:
            told = "started" if isinstance(event, SaveStarted) else type(event).__name__
    return f"{'background save' if event.is_async else 'save'} {event.save} {told}"


def _size(nbytes: int) -> str:
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if nbytes >= factor:
            return f"{nbytes / factor:.2f} {unit}"
    return f"{nbytes} B"


def _in(secs: float, nbytes: int) -> str:
    return f"in {secs:.3f} s" + (f" ({nbytes / secs / 1e9:.3f} GB/s)" if secs > 0 else "")
