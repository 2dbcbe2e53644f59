"""Both ends of the pipe between a rank and its checkpoint process.

Here: ``Worker`` (the rank's end) and what runs in the process. Not here: which saves there are
(``checkpoint_process``), what is written (``checkpoint_writer``).

Messages are pickled by one of the two for the other. The process ends when it is told to, or when
the rank is gone.
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

__all__ = ["CheckpointChild", "CheckpointProcessError", "Worker", "WorkerTask"]

logger = logging.getLogger(__name__)

_JOIN_SECS = 10.0
"""How long a process that has closed its pipe, or was killed, may take to be gone."""


class CheckpointProcessError(CoordinationError, RuntimeError):
    """The checkpoint process died, or raised something that is not of this library."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerTask:
    """What the process is made for.

    Attributes:
        init_fn: Called first.
        init_args: Its arguments.
        writer_init_fn: Returns the writer.
        writer_init_args: Its keyword arguments.
        point: Where the processes of all ranks meet; None for one rank.
    """

    init_fn: Callable[..., None]
    init_args: tuple[Any, ...]
    writer_init_fn: Callable[..., CheckpointWriter]
    writer_init_args: Mapping[str, Any]
    point: RendezvousPoint | None


@dataclass(frozen=True, slots=True)
class _Write:
    """One save; as many descriptors follow as there are sizes, then the data."""

    number: int
    places: tuple[Any, ...]
    arena_nbytes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Answer:
    """How it went: None, or what was raised, which is of our error tree."""

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


class Worker:
    """A started checkpoint process, seen from its rank. For one thread.

    Args:
        task: What it is made for.
        rank_info: Whose it is.
    """

    def __init__(self, task: WorkerTask, rank_info: RankInfo) -> None:
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
        """Wait until it can be given work; it is killed if it does not get there.

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
            # It may have answered before it died.
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
            self.process.join(0.1)  # it may be ending by itself: its own exit code says more
            self.process.kill()
        self.process.join(_JOIN_SECS)


def _raise_eof() -> Any:
    raise EOFError


# -- the process -----------------------------------------------------------------------------------


def _main(pipe: Connection, task: WorkerTask, rank_info: RankInfo) -> None:
    # Ctrl-C goes to all processes of a terminal; the rank decides what becomes of this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        task.init_fn(*task.init_args)
        writer = task.writer_init_fn(**task.writer_init_args)
        barrier = None if task.point is None else TCPStoreBarrier.join(task.point)
        if barrier is not None:
            writer.meet_through(barrier)
    except Exception as error:  # noqa: BLE001 - told to the rank
        pipe.send(_Answer(_portable(error)))
        return
    number = 0
    # The rank may be gone at any time: then this ends too.
    with contextlib.suppress(EOFError, OSError):
        pipe.send(_Answer())
        while (request := pipe.recv()) is not None:
            answer = _write(pipe, request, writer, barrier)
            number = 0 if answer.error is not None else request.number
            pipe.send(answer)
    if barrier is not None and rank_info.global_rank == 0 and number:
        # The store may end with the rank: the others are to hear of the last commit before.
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
        # By name: a user's writer may have them in the other order.
        writer.write(state_dict=state_dict, path=path, **kwargs)
    except Exception as error:  # noqa: BLE001 - told to the rank
        return _Answer(_portable(error))
    finally:
        if barrier is not None:
            with contextlib.suppress(Exception):  # a store that is gone was told of already
                barrier.leave(request.number)
    return _Answer()


def _portable(error: Exception) -> CheckpointingException:
    """Return the error as one that pickles, with its traceback as a note."""
    told = (
        error
        if isinstance(error, CheckpointingException)
        else CheckpointProcessError(f"{type(error).__name__}: {error}")
    )
    told.add_note(
        f"In the checkpoint process {os.getpid()}:\n{''.join(traceback.format_exception(error))}"
    )
    return told
