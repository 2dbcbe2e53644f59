"""Is what a packed index says true: nothing in it is believed.

Here: checks of the whole of ``index.bin`` by columns; what does not pass is looked at one by one,
which makes the message. Not here: how it is read (``_sharding.packed``), the files that it tells of
(``_formats``). Runs on rank 0; who reads the same bytes by their checksums need not check again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from dist_ckpt._sharding.coverage import overlaps
from dist_ckpt._sharding.packed import Directory
from dist_ckpt._sharding.packed_layout import ROLES
from dist_ckpt._sharding.packed_rows import row_dtype, row_words, sums_of_rows
from dist_ckpt._sharding.proofs import disjoint_keys
from dist_ckpt._sharding.shard_info import dtype_from_name
from dist_ckpt.box import Box
from dist_ckpt.errors import CorruptedCheckpointError
from dist_ckpt.storage.base import checked_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

__all__ = ["check_packed"]

_MANY_KEYS = 1 << 14
"""Keys that are looked at at a time: each is an object then."""
_LARGE = float(1 << 62)
"""Products below it, reckoned with floats, fit 64 bits."""


def check_packed(data: bytes, *, where: str, sizes: Mapping[str, int]) -> Directory:
    """Return the directory of an index of which everything has been checked.

    Args:
        data: The whole file.
        where: Its path, for errors.
        sizes: The files of the checkpoint with their sizes; only these may be referred to.

    Raises:
        CorruptedCheckpointError: Anything is not as it must be.
        UnknownStrategyError: A newer release wrote it.
    """
    directory = Directory(data, where=where)
    try:
        if len(data) != directory.layout.nbytes:
            raise ValueError(f"{len(data)} bytes, {directory.layout.nbytes} are told")
        _check_names(directory, sizes)
        _check_tensors(directory)
        _check_keys(directory)
        rows = memoryview(data)[directory.layout.directory_nbytes :]
        _check_sums(directory, rows)
        _check_rows(directory, rows, sizes)
    except ValueError as error:
        raise CorruptedCheckpointError(
            f"{where}: not an index of ours ({type(error).__name__}: {error})."
        ) from error
    return directory


def _check_names(directory: Directory, sizes: Mapping[str, int]) -> None:
    layout = directory.layout
    if layout.files > len(sizes):
        raise ValueError(f"{layout.files} files of {len(sizes)}")
    _check_ends(directory.name_ends, layout.name_nbytes, "names of files")
    names = directory.file_names()
    if len(set(names)) != len(names):
        raise ValueError("a file stands there twice")
    for name in names:
        if checked_name(name) not in sizes:
            raise ValueError(f"file {name!r} is not of this checkpoint")
    if layout.dtypes > 256 or len(set(directory.dtypes)) != layout.dtypes:  # noqa: PLR2004 - numbers of one byte
        raise ValueError(f"{layout.dtypes} dtypes, or one of them twice")
    for name, itemsize in directory.dtypes:
        if dtype_from_name(name).itemsize != itemsize:
            raise ValueError(f"{name} of {itemsize} bytes")
        if name.startswith("q"):  # cannot be saved, and tensors of them cannot be made like others
            raise ValueError(f"{name} is a quantized dtype")


def _check_ends(ends: NDArray[Any], nbytes: int, what: str) -> None:
    last = int(ends[-1]) if len(ends) else 0
    if (ends[1:] < ends[:-1]).any() or last != nbytes:
        raise ValueError(f"the {what} do not follow each other up to {nbytes}")


def _check_tensors(directory: Directory) -> None:
    """Check dtypes, roles and shapes."""
    layout = directory.layout
    if (directory.dtype >= layout.dtypes).any():
        raise ValueError(f"a dtype number of {layout.dtypes} and more")
    if (directory.role >= len(ROLES)).any():
        raise ValueError(f"unknown role {directory.role.max()}")
    if (directory.shapes < 0).any():
        raise ValueError("expected sizes, found a negative one")
    is_byte = np.array([name == "uint8" for name, _ in directory.dtypes] or [False])
    wrong = np.flatnonzero((directory.role == ROLES.index("object")) & ~is_byte[directory.dtype])
    if len(wrong):
        raise ValueError(f"{_told(directory, wrong[0])}: an object is stored as uint8")


def _check_keys(directory: Directory) -> None:
    """Check that keys are text, sorted, and each another one."""
    layout = directory.layout
    _check_ends(directory.key_ends, layout.key_nbytes, "keys")
    before: bytes | None = None
    for first in range(0, layout.tensors, _MANY_KEYS):
        several = range(first, min(first + _MANY_KEYS, layout.tensors))
        keys = [directory.key_bytes(number) for number in several]
        if before is not None and before >= keys[0]:
            raise ValueError(f"{keys[0]!r} does not come behind {before!r}")
        for one, following in pairwise(keys):
            if one >= following:
                raise ValueError(f"{following!r} does not come behind {one!r}")
        for key in keys:
            key.decode("utf-8", "surrogatepass")
        before = keys[-1]


def _check_sums(directory: Directory, rows: memoryview) -> None:
    wrong = np.flatnonzero(sums_of_rows(rows, directory.starts) != directory.sums)
    if len(wrong):
        raise ValueError(f"{_told(directory, wrong[0])}: the checksum of its chunks is another one")


@dataclass(frozen=True, slots=True)
class _Kind:
    """All chunks of the tensors of one number of axes and one width, column by column.

    Attributes:
        tensor: Number of each chunk's tensor, ``[n]``, ascending.
        offset: ``[n, axes]``, elements; shape as well.
        shape: Extents.
        whole: Shape of its tensor.
        file: Number of its file, ``[n]``.
        position: First byte, ``[n]``.
        itemsize: Bytes an element, ``[n]``.
    """

    tensor: NDArray[np.int64]
    offset: NDArray[np.int64]
    shape: NDArray[np.int64]
    whole: NDArray[np.int64]
    file: NDArray[np.int64]
    position: NDArray[np.int64]
    itemsize: NDArray[np.int64]


def _check_rows(directory: Directory, rows: memoryview, sizes: Mapping[str, int]) -> None:
    """Check every chunk, what they share of files, and what chunks of a tensor share."""
    names = directory.file_names()
    nbytes_of = np.array([sizes[name] for name in names] or [0], np.int64)
    extents = []
    for kind in _kinds(directory, rows):
        nbytes = _checked_nbytes(directory, kind, nbytes_of)
        extents.append((kind.file, kind.position, nbytes, kind.tensor))
        _check_disjoint(directory, kind)
    if extents:
        columns = [np.concatenate(column) for column in zip(*extents, strict=True)]
        _check_extents(directory, columns, names)


def _kinds(directory: Directory, rows: memoryview) -> Iterator[_Kind]:
    words = np.frombuffer(rows, "<u4")
    itemsizes = np.array([itemsize for _, itemsize in directory.dtypes] or [0], np.int64)
    kinds = directory.ndim * 16 + directory.widths
    for kind in np.unique(kinds[directory.counts > 0]).tolist():
        ndim, width = divmod(kind, 16)
        tensors = np.flatnonzero((kinds == kind) & (directory.counts > 0))
        counts, step = directory.counts[tensors], row_words(ndim, width)
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        at = np.repeat(directory.starts[tensors], counts) + within * step
        part = words[at[:, None] + np.arange(step)].view(row_dtype(ndim, width))[:, 0]
        first = directory.first_axis[tensors]
        shapes = directory.shapes[first[:, None] + np.arange(ndim)].astype(np.int64)
        yield _Kind(
            tensor=np.repeat(tensors, counts),
            offset=part["offset"].astype(np.int64),
            shape=part["shape"].astype(np.int64),
            whole=np.repeat(shapes, counts, axis=0),
            file=part["file"].astype(np.int64),
            position=part["position"].astype(np.int64),
            itemsize=np.repeat(itemsizes[directory.dtype[tensors]], counts),
        )


def _checked_nbytes(
    directory: Directory, kind: _Kind, nbytes_of: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return how many bytes each chunk has, all of which lie within the chunk's file."""
    bad = ((kind.offset < 0) | (kind.shape < 1) | (kind.shape > kind.whole - kind.offset)).any(1)
    bad |= (kind.file >= directory.layout.files) | (kind.position < 0)
    bad |= kind.shape.astype(np.float64).prod(axis=1) * kind.itemsize >= _LARGE
    shape = np.where(bad[:, None], 0, kind.shape)
    nbytes: NDArray[np.int64] = shape.prod(axis=1) * kind.itemsize
    bad |= nbytes > nbytes_of[np.where(bad, 0, kind.file)] - kind.position
    wrong = np.flatnonzero(bad)
    if len(wrong):
        raise ValueError(_row_problem(directory, kind, int(wrong[0]), nbytes_of))
    return nbytes


