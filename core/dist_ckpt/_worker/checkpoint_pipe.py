"""Both ends of the pipe between a rank and its checkpoint process.

Here: ``ProcessHandle`` (the rank's end) and the main function of the process. Not here: the order
of saves (``checkpoint_process``), what is written (``checkpoint_writer``).

The process ends when it is sent None, or when the rank is gone.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing import connection, reduction
from multiprocessing.context import SpawnProcess
from typing import TYPE_CHECKING, Any, Self

from dist_ckpt._staging_pool.arena import Arena
from dist_ckpt._staging_pool.handover import Packed, unpack
from dist_ckpt.barriers import TCPStoreBarrier
from dist_ckpt.errors import BarrierTimeoutError, CheckpointingException, CoordinationError

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from pathlib import Path

    from dist_ckpt._comm.rendezvous import RendezvousPoint
    from dist_ckpt.checkpoint_writer import CheckpointWriter
    from dist_ckpt.types import RankInfo

__all__ = ["CheckpointChild", "CheckpointProcessError", "ProcessHandle", "ProcessTask"]

logger = logging.getLogger(__name__)

_JOIN_SECS = 10.0
"""How long a process that has closed its pipe, or was killed, may take to end."""


class CheckpointProcessError(CoordinationError, RuntimeError):
    """The checkpoint process died, or raised something that is not of this library."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessTask:
    """What the process runs.

    Attributes:
        init_fn: Called first.
        init_args: Its arguments.
        writer_init_fn: Returns the writer.
        writer_init_args: Its keyword arguments.
        point: The rendezvous of all ranks' processes; None for a job of one rank.
    """

    init_fn: Callable[..., None]
    init_args: tuple[Any, ...]
    writer_init_fn: Callable[..., CheckpointWriter]
    writer_init_args: Mapping[str, Any]
    point: RendezvousPoint | None


@dataclass(frozen=True, slots=True)
class _Write:
    """One save. A descriptor for each of the sizes follows, then the data."""

    number: int
    places: tuple[Any, ...]
    arena_nbytes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Answer:
    """The result of a request: None, or the error, which is a ``CheckpointingException``."""

    error: CheckpointingException | None = None


class CheckpointChild(SpawnProcess):
    """The process, with the interface of torch's ``ProcessContext`` (``processes``, ``pids``)."""

    @property
    def processes(self) -> list[Self]:
        """The process alone."""
        return [self]

    def pids(self) -> list[int | None]:
        """Return its process id, in a list."""
        return [self.pid]


