"""Communicators for the ranks of torch.distributed, over the store of their process group.

Here: the store of a group, and the choice of a communicator. Not here: the exchange itself
(``_comm.store``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist

from dist_ckpt._comm.single import SingleCommunicator
from dist_ckpt._comm.store import StoreCommunicator
from dist_ckpt.errors import CoordinationError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store
    from torch.distributed import ProcessGroup

    from dist_ckpt.types import Communicator

__all__ = ["DEFAULT_TIMEOUT_SECS", "default_communicator", "group_communicator", "group_store"]

DEFAULT_TIMEOUT_SECS = 1800.0


def default_communicator(*, timeout_secs: float = DEFAULT_TIMEOUT_SECS) -> Communicator:
    """Return the communicator of all ranks of the job, or of this process alone.

    Not collective: nothing is exchanged yet. Each group has a store of its own, so a new group
    after ``destroy_process_group`` starts a new sequence.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return SingleCommunicator()
    world = dist.group.WORLD
    assert world is not None  # noqa: S101 - is_initialized() says so
    return StoreCommunicator(
        group_store(world),
        rank=dist.get_rank(),
        size=dist.get_world_size(),
        timeout_secs=timeout_secs,
    )


def group_store(group: ProcessGroup) -> Store:
    """Return the key-value store of a process group. Not collective."""
    if hasattr(group, "get_group_store"):
        return group.get_group_store()
    # torch 2.8 has no such method: it keeps the store beside the group, in a private table.
    from torch.distributed.distributed_c10d import (  # noqa: PLC0415 - newer ones may drop it
        _get_process_group_store,
    )

    return _get_process_group_store(group)


def group_communicator(
    group: ProcessGroup | None, *, timeout_secs: float = DEFAULT_TIMEOUT_SECS
) -> Communicator:
    """Return the communicator of a group's ranks; None stands for all ranks of the job.

    Not collective. Ranks, in errors too, are ranks of the group. Each group has a store of its own.

    Raises:
        CoordinationError: This process is not in the group.
    """
    if group is None:
        return default_communicator(timeout_secs=timeout_secs)
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if rank < 0:
        raise CoordinationError(
            f"rank {dist.get_rank()} is not in the process group.",
            hint="only ranks of a group take part in what it does.",
        )
    if size == 1:
        return SingleCommunicator()
    return StoreCommunicator(group_store(group), rank=rank, size=size, timeout_secs=timeout_secs)
