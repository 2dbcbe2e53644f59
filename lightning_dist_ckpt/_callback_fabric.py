"""The callback of a Fabric.

Here: one class, for either name that Fabric is installed under. Not here: what it refuses
(``_fabric``). On every rank.
"""

from __future__ import annotations

from typing import Any

from lightning_dist_ckpt._fabric import check_fields
from lightning_dist_ckpt.io import DistCkptIO

__all__ = ["DistCkptCallback"]


class DistCkptCallback:
    """Checks the plugin of a Fabric when a module is set up."""

    def on_after_setup(self, fabric: Any, module: Any) -> None:
        """Refuse fields that have no effect in Fabric."""
        del module
        io = vars(fabric.strategy).get("_checkpoint_io")
        if isinstance(io, DistCkptIO):
            check_fields(io)
