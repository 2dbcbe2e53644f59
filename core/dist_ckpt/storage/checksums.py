"""Checksums of files, block by block.

Here: the algorithm, the checksums of one file, and computing them while a file is written. Not
here: where they are stored (``_formats.manifest``), who compares them (``_formats.verification``).
No torch: the process that writes in the background uses this too.

XXH3 (64 bits, Yann Collet's xxHash 0.8) of each block of ``BLOCK_NBYTES``: it is faster than memory
is copied, and a block is small enough that reading a part of a file reads little more to compare.
It detects damage, not tampering: whoever can change a file can change its checksums too.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from xxhash import xxh3_64, xxh3_64_intdigest

if TYPE_CHECKING:
    from pathlib import Path

__all__ = [
    "ALGORITHM",
    "BLOCK_NBYTES",
    "BlockSums",
    "FileSum",
    "digest",
    "read_at",
    "sum_of",
    "sum_of_file",
]

ALGORITHM = "xxh3_64"
BLOCK_NBYTES = 1 << 18
_SUM = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class FileSum:
    """A file's size, and the checksums of its blocks.

    Attributes:
        nbytes: Size of the file.
        blocks: One little-endian 64-bit number for each ``BLOCK_NBYTES``; the last block may be
            shorter. Empty for an empty file.
    """

    nbytes: int
    blocks: bytes

    def __post_init__(self) -> None:
        """Refuse checksums that do not belong to a file of this size.

        Raises:
            ValueError: There are more or fewer blocks.
        """
        if len(self.blocks) != _SUM.size * -(-self.nbytes // BLOCK_NBYTES):
            raise ValueError(
                f"{len(self.blocks)} bytes of checksums for a file of {self.nbytes} bytes"
            )

    def block(self, number: int) -> int:
        """Return the checksum of a block."""
        found: int = _SUM.unpack_from(self.blocks, number * _SUM.size)[0]
        return found

    def some(self, number: int, count: int) -> tuple[int, ...]:
        """Return the checksums of ``count`` blocks from ``number`` on."""
        return struct.unpack_from(f"<{count}Q", self.blocks, number * _SUM.size)

    def extent(self, number: int) -> tuple[int, int]:
        """Return the position of a block in the file, and its size."""
        start = number * BLOCK_NBYTES
        return start, min(BLOCK_NBYTES, self.nbytes - start)


def digest(data: bytes | bytearray | memoryview) -> int:
    """Return the checksum of some bytes."""
    return xxh3_64_intdigest(data)


def sum_of(data: bytes | bytearray | memoryview) -> FileSum:
    """Return the sums of a whole file in memory."""
    view = memoryview(data).cast("B")
    starts = range(0, view.nbytes, BLOCK_NBYTES)
    blocks = b"".join(_SUM.pack(digest(view[start : start + BLOCK_NBYTES])) for start in starts)
    return FileSum(view.nbytes, blocks)


def sum_of_file(path: Path) -> FileSum:
    """Return the checksums of a file, which is read for that.

    Raises:
        OSError: It cannot be read.
    """
    buffer = memoryview(bytearray(BLOCK_NBYTES))
    blocks, nbytes = [], 0
    with path.open("rb", buffering=0) as file:
        while count := _fill(file.readinto, buffer):
            blocks.append(_SUM.pack(digest(buffer[:count])))
            nbytes += count
    return FileSum(nbytes, b"".join(blocks))


def _fill(read: Callable[[memoryview], int | None], buffer: memoryview) -> int:
    done = 0
    while done < buffer.nbytes and (count := read(buffer[done:])):
        done += count
    return done


class BlockSums:
    """Computes the checksums of a file while it is written, in whatever order.

    Bytes of a block that are written consecutively are added as they come. A block that is written
    in another order is read back when the file is complete.
    """

    def __init__(self) -> None:
        """Start with no block."""
        self._sums: dict[int, tuple[int, int]] = {}  # block -> how many bytes, their checksum
        self._again: set[int] = set()
        self._open: xxh3_64 | None = None
        self._number, self._end = -1, -1

    def add(self, position: int, data: memoryview) -> None:
        """Add bytes that are written at ``position``; no byte may be written twice."""
        for number, inside, piece in _pieces(position, data):
            if piece.nbytes == BLOCK_NBYTES:
                self._sums[number] = BLOCK_NBYTES, digest(piece)
            else:
                self._add_piece(number, inside, piece)

    def _add_piece(self, number: int, inside: int, piece: memoryview) -> None:
        if (number, inside) != (self._number, self._end):
            self._close()
            if inside or number in self._sums:
                self._again.add(number)
                return
            self._open, self._number, self._end = xxh3_64(), number, 0
        if self._open is not None:
            self._open.update(piece)
            self._end += piece.nbytes

    def _close(self) -> None:
        if self._open is not None:
            self._sums[self._number] = self._end, self._open.intdigest()
        self._open, self._number, self._end = None, -1, -1

    def finish(self, nbytes: int, read: Callable[[int, int], bytes]) -> FileSum:
        """Return the checksums of the complete file.

        Args:
            nbytes: Its size.
            read: Reads from the file; takes a position and a number of bytes.
        """
        self._close()
        blocks = []
        for number, start in enumerate(range(0, nbytes, BLOCK_NBYTES)):
            expected = min(BLOCK_NBYTES, nbytes - start)
            count, found = self._sums.get(number, (0, 0))
            if count != expected or number in self._again:
                found = digest(read(start, expected))
            blocks.append(_SUM.pack(found))
        return FileSum(nbytes, b"".join(blocks))


def _pieces(position: int, data: memoryview) -> Iterator[tuple[int, int, memoryview]]:
    """Cut bytes at the borders of blocks: number of the block, position inside, bytes."""
    done = 0
    while done < data.nbytes:
        number, inside = divmod(position + done, BLOCK_NBYTES)
        piece = data[done : done + BLOCK_NBYTES - inside]
        yield number, inside, piece
        done += piece.nbytes


def read_at(descriptor: int, position: int, nbytes: int) -> bytes:
    """Return bytes of an open file; fewer if it ends before."""
    parts = []
    while nbytes and (part := os.pread(descriptor, nbytes, position)):
        parts.append(part)
        position, nbytes = position + len(part), nbytes - len(part)
    return b"".join(parts)
