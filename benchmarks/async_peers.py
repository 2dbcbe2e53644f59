"""Other libraries' ways to save a training state in the background.

Here: one class a peer. Not here: ours and the floor (``async_contenders``).

Peers get a flat dict of the job's live tensors, made once and outside of every clock. What does not
sync its files by itself is made to, in the background, so that all of them end at the same point.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from async_job import TIMEOUT_SECS, Contender, Job, State, sync

if TYPE_CHECKING:
    from torch.distributed.checkpoint._experimental.checkpoint_writer import CheckpointWriter
    from torch.distributed.checkpoint._experimental.types import RankInfo


class TorchDcp(Contender):
    """``torch.distributed.checkpoint.async_save``; it needs a process group."""

    def __init__(self, job: Job, threads: int, *, name: str, executor: str, kept: bool) -> None:
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        super().__init__(job, threads)
        self.name = name
        self._executor = AsyncCheckpointerType(executor)
        self._stager = None
        if kept:
            self._stager = DefaultStager(
                StagingOptions(
                    use_pinned_memory=False,
                    use_shared_memory=True,
                    use_async_staging=True,
                    use_non_blocking_copy=False,
                )
            )
        self._staged: Future[None] | None = None
        self._saved: Future[Any] = Future()

    def save(self, at: Path) -> None:
        import torch.distributed.checkpoint as dcp

        answer = dcp.async_save(
            self.job.state,
            storage_writer=dcp.FileSystemWriter(at, thread_count=self.threads, sync_files=True),
            async_checkpointer_type=self._executor,
            async_stager=self._stager,
        )
        if isinstance(answer, Future):
            self._saved = answer
        else:
            self._saved, self._staged = answer.upload_completion, answer.staging_completion

    def guard(self) -> None:
        if self._staged is not None:
            self._staged.result(TIMEOUT_SECS)

    def is_done(self) -> bool:
        return self._saved.done()

    def finish(self) -> None:
        self._saved.result(TIMEOUT_SECS)

    def load(self, at: Path) -> State:
        import torch.distributed.checkpoint as dcp

        loaded = {name: torch.full_like(one, -1.0) for name, one in self.job.state.items()}
        dcp.load(loaded, storage_reader=dcp.FileSystemReader(at))
        return loaded

    def close(self) -> None:
        if self._stager is not None:
            self._stager.close()


class LightningAsync(Contender):
    """Lightning's ``AsyncCheckpointIO`` around its ``TorchCheckpointIO``."""

    name = "Lightning AsyncCheckpointIO"

    def __init__(self, job: Job, threads: int) -> None:
        from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO

        super().__init__(job, threads)
        done = self._done = Event()

        class Durable(TorchCheckpointIO):
            def save_checkpoint(self, checkpoint: Any, path: Any, **kwargs: Any) -> None:
                try:
                    super().save_checkpoint(checkpoint, path, **kwargs)
                    sync(Path(path))
                finally:
                    done.set()

        self._io = AsyncCheckpointIO(Durable())

    def save(self, at: Path) -> None:
        self._done.clear()
        self._io.save_checkpoint(self.job.state, str(at / "state.ckpt"))

    def is_done(self) -> bool:
        return self._done.is_set()

    def finish(self) -> None:
        if not self._done.wait(TIMEOUT_SECS):
            raise TimeoutError(f"{self.name} has not saved within {TIMEOUT_SECS} s.")

    def load(self, at: Path) -> State:
        loaded: State = torch.load(at / "state.ckpt", weights_only=True)
        return loaded

    def close(self) -> None:
        self._io.teardown()


class TorchExperimental(Contender):
    """``make_async_checkpointer`` of torch's ``_experimental``, told to do without accelerator."""

    name = "torch _experimental"

    def __init__(self, job: Job, threads: int) -> None:
        from torch.distributed.checkpoint._experimental.builder import make_async_checkpointer
        from torch.distributed.checkpoint._experimental.config import CheckpointerConfig
        from torch.distributed.checkpoint._experimental.staging import CheckpointStagerConfig

        super().__init__(job, threads)
        staging = CheckpointStagerConfig(
            use_pinned_memory=False,
            use_shared_memory=True,
            use_async_staging=False,
            use_non_blocking_copy=False,
        )
        self._checkpointer = make_async_checkpointer(
            CheckpointerConfig(staging_config=staging), checkpoint_writer_init_fn=durable_writer
        )
        self._saved: Future[Any] = Future()

    def save(self, at: Path) -> None:
        futures = self._checkpointer.save(str(at), self.job.state)
        assert futures is not None
        self._saved = futures[1]

    def is_done(self) -> bool:
        return self._saved.done()

    def finish(self) -> None:
        self._saved.result(TIMEOUT_SECS)

    def load(self, at: Path) -> State:
        loaded: State = torch.load(at / "checkpoint_0.pt", weights_only=True)
        return loaded

    def close(self) -> None:
        self._checkpointer.close()


