"""Boxes of this rank -> data files, bytes straight from the tensors' memory.

Here: which box goes at which position of which file, and the jobs that write them. Not here:
threads (``_engine.transfer``), files (``storage``), metadata (``metadata``, ``_planning.index``).
Runs on every rank for its own boxes; no rank waits for another.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dist_ckpt._engine.memory import Scratch, host_bytes, pieces_for_write
from dist_ckpt._engine.transfer import run_jobs
from dist_ckpt._formats.base import WriteResult
from dist_ckpt._formats.torch_dist.records import RecordFrame, frame_record
from dist_ckpt._planning.describe import dtype_from_name
from dist_ckpt._planning.index import StoredChunk
from dist_ckpt.errors import CheckpointingException, StorageError
from dist_ckpt.storage import Extent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import torch

    from dist_ckpt._checksums import FileSum
    from dist_ckpt._geometry import Box
    from dist_ckpt._planning.describe import LocalShard, ShardInfo
    from dist_ckpt._planning.distribution import WriteItem
    from dist_ckpt.storage import Store

__all__ = [
    "PlacedShard",
    "PlannedFile",
    "WriteResult",
    "WrittenFile",
    "data_file_name",
    "extents_of",
    "plan_files",
    "write_shards",
]


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """A data file that is complete and durable, with what it holds."""

    name: str
    found: FileSum
    results: tuple[WriteResult, ...]


@dataclass(frozen=True, slots=True)
class PlacedShard:
    """A box of one of this rank's shards, and its record's place in a file.

    Attributes:
        shard: Number of the shard.
        info: Its description.
        box: What is written of it, in global coordinates.
        position: Where the record begins, in bytes.
        frame: What stands around the payload.
    """

    shard: int
    info: ShardInfo
    box: Box
    position: int
    frame: RecordFrame

    @property
    def payload(self) -> int:
        """Byte position of the first element in the file."""
        return self.position + len(self.frame.head)

    def view_in(self, shards: Sequence[LocalShard]) -> torch.Tensor:
        """Return the box of this rank's data."""
        view = shards[self.shard].view
        assert view is not None  # noqa: S101 - the plan gives work to holders of data only
        if self.box == self.info.box:
            return view
        inside = self.box.relative_to(self.info.box)
        return view[inside.slices()] if inside.shape else view


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """A data file before it is written; depends on descriptions alone, not on values."""

    name: str
    nbytes: int
    placed: tuple[PlacedShard, ...]

    @property
    def results(self) -> tuple[WriteResult, ...]:
        """What the file will hold."""
        return tuple(_result(self.name, one) for one in self.placed)


def data_file_name(rank: int, number: int, prefix: str = "") -> str:
    """Return the name that DCP gives to a rank's data file, after a prefix of our own."""
    return f"{prefix}__{rank}_{number}.distcp"


def plan_files(
    infos: Sequence[ShardInfo],
    items: Sequence[WriteItem],
    *,
    rank: int,
    thread_count: int,
    separation_hint: str | None = None,
) -> list[PlannedFile]:
    """Return the files that this rank's ``items`` make, with the place of each.

    Tensors whose key begins with ``separation_hint`` get files of their own, named after it.
    """
    apart, rest = _separated(infos, items, separation_hint)
    return [
        _planned_file(data_file_name(rank, number, prefix), _place(infos, group))
        for prefix, chosen in ((separation_hint or "", apart), ("", rest))
        for number, group in enumerate(_spread(infos, chosen, thread_count))
        if group
    ]


def write_shards(
    shards: Sequence[LocalShard],
    files: Sequence[PlannedFile],
    store: Store,
    *,
    thread_count: int,
) -> list[WrittenFile]:
    """Write this rank's files and return what was written, file by file.

    Raises:
        StorageError: Naming the file and the key that was being written.
    """
    jobs = [_file_job(store, file, shards) for file in files]
    return run_jobs(jobs, thread_count=thread_count, name="dist_ckpt-write")


def _separated(
    infos: Sequence[ShardInfo], items: Sequence[WriteItem], hint: str | None
) -> tuple[list[WriteItem], list[WriteItem]]:
    """Return the items below the hint, and the others."""
    if not hint:
        return [], list(items)
    apart = [item for item in items if infos[item.shard].key.startswith(hint)]
    return apart, [item for item in items if not infos[item.shard].key.startswith(hint)]


def _spread(
    infos: Sequence[ShardInfo], items: Sequence[WriteItem], count: int
) -> list[list[WriteItem]]:
    """Deal the items to ``count`` files by bytes; order within a file is the plan's."""
    groups: list[list[WriteItem]] = [[] for _ in range(count)]
    load = [0] * count
    sized = [
        (item.box.numel * dtype_from_name(infos[item.shard].dtype).itemsize, number)
        for number, item in enumerate(items)
    ]
    home: dict[int, int] = {}
    for nbytes, number in sorted(sized, key=lambda pair: (-pair[0], pair[1])):
        target = min(range(count), key=load.__getitem__)
        load[target] += nbytes
        home[number] = target
    for number, item in enumerate(items):
        groups[home[number]].append(item)
    return groups


def _place(infos: Sequence[ShardInfo], items: Sequence[WriteItem]) -> list[PlacedShard]:
    placed, position = [], 0
    for item in items:
        info = infos[item.shard]
        itemsize = dtype_from_name(info.dtype).itemsize
        frame = frame_record(info.dtype, item.box.shape, itemsize, start=position)
        placed.append(PlacedShard(item.shard, info, item.box, position, frame))
        position += frame.total
    return placed


def _planned_file(name: str, placed: list[PlacedShard]) -> PlannedFile:
    return PlannedFile(name, placed[-1].position + placed[-1].frame.total, tuple(placed))


def _file_job(
    store: Store, file: PlannedFile, shards: Sequence[LocalShard]
) -> Callable[[Callable[[], None]], WrittenFile]:
    def write(check: Callable[[], None]) -> WrittenFile:
        at: list[str] = []
        try:
            extents = extents_of(file, shards, check, at)
            found = store.write(file.name, extents, nbytes=file.nbytes)
        except CheckpointingException as error:
            key = f" while writing {at[-1]!r}" if at else ""
            raise StorageError(f"{file.name}{key}: {error}") from error
        return WrittenFile(file.name, found, file.results)

    return write


def extents_of(
    file: PlannedFile,
    shards: Sequence[LocalShard],
    check: Callable[[], None] = lambda: None,
    at: list[str] | None = None,
) -> Iterator[Extent]:
    """Yield the bytes of a file, in order; an extent is void when the next one comes.

    Args:
        file: What to write.
        shards: This rank's, with data.
        check: Called between tensors; stops the job by raising.
        at: Gets the key that is being read.
    """
    scratch = Scratch()
    for one in file.placed:
        check()
        if at is not None:
            at[:] = [one.info.key]
        yield Extent(one.position, one.frame.head)
        for offset, piece in pieces_for_write(one.view_in(shards), scratch):
            yield Extent(one.payload + offset, host_bytes(piece))
        yield Extent(one.payload + one.frame.nbytes, one.frame.tail)


def _result(name: str, one: PlacedShard) -> WriteResult:
    chunk = StoredChunk(one.box, name, one.payload, one.frame.nbytes)
    return WriteResult(one.info, chunk, one.position, one.frame.total)