def _row_problem(directory: Directory, kind: _Kind, row: int, nbytes_of: NDArray[np.int64]) -> str:
    key, whole = _told(directory, kind.tensor[row]), tuple(kind.whole[row].tolist())
    offset, shape = tuple(kind.offset[row].tolist()), tuple(kind.shape[row].tolist())
    told = f"{key}: chunk at {offset} of shape {shape}"
    if min((*offset, 0)) < 0 or min((*shape, 1)) < 1 or not Box(offset, shape).within(whole):
        return f"{told} does not fit shape {whole}"
    file, position = int(kind.file[row]), int(kind.position[row])
    if file >= directory.layout.files:
        return f"{told} is in file {file} of {directory.layout.files}"
    nbytes, name = math.prod(shape) * int(kind.itemsize[row]), directory.file_names()[file]
    size = int(nbytes_of[file])
    return f"{told} at {position}+{nbytes} is outside of file {name!r} of {size} bytes"


def _check_extents(
    directory: Directory, columns: list[NDArray[np.int64]], names: list[str]
) -> None:
    """Raise if two chunks share bytes of a file: few bytes could stand for any amount of memory."""
    file, position, nbytes, tensor = columns
    order = np.lexsort((position, file))
    one, following = order[:-1], order[1:]
    shared = (file[one] == file[following]) & (position[one] + nbytes[one] > position[following])
    for at in islice(np.flatnonzero(shared), 1):
        a, b = one[at], following[at]
        raise ValueError(
            f"{_told(directory, tensor[a])} and {_told(directory, tensor[b])} share bytes of "
            f"{names[file[b]]!r} at {position[b]}"
        )


