"""What one rank writes of a DCP plan: buckets, one for each file, and how they become bytes.

Here: snapshots of values, and the jobs that write files. Not here: which value goes into which
bucket, and the commit (``writer_async``). ``write_buckets`` runs in a worker; it touches files and
memory only, and other ranks never.

A plain tensor is framed by ``records``, its bytes go from its memory to the file. Anything else
(other layouts, quantised tensors, more than 4 GiB, DCP's stream extensions) is encoded by DCP in
memory first.
"""

from __future__ import annotations

import io
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.api import _wrap_exception
from torch.distributed.checkpoint.filesystem import (
    SerializationFormat,
    _StorageInfo,
    _write_item,
)
from torch.distributed.checkpoint.storage import WriteResult

from dist_ckpt._formats.torch_dist import sizes
from dist_ckpt._formats.torch_dist.records import frame_of
from dist_ckpt._sharding.shard_info import dtype_name
from dist_ckpt._staging_pool.memory import Scratch, host_bytes, host_copy, pieces_for_write
from dist_ckpt.errors import CheckpointingException, StorageError
from dist_ckpt.storage import Extent, open_store
from dist_ckpt.storage.failures import storage_errors
from dist_ckpt.storage.transfer import run_jobs
from dist_ckpt.storage.trees import fsync_directory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path
    from queue import SimpleQueue

    from torch.distributed.checkpoint.filesystem import _StorageWriterTransforms
    from torch.distributed.checkpoint.planner import WriteItem

    from dist_ckpt._formats.torch_dist.records import RecordFrame
    from dist_ckpt.storage import Store
    from dist_ckpt.storage.page_cache import PagePolicy

__all__ = ["WriteBucket", "WriteEntry", "snapshot", "stage_buckets", "write_buckets"]


@dataclass(frozen=True, slots=True)
class WriteEntry:
    """One item of a plan with its value: a tensor, or the bytes of an object."""

    item: WriteItem
    data: torch.Tensor | io.BytesIO | bytes


@dataclass(frozen=True, slots=True)
class WriteBucket:
    """What goes into the file ``name``."""

    name: str
    entries: tuple[WriteEntry, ...]


@dataclass(frozen=True, slots=True)
class _Placed:
    """An entry with its place in the file; ``encoded`` is the record of what is not framed."""

    entry: WriteEntry
    position: int
    nbytes: int
    frame: RecordFrame | None
    encoded: bytes
    descriptors: Sequence[str] | None


def snapshot(entry: WriteEntry) -> WriteEntry:
    """Return the entry with a copy of its value that nobody else can change.

    A tensor on another device is left where it is: ``stage_buckets`` copies it.
    """
    if isinstance(entry.data, io.BytesIO):
        return replace(entry, data=entry.data.getvalue())
    if isinstance(entry.data, bytes) or entry.data.device.type != "cpu":
        return entry
    return replace(entry, data=_host_clone(entry.data))


def stage_buckets(buckets: Sequence[WriteBucket]) -> list[WriteBucket]:
    """Return the buckets with every tensor in host memory."""

    def on_host(entry: WriteEntry) -> WriteEntry:
        if isinstance(entry.data, torch.Tensor) and entry.data.device.type != "cpu":
            return replace(entry, data=_host_clone(entry.data))
        return entry

    return [WriteBucket(one.name, tuple(map(on_host, one.entries))) for one in buckets]


def write_buckets(
    rank: int,
    buckets: Sequence[WriteBucket],
    results: SimpleQueue[Any],
    *,
    directory: Path,
    thread_count: int,
    transforms: _StorageWriterTransforms,
    pages: PagePolicy,
) -> None:
    """Write the buckets durably and put into ``results`` what was written, or the failure.

    It does not raise: what failed is told to all ranks when the save is finalized.

    Args:
        rank: This rank, for errors.
        buckets: What to write.
        results: Gets one thing: a list of DCP's ``WriteResult``, or its ``WRAPPED_EXCEPTION``.
        directory: Where the files go.
        thread_count: Files at a time.
        transforms: DCP's stream extensions.
        pages: What becomes of the files' pages in the page cache.
    """
    keeps_pages = pages.begin([(bucket.name, _nbytes(bucket)) for bucket in buckets])
    store = open_store(directory, keeps_pages=keeps_pages)
    jobs = [_job(store, bucket, transforms) for bucket in buckets]
    try:
        written = run_jobs(jobs, thread_count=thread_count, name="dist_ckpt-write")
        with storage_errors("sync", directory):
            fsync_directory(directory)
    except Exception as error:  # noqa: BLE001 - handed over, and raised on every rank
        for bucket in buckets:
            _remove_quietly(store, bucket.name)
        error.add_note(f"while rank {rank} wrote {len(buckets)} files of {directory}")
        results.put(_wrap_exception(error))
    else:
        results.put([result for one in written for result in one])


def _nbytes(bucket: WriteBucket) -> int:
    """Return the size of the values, which is about that of the file."""
    return sum(_value_nbytes(entry.data) for entry in bucket.entries)


def _value_nbytes(value: torch.Tensor | io.BytesIO | bytes) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()  # sparse ones, too: no more than that
    return len(value if isinstance(value, bytes) else value.getbuffer())


def _job(
    store: Store, bucket: WriteBucket, transforms: _StorageWriterTransforms
) -> Callable[[Callable[[], None]], list[WriteResult]]:
    def write(check: Callable[[], None]) -> list[WriteResult]:
        at: list[str] = []
        try:
            placed = _placed(bucket, transforms, at)
            nbytes = placed[-1].position + placed[-1].nbytes
            store.write(bucket.name, _extents(placed, check, at), nbytes=nbytes)
        except CheckpointingException as error:
            raise StorageError(f"{bucket.name} while writing {at[-1:]}: {error}") from error
        return [_result(bucket.name, one) for one in placed]

    return write


def _placed(
    bucket: WriteBucket, transforms: _StorageWriterTransforms, at: list[str]
) -> list[_Placed]:
    placed, position = [], 0
    for entry in bucket.entries:
        at[:] = [entry.item.index.fqn]
        one = _place(entry, position, transforms)
        placed.append(one)
        position = one.position + one.nbytes
    return placed


def _place(entry: WriteEntry, position: int, transforms: _StorageWriterTransforms) -> _Placed:
    data = entry.data
    if isinstance(data, torch.Tensor) and _is_framed(data) and not transforms.extensions:
        frame = frame_of(dtype_name(data.dtype), tuple(data.shape), data.element_size())
        return _Placed(entry, frame.start_after(position), frame.total, frame, b"", None)
    stream = io.BytesIO()
    value: Any = _host_clone(data) if isinstance(data, torch.Tensor) else _bytes_io(data)
    info = _write_item(
        transforms, stream, value, entry.item, "", SerializationFormat.TORCH_SAVE
    ).storage_data
    encoded = stream.getvalue()
    return _Placed(entry, position, len(encoded), None, encoded, info.transform_descriptors)


def _extents(placed: list[_Placed], check: Callable[[], None], at: list[str]) -> Iterator[Extent]:
    scratch, end = Scratch(), 0
    for one in placed:
        check()
        at[:] = [one.entry.item.index.fqn]
        if one.position > end:
            yield Extent(end, bytes(one.position - end))
        end = one.position + one.nbytes
        if one.frame is None:
            yield Extent(one.position, one.encoded)
            continue
        assert isinstance(one.entry.data, torch.Tensor)  # noqa: S101 - only tensors are framed
        payload = one.position + len(one.frame.head)
        yield Extent(one.position, one.frame.head)
        for offset, piece in pieces_for_write(one.entry.data.detach(), scratch):
            yield Extent(payload + offset, host_bytes(piece))
        yield Extent(payload + one.frame.nbytes, one.frame.tail)


def _result(name: str, one: _Placed) -> WriteResult:
    info = _StorageInfo(name, one.position, one.nbytes, one.descriptors)
    return WriteResult(index=one.entry.item.index, size_in_bytes=one.nbytes, storage_data=info)


def _is_framed(tensor: torch.Tensor) -> bool:
    plain = tensor.layout == torch.strided and not tensor.is_quantized and not tensor.is_nested
    return plain and tensor.numel() * tensor.element_size() <= sizes.MAX_RECORD_NBYTES


def _host_clone(tensor: torch.Tensor) -> torch.Tensor:
    """Return exactly the elements of this view, in host memory of their own."""
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
        return tensor.detach().cpu().clone()
    return host_copy(tensor)


def _bytes_io(data: io.BytesIO | bytes) -> io.BytesIO:
    return data if isinstance(data, io.BytesIO) else io.BytesIO(data)


def _remove_quietly(store: Store, name: str) -> None:
    try:
        store.delete(name)
    except CheckpointingException:
        return  # nothing names the file, so nobody reads it
