"""Where in a ``torch.save`` record of another writer the tensor's bytes lie.

Here: the directory of the zip archive and the pickle in it, read with strict bounds and believed
only where both say the plainest thing: one contiguous tensor over one uncompressed member. Not
here: reading the bytes (``read``), records of our own (``records``). Called on every rank.
"""

from __future__ import annotations

import io
import math
import pickle
import struct
import sys
import zipfile
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from dist_ckpt._formats.torch_dist.inert import Node, ordered_dict, torch_constant
from dist_ckpt._formats.torch_dist.pickle_bounds import check_pickle
from dist_ckpt._formats.torch_dist.plain_types import STORAGE_DTYPES
from dist_ckpt.errors import CheckpointingException
from dist_ckpt.storage import Extent

if TYPE_CHECKING:
    from dist_ckpt.storage import Store

__all__ = ["Record", "find_payload"]

_MAX_PROBE_NBYTES = 1 << 20
_MAX_PICKLE_NBYTES = 1 << 16
_LOCAL_HEADER = struct.Struct("<IHHHHHIIIHH")
_LOCAL_MAGIC = 0x04034B50
_ENCRYPTED = 0x1

_NAMES = {
    ("torch._utils", "_rebuild_tensor_v2"),
    ("torch._utils", "_rebuild_tensor_v3"),
    ("torch._utils", "_rebuild_parameter"),
    ("torch.storage", "UntypedStorage"),
}


@dataclass(frozen=True, slots=True)
class Record:
    """A record in a file, and the tensor that is expected in it."""

    position: int
    nbytes: int
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class _Tensor:
    """What the pickle in a record says of its tensor."""

    member: str
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class _Unusual(Exception):  # noqa: N818 - a reason to read the record another way, no error
    """The record is none whose bytes can be taken as they are."""


def find_payload(store: Store, name: str, record: Record) -> int | None:
    """Return the position in the file of the first element; None if the record is not plain.

    What follows from there on are the elements, row-major, in the machine's byte order.

    Raises:
        StorageError: The store failed.
    """
    window = _Window(store, name, record.position, record.nbytes)
    try:
        with zipfile.ZipFile(io.BufferedReader(window, 4096)) as archive:
            return record.position + _find(archive, window, record)
    except CheckpointingException:
        raise
    except Exception:  # noqa: BLE001 - a torn record makes zipfile and pickle raise almost anything
        return None


def _find(archive: zipfile.ZipFile, window: _Window, record: Record) -> int:
    members = {info.filename: info for info in archive.infolist()}
    if len(members) != len(archive.infolist()):
        raise _Unusual("two members have the same name")
    (pickled,) = (name for name in members if name.endswith("/data.pkl"))
    prefix = pickled.removesuffix("data.pkl")
    if members[pickled].file_size > _MAX_PICKLE_NBYTES:
        raise _Unusual("long pickle")
    order = members.get(f"{prefix}byteorder")
    if order is not None and _content(window, order) != sys.byteorder.encode():
        raise _Unusual("other byte order")
    tensor = _unpickle(_content(window, members[pickled]))
    if not _is_plain(tensor, record):
        raise _Unusual("no contiguous tensor of the expected shape")
    start = tensor.offset * tensor.dtype.itemsize
    nbytes = math.prod(tensor.shape) * tensor.dtype.itemsize
    storage = members[f"{prefix}data/{tensor.member}"]
    if start < 0 or start + nbytes > storage.file_size:
        raise _Unusual("the tensor is not within its storage")
    return _position(window, storage) + start


def _is_plain(tensor: _Tensor, record: Record) -> bool:
    if (tensor.shape, str(tensor.dtype)) != (record.shape, f"torch.{record.dtype}"):
        return False
    row_major = [math.prod(tensor.shape[axis + 1 :]) for axis in range(len(tensor.shape))]
    return all(
        have == wanted or extent == 1
        for have, wanted, extent in zip(tensor.strides, row_major, tensor.shape, strict=True)
    )


def _position(window: _Window, member: zipfile.ZipInfo) -> int:
    """Return where the bytes of an uncompressed member begin in the record."""
    if (
        member.compress_type != zipfile.ZIP_STORED
        or member.compress_size != member.file_size
        or member.flag_bits & _ENCRYPTED
    ):
        raise _Unusual("not stored as it is")
    window.seek(member.header_offset)
    magic, *_, name_nbytes, extra_nbytes = _LOCAL_HEADER.unpack(window.read(_LOCAL_HEADER.size))
    start = int(member.header_offset + _LOCAL_HEADER.size + name_nbytes + extra_nbytes)
    if magic != _LOCAL_MAGIC or start + member.file_size > window.nbytes:
        raise _Unusual("no member there")
    return start


def _content(window: _Window, member: zipfile.ZipInfo) -> bytes:
    window.seek(_position(window, member))
    return window.read(member.file_size) or b""


def _unpickle(data: bytes) -> _Tensor:
    """Return what the pickle of a tensor says, without making anything of it."""
    check_pickle(data)
    node = _TensorUnpickler(io.BytesIO(data)).load()
    if isinstance(node, Node) and node.kind == "_rebuild_parameter":
        node = node.args[0]
    if not isinstance(node, Node):
        raise _Unusual("no tensor")
    arguments: list[Any] = list(node.args)
    (member, dtype), offset, shape, strides, _, _, *rest = arguments
    if node.kind == "_rebuild_tensor_v3":
        dtype = rest.pop(0)
    if any(rest) or not isinstance(dtype, torch.dtype) or type(offset) is not int:
        raise _Unusual("conjugated, negated or the like")
    return _Tensor(member, dtype, offset, tuple(shape), tuple(strides))


class _TensorUnpickler(pickle.Unpickler):
    """Resolves the names that the pickle of a plain tensor consists of, to inert stand-ins."""

    def find_class(self, module: str, name: str) -> object:
        if (module, name) == ("collections", "OrderedDict"):
            return type(name, (), {"__new__": lambda _: ordered_dict()})
        if (module, name) in _NAMES:
            return type(name, (Node,), {})
        found = STORAGE_DTYPES.get(name) or torch_constant(name) if module == "torch" else None
        if found is None:
            raise _Unusual(f"{module}.{name}")
        return found

    def persistent_load(self, pid: Any) -> tuple[str, object]:
        kind, dtype, member, _, _ = pid
        if kind != "storage" or not isinstance(member, str):
            raise _Unusual("no storage")
        return member, dtype


class _Window(io.RawIOBase):
    """The bytes of one record as a file; hands out a limited number of them."""

    def __init__(self, store: Store, name: str, position: int, nbytes: int) -> None:
        super().__init__()
        self.nbytes = nbytes
        self._store, self._name, self._start = store, name, position
        self._at, self._budget = 0, _MAX_PROBE_NBYTES

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self.nbytes}[whence]
        if base + offset < 0:
            raise ValueError("before the beginning")
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any, /) -> int:
        target = memoryview(buffer).cast("B")
        count = max(min(len(target), self.nbytes - self._at), 0)
        self._budget -= count
        if self._budget < 0:
            raise _Unusual("a long directory")
        if count:
            extent = Extent(self._start + self._at, target[:count])
            self._store.read_ranges(self._name, [extent])
        self._at += count
        return count
