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

    from dist_ckpt._geometry import Box
    from dist_ckpt._planning.describe import LocalShard, ShardInfo
    from dist_ckpt._planning.distribution import WriteItem
    from dist_ckpt.storage import Store

__all__ = ["WriteResult", "WrittenFile", "data_file_name", "write_shards"]


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """A data file that is complete and durable, with what it holds."""

    name: str
    nbytes: int
    results: tuple[WriteResult, ...]


@dataclass(frozen=True, slots=True)
class _Placed:
    info: ShardInfo
    box: Box
    view: torch.Tensor
    position: int
    frame: RecordFrame


def data_file_name(rank: int, number: int, prefix: str = "") -> str:
    """Return the name that DCP gives to a rank's data file, after a prefix of our own."""
    return f"{prefix}__{rank}_{number}.distcp"


def write_shards(
    shards: Sequence[LocalShard],
    items: Sequence[WriteItem],
    store: Store,
    *,
    rank: int,
    thread_count: int,
    separation_hint: str | None = None,
) -> list[WrittenFile]:
    """Write this rank's ``items`` and return what was written, file by file.

    Tensors whose key begins with ``separation_hint`` get files of their own, named after it.

    Raises:
        StorageError: Naming the file and the key that was being written.
    """
    apart, rest = _separated(shards, items, separation_hint)
    jobs = [
        _file_job(store, data_file_name(rank, number, prefix), _place(shards, group))
        for prefix, chosen in ((separation_hint or "", apart), ("", rest))
        for number, group in enumerate(_spread(shards, chosen, thread_count))
        if group
    ]
    return run_jobs(jobs, thread_count=thread_count, name="dist_ckpt-write")


def _separated(
    shards: Sequence[LocalShard], items: Sequence[WriteItem], hint: str | None
) -> tuple[list[WriteItem], list[WriteItem]]:
    """Return the items below the hint, and the others."""
    if not hint:
        return [], list(items)
    apart = [item for item in items if shards[item.shard].info.key.startswith(hint)]
    return apart, [item for item in items if not shards[item.shard].info.key.startswith(hint)]


def _spread(
    shards: Sequence[LocalShard], items: Sequence[WriteItem], count: int
) -> list[list[WriteItem]]:
    """Deal the items to ``count`` files by bytes; order within a file is the plan's."""
    groups: list[list[WriteItem]] = [[] for _ in range(count)]
    load = [0] * count
    sized = [
        (item.box.numel * dtype_from_name(shards[item.shard].info.dtype).itemsize, number)
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


def _place(shards: Sequence[LocalShard], items: Sequence[WriteItem]) -> list[_Placed]:
    placed, position = [], 0
    for item in items:
        shard = shards[item.shard]
        assert shard.view is not None  # noqa: S101 - the plan gives work to holders of data only
        inside = item.box.relative_to(shard.info.box)
        view = shard.view[inside.slices()] if inside.shape else shard.view
        itemsize = dtype_from_name(shard.info.dtype).itemsize
        frame = frame_record(shard.info.dtype, item.box.shape, itemsize, start=position)
        placed.append(_Placed(shard.info, item.box, view, position, frame))
        position += frame.total
    return placed


def _file_job(
    store: Store, name: str, placed: list[_Placed]
) -> Callable[[Callable[[], None]], WrittenFile]:
    nbytes = placed[-1].position + placed[-1].frame.total

    def write(check: Callable[[], None]) -> WrittenFile:
        at: list[str] = []
        try:
            store.write(name, _extents(placed, check, at), nbytes=nbytes)
        except CheckpointingException as error:
            key = f" while writing {at[-1]!r}" if at else ""
            raise StorageError(f"{name}{key}: {error}") from error
        return WrittenFile(name, nbytes, tuple(_result(name, one) for one in placed))

    return write


def _extents(placed: list[_Placed], check: Callable[[], None], at: list[str]) -> Iterator[Extent]:
    scratch = Scratch()
    for one in placed:
        check()
        at[:] = [one.info.key]
        payload = one.position + len(one.frame.head)
        yield Extent(one.position, one.frame.head)
        for offset, piece in pieces_for_write(one.view, scratch):
            yield Extent(payload + offset, host_bytes(piece))
        yield Extent(payload + one.frame.nbytes, one.frame.tail)


def _result(name: str, one: _Placed) -> WriteResult:
    payload = one.position + len(one.frame.head)
    chunk = StoredChunk(one.box, name, payload, one.frame.nbytes)
    return WriteResult(one.info, chunk, one.position, one.frame.total)
