"""Callbacks for the end of the program, and whether it is ending.

Here: the two points of the interpreter's shutdown at which callbacks run. Not here: the callbacks
(``background``, ``_worker.async_request``). Local; light, as worker processes import it.

An interpreter shuts down in this order: ``threading``'s own callbacks, the wait for non-daemon
threads, ``atexit``'s callbacks. Forked processes of ``multiprocessing`` run only the first two. So
work that must be done in every case runs at the first point, before the pools of
``concurrent.futures`` are shut down, and work that must wait for the program's own threads runs at
``atexit``. The law: nothing that runs from the first point on starts a thread, a process or a pool
(``is_ending``).
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

__all__ = ["at_exit", "is_ending"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Ending:
    """The callbacks of one object, for the process that made it."""

    pid: int
    finish: Callable[[], None] | None
    close: Callable[[], None]


class _Endings:
    """All callbacks of this process; hooked into the interpreter when the first one is added."""

    def __init__(self) -> None:
        self._open: dict[int, _Ending] = {}
        self._numbers = itertools.count()
        self._is_registered = False
        self.is_ending = False

    def add(self, ending: _Ending) -> Callable[[], None]:
        self._register()
        number = next(self._numbers)
        self._open[number] = ending
        return lambda: self._forget(number)

    def _forget(self, number: int) -> None:
        self._open.pop(number, None)

    def _register(self) -> None:
        if self._is_registered:
            return
        self._is_registered = True
        import concurrent.futures.thread  # noqa: F401, PLC0415 - it registers first, so it runs last

        atexit.register(self._close_all)
        # Private, but the only point that forked processes of multiprocessing reach and at which
        # pools still work; without it all callbacks run at `atexit`.
        register = getattr(threading, "_register_atexit", None)
        if register is not None:
            with contextlib.suppress(RuntimeError):  # the shutdown has begun
                register(self._finish_all)

    def _finish_all(self) -> None:
        self.is_ending = True
        for ending in self._of_this_process():
            if ending.finish is not None:
                _call(ending.finish)

    def _close_all(self) -> None:
        self.is_ending = True
        for ending in self._of_this_process():
            _call(ending.close)

    def _of_this_process(self) -> list[_Ending]:
        """Return the newest first: it may depend on older ones."""
        return [ending for ending in reversed(self._open.values()) if ending.pid == os.getpid()]


def _call(step: Callable[[], None]) -> None:
    try:
        step()
    except Exception:
        logger.exception("a checkpoint was not finished at the end of the program")


_ENDINGS: Final = _Endings()


def at_exit(
    *, close: Callable[[], None], finish: Callable[[], None] | None = None
) -> Callable[[], None]:
    """Register two functions to be called when this process ends. Their exceptions are logged.

    Args:
        close: Releases all resources. Not called in forked processes of ``multiprocessing``.
        finish: Waits for work in flight. Called before the interpreter waits for the program's own
            threads, which may still use the object.

    Returns:
        A function that removes both. Until then both functions are referenced.
    """
    return _ENDINGS.add(_Ending(os.getpid(), finish, close))


def is_ending() -> bool:
    """Whether the interpreter is shutting down: no thread, process or pool may be started."""
    return _ENDINGS.is_ending or not threading.main_thread().is_alive()