def durable_writer(rank_info: RankInfo) -> CheckpointWriter:
    """Return the default writer with a hook that syncs; called in the peer's own process."""
    from torch.distributed.checkpoint._experimental.checkpoint_writer import (
        CheckpointWriter,
        CheckpointWriterConfig,
        WriterHook,
    )

    class Sync(WriterHook):
        def pre_commit(self, path: str, **_: Any) -> None:
            sync(Path(path, "checkpoint_0.pt"))

        def post_commit(self, path: str, **_: Any) -> None:
            pass

    return CheckpointWriter(CheckpointWriterConfig(), rank_info, commit_hook=Sync())


class Forking(Contender):
    """A peer that forks a process for each save, and calls CUDA whether there is any or not.

    It does not copy tensors of a CPU: the fork keeps their pages as they were.
    """

    def __init__(self, job: Job, threads: int, queue: Any) -> None:
        super().__init__(job, threads)
        self._queue = queue

    def is_done(self) -> bool:
        with cuda_or_none():
            self._queue.maybe_finalize_async_calls(blocking=False, no_dist=True)
        return not self._queue.get_num_unfinalized_calls()

    def finish(self) -> None:
        with cuda_or_none():
            self._queue.maybe_finalize_async_calls(blocking=True, no_dist=True)

    def close(self) -> None:
        self._queue.close()


class MegatronCore(Forking):
    """``dist_checkpointing.save(async_sharded_save=True)``; its persistent worker needs CUDA."""

    name = "Megatron-Core, a fork a save"

    def __init__(self, job: Job, threads: int) -> None:
        from megatron.core.dist_checkpointing.mapping import ShardedTensor
        from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
        from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

        super().__init__(job, threads, AsyncCallsQueue(persistent=False))
        make = ShardedTensor.from_rank_offsets
        self._sharded = {name: make(name, one) for name, one in job.state.items()}
        self._strategy = TorchDistSaveShardedStrategy(
            "torch_dist", 1, thread_count=threads, cached_metadata=True
        )

    def save(self, at: Path) -> None:
        from megatron.core import dist_checkpointing

        at.mkdir()
        with cuda_or_none():
            request = dist_checkpointing.save(
                dict(self._sharded), str(at), self._strategy, async_sharded_save=True
            )
            self._queue.schedule_async_request(request)

    def load(self, at: Path) -> State:
        from torch.distributed import checkpoint as dcp

        loaded = {name: torch.full_like(one, -1.0) for name, one in self.job.state.items()}
        dcp.load(loaded, storage_reader=dcp.FileSystemReader(at))
        return loaded


class Nvrx(Forking):
    """``torch.save`` through NVRx's ``AsyncCallsQueue``; its persistent worker needs CUDA."""

    name = "NVRx, a fork a save"

    def __init__(self, job: Job, threads: int) -> None:
        from nvidia_resiliency_ext.checkpointing.async_ckpt import core, torch_ckpt

        super().__init__(job, threads, core.AsyncCallsQueue(persistent=False))
        self._core = core
        self._wrapped = torch_ckpt.wrap_for_async(save_durably)

    def save(self, at: Path) -> None:
        at.mkdir()
        with cuda_or_none():
            request = self._core.AsyncRequest(
                self._wrapped, (self.job.state, at / "state.pt"), [], {}
            )
            self._queue.schedule_async_request(request)

    def load(self, at: Path) -> State:
        loaded: State = torch.load(at / "state.pt", weights_only=True)
        return loaded


def save_durably(state: State, path: Path) -> None:
    torch.save(state, path)
    sync(path)


@contextmanager
def cuda_or_none() -> Iterator[None]:
    """Let calls of CUDA do nothing where there is none."""
    if torch.cuda.is_available():
        yield
        return
    cpu = torch.device("cpu")
    with (
        mock.patch.object(torch.cuda, "synchronize", return_value=None),
        mock.patch.object(torch.cuda, "current_device", return_value=cpu),
    ):
        yield
