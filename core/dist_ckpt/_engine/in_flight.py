"""Which paths the background saves of this process are still going to write.

Here: the list of those who write in the background, and the check. Not here: the saves
(``_settling``). Local, any thread. Weak: whoever is collected has nothing in flight.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Final, Protocol

from dist_ckpt.errors import ConfigError

__all__ = ["Writer", "add_writer", "check_not_in_flight"]


class Writer(Protocol):
    """Somebody who writes checkpoints in the background."""

    @property
    def in_flight(self) -> Iterable[Path]:
        """Where the saves go that have not ended."""

    def is_own_thread(self) -> bool:
        """Whether the calling thread runs what is queued behind these saves, in their order."""


_LOCK: Final = threading.Lock()
_WRITERS: Final[weakref.WeakSet[Writer]] = weakref.WeakSet()


def add_writer(writer: Writer) -> None:
    """Have a writer asked for as long as it lives."""
    with _LOCK:
        _WRITERS.add(writer)


def check_not_in_flight(path: Path, what: str, *, but_for: Writer | None = None) -> None:
    """Raise if a path is being written in the background, also through links.

    Args:
        path: Any path.
        what: What is refused, for the message: "saved" or "removed".
        but_for: A writer whose saves are in order with what the caller does.

    Raises:
        ConfigError: It is in flight: whichever ended last would stand there, the older state too.
    """
    with _LOCK:
        writers = [one for one in _WRITERS if one is not but_for]
    wanted = None
    for writer in writers:
        found = tuple(writer.in_flight)
        if not found or writer.is_own_thread():
            continue
        wanted = wanted or os.path.realpath(path)
        if any(os.path.realpath(one) == wanted for one in found):
            raise ConfigError(
                f"{path} cannot be {what}: a BackgroundSaver of this process is still writing it.",
                hint="call wait(path) of that saver before, on every rank; or use that saver.",
            )
