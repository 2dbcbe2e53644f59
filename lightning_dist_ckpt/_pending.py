"""File operations that wait behind saves in flight, and the names that they will make or remove.

Here: in which order names appear and vanish, and what a program that does not wait would see of
that. Not here: saving, and the thread that the operations run on (``dist_ckpt.background``). Used
on rank 0, by the thread that trains and by the saver's.
"""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from dist_ckpt.errors import BarrierTimeoutError
from dist_ckpt.training_state import remove_checkpoint

if TYPE_CHECKING:
    from dist_ckpt.types import PathLike

__all__ = ["Pending", "flip_link"]


class _AfterCommit(Protocol):
    """``BackgroundSaver.after_commit``."""

    def __call__(self, action: Callable[[], None], *, what: str, frees_space: bool = False) -> None:
        """Run ``action`` behind the newest save, or now if there is none."""


@dataclass(eq=False, slots=True)
class _Operation:
    """What will happen to a name.

    Attributes:
        save: Number of the save that it waits for, or that it is.
        path: Absolute.
        kind: What it does.
        run: Does it; None for a save.
        is_running: Whether it is being done.
    """

    save: int
    path: str
    kind: Literal["save", "link", "remove"]
    run: Callable[[], None] | None = None
    is_running: bool = False


class Pending:
    """Operations in the order in which they were asked for.

    What waits for a save that fails is not done.

    Args:
        after_commit: Of the saver.
    """

    def __init__(self, after_commit: _AfterCommit) -> None:
        """Know of none."""
        self._after_commit = after_commit
        self._changed = threading.Condition()
        self._operations: list[_Operation] = []
        self._number = 0
        self._failed: set[int] = set()

    def begin(self, path: PathLike) -> tuple[int, bool]:
        """Note a save to ``path``; what was queued for that name is overtaken by it.

        Returns:
            Its number, and whether a link was to be made there.
        """
        name = _name(path)
        with self._changed:
            self._number += 1
            same = [one for one in self._operations if one.path == name and one.kind != "save"]
            for one in same:
                if not one.is_running:
                    self._operations.remove(one)
            self._operations.append(_Operation(self._number, name, "save"))
            return self._number, any(one.kind == "link" for one in same)

    def wait_for(self, path: PathLike, timeout_secs: float) -> None:
        """Wait until nothing is being done to ``path``.

        Raises:
            BarrierTimeoutError: It takes longer.
        """
        name = _name(path)
        with self._changed:
            if not self._changed.wait_for(lambda: not self._is_busy(name), timeout_secs):
                raise BarrierTimeoutError(
                    f"{path}: what an earlier save leaves to do there takes more than "
                    f"{timeout_secs:g} s."
                )

    def _is_busy(self, name: str) -> bool:
        return any(one.path == name and one.is_running for one in self._operations)

    def end(self, number: int, failure: BaseException | None) -> None:
        """Note that a save has ended; before what waits for it may run. Again does nothing."""
        with self._changed:
            if failure is not None:
                self._failed.add(number)
            self._operations = [
                one
                for one in self._operations
                if one.save != number or (one.kind != "save" and failure is None)
            ]
            self._changed.notify_all()

    def exists(self, path: PathLike) -> bool | None:
        """Whether ``path`` will be there when all is done; None if nothing happens to it."""
        name = _name(path)
        with self._changed:
            found = [one for one in self._operations if one.path == name]
            return found[-1].kind != "remove" if found else None

    def remove(self, path: PathLike, run: Callable[[], None]) -> None:
        """Let ``run`` remove ``path``, behind the newest save."""
        self._queue("remove", path, run, f"removing {path}")

    def link(self, target: PathLike, link: PathLike) -> None:
        """Let ``link`` lead to ``target``, behind the newest save."""
        self._queue("link", link, lambda: flip_link(target, link), f"linking {link} to {target}")

    def _queue(
        self, kind: Literal["link", "remove"], path: PathLike, run: Callable[[], None], what: str
    ) -> None:
        operation = _Operation(self._number, _name(path), kind, run)
        with self._changed:
            if operation.save in self._failed:
                return
            self._operations.append(operation)
        is_removal = kind == "remove"
        self._after_commit(lambda: self._perform(operation), what=what, frees_space=is_removal)

    def _perform(self, operation: _Operation) -> None:
        if not self._claim(operation):
            return
        try:
            if operation.kind == "remove":
                # No link may lead to nothing, not for a moment: Lightning would start afresh.
                for link in self._links(operation.save):
                    self._perform(link)
            if operation.run is not None:
                operation.run()
        finally:
            with self._changed:
                self._operations = [one for one in self._operations if one is not operation]
                self._changed.notify_all()

    def _claim(self, operation: _Operation) -> bool:
        with self._changed:
            if operation not in self._operations or operation.is_running:
                return False
            if operation.save in self._failed:
                self._operations.remove(operation)
                return False
            operation.is_running = True
            return True

    def _links(self, save: int) -> list[_Operation]:
        with self._changed:
            return [one for one in self._operations if one.kind == "link" and one.save == save]


def _name(path: PathLike) -> str:
    return os.path.abspath(path)  # noqa: PTH100 - a link is a name of its own


def flip_link(target: PathLike, link: PathLike) -> None:
    """Let ``link`` lead to ``target``, in one step if no directory is in the way."""
    new = Path(link)
    found = os.path.relpath(target, new.parent)
    if new.is_dir() and not new.is_symlink():
        remove_checkpoint(new)
    aside = new.with_name(f".{new.name}.{uuid.uuid4().hex[:12]}.link")
    try:
        aside.symlink_to(found)
        aside.replace(new)
    finally:
        aside.unlink(missing_ok=True)
