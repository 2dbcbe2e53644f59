"""Stored chunks -> boxes of tensors, bytes straight into the tensors' memory.

Here: how each planned read is carried out. Not here: which reads (``_sharding.reads``), threads
(``storage.transfer``), files (``storage``). Runs on every rank for its own boxes.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
import torch

from dist_ckpt._formats.base import Destination
from dist_ckpt._formats.torch_dist.payload import Record, find_payload
from dist_ckpt._formats.torch_dist.runs import Memory, read_runs
from dist_ckpt._formats.torch_dist.unpickle import tensor_of_record
from dist_ckpt._formats.verification import VerifiedStore
from dist_ckpt._sharding.index import StoredChunk
from dist_ckpt._sharding.reads import Read, byte_runs, plan_reads
from dist_ckpt._sharding.shard_info import dtype_from_name
from dist_ckpt._sharding.wanted import boxes_of, runs_of
from dist_ckpt._staging_pool.memory import (
    PIECE_NBYTES,
    Scratch,
    copy_cast,
    host_bytes,
    is_plain_memory,
)
from dist_ckpt.box import Box, split_box
from dist_ckpt.errors import CheckpointingException, CorruptedCheckpointError
from dist_ckpt.storage import Extent
from dist_ckpt.storage.transfer import run_jobs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dist_ckpt._sharding.index import CheckpointIndex
    from dist_ckpt.storage import Store

__all__ = ["Destination", "read_into"]

_MANY_RUNS = 256
"""Up to so many runs of a region are read one by one, exactly the bytes that are needed."""

_CALL_NBYTES = 4096
"""What one more read call costs, in bytes read along: beyond ``_MANY_RUNS``, the cheaper way."""

_SPAN_NBYTES = 4 << 20
"""What lies between the runs of a region is read in pieces up to this size: they are copied while
they are in the processor's cache."""

_SMALL_RECORD_NBYTES = 1 << 14
"""A record up to this size is read whole: finding the payload in it takes as long."""


@dataclass(frozen=True, slots=True)
class _Source:
    """The file that a job reads, the job's own bounce memory, and payloads that it has found."""

    store: Store
    name: str
    scratch: Scratch
    payloads: dict[int, int | None] = field(default_factory=dict)


def read_into(
    destinations: Sequence[Destination],
    index: CheckpointIndex,
    store: Store,
    *,
    thread_count: int,
) -> int:
    """Fill all destinations in place and return the number of bytes read from the store.

    A destination of another dtype than the stored one is cast; whether that is wanted has been
    decided before (``_sharding.match``).

    Raises:
        CorruptedCheckpointError: A file ends early or a record cannot be decoded; names the key.
        StorageError: The store failed.
    """
    nbytes = 0
    if isinstance(store, VerifiedStore):
        nbytes, destinations = _read_runs(destinations, index, store, thread_count=thread_count)
    plan = plan_reads([(d.key, d.box) for d in destinations], index)
    jobs = [
        _job(store, name, part, destinations)
        for name, reads in plan.items()
        for part in _parts(reads, thread_count)
    ]
    return nbytes + sum(run_jobs(jobs, thread_count=thread_count, name="dist_ckpt-read"))


def _read_runs(
    destinations: Sequence[Destination],
    index: CheckpointIndex,
    store: VerifiedStore,
    *,
    thread_count: int,
) -> tuple[int, Sequence[Destination]]:
    """Fill what is plain memory by runs; return how many bytes that were, and what is left."""
    keys = [one.key for one in destinations]
    wanted = boxes_of(keys, [one.box for one in destinations], index.tensors)
    dtypes = [dtype_from_name(name) for name in wanted.stored.dtypes]
    number = wanted.stored.dtype[wanted.tensor].tolist()
    plain = [
        one.view.data_ptr() if one.view.dtype == dtypes[at] and is_plain_memory(one.view) else 0
        for one, at in zip(destinations, number, strict=True)
    ]
    address = np.array(plain, dtype=np.int64)
    runs, filled = runs_of(wanted, address != 0)
    memory = Memory(address[runs.box] + runs.start, lambda run: keys[runs.box[run]])
    nbytes = read_runs(runs, memory, store, thread_count=thread_count)
    done = filled.tolist()
    return nbytes, [one for one, is_done in zip(destinations, done, strict=True) if not is_done]


def _parts(reads: list[Read], count: int) -> list[list[Read]]:
    """Cut the reads of a file into runs of about equal bytes, in file order."""
    total = sum(read.chunk.nbytes for read in reads)
    parts: list[list[Read]] = [[]]
    seen = 0
    for read in reads:
        if seen * count >= total * len(parts):
            parts.append([])
        parts[-1].append(read)
        seen += read.chunk.nbytes
    return [part for part in parts if part]


def _job(
    store: Store, name: str, reads: list[Read], destinations: Sequence[Destination]
) -> Callable[[Callable[[], None]], int]:
    def run(check: Callable[[], None]) -> int:
        nbytes = 0
        source = _Source(store, name, Scratch())
        for read in reads:
            check()
            target = destinations[read.request]
            inside = read.region.relative_to(target.box)
            view = target.view[inside.slices()] if inside.shape else target.view
            try:
                nbytes += _fill(source, read, view)
            except CheckpointingException as error:
                raise type(error)(f"{read.key!r}: {error}") from error
        return nbytes

    return run


