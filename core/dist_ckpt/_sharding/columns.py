"""The chunks of the tensors that somebody wants, as columns.

Here: how they are taken from an index, packed or not. Not here: what is done with them
(``_sharding.overlaps``), how an index is packed (``_sharding.packed``). Runs on each rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from dist_ckpt._sharding.overlaps import clipped, matrix
from dist_ckpt._sharding.packed import PackedTensors
from dist_ckpt._sharding.packed_layout import ROLES
from dist_ckpt._sharding.packed_rows import row_dtype, row_words
from dist_ckpt._sharding.shard_info import dtype_from_name

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from dist_ckpt._sharding.index import StoredChunk, StoredTensor

__all__ = ["Stored", "stored_columns"]

_DENSE = 16
"""Who wants one of so many keys, or more, gets all keys in a dict; others are searched for."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Stored:
    """What is stored of some keys, ``[t]``, in chunks, ``[c]``.

    Attributes:
        keys: What was asked for.
        is_there: Whether a key is stored, ``[t]``; what is not has no chunks, and its other columns
            mean nothing.
        is_tensor: Whether its role is "tensor", ``[t]``.
        is_raw: Whether its chunks are plain bytes in files, ``[t]``.
        dtypes: Each dtype's name once.
        dtype: Number of its dtype, ``[t]``.
        itemsize: Bytes an element, ``[t]``.
        ndim: Number of axes, ``[t]``.
        whole: Its shape, ``[t, D]``; what it has not is 1. Larger than fits is the largest that
            does.
        files: Names of files.
        tensor: Number of a chunk's key, ``[c]``.
        offset: ``[c, D]``; what it has not is 0.
        shape: ``[c, D]``; what it has not is 1.
        file: Number of the chunk's file, ``[c]``.
        position: First byte of the chunk there, ``[c]``.
    """

    keys: Sequence[str]
    is_there: NDArray[np.bool_]
    is_tensor: NDArray[np.bool_]
    is_raw: NDArray[np.bool_]
    dtypes: tuple[str, ...]
    dtype: NDArray[np.int64]
    itemsize: NDArray[np.int64]
    ndim: NDArray[np.int64]
    whole: NDArray[np.int64]
    files: Sequence[str]
    tensor: NDArray[np.int64]
    offset: NDArray[np.int64]
    shape: NDArray[np.int64]
    file: NDArray[np.int64]
    position: NDArray[np.int64]

    def shape_of(self, number: int) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return tuple(self.whole[number, : self.ndim[number]].tolist())


def stored_columns(tensors: Mapping[str, StoredTensor], keys: Sequence[str]) -> Stored:
    """Return the chunks of tensors; of a packed index no other rows are read.

    Args:
        tensors: Those of an index.
        keys: Each once; they need not be stored.

    Raises:
        CheckpointingException: The rows of a packed index cannot be read, or are damaged.
    """
    if isinstance(tensors, PackedTensors):
        return _of_packed(tensors, keys)
    return _of_objects([tensors.get(key) for key in keys], keys)


# -- of an index of objects


def _of_objects(tensors: Sequence[StoredTensor | None], keys: Sequence[str]) -> Stored:
    files: dict[str, int] = {}
    dtypes: dict[str, int] = {}
    owner: list[int] = []
    chunks: list[StoredChunk] = []
    for number, tensor in enumerate(tensors):
        if tensor is not None:
            chunks += tensor.chunks
            owner += [number] * len(tensor.chunks)
    dtype = [0 if one is None else dtypes.setdefault(one.dtype, len(dtypes)) for one in tensors]
    shapes = [() if one is None else one.shape for one in tensors]
    depth = max(map(len, shapes), default=0)
    is_raw = np.ones(len(keys), dtype=bool)
    is_raw[[at for at, chunk in zip(owner, chunks, strict=True) if chunk.encoding != "raw"]] = False
    numbers = np.array(dtype, dtype=np.int64)
    return Stored(
        keys=keys,
        is_there=np.array([one is not None for one in tensors], dtype=bool),
        is_tensor=np.array([one is not None and one.role == "tensor" for one in tensors], bool),
        is_raw=is_raw,
        dtypes=tuple(dtypes),
        dtype=numbers,
        itemsize=np.array([dtype_from_name(name).itemsize for name in dtypes] or [0])[numbers],
        ndim=np.array([len(shape) for shape in shapes], dtype=np.int64),
        whole=matrix(shapes, depth, fill=1),
        files=tuple(dict.fromkeys(chunk.file for chunk in chunks)),
        tensor=np.array(owner, dtype=np.int64),
        offset=matrix([chunk.box.offset for chunk in chunks], depth, fill=0),
        shape=matrix([chunk.box.shape for chunk in chunks], depth, fill=1),
        file=np.array(
            [files.setdefault(chunk.file, len(files)) for chunk in chunks], dtype=np.int64
        ),
        position=clipped([chunk.position for chunk in chunks]),
    )


