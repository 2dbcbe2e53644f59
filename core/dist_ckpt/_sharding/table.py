"""Descriptions of shards, column by column.

Here: ``ShardTable`` (one rank's descriptions) and how it is taken from ``ShardedTensor``;
``LocalShards``, the same with this rank's data. Not here: the descriptions of all ranks together
(``_sharding.together``), decisions. A job has millions of shards, and an object for each costs more
than moving its bytes: objects are made only of rows that somebody looks at.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import torch

from dist_ckpt._sharding.shard_info import (
    LocalShard,
    Role,
    ShardInfo,
    dtype_from_name,
    dtype_name,
    missing_memory,
)
from dist_ckpt.box import Box
from dist_ckpt.errors import InvalidShardingError
from dist_ckpt.mapping import is_main_replica

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dist_ckpt.mapping import ShardedTensor

__all__ = ["DATA", "MAIN", "ROLES", "WRITERS", "LocalShards", "ShardTable", "local_shards"]

MAIN, DATA = 1, 2
"""Bits of ``ShardTable.flags``: the main replica; has data."""

WRITERS = ("main", "first", "any")
"""``flags >> 2 & 3`` is an index into this; the strictest comes first."""

_WRITER_BITS = {name: number << 2 for number, name in enumerate(WRITERS)}

ROLES: tuple[Role, ...] = ("tensor", "object", "part")
"""``flags >> 4 & 3`` is an index into this."""


class ShardTable(Sequence[ShardInfo]):
    """Descriptions of one rank, in their order; looks like a sequence of ``ShardInfo``.

    Attributes:
        keys: Each key once.
        dtypes: Each dtype's name once.
        key: Number of the key; int32, ``[n]``.
        dtype: Number of the dtype; uint8, ``[n]``.
        ndim: Number of axes; uint8, ``[n]``.
        flags: See ``MAIN``, ``DATA``, ``WRITERS``, ``ROLES``; uint8, ``[n]``.
        sizes: Offset, shape and global shape, elements; int64, ``[3, n, D]``. Axes come first; what
            a row has not is offset 0, shape 1 and global shape 1.
    """

    __slots__ = ("__dict__", "dtype", "dtypes", "flags", "key", "keys", "ndim", "sizes")

    def __init__(
        self,
        keys: tuple[str, ...],
        dtypes: tuple[str, ...],
        columns: tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any]],
        sizes: NDArray[np.int64],
    ) -> None:
        """Take the columns key, dtype, ndim, flags, and the sizes."""
        self.keys, self.dtypes, self.sizes = keys, dtypes, sizes
        self.key, self.dtype, self.ndim, self.flags = columns

    @classmethod
    def of(cls, infos: Sequence[ShardInfo]) -> ShardTable:
        """Return the table of some descriptions; a table as it is."""
        if isinstance(infos, ShardTable):
            return infos
        rows = _Rows()
        for one in infos:
            flags = (MAIN if one.is_main else 0) | (DATA if one.has_data else 0)
            flags |= WRITERS.index(one.writer) << 2 | ROLES.index(one.role) << 4
            rows.add(one.key, one.dtype, one.box, one.global_shape, flags)
        return rows.table()

    @property
    def offset(self) -> NDArray[np.int64]:
        """Offset of each box, ``[n, D]``."""
        found: NDArray[np.int64] = self.sizes[0]
        return found

    @property
    def shape(self) -> NDArray[np.int64]:
        """Shape of each box, ``[n, D]``."""
        found: NDArray[np.int64] = self.sizes[1]
        return found

    @property
    def global_shape(self) -> NDArray[np.int64]:
        """Shape of each box's tensor, ``[n, D]``."""
        found: NDArray[np.int64] = self.sizes[2]
        return found

    @cached_property
    def itemsize(self) -> NDArray[np.int64]:
        """Bytes an element, ``[n]``."""
        sizes = [dtype_from_name(name).itemsize for name in self.dtypes]
        found: NDArray[np.int64] = np.array(sizes or [0], dtype=np.int64)[self.dtype]
        return found

    def __len__(self) -> int:
        """Return the number of shards."""
        return len(self.key)

    @overload
    def __getitem__(self, index: int) -> ShardInfo: ...
    @overload
    def __getitem__(self, index: slice) -> list[ShardInfo]: ...
    def __getitem__(self, index: int | slice) -> ShardInfo | list[ShardInfo]:
        """Return one description, or several."""
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        ndim, flags = int(self.ndim[index]), int(self.flags[index])
        offset, shape, whole = (tuple(row[index, :ndim].tolist()) for row in self.sizes)
        return ShardInfo(
            key=self.keys[self.key[index]],
            box=Box(offset, shape),
            global_shape=whole,
            dtype=self.dtypes[self.dtype[index]],
            is_main=bool(flags & MAIN),
            writer=WRITERS[flags >> 2 & 3],  # type: ignore[arg-type]  # the three literals
            has_data=bool(flags & DATA),
            role=ROLES[flags >> 4 & 3],
        )

    def __eq__(self, other: object) -> bool:
        """Whether all descriptions are equal, in the same order."""
        if not isinstance(other, ShardTable):
            return isinstance(other, list | tuple) and list(self) == list(other)
        return (
            self.keys == other.keys
            and self.dtypes == other.dtypes
            and all(
                np.array_equal(getattr(self, name), getattr(other, name))
                for name in ("key", "dtype", "ndim", "flags", "sizes")
            )
        )

    __hash__ = None  # type: ignore[assignment]  # compared by content

    def __reduce__(self) -> tuple[Any, ...]:
        """Leave out what can be made again."""
        columns = (self.key, self.dtype, self.ndim, self.flags)
        return ShardTable, (self.keys, self.dtypes, columns, self.sizes)

    def __repr__(self) -> str:
        """Show the descriptions."""
        return f"ShardTable({list(self)!r})"


