"""Refusal of the fields of a DistCkptIO that have no effect in Fabric.

Here: these fields, and whether a Fabric holds a plugin. Not here: the callback that checks as early
as possible (``_callback_fabric``).

Fabric calls a plugin for each save and load; a plugin sees neither steps nor the end of the
program. So there is no place to raise failures of background saves, to wait for them, or to save
before a preemption.
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
    """Refuse a plugin of a Fabric with fields that have no effect there.

    Raises:
        ConfigError: Such fields are set; all are named.
    """
    wrong = [f"{name}=True" for name in _UNSERVED if getattr(io.config, name)]
    if io.config.enabled and wrong:
        raise ConfigError(
            f"DistCkptIO({', '.join(wrong)}) in Fabric, where saves are synchronous and nothing "
            "handles a signal.",
            hint="leave the field out, or use a Trainer.",
        )


def check_holder(io: DistCkptIO) -> None:
    """Check the fields of a plugin that is called directly, if a Fabric holds it.

    Raises:
        ConfigError: A strategy of Fabric holds it, and fields are set that have no effect there.
    """
    is_affected = any(getattr(io.config, name) for name in _UNSERVED)
    if is_affected and any(
        vars(strategy).get("_checkpoint_io") is io for strategy in _strategies()
    ):
        check_fields(io)


def _strategies() -> list[object]:
    """Return the strategies of all Fabrics; a plugin has no reference to its strategy."""
    is_strategy: dict[type, bool] = {}
    strategies = []
    for candidate in gc.get_objects():
        cls = type(candidate)
        if cls not in is_strategy:
            is_strategy[cls] = any(base.__module__ in _STRATEGY for base in cls.__mro__)
        if is_strategy[cls]:
            strategies.append(candidate)
    return strategies
