"""The descriptions of all ranks in one table, equal boxes side by side.

Here: ``JobTable``. Not here: one rank's descriptions (``_sharding.table``), what follows from them
(``_sharding``, ``_sharding.assign``). Rank 0 makes it, once for each plan.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from dist_ckpt._sharding.shard_info import dtype_from_name
from dist_ckpt._sharding.table import DATA, ShardTable

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dist_ckpt._sharding.shard_info import ShardInfo

__all__ = ["LARGEST", "Boxes", "JobTable"]

LARGEST = float(1 << 62)
"""Tensors with more elements are left to code with numbers of any size."""


class Boxes:
    """Distinct boxes with elements, and who holds each; sorted by key, offset, shape.

    Attributes:
        rows: Row numbers of the job's table, holders of one box side by side in rank order.
        starts: Where in ``rows`` the holders of each box begin, ``[b]``.
        counts: How many there are, ``[b]``.
    """

    def __init__(self, rows: NDArray[Any], starts: NDArray[Any]) -> None:
        """Take rows in order, and where boxes begin."""
        self.rows, self.starts = rows, starts
        self.counts = np.diff(np.append(starts, len(rows)))

    @property
    def first(self) -> NDArray[Any]:
        """The first holder's row of each box."""
        found: NDArray[Any] = self.rows[self.starts]
        return found


class JobTable:
    """All ranks' descriptions, rank by rank.

    Attributes:
        views: Each rank's.
        keys: Each key once.
        dtypes: Each dtype's name once.
        rank: Whose row it is, ``[n]``.
        index: Its number on that rank, ``[n]``.
        key, dtype, ndim, flags, sizes: As in ``ShardTable``; keys and dtypes are numbered anew.
    """

    def __init__(self, views: Sequence[Sequence[ShardInfo]]) -> None:
        """Put the views together."""
        self.views = [ShardTable.of(view) for view in views]
        keys: dict[str, int] = {}
        dtypes: dict[str, int] = {}
        depth = max((table.sizes.shape[2] for table in self.views), default=0)
        counts = [len(table) for table in self.views]
        total = sum(counts)
        self.sizes = np.ones((3, total, depth), dtype=np.int64)
        self.sizes[0] = 0
        self.key, self.dtype = np.empty(total, np.int32), np.empty(total, np.uint8)
        self.ndim, self.flags = np.empty(total, np.uint8), np.empty(total, np.uint8)
        self.rank = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
        self.index = np.arange(total, dtype=np.int64)
        last: tuple[tuple[str, ...], NDArray[Any]] | None = None
        at = 0
        for table in self.views:
            here = slice(at, at + len(table))
            if last is None or table.keys != last[0]:
                # Most ranks tell of the same keys in the same order.
                numbers = [keys.setdefault(key, len(keys)) for key in table.keys]
                last = table.keys, np.array(numbers or [0], dtype=np.int32)
            kinds = [dtypes.setdefault(name, len(dtypes)) for name in table.dtypes]
            self.key[here] = last[1][table.key]
            self.dtype[here] = np.array(kinds or [0], dtype=np.uint8)[table.dtype]
            self.ndim[here], self.flags[here] = table.ndim, table.flags
            self.sizes[:, here, : table.sizes.shape[2]] = table.sizes
            self.index[here] -= at
            at += len(table)
        self.keys, self.dtypes = tuple(keys), tuple(dtypes)

    @classmethod
    def of(cls, views: JobTable | Sequence[Sequence[ShardInfo]]) -> JobTable:
        """Return the table of some views; a table as it is."""
        return views if isinstance(views, JobTable) else cls(views)

    def __len__(self) -> int:
        """Return the number of descriptions."""
        return len(self.key)

    @cached_property
    def itemsizes(self) -> NDArray[np.int64]:
        """Bytes an element, by number of the dtype."""
        return np.array([dtype_from_name(name).itemsize for name in self.dtypes] or [0])

    @cached_property
    def order_of_keys(self) -> NDArray[np.int64]:
        """Place of each key in the order of their names."""
        places = np.empty(len(self.keys), dtype=np.int64)
        places[sorted(range(len(self.keys)), key=self.keys.__getitem__)] = np.arange(len(self.keys))
        return places

    @cached_property
    def first_rows(self) -> NDArray[np.int64]:
        """The first row of each key."""
        found = np.full(len(self.keys), len(self), dtype=np.int64)
        np.minimum.at(found, self.key, np.arange(len(self)))
        return found

    @cached_property
    def boxes(self) -> Boxes:
        """All distinct boxes with elements."""
        return self._boxes(np.flatnonzero(self._has_elements))

    @cached_property
    def boxes_with_data(self) -> Boxes:
        """All distinct boxes with elements of which somebody has the data."""
        has_data = (self.flags & DATA) != 0
        if bool(has_data[self._has_elements].all()):
            return self.boxes
        return self._boxes(np.flatnonzero(self._has_elements & has_data))

    @cached_property
    def _has_elements(self) -> NDArray[np.bool_]:
        found: NDArray[np.bool_] = (self.sizes[1] != 0).all(axis=1)
        return found

    def _boxes(self, rows: NDArray[Any]) -> Boxes:
        offset, shape = self.sizes[0, rows], self.sizes[1, rows]
        axes = [*reversed(shape.T), *reversed(offset.T)]
        order = np.lexsort((*axes, self.order_of_keys[self.key[rows]]))
        rows, offset, shape = rows[order], offset[order], shape[order]
        is_new = np.ones(len(rows), dtype=bool)
        is_new[1:] = self.key[rows[1:]] != self.key[rows[:-1]]
        is_new[1:] |= (offset[1:] != offset[:-1]).any(axis=1)
        is_new[1:] |= (shape[1:] != shape[:-1]).any(axis=1)
        return Boxes(rows, np.flatnonzero(is_new))

    def only(self, keys: Collection[int]) -> list[list[ShardInfo]]:
        """Return the descriptions of some keys as objects, rank by rank, in their order."""
        found: list[list[ShardInfo]] = [[] for _ in self.views]
        for row in np.flatnonzero(np.isin(self.key, list(keys))).tolist():
            rank = int(self.rank[row])
            found[rank].append(self.views[rank][int(self.index[row])])
        return found
