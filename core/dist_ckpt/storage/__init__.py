"""The one door to bytes: named files below one root.

Here: the ``Store`` port and its implementations. Not here: what the bytes mean (``_formats``) and
when a checkpoint counts (``storage.commit``). Called from transfer threads, on every rank.
"""

from __future__ import annotations

from dist_ckpt.storage.base import Extent, FileWriter, Store, held
from dist_ckpt.storage.local import LocalStore
from dist_ckpt.storage.resolve import open_store

__all__ = ["Extent", "FileWriter", "LocalStore", "Store", "held", "open_store"]
