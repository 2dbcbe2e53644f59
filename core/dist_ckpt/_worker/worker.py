"""The worker of a rank, as the training process uses it.

Here: ``Worker``: starts a worker, starts another if it has died, and gives it saves. Not here: one
started worker (``link``), one save (``saves``), what runs in the worker (``loop``). Local: nothing
here waits for other ranks.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from dist_ckpt._worker.link import START_SECS, Link
from dist_ckpt._worker.messages import Begin, Configure, ForgetArena, MapArena, ServeHub
from dist_ckpt._worker.saves import GivenUpError, WorkerSave
from dist_ckpt.errors import AsyncSaveError, CheckpointingException, CoordinationError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dist_ckpt._saving.publish import CommitPoint
    from dist_ckpt._worker.hub import HubAddress
    from dist_ckpt._worker.orders import Order

__all__ = ["Worker", "WorkerSave"]

_HUB_GRACE_SECS = 30.0
"""How long a rank may be disconnected from the hub before it counts as gone: enough to start
another worker. A rank whose worker died reports that at once."""


class Worker:
    """Writes saves of one rank in the background, one after the other.

    Args:
        kind: A process of its own, which shares no interpreter with training; or a thread.
        rank: This rank.
        heartbeat_secs: Time between two heartbeats of the worker.
        niceness: Added to the worker's scheduling priority, so that training comes first.
        hub_grace_secs: How long a rank may be disconnected from the hub of rank 0's worker before
            it counts as gone.
    """

    def __init__(
        self,
        *,
        kind: Literal["process", "thread"],
        rank: int,
        heartbeat_secs: float = 0.5,
        niceness: int = 10,
        hub_grace_secs: float = _HUB_GRACE_SECS,
    ) -> None:
        """Start nothing yet."""
        self._kind: Literal["process", "thread"] = kind
        self._config = Configure(rank, heartbeat_secs, niceness, parent_pid=0)
        self._hub_grace_secs = hub_grace_secs
        self._lock = threading.Lock()
        self._link: Link | None = None
        self._saves: list[WorkerSave] = []

    @property
    def pid(self) -> int | None:
        """The worker's process; None for a thread, or if none was started."""
        return None if self._link is None else self._link.pid

    def is_alive(self) -> bool:
        """Whether a worker is started and has not ended."""
        return self._link is not None and self._link.is_alive

    def start(self) -> None:
        """Start the worker, or another one if it has died; do not wait for it. Local.

        Raises:
            ConfigError: There is no Python to start.
            WorkerDiedError: It cannot be started.
        """
        self._started()

    def serve_hub(self, hosts: Sequence[str], timeout_secs: float) -> HubAddress:
        """Have the worker serve the hub, the rendezvous of all workers. Rank 0.

        It is the same hub for as long as the worker lives; call this before every save.

        Args:
            hosts: Names under which other ranks may reach this host, the most likely one first.
            timeout_secs: How long the worker may take to start and to answer.

        Raises:
            WorkerDiedError: The worker died, or does not answer.
            CoordinationError: The worker cannot open a port.
        """
        link = self._started()
        began = time.monotonic()
        link.wait_until_ready(timeout_secs)
        if link.hub is None or link.hub.address is None:
            try:
                link.ask_for_hub(ServeHub(tuple(hosts), self._hub_grace_secs))
            except OSError:
                link.wait_until_ready()
        served = link.wait_for_hub(max(timeout_secs - (time.monotonic() - began), 0.0))
        if served is not None and served.address is not None:
            return served.address
        if link.death is not None:
            raise link.death
        why = f"no answer within {timeout_secs:g} s" if served is None else served.failure
        raise CoordinationError(f"the worker of rank {self._config.rank} serves no hub: {why}.")

    def begin(
        self,
        number: int,
        order: Order,
        *,
        descriptor: int,
        arena_key: int,
        nbytes: int,
        point: CommitPoint | None,
    ) -> WorkerSave:
        """Give the worker a save. Local; may wait for a worker that is just starting.

        A worker that has died, or cannot be started, raises nothing here: it is reported to the
        other ranks and ends in the save's outcome.

        Args:
            number: Unique for each save of this worker.
            order: What to do.
            descriptor: The arena's file, which the caller keeps; -1 for a save without bytes.
            arena_key: Names the arena: its file is sent to the worker and mapped there once.
            nbytes: How much of the arena belongs to this save.
            point: Where the ranks commit; None for a job of one rank.
        """
        has_arena = descriptor >= 0
        size = os.fstat(descriptor).st_size if has_arena else 0
        begin = Begin(
            number=number,
            order=pickle.dumps(order),
            target=order.target,
            commits=order.commits,
            arena_key=arena_key if has_arena else None,
            nbytes=nbytes if has_arena else 0,
            point=point,
            umask=_umask(),
        )
        try:
            link = self._started()
            link.wait_until_ready(START_SECS)
        except CheckpointingException as error:
            save = WorkerSave(number, order, point, _send_nothing)
            self._remember(save)
            save.handle_death(error)
            return save
        save = WorkerSave(number, order, point, link.send)
        self._remember(save)
        link.register(save)
        try:
            if has_arena and arena_key not in link.arenas:
                link.send(MapArena(arena_key, size), (descriptor,))
                link.arenas.add(arena_key)
            link.send(begin)
        except OSError:
            return save  # the link notices that the worker is gone, and ends the save
        return save

    def forget_arena(self, arena_key: int) -> None:
        """Have the worker unmap an arena that no further save uses."""
        link = self._link
        if link is None or arena_key not in link.arenas:
            return
        link.arenas.discard(arena_key)
        try:
            link.send(ForgetArena(arena_key))
        except OSError:
            return  # the worker is gone, and its mapping with it

    def end_soon(self) -> None:
        """Ask an idle worker to end; do not wait."""
        link, self._link = self._link, None
        if link is not None and link.owner_pid == os.getpid():
            link.end_soon()

    def leave(self) -> None:
        """Let a worker process finish fully staged saves, without waiting for the result.

        A worker that is a thread ends with this process: ``close`` handles it.
        """
        link = self._link
        if link is None or link.pid is None or link.owner_pid != os.getpid():
            return
        self._link = None
        link.leave()
        error = AsyncSaveError("this save was left to its worker process, which goes on with it.")
        for save in self._saves:
            save.give_up(error)

    def close(self, timeout_secs: float) -> None:
        """Finish saves that are staged in full, give up the others, and end the worker.

        It is killed after ``timeout_secs``. All outcomes are complete when this returns; a failed
        save raises nothing here.
        """
        deadline = time.monotonic() + timeout_secs
        with self._lock:
            link, self._link = self._link, None
        if link is not None and link.owner_pid != os.getpid():
            return  # in a forked child: the worker belongs to its parent
        if link is not None:
            link.close(timeout_secs)
        for save in self._saves:
            _finish(save, max(deadline - time.monotonic(), 0.0))
        self._saves = []

    def _started(self) -> Link:
        with self._lock:
            link = self._link
            if link is None or not link.is_alive or link.owner_pid != os.getpid():
                self._link = Link(self._kind, replace(self._config, parent_pid=os.getpid()))
            assert self._link is not None  # noqa: S101 - for the type checker
            return self._link

    def _remember(self, save: WorkerSave) -> None:
        self._saves = [one for one in self._saves if not one.outcome.done()]
        self._saves.append(save)


def _finish(save: WorkerSave, timeout_secs: float) -> None:
    try:
        save.outcome.exception(timeout_secs)
    except TimeoutError:
        save.give_up(GivenUpError("how this save ended was not known when the saver was closed."))


def _send_nothing(_: object) -> None:
    raise BrokenPipeError


def _umask() -> int:
    """Return this process's umask, read without setting it, which would race with other threads."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            name, _, value = line.partition(":")
            if name == "Umask":
                return int(value, 8)
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