def _check_disjoint(directory: Directory, kind: _Kind) -> None:
    """Raise if two chunks of a tensor share an element: counting them would then prove nothing."""
    several = np.flatnonzero(directory.counts[kind.tensor] > 1)
    if not len(several):
        return
    owner = kind.tensor[several]  # ascending
    is_first = np.ones(len(owner), bool)
    is_first[1:] = owner[1:] != owner[:-1]
    tensors, number = owner[is_first], np.cumsum(is_first) - 1
    shapes = kind.whole[several[is_first]]
    accepted = disjoint_keys(number, kind.offset[several], kind.shape[several], shapes)
    for tensor in tensors[~accepted].tolist():
        rows = slice(*np.searchsorted(kind.tensor, (tensor, tensor + 1)).tolist())
        places = zip(kind.offset[rows].tolist(), kind.shape[rows].tolist(), strict=True)
        boxes = [Box(tuple(offset), tuple(shape)) for offset, shape in places]
        whole = directory.shape(tensor)
        stored = sum(box.numel for box in boxes)
        if stored > math.prod(whole):
            raise ValueError(
                f"{_told(directory, tensor)}: {stored} elements are stored of {math.prod(whole)}"
            )
        if overlaps(boxes):
            raise ValueError(f"chunks overlap in {_told(directory, tensor)}")


def _told(directory: Directory, number: int | np.integer[Any]) -> str:
    return repr(directory.key_bytes(int(number)).decode("utf-8", "backslashreplace"))
