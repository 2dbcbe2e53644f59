"""One rank's state dict, written as its part of a checkpoint.

Here: ``CheckpointWriter`` and its hooks. Not here: the key space (``_saving.rank_state``), how a
checkpoint is written and committed (``serialization``). The names are those of torch's
``_experimental`` checkpointer (torch 2.13).
"""

from __future__ import annotations

import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from dist_ckpt._comm import SingleCommunicator, default_communicator
from dist_ckpt._comm.outcome import agree, attempt
from dist_ckpt._saving.rank_state import to_sharded
from dist_ckpt.barriers import MeetingBarrier
from dist_ckpt.errors import ConfigError
from dist_ckpt.options import SaveOptions, checked_path, path_to_tell
from dist_ckpt.serialization import save
from dist_ckpt.types import RankInfo

if TYPE_CHECKING:
    from concurrent.futures import Future

    from dist_ckpt.barriers import Barrier
    from dist_ckpt.types import STATE_DICT, Communicator, PathLike, ShardedStateDict

__all__ = ["CheckpointWriter", "CheckpointWriterConfig", "WriterHook"]

logger = logging.getLogger(__name__)


class WriterHook(ABC):
    """What is done before and after a checkpoint is committed, on every rank.

    What a hook raises on one rank is raised on all.
    """

    @abstractmethod
    def pre_commit(self, path: str, **kwargs: Any) -> None:
        """Act before anything is written; if this raises on any rank, nothing is committed."""

    @abstractmethod
    def post_commit(self, path: str, **kwargs: Any) -> None:
        """Act after the commit; if this raises, the checkpoint stands all the same."""


@dataclass(slots=True)
class CheckpointWriterConfig:
    """How to write.

    Attributes:
        write_barrier_timeout_secs: How long ranks wait for each other in one step, in seconds.
        save_options: Further choices; its ``timeout_secs`` does not count.
    """

    write_barrier_timeout_secs: float = 600
    save_options: SaveOptions = SaveOptions()  # noqa: RUF009 - frozen

    def __post_init__(self) -> None:
        """Refuse a timeout that no save can keep.

        Raises:
            ConfigError: It is not positive.
        """
        replace(self.save_options, timeout_secs=self.write_barrier_timeout_secs)


class CheckpointWriter:
    """Writes this rank's part; the checkpoint is there once all ranks have written theirs.

    Ranks meet through ``barrier`` if it is one of ours, else through the default process group. A
    barrier of another kind is executed before anything is written.

    Args:
        config: How to write.
        rank_info: Which rank this is; that of the default process group if None.
        barrier: Where ranks meet.
        commit_hook: What to do before and after the commit.
    """

    def __init__(
        self,
        config: CheckpointWriterConfig | None = None,
        rank_info: RankInfo | None = None,
        barrier: Barrier | None = None,
        commit_hook: WriterHook | None = None,
    ) -> None:
        """Remember what is given; nothing is exchanged yet."""
        self._config = config or CheckpointWriterConfig()
        self._rank_info = rank_info or default_rank_info()
        self._barrier = barrier
        self._commit_hook = commit_hook

    def meet_through(self, barrier: MeetingBarrier) -> None:
        """Let ranks meet through ``barrier``, unless the writer was given one of ours."""
        if not isinstance(self._barrier, MeetingBarrier):
            self._barrier = barrier

    def write(
        self, state_dict: STATE_DICT | PathLike, path: PathLike | STATE_DICT, **kwargs: Any
    ) -> Future[None] | None:
        """Write this rank's part of the checkpoint at ``path``. Collective.

        ``write(path, state_dict)``, the order of later releases of torch, is understood too.

        When this returns, the checkpoint is durable and visible; when it raises, it raises on every
        rank, and (except for ``post_commit``) nothing is committed.

        Args:
            state_dict: This rank's state.
            path: Directory of the checkpoint, the same on all ranks.
            kwargs: Passed to the hook.

        Returns:
            None: the checkpoint is there.

        Raises:
            CheckpointingException: Whatever failed on any rank.
        """
        tree, path = in_order(state_dict, path)
        target, comm, hook = path_to_tell(path), self._communicator(), self._commit_hook

        def prepare() -> ShardedStateDict:
            self._check(tree, path, comm)
            sharded = to_sharded(tree, self._rank_info)
            if hook is not None:
                hook.pre_commit(str(target), **kwargs)
            return sharded

        sharded = agree(comm, f"preparing {target}", attempt(prepare))
        if self._barrier is not None and not isinstance(self._barrier, MeetingBarrier):
            # A barrier that fails on one rank fails on all.
            agree(comm, "waiting at a barrier", attempt(self._barrier.execute_barrier))
        save(sharded, target, communicator=comm, options=self._config.save_options)

        def finish() -> None:
            if hook is not None:
                hook.post_commit(str(target), **kwargs)

        agree(comm, f"after the commit of {target}", attempt(finish))
        logger.debug("rank %d wrote its part of %s", self._rank_info.global_rank, target)
        return None

    def close(self) -> None:
        """Do nothing; for subclasses that hold something."""

    def _communicator(self) -> Communicator:
        timeout_secs = self._config.write_barrier_timeout_secs
        if self._rank_info.global_world_size == 1:
            return SingleCommunicator()
        if isinstance(self._barrier, MeetingBarrier):
            return self._barrier.communicator(timeout_secs=timeout_secs)
        return default_communicator(timeout_secs=timeout_secs)

    def _check(self, state_dict: object, path: object, comm: Communicator) -> None:
        checked_path(path)
        self._config.__post_init__()  # it may have been changed since
        if not isinstance(state_dict, Mapping):
            raise ConfigError(f"expected a state dict, found a {type(state_dict).__name__}.")
        told = RankInfo(comm.rank, comm.size)
        if told != self._rank_info:
            raise ConfigError(
                f"the writer was told {self._rank_info}, but ranks meet as {told}.",
                hint="init_process_group first, or give a TCPStoreBarrier.",
            )


def in_order(state_dict: Any, path: Any) -> tuple[Any, Any]:
    """Return the state dict and the path, in whichever order they were given."""
    swapped = isinstance(state_dict, str | os.PathLike) and not isinstance(path, str | os.PathLike)
    return (path, state_dict) if swapped else (state_dict, path)


def default_rank_info() -> RankInfo:
    """Return this process's rank in the default process group; 0 of 1 if there is none."""
    comm = default_communicator()
    return RankInfo(comm.rank, comm.size)
