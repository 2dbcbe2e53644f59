"""The entry points by which Lightning gets our callback into every Trainer that may need it.

Here: one factory for each name that Lightning is installed under. Not here: what the callback does
(``_bind``). Called by ``Trainer.__init__``, on every rank, also in programs that have nothing to do
with us: until a DistCkptIO exists, this module is all they import.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

__all__ = ["lightning_callbacks", "pytorch_lightning_callbacks"]


def lightning_callbacks() -> list[Any]:
    """Return our callback for Trainers of ``lightning``; none if no DistCkptIO exists."""
    return _callbacks("lightning")


def pytorch_lightning_callbacks() -> list[Any]:
    """Return our callback for Trainers of ``pytorch_lightning``; none if no DistCkptIO exists."""
    return _callbacks("pytorch_lightning")


def _callbacks(namespace: str) -> list[Any]:
    io = sys.modules.get("lightning_dist_ckpt.io")  # not imported: then nobody has made one
    if io is None or not io.any_enabled():
        return []
    module = importlib.import_module(f"lightning_dist_ckpt._callback_{namespace}")
    return [module.DistCkptCallback()]
