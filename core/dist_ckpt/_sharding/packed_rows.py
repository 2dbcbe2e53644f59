"""Rows of chunks in ``index.bin`` as arrays: how wide they are, where they begin, their checksums.

Here: what packing and reading have in common. Not here: either (``packing``, ``packed``).
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from dist_ckpt._sharding.packed_layout import coordinate_nbytes
from dist_ckpt.storage.checksums import digest

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["row_dtype", "row_words", "starts_of_rows", "sums_of_rows", "widths_of"]


def row_words(ndim: int, nbytes: int) -> int:
    """Return how many 4-byte words a row has: position, offset, shape, file."""
    return 3 + 2 * ndim * nbytes // 4


def row_dtype(ndim: int, nbytes: int) -> np.dtype[np.void]:
    """Return the dtype of a row: position, offset, shape and number of the file."""
    whole = f"<u{nbytes}"
    fields = [("position", "<u8"), ("offset", whole, (ndim,)), ("shape", whole, (ndim,))]
    return np.dtype([*fields, ("file", "<u4")])


def widths_of(ndim: NDArray[np.int64], flat: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return for each tensor how many bytes a coordinate of it takes."""
    largest = np.zeros(len(ndim), np.int64)
    np.maximum.at(largest, np.repeat(np.arange(len(ndim)), ndim), flat)
    return np.where(largest < 1 << 32, coordinate_nbytes(0), coordinate_nbytes(1 << 32))


def starts_of_rows(
    counts: NDArray[np.int64], ndim: NDArray[np.int64], widths: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return where the rows of each tensor begin, in words, and where the last ones end."""
    starts = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts * (3 + 2 * ndim * widths // 4), out=starts[1:])
    return starts


def sums_of_rows(rows: bytes | memoryview, starts: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return the checksum of the rows of each tensor; ``starts`` are in words."""
    view = memoryview(rows)
    found = (digest(view[a:b]) for a, b in pairwise((starts * 4).tolist()))
    return np.fromiter(found, np.uint64, len(starts) - 1)
