"""The image of a rank's data files: all their bytes, one file after the other, in staging memory.

Here: where each file lies in the image, filling it, streaming it through a smaller memory. Not
here: the memory (``_staging_pool.pool``), the copying (``_staging_pool.copying``), the worker that
writes it (``_worker``). Local, on every rank.

The bytes around the payloads are the same from save to save: they are written into the memory once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from dist_ckpt._formats.torch_dist import sizes
from dist_ckpt._formats.torch_dist.layout import PlannedFile
from dist_ckpt._formats.torch_dist.write import extents_of
from dist_ckpt._sharding.shard_info import dtype_from_name
from dist_ckpt._staging_pool.copying import Copy
from dist_ckpt._staging_pool.memory import host_bytes
from dist_ckpt._staging_pool.runs import Run

if TYPE_CHECKING:
    from collections.abc import Callable

    from dist_ckpt._sharding.table import LocalShards
    from dist_ckpt._staging_pool.arena import Arena

__all__ = ["FileImage"]

_BYTES = torch.uint8


@dataclass(frozen=True, slots=True)
class FileImage:
    """Files of one rank, one after the other, each aligned to a page.

    Attributes:
        files: In the order of their positions.
        starts: Byte position of each in the image.
        nbytes: Size of the image.
    """

    files: tuple[PlannedFile, ...]
    starts: tuple[int, ...]
    nbytes: int

    @classmethod
    def of(cls, files: Sequence[PlannedFile]) -> FileImage:
        """Lay files out."""
        # A payload is as aligned in memory as in its file, as far as its elements need.
        assert not sizes.PAGE_NBYTES % sizes.ALIGNMENT  # noqa: S101 - two constants
        starts, position = [], 0
        for file in files:
            starts.append(position)
            position += -(-file.nbytes // sizes.PAGE_NBYTES) * sizes.PAGE_NBYTES
        return cls(tuple(files), tuple(starts), position)

    @property
    def names(self) -> tuple[tuple[str, int], ...]:
        """Name and size of each file."""
        return tuple((file.name, file.nbytes) for file in self.files)

    def put_frames(self, arena: Arena) -> None:
        """Write the bytes around the payloads, which are the same for every save.

        The gaps are written as zeros, as the memory may hold bytes of another image.
        """
        for start, file in zip(self.starts, self.files, strict=True):
            end = 0
            for frame, payload in zip(file.frames, file.payloads, strict=True):
                _put(arena, start + end, bytes(payload - len(frame.head) - end) + frame.head)
                tail = payload + frame.nbytes
                _put(arena, start + tail, frame.tail)
                end = tail + len(frame.tail)

    def targets(self, arena: Arena) -> list[torch.Tensor]:
        """Return the memory of each payload as a tensor, in the order of the files."""
        found = []
        for start, file in zip(self.starts, self.files, strict=True):
            items, table = file.items, file.table
            dtypes = [dtype_from_name(name) for name in table.dtypes]
            columns = (table.dtype[items.shard], items.ndim, items.sizes[1])
            rows = zip(file.payloads, *(column.tolist() for column in columns), strict=True)
            for payload, dtype, ndim, shape in rows:
                found.append(arena.view(start + payload, tuple(shape[:ndim]), dtypes[dtype]))
        return found

    def copies(
        self, targets: Sequence[torch.Tensor], shards: LocalShards, *, first: int = 0
    ) -> list[Copy]:
        """Return the copies that fill the payloads of ``shards``, from number ``first`` on."""
        found, places = [], iter(targets)
        for file in self.files:
            shard_of = file.items.shard.tolist()
            keys = file.table.key[file.items.shard].tolist()
            for number, (shard, key) in enumerate(zip(shard_of, keys, strict=True)):
                target = next(places)
                if first <= shard < len(shards):
                    view = file.view_in(shards, number)
                    found.append(Copy(view, target, file.table.keys[key]))
        return found

    def runs(self) -> list[Run]:
        """Return the image as runs; files alternate, so that they are written concurrently."""
        found = [
            (position, number, Run(number, position, start + position, nbytes))
            for number, (file, start) in enumerate(zip(self.files, self.starts, strict=True))
            for position, nbytes in _blocks(file.nbytes, sizes.RUN_NBYTES)
        ]
        return [run for _, _, run in sorted(found, key=lambda one: one[:2])]

    def stream(
        self, arena: Arena, shards: LocalShards, take: Callable[[], int], slot_nbytes: int
    ) -> Iterator[Run]:
        """Fill slot after slot of a memory that is smaller than the image; yield each when full.

        Args:
            arena: The memory.
            shards: This rank's, with data.
            take: Returns the byte position of a free slot; waits for one.
            slot_nbytes: Size of a slot.
        """
        for number, file in enumerate(self.files):
            slot, begin, filled = take(), 0, 0
            for extent in extents_of(file, shards):
                rest = memoryview(extent.buffer)
                while rest.nbytes:
                    if filled == slot_nbytes:
                        yield Run(number, begin, slot, filled)
                        slot, begin, filled = take(), begin + filled, 0
                    piece, rest = rest[: slot_nbytes - filled], rest[slot_nbytes - filled :]
                    _put(arena, slot + filled, piece)
                    filled += piece.nbytes
            yield Run(number, begin, slot, filled)


def _blocks(nbytes: int, largest: int) -> Iterator[tuple[int, int]]:
    for position in range(0, nbytes, largest):
        yield position, min(largest, nbytes - position)


def _put(arena: Arena, position: int, data: bytes | memoryview) -> None:
    memory = host_bytes(arena.view(position, (len(data),), _BYTES))
    memory[:] = data
