"""Ranks of a process group that plan and finish a save through torch.distributed.checkpoint (DCP).

Here: ``PlanningRanks``, which is DCP's distributed wrapper, with exchanges that name who failed or
is missing. Not here: the exchange itself (``_comm``), plans (``planners``,
``strategies.state_dict_saver``). Called on every rank of the group, from the thread that saves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.distributed.checkpoint.utils import _DistWrapper

from dist_ckpt._comm import group_communicator
from dist_ckpt.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.distributed import ProcessGroup
    from torch.distributed.checkpoint.metadata import Metadata

    from dist_ckpt.types import R, T

__all__ = ["PlanningRanks"]


class PlanningRanks(_DistWrapper):
    """The ranks that take part in one save, and what planning left for its end.

    Without a process group it stands for this process alone. All ranks in it, in its errors too,
    are ranks of the group.

    Args:
        group: The process group; None for the default one.
        coordinator_rank: Rank, within the group, that makes the global plan and commits.

    Attributes:
        communicator: The door to the other ranks of the group.
        kept_metadata: Makes the metadata of a plan that was reused; on the coordinator.
        failure: What this rank raised after the exchanges of planning; told when the save ends.
    """

    def __init__(self, group: ProcessGroup | None, coordinator_rank: int) -> None:
        """Find the communicator; nothing is exchanged yet."""
        use_dist = dist.is_available() and dist.is_initialized()
        super().__init__(group, use_dist, coordinator_rank if use_dist else 0)
        self.communicator = group_communicator(group if use_dist else None)
        self.kept_metadata: Callable[[], Metadata | None] | None = None
        self.failure: Exception | None = None

    @classmethod
    def of_group(cls, group: ProcessGroup | None, coordinator_rank: int) -> PlanningRanks:
        """Return the ranks of ``group``, coordinated by a global rank.

        Args:
            group: The process group; None for the default one.
            coordinator_rank: Global rank. The default of callers, 0, stands for the group's first
                rank where the group does not have rank 0.

        Raises:
            ConfigError: This rank or the coordinator is not in the group.
        """
        if group is None or not dist.is_initialized():
            size = dist.get_world_size() if dist.is_initialized() else 1
            if not 0 <= coordinator_rank < size:
                raise ConfigError(f"coordinator_rank {coordinator_rank} of {size} ranks.")
            return cls(group, coordinator_rank)
        if not isinstance(group, dist.ProcessGroup):  # what new_group returns to the others
            raise ConfigError(
                f"rank {dist.get_rank()} is not in the process group of this save.",
                hint="only ranks of the group take part.",
            )
        members = dist.get_process_group_ranks(group)
        if coordinator_rank not in members and coordinator_rank != 0:
            raise ConfigError(f"coordinator_rank {coordinator_rank} is not in {members}.")
        return cls(group, members.index(coordinator_rank) if coordinator_rank in members else 0)

    @classmethod
    def of_wrapper(cls, wrapper: _DistWrapper) -> PlanningRanks:
        """Return ``wrapper`` itself if it is one of ours, else its like."""
        if isinstance(wrapper, cls):
            return wrapper
        return cls(wrapper.group, wrapper.coordinator_rank)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks of the group, in its order."""
        return tuple(dist.get_process_group_ranks(self.group)) if self.use_dist else (0,)

    def map_reduce(
        self, phase: str, local: Callable[[], T], combine: Callable[[Sequence[T]], R]
    ) -> R:
        """Run ``local`` everywhere and ``combine`` on the coordinator. Collective.

        One exchange, or two where the coordinator is not the group's first rank.
        """
        if self.coordinator_rank == 0:
            return self.communicator.map_reduce(phase, local, combine)
        values = self._values_on_coordinator(phase, local)
        told: list[R] = self.communicator.map_reduce(
            f"{phase} (coordinator)",
            lambda: [combine(values)] if values is not None else [],
            lambda results: results[self.coordinator_rank],
        )
        return told[0]

    def map_scatter(
        self, phase: str, local: Callable[[], T], combine: Callable[[Sequence[T]], Sequence[R]]
    ) -> R:
        """Like ``map_reduce``, with one result for each rank. Collective."""
        if self.coordinator_rank == 0:
            return self.communicator.map_scatter(phase, local, combine)
        values = self._values_on_coordinator(phase, local)
        told: R = self.communicator.map_scatter(
            f"{phase} (coordinator)",
            lambda: combine(values) if values is not None else [],
            lambda results: results[self.coordinator_rank],
        )
        return told

    def _values_on_coordinator(self, phase: str, local: Callable[[], T]) -> Sequence[T] | None:
        """Return what ``local`` returned on each rank; None on all but the coordinator."""

        def to_coordinator(values: Sequence[T]) -> list[list[T] | None]:
            told: list[list[T] | None] = [None] * len(values)
            told[self.coordinator_rank] = list(values)
            return told

        return self.communicator.map_scatter(phase, local, to_coordinator)
