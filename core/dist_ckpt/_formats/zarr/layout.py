"""How the elements of a cell lie in its file: as they do in a tensor.

Here: pure functions: the box that a file holds row by row, and the index at the end of a v3 shard.
Not here: which cells there are (``grid``), writing and reading them (``write``, ``read``). Formats:
the zarr v3 specification, its sharding codec; CRC-32C as RFC 3720 has it.

Inner chunks of a shard that are runs of rows, one behind the other, are the shard row by row. So
files need no library to be written or read: they are a tensor's bytes, and an index.
"""

from __future__ import annotations

import struct

__all__ = ["crc32c", "is_by_rows", "shard_index", "stored_extents"]

_ABSENT = struct.pack("<QQ", (1 << 64) - 1, (1 << 64) - 1)
_ENTRY = struct.Struct("<QQ")
_POLYNOMIAL = 0x82F63B78


def _entry(byte: int) -> int:
    for _ in range(8):
        byte = byte >> 1 ^ _POLYNOMIAL if byte & 1 else byte >> 1
    return byte


_TABLE = tuple(map(_entry, range(256)))


def is_by_rows(cell: tuple[int, ...], inner: tuple[int, ...]) -> bool:
    """Whether inner chunks, one behind the other, are the cell row by row."""
    cut = [axis for axis, (c, i) in enumerate(zip(cell, inner, strict=True)) if i != c]
    return not cut or all(n == 1 for n in inner[: cut[-1]])


def stored_extents(extent: tuple[int, ...], inner: tuple[int, ...]) -> tuple[int, ...]:
    """Return what a file holds for ``extent`` elements of a tensor: inner chunks are never cut."""
    return tuple(-(-n // i) * i for n, i in zip(extent, inner, strict=True))


def shard_index(
    cell: tuple[int, ...], inner: tuple[int, ...], extent: tuple[int, ...], itemsize: int
) -> bytes:
    """Return the index of a shard that has its inner chunks one behind the other, in order.

    Args:
        cell: Extents of the shard.
        inner: Those of its inner chunks.
        extent: How far the tensor reaches into the shard; chunks beyond are not there.
        itemsize: Bytes of an element.
    """
    nbytes = itemsize
    for n in inner:
        nbytes *= n
    counts = tuple(-(-c // i) for c, i in zip(cell, inner, strict=True))
    there = tuple(-(-n // i) for n, i in zip(extent, inner, strict=True))
    entries, position = bytearray(), 0
    for is_there in _grid(counts, there):
        entries += _ENTRY.pack(position, nbytes) if is_there else _ABSENT
        position += nbytes if is_there else 0
    return bytes(entries) + struct.pack("<I", crc32c(entries))


def _grid(counts: tuple[int, ...], there: tuple[int, ...]) -> list[bool]:
    """Return, in row-major order, which numbers of a grid lie below ``there`` on every axis."""
    if max(counts, default=1) == 1:
        return [True]
    found = [True]
    for count, below in zip(counts, there, strict=True):
        found = [one and n < below for one in found for n in range(count)]
    return found


def crc32c(data: bytes | bytearray) -> int:
    """Return the CRC-32C (Castagnoli) of some bytes; for few of them."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFFFFFF
