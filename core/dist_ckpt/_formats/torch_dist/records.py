"""One tensor as a ``torch.save`` record, with the payload aligned in its file.

Here: the bytes before and after the payload. Not here: the payload, which goes straight from the
tensor's memory to the file.

A record is a zip archive with stored (uncompressed) members, the form that ``torch.load`` reads
(torch/serialization.py, "zipfile-based serialization"): ``archive/data.pkl`` describes the tensor,
``archive/data/0`` is its storage. Members' CRCs are zero: torch does not check them, and our own
manifest says what is stored. Sizes stay below 4 GiB (``_sharding.assign.CHUNK_NBYTES``).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from dist_ckpt._formats.torch_dist import sizes

__all__ = ["Frames", "RecordFrame", "frame_of"]

_FLAGS = 0x0800  # UTF-8 names
_LONG = 1 << 31
"""From here on pickle writes a number another way."""

_MARK = 0x71A5_3C00
"""Numbers from here on stand for others in a template: their bytes come nowhere else in a frame."""


@dataclass(frozen=True, slots=True)
class RecordFrame:
    """The bytes around a payload: ``head`` + payload + ``tail`` is the record.

    They are the same for all tensors of one dtype and shape; ``start_after`` says where in a file
    a record may begin, so that its payload is aligned there.
    """

    head: bytes
    nbytes: int
    tail: bytes

    @property
    def total(self) -> int:
        """Size of the whole record."""
        return len(self.head) + self.nbytes + len(self.tail)

    @property
    def alignment(self) -> int:
        """Of the payload in its file, bytes."""
        return sizes.LARGE_ALIGNMENT if self.nbytes >= sizes.LARGE_NBYTES else sizes.ALIGNMENT

    def start_after(self, position: int) -> int:
        """Return the first byte from ``position`` on where the record may begin."""
        return position + -(position + len(self.head)) % self.alignment


class Frames:
    """Makes frames, and remembers what it made: much of them is the same."""

    def __init__(self) -> None:
        """Have none yet."""
        self._made: dict[tuple[str, tuple[int, ...]], RecordFrame] = {}
        self._templates: dict[tuple[str, int], _Template] = {}

    def of(self, dtype: str, shape: tuple[int, ...], itemsize: int) -> RecordFrame:
        """Return ``frame_of`` the same."""
        found = self._made.get((dtype, shape))
        if found is None:
            found = self._made[dtype, shape] = self._make(dtype, shape, itemsize)
        return found

    def _make(self, dtype: str, shape: tuple[int, ...], itemsize: int) -> RecordFrame:
        strides = _strides(shape)
        nbytes = math.prod(shape) * itemsize
        if max((nbytes, *shape, *strides)) >= _LONG:
            return frame_of(dtype, shape, itemsize)
        template = self._templates.get((dtype, len(shape)))
        if template is None:
            template = self._templates[dtype, len(shape)] = _Template(dtype, len(shape))
        return template.filled(nbytes, shape, strides)


class _Template:
    """The frame of a dtype and a number of axes, but for the numbers in it.

    Where all numbers take 32 bits, each stands at the same place: there the frames of two shapes
    without a number in common differ.
    """

    def __init__(self, dtype: str, ndim: int) -> None:
        marks = [_MARK + i for i in range(2 * ndim + 1)]
        nbytes, shape, strides = marks[0], marks[1 : ndim + 1], marks[ndim + 1 :]
        frame = _framed(_tensor_pickle(dtype, shape, strides, nbytes), nbytes)
        self._head = _Blanks(frame.head, marks)
        self._tail = _Blanks(frame.tail, [nbytes, nbytes + len(frame.head)])
        self._head_nbytes = len(frame.head)

    def filled(self, nbytes: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> RecordFrame:
        head = self._head.filled((nbytes, *shape, *strides))
        return RecordFrame(head, nbytes, self._tail.filled((nbytes, nbytes + self._head_nbytes)))


class _Blanks:
    """Bytes with 32-bit numbers to be filled in: those that stand for ``marks`` now."""

    def __init__(self, data: bytes, marks: Sequence[int]) -> None:
        self._fixed: list[bytes] = []
        self._order: list[int] = []
        rest = data
        while True:
            found = [(rest.find(struct.pack("<I", mark)), i) for i, mark in enumerate(marks)]
            place = min((one for one in found if one[0] >= 0), default=None)
            if place is None:
                break
            self._fixed.append(rest[: place[0]])
            self._order.append(place[1])
            rest = rest[place[0] + 4 :]
        self._last = rest
        layout = "".join(f"{len(part)}sI" for part in self._fixed)
        self._struct = struct.Struct(f"<{layout}")
        self._values: list[object] = [part for fixed in self._fixed for part in (fixed, 0)]

    def filled(self, numbers: Sequence[int]) -> bytes:
        self._values[1::2] = [numbers[i] for i in self._order]
        return self._struct.pack(*self._values) + self._last


def frame_of(dtype: str, shape: tuple[int, ...], itemsize: int) -> RecordFrame:
    """Return what stands around the payload of a contiguous tensor.

    Args:
        dtype: Its name, ``float32``.
        shape: Its shape, elements.
        itemsize: Bytes an element.
    """
    nbytes = math.prod(shape) * itemsize
    if nbytes > sizes.MAX_RECORD_NBYTES:
        raise ValueError(f"a record holds less than 4 GiB, not {nbytes} bytes")
    return _framed(_tensor_pickle(dtype, shape, _strides(shape), nbytes), nbytes)


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def _framed(pickled: bytes, nbytes: int) -> RecordFrame:
    members = [
        (b"archive/data.pkl", pickled),
        (b"archive/byteorder", b"little"),
        (b"archive/version", b"3\n"),
    ]
    head, directory = bytearray(), bytearray()
    for name, data in members:
        directory += _directory_entry(name, len(data), at=len(head))
        head += _local_header(name, len(data), extra=b"") + data
    name = b"archive/data/0"
    directory += _directory_entry(name, nbytes, at=len(head))
    head += _local_header(name, nbytes, extra=_padding(len(head) + 30 + len(name)))
    end = struct.pack("<IHHHHIIH", 0x06054B50, 0, 0, 4, 4, len(directory), len(head) + nbytes, 0)
    return RecordFrame(bytes(head), nbytes, bytes(directory) + end)


def _padding(position: int) -> bytes:
    """Return a zip extra field (header id ``FB``, as torch uses) that aligns the payload."""
    length = -(position + 4) % sizes.ALIGNMENT
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


def _tensor_pickle(dtype: str, shape: Sequence[int], strides: Sequence[int], nbytes: int) -> bytes:
    """Return the pickle of ``torch._utils._rebuild_tensor_v3`` over an untyped storage ``0``.

    Written opcode by opcode (protocol 2): it is the same for every tensor but for four values, and
    making it through a pickler costs more than writing a small tensor.
    """
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
    if value < _LONG:
        return b"J" + struct.pack("<i", value)
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + struct.pack("<B", len(data)) + data


def _int_tuple(values: Sequence[int]) -> bytes:
    return b"(" + b"".join(map(_int, values)) + b"t"
