"""The one door to other ranks: exception-robust exchanges that name who failed or is missing.

Here: communicators and the choice of one. Not here: what is exchanged (``validation``,
``_sharding``, ``storage.commit``). Called on all ranks alike, from the thread that saves or loads.

Imported on first use: ``_comm.failures`` serves processes that never import torch, too.
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
    """Import the home of ``name`` and return it."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    """Return the names of this door."""
    return sorted(__all__)
