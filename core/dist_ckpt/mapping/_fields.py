"""The fields of sharded tensors and objects, from what users give them.

Here: plain ints, tuples and ranges of anything that can stand for them, and a place in a grid. Not
here: whether the fields fit each other (``mapping._tensor``, ``mapping``).
"""

from __future__ import annotations

import math
import operator
from typing import TYPE_CHECKING, Any

from dist_ckpt.errors import InvalidShardingError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dist_ckpt.types import ReplicaId

__all__ = ["place_in_grid", "plain_ints", "plain_range", "plain_replica_id"]


def plain_replica_id(replica_id: Any, where: str) -> ReplicaId:
    """Return one integer, or a tuple of them."""
    try:
        return operator.index(replica_id)
    except TypeError:
        return plain_ints(replica_id, where, "replica_id")


def plain_ints(values: Iterable[Any], where: str, name: str) -> tuple[int, ...]:
    """Return what can stand for integers as a tuple of them.

    Raises:
        InvalidShardingError: Something else is among them.
    """
    try:
        return tuple(operator.index(n) for n in values)
    except TypeError as e:
        raise InvalidShardingError(f"{where}: {name} must hold integers, not {values!r}.") from e


def plain_range(flattened_range: slice, local_shape: tuple[int, ...], where: str) -> slice:
    """Return a range of the flattened local tensor with both of its ends.

    Raises:
        InvalidShardingError: It is no such range.
    """
    numel = math.prod(local_shape)
    bounds = flattened_range.start, flattened_range.stop
    start, stop = plain_ints(
        (d if n is None else n for n, d in zip(bounds, (0, numel), strict=True)),
        where,
        "flattened_range",
    )
    if flattened_range.step not in (None, 1) or not 0 <= start <= stop <= numel:
        raise InvalidShardingError(
            f"{where}: flattened_range {flattened_range} is not a range without step of the "
            f"{numel} elements of local_shape {local_shape}."
        )
    return slice(start, stop)


def place_in_grid(
    key: str,
    local_shape: tuple[int, ...],
    rank_offsets: tuple[tuple[int, int, int], ...],
    *,
    prepend_axis_num: int,
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Return global shape, global offset and fragmentations that the rank offsets mean.

    Raises:
        InvalidShardingError: They are impossible.
    """
    extents = (1,) * prepend_axis_num + local_shape
    if not rank_offsets:
        return extents, (0,) * len(extents), (1,) * len(extents)
    places: dict[int, tuple[int, int]] = {}
    problems = []
    for axis, offset, fragments in rank_offsets:
        if axis in places:
            problems.append(f"Duplicated axis specified: {axis}")
        if not 0 <= axis < len(extents):
            problems.append(f"axis {axis} does not exist in {len(extents)} axes")
        if not 0 <= offset < fragments:
            problems.append(f"axis {axis}: offset {offset} is not in [0, {fragments})")
        places[axis] = (offset, fragments)
    if problems:
        raise InvalidShardingError(
            f"Invalid rank offsets: {rank_offsets} for ShardedTensor {key!r}: "
            f"{'; '.join(problems)}."
        )
    shape, place, cells = list(extents), [0] * len(extents), [1] * len(extents)
    for axis, (offset, fragments) in places.items():
        shape[axis], place[axis], cells[axis] = (
            shape[axis] * fragments,
            shape[axis] * offset,
            fragments,
        )
    return tuple(shape), tuple(place), tuple(cells)
