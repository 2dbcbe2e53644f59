"""Who takes part in ``bench_async_stall``: ours, the floor, and the list of all.

Here: ours through its public interface, the memcpy. Not here: the peers (``async_peers``), rounds
and clocks. Ours gets the model and the optimizer and finds their tensors itself, inside of the
clock; peers get the tensors.
"""

from __future__ import annotations

import ctypes
import importlib.util
import mmap
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from async_job import MIB, TIMEOUT_SECS, Contender, Job, State
from async_peers import LightningAsync, MegatronCore, Nvrx, TorchDcp, TorchExperimental

import dist_ckpt
from dist_ckpt.background import BackgroundOptions, BackgroundSaver
from dist_ckpt.training_state import TrainingState, save_training_state

BLOCK_NBYTES = 8 * MIB


class Ours(Contender):
    """``save_training_state(..., saver=BackgroundSaver(...))``."""

    def __init__(self, job: Job, threads: int, *, name: str, **options: Any) -> None:
        super().__init__(job, threads)
        self.name = name
        self._options = dist_ckpt.SaveOptions(thread_count=threads)
        self._saver = BackgroundSaver(BackgroundOptions(copy_threads=threads, **options))
        self._saver.start()

    def save(self, at: Path) -> None:
        state = TrainingState(models=[self.job.model], optimizers=[self.job.optimizer])
        save_training_state(at, state, options=self._options, saver=self._saver)

    def guard(self) -> None:
        self._saver.finish_staging()

    def is_done(self) -> bool:
        self._saver.poll()
        return not self._saver.in_flight

    def finish(self) -> None:
        self._saver.wait(timeout_secs=TIMEOUT_SECS)

    def load(self, at: Path) -> State:
        loaded = {name: torch.full_like(one, -1.0) for name, one in self.job.state.items()}
        shard = dist_ckpt.ShardedTensor.from_rank_offsets
        dist_ckpt.load({name: shard(our_key(name), one) for name, one in loaded.items()}, at)
        return loaded

    def close(self) -> None:
        self._saver.close()


def our_key(name: str) -> str:
    part, rest = name.split(".", 1)
    if part == "model":
        return f"models.0.{rest}"
    parameter, kind = rest.rsplit(".", 1)
    return f"optimizers.0.state.{kind}.0.{parameter}"


class Memcpy(Contender):
    """The floor: the same bytes into memory that is kept and has been touched, and no more.

    ``memmove`` without the GIL, by the same number of threads, each with an equal share of the
    bytes; who copies what was decided before. Nothing goes to disk.
    """

    name = "memcpy (floor)"

    def __init__(self, job: Job, threads: int) -> None:
        super().__init__(job, threads)
        self._pool = ThreadPoolExecutor(threads)
        self._memory = mmap.mmap(-1, job.nbytes)
        self._shares: list[list[tuple[int, int, int]]] = [[] for _ in range(threads)]
        position = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        loads = [0] * threads
        for tensor in job.state.values():
            for start in range(0, tensor.nbytes, BLOCK_NBYTES):
                nbytes = min(BLOCK_NBYTES, tensor.nbytes - start)
                least = loads.index(min(loads))
                self._shares[least].append((position, tensor.data_ptr() + start, nbytes))
                loads[least] += nbytes
                position += nbytes

    def save(self, at: Path) -> None:  # noqa: ARG002 - nothing is written
        list(self._pool.map(_copy_all, self._shares))

    def is_done(self) -> bool:
        return True

    def finish(self) -> None:
        pass

    def load(self, at: Path) -> State:  # noqa: ARG002 - nothing was written
        found, position = {}, 0
        for name, tensor in self.job.state.items():
            flat = torch.frombuffer(self._memory, dtype=torch.uint8)[
                position : position + tensor.nbytes
            ]
            found[name] = flat.clone().view(tensor.dtype).view(tensor.shape)
            position += tensor.nbytes
        return found

    def close(self) -> None:
        self._pool.shutdown()


def _copy_all(share: list[tuple[int, int, int]]) -> None:
    for target, source, nbytes in share:
        ctypes.memmove(target, source, nbytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A contender that may be asked for.

    Attributes:
        make: Makes it, from the job and the number of threads.
        needs: Modules without which it is skipped.
    """

    make: Callable[[Job, int], Contender]
    needs: tuple[str, ...] = ()

    def missing(self) -> list[str]:
        return [name for name in self.needs if not _is_there(name)]


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its package is not there
        return False


def _dcp(name: str, executor: str, *, kept: bool = False) -> Entry:
    return Entry(
        make=lambda job, threads: TorchDcp(job, threads, name=name, executor=executor, kept=kept)
    )


def _ours(name: str, **options: Any) -> Entry:
    return Entry(
        make=lambda job, threads: Ours(job, threads, name=name, **options),
    )


CONTENDERS = {
    "ours": _ours("dist-ckpt"),
    "ours-overlap": _ours("dist-ckpt, overlap", overlap=True),
    "ours-thread": _ours("dist-ckpt, thread worker", worker="thread"),
    "dcp-thread": _dcp("DCP async_save, thread", "thread"),
    "dcp-process": _dcp("DCP async_save, process", "process"),
    "dcp-overlap": _dcp("DCP async_save, process, kept async stager", "process", kept=True),
    "lightning": Entry(make=LightningAsync, needs=("lightning",)),
    "experimental": Entry(make=TorchExperimental),
    "megatron": Entry(make=MegatronCore, needs=("megatron.core",)),
    "nvrx": Entry(make=Nvrx, needs=("nvidia_resiliency_ext",)),
}
