"""The hook that waits for overlapped copies before an optimizer's step.

Here: the hook, which has a weak reference to the saver's machinery. Not here: the machinery
(``background``). Local.
"""

from __future__ import annotations

import weakref
from typing import Any, Protocol

from torch.optim.optimizer import register_optimizer_step_pre_hook

__all__ = ["step_guard"]


class _Saver(Protocol):
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
