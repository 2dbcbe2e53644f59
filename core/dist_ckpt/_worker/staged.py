"""A save as the worker sees it: mapped staging memory, and the runs that are staged so far.

Here: ``MappedArena``, ``StagedSave`` (the ``Staged`` of an order). Not here: other messages
(``loop``), what is done with the bytes (``orders``). Runs in the worker: the reader thread adds
runs, the writer thread takes them.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
from collections import deque
from typing import TYPE_CHECKING

from dist_ckpt._worker.messages import Abandon, AllStaged, Freed, StagedRun
from dist_ckpt._worker.orders import AbandonedError
from dist_ckpt.errors import BarrierTimeoutError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dist_ckpt._staging_pool.runs import Run
    from dist_ckpt._worker.messages import Begin
    from dist_ckpt.errors import RankFailure

__all__ = ["MappedArena", "StagedSave"]


class MappedArena:
    """An arena of the training process, mapped read-only in the worker.

    Reference counted: the loop's table holds one reference, each save that is staged in it another.
    The last ``leave`` unmaps it.

    Args:
        descriptor: Its file; owned by this object from now on, also if mapping fails.
        nbytes: Its size.
    """

    def __init__(self, descriptor: int, nbytes: int) -> None:
        """Map it, with one reference."""
        self.descriptor = descriptor
        self._lock = threading.Lock()
        self._num_users = 1
        self._map: mmap.mmap | None = None
        try:
            if nbytes:
                self._map = mmap.mmap(descriptor, nbytes, prot=mmap.PROT_READ)
        except BaseException:
            os.close(descriptor)
            raise

    def join(self) -> None:
        """Add a reference."""
        with self._lock:
            self._num_users += 1

    def leave(self) -> None:
        """Remove a reference; the last one unmaps the arena."""
        with self._lock:
            self._num_users -= 1
            if self._num_users:
                return
        if self._map is not None:
            with contextlib.suppress(BufferError):  # a view is still alive: its end unmaps
                self._map.close()
        self._map = None
        os.close(self.descriptor)

    def view(self, nbytes: int) -> memoryview:
        """Return its first ``nbytes`` bytes; valid until the last ``leave``."""
        return memoryview(b"" if self._map is None else self._map)[:nbytes]


class StagedSave:
    """One save, from its ``Begin`` to its end.

    Args:
        begin: The message that announced it.
        arena: Where it is staged; None for a save without bytes.
        send: Sends a message to the training process, if that is there.
        set_state: Sets phase and bytes for the heartbeats.
        timeout_secs: How long to wait for the next run.
    """

    def __init__(
        self,
        begin: Begin,
        arena: MappedArena | None,
        *,
        send: Callable[[object], None],
        set_state: Callable[[str, int], None],
        timeout_secs: float,
    ) -> None:
        """Nothing is staged yet."""
        self.begin = begin
        self.arena = arena
        if arena is not None:
            arena.join()
        self.failure: RankFailure | None = None
        self.is_all_staged = False
        self.nbytes = 0  # written so far
        self._send, self._set_state, self._timeout_secs = send, set_state, timeout_secs
        self._view: memoryview | None = None
        self._runs: deque[Run] = deque()
        self._is_stopped = False
        self._changed = threading.Condition()

    # -- called by the order ----------------------------------------------------------------------

    def memory(self) -> memoryview:
        """Return the arena's bytes; not to be used after ``Order.write`` has returned."""
        if self._view is None:
            view = memoryview(b"") if self.arena is None else self.arena.view(self.begin.nbytes)
            self._view = view
        return self._view[:]

    def descriptor(self) -> int:
        """Return the arena's file, which stays owned by the arena; -1 for a save without bytes."""
        return -1 if self.arena is None else self.arena.descriptor

    def runs(self) -> Iterator[Run]:
        """Yield each run once it is staged."""
        while (run := self._next_run()) is not None:
            yield run

    def stop(self) -> None:
        """End ``runs`` early: nothing more will be written."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()

    def freed(self, run: Run) -> None:
        """Tell the training process that these bytes may be overwritten."""
        self._send(Freed(self.begin.number, run))

    def progress(self, phase: str, nbytes: int) -> None:
        """Set what is being done, and how many bytes are done in all."""
        self.nbytes = nbytes
        self._set_state(f"{phase} {self.begin.target}", nbytes)

    # -- called by the loop -----------------------------------------------------------------------

    def take(self, message: StagedRun | AllStaged | Abandon) -> None:
        """Handle a message of the training process about this save."""
        match message:
            case StagedRun():
                with self._changed:
                    self._runs.append(message.run)
                    self._changed.notify_all()
            case AllStaged():
                with self._changed:
                    self.is_all_staged = True
                    self._changed.notify_all()
            case Abandon():
                self.abandon(message.failure)

    def abandon(self, failure: RankFailure) -> None:
        """Note that the save must not be committed; the first failure stays."""
        with self._changed:
            self.failure = self.failure or failure
            self._changed.notify_all()

    def release(self) -> None:
        """Release the memory; call it before the training process is sent ``Written``."""
        if self._view is not None:
            with contextlib.suppress(BufferError):
                self._view.release()
        self._view = None
        if self.arena is not None:
            self.arena.leave()
        self.arena = None

    def _next_run(self) -> Run | None:
        with self._changed:
            is_ready = self._changed.wait_for(
                lambda: self._runs or self.is_all_staged or self.failure or self._is_stopped,
                self._timeout_secs,
            )
            if self.failure is not None:
                raise AbandonedError(self.failure.message, failure=self.failure)
            if not is_ready:
                raise BarrierTimeoutError(
                    f"{self.begin.target}: the training process has staged nothing for "
                    f"{self._timeout_secs:g} s.",
                    hint="it is stuck while it copies.",
                )
            return self._runs.popleft() if self._runs and not self._is_stopped else None
