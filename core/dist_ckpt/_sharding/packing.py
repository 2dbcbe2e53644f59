"""Columns of chunks -> ``index.bin``.

Here: sorting, packing, sealing. Not here: where what stands (``packed_layout``), reading
(``packed``), DCP's metadata (``_formats.torch_dist.dcp_metadata``). Runs on rank 0.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from dist_ckpt._sharding.packed_layout import (
    DTYPE,
    HEAD,
    MAGIC,
    MAX_AXES,
    ROLES,
    SEALED_FROM,
    VERSION,
    Layout,
)
from dist_ckpt._sharding.packed_rows import (
    row_dtype,
    row_words,
    starts_of_rows,
    sums_of_rows,
    widths_of,
)
from dist_ckpt._sharding.shard_info import dtype_from_name
from dist_ckpt.errors import StorageError
from dist_ckpt.storage.checksums import digest

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dist_ckpt._sharding.chunks import ChunkTable

__all__ = ["pack_index"]

_MAX_NBYTES = 1 << 31
"""Readers take no larger document."""


def pack_index(table: ChunkTable) -> bytes:
    """Return ``index.bin`` for chunks in any order.

    Raises:
        ValueError: A key stands there twice, or a tensor has more than 255 axes.
        StorageError: The index would be too large to be read.
    """
    encoded = [key.encode("utf-8", "surrogatepass") for key in table.keys]
    order = sorted(range(len(encoded)), key=encoded.__getitem__)
    keys = [encoded[i] for i in order]
    if any(a == b for a, b in pairwise(keys)):
        raise ValueError("a key stands twice in the table")
    shapes = [table.shapes[i] for i in order]
    ndim = np.fromiter(map(len, shapes), np.int64, len(shapes))
    if ndim.max(initial=0) > MAX_AXES:
        raise ValueError(f"a tensor of {ndim.max()} axes: {MAX_AXES} are the most")
    flat = np.fromiter((n for shape in shapes for n in shape), np.int64, int(ndim.sum()))
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    widths = widths_of(ndim, flat)
    counts, words = _packed_rows(table, place, ndim, widths)
    rows = words.tobytes()
    dtypes = sorted(set(table.dtypes))
    names = [name.encode("utf-8", "surrogateescape") for name in table.files]
    numbers = {name: i for i, name in enumerate(dtypes)}
    sections = {
        "dtypes": b"".join(DTYPE.pack(n.encode(), dtype_from_name(n).itemsize) for n in dtypes),
        "sums": sums_of_rows(rows, starts_of_rows(counts, ndim, widths)).astype("<u8").tobytes(),
        "shapes": flat.astype("<i8").tobytes(),
        "counts": counts.astype("<u4").tobytes(),
        "key_ends": _ends(keys),
        "name_ends": _ends(names),
        "dtype": bytes([numbers[table.dtypes[i]] for i in order]),
        "role": bytes([ROLES.index(table.roles[i]) for i in order]),
        "ndim": ndim.astype(np.uint8).tobytes(),
        "keys": b"".join(keys),
        "names": b"".join(names),
    }
    body = b"".join(sections.values())
    body += bytes(-len(body) % 8)
    layout = Layout(
        directory_nbytes=HEAD.size + len(body),
        nbytes=HEAD.size + len(body) + len(rows),
        tensors=len(keys),
        chunks=len(table),
        files=len(names),
        dtypes=len(dtypes),
        axes=len(flat),
        key_nbytes=len(sections["keys"]),
        name_nbytes=len(sections["names"]),
    )
    if layout.nbytes > _MAX_NBYTES:
        raise StorageError(
            f"the index of {layout.chunks} chunks would have {layout.nbytes} bytes; more than "
            f"{_MAX_NBYTES} are not read.",
            hint="shard into fewer pieces.",
        )
    return _sealed(layout, body) + rows


def _sealed(layout: Layout, body: bytes) -> bytes:
    numbers = [getattr(layout, name) for name in Layout.__slots__]
    head = HEAD.pack(MAGIC, 0, VERSION, 0, *numbers)
    seal = digest(head[SEALED_FROM:] + body)
    return HEAD.pack(MAGIC, seal, VERSION, 0, *numbers) + body


def _ends(texts: list[bytes]) -> bytes:
    ends = np.cumsum(np.fromiter(map(len, texts), np.int64, len(texts)))
    if len(ends) and ends[-1] >= 1 << 32:
        raise ValueError("keys or names of files of 4 GiB")
    return ends.astype("<u4").tobytes()


def _packed_rows(
    table: ChunkTable,
    place: NDArray[np.int64],
    ndim: NDArray[np.int64],
    widths: NDArray[np.int64],
) -> tuple[NDArray[np.int64], NDArray[np.uint32]]:
    """Return how many chunks each tensor has, in the order of the keys, and the words of all."""
    tensor = place[table.tensor]
    order = _row_order(table, tensor, ndim)
    tensor = tensor[order]
    counts = np.bincount(tensor, minlength=len(place))
    starts = starts_of_rows(counts, ndim, widths)
    words = np.zeros(int(starts[-1]), np.dtype("<u4"))
    within = np.arange(len(tensor)) - np.repeat(np.cumsum(counts) - counts, counts)
    kinds = ndim * 16 + widths
    for kind in np.unique(kinds[tensor]).tolist():
        axes, nbytes = divmod(kind, 16)
        chosen = np.flatnonzero(kinds[tensor] == kind)
        rows, owner, step = order[chosen], tensor[chosen], row_words(axes, nbytes)
        part = np.empty(len(rows), row_dtype(axes, nbytes))
        part["position"] = table.position[rows]
        part["offset"] = table.offset[rows, :axes]
        part["shape"] = table.shape[rows, :axes]
        part["file"] = table.file[rows]
        at = starts[owner] + within[chosen] * step
        values = part.view("<u4").reshape(len(rows), step)
        words[at[:, None] + np.arange(step)] = values
    return counts, words


def _row_order(
    table: ChunkTable, tensor: NDArray[np.int64], ndim: NDArray[np.int64]
) -> NDArray[np.intp]:
    """Return the rows by tensor, then by offset."""
    depth = int(ndim[tensor].max(initial=0))
    columns = [tensor, *(table.offset[:, axis] for axis in range(depth))]
    before = np.zeros(max(len(tensor) - 1, 0), bool)
    same = ~before
    for column in columns:
        before |= same & (column[:-1] < column[1:])
        same &= column[:-1] == column[1:]
    if bool((before | same).all()):
        return np.arange(len(tensor))
    return np.lexsort(columns[::-1])
