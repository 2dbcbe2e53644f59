"""Checkpoints of dist-ckpt behind Accelerate's ``save_state`` and ``load_state``.

Here: the two public names, and the attaching of ``Accelerator.register_checkpoint_io`` on import.
Not here: saving and loading themselves (``accelerate_dist_ckpt.saving``, ``.loading``).

    >>> from accelerate import Accelerator
    >>> from accelerate_dist_ckpt import DistCkptIO
    >>> handle = Accelerator(cpu=True).register_checkpoint_io(DistCkptIO())
"""

from __future__ import annotations

from accelerate_dist_ckpt.io import DistCkptIO
from accelerate_dist_ckpt.registration import (
    CheckpointIOHandle,
    attach_method,
    register_checkpoint_io,
)

__all__ = ["CheckpointIOHandle", "DistCkptIO", "register_checkpoint_io"]

attach_method()
