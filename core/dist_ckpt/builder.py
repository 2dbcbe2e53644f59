"""Checkpointers put together from their parts.

Here: the two factories and their config. Not here: the parts. The names are those of torch's
``_experimental`` checkpointer (torch 2.13).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dist_ckpt.barriers import BarrierConfig, TCPStoreBarrier, create_barrier_from_config
from dist_ckpt.checkpoint_process import (
    CheckpointProcess,
    CheckpointProcessConfig,
    default_subprocess_init_fn,
    default_writer_init_fn,
)
from dist_ckpt.checkpoint_reader import CheckpointReader
from dist_ckpt.checkpoint_writer import (
    CheckpointWriter,
    CheckpointWriterConfig,
    WriterHook,
    default_rank_info,
)
from dist_ckpt.checkpointer import AsyncCheckpointer, SyncCheckpointer
from dist_ckpt.errors import ConfigError
from dist_ckpt.staging import CheckpointStagerConfig, DefaultStager

if TYPE_CHECKING:
    from dist_ckpt.types import RankInfo

__all__ = ["CheckpointerConfig", "make_async_checkpointer", "make_sync_checkpointer"]


@dataclass(slots=True)
class CheckpointerConfig:
    """The configs of a checkpointer's parts.

    Attributes:
        writer_config: How to write.
        barrier_config: Where ranks meet.
        staging_config: How to stage (asynchronous only).
        process_config: How long to wait for the process (asynchronous only).
    """

    writer_config: CheckpointWriterConfig = field(default_factory=CheckpointWriterConfig)
    barrier_config: BarrierConfig = field(default_factory=BarrierConfig)
    staging_config: CheckpointStagerConfig = field(default_factory=CheckpointStagerConfig)
    process_config: CheckpointProcessConfig = field(default_factory=CheckpointProcessConfig)


def make_sync_checkpointer(
    config: CheckpointerConfig | None = None,
    rank_info: RankInfo | None = None,
    commit_hook: WriterHook | None = None,
) -> SyncCheckpointer:
    """Return a checkpointer whose ``save`` returns when the checkpoint is committed.

    Args:
        config: The parts' configs.
        rank_info: Which rank this is; that of the default process group if None.
        commit_hook: What to do before and after each commit.
    """
    config, rank_info = config or CheckpointerConfig(), rank_info or default_rank_info()
    barrier = create_barrier_from_config(config.barrier_config, rank_info)
    writer = CheckpointWriter(config.writer_config, rank_info, barrier, commit_hook)
    return SyncCheckpointer(writer, CheckpointReader(rank_info))


def make_async_checkpointer(  # noqa: PLR0917 - torch's signature
    config: CheckpointerConfig | None = None,
    rank_info: RankInfo | None = None,
    subprocess_init_fn: Callable[..., None] = default_subprocess_init_fn,
    subprocess_init_args: tuple[Any, ...] = (),
    checkpoint_writer_init_fn: Callable[..., CheckpointWriter] = default_writer_init_fn,
    checkpoint_writer_init_args: Mapping[str, Any] | None = None,
) -> AsyncCheckpointer:
    """Return a checkpointer whose ``save`` returns when there is a snapshot. Collective.

    Args:
        config: The parts' configs. The default writer is given ``writer_config``; one of your own
            is made of ``checkpoint_writer_init_args`` alone.
        rank_info: Which rank this is; that of the default process group if None.
        subprocess_init_fn: Called first in the checkpoint process.
        subprocess_init_args: Its arguments.
        checkpoint_writer_init_fn: Called in the process; returns the writer.
        checkpoint_writer_init_args: Its keyword arguments.

    Raises:
        ConfigError: The barrier is one that only processes with a process group can use.
    """
    config, rank_info = config or CheckpointerConfig(), rank_info or default_rank_info()
    barrier = create_barrier_from_config(config.barrier_config, rank_info)
    if barrier is not None and not isinstance(barrier, TCPStoreBarrier):
        raise ConfigError(
            f"checkpoint processes cannot meet through {config.barrier_config.barrier_type!r}: "
            "they have no process group.",
            hint="use None (the job's own store) or 'tcp_store'.",
        )
    arguments = dict(checkpoint_writer_init_args or {})
    if checkpoint_writer_init_fn is default_writer_init_fn:
        arguments.setdefault("config", config.writer_config)
    process = CheckpointProcess(
        rank_info,
        config.process_config,
        subprocess_init_fn,
        subprocess_init_args,
        checkpoint_writer_init_fn,
        arguments,
        barrier=barrier,
    )
    return AsyncCheckpointer(
        DefaultStager(config.staging_config), process, CheckpointReader(rank_info)
    )