class ProcessHandle:
    """A started checkpoint process, as its rank sees it. For one thread.

    Args:
        task: What it runs.
        rank_info: Its rank.
    """

    def __init__(self, task: ProcessTask, rank_info: RankInfo) -> None:
        """Start it.

        Raises:
            CheckpointProcessError: The task cannot be pickled, or this process may have no child.
        """
        context = multiprocessing.get_context("spawn")
        self._rank = rank_info.global_rank
        self._pipe, theirs = context.Pipe()
        self.process = CheckpointChild(
            target=_main,
            args=(theirs, task, rank_info),
            name=f"checkpoint-process-{self._rank}",
            daemon=True,  # it never outlives the rank, however that ends
        )
        try:
            self.process.start()
        except Exception as error:
            self._pipe.close()
            raise CheckpointProcessError(
                f"the checkpoint process of rank {self._rank} cannot be started: {error}",
                hint="functions and arguments must be picklable: of modules, no lambdas.",
            ) from error
        finally:
            theirs.close()

    def is_alive(self) -> bool:
        """Whether it can be given work."""
        return not self._pipe.closed and self.process.is_alive()

    def wait_until_ready(self, timeout_secs: float) -> None:
        """Wait until it can be given work; kill it if it does not become ready.

        Raises:
            BarrierTimeoutError: It is not ready in time.
            CheckpointingException: What was raised in it.
        """
        try:
            self._await("starting", timeout_secs)
        except BaseException:
            self._end(kill=True)
            raise

    def write(self, number: int, packed: Packed, path: Path) -> None:
        """Have one save written; return when it is committed.

        Raises:
            CheckpointProcessError: The process died.
            CheckpointingException: What was raised in it.
        """
        doing = f"writing {path}"
        sizes = tuple(arena.nbytes for arena in packed.arenas)
        try:
            self._pipe.send(_Write(number, packed.places, sizes))
            for arena in packed.arenas:
                reduction.send_handle(self._pipe, arena.descriptor, self.process.pid)
                arena.close()
            self._pipe.send_bytes(packed.data)
        except OSError as error:
            raise self._died(doing) from error
        self._await(doing, None)

    def stop(self, timeout_secs: float) -> None:
        """End it; kill it if it does not end in time."""
        if not self._pipe.closed:
            with contextlib.suppress(OSError):
                self._pipe.send(None)
            self.process.join(timeout_secs)
        if self.process.is_alive():
            logger.warning(
                "the checkpoint process of rank %d (%s) did not end within %g s and is killed",
                self._rank, self.process.pid, timeout_secs,
            )  # fmt: skip
        self._end(kill=True)

    def _await(self, doing: str, timeout_secs: float | None) -> None:
        ready = connection.wait([self._pipe, self.process.sentinel], timeout_secs)
        if not ready:
            raise BarrierTimeoutError(
                f"{doing}: the checkpoint process of rank {self._rank} did not answer within "
                f"{timeout_secs:g} s.",
                hint="raise subprocess_init_timeout_secs, or look at subprocess_init_fn.",
            )
        try:
            # An answer that was sent before the process died counts.
            answer: _Answer = self._pipe.recv() if self._pipe.poll() else _raise_eof()
        except (EOFError, OSError) as error:
            raise self._died(doing) from error
        if answer.error is not None:
            raise answer.error

    def _died(self, doing: str) -> CheckpointProcessError:
        self._end(kill=True)
        code = self.process.exitcode or 0
        name = f", {signal.Signals(-code).name}" if -code in set(signal.Signals) else ""
        return CheckpointProcessError(
            f"{doing}: Child process terminated unexpectedly (rank {self._rank}, exit code "
            f"{self.process.exitcode}{name}).",
            hint="the next save starts another; SIGKILL is often the system short of memory.",
        )

    def _end(self, *, kill: bool) -> None:
        self._pipe.close()
        if kill and self.process.is_alive():
            self.process.join(0.1)  # if it is ending on its own, its exit code says more
            self.process.kill()
        self.process.join(_JOIN_SECS)


def _raise_eof() -> Any:
    raise EOFError


# -- the process -----------------------------------------------------------------------------------


def _main(pipe: Connection, task: ProcessTask, rank_info: RankInfo) -> None:
    # Ctrl-C reaches all processes of a terminal; only the rank decides when this one ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        task.init_fn(*task.init_args)
        writer = task.writer_init_fn(**task.writer_init_args)
        barrier = None if task.point is None else TCPStoreBarrier.join(task.point)
        if barrier is not None:
            writer.meet_through(barrier)
    except Exception as error:  # noqa: BLE001 - sent to the rank
        pipe.send(_Answer(_portable(error)))
        return
    number = 0
    # When the rank is gone the pipe ends, and so does this process.
    with contextlib.suppress(EOFError, OSError):
        pipe.send(_Answer())
        while (request := pipe.recv()) is not None:
            answer = _write(pipe, request, writer, barrier)
            number = 0 if answer.error is not None else request.number
            pipe.send(answer)
    if barrier is not None and rank_info.global_rank == 0 and number:
        # Rank 0 may serve the store, and may end after this: the others must have read the last
        # verdict by then.
        barrier.wait_until_left(number)
    writer.close()


def _write(
    pipe: Connection, request: _Write, writer: CheckpointWriter, barrier: TCPStoreBarrier | None
) -> _Answer:
    arenas = [
        Arena(nbytes, descriptor=reduction.recv_handle(pipe)) for nbytes in request.arena_nbytes
    ]
    data = pipe.recv_bytes()
    try:
        state_dict, path, kwargs = unpack(data, request.places, arenas)
        for arena in arenas:
            arena.close()
        if barrier is not None:
            barrier.begin(request.number)
        # By keyword: a user's writer may have the parameters in another order.
        writer.write(state_dict=state_dict, path=path, **kwargs)
    except Exception as error:  # noqa: BLE001 - sent to the rank
        return _Answer(_portable(error))
    finally:
        if barrier is not None:
            with contextlib.suppress(Exception):  # a store that is gone was reported already
                barrier.leave(request.number)
    return _Answer()


def _portable(error: Exception) -> CheckpointingException:
    """Return the error as one that can be pickled, with its traceback as a note."""
    told = (
        error
        if isinstance(error, CheckpointingException)
        else CheckpointProcessError(f"{type(error).__name__}: {error}")
    )
    told.add_note(
        f"In the checkpoint process {os.getpid()}:\n{''.join(traceback.format_exception(error))}"
    )
    return told
