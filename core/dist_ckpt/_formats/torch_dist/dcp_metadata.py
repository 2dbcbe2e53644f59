"""DCP's ``.metadata``, written opcode by opcode from our own index.

Here: the pickle of torch.distributed.checkpoint's ``Metadata`` (metadata.py and filesystem.py
there, torch 2.13), so that DCP and its tools can read what we wrote. Not here: reading one
(``metadata``, ``cached_reader``). No torch and no numpy: the process that writes in the background
makes it, off the way of the training. A pickler would visit tens of objects for each chunk, and an
object has to be made first; here a chunk is a few bytes put together.

The pickle is of protocol 2. It begins with all that comes again (classes, names of attributes,
dtypes, names of files), each put into the memo once; the keys are put there as they come.
"""

from __future__ import annotations

import math
import struct
from typing import TYPE_CHECKING

from dist_ckpt._formats.torch_dist.records import frame_of
from dist_ckpt._sharding.packed_layout import DTYPE, coordinate_nbytes, read_layout

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

__all__ = ["NOTE_KEY", "NOTE_PATH", "encode_metadata"]

_DCP = b"ctorch.distributed.checkpoint."
_GLOBALS = {
    "Size": b"ctorch\nSize\n",
    "Tensor": _DCP + b"metadata\nTensorStorageMetadata\n",
    "Properties": _DCP + b"metadata\nTensorProperties\n",
    "Chunk": _DCP + b"metadata\nChunkStorageMetadata\n",
    "Index": _DCP + b"metadata\nMetadataIndex\n",
    "Info": _DCP + b"filesystem\n_StorageInfo\n",
    "strided": b"ctorch.serialization\n_get_layout\nX\x0d\x00\x00\x00torch.strided\x85R",
    "contiguous": _DCP + b"metadata\n_MEM_FORMAT_ENCODING\nK\x00\x85R",
}
_ATTRIBUTES = (
    "properties", "size", "chunks", "offsets", "sizes", "fqn", "index", "offset", "relative_path",
    "length",
)  # fmt: skip
NOTE_PATH = (
    "not the weights of one model: read this checkpoint with dist_ckpt.load_plain_tensors",
    "note",
)
"""Where an empty tensor lies in a dict that is rebuilt from ``planner_data``: below all others.

A tool that takes such a dict for a model's weights (``accelerate merge-weights``) would write a
wrong file: our names, and optimizers among them. safetensors refuses a dict among tensors, and
quotes its name.
"""
NOTE_KEY = ".".join(NOTE_PATH)
_U32 = struct.Struct("<I").pack
_CACHED = 1 << 16
"""Most shapes and offsets whose bytes are kept."""
_LONG = 1 << 31
"""Below it, what stands around a payload is equally long for all shapes of as many axes."""


def encode_metadata(index: bytes) -> bytes:
    """Return the ``.metadata`` for what ``index.bin`` tells.

    Args:
        index: The whole of an index that this process or another one of the job has packed.

    Raises:
        CorruptedCheckpointError: It is no index.
    """
    # Piece by piece: all of them together take several times as much as what is made of them.
    found = bytearray()
    for part in _Encoder(index).parts():
        found += part
    return bytes(found)


