"""The files of an array's chunks, as its metadata on disk says.

Here: their names, and whether what one may take in memory is bounded by its size. Not here: reading
them (``arrays``, ``slices``). Runs on every rank for its own boxes.

TensorStore takes memory for a chunk, and for the index of a shard, before it looks at the file, and
ends the process if there is none: metadata from a checkpoint must not choose how much.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dist_ckpt._formats.zarr.grid import cells_of
from dist_ckpt._formats.zarr.layout import is_by_rows
from dist_ckpt._formats.zarr.names import chunk_name
from dist_ckpt.errors import CorruptedCheckpointError
from dist_ckpt.storage import Extent

if TYPE_CHECKING:
    from dist_ckpt.box import Box
    from dist_ckpt.storage import Store

__all__ = ["ChunkFiles", "chunk_files", "is_as_written"]

_MALFORMED = (ValueError, KeyError, TypeError, IndexError, AttributeError)
_INDEX_ENTRY_NBYTES = 16
_MAX_INNER = 1 << 12
"""Shards of more inner chunks, ours seldom are, are left to TensorStore: their index is long."""
_BLOSC_HEADER = struct.Struct("<4BIII")
"""Versions, flags and item size; then the lengths: unfolded, of a block, compressed (c-blosc 1)."""
_MAX_HELD_NBYTES = 1 << 31
"""Largest chunk that is read if only TensorStore can: it holds all of it, and a file of holes is as
long as it likes. More does not fit the common compressors either."""


@dataclass(frozen=True, slots=True)
class ChunkFiles:
    """Files of ``cell`` elements each, none shorter than ``least_nbytes``.

    ``inner`` are the extents of what can be read; ``is_plain`` tells that elements lie in a file as
    they do in a tensor. ``blosc_nbytes`` is what a chunk that Blosc compressed says of its length,
    else None.
    """

    path: str
    zarr_format: int
    separator: str
    cell: tuple[int, ...]
    inner: tuple[int, ...]
    least_nbytes: int
    is_plain: bool
    blosc_nbytes: int | None = None

    def name(self, numbers: tuple[int, ...]) -> str:
        """Return the file of a cell, relative to the checkpoint."""
        return f"{self.path}/{chunk_name(numbers, self.zarr_format).replace('.', self.separator)}"

    def check(self, store: Store, box: Box, *, key: str) -> None:
        """Raise if a file that ``box`` needs is missing or too short for what it should hold.

        Raises:
            CorruptedCheckpointError: Naming the file.
        """
        for numbers in cells_of(box, self.cell):
            name = self.name(numbers)
            found = store.nbytes(name)
            if found is None or found < self.least_nbytes:
                what = "is missing"
                if found is not None:
                    what = f"has {found} bytes, at least {self.least_nbytes} are expected"
                raise CorruptedCheckpointError(
                    f"{key!r}: {name} {what}.", hint="use another checkpoint."
                )
            if self.blosc_nbytes is not None:
                self._check_blosc(store, name, found, key=key)

    def _check_blosc(self, store: Store, name: str, found: int, *, key: str) -> None:
        """Raise if a chunk says that it unfolds to another length than it should have.

        That many bytes are taken before they are compared; other compressors stop where the chunk
        is full.
        """
        header = bytearray(_BLOSC_HEADER.size)
        if found >= len(header):
            store.read_ranges(name, [Extent(0, memoryview(header))])
        *_, unfolded, _, compressed = _BLOSC_HEADER.unpack(header)
        if (unfolded, compressed) != (self.blosc_nbytes, found):
            raise CorruptedCheckpointError(
                f"{key!r}: {name} says that {compressed} bytes unfold to {unfolded}; expected "
                f"{found} and {self.blosc_nbytes}.",
                hint="use another checkpoint.",
            )


_LITTLE = {"endian": "little"}


def chunk_files(
    document: dict[str, Any], path: str, itemsize: int, *, key: str, where: str
) -> ChunkFiles:
    """Return the files of an array whose metadata is ``document``.

    Args:
        document: The metadata; of v3 only the layout that this format writes is taken.
        path: The array's directory, relative to the checkpoint.
        itemsize: Bytes of an element.
        key: The tensor, for errors.
        where: The metadata's name, for errors.

    Raises:
        CorruptedCheckpointError: The metadata is malformed or of another layout.
    """
    try:
        is_v2 = document["zarr_format"] == 2  # noqa: PLR2004 - of zarr
        return _v2(document, path, itemsize) if is_v2 else _v3(document, path, itemsize)
    except _MALFORMED as error:
        raise CorruptedCheckpointError(
            f"{key!r}: {where} describes an array in a layout that is not read ({error!r})."
        ) from error


def _v2(document: dict[str, Any], path: str, itemsize: int) -> ChunkFiles:
    cell = _extents(document["chunks"])
    separator = document.get("dimension_separator") or "."
    if separator not in (".", "/"):
        raise ValueError(f"dimension_separator {separator!r}")
    nbytes = math.prod(cell) * itemsize
    is_plain = document.get("compressor") is None and not document.get("filters")
    if not is_as_written(document) and nbytes > _MAX_HELD_NBYTES:
        raise ValueError(f"compressed or reordered chunks of {nbytes} bytes")
    compressor = document.get("compressor") or {}
    is_blosc = not is_plain and compressor.get("id") == "blosc"
    return ChunkFiles(
        path, 2, separator, cell, cell,
        least_nbytes=nbytes if is_plain else 0,
        is_plain=is_as_written(document),
        blosc_nbytes=nbytes if is_blosc else None,
    )  # fmt: skip


def _v3(document: dict[str, Any], path: str, itemsize: int) -> ChunkFiles:
    cell = _extents(document["chunk_grid"]["configuration"]["chunk_shape"])
    (codec,) = document["codecs"]
    shards = codec["configuration"]
    inner = _extents(shards["chunk_shape"])
    names = [one["name"] for one in (codec, *shards["codecs"], *shards["index_codecs"])]
    if names != ["sharding_indexed", "bytes", "bytes", "crc32c"]:
        raise ValueError(f"codecs {names}")
    for one in (*shards["codecs"], shards["index_codecs"][0]):
        if one.get("configuration", _LITTLE) != _LITTLE:
            raise ValueError(f"codec {one!r}")
    encoding = document["chunk_key_encoding"]
    if (encoding["name"], encoding["configuration"]["separator"]) != ("default", "."):
        raise ValueError(f"chunk_key_encoding {encoding!r}")
    # A file of holes is as long as it likes: also the tensor bounds what is held of it.
    axes = list(zip(cell, inner, document["shape"], strict=True))
    if any(i > max(n, 1) or c >= max(n, 1) + i for c, i, n in axes):
        raise ValueError(f"chunks of {inner} in shards of {cell}")
    count = math.prod(-(-c // i) for c, i, _ in axes)
    least = max(count * _INDEX_ENTRY_NBYTES, math.prod(inner) * itemsize)
    is_plain = is_by_rows(cell, inner) and count <= _MAX_INNER
    return ChunkFiles(path, 3, ".", cell, inner, least, is_plain)


def is_as_written(document: dict[str, Any]) -> bool:
    """Whether the chunks of a v2 array are laid out as this format writes them."""
    is_plain = document.get("compressor") is None and not document.get("filters")
    is_as_torch = document.get("order") == "C" and not str(document.get("dtype")).startswith(">")
    return is_plain and is_as_torch


def _extents(values: Any) -> tuple[int, ...]:
    result = tuple(values)
    if not all(type(n) is int and 0 < n < 1 << 63 for n in result):
        raise ValueError(f"chunks of {values!r}")
    return result
