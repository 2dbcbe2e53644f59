"""Ranks of torch.distributed: picks the store and the ranks of the default process group.

Here: the choice of a communicator. Not here: the exchange itself (``_comm.store``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist

from dist_ckpt._comm.single import SingleCommunicator
from dist_ckpt._comm.store import StoreCommunicator

if TYPE_CHECKING:
    from dist_ckpt.types import Communicator

__all__ = ["DEFAULT_TIMEOUT_SECS", "default_communicator"]

DEFAULT_TIMEOUT_SECS = 1800.0


def default_communicator(*, timeout_secs: float = DEFAULT_TIMEOUT_SECS) -> Communicator:
    """Return the communicator of all ranks of the job, or of this process alone.

    Not collective: nothing is exchanged yet. The default group's store is asked for through
    ``ProcessGroup.get_group_store``; each group has a store of its own, so a new group after
    ``destroy_process_group`` starts a new sequence.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return SingleCommunicator()
    world = dist.group.WORLD
    assert world is not None  # noqa: S101 - is_initialized() says so
    return StoreCommunicator(
        world.get_group_store(),
        rank=dist.get_rank(),
        size=dist.get_world_size(),
        timeout_secs=timeout_secs,
    )