class _Rows:
    """Rows on their way into a table; sizes stand one behind the other."""

    def __init__(self) -> None:
        self.keys: list[str] = []
        self.dtypes: list[Any] = []  # names, or dtypes that are named once each
        self.ndims: list[int] = []
        self.flags: list[int] = []
        self.offsets: list[int] = []
        self.shapes: list[int] = []
        self.wholes: list[int] = []

    def add(
        self, key: str, dtype: Any, box: Box, global_shape: tuple[int, ...], flags: int
    ) -> None:
        if len(box.shape) != len(global_shape):
            raise InvalidShardingError(
                f"{key!r}: a box of {len(box.shape)} axes in a tensor of shape {global_shape}"
            )
        self.keys.append(key)
        self.dtypes.append(dtype)
        self.ndims.append(len(box.shape))
        self.flags.append(flags)
        self.offsets += box.offset
        self.shapes += box.shape
        self.wholes += global_shape

    def table(self) -> ShardTable:
        """Return all rows."""
        keys, key = _numbered(self.keys)
        dtypes, dtype = _numbered(self.dtypes)
        if len(dtypes) > np.iinfo(np.uint8).max:
            raise InvalidShardingError(f"{len(dtypes)} different dtypes")
        ndim = np.array(self.ndims, dtype=np.uint8)
        depth = int(ndim.max(initial=0))
        there = np.arange(depth) < ndim[:, None]
        sizes = np.ones((3, len(key), depth), dtype=np.int64)
        sizes[0] = 0
        for target, values in zip(sizes, (self.offsets, self.shapes, self.wholes), strict=True):
            try:
                target[there] = values
            except OverflowError as error:
                raise InvalidShardingError(f"a size of {max(values)} elements") from error
        columns = (
            np.array(key, dtype=np.int32), np.array(dtype, dtype=np.uint8), ndim,
            np.array(self.flags, dtype=np.uint8),
        )  # fmt: skip
        names = tuple(one if isinstance(one, str) else dtype_name(one) for one in dtypes)
        return ShardTable(keys, names, columns, sizes)


def _numbered(values: Sequence[Any]) -> tuple[tuple[Any, ...], list[int]]:
    """Return each value once, in the order in which they come, and the number of each."""
    distinct = dict.fromkeys(values)
    if len(distinct) == len(values):
        return tuple(distinct), list(range(len(values)))
    numbers = {value: number for number, value in enumerate(distinct)}
    return tuple(distinct), [numbers[value] for value in values]


