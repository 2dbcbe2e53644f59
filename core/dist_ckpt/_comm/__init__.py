"""Exchanges between ranks: a failure on one is raised on all, and missing ranks are named.

Here: communicators and the choice of one. Not here: what is exchanged (``validation``,
``_sharding``, ``storage.commit``). Called on all ranks alike, from the thread that saves or loads.

Submodules are imported on first use: processes that never import torch use ``_comm.failures``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dist_ckpt._comm.single import SingleCommunicator
    from dist_ckpt._comm.torch_dist import default_communicator, group_communicator, group_store

_HOME = {
    "SingleCommunicator": "single",
    "default_communicator": "torch_dist",
    "group_communicator": "torch_dist",
    "group_store": "torch_dist",
}

__all__ = ["SingleCommunicator", "default_communicator", "group_communicator", "group_store"]


def __getattr__(name: str) -> Any:
    """Import the module that has ``name`` and return the name's value."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    """Return the public names."""
    return sorted(__all__)
