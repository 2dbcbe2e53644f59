"""The entry points by which Lightning gets our callback into every Trainer that may need it.

Here: one factory for each name that Lightning is installed under, and one for Fabric. Not here:
what the callbacks do (``_bind``, ``_fabric``). Called by the makers of Trainers and Fabrics, on
every rank, also in programs that have nothing to do with us: until a DistCkptIO exists, this module
is all they import.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

__all__ = ["fabric_callbacks", "lightning_callbacks", "pytorch_lightning_callbacks"]


def fabric_callbacks() -> list[Any]:
    """Return our callback for Fabrics; none if no DistCkptIO exists."""
    return _callbacks("fabric")


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
