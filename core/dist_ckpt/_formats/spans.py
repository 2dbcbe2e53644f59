"""Many pieces of a file into memory, compared with checksums on the way.

Here: how pieces of any size become few reads: whole blocks straight to where they belong, all else
through a window of the file. Not here: which pieces (``_sharding``), which files have checksums
(``_formats.verification``). Runs in transfer threads; a window is one thread's at a time.
"""

from __future__ import annotations

import ctypes
import threading
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from dist_ckpt.errors import CorruptedCheckpointError
from dist_ckpt.storage import Extent, Store
from dist_ckpt.storage.checksums import BLOCK_NBYTES, FileSum, digest

__all__ = ["READ_NBYTES", "Source", "Spans", "Windows", "problem_of"]

READ_NBYTES = 4 * BLOCK_NBYTES
"""Bytes of one read that is compared: many enough that the call costs nothing beside them, few
enough that they are in the processor's cache then."""

_GAP_NBYTES = 4096
"""What one more read costs, in bytes read along, where nothing has to be compared."""

_DIRECT_NBYTES = 1 << 16
"""From this size on a piece is read on its own, where nothing has to be compared."""

_IDLE_WINDOWS = 8
_POISON = b"\xff" * BLOCK_NBYTES
_HINT = "the file was altered after it was written; use another checkpoint."

_copy = ctypes.PyDLL(None).memmove
"""Copies without letting go of the interpreter's lock: that takes longer than a small piece."""
_copy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_copy.restype = None


@dataclass(frozen=True, slots=True, eq=False)
class Spans:
    """Bytes of one file and where they go, column by column; best in the order of the file.

    Columns are of Python's own numbers: those of arrays take longer one by one (``tolist``).

    Attributes:
        positions: First byte in the file.
        nbytes: How many.
        addresses: Where in memory; the caller keeps that alive, and nobody else uses it.
    """

    positions: Sequence[int]
    nbytes: Sequence[int]
    addresses: Sequence[int]


class Window:
    """A stretch of a file in memory: ``start`` to ``stop`` of ``name``, compared already."""

    __slots__ = ("_memory", "address", "name", "start", "stop", "view")

    def __init__(self) -> None:
        """Take memory; nothing is in it."""
        self._memory = bytearray(READ_NBYTES)
        self.view = memoryview(self._memory)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self.name, self.start, self.stop = "", 0, 0

    def forget(self) -> None:
        """Have nothing in it."""
        self.name, self.start, self.stop = "", 0, 0


