"""Who writes which box, when several ranks hold the same one.

Here: one greedy, deterministic assignment balanced by bytes. Not here: whether the boxes are right
(``_integrity.coverage``).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from dist_ckpt._geometry import Box, split_box
from dist_ckpt._planning.describe import dtype_from_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from dist_ckpt._planning.describe import ShardInfo

__all__ = ["CHUNK_NBYTES", "Split", "WriteItem", "assign_writers", "writers_of_boxes"]

Split: TypeAlias = "Callable[[str, Box, int, int], Iterable[Box]]"
"""``(key, box, itemsize, max_nbytes)`` -> the pieces of the box that are shared out."""

CHUNK_NBYTES = 256 << 20
"""Largest stored chunk: well below the 4 GiB where zip needs its 64-bit records."""

_SPREAD_NBYTES = 16 << 20
"""Largest chunk of a shard that any of several ranks may write: small enough to balance."""


@dataclass(frozen=True, slots=True)
class WriteItem:
    """``box`` (global coordinates) of the rank's shard number ``shard`` is to be written."""

    shard: int
    box: Box


@dataclass(frozen=True, slots=True)
class _Task:
    key: str
    box: Box
    nbytes: int
    holders: tuple[tuple[int, int], ...]  # (rank, index of the shard on that rank)


def assign_writers(
    views: Sequence[Sequence[ShardInfo]], *, split: Split | None = None
) -> list[list[WriteItem]]:
    """Return for each rank the boxes it writes; every distinct box goes to exactly one rank.

    Args:
        views: Each rank's shards, in rank order.
        split: How boxes are cut into what goes to one rank; by size alone if None. What it leaves
            out of a box is written by nobody.

    The result depends on the descriptions alone: ties go to the lowest rank, never to hash order.
    Boxes without elements are written by nobody.
    """
    fixed: list[_Task] = []
    free: list[_Task] = []
    for key, box, candidates in writers_of_boxes(views):
        itemsize = dtype_from_name(views[candidates[0][0]][candidates[0][1]].dtype).itemsize
        limit = _SPREAD_NBYTES if len(candidates) > 1 else CHUNK_NBYTES
        pieces = split(key, box, itemsize, limit) if split else split_box(box, itemsize, limit)
        for piece in pieces:
            task = _Task(key, piece, piece.numel * itemsize, candidates)
            (free if len(candidates) > 1 else fixed).append(task)
    load = [0] * len(views)
    plans: list[list[WriteItem]] = [[] for _ in views]
    free.sort(key=lambda task: (-task.nbytes, task.key, task.box))
    for task in (*fixed, *free):
        rank, index = min(task.holders, key=lambda holder: (load[holder[0]], holder[0]))
        load[rank] += task.nbytes
        plans[rank].append(WriteItem(index, task.box))
    return plans


def writers_of_boxes(
    views: Sequence[Sequence[ShardInfo]],
) -> Iterator[tuple[str, Box, tuple[tuple[int, int], ...]]]:
    """Yield each distinct box with elements, sorted, and who may write it.

    Yields ``(key, box, writers)``; a writer is ``(rank, index of the shard on that rank)``, in rank
    order. Boxes that nobody writes are left out.
    """
    for (key, box), holders in sorted(_holders(views).items()):
        candidates = _candidates(views, holders)
        if candidates:
            yield key, box, tuple(candidates)


def _holders(
    views: Sequence[Sequence[ShardInfo]],
) -> dict[tuple[str, Box], list[tuple[int, int]]]:
    holders: dict[tuple[str, Box], list[tuple[int, int]]] = defaultdict(list)
    for rank, view in enumerate(views):
        for index, info in enumerate(view):
            if info.box.numel and info.has_data:
                holders[info.key, info.box].append((rank, index))
    return holders


def _candidates(
    views: Sequence[Sequence[ShardInfo]], holders: list[tuple[int, int]]
) -> list[tuple[int, int]]:
    infos = [(rank, index, views[rank][index]) for rank, index in holders]
    mains = [(rank, index) for rank, index, info in infos if info.is_main]
    writer = min((info.writer for *_, info in infos), key=("main", "first", "any").index)
    if writer == "main":
        return mains[:1]
    if writer == "first":
        return [(infos[0][0], infos[0][1])]
    seen: dict[int, int] = {}
    for rank, index, _ in infos:
        seen.setdefault(rank, index)
    return list(seen.items())
