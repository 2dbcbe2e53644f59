"""The paths that background saves of this process have not committed yet.

Here: the list of background writers, and the check of a path. Not here: the saves
(``_worker.queue``). Local, any thread. References are weak: a writer that was collected has nothing
in flight.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Final, Protocol

from dist_ckpt.errors import ConfigError
from dist_ckpt.storage.paths import real_path

__all__ = ["Writer", "add_writer", "check_not_in_flight"]


class Writer(Protocol):
    """An object that writes checkpoints in the background."""

    @property
    def in_flight(self) -> Iterable[Path]:
        """The targets of the saves that have not ended."""

    def is_own_thread(self) -> bool:
        """Whether the calling thread is the writer's own, which runs actions between its saves."""


_LOCK: Final = threading.Lock()
_WRITERS: Final[weakref.WeakSet[Writer]] = weakref.WeakSet()


def add_writer(writer: Writer) -> None:
    """Include a writer in all checks for as long as it lives."""
    with _LOCK:
        _WRITERS.add(writer)


def check_not_in_flight(path: Path, what: str, *, but_for: Writer | None = None) -> None:
    """Raise if a path is being written in the background, also through links.

    Args:
        path: Any path.
        what: The operation that is refused, for the message: "saved" or "removed".
        but_for: A writer to ignore: the caller's operation is ordered after its saves.

    Raises:
        ConfigError: It is in flight: the save that ends last, maybe the older, would replace the
            other.
    """
    with _LOCK:
        writers = [writer for writer in _WRITERS if writer is not but_for]
    wanted = None
    for writer in writers:
        in_flight = tuple(writer.in_flight)
        if not in_flight or writer.is_own_thread():
            continue
        wanted = wanted or real_path(path)
        if any(real_path(target) == wanted for target in in_flight):
            raise ConfigError(
                f"{path} cannot be {what}: a BackgroundSaver of this process is still writing it.",
                hint="call wait(path) of that saver first, on every rank; or use that saver.",
            )