class Windows:
    """The windows of one checkpoint, lent to one thread each; neighbours in a file share blocks."""

    def __init__(self) -> None:
        """Have none yet."""
        self._lock = threading.Lock()
        self._idle: list[Window] = []  # the longest unused first

    def take(self, name: str, position: int) -> Window:
        """Return a window for reading ``name`` from ``position`` on: with that in it, if any."""
        with self._lock:
            for number, one in enumerate(self._idle):
                if one.name == name and one.start <= position < one.stop:
                    return self._idle.pop(number)
            return self._idle.pop(0) if len(self._idle) >= _IDLE_WINDOWS else Window()

    def give(self, window: Window) -> None:
        """Take a window back."""
        with self._lock:
            self._idle.append(window)


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """A file that is read.

    Attributes:
        name: In the checkpoint.
        told: For messages.
        sums: Its checksums; None if it has none.
        store: Has it.
    """

    name: str
    told: str
    sums: FileSum | None
    store: Store

    def fill(self, spans: Spans, window: Window) -> None:
        """Put all bytes of ``spans`` where they belong.

        Raises:
            CorruptedCheckpointError: A checksum is wrong, or the file is too short; what was read
                straight to where it belongs is overwritten with ones then.
            StorageError: It cannot be read.
        """
        if window.name != self.name or self.sums is None:
            window.forget()
            window.name = self.name
        start, stop, base = window.start, window.stop, window.address - window.start
        columns = zip(spans.positions, spans.nbytes, spans.addresses, strict=True)
        for number, (position, nbytes, address) in enumerate(columns):
            if start <= position and position + nbytes <= stop:
                _copy(address, base + position, nbytes)
            else:
                self._fill_one(spans, number, window)
                start, stop, base = window.start, window.stop, window.address - window.start

    def _fill_one(self, spans: Spans, number: int, window: Window) -> None:
        """Put the bytes of a span where they belong that are not all in the window."""
        position, address = spans.positions[number], spans.addresses[number]
        stop = position + spans.nbytes[number]
        if self.sums is not None and not 0 <= position <= stop <= self.sums.nbytes:
            raise CorruptedCheckpointError(
                f"{self.told}: bytes {position} to {stop} of a file of {self.sums.nbytes}."
            )
        while position < stop:
            if window.start <= position < window.stop:
                count = min(stop, window.stop) - position
                ctypes.memmove(address, window.address + position - window.start, count)
            elif count := self._direct(position, stop):
                self._read(position, _memory_at(address, count))
            else:
                self._load(spans, number, position, window)
                continue
            position, address = position + count, address + count

    def _direct(self, position: int, stop: int) -> int:
        """Return how many bytes from ``position`` on are read straight to where they belong."""
        count = stop - position
        if self.sums is None:
            return count if count >= _DIRECT_NBYTES else 0
        if position % BLOCK_NBYTES:
            return 0
        if stop == self.sums.nbytes:
            return min(count, READ_NBYTES)
        return min(count // BLOCK_NBYTES * BLOCK_NBYTES, READ_NBYTES)

    def _load(self, spans: Spans, number: int, position: int, window: Window) -> None:
        """Let the window begin at ``position``, or at the block that it is in."""
        window.start = window.stop = 0
        if self.sums is None:
            start, stop = position, _reach(spans, number, position)
        else:
            start = position // BLOCK_NBYTES * BLOCK_NBYTES
            stop = _blocks_from(spans, number, start, self.sums.nbytes)
        self._read(start, window.view[: stop - start])
        window.start, window.stop = start, stop

    def _read(self, position: int, view: memoryview) -> None:
        self.store.read_ranges(self.name, (Extent(position, view),))
        if self.sums is not None:
            self._compare(self.sums, position // BLOCK_NBYTES, view)

    def _compare(self, sums: FileSum, number: int, view: memoryview) -> None:
        starts = range(0, view.nbytes, BLOCK_NBYTES)
        found = tuple([digest(view[at : at + BLOCK_NBYTES]) for at in starts])
        if found == sums.some(number, len(found)):
            return
        problems = []
        for at, one in zip(starts, found, strict=True):
            block = view[at : at + BLOCK_NBYTES]
            again = None if one == sums.block(number) else self._again(sums, number, block)
            if again is not None:
                problems.append(problem_of(self.told, sums, number, again))
                block[:] = _POISON[: block.nbytes]
            number += 1
        if problems:
            raise CorruptedCheckpointError(f"{problems[0]}.", hint=_HINT)

    def _again(self, sums: FileSum, number: int, block: memoryview) -> int | None:
        """Read a block anew where nobody else writes; return its checksum if that is wrong, too.

        Somebody may share the caller's memory, as another tensor of the same request does that is a
        view of it: such a file is not damaged.
        """
        data = bytearray(block.nbytes)
        self.store.read_ranges(self.name, (Extent(number * BLOCK_NBYTES, memoryview(data)),))
        found = digest(data)
        if found != sums.block(number):
            return found
        block[:] = data
        return None


def _memory_at(address: int, nbytes: int) -> memoryview:
    return memoryview((ctypes.c_ubyte * nbytes).from_address(address)).cast("B")


def _reach(spans: Spans, number: int, position: int) -> int:
    """Return up to where one read serves this span and small ones behind it."""
    stop = spans.positions[number] + spans.nbytes[number]
    for after in range(number + 1, len(spans.positions)):
        begin, end = spans.positions[after], spans.positions[after] + spans.nbytes[after]
        is_near = position <= begin <= stop + _GAP_NBYTES and end - begin < _DIRECT_NBYTES
        if not is_near or end - position > READ_NBYTES:
            break
        stop = max(stop, end)
    return stop


def _blocks_from(spans: Spans, number: int, start: int, nbytes: int) -> int:
    """Return where the blocks end that begin at ``start`` and are each wanted in part, not whole.

    Args:
        spans: What is wanted.
        number: The span that wants the first of them.
        start: Where that block begins.
        nbytes: Size of the file.
    """
    positions, sizes = spans.positions, spans.nbytes
    stop, after = min(start + BLOCK_NBYTES, nbytes), number + 1
    while stop < nbytes and stop - start < READ_NBYTES:
        after = bisect_left(positions, stop, after)  # the first span that begins behind it
        last = positions[after - 1] + sizes[after - 1]
        is_begun = stop < last < stop + BLOCK_NBYTES
        is_near = after < len(positions) and positions[after] < stop + BLOCK_NBYTES
        if last >= stop + BLOCK_NBYTES or not (is_begun or is_near):
            break
        stop = min(stop + BLOCK_NBYTES, nbytes)
    return stop


def problem_of(told: str, sums: FileSum, number: int, found: int) -> str:
    """Return what is wrong with a block: its file, its place, both checksums."""
    start, nbytes = sums.extent(number)
    return (
        f"{told}: bytes {start} to {start + nbytes} have the checksum {found:016x}, "
        f"{sums.block(number):016x} is expected"
    )