class LocalShards(Sequence[LocalShard]):
    """Descriptions of one rank with its data; looks like a sequence of ``LocalShard``.

    Attributes:
        table: The descriptions.
        data: Box-shaped tensors, None where there is none. They may take part in autograd:
            ``view`` is what may be written to.
    """

    __slots__ = ("data", "table")

    def __init__(self, table: ShardTable, data: list[torch.Tensor | None]) -> None:
        """Take descriptions and data, row by row."""
        self.table, self.data = table, data

    def view(self, index: int) -> torch.Tensor | None:
        """Return the data of a shard, detached."""
        data = self.data[index]
        return None if data is None else data.detach()

    def part(self, index: int, box: Box) -> torch.Tensor:
        """Return the elements of a box (global coordinates) that lies within a shard with data."""
        view = self.view(index)
        assert view is not None  # noqa: S101 - a plan gives work to holders of data only
        if view.shape == box.shape:
            return view
        return view[box.relative_to(self.table[index].box).slices()]

    def __len__(self) -> int:
        """Return the number of shards."""
        return len(self.data)

    @overload
    def __getitem__(self, index: int) -> LocalShard: ...
    @overload
    def __getitem__(self, index: slice) -> list[LocalShard]: ...
    def __getitem__(self, index: int | slice) -> LocalShard | list[LocalShard]:
        """Return one shard, or several."""
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        return LocalShard(self.table[index], self.view(index))

    def with_data(self, data: Iterable[torch.Tensor | None]) -> LocalShards:
        """Return the same descriptions with other data."""
        return LocalShards(self.table, list(data))

    def without_data(self) -> LocalShards:
        """Return the descriptions, as they were told, and nothing more."""
        return LocalShards(self.table, [None] * len(self.data))

    @classmethod
    def joined(cls, parts: Sequence[LocalShards]) -> LocalShards:
        """Return all shards of some, one behind the other."""
        filled = [part for part in parts if len(part)]
        if len(filled) == 1:
            return filled[0]
        data = [one for part in filled for one in part.data]
        return cls(_joined([part.table for part in filled]), data)

    def __add__(self, other: LocalShards) -> LocalShards:
        """Return both, one behind the other."""
        return LocalShards.joined((self, other))


def _joined(tables: Sequence[ShardTable]) -> ShardTable:
    keys: dict[str, int] = {}
    dtypes: dict[str, int] = {}
    depth = max((table.sizes.shape[2] for table in tables), default=0)
    sizes = np.ones((3, sum(map(len, tables)), depth), dtype=np.int64)
    sizes[0] = 0
    columns: list[list[NDArray[Any]]] = [[], [], [], []]
    at = 0
    for table in tables:
        numbers = [keys.setdefault(key, len(keys)) for key in table.keys]
        kinds = [dtypes.setdefault(name, len(dtypes)) for name in table.dtypes]
        columns[0].append(np.array(numbers or [0], dtype=np.int32)[table.key])
        columns[1].append(np.array(kinds or [0], dtype=np.uint8)[table.dtype])
        columns[2].append(table.ndim)
        columns[3].append(table.flags)
        sizes[:, at : at + len(table), : table.sizes.shape[2]] = table.sizes
        at += len(table)
    kinds_of = (np.int32, np.uint8, np.uint8, np.uint8)
    key, dtype, ndim, flags = (
        np.concatenate([np.empty(0, dtype=kind), *column])
        for kind, column in zip(kinds_of, columns, strict=True)
    )
    return ShardTable(tuple(keys), tuple(dtypes), (key, dtype, ndim, flags), sizes)


