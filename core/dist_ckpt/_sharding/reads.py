"""Which bytes of which files fill which boxes: this *is* resharding.

Here: wanted boxes x stored chunks -> reads, per file, in file order. Not here: reading.
Pure; runs on each rank for its own boxes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dist_ckpt._sharding.shard_info import dtype_from_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from dist_ckpt._sharding.index import CheckpointIndex, StoredChunk
    from dist_ckpt.box import Box

__all__ = ["Read", "byte_runs", "plan_reads"]


@dataclass(frozen=True, slots=True)
class Read:
    """``region`` (global coordinates) of ``chunk`` goes to the request number ``request``."""

    request: int
    key: str
    dtype: str
    chunk: StoredChunk
    region: Box


def plan_reads(
    requests: Sequence[tuple[str, Box]], index: CheckpointIndex
) -> dict[str, list[Read]]:
    """Return the reads of each file, sorted by position.

    Args:
        requests: ``(key, box)`` pairs; each key must be in the index.
        index: What is stored.

    A box that no chunk covers in full is not noticed here: ``_sharding.match`` has said so before.
    """
    per_file: dict[str, list[Read]] = {}
    for number, (key, box) in enumerate(requests):
        tensor = index.tensors[key]
        for chunk, region in tensor.overlapping(box):
            read = Read(number, key, tensor.dtype, chunk, region)
            per_file.setdefault(chunk.file, []).append(read)
    for reads in per_file.values():
        reads.sort(key=lambda read: (read.chunk.position, read.region, read.request))
    return per_file


def byte_runs(read: Read) -> tuple[int, Iterator[int]]:
    """Return the length in bytes of the contiguous runs of ``read``, and where they lie.

    Positions are those in the file, in row-major order of the region.

    All runs of a region are equally long: trailing axes that the region spans in full, times its
    extent along the last axis that it does not.
    """
    itemsize = dtype_from_name(read.dtype).itemsize
    extent, local = read.chunk.box.shape, read.region.relative_to(read.chunk.box)
    axis = len(extent)
    while axis > 0 and local.shape[axis - 1] == extent[axis - 1]:
        axis -= 1
    run_axis = max(axis - 1, 0)
    run = math.prod(local.shape[run_axis:]) * itemsize
    strides = [math.prod(extent[i + 1 :]) * itemsize for i in range(len(extent))]
    start = read.chunk.position + sum(o * s for o, s in zip(local.offset, strides, strict=True))
    outer = [(local.shape[i], strides[i]) for i in range(run_axis)]
    return run, _positions(start, outer)


def _positions(start: int, outer: Iterable[tuple[int, int]]) -> Iterator[int]:
    axes = list(outer)
    if not axes:
        yield start
        return
    (count, stride), *rest = axes
    for i in range(count):
        yield from _positions(start + i * stride, rest)
