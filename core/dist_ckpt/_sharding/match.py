"""Does a request agree with what a checkpoint holds.

Here: pure checks of one rank's request against the index. Not here: which keys no rank asked for
(``validation``, it needs all ranks). Runs on every rank for itself.
"""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

import numpy as np

from dist_ckpt._sharding.overlaps import padded
from dist_ckpt._sharding.shard_info import dtype_name
from dist_ckpt.box import Box

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from dist_ckpt._sharding.index import CheckpointIndex, StoredTensor
    from dist_ckpt._sharding.table import ShardTable
    from dist_ckpt._sharding.wanted import Wanted
    from dist_ckpt.mapping import ShardedTensor

__all__ = [
    "agreeing_boxes",
    "content_problems",
    "describe_unexpected",
    "differing_dtypes",
    "holes",
    "key_of_object",
    "same_dtype",
    "wanted_box",
]


def agreeing_boxes(table: ShardTable, wanted: Wanted, *, cast: bool) -> NDArray[np.bool_]:
    """Return which described boxes ``[n]`` are sure to have no ``content_problems``.

    Args:
        table: A request.
        wanted: The same beside what is stored.
        cast: Whether another dtype will do.
    """
    stored, tensor = wanted.stored, wanted.tensor
    told = padded(table.global_shape, stored.whole.shape[1], fill=1)
    same: NDArray[np.bool_] = (told == stored.whole[tensor]).all(axis=1)
    same &= stored.ndim[tensor] == table.ndim
    same &= wanted.is_complete & stored.is_there[tensor]
    return same if cast else same & same_dtype(table, wanted)


def same_dtype(table: ShardTable, wanted: Wanted) -> NDArray[np.bool_]:
    """Return which described boxes ``[n]`` have the dtype that is stored."""
    number = {name: at for at, name in enumerate(table.dtypes)}
    stored = np.array([number.get(name, -1) for name in wanted.stored.dtypes] or [-1])
    same: NDArray[np.bool_] = stored[wanted.stored.dtype[wanted.tensor]] == table.dtype
    return same


def differing_dtypes(table: ShardTable, wanted: Wanted) -> dict[str, tuple[str, str]]:
    """Return the stored and the requested dtype of each key where they differ."""
    rows = np.flatnonzero(wanted.stored.is_there[wanted.tensor] & ~same_dtype(table, wanted))
    stored = wanted.stored.dtype[wanted.tensor[rows]].tolist()
    return {
        table.keys[key]: (wanted.stored.dtypes[have], table.dtypes[want])
        for key, have, want in zip(
            table.key[rows].tolist(), stored, table.dtype[rows].tolist(), strict=True
        )
    }


def wanted_box(box: Box, stored_shape: tuple[int, ...]) -> Box | None:
    """Return the part of ``box`` that lies within ``stored_shape``."""
    return box.intersect(Box((0,) * len(stored_shape), stored_shape)) if box.shape else box


def content_problems(
    tensors: Sequence[ShardedTensor], index: CheckpointIndex, *, cast: bool
) -> list[str]:
    """Return every disagreement in shape, dtype or coverage. All keys must be in the index."""
    problems = []
    for tensor in tensors:
        stored = index.tensors[tensor.key]
        expected = tuple(tensor.global_shape)
        loose = tensor.allow_shape_mismatch and len(expected) == len(stored.shape)
        if expected != stored.shape and not loose:
            problems.append(
                f"{tensor.key!r}: global shape {expected} is expected, {stored.shape} is stored"
            )
            continue
        if dtype_name(tensor.dtype) != stored.dtype and not cast:
            problems.append(
                f"{tensor.key!r}: {dtype_name(tensor.dtype)} is expected, {stored.dtype} is stored"
            )
        for box, _ in tensor.pieces():
            wanted = wanted_box(box, stored.shape)
            problems += holes(tensor.key, wanted, stored) if wanted is not None else ()
    return problems


def holes(key: str, box: Box, stored: StoredTensor) -> Iterable[str]:
    """Yield the problem if not all elements of ``box`` are stored."""
    if not box.numel:
        return
    have = stored.stored_in(box)
    if have != box.numel:
        yield (
            f"{key!r}: {have} of the {box.numel} elements at {box.offset} of shape {box.shape} "
            "are stored"
        )


def key_of_object(unique_key: str) -> str:
    """Return the ``key`` of the sharded object that has this ``unique_key``."""
    key, found, _ = unique_key.rpartition("/shard_")
    return key if found else unique_key


def describe_unexpected(keys: Sequence[str], known: Iterable[str]) -> list[str]:
    """Return one line for each requested key that is not stored, with the nearest stored one.

    Keys are those of tensors and objects, without the position of a shard: that suffix is common
    to all objects, and would make unrelated keys look similar.
    """
    names = list(known)
    lines = []
    for position, key in enumerate(keys):
        # The nearest name costs a pass over all names: only the first few are worth it.
        near = difflib.get_close_matches(key, names, n=1) if position < 8 else []  # noqa: PLR2004
        lines.append(f"{key!r} is not stored" + (f" (nearest: {near[0]!r})" if near else ""))
    return lines
