"""The zip archive of a ``torch.save`` record that is in memory, read with strict bounds.

Here: which members it has and where their bytes are. Not here: what its pickle says (``unpickle``),
records that are not read whole (``payload``). Called on every rank.

``torch.save`` stores members as they are. Nothing else is read: no compression, no two members over
the same bytes, nothing behind the end. So a record takes no more memory than it has bytes.
"""

from __future__ import annotations

import io
import struct
import sys
import zipfile

__all__ = ["Archive"]

_LOCAL_HEADER = struct.Struct("<IHHHHHIIIHH")
_LOCAL_MAGIC = 0x04034B50
_ENCRYPTED = 0x1
_PICKLE = "data.pkl"


class Archive:
    """The members of a record.

    Args:
        data: The whole record.

    Raises:
        ValueError: It is no record as ``torch.save`` writes it.
    """

    def __init__(self, data: bytes | bytearray) -> None:
        """Find the members."""
        self._data = memoryview(data)
        try:
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                infos = archive.infolist()
        except (zipfile.BadZipFile, struct.error, OSError, NotImplementedError) as error:
            raise ValueError(f"no zip archive: {error}") from error
        self._members = {info.filename: self._extent(info) for info in infos}
        if len(self._members) != len(infos):
            raise ValueError("two members have the same name")
        end = 0
        for start, stop in sorted(self._members.values()):
            if start < end and stop > start:
                raise ValueError("two members share bytes")
            end = max(end, stop)
        pickles = [name for name in self._members if name.rpartition("/")[2] == _PICKLE]
        if len(pickles) != 1:
            raise ValueError(f"{len(pickles)} members are named {_PICKLE}")
        self._prefix = pickles[0].removesuffix(_PICKLE)
        order = f"{self._prefix}byteorder"
        if order in self._members and bytes(self.member(order)) != sys.byteorder.encode():
            raise ValueError("of another byte order")

    def _extent(self, info: zipfile.ZipInfo) -> tuple[int, int]:
        is_stored = info.compress_type == zipfile.ZIP_STORED
        if not is_stored or info.compress_size != info.file_size or info.flag_bits & _ENCRYPTED:
            raise ValueError(f"member {info.filename!r} is not stored as it is")
        header = self._data[info.header_offset : info.header_offset + _LOCAL_HEADER.size]
        magic, *_, name_nbytes, extra_nbytes = _LOCAL_HEADER.unpack(header)
        start = info.header_offset + _LOCAL_HEADER.size + name_nbytes + extra_nbytes
        if magic != _LOCAL_MAGIC or start + info.file_size > len(self._data):
            raise ValueError(f"member {info.filename!r} is not where it should be")
        return start, start + info.file_size

    def member(self, name: str) -> memoryview:
        """Return the bytes of a member by its full name."""
        if name not in self._members:
            raise ValueError(f"no member {name!r}")
        start, stop = self._members[name]
        return self._data[start:stop]

    def storage(self, key: str) -> memoryview:
        """Return the bytes of a tensor's storage."""
        return self.member(f"{self._prefix}data/{key}")

    @property
    def pickle(self) -> bytes:
        """The pickle, in which storages stand by their keys."""
        return bytes(self.member(f"{self._prefix}{_PICKLE}"))
