"""The process that writes a rank's checkpoints while training goes on.

Here: ``CheckpointProcess``, its thread in the training process and the order of saves. Not here:
what the process does (``_worker.checkpoint_pipe``), what it writes (``checkpoint_writer``). The
names are those of torch's ``_experimental`` checkpointer (torch 2.13).

The processes of all ranks meet in a store, without the training processes: a save commits, or fails
on all ranks, whatever those do meanwhile.
"""

from __future__ import annotations

import logging
import os
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dist_ckpt._staging_pool.handover import pack
from dist_ckpt._worker.checkpoint_pipe import CheckpointProcessError, ProcessHandle, ProcessTask
from dist_ckpt.barriers import TCPStoreBarrier
from dist_ckpt.checkpoint_writer import CheckpointWriter, CheckpointWriterConfig, WriterHook
from dist_ckpt.errors import ConfigError
from dist_ckpt.options import path_to_tell
from dist_ckpt.staging import StagedStateDict

if TYPE_CHECKING:
    from dist_ckpt._worker.checkpoint_pipe import CheckpointChild
    from dist_ckpt.types import STATE_DICT, PathLike, RankInfo

__all__ = [
    "CheckpointProcess",
    "CheckpointProcessConfig",
    "CheckpointProcessError",
    "default_subprocess_init_fn",
    "default_writer_init_fn",
]

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class CheckpointProcessConfig:
    """How long to wait for the process, in seconds.

    Attributes:
        subprocess_init_timeout_secs: For its start.
        subprocess_shutdown_timeout_secs: For its end, before it is killed.
    """

    subprocess_init_timeout_secs: float = 30
    subprocess_shutdown_timeout_secs: float = 60

    def __post_init__(self) -> None:
        """Refuse what no process can keep.

        Raises:
            ConfigError: A time is not positive.
        """
        if self.subprocess_init_timeout_secs <= 0 or self.subprocess_shutdown_timeout_secs <= 0:
            raise ConfigError(f"times must be positive: {self}.")


def default_subprocess_init_fn(*_: Any) -> None:
    """Do nothing."""


def default_writer_init_fn(
    rank_info: RankInfo,
    config: CheckpointWriterConfig | None = None,
    commit_hook: WriterHook | None = None,
) -> CheckpointWriter:
    """Return the writer of this rank."""
    return CheckpointWriter(config, rank_info, commit_hook=commit_hook)


