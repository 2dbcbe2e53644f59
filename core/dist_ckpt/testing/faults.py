"""Disks that fail, hang, tear and lie, and processes that die: on purpose, at a chosen moment.

Here: ``FaultyStore``, ``faulty_stores`` for all stores of this process, ``KillSwitch`` and
``kill_after`` for processes. Not here: what must hold then (your tests), crash points
(``testing.crashes``). Called by tests, in the process on trial; see docs/guides/testing.md.

Sweep a fault over a save, until the save is through before the fault comes::

    for n in itertools.count(1):
        with faulty_stores(fail_at=n) as plan:
            error = attempt_to_save()
        if not plan.fired:
            break
        assert isinstance(error, StorageError)
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

from dist_ckpt.storage.base import Extent
from dist_ckpt.storage.checksums import sum_of
from dist_ckpt.storage.resolve import wrapped_stores
from dist_ckpt.testing._fault_plan import READS, WRITES, Call, FaultPlan, Mode

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from dist_ckpt.events import Event
    from dist_ckpt.storage import FileWriter, Store
    from dist_ckpt.storage.checksums import FileSum

__all__ = [
    "READS",
    "WRITES",
    "Call",
    "FaultPlan",
    "FaultyStore",
    "Kill",
    "KillSwitch",
    "Mode",
    "faulty_stores",
    "kill_after",
]


class FaultyStore:
    """A store of which one operation goes wrong.

    Args:
        store: What works.
        fail_at: See ``FaultPlan``; further arguments likewise.
        mode: See ``FaultPlan``.
        plan: Shared with other stores, in place of the arguments above.
        more: See ``FaultPlan``.
    """

    def __init__(
        self,
        store: Store,
        fail_at: int | None = None,
        mode: Mode = "fail",
        *,
        plan: FaultPlan | None = None,
        **more: Any,
    ) -> None:
        """Remember both; nothing is counted yet."""
        self._store = store
        self.plan = plan or FaultPlan(fail_at, mode, **more)

    def __repr__(self) -> str:
        """Name the store behind."""
        return f"FaultyStore({self._store!r})"

    def _raise_if_torn(self, operation: str, name: str) -> None:
        if self.plan.mode == "tear":
            raise self.plan.error(operation, name)

    def writer(self, name: str, *, nbytes: int) -> FileWriter:
        """Create ``name``; there is no half of it: what would tear or lie fails."""
        if self.plan.strikes("writer", name):
            raise self.plan.error("writer", name)
        return _FaultyWriter(self._store.writer(name, nbytes=nbytes), name, nbytes, self.plan)

    def write(self, name: str, extents: Iterable[Extent], *, nbytes: int) -> FileSum:
        """Create ``name``; or its first half, or nothing."""
        if not self.plan.strikes("write", name):
            return self._store.write(name, extents, nbytes=nbytes)
        return self._create_badly("write", name, _image(extents, nbytes))

    def create(self, name: str, data: bytes) -> FileSum:
        """Create ``name``; or its first half, or nothing."""
        if not self.plan.strikes("create", name):
            return self._store.create(name, data)
        return self._create_badly("create", name, data)

    def _create_badly(self, operation: str, name: str, data: bytes) -> FileSum:
        if self.plan.mode != "lie":
            self._store.create(name, data[: len(data) // 2])
        self._raise_if_torn(operation, name)
        return sum_of(data)

    def read(self, name: str, *, max_nbytes: int) -> bytes:
        """Return a file; or its first half, or another one."""
        strikes = self.plan.strikes("read", name)
        data = self._store.read(name, max_nbytes=max_nbytes)
        if not strikes:
            return data
        self._raise_if_torn("read", name)
        return data[: len(data) // 2] if self.plan.mode == "cut" else _other(data)

    def read_ranges(self, name: str, extents: Sequence[Extent]) -> None:
        """Fill buffers; or the first half of each, or with other bytes."""
        if not self.plan.strikes("read_ranges", name):
            self._store.read_ranges(name, extents)
            return
        for extent in extents:
            view = memoryview(extent.buffer).cast("B")
            if self.plan.mode == "lie":
                self._store.read_ranges(name, [extent])
                view[:] = _other(bytes(view))
            else:
                half = view[: view.nbytes // 2]
                self._store.read_ranges(name, [Extent(extent.position, half)])
        self._raise_if_torn("read_ranges", name)

    def list(self) -> list[str]:
        """Return the names; or half of them, or none."""
        strikes = self.plan.strikes("list", "")
        names = self._store.list()
        if not strikes:
            return names
        self._raise_if_torn("list", "")
        return names[: len(names) // 2] if self.plan.mode == "cut" else []

    def delete(self, name: str) -> None:
        """Remove ``name``; or do not."""
        if not self.plan.strikes("delete", name):
            self._store.delete(name)
        else:
            self._raise_if_torn("delete", name)

    def nbytes(self, name: str) -> int | None:
        """Return the size; or another one, or that it is not there."""
        strikes = self.plan.strikes("nbytes", name)
        found = self._store.nbytes(name)
        if not strikes:
            return found
        self._raise_if_torn("nbytes", name)
        return None if self.plan.mode == "lie" or found is None else found // 2


class _FaultyWriter:
    """A file under way, of which one operation goes wrong."""

    def __init__(self, writer: FileWriter, name: str, nbytes: int, plan: FaultPlan) -> None:
        self._writer, self._name, self._plan = writer, name, plan
        # A liar claims to have written what it was given: the sums must be those.
        self._asked = bytearray(nbytes) if plan.mode in ("cut", "lie") else None
        self._has_lied = False

    def write_at(self, position: int, data: memoryview) -> None:
        view = data.cast("B") if data.nbytes else data
        if self._asked is not None:
            self._asked[position : position + view.nbytes] = view
        if not self._plan.strikes("write_at", self._name):
            self._writer.write_at(position, data)
            return
        if self._plan.mode != "lie":
            self._writer.write_at(position, view[: view.nbytes // 2])
        if self._plan.mode == "tear":
            raise self._plan.error("write_at", self._name)
        self._has_lied = True

    def finish(self) -> FileSum:
        if self._plan.strikes("finish", self._name):
            self._writer.abandon()
            if self._plan.mode == "tear" or self._asked is None:
                raise self._plan.error("finish", self._name)
            return sum_of(bytes(self._asked))
        found = self._writer.finish()
        return sum_of(bytes(self._asked)) if self._has_lied and self._asked is not None else found

    def abandon(self) -> None:
        self._writer.abandon()


def _image(extents: Iterable[Extent], nbytes: int) -> bytes:
    found = bytearray(nbytes)
    for extent in extents:
        view = memoryview(extent.buffer).cast("B")
        found[extent.position : extent.position + view.nbytes] = view
    return bytes(found)


def _other(data: bytes) -> bytes:
    """Return as many bytes, of which the one in the middle is another one."""
    middle = len(data) // 2
    return (
        data[:middle]
        + bytes(byte ^ 0x10 for byte in data[middle : middle + 1])
        + data[middle + 1 :]
    )


@contextlib.contextmanager
def faulty_stores(
    fail_at: int | None = None, mode: Mode = "fail", **more: Any
) -> Iterator[FaultPlan]:
    """Put a ``FaultyStore`` in front of every store that this process opens meanwhile.

    All share one plan. What reads and writes files without a store (TensorStore, the renames of a
    commit) is not reached. At the end, what hangs is released.

    Args:
        fail_at: See ``FaultPlan``.
        mode: See ``FaultPlan``.
        more: See ``FaultPlan``.
    """
    plan = FaultPlan(fail_at, mode, **more)
    try:
        with wrapped_stores(lambda store, _: FaultyStore(store, plan=plan)):
            yield plan
    finally:
        plan.release()


class KillSwitch:
    """Ends this process by SIGKILL, at an operation of its stores or at an event of its saves.

    Args:
        fail_at: At which operation, see ``FaultPlan``; takes effect within ``armed``.
        event: At the first event of this name, such as ``"Written"``: give the switch to the saver
            as one of its sinks.
        more: See ``FaultPlan``.
    """

    def __init__(
        self, fail_at: int | None = None, *, event: str | None = None, **more: Any
    ) -> None:
        """Wait for the moment."""
        self._fail_at, self._event, self._more = fail_at, event, more

    @contextlib.contextmanager
    def armed(self) -> Iterator[FaultPlan]:
        """Count the operations of all stores that this process opens meanwhile."""
        with faulty_stores(self._fail_at, "kill", **self._more) as plan:
            yield plan

    def emit(self, event: Event) -> None:
        """Take an event of a save, and die of it if it is the one."""
        if type(event).__name__ == self._event:
            os.kill(os.getpid(), signal.SIGKILL)


class Kill:
    """What became of a process that ``kill_after`` watches.

    Attributes:
        at: When it was killed, by ``time.monotonic``; None as long as it was not.
    """

    def __init__(self) -> None:
        """Nothing has happened yet."""
        self.at: float | None = None
        self._done = threading.Event()

    def wait(self, timeout_secs: float) -> bool:
        """Wait until it is killed; False if it is not in time."""
        return self._done.wait(timeout_secs)

    def strike(self, process: int) -> None:
        """Kill it, given its file descriptor; nothing happens if it has ended."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(process, signal.SIGKILL)
            self.at = time.monotonic()
            self._done.set()


@contextlib.contextmanager
def kill_after(pid: int, secs: float) -> Iterator[Kill]:
    """Kill another process ``secs`` after the block was entered, unless the block ends before.

    Args:
        pid: The process; nothing happens if it has ended, and never to another one with its number.
        secs: When; a random number makes a random moment.

    Yields:
        Whether and when it was killed.
    """
    is_over, kill = threading.Event(), Kill()
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        yield kill
        return

    def act() -> None:
        if not is_over.wait(secs):
            kill.strike(process)

    thread = threading.Thread(target=act, name="dist_ckpt-kill", daemon=True)
    thread.start()
    try:
        yield kill
    finally:
        is_over.set()
        thread.join()
        os.close(process)
