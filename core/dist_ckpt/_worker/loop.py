"""The worker's main loop: receive messages, write one save after the other, commit each.

Here: ``WorkerLoop``, the same for a worker process and a worker thread. Not here: how a process
starts (``main``), the training process's end (``link``).

Three threads: the reader handles messages and waits for nothing else; the writer writes saves in
the order in which they began; the third sends heartbeats. When the training process is gone, saves
that are staged in full are written and committed, and the others are given up.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import pickle
import queue
import threading
import time
from typing import TYPE_CHECKING, Any

from dist_ckpt._comm.failures import describe_failure, merged_error
from dist_ckpt._worker.agreement import CommitParticipant
from dist_ckpt._worker.hub import Hub
from dist_ckpt._worker.messages import (
    Abandon,
    AllStaged,
    Begin,
    Close,
    Ended,
    ForgetArena,
    Heartbeat,
    Hello,
    HubServed,
    MapArena,
    ServeHub,
    StagedRun,
    Written,
)
from dist_ckpt._worker.staged import MappedArena, StagedSave
from dist_ckpt.errors import AsyncSaveError, CheckpointingException, RankFailure

if TYPE_CHECKING:
    from dist_ckpt._worker.channel import Channel
    from dist_ckpt._worker.messages import Configure
    from dist_ckpt._worker.orders import Order

__all__ = ["WorkerLoop"]

logger = logging.getLogger(__name__)

_LINGER_SECS = 10.0
"""How long the hub outlives the last save, until all ranks have read its verdict."""
_STAGING_SECS = 1800.0
"""How long to wait for the next staged bytes of a save without a commit point."""
_IDLE = "waiting for a save"


class WorkerLoop:
    """Serves one training process until that ends or sends ``Close``.

    Args:
        channel: The worker's end.
        config: Whose worker it is.
        is_process: Whether this process is the worker's own.
    """

    def __init__(self, channel: Channel, config: Configure, *, is_process: bool) -> None:
        """Start nothing yet."""
        self._channel, self._config, self._is_process = channel, config, is_process
        self._participant = CommitParticipant()
        self._hub: Hub | None = None
        self._arenas: dict[int, MappedArena] = {}
        self._saves: dict[int, StagedSave] = {}
        self._queue: queue.SimpleQueue[StagedSave | None] = queue.SimpleQueue()
        self._state = (_IDLE, 0)
        self._ended = threading.Event()

    def run(self) -> None:
        """Serve until the end; the calling thread is the reader."""
        name = f"dist_ckpt-worker-{self._config.rank}"
        threads = [
            threading.Thread(target=self._write_all, name=f"{name}-writer", daemon=True),
            threading.Thread(target=self._send_heartbeats, name=f"{name}-heart", daemon=True),
        ]
        for thread in threads:
            thread.start()
        reason = "the worker failed"
        try:
            self._send(Hello(os.getpid()))
            reason = self._read_all()
        finally:
            for save in list(self._saves.values()):
                if not save.is_all_staged:
                    save.abandon(_give_up_failure(reason))
            self._queue.put(None)
            threads[0].join()
            self._ended.set()
            threads[1].join()
            self._release_all()

    # -- the reader --------------------------------------------------------------------------------

    def _read_all(self) -> str:
        """Handle messages until the channel ends; return why it ended."""
        while True:
            try:
                received = self._channel.receive()
            except EOFError:
                return f"rank {self._config.rank}'s training process ended while it staged"
            if received is None:
                continue
            message, descriptors = received
            if isinstance(message, Close):
                return "the saver was closed while it staged"
            self._take(message, descriptors)

    def _take(self, message: object, descriptors: list[int]) -> None:
        match message:
            case Begin():
                self._begin(message)
            case StagedRun() | AllStaged() | Abandon():
                if save := self._saves.get(message.number):
                    save.take(message)
            case MapArena():
                self._map(message, descriptors)
            case ForgetArena():
                if arena := self._arenas.pop(message.key, None):
                    arena.leave()
            case ServeHub():
                self._serve_hub(message)
            case _:
                logger.error("a worker was sent %r", message)

    def _begin(self, begin: Begin) -> None:
        arena = None if begin.arena_key is None else self._arenas.get(begin.arena_key)
        save = StagedSave(
            begin,
            arena,
            send=self._send,
            set_state=self._set_state,
            timeout_secs=begin.point.timeout_secs if begin.point else _STAGING_SECS,
        )
        if begin.arena_key is not None and arena is None:
            save.abandon(
                _give_up_failure(f"arena {begin.arena_key} could not be mapped in the worker")
            )
        self._saves[begin.number] = save
        self._queue.put(save)

    def _map(self, message: MapArena, descriptors: list[int]) -> None:
        try:
            self._arenas[message.key] = MappedArena(descriptors[0], message.nbytes)
        except (OSError, ValueError, IndexError):
            logger.exception("arena %d of %d bytes cannot be mapped", message.key, message.nbytes)

    def _serve_hub(self, message: ServeHub) -> None:
        if self._hub is None:
            try:
                self._hub = Hub(message.hosts, grace_secs=message.grace_secs)
            except OSError as error:
                self._send(HubServed(None, str(error)))
                return
        self._send(HubServed(self._hub.address))

    # -- the writer --------------------------------------------------------------------------------

    def _write_all(self) -> None:
        if self._is_process:
            gc.freeze()
        while (save := self._queue.get()) is not None:
            if self._is_process:
                gc.disable()
            try:
                self._serve(save)
            except BaseException:
                logger.exception("%s: the worker cannot go on", save.begin.target)
                if self._is_process:
                    os._exit(70)  # EX_SOFTWARE; the training process sees it, and acts
                self._send(
                    Ended(save.begin.number, error=AsyncSaveError("the worker cannot go on"))
                )
            finally:
                self._set_state(_IDLE, 0)
                if self._is_process:
                    gc.enable()
                    gc.collect()
            del save

    def _serve(self, save: StagedSave) -> None:
        """Write one save and commit it; always answer with ``Written`` and ``Ended``."""
        begin, timings = save.begin, {"begun": time.time()}
        if self._is_process:  # one save is written at a time
            os.umask(begin.umask)
        order, report, failure = self._write(save, timings)
        # Before `Written`: on that message the training process may overwrite the memory.
        save.release()
        failure = save.failure or failure
        now = time.time()
        if failure is None:
            timings["written"] = now
        self._send(Written(begin.number, now - timings["begun"], dict(timings), save.nbytes))
        error: CheckpointingException | None = None
        packed = b""
        try:
            if begin.commits:
                self._set_state(f"committing {begin.target}", 0)
                self._participant.commit(begin.point, order, report, failure)
                timings["committed"] = time.time()
            elif failure is not None:
                raise merged_error(f"writing {begin.target}", {self._config.rank: failure}, None)
            else:
                packed = pickle.dumps(report)
        except BaseException as caught:  # noqa: BLE001 - sent to the training process
            error = self._as_our_error(caught, begin.target)
        self._saves.pop(begin.number, None)
        self._send(Ended(begin.number, packed, error, order is not None, dict(timings)))

    def _write(
        self, save: StagedSave, timings: dict[str, float]
    ) -> tuple[Order | None, Any, RankFailure | None]:
        """Carry out the order; return it with its report or the failure."""
        begin = save.begin
        order: Order | None = None
        try:
            self._set_state(f"beginning {begin.target}", 0)
            if begin.commits:
                self._participant.connect(begin.point)
            # The bytes come from the training process that this worker belongs to.
            order = pickle.loads(begin.order)  # noqa: S301 - see above
            assert order is not None  # noqa: S101 - for the type checker
            save.progress("writing", 0)
            timings["first_write"] = time.time()
            return order, order.write(save), None
        except BaseException as error:  # noqa: BLE001 - reported to all ranks
            return order, None, describe_failure(error)

    def _as_our_error(self, error: BaseException, target: str) -> CheckpointingException:
        with contextlib.suppress(Exception):
            if isinstance(error, CheckpointingException) and pickle.dumps(error):
                return error
        failures = {self._config.rank: describe_failure(error)}
        return merged_error(f"committing {target}", failures, None)

    # -- both --------------------------------------------------------------------------------------

    def _send(self, message: object) -> None:
        with contextlib.suppress(OSError):  # the training process is gone
            self._channel.send(message)

    def _set_state(self, phase: str, nbytes: int) -> None:
        is_news = phase != self._state[0]
        self._state = (phase, nbytes)
        if is_news:
            with contextlib.suppress(OSError):
                self._channel.send_if_writable(Heartbeat(phase, nbytes))

    def _send_heartbeats(self) -> None:
        while not self._ended.wait(self._config.heartbeat_secs):
            with contextlib.suppress(OSError):
                self._channel.send_if_writable(Heartbeat(*self._state))
            if self._is_process and os.getppid() != self._config.parent_pid:
                # The training process has ended, but there is no end of file if a child of it has
                # inherited its end of the channel.
                self._channel.shut_down()

    def _release_all(self) -> None:
        if self._hub is not None:
            self._participant.linger(_LINGER_SECS)
        self._participant.close()
        if self._hub is not None:
            self._hub.close()
        for arena in self._arenas.values():
            arena.leave()
        self._channel.close()


def _give_up_failure(message: str) -> RankFailure:
    return describe_failure(AsyncSaveError(message))