def local_shards(
    sharded_tensors: Iterable[ShardedTensor], *, role: Role = "tensor", with_data: bool = True
) -> LocalShards:
    """Cut this rank's sharded tensors into boxes, in their order.

    A flattened range becomes several boxes. Every sharded tensor yields at least one, empty ones
    too, so that all ranks know of every key.

    Args:
        sharded_tensors: What to describe.
        role: What the tensors are.
        with_data: False for a request to load: whether there is data is not looked at.

    Raises:
        InvalidShardingError: Data that is not a plain strided tensor of the shape and dtype that
            are told, or a box out of bounds.
    """
    tensors = list(sharded_tensors)
    if with_data:
        problems = [
            f"{one.key!r}: {problem}"
            for one in tensors
            if one.data is not None and (problem := _data_problem(one, one.data)) is not None
        ]
        if problems:
            raise InvalidShardingError("; ".join(problems))
    if all(one.flattened_range is None and not one.prepend_axis_num for one in tensors):
        owners, data = tensors, [one.data if with_data else None for one in tensors]
        table = _table_of_whole(tensors, ROLES.index(role) << 4, with_data=with_data)
    else:
        owners, data, table = _cut(tensors, ROLES.index(role) << 4, with_data=with_data)
    problems = list(_out_of_bounds(table, owners))
    if problems:
        raise InvalidShardingError("; ".join(problems))
    return LocalShards(table, data)


def _table_of_whole(
    tensors: Sequence[ShardedTensor], role_bits: int, *, with_data: bool
) -> ShardTable:
    """Return the table of tensors that each are one box, column by column: there may be many."""
    rows = _Rows()
    rows.keys += [one.key for one in tensors]
    rows.dtypes += [one.dtype for one in tensors]
    rows.ndims += [len(one.local_shape) for one in tensors]
    rows.flags += [_flags(one, role_bits, with_data=with_data) for one in tensors]
    rows.offsets += chain.from_iterable([one.global_offset for one in tensors])
    rows.shapes += chain.from_iterable([one.local_shape for one in tensors])
    rows.wholes += chain.from_iterable([one.global_shape for one in tensors])
    return rows.table()


def _cut(
    tensors: Sequence[ShardedTensor], role_bits: int, *, with_data: bool
) -> tuple[list[ShardedTensor], list[torch.Tensor | None], ShardTable]:
    """Return the boxes of tensors of which some are several: whose they are, data, table."""
    rows = _Rows()
    owners: list[ShardedTensor] = []
    data: list[torch.Tensor | None] = []
    for one in tensors:
        flags = _flags(one, role_bits, with_data=with_data)
        told = one.flattened_range
        if told is not None and told.start == told.stop and not one.global_shape:
            flags &= ~(MAIN | DATA)  # no box is empty without axes: it holds none of the value
        for box, view in _pieces(one):
            rows.add(one.key, one.dtype, box, one.global_shape, flags)
            owners.append(one)
            data.append(view if with_data else None)
    return owners, data, rows.table()


def _flags(tensor: ShardedTensor, role_bits: int, *, with_data: bool) -> int:
    replica = tensor.replica_id
    is_main = replica == 0 if type(replica) is int else is_main_replica(replica)
    flags = role_bits | _WRITER_BITS[tensor.writer] | (MAIN if is_main else 0)
    return flags | DATA if with_data and tensor.data is not None else flags


def _pieces(tensor: ShardedTensor) -> Iterator[tuple[Box, torch.Tensor | None]]:
    found = list(tensor.pieces())
    empty = Box(tuple(tensor.global_offset), (0,) * len(tensor.global_shape))
    yield from found or [(empty, None)]


def _data_problem(tensor: ShardedTensor, data: torch.Tensor) -> str | None:
    if data.layout is not torch.strided or data.is_quantized:
        return f"the data is no plain strided tensor but {data.layout}, {data.dtype}"
    if (missing := missing_memory(data)) is not None:
        return missing
    if data.dtype is not tensor.dtype:
        return f"the data is {data.dtype}, {tensor.dtype} is told"
    if tensor.flattened_range is None and data.shape != tensor.local_shape:
        return f"the data has the shape {tuple(data.shape)}, {tensor.local_shape} is told"
    return None


def _out_of_bounds(table: ShardTable, owners: Sequence[ShardedTensor]) -> Iterator[str]:
    offset, shape, whole = table.sizes
    is_filled = (shape != 0).all(axis=1)
    outside = is_filled & ((offset < 0) | (shape < 0) | (shape > whole - offset)).any(axis=1)
    for row in np.flatnonzero(outside).tolist():
        if not owners[row].allow_shape_mismatch:
            box = table[row].box
            yield (
                f"{table.keys[table.key[row]]!r}: box at {box.offset} of shape {box.shape} does "
                f"not lie in the global shape {owners[row].global_shape}"
            )