def _fill(source: _Source, read: Read, view: torch.Tensor) -> int:
    dtype = dtype_from_name(read.dtype)
    if read.chunk.encoding == "torch_zip":
        return _fill_from_record(source, read, view)
    run, positions = byte_runs(read)
    count = read.region.numel * dtype.itemsize // run
    if count > _MANY_RUNS and _span(read) < count * (run + _CALL_NBYTES):
        return _fill_from_span(source, read, view)
    if view.dtype != dtype or not is_plain_memory(view):
        return _fill_by_pieces(source, read, view)
    memory = host_bytes(view)
    at = 0
    while batch := list(islice(positions, _MANY_RUNS)):
        extents = [
            Extent(position, memory[at + i * run : at + (i + 1) * run])
            for i, position in enumerate(batch)
        ]
        source.store.read_ranges(source.name, extents)
        at += len(batch) * run
    return memory.nbytes


def _fill_by_pieces(source: _Source, read: Read, view: torch.Tensor) -> int:
    """Read into bounce buffers of bounded size and copy (or cast) from there."""
    dtype = dtype_from_name(read.dtype)
    nbytes = 0
    for box in split_box(read.region, dtype.itemsize, PIECE_NBYTES):
        buffer = source.scratch.take("piece", box.shape, dtype)
        part = Read(read.request, read.key, read.dtype, read.chunk, box)
        nbytes += _fill(source, part, buffer)
        copy_cast(_sub_view(view, box, read.region), buffer)
    return nbytes


def _fill_from_span(source: _Source, read: Read, view: torch.Tensor) -> int:
    """Read everything between the first and the last run, and pick the runs from memory."""
    region = read.region
    span = _span(read)
    if span > _SPAN_NBYTES and any(n > 1 for n in region.shape):
        nbytes = 0
        for half in split_box(region, 1, (region.numel + 1) // 2):
            part = Read(read.request, read.key, read.dtype, read.chunk, half)
            nbytes += _fill(source, part, _sub_view(view, half, region))
        return nbytes
    dtype = dtype_from_name(read.dtype)
    buffer = source.scratch.take("span", (span // dtype.itemsize,), dtype)
    _, positions = byte_runs(read)
    source.store.read_ranges(source.name, [Extent(next(positions), host_bytes(buffer))])
    copy_cast(view, torch.as_strided(buffer, region.shape, _strides(read.chunk.box)))
    return span


def _fill_from_record(source: _Source, read: Read, view: torch.Tensor) -> int:
    """Take the region from a ``torch.save`` record, as other writers leave them.

    Where the payload can be found in the record, only the bytes of the region are read.
    """
    chunk = read.chunk
    payload = _payload(source, read) if chunk.nbytes > _SMALL_RECORD_NBYTES else None
    if payload is None:
        return _fill_from_whole_record(source, read, view)
    itemsize = dtype_from_name(read.dtype).itemsize
    start = payload + chunk.record_start * itemsize
    raw = StoredChunk(chunk.box, chunk.file, start, chunk.box.numel * itemsize)
    return _fill(source, replace(read, chunk=raw), view)


def _payload(source: _Source, read: Read) -> int | None:
    """Return where the elements of a record begin in the file; looked for once a job."""
    position = read.chunk.position
    if position not in source.payloads:
        record = Record(position, read.chunk.nbytes, _record_shape(read.chunk), read.dtype)
        source.payloads[position] = find_payload(source.store, source.name, record)
    return source.payloads[position]


def _record_shape(chunk: StoredChunk) -> tuple[int, ...]:
    return chunk.box.shape if chunk.record_shape is None else chunk.record_shape


def _fill_from_whole_record(source: _Source, read: Read, view: torch.Tensor) -> int:
    chunk = read.chunk
    data = bytearray(chunk.nbytes)
    source.store.read_ranges(source.name, [Extent(chunk.position, memoryview(data))])
    expected = (_record_shape(chunk), dtype_from_name(read.dtype))
    try:
        tensor = tensor_of_record(data)
    except ValueError as error:
        raise CorruptedCheckpointError(
            f"{source.name}: no tensor record at byte {chunk.position}: what is there is not a "
            f"{read.dtype} tensor of shape {expected[0]} ({error})."
        ) from error
    if (tuple(tensor.shape), tensor.dtype) != expected:
        raise CorruptedCheckpointError(
            f"{source.name}: the record at byte {chunk.position} is not a {read.dtype} tensor "
            f"of shape {expected[0]}."
        )
    if chunk.record_shape is not None:
        stop = chunk.record_start + chunk.box.numel
        tensor = tensor.reshape(-1)[chunk.record_start : stop].view(chunk.box.shape)
    inside = read.region.relative_to(chunk.box)
    copy_cast(view, tensor[inside.slices()] if inside.shape else tensor)
    return len(data)


def _span(read: Read) -> int:
    """Bytes from the first to the last byte of the region within its chunk."""
    strides = _strides(read.chunk.box)
    last = sum((n - 1) * s for n, s in zip(read.region.shape, strides, strict=True))
    return (last + 1) * dtype_from_name(read.dtype).itemsize


def _strides(box: Box) -> list[int]:
    strides, size = [], 1
    for extent in reversed(box.shape):
        strides.append(size)
        size *= extent
    return strides[::-1]


def _sub_view(view: torch.Tensor, box: Box, region: Box) -> torch.Tensor:
    return view[box.relative_to(region).slices()] if box.shape else view
