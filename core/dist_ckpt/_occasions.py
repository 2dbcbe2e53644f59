"""When a saver is called by nobody: before an optimizer's step, and at the end of the program.

Here: both hooks, which hold the saver weakly. Not here: the saver (``background``). Local.
"""

from __future__ import annotations

import atexit
import logging
import os
import weakref
from collections.abc import Callable
from typing import Any, Protocol

from torch.optim.optimizer import register_optimizer_step_pre_hook

__all__ = ["close_at_exit", "step_guard"]

logger = logging.getLogger(__name__)


class _Closable(Protocol):
    def close(self) -> None: ...


class _Saver(_Closable, Protocol):
    def finish_staging(self) -> None: ...


def step_guard(saver: _Saver) -> Any:
    """Let every optimizer's step wait for copies of this saver; return the hook's handle.

    Optimizers of torch call the closure that a step is given before they change anything: then
    the wait comes behind it, as forward and backward are in there.
    """
    reference = weakref.ref(saver)

    def before_step(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        found = reference()
        if found is None:
            return None
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None or not f"{type(optimizer).__module__}.".startswith("torch.optim."):
            found.finish_staging()
            return None

        def and_wait() -> Any:
            result = closure()
            found.finish_staging()
            return result

        if len(args) > 1:
            return (args[0], and_wait, *args[2:]), kwargs
        return args, {**kwargs, "closure": and_wait}

    return register_optimizer_step_pre_hook(before_step)


def close_at_exit(saver: _Closable) -> Callable[[], None]:
    """Close a saver, or what else must not outlive the program, at its end.

    Returns:
        What takes that back.
    """
    reference, pid = weakref.ref(saver), os.getpid()

    def close() -> None:
        found = reference()
        if found is not None and os.getpid() == pid:
            try:
                found.close()
            except Exception:
                logger.exception("a checkpoint was not finished at the end of the program")

    atexit.register(close)
    return lambda: atexit.unregister(close)
