"""Python's garbage collector, out of the way of short bursts of new objects.

Here: ``collector_paused``. A plan is many small objects at once. Every few hundred of them the
collector would look whether they are garbage, and now and then go through all that the program has,
which takes longer than the plan. No torch: everything may use it.
"""

from __future__ import annotations

import gc
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["collector_paused"]


@contextmanager
def collector_paused() -> Iterator[None]:
    """Let the collector wait; not for what takes long, as other threads make garbage too.

    Who has switched it off finds it off. Where two threads pause it, the first to end switches it
    on again: that costs time, nothing else.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
