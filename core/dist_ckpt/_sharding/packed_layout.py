"""Where what stands in ``index.bin``: its head, the sections of its directory, and rows of chunks.

Here: numbers and positions, for those who pack, who read with arrays (``packed``) and who read
without (``_formats.torch_dist.dcp_metadata``). Not here: what is in the sections. No torch and no
numpy: the process that writes in the background uses it too. ``docs/format.md`` tells the layout in
words.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from dist_ckpt.errors import CorruptedCheckpointError, UnknownStrategyError
from dist_ckpt.storage.checksums import digest

__all__ = [
    "DTYPE",
    "HEAD",
    "MAGIC",
    "MAX_AXES",
    "ROLES",
    "SEALED_FROM",
    "VERSION",
    "Layout",
    "coordinate_nbytes",
    "read_layout",
    "seal_of",
]

MAGIC = b"\x89DCIDX\r\n"
VERSION = 1
HEAD = struct.Struct("<8sQII9Q")
"""Magic, seal, version, zero, and the nine fields of ``Layout``."""
SEALED_FROM = 16
"""The seal is the checksum of the directory from this byte on, so of all but magic and seal."""
DTYPE = struct.Struct("<24sQ")
"""Name, filled up with zeros, and bytes an element."""
ROLES = ("tensor", "object", "part")
"""A role is stored as its place here."""
MAX_AXES = 255

_FIXED_HEAD = struct.Struct("<8sQIIQ")
"""What every version begins with: up to the size of the directory."""
_MAX_COUNT = 1 << 31


@dataclass(frozen=True, slots=True)
class Layout:
    """The head of an index: how large everything is.

    Attributes:
        directory_nbytes: Size of the head and the directory; the rows begin there.
        nbytes: Size of the file.
        tensors: Number of tensors.
        chunks: Number of chunks.
        files: Number of files.
        dtypes: Number of dtypes.
        axes: Number of axes of all tensors together.
        key_nbytes: Size of all keys together.
        name_nbytes: Size of all names of files together.
    """

    directory_nbytes: int
    nbytes: int
    tensors: int
    chunks: int
    files: int
    dtypes: int
    axes: int
    key_nbytes: int
    name_nbytes: int

    @property
    def sections(self) -> dict[str, tuple[int, int]]:
        """Position and size in bytes of each section of the directory; they follow each other."""
        sizes = {
            "dtypes": self.dtypes * DTYPE.size,
            "sums": 8 * self.tensors,
            "shapes": 8 * self.axes,
            "counts": 4 * self.tensors,
            "key_ends": 4 * self.tensors,
            "name_ends": 4 * self.files,
            "dtype": self.tensors,
            "role": self.tensors,
            "ndim": self.tensors,
            "keys": self.key_nbytes,
            "names": self.name_nbytes,
        }
        found, at = {}, HEAD.size
        for name, nbytes in sizes.items():
            found[name] = at, nbytes
            at += nbytes
        found["end"] = at, -at % 8
        return found

    def section(self, data: bytes | memoryview, name: str) -> memoryview:
        """Return the bytes of a section."""
        start, nbytes = self.sections[name]
        return memoryview(data)[start : start + nbytes]


def coordinate_nbytes(largest: int) -> int:
    """Return how many bytes an offset or a size takes in a tensor of this largest extent."""
    return 4 if largest < 1 << 32 else 8


def read_layout(data: bytes | memoryview, *, where: str, seal: int | None = None) -> Layout:
    """Return the layout of an index, whose directory is as its seal says.

    Args:
        data: The file, or its directory alone.
        where: Its path, for errors.
        seal: What the seal must be, if that is known.

    Raises:
        CorruptedCheckpointError: It is damaged, or no index.
        UnknownStrategyError: A newer release wrote it.
    """
    if len(data) < HEAD.size:
        raise CorruptedCheckpointError(f"{where}: {len(data)} bytes are no index.")
    magic, told, version, zero, directory_nbytes = _FIXED_HEAD.unpack_from(data)
    if magic != MAGIC or not HEAD.size <= directory_nbytes <= len(data):
        raise CorruptedCheckpointError(f"{where}: not an index of ours: it begins {magic!r}.")
    found = digest(memoryview(data)[SEALED_FROM:directory_nbytes])
    if found != told or (seal is not None and seal != told):
        expected = told if seal is None else seal
        raise CorruptedCheckpointError(
            f"{where}: the checksum of its directory is {found:016x}, {expected:016x} is expected "
            f"and {told:016x} is told.",
            hint="the file was altered or cut short; use another checkpoint.",
        )
    if version > VERSION:
        # Nothing is damaged: it must not be set aside.
        raise UnknownStrategyError(
            f"{where}: index version {version}; this release reads {VERSION}.",
            hint="upgrade dist-ckpt.",
        )
    layout = Layout(*HEAD.unpack_from(data)[4:])
    counts = (layout.tensors, layout.chunks, layout.files, layout.dtypes, layout.axes)
    end, padding = layout.sections["end"]
    if (
        version != VERSION
        or zero
        or max(counts) >= _MAX_COUNT
        or end + padding != directory_nbytes
        or any(layout.section(data, "end"))
        or layout.nbytes < directory_nbytes
    ):
        raise CorruptedCheckpointError(
            f"{where}: not an index of ours: version {version}, a directory of {directory_nbytes} "
            f"bytes, {layout}."
        )
    return layout


def seal_of(data: bytes | memoryview) -> int:
    """Return what the seal of an index says; it is compared by ``read_layout``."""
    seal: int = _FIXED_HEAD.unpack_from(data)[1]
    return seal
