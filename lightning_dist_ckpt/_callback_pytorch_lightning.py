"""The callbacks of a Trainer of ``pytorch_lightning``.

Here: two classes. Not here: what they do (``_hooks``, ``_preempt``). A module of its own for each
of the two names that Lightning is installed under, so that only the one in use is imported, and so
that callbacks can be pickled.
"""

from __future__ import annotations

from pytorch_lightning import Callback
from pytorch_lightning.trainer.connectors.checkpoint_connector import _CheckpointConnector
from pytorch_lightning.utilities.exceptions import SIGTERMException

from lightning_dist_ckpt._hooks import Hooks
from lightning_dist_ckpt._preempt import StopHooks

__all__ = ["DistCkptCallback", "StopCallback"]


class StopCallback(StopHooks, Callback):
    """Save and stop when the job is told to go; the last of all callbacks."""

    stop = SIGTERMException


class DistCkptCallback(Hooks, Callback):
    """Bind the Trainer before it saves or loads anything, and look after its background saves."""

    connector = _CheckpointConnector
    stopper = StopCallback
