"""Do the shards of all ranks tile each tensor: nothing missing, nothing twice.

Here: pure checks over the descriptions of all ranks, for regular and uneven boxes alike. Not here:
who then writes (``_sharding.assign``). Runs on rank 0.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from operator import itemgetter
from typing import TYPE_CHECKING

from dist_ckpt.box import Box

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from dist_ckpt._sharding.shard_info import ShardInfo

__all__ = ["agreement_problems", "coverage_problems", "overlaps", "storage_problems"]

_SHOWN = 4
_MANY = 8
"""Pairs for each box that are simply compared."""
_LARGEST_PART = 0.75


def agreement_problems(views: Sequence[Sequence[ShardInfo]]) -> list[str]:
    """Return where ranks disagree on a tensor's dtype or global shape, for every key."""
    problems = []
    for key, held in sorted(_by_key(views).items()):
        for what in ("dtype", "global_shape"):
            ranks: dict[object, list[int]] = defaultdict(list)
            for rank, info in held:
                if rank not in ranks[getattr(info, what)]:
                    ranks[getattr(info, what)].append(rank)
            if len(ranks) > 1:
                told = ", ".join(f"{value} on ranks {at}" for value, at in ranks.items())
                problems.append(f"{key!r}: ranks disagree on {what}: {told}")
        if len({info.role for _, info in held}) > 1:
            problems.append(
                f"{key!r}: the key of a sharded tensor is also that of an object or of a tensor "
                "within the common part or an object; rename the sharded tensor"
            )
    return problems


def storage_problems(views: Sequence[Sequence[ShardInfo]]) -> list[str]:
    """Return what would make a checkpoint that cannot be read back, for every key.

    Whatever else is allowed: boxes to be written lie within their tensor, do not overlap, and
    somebody has their data.
    """
    problems = []
    for key, held in sorted(_by_key(views).items()):
        written: list[Box] = []
        for box, holders in sorted(_by_box(held).items()):
            ranks = _shown(sorted({rank for rank, _ in holders}))
            shape = holders[0][1].global_shape
            if not box.within(shape):
                problems.append(f"{key!r}: {_box(box)} is outside of {shape} (ranks {ranks})")
            if not _mains(holders):
                continue
            written.append(box)
            with_data = [(rank, info) for rank, info in holders if info.has_data]
            if not with_data or not _mains(with_data):
                problems.append(f"{key!r}: {_box(box)} has no data (ranks {ranks})")
        problems += [f"{key!r}: {_box(a)} and {_box(b)} overlap" for a, b in overlaps(written)]
    return problems


def coverage_problems(views: Sequence[Sequence[ShardInfo]]) -> list[str]:
    """Return every gap, overlap and double main replica, for every key.

    A shard counts once, however many replicas of it there are. Among replicas of writer ``main``
    exactly one must be the main one; for ``any`` and ``first`` one holder is enough.
    """
    problems = []
    for key, held in sorted(_by_key(views).items()):
        shape = held[0][1].global_shape
        ranks = sorted({rank for rank, _ in held})
        where = f"(global shape {shape}, ranks {_shown(ranks)})"
        boxes = []
        for box, holders in sorted(_by_box(held).items()):
            mains = _mains(holders)
            if len(mains) > 1:
                problems.append(f"{key!r}: {_box(box)} has main replicas on ranks {mains} {where}")
            if mains:
                boxes.append(box)
        problems += [
            f"{key!r}: {_box(a)} and {_box(b)} overlap {where}" for a, b in overlaps(boxes)
        ]
        problems += [
            f"{key!r}: {_box(gap)} is saved by no main replica {where}"
            for gap in _gaps(boxes, shape)
        ]
    return problems


def _by_key(views: Sequence[Sequence[ShardInfo]]) -> dict[str, list[tuple[int, ShardInfo]]]:
    by_key: dict[str, list[tuple[int, ShardInfo]]] = defaultdict(list)
    for rank, view in enumerate(views):
        for info in view:
            by_key[info.key].append((rank, info))
    return by_key


def _by_box(held: list[tuple[int, ShardInfo]]) -> dict[Box, list[tuple[int, ShardInfo]]]:
    by_box: dict[Box, list[tuple[int, ShardInfo]]] = defaultdict(list)
    for rank, info in held:
        if info.box.numel:
            by_box[info.box].append((rank, info))
    return by_box


