"""``index.bin`` written by hand: what a writer may put there who knows the checksums.

Here: a reader and a writer of the layout in ``docs/format.md``, made from that page alone, in plain
python; the writer sorts and checks nothing. Not here: the library's own (``_sharding.packed``).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

from xxhash import xxh3_64_intdigest

HEAD = "<8sQII9Q"
HEAD_NBYTES = struct.calcsize(HEAD)
MAGIC = b"\x89DCIDX\r\n"
NUMBERS = ("directory_nbytes", "nbytes", "tensors", "chunks", "files", "dtypes", "axes",
           "key_nbytes", "name_nbytes")  # fmt: skip


@dataclass
class Row:
    """A chunk."""

    position: int
    offset: list[int]
    shape: list[int]
    file: int


@dataclass
class Tensor:
    """A tensor with its chunks; what is not None stands in the file whatever is right."""

    key: bytes
    shape: list[int]
    dtype: int
    role: int
    rows: list[Row]
    ndim: int | None = None
    count: int | None = None
    checksum: int | None = None


@dataclass
class Index:
    """All of an index. ``head`` has numbers of the head that are to be others than the right ones."""

    dtypes: list[tuple[bytes, int]]
    files: list[bytes]
    tensors: list[Tensor]
    version: int = 1
    zero: int = 0
    head: dict[str, int] = field(default_factory=dict)
    key_ends: list[int] | None = None
    name_ends: list[int] | None = None
    padding: bytes | None = None
    behind: bytes = b""

    def tensor(self, key: str) -> Tensor:
        """Return the tensor with a key."""
        return next(one for one in self.tensors if one.key == key.encode())


def letter(shape: list[int]) -> str:
    """Return how a coordinate is stored in a tensor of this shape."""
    return "I" if all(n < 1 << 32 for n in shape) else "Q"


def forged(index: Index) -> bytes:
    """Return the bytes of an index, with right checksums."""
    rows = [_rows(one) for one in index.tensors]
    key_ends = _ends([one.key for one in index.tensors])
    name_ends = _ends(index.files)
    shapes = [n for one in index.tensors for n in one.shape]
    sums = [
        xxh3_64_intdigest(data) if one.checksum is None else one.checksum
        for one, data in zip(index.tensors, rows, strict=True)
    ]
    counts = [len(one.rows) if one.count is None else one.count for one in index.tensors]
    ndims = [len(one.shape) if one.ndim is None else one.ndim for one in index.tensors]
    body = b"".join((
        b"".join(struct.pack("<24sQ", *one) for one in index.dtypes),
        struct.pack(f"<{len(sums)}Q", *sums),
        struct.pack(f"<{len(shapes)}Q", *(n & (1 << 64) - 1 for n in shapes)),
        struct.pack(f"<{len(counts)}I", *counts),
        struct.pack(f"<{len(key_ends)}I", *(index.key_ends or key_ends)),
        struct.pack(f"<{len(name_ends)}I", *(index.name_ends or name_ends)),
        bytes(one.dtype for one in index.tensors),
        bytes(one.role for one in index.tensors),
        bytes(ndims),
        b"".join(one.key for one in index.tensors),
        b"".join(index.files),
    ))  # fmt: skip
    body += bytes(-len(body) % 8) if index.padding is None else index.padding
    behind = b"".join(rows) + index.behind
    right = (
        HEAD_NBYTES + len(body), HEAD_NBYTES + len(body) + len(behind), len(index.tensors),
        sum(counts), len(index.files), len(index.dtypes), len(shapes),
        sum(len(one.key) for one in index.tensors), sum(map(len, index.files)),
    )  # fmt: skip
    numbers = [index.head.get(name, n) for name, n in zip(NUMBERS, right, strict=True)]
    numbers = [n & (1 << 64) - 1 for n in numbers]
    head = struct.pack(HEAD, MAGIC, 0, index.version, index.zero, *numbers)
    sealed = (head + body + behind)[16 : numbers[0]]
    return MAGIC + struct.pack("<Q", xxh3_64_intdigest(sealed)) + head[16:] + body + behind


def parsed(data: bytes) -> Index:
    """Return what an index says, if it is right in what is compared here."""
    magic, seal, _version, _zero, *numbers = struct.unpack_from(HEAD, data)
    told = dict(zip(NUMBERS, numbers, strict=True))
    assert magic == MAGIC
    assert seal == xxh3_64_intdigest(data[16 : told["directory_nbytes"]])
    assert told["nbytes"] == len(data)
    at = HEAD_NBYTES

    def take(form: str) -> tuple[int, ...]:
        nonlocal at
        values = struct.unpack_from(f"<{form}", data, at)
        at += struct.calcsize(f"<{form}")
        return values

    count = told["tensors"]
    dtypes = [struct.unpack_from("<24sQ", data, at + 32 * i) for i in range(told["dtypes"])]
    at += 32 * told["dtypes"]
    sums, shapes, counts = take(f"{count}Q"), take(f"{told['axes']}Q"), take(f"{count}I")
    key_ends, name_ends = take(f"{count}I"), take(f"{told['files']}I")
    numbers_of, roles, ndims = take(f"{count}B"), take(f"{count}B"), take(f"{count}B")
    keys, names = at, at + told["key_nbytes"]
    assert names + told["name_nbytes"] + 7 & ~7 == told["directory_nbytes"]
    files = [data[names + a : names + b] for a, b in _pairs(name_ends)]
    tensors, axis, at = [], 0, told["directory_nbytes"]
    for i, (a, b) in enumerate(_pairs(key_ends)):
        shape = list(shapes[axis : axis + ndims[i]])
        axis += ndims[i]
        start, rows = at, []
        for _ in range(counts[i]):
            (position,) = take("Q")
            offset = list(take(f"{ndims[i]}{letter(shape)}"))
            extent = list(take(f"{ndims[i]}{letter(shape)}"))
            rows.append(Row(position, offset, extent, *take("I")))
        assert sums[i] == xxh3_64_intdigest(data[start:at])
        key = data[keys + a : keys + b]
        tensors.append(Tensor(key, shape, numbers_of[i], roles[i], rows))
    assert at == len(data)
    return Index([(name.rstrip(b"\0"), size) for name, size in dtypes], files, tensors)


def _rows(tensor: Tensor) -> bytes:
    form, mask = letter(tensor.shape), (1 << (32 if letter(tensor.shape) == "I" else 64)) - 1
    return b"".join(
        struct.pack("<Q", row.position & (1 << 64) - 1)
        + struct.pack(f"<{len(row.offset)}{form}", *(n & mask for n in row.offset))
        + struct.pack(f"<{len(row.shape)}{form}", *(n & mask for n in row.shape))
        + struct.pack("<I", row.file & 0xFFFFFFFF)
        for row in tensor.rows
    )


def _ends(texts: list[bytes]) -> list[int]:
    ends, at = [], 0
    for text in texts:
        at += len(text)
        ends.append(at)
    return ends


def _pairs(ends: tuple[int, ...]) -> list[tuple[int, int]]:
    return list(zip((0, *ends), ends, strict=False))
