"""The one door to bytes: named files below one root.

Here: the ``Store`` port and its implementations. Not here: what the bytes mean (``_formats``) and
when a checkpoint counts (``_engine.commit``). Called from transfer threads, on every rank.
"""

from __future__ import annotations

from dist_ckpt.storage.base import Extent, Store
from dist_ckpt.storage.local import LocalStore

__all__ = ["Extent", "LocalStore", "Store"]