class _Encoder:
    """The parts of one pickle, in order."""

    def __init__(self, index: bytes) -> None:
        """Take the directory of the index apart."""
        layout = self._layout = read_layout(index, where="index.bin")
        self._rows = memoryview(index)[layout.directory_nbytes :]
        sections = {name: bytes(layout.section(index, name)) for name in layout.sections}
        self._counts, self._key_ends, self._name_ends = (
            struct.unpack(f"<{len(sections[name]) // 4}I", sections[name])
            for name in ("counts", "key_ends", "name_ends")
        )
        self._shapes = struct.unpack(f"<{layout.axes}q", sections["shapes"])
        self._dtype, self._ndim = sections["dtype"], sections["ndim"]
        self._keys, self._names = sections["keys"], sections["names"]
        self._dtypes = [
            (name.rstrip(b"\0").decode("ascii"), itemsize)
            for name, itemsize in DTYPE.iter_unpack(sections["dtypes"])
        ]
        self._memo = 0
        self._sizes: dict[tuple[int, ...], bytes] = {}
        self._frames: dict[tuple[int, int], tuple[int, int]] = {}

    def parts(self) -> Iterator[bytes | bytearray]:
        """Yield the pickle piece by piece."""
        yield b"\x80\x02"
        yield from self._constants()
        yield _DCP + b"metadata\nMetadata\n)\x81}(" + _text(b"state_dict_metadata") + b"}"
        storage = bytearray()
        yield from self._tensors(storage)
        last_key, note = self._memo, self._note()
        yield note
        yield _text(b"planner_data") + b"}("
        for number in range(self._first_key, last_key):
            get = _get(number)
            yield get + get + b"\x85"
        yield _get(last_key) + b"".join(_text(part.encode()) for part in NOTE_PATH) + b"\x86"
        yield b"u" + _text(b"storage_data") + b"}"
        yield storage
        yield _text(b"storage_meta") + _DCP + b"metadata\nStorageMeta\n)\x81}("
        yield b"".join(_text(name) + b"N" for name in (b"checkpoint_id", b"save_id", b"load_id"))
        yield _text(b"modules") + b"]ub" + _text(b"version") + _text(b"1.0.0") + b"ub."

    def _constants(self) -> Iterator[bytes]:
        """Yield what puts into the memo all that comes again; prepare what gets it."""
        got: dict[str, bytes] = {}
        for name, code in _GLOBALS.items():
            yield self._put(code) + b"0"
            got[name] = _get(self._memo - 1)
        for name in _ATTRIBUTES:
            yield self._put(_text(name.encode())) + b"0"
            got[name] = _get(self._memo - 1)
        self._first_dtype = self._memo
        for name, _ in self._dtypes:
            yield self._put(f"ctorch\n{name}\n".encode()) + b"0"
        yield self._put(b"ctorch\nuint8\n") + b"0"
        self._uint8 = _get(self._memo - 1)
        self._first_file = self._memo
        for file in _cut(self._names, self._name_ends):
            yield self._put(_text(file)) + b"0"
        self._files = [_get(self._first_file + i) for i in range(self._layout.files)]
        self._first_key = self._memo
        self._size = got["Size"]
        self._tensor = (
            b"X%b%br%b" + got["Tensor"] + b")\x81}(" + got["properties"] + got["Properties"]
            + b")\x81(%b" + got["strided"] + b"\x89" + got["contiguous"] + b"\x89tb"
            + got["size"] + b"%b"
            + got["chunks"] + b"](%beubs"
        )  # fmt: skip
        self._chunk = got["Chunk"] + b")\x81}(" + got["offsets"] + b"%b" + got["sizes"] + b"%bub"
        self._place = (
            got["Index"] + b")\x81}(" + got["fqn"] + b"%b" + got["index"] + b"%b" + got["offset"]
            + b"%bub" + got["Info"] + b")\x81}(" + got["relative_path"] + b"%b" + got["offset"]
            + b"%b" + got["length"] + b"%bub"
        )  # fmt: skip

    def _put(self, code: bytes) -> bytes:
        """Return ``code``, whose value is then put into the memo."""
        number, self._memo = self._memo, self._memo + 1
        return code + b"r" + _U32(number)

    def _tensors(self, storage: bytearray) -> Iterator[bytes]:
        """Yield an item of ``state_dict_metadata`` for each tensor; put its places aside."""
        axis = at = start = 0
        rows, first_key, template = self._rows, self._first_key, self._tensor
        dtypes = [_get(self._first_dtype + i) for i in range(len(self._dtypes))]
        structs: dict[tuple[int, int], struct.Struct] = {}
        tensors = zip(self._key_ends, self._dtype, self._ndim, self._counts, strict=True)
        for number, (end, dtype, ndim, count) in enumerate(tensors, first_key):
            key, start = self._keys[start:end], end
            shape = self._shapes[axis : axis + ndim]
            axis += ndim
            chunks = b""
            if count:
                width = coordinate_nbytes(max(shape, default=0))
                row = structs.get((ndim, width)) or structs.setdefault(
                    (ndim, width), _row(ndim, width)
                )
                stop = at + row.size * count
                chunks = self._chunks(row.iter_unpack(rows[at:stop]), dtype, number, storage)
                at = stop
            yield template % (
                _U32(len(key)), key, _U32(number), dtypes[dtype], self._sized(shape), chunks
            )  # fmt: skip
        self._memo = first_key + self._layout.tensors

    def _note(self) -> bytes:
        """Return an item for a tensor without elements, which no data file has."""
        key, number = NOTE_KEY.encode(), self._memo
        self._memo += 1
        return self._tensor % (
            _U32(len(key)), key, _U32(number), self._uint8, self._sized((0,)), b""
        )  # fmt: skip

    def _chunks(
        self, rows: Iterable[tuple[int, ...]], dtype: int, number: int, storage: bytearray
    ) -> bytes:
        """Return the chunks of a tensor; put their places aside."""
        key = _get(number)
        chunk, place, sized, files = self._chunk, self._place, self._sized, self._files
        told: list[bytes] = []
        storage += b"("
        for i, row in enumerate(rows):
            middle = len(row) >> 1
            offset, extent = row[1:middle], row[middle:-1]
            start, size = sized(offset), sized(extent)
            before, nbytes = self._frame(dtype, extent)
            told.append(chunk % (start, size))
            storage += place % (
                key, _int(i), start, files[row[-1]], _int(row[0] - before), _int(nbytes)
            )  # fmt: skip
        storage += b"u"
        return b"".join(told)

    def _sized(self, values: tuple[int, ...]) -> bytes:
        """Return what makes a ``torch.Size``."""
        found = self._sizes.get(values)
        if found is None:
            if len(self._sizes) >= _CACHED:
                self._sizes.clear()
            items = b"".join(map(_int, values))
            found = self._sizes[values] = self._size + b"(" + items + b"t\x85R"
        return found

    def _frame(self, dtype: int, shape: tuple[int, ...]) -> tuple[int, int]:
        """Return how far before its payload a record begins, and the size of it all."""
        name, itemsize = self._dtypes[dtype]
        nbytes = math.prod(shape) * itemsize
        if nbytes >= _LONG:
            frame = frame_of(name, shape, itemsize)
            return len(frame.head), frame.total
        found = self._frames.get((dtype, len(shape)))
        if found is None:
            frame = frame_of(name, (1,) * len(shape), itemsize)
            found = self._frames[dtype, len(shape)] = len(frame.head), frame.total - frame.nbytes
        return found[0], found[1] + nbytes


def _row(ndim: int, width: int) -> struct.Struct:
    """Return how a chunk is stored: position, offset, shape, file."""
    letter = "I" if width == coordinate_nbytes(0) else "Q"
    return struct.Struct(f"<Q{2 * ndim}{letter}I")


def _cut(data: bytes, ends: Sequence[int]) -> Iterator[bytes]:
    start = 0
    for end in ends:
        yield data[start:end]
        start = end


def _text(data: bytes) -> bytes:
    return b"X" + _U32(len(data)) + data


def _get(number: int) -> bytes:
    """Return what gets a value out of the memo."""
    return b"h%c" % number if number < 1 << 8 else b"j" + _U32(number)


def _int(value: int) -> bytes:
    if value < 1 << 8:
        return b"K%c" % value
    if value < 1 << 31:
        return b"J" + struct.pack("<i", value)
    return b"\x8a\x08" + struct.pack("<q", value)