def _mains(holders: list[tuple[int, ShardInfo]]) -> list[int]:
    """Return the ranks whose copy counts: one is right, none is a gap, more are too many."""
    if any(info.writer == "main" for _, info in holders):
        return [rank for rank, info in holders if info.is_main]
    return [holders[0][0]]


def overlaps(boxes: list[Box]) -> list[tuple[Box, Box]]:
    """Return pairs of boxes that share an element; a few are enough to tell.

    Boxes come from whoever wrote a checkpoint, too: where very many lie beside each other along an
    axis, they are parted in two until they do not.
    """
    if len(boxes) < 2 or not boxes[0].shape:  # noqa: PLR2004 - a pair
        return []
    found: list[tuple[Box, Box]] = []
    groups = [boxes]
    while groups and len(found) < _SHOWN:
        group = groups.pop()
        candidates, axis, ordered = min(_sweeps(group), key=itemgetter(0))
        parts = _parted(group) if candidates > _MANY * len(group) else None
        if parts is not None:
            groups += parts
        elif candidates:
            found += _swept(ordered, axis)
    return list(dict.fromkeys(found))[:_SHOWN]


def _sweeps(group: list[Box]) -> Iterator[tuple[int, int, list[Box]]]:
    """Yield for each axis how many pairs share a coordinate along it, and the boxes in order."""
    for axis in range(len(group[0].shape)):
        ordered = sorted(group, key=lambda box, axis=axis: box.offset[axis])  # type: ignore[misc]  # a default of a lambda
        starts = [box.offset[axis] for box in ordered]
        reached = (bisect_left(starts, box.offset[axis] + box.shape[axis]) for box in ordered)
        yield sum(max(at - i - 1, 0) for i, at in enumerate(reached)), axis, ordered


def _parted(group: list[Box]) -> tuple[list[Box], list[Box]] | None:
    """Return the boxes on either side of the best cut, across which none of a pair is lost.

    A box that is cut is on both sides. None where every cut leaves too many on both.
    """
    best: tuple[list[Box], list[Box]] | None = None
    for axis in range(len(group[0].shape)):
        starts = sorted(box.offset[axis] for box in group)
        cut = next((at for at in starts[len(starts) // 2 :] if at > starts[0]), starts[0])
        below = [box for box in group if box.offset[axis] < cut]
        above = [box for box in group if box.offset[axis] + box.shape[axis] > cut]
        if best is None or len(below) + len(above) < len(best[0]) + len(best[1]):
            best = below, above
    is_progress = best is not None and max(map(len, best)) <= _LARGEST_PART * len(group)
    return best if is_progress else None


def _swept(ordered: list[Box], axis: int) -> list[tuple[Box, Box]]:
    found, active = [], list[Box]()
    for box in ordered:
        active = [other for other in active if other.stop[axis] > box.offset[axis]]
        found += [(other, box) for other in active if other.intersect(box) is not None]
        if len(found) >= _SHOWN:
            break
        active.append(box)
    return found


def _gaps(boxes: list[Box], shape: tuple[int, ...]) -> list[Box]:
    """Return boxes of the tensor that no box covers; a few are enough to tell."""
    total = math.prod(shape)
    if sum(box.numel for box in boxes) >= total and not overlaps(boxes):
        return []
    rest = [Box((0,) * len(shape), shape)] if total else []
    for box in boxes:
        rest = [part for piece in rest for part in _minus(piece, box)]
    return rest[:_SHOWN]


def _minus(piece: Box, hole: Box) -> Iterable[Box]:
    common = piece.intersect(hole)
    if common is None:
        yield piece
        return
    offset, shape = list(piece.offset), list(piece.shape)
    for axis in range(len(shape)):
        for start, stop in (
            (offset[axis], common.offset[axis]),
            (common.stop[axis], offset[axis] + shape[axis]),
        ):
            if stop > start:
                yield Box(
                    (*offset[:axis], start, *offset[axis + 1 :]),
                    (*shape[:axis], stop - start, *shape[axis + 1 :]),
                )
        offset[axis], shape[axis] = common.offset[axis], common.shape[axis]


def _box(box: Box) -> str:
    if not box.shape:
        return "the value"
    return "[" + ", ".join(f"{o}:{s}" for o, s in zip(box.offset, box.stop, strict=True)) + "]"


def _shown(ranks: list[int]) -> str:
    told = ", ".join(map(str, ranks[:_SHOWN]))
    return f"{told}, ... ({len(ranks)} in all)" if len(ranks) > _SHOWN else told
