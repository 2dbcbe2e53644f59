"""How much of the disk a run needs at most, measured without a clock.

Here: sizes at the moments when they are largest, before a save gets its name and before something
is removed; and removals that are as late as they can be. Not here: runs.
"""

from __future__ import annotations

import stat
import threading
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from dist_ckpt import training_state
from dist_ckpt._worker.queue import SaveQueue
from dist_ckpt.background import BackgroundSaver
from dist_ckpt.storage.commit import Attempt

WAIT_SECS = 60.0


class Peak:
    """Measures a folder while saves are published by this process.

    A removal behind a save waits until the next save waits for it, or has written all of its files:
    if a save does not wait, all that it could need is there at once.

    Attributes:
        nbytes: The largest size that was found.
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.nbytes = 0
        self._folder = folder
        self._changed = threading.Condition()
        self._published, self._is_blocked, self._is_over = 0, False, False
        publish, remove = Attempt.publish, training_state.remove_tree
        has_space, drain = SaveQueue.has_space, BackgroundSaver.drain

        def measured(attempt: Attempt, *, old_files: Collection[str]) -> None:
            self._measure()
            with self._changed:
                self._published += 1
                self._changed.notify_all()
            publish(attempt, old_files=old_files)

        def late(path: Path) -> None:
            if threading.current_thread().name == "dist_ckpt-actions":
                with self._changed:
                    seen = self._published
                    assert self._changed.wait_for(
                        lambda: self._is_blocked or self._is_over or self._published > seen,
                        WAIT_SECS,
                    )
            self._measure()
            remove(path)

        def told(queue: SaveQueue) -> bool:
            found = has_space(queue)
            with self._changed:
                self._is_blocked = not found
                self._changed.notify_all()
            return found

        def over(saver: BackgroundSaver, **kwargs: Any) -> None:
            with self._changed:
                self._is_over = True
                self._changed.notify_all()
            drain(saver, **kwargs)

        monkeypatch.setattr(Attempt, "publish", measured)
        monkeypatch.setattr(training_state, "remove_tree", late)
        monkeypatch.setattr(SaveQueue, "has_space", told)
        monkeypatch.setattr(BackgroundSaver, "drain", over)

    def _measure(self) -> None:
        found = sum(_nbytes(one) for one in self._folder.rglob("*"))
        with self._changed:
            self.nbytes = max(self.nbytes, found)


def _nbytes(path: Path) -> int:
    try:
        found = path.lstat()
    except OSError:  # removed meanwhile
        return 0
    return found.st_size if stat.S_ISREG(found.st_mode) else 0
