"""Configuration: one frozen model, and the one way to load it.

Here: the model (``models``), where its values come from (``load``), and its fields as arguments of
others (``arguments``, ``fields``). Not here: what the values do; objects are given a config and
never read one. Called by the adapters, on every rank alike.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from dist_ckpt.config.load import load_config
from dist_ckpt.config.models import DistCkptConfig

if TYPE_CHECKING:
    from dist_ckpt.builder import CheckpointerConfig

__all__ = ["CheckpointerConfig", "DistCkptConfig", "load_config"]


def __getattr__(name: str) -> Any:
    """Return ``CheckpointerConfig``, which torch's ``_experimental`` has in this module."""
    if name != "CheckpointerConfig":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module("dist_ckpt.builder").CheckpointerConfig
