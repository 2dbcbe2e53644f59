"""The floor: the same bytes by ``pwrite`` and ``preadv`` in threads; no format, no checks.

Here: what the hardware takes for whole, replicated and cut tensors. Not here: anything that one
would want to keep: the names of files and the positions in them are known beforehand.

A rank writes one file a thread. Replicated tensors are written by all ranks in equal shares of
bytes; every rank reads all of them, or (``ExchangeFloor``) its share, and is sent the rest.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from harness.states import Shard

from contenders.base import Contender

Extent = tuple[int, memoryview]
"""A position in a file, and the memory that goes there or comes from there."""

BLOCK_NBYTES = 8 << 20
PAGE = 4096


class Floor(Contender):
    """Buffered, one system call a tensor. What it loads on another layout was saved by rows."""

    warms_up = False

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self._is_replicated = False

    def bind(self, shards: Sequence[Shard]) -> None:
        super().bind(shards)
        self._is_replicated = self.world > 1 and all(shard.axis is None for shard in shards)

    def save(self, at: Path) -> None:
        at.mkdir(exist_ok=True)
        self._in_threads(
            lambda thread: self._write(at / f"{self.rank}-{thread}.raw", self._mine(thread))
        )
        for directory in (at, at.parent):
            _sync(directory)

    def load(self, at: Path) -> None:
        if self._is_replicated:
            for rank in range(self.world):
                self._in_threads(
                    lambda thread, rank=rank: _read(
                        at / f"{rank}-{thread}.raw", self._share(rank, thread)
                    )
                )
            return
        stored = _stored_parts(at)
        self._in_threads(lambda thread: self._load_cut(at, stored, thread))

    def _write(self, path: Path, extents: Iterable[Extent]) -> None:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            for position, data in extents:
                _all_of(data, position, lambda rest, at: os.pwrite(descriptor, rest, at))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def _mine(self, thread: int) -> Iterator[Extent]:
        if self._is_replicated:
            return self._share(self.rank, thread)
        return _in_sequence(_bytes(shard.data) for shard in self.shards[thread :: self.threads])

    def _share(self, rank: int, thread: int) -> Iterator[Extent]:
        """The bytes of all tensors one after another, cut evenly for ranks, then for threads."""
        total = sum(shard.data.nbytes for shard in self.shards)
        number, count = rank * self.threads + thread, self.world * self.threads
        low, high = total * number // count, total * (number + 1) // count
        return _in_sequence(_between([_bytes(shard.data) for shard in self.shards], low, high))

    def _in_threads(self, do: Callable[[int], None]) -> None:
        with ThreadPoolExecutor(self.threads) as pool:
            list(pool.map(do, range(self.threads)))

    def _load_cut(self, at: Path, parts: int, thread: int) -> None:
        """Read what this rank wants of files that ``parts`` ranks wrote, cut by rows."""
        scratch = bytearray()
        for part in range(parts):
            path = at / f"{part}-{thread}.raw"
            descriptor, position = os.open(path, os.O_RDONLY), 0
            try:
                for shard in self.shards[thread :: self.threads]:
                    _take(descriptor, position, shard, part, parts, scratch)
                    position += math.prod(shard.shape) // parts * shard.data.itemsize
            finally:
                os.close(descriptor)


class DirectFloor(Floor):
    """``O_DIRECT`` from two aligned buffers a thread; loads as the other."""

    def _write(self, path: Path, extents: Iterable[Extent]) -> None:
        data = [view for _, view in extents]
        total = sum(view.nbytes for view in data)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT
        descriptor = os.open(path, flags)
        try:
            with mmap.mmap(-1, BLOCK_NBYTES) as buffer, memoryview(buffer) as block:
                done = 0
                while done < total:
                    filled = min(BLOCK_NBYTES, total - done)
                    _gather(block, data, filled)
                    _all_of(
                        block[: -(-filled // PAGE) * PAGE], done,
                        lambda rest, at: os.pwrite(descriptor, rest, at),
                    )  # fmt: skip
                    done += filled
            os.ftruncate(descriptor, total)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


class ExchangeFloor(Floor):
    """Replicated tensors: each rank reads its share into a buffer, and all gather the rest."""

    def load(self, at: Path) -> None:
        import torch.distributed as dist

        for thread in range(self.threads):
            shares = [list(self._share(rank, thread)) for rank in range(self.world)]
            sizes = [sum(view.nbytes for _, view in share) for share in shares]
            for rank, (share, size) in enumerate(zip(shares, sizes, strict=True)):
                flat = torch.empty(size, dtype=torch.uint8)
                view = memoryview(flat.numpy())
                if rank == self.rank:
                    _read(at / f"{rank}-{thread}.raw", [(0, view)])
                dist.broadcast(flat, src=rank)
                for position, target in share:
                    target[:] = view[position : position + target.nbytes]


def _bytes(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())


def _in_sequence(views: Iterable[memoryview]) -> Iterator[Extent]:
    position = 0
    for view in views:
        yield position, view
        position += view.nbytes


def _between(views: Sequence[memoryview], low: int, high: int) -> Iterator[memoryview]:
    start = 0
    for view in views:
        piece = view[max(0, low - start) : max(0, high - start)]
        if piece.nbytes:
            yield piece
        start += view.nbytes


def _gather(block: memoryview, data: list[memoryview], filled: int) -> None:
    """Move the first ``filled`` bytes of ``data`` into a block."""
    done = 0
    while done < filled:
        view = data[0]
        take = min(view.nbytes, filled - done)
        block[done : done + take] = view[:take]
        done += take
        if take == view.nbytes:
            data.pop(0)
        else:
            data[0] = view[take:]


def _read(path: Path, extents: Iterable[Extent]) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        for position, data in extents:
            _all_of(data, position, lambda rest, at: os.preadv(descriptor, [rest], at))
    finally:
        os.close(descriptor)


def _take(  # noqa: PLR0917 - a place in a file, and what is wanted of it
    descriptor: int, position: int, shard: Shard, part: int, parts: int, scratch: bytearray
) -> None:
    """Read what ``shard`` wants of the rows that are part ``part`` of ``parts``."""
    data = shard.data
    rows = shard.shape[0] // parts
    low, high = part * rows, (part + 1) * rows
    wanted_low, wanted_high = shard.span if shard.axis in (None, 0) else (0, shard.shape[0])
    begin, end = max(low, wanted_low), min(high, wanted_high)
    if begin >= end:
        return
    row_nbytes = math.prod(shard.shape[1:]) * data.itemsize
    start = position + (begin - low) * row_nbytes
    target = data[begin - wanted_low : end - wanted_low]
    if shard.axis in (None, 0):
        _all_of(_bytes(target), start, lambda rest, at: os.preadv(descriptor, [rest], at))
        return
    first, last = shard.span
    if not scratch:
        scratch.extend(bytes(BLOCK_NBYTES))
    step = max(1, len(scratch) // row_nbytes)
    for done in range(0, end - begin, step):
        count = min(step, end - begin - done)
        block = memoryview(scratch)[: count * row_nbytes]
        _all_of(
            block, start + done * row_nbytes, lambda rest, at: os.preadv(descriptor, [rest], at)
        )
        read = torch.frombuffer(scratch, dtype=data.dtype, count=count * shard.shape[1])
        target[done : done + count] = read.view(count, -1)[:, first:last]


def _all_of(data: memoryview, position: int, move: Callable[[memoryview, int], int]) -> None:
    while data.nbytes:
        moved = move(data, position)
        if not moved:
            raise EOFError(f"a file ends at {position}")
        data, position = data[moved:], position + moved


def _stored_parts(at: Path) -> int:
    return len(list(at.glob("*-0.raw")))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
