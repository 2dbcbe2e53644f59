"""One tensor as a ``torch.save`` record, with the payload at a position we choose.

Here: the bytes before and after the payload. Not here: the payload, which goes straight from the
tensor's memory to the file.

A record is a zip archive with stored (uncompressed) members, the form that ``torch.load`` reads
(torch/serialization.py, "zipfile-based serialization"): ``archive/data.pkl`` describes the tensor,
``archive/data/0`` is its storage. Members' CRCs are zero: torch does not check them, and our own
manifest says what is stored. Sizes stay below 4 GiB (``_planning.distribution.CHUNK_NBYTES``).
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

__all__ = ["RecordFrame", "frame_record"]

_ALIGNMENT = 64
_LARGE_ALIGNMENT = 4096
_LARGE_NBYTES = 1 << 16
_FLAGS = 0x0800  # UTF-8 names
_MAX_NBYTES = (1 << 32) - (1 << 16)


@dataclass(frozen=True, slots=True)
class RecordFrame:
    """The bytes around a payload: ``head`` + payload + ``tail`` is the record."""

    head: bytes
    nbytes: int
    tail: bytes

    @property
    def total(self) -> int:
        """Size of the whole record."""
        return len(self.head) + self.nbytes + len(self.tail)


def frame_record(dtype: str, shape: tuple[int, ...], itemsize: int, *, start: int) -> RecordFrame:
    """Return what stands around the payload of a contiguous tensor.

    Args:
        dtype: Its name, ``float32``.
        shape: Its shape, elements.
        itemsize: Bytes an element.
        start: Position of the record in its file; the payload is aligned in the file to 64 bytes,
            from 64 KiB on to 4096.
    """
    nbytes = math.prod(shape) * itemsize
    if nbytes > _MAX_NBYTES:
        raise ValueError(f"a record holds less than 4 GiB, not {nbytes} bytes")
    members = [
        (b"archive/data.pkl", _tensor_pickle(dtype, shape, nbytes)),
        (b"archive/byteorder", b"little"),
        (b"archive/version", b"3\n"),
    ]
    head, directory = bytearray(), bytearray()
    for name, data in members:
        directory += _directory_entry(name, len(data), at=len(head))
        head += _local_header(name, len(data), extra=b"") + data
    name = b"archive/data/0"
    directory += _directory_entry(name, nbytes, at=len(head))
    head += _local_header(name, nbytes, extra=_padding(start + len(head) + 30 + len(name), nbytes))
    end = struct.pack("<IHHHHIIH", 0x06054B50, 0, 0, 4, 4, len(directory), len(head) + nbytes, 0)
    return RecordFrame(bytes(head), nbytes, bytes(directory) + end)


def _padding(position: int, nbytes: int) -> bytes:
    """Return a zip extra field (header id ``FB``, as torch uses) that aligns what follows it."""
    alignment = _LARGE_ALIGNMENT if nbytes >= _LARGE_NBYTES else _ALIGNMENT
    length = -(position + 4) % alignment
    return struct.pack("<HH", 0x4246, length) + bytes(length)


def _local_header(name: bytes, nbytes: int, *, extra: bytes) -> bytes:
    fixed = struct.pack(
        "<IHHHHHIIIHH", 0x04034B50, 0, _FLAGS, 0, 0, 0, 0, nbytes, nbytes, len(name), len(extra)
    )
    return fixed + name + extra


def _directory_entry(name: bytes, nbytes: int, *, at: int) -> bytes:
    fixed = struct.pack(
        "<IHHHHHHIIIHHHHHII",
        0x02014B50, 0, 0, _FLAGS, 0, 0, 0, 0, nbytes, nbytes, len(name), 0, 0, 0, 0, 0, at,
    )  # fmt: skip
    return fixed + name


def _tensor_pickle(dtype: str, shape: tuple[int, ...], nbytes: int) -> bytes:
    """Return the pickle of ``torch._utils._rebuild_tensor_v3`` over an untyped storage ``0``.

    Written opcode by opcode (protocol 2): it is the same for every tensor but for four values, and
    making it through a pickler costs more than writing a small tensor.
    """
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    return b"".join(
        (
            b"\x80\x02ctorch._utils\n_rebuild_tensor_v3\n((",
            _text("storage"),
            b"ctorch.storage\nUntypedStorage\n",
            _text("0"),
            _text("cpu"),
            _int(nbytes),
            b"tQ",
            _int(0),
            _int_tuple(shape),
            _int_tuple(strides),
            b"\x89ccollections\nOrderedDict\n)R",
            f"ctorch\n{dtype}\n".encode("ascii"),
            b"tR.",
        )
    )


def _text(value: str) -> bytes:
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def _int(value: int) -> bytes:
    if value < 1 << 31:
        return b"J" + struct.pack("<i", value)
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + struct.pack("<B", len(data)) + data


def _int_tuple(values: tuple[int, ...] | list[int]) -> bytes:
    return b"(" + b"".join(map(_int, values)) + b"t"
