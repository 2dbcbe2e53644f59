"""The one door to a checkpoint's files: no other room touches them.

Files below a root: ``Store``, with one implementation (``local``). What stands at a path:
``paths``. Directories: ``trees``. From an attempt to a checkpoint: ``commit``, and ``replace`` for
a single file. Not here: what the bytes mean (``_formats``). Called from transfer threads too, on
every rank. See docs/decisions/0042-storage-door.md.
"""

from __future__ import annotations

from dist_ckpt.storage.base import Extent, FileWriter, Store, held
from dist_ckpt.storage.local import LocalStore
from dist_ckpt.storage.resolve import open_store

__all__ = ["Extent", "FileWriter", "LocalStore", "Store", "held", "open_store"]