# -- of a packed index


def _of_packed(packed: PackedTensors, keys: Sequence[str]) -> Stored:
    directory = packed.directory
    found = _numbers(packed, keys)
    is_there = found >= 0
    owner = np.flatnonzero(is_there)
    owner = owner[np.argsort(found[owner], kind="stable")]  # in the order of the file
    numbers = found[owner]
    ndim = np.zeros(len(keys), dtype=np.int64)
    ndim[owner] = directory.ndim[numbers]
    depth = int(ndim.max(initial=0))
    whole = np.ones((len(keys), depth), dtype=np.int64)
    for axis in range(depth):
        has_axis = owner[ndim[owner] > axis]
        whole[has_axis, axis] = directory.shapes[directory.first_axis[found[has_axis]] + axis]
    columns = _rows(packed, numbers, depth)
    dtype = np.zeros(len(keys), dtype=np.int64)
    dtype[owner] = directory.dtype[numbers]
    is_tensor = np.zeros(len(keys), dtype=bool)
    is_tensor[owner] = directory.role[numbers] == ROLES.index("tensor")
    return Stored(
        keys=keys,
        is_there=is_there,
        is_tensor=is_tensor,
        is_raw=np.ones(len(keys), dtype=bool),
        dtypes=tuple(name for name, _ in directory.dtypes),
        dtype=dtype,
        itemsize=np.array([nbytes for _, nbytes in directory.dtypes] or [0])[dtype],
        ndim=ndim,
        whole=whole,
        files=packed.files,
        tensor=np.repeat(owner, directory.counts[numbers]),
        offset=columns.offset,
        shape=columns.shape,
        file=columns.file,
        position=columns.position,
    )


def _numbers(packed: PackedTensors, keys: Sequence[str]) -> NDArray[np.int64]:
    """Return the number of each key in the index, -1 of those that are not there."""
    directory = packed.directory
    if len(keys) * _DENSE < directory.layout.tensors:
        wanted = [-1 if (at := directory.find(key)) is None else at for key in keys]
        return np.array(wanted, dtype=np.int64)
    number: dict[Any, int]
    ends, data = [0, *directory.key_ends.tolist()], directory.keys
    if data.isascii():
        text = data.decode("ascii")
        number = {text[a:b]: at for at, (a, b) in enumerate(pairwise(ends))}
        return np.array([number.get(key, -1) for key in keys], dtype=np.int64)
    number = {data[a:b]: at for at, (a, b) in enumerate(pairwise(ends))}
    wanted = [number.get(key.encode("utf-8", "surrogatepass"), -1) for key in keys]
    return np.array(wanted, dtype=np.int64)


class _Columns:
    """Columns of chunks on their way into a table."""

    def __init__(self, count: int, depth: int) -> None:
        self.offset = np.zeros((count, depth), dtype=np.int64)
        self.shape = np.ones((count, depth), dtype=np.int64)
        self.file = np.zeros(count, dtype=np.int64)
        self.position = np.zeros(count, dtype=np.int64)

    def put(self, at: NDArray[Any] | slice, rows: NDArray[Any], axes: int) -> None:
        self.offset[at, :axes] = rows["offset"]
        self.shape[at, :axes] = rows["shape"]
        self.file[at] = rows["file"]
        self.position[at] = rows["position"]


def _rows(packed: PackedTensors, numbers: NDArray[np.int64], depth: int) -> _Columns:
    """Return the chunks of tensors, whose numbers ascend."""
    directory = packed.directory
    words = np.frombuffer(packed.rows_of(numbers), "<u4")
    counts = directory.counts[numbers]
    widths = directory.starts[numbers + 1] - directory.starts[numbers]
    columns = _Columns(int(counts.sum()), depth)
    row_of, word_of = np.cumsum(counts) - counts, np.cumsum(widths) - widths
    kinds = directory.ndim[numbers] * 16 + directory.widths[numbers]
    for kind in np.unique(kinds).tolist():
        chosen = np.flatnonzero(kinds == kind)
        if len(chosen) == len(numbers):  # rows of one length stand where they are wanted
            columns.put(slice(None), words.view(row_dtype(*divmod(kind, 16))), kind // 16)
            break
        here = counts[chosen]
        within = np.arange(int(here.sum())) - np.repeat(np.cumsum(here) - here, here)
        axes, nbytes = divmod(kind, 16)
        step = row_words(axes, nbytes)
        at = np.repeat(word_of[chosen], here) + within * step
        rows = words[at[:, None] + np.arange(step)].view(row_dtype(axes, nbytes)).reshape(-1)
        columns.put(np.repeat(row_of[chosen], here) + within, rows, axes)
    return columns