class CheckpointProcess:
    """One process for all saves of this rank, started at once.

    It is started by ``spawn``: functions and arguments must be picklable, and a script that makes
    one needs ``if __name__ == "__main__"``. If it dies, the save fails; the next starts another.

    Making one is collective if there are several ranks: they agree where to meet.

    Args:
        rank_info: Which rank this is.
        config: How long to wait for the process.
        subprocess_init_fn: Called first in the process.
        subprocess_init_args: Its arguments.
        checkpoint_writer_init_fn: Called in the process; returns the writer.
        checkpoint_writer_init_args: Its keyword arguments; ``rank_info`` is added if it is not
            among them.
        barrier: Where the processes of all ranks meet; the job's own store if None.
    """

    def __init__(  # noqa: PLR0917 - torch's signature
        self,
        rank_info: RankInfo,
        config: CheckpointProcessConfig | None = None,
        subprocess_init_fn: Callable[..., None] = default_subprocess_init_fn,
        subprocess_init_args: tuple[Any, ...] = (),
        checkpoint_writer_init_fn: Callable[..., CheckpointWriter] = default_writer_init_fn,
        checkpoint_writer_init_args: Mapping[str, Any] | None = None,
        *,
        barrier: TCPStoreBarrier | None = None,
    ) -> None:
        """Agree where to meet, and start the process without waiting for it."""
        self._rank_info, self._config = rank_info, config or CheckpointProcessConfig()
        self._config.__post_init__()  # it may have been changed since it was made
        self._barrier = barrier
        if barrier is None and rank_info.global_world_size > 1:
            self._barrier = TCPStoreBarrier.of_job(rank_info)
        self._task = ProcessTask(
            init_fn=subprocess_init_fn,
            init_args=tuple(subprocess_init_args),
            writer_init_fn=checkpoint_writer_init_fn,
            writer_init_args={"rank_info": rank_info, **(checkpoint_writer_init_args or {})},
            point=self._barrier.point if self._barrier is not None else None,
        )
        self._worker: ProcessHandle | None = None
        self._number = 0
        self._closed = False
        # One thread: saves are written in the order in which they were asked for.
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-process")
        self.process_creation_future: Future[ProcessHandle] = self._executor.submit(
            self._live_worker
        )

    @property
    def process(self) -> CheckpointChild | None:
        """The process, None until it is started."""
        return self._worker.process if self._worker is not None else None

    def write(
        self, state_dict: STATE_DICT | Future[STATE_DICT], path: PathLike, **kwargs: Any
    ) -> Future[None]:
        """Write this rank's part in the process; return when it is committed, as a future.

        All ranks write the same paths in the same order. The future fails on all ranks alike, with
        a ``CheckpointProcessError`` where the process died and a ``CoordinationError`` elsewhere.

        Args:
            state_dict: What to write, or a future of it. It must not change before the write is
                done, unless it comes from a stager.
            path: Directory of the checkpoint.
            kwargs: Passed to the writer.

        Raises:
            ConfigError: The process is closed.
        """
        if self._closed:
            raise ConfigError("the checkpoint process is closed.")
        self._number += 1
        where = _absolute(path)
        # A list, to be emptied: the executor keeps its arguments until the future is done.
        return self._executor.submit(self._write, self._number, [state_dict], where, kwargs)

    def abstain(self, error: BaseException) -> None:
        """Take no part in the save that the other ranks write next; they are told why."""
        self._number += 1
        self._give_up(self._number, error)

    def close(self) -> None:
        """Let writes end that were asked for, then end the process; kill it if it does not.

        The time to end counts from the end of the last write.
        """
        self._closed = True
        self._executor.shutdown(wait=True)
        if self._worker is not None:
            self._worker.stop(self._config.subprocess_shutdown_timeout_secs)

    def _live_worker(self) -> ProcessHandle:
        """Return the process; start it if there is none."""
        if self._worker is None or not self._worker.is_alive():
            self._worker = None
            # Set before it is ready, so that the process is never lost sight of.
            worker = ProcessHandle(self._task, self._rank_info)
            self._worker = worker
            worker.wait_until_ready(self._config.subprocess_init_timeout_secs)
        return self._worker

    def _write(
        self,
        number: int,
        state_dict: list[STATE_DICT | Future[STATE_DICT]],
        path: PathLike,
        kwargs: Mapping[str, Any],
    ) -> None:
        try:
            self._hand_over(number, state_dict.pop(), path, kwargs)
        except BaseException as error:
            # The error may be kept for long; the snapshot's memory is for the next save.
            traceback.clear_frames(error.__traceback__)
            self._give_up(number, error)
            raise

    def _hand_over(
        self,
        number: int,
        state_dict: STATE_DICT | Future[STATE_DICT],
        path: PathLike,
        kwargs: Mapping[str, Any],
    ) -> None:
        """Return when it is written: until then the snapshot's memory must stay as it is."""
        found = state_dict.result() if isinstance(state_dict, Future) else state_dict
        arena = found.arena if isinstance(found, StagedStateDict) else None
        plain = dict(found) if isinstance(found, StagedStateDict) else found
        packed = pack((plain, path, dict(kwargs)), arena)
        self._live_worker().write(number, packed, path_to_tell(path))

    def _give_up(self, number: int, error: BaseException) -> None:
        if self._barrier is None:
            return
        try:
            self._barrier.give_up(number, f"{type(error).__name__}: {error}")
        except Exception:  # the store is gone, and with it the others' hope to meet there
            logger.exception("rank %d could not tell the others", self._rank_info.global_rank)


def _absolute(path: object) -> Any:
    """Return a path as it is meant here: the process has the working directory of its start."""
    if not isinstance(path, str | os.PathLike):
        return path  # refused by the writer
    return os.path.abspath(path)  # noqa: PTH100 - resolve() follows links
