"""The worker's life: hear messages, write one save after the other, agree on each.

Here: ``WorkerLoop``, the same for a worker process and a worker thread. Not here: how a process
gets here (``main``), what the training process does (``link``).

Three threads: the reader takes messages and never waits for anything else; the writer takes saves
in the order they were begun; heartbeats tell how far it is. When the training process is gone, what
is all staged is finished and committed, and the rest is given up.
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
"""How long the hub outlives the last save, until all ranks have heard how it ended."""
_STAGING_SECS = 1800.0
"""How long to wait for the next staged bytes of a save without a commit point."""
_IDLE = "waiting for a save"


class WorkerLoop:
    """Serves one training process until that ends, or says so.

    Args:
        channel: The worker's end.
        config: Whose worker it is.
        is_process: Whether this process is the worker's own.
    """

    def __init__(self, channel: Channel, config: Configure, *, is_process: bool) -> None:
        """Nothing runs yet."""
        self._channel, self._config, self._is_process = channel, config, is_process
        self._participant = CommitParticipant()
        self._hub: Hub | None = None
        self._arenas: dict[int, MappedArena] = {}
        self._saves: dict[int, StagedSave] = {}
        self._queue: queue.SimpleQueue[StagedSave | None] = queue.SimpleQueue()
        self._state = (_IDLE, 0)
        self._ended = threading.Event()

    def run(self) -> None:
        """Serve until the end. The reader is the thread that calls this."""
        name = f"dist_ckpt-worker-{self._config.rank}"
        threads = [
            threading.Thread(target=self._write_all, name=f"{name}-writer", daemon=True),
            threading.Thread(target=self._beat, name=f"{name}-heart", daemon=True),
        ]
        for thread in threads:
            thread.start()
        reason = "the worker failed"
        try:
            self._tell(Hello(os.getpid()))
            reason = self._read_all()
        finally:
            for save in list(self._saves.values()):
                if not save.is_all_staged:
                    save.abandon(_failure(reason))
            self._queue.put(None)
            threads[0].join()
            self._ended.set()
            threads[1].join()
            self._let_go()

    # -- the reader --------------------------------------------------------------------------------

    def _read_all(self) -> str:
        """Take messages; return why there are no more."""
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
            tell=self._tell,
            note=self._note,
            timeout_secs=begin.point.timeout_secs if begin.point else _STAGING_SECS,
        )
        if begin.arena_key is not None and arena is None:
            save.abandon(_failure(f"arena {begin.arena_key} could not be mapped in the worker"))
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
                self._tell(HubServed(None, str(error)))
                return
        self._tell(HubServed(self._hub.address))

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
                self._tell(
                    Ended(save.begin.number, error=AsyncSaveError("the worker cannot go on"))
                )
            finally:
                self._note(_IDLE, 0)
                if self._is_process:
                    gc.enable()
                    gc.collect()
            del save

    def _serve(self, save: StagedSave) -> None:
        """Write one save and agree on it; whatever happens, the training process is told."""
        begin, timings = save.begin, {"begun": time.time()}
        if self._is_process:  # one save is written at a time
            os.umask(begin.umask)
        order, report, failure = self._written(save, timings)
        save.release()
        failure = save.failure or failure
        now = time.time()
        if failure is None:
            timings["written"] = now
        self._tell(Written(begin.number, now - timings["begun"], dict(timings), save.nbytes))
        error: CheckpointingException | None = None
        packed = b""
        try:
            if begin.commits:
                self._note(f"committing {begin.target}", 0)
                self._participant.commit(begin.point, order, report, failure)
                timings["committed"] = time.time()
            elif failure is not None:
                raise merged_error(f"writing {begin.target}", {self._config.rank: failure}, None)
            else:
                packed = pickle.dumps(report)
        except BaseException as caught:  # noqa: BLE001 - told to the training process
            error = self._of_our_tree(caught, begin.target)
        self._saves.pop(begin.number, None)
        self._tell(Ended(begin.number, packed, error, order is not None, dict(timings)))

    def _written(
        self, save: StagedSave, timings: dict[str, float]
    ) -> tuple[Order | None, Any, RankFailure | None]:
        """Carry out the order; return it, its report, and what failed."""
        begin = save.begin
        order: Order | None = None
        try:
            self._note(f"beginning {begin.target}", 0)
            if begin.commits:
                self._participant.connect(begin.point)
            # Made by this worker's own parent, see the module `orders`.
            order = pickle.loads(begin.order)  # noqa: S301 - see above
            assert order is not None  # noqa: S101 - for the type checker
            save.progress("writing", 0)
            timings["first_write"] = time.time()
            return order, order.write(save), None
        except BaseException as error:  # noqa: BLE001 - told to all ranks
            return order, None, describe_failure(error)

    def _of_our_tree(self, error: BaseException, target: str) -> CheckpointingException:
        with contextlib.suppress(Exception):
            if isinstance(error, CheckpointingException) and pickle.dumps(error):
                return error
        failures = {self._config.rank: describe_failure(error)}
        return merged_error(f"committing {target}", failures, None)

    # -- both --------------------------------------------------------------------------------------

    def _tell(self, message: object) -> None:
        with contextlib.suppress(OSError):  # the training process is gone: nobody to tell
            self._channel.send(message)

    def _note(self, phase: str, nbytes: int) -> None:
        is_news = phase != self._state[0]
        self._state = (phase, nbytes)
        if is_news:
            with contextlib.suppress(OSError):
                self._channel.send_if_writable(Heartbeat(phase, nbytes))

    def _beat(self) -> None:
        while not self._ended.wait(self._config.heartbeat_secs):
            with contextlib.suppress(OSError):
                self._channel.send_if_writable(Heartbeat(*self._state))
            if self._is_process and os.getppid() != self._config.parent_pid:
                # A child of the training process may have inherited the other end of the channel:
                # then there is no end of file when the training process ends.
                self._channel.shut_down()

    def _let_go(self) -> None:
        if self._hub is not None:
            self._participant.linger(_LINGER_SECS)
        self._participant.close()
        if self._hub is not None:
            self._hub.close()
        for arena in self._arenas.values():
            arena.leave()
        self._channel.close()


def _failure(message: str) -> RankFailure:
    return describe_failure(AsyncSaveError(message))
