"""Sharded checkpoints in Lightning: ``Trainer(plugins=[DistCkptIO()])`` and nothing else.

The front door: its names are imported on first use, as Lightning loads this package for every
Trainer where it is installed. Not here: how Lightning is reached (``binding``, ``_bind``), what is
stored (``dist_ckpt``).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_dist_ckpt.export import export_to_file, load_module
    from lightning_dist_ckpt.io import DistCkptIO

__all__ = ["DistCkptIO", "export_to_file", "load_module"]

_HOME = {"DistCkptIO": "io", "export_to_file": "export", "load_module": "export"}


def __getattr__(name: str) -> Any:
    """Import the home of ``name`` and return it."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    """Return the names of the front door."""
    return sorted(__all__)
