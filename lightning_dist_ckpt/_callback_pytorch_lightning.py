"""The callback that binds a Trainer of ``pytorch_lightning``.

Here: one class. Not here: what it does (``_bind``). A module of its own for each of the two names
that Lightning is installed under, so that only the one in use is imported, and so that the callback
can be pickled.
"""

from __future__ import annotations

from typing import Any

from pytorch_lightning import Callback

from lightning_dist_ckpt._bind import bind

__all__ = ["DistCkptCallback"]


class DistCkptCallback(Callback):
    """Bind the Trainer before it saves or loads anything. Without state."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Bind; on every rank."""
        del pl_module, stage
        bind(trainer)
