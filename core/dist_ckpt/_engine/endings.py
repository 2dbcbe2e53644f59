"""What is still to be done when the program ends, and whether it is ending.

Here: the two points of an end at which something is called. Not here: what is done there
(``background``, ``_process_writing``). Local; light, as worker processes import it.

An interpreter ends in this order: ``threading``'s own callbacks, the wait for threads that are no
daemons, ``atexit``'s callbacks. Forked processes of ``multiprocessing`` come only to the first two.
So what must be done at all is done at the first point, before the pools of ``concurrent.futures``
are shut, and what must wait for the program's own threads is done at ``atexit``. The law: nothing
that runs from the first point on starts a thread, a process or a pool (``is_ending``).
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
    """What one object has to do; in the process that made it."""

    pid: int
    finish: Callable[[], None] | None
    close: Callable[[], None]


class _Endings:
    """Those of this process. Callbacks are registered when the first object asks for them."""

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
        # Private, but the only point at which forked processes of multiprocessing come past, and at
        # which pools still work; without it everything is done at `atexit`.
        register = getattr(threading, "_register_atexit", None)
        if register is not None:
            with contextlib.suppress(RuntimeError):  # the end has begun
                register(self._finish_all)

    def _finish_all(self) -> None:
        self.is_ending = True
        for one in self._of_this_process():
            if one.finish is not None:
                _call(one.finish)

    def _close_all(self) -> None:
        self.is_ending = True
        for one in self._of_this_process():
            _call(one.close)

    def _of_this_process(self) -> list[_Ending]:
        """Return the newest first: it may lean on older ones."""
        return [one for one in reversed(self._open.values()) if one.pid == os.getpid()]


def _call(step: Callable[[], None]) -> None:
    try:
        step()
    except Exception:
        logger.exception("a checkpoint was not finished at the end of the program")


_ENDINGS: Final = _Endings()


def at_exit(
    *, close: Callable[[], None], finish: Callable[[], None] | None = None
) -> Callable[[], None]:
    """Have two functions called when this process ends. What they raise is logged.

    Args:
        close: Gives everything back. Not called in forked processes of ``multiprocessing``.
        finish: Waits for what is under way. Called before the program's own threads are waited for,
            which may still use the object.

    Returns:
        What takes that back. Until then both functions, and what they hold, are kept.
    """
    return _ENDINGS.add(_Ending(os.getpid(), finish, close))


def is_ending() -> bool:
    """Whether the interpreter ends, so that no thread, process or pool may be started any more."""
    return _ENDINGS.is_ending or not threading.main_thread().is_alive()
