"""What a DistCkptIO cannot do in Fabric: refused, not ignored.

Here: which fields those are, and whether Fabric holds a plugin. Not here: the callback that asks as
early as it can (``_callback_fabric``).

Fabric calls a plugin for each save and load, and has no steps and no end that a plugin could see.
So nobody would raise what fails in the background, wait for it, or save when the job is to go.
"""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

from dist_ckpt.errors import ConfigError

if TYPE_CHECKING:
    from lightning_dist_ckpt.io import DistCkptIO

__all__ = ["check_fields", "check_holder"]

_UNSERVED = ("async_save", "preemption")
_STRATEGY = ("lightning.fabric.strategies.strategy", "lightning_fabric.strategies.strategy")


def check_fields(io: DistCkptIO) -> None:
    """Refuse a plugin of a Fabric that asks for what is not done there.

    Raises:
        ConfigError: It does.
    """
    wrong = [f"{name}=True" for name in _UNSERVED if getattr(io.config, name)]
    if io.config.enabled and wrong:
        raise ConfigError(
            f"DistCkptIO({', '.join(wrong)}) in Fabric, where saves are synchronous and nothing "
            "handles a signal.",
            hint="leave the field out, or use a Trainer.",
        )


def check_holder(io: DistCkptIO) -> None:
    """Do the same for a plugin that is called directly, if it is a Fabric's.

    Raises:
        ConfigError: A strategy of Fabric holds it, and it asks for too much.
    """
    asks_too_much = any(getattr(io.config, name) for name in _UNSERVED)
    if asks_too_much and any(vars(one).get("_checkpoint_io") is io for one in _strategies()):
        check_fields(io)


def _strategies() -> list[object]:
    """Return the strategies of all Fabrics: a plugin is not told who holds it."""
    kinds: dict[type, bool] = {}
    found = []
    for one in gc.get_objects():
        kind = type(one)
        if kind not in kinds:
            kinds[kind] = any(base.__module__ in _STRATEGY for base in kind.__mro__)
        if kinds[kind]:
            found.append(one)
    return found
