"""The callback that binds a Trainer of ``pytorch_lightning``.

Here: one class. Not here: what it does (``_hooks``). A module of its own for each of the two names
that Lightning is installed under, so that only the one in use is imported, and so that the callback
can be pickled.
"""

from __future__ import annotations

from pytorch_lightning import Callback

from lightning_dist_ckpt._hooks import Hooks

__all__ = ["DistCkptCallback"]


class DistCkptCallback(Hooks, Callback):
    """Bind the Trainer before it saves or loads anything, and look after its background saves."""
