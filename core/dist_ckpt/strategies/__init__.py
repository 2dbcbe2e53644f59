"""Strategies: how the common and the sharded part of a checkpoint are saved and loaded.

Here: the classes that Megatron-Core's users know, each an assembly of what the private rooms do.
Not here: bytes, plans, files. A strategy is given to ``save`` and ``load`` as an object, as a
``(backend, version)`` tuple, or not at all.
"""

from __future__ import annotations

__all__: list[str] = []
