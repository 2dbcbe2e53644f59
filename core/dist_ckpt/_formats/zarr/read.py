"""Arrays -> boxes of tensors, straight into the tensors' memory.

Here: which chunks a box needs and how each is read: as plain bytes (``slices``) where they are, and
through TensorStore (``arrays``) where they are not. Not here: threads (``storage.transfer``). Runs
on every rank for its own boxes.
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from dist_ckpt._formats.base import Destination
from dist_ckpt._formats.zarr.arrays import Arrays, host_array
from dist_ckpt._formats.zarr.described import Described, Documents
from dist_ckpt._formats.zarr.files import ChunkFiles
from dist_ckpt._formats.zarr.grid import cells_of, split_on_grid
from dist_ckpt._formats.zarr.slices import as_raw, read_cells, read_slices
from dist_ckpt._sharding.index import StoredTensor
from dist_ckpt._sharding.shard_info import dtype_from_name
from dist_ckpt._staging_pool.memory import Scratch, copy_cast
from dist_ckpt.errors import CorruptedCheckpointError
from dist_ckpt.storage import open_store
from dist_ckpt.storage.transfer import run_jobs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from dist_ckpt._formats.verification import VerifiedStore
    from dist_ckpt._sharding.index import CheckpointIndex
    from dist_ckpt.box import Box
    from dist_ckpt.storage import Store

__all__ = ["read_into"]

_BLOCK_NBYTES = 8 << 20
"""What one job reads at a time, if that is more than a chunk."""

_KEYS_OF_A_JOB = 64
"""Most arrays that one job opens: one takes less time than a job does."""


@dataclass(frozen=True, slots=True)
class _Array:
    """An array that TensorStore has opened: its handle, and the extents of what can be read."""

    handle: Any
    chunk: tuple[int, ...]
    opened: Described


def read_into(
    destinations: Sequence[Destination],
    index: CheckpointIndex,
    directory: Path,
    store: VerifiedStore,
    *,
    thread_count: int,
) -> int:
    """Fill all destinations in place and return the number of bytes that were read for them.

    A destination of another dtype than the stored one is cast; whether that is wanted has been
    decided before (``_sharding.match``).

    Raises:
        CorruptedCheckpointError: An array is not what the index says, or a chunk is missing, cut
            short or altered; names the key.
        StorageError: The file system failed.
    """
    parts: dict[str, list[tuple[Destination, Box]]] = defaultdict(list)
    for one in destinations:
        for part in _stored_parts(one, index):
            parts[one.key].append((one, part))
    arrays = Arrays(directory, thread_count)
    opener = _Opener(arrays, index, open_store(directory), store)
    jobs = [opener.job({key: parts[key] for key in keys}) for keys in _batches(parts, index)]
    opened: dict[str, int | StoredTensor | _Array] = {}
    for found in run_jobs(jobs, thread_count=thread_count, name="dist_ckpt-open"):
        opened |= found
    raw = {key: one for key, one in opened.items() if isinstance(one, StoredTensor)}
    sliced = [
        one if part == one.box else Destination(key, part, _inside(one, part))
        for key in raw
        for one, part in parts[key]
    ]
    nbytes = read_slices(sliced, raw, store, thread_count=thread_count) if sliced else 0
    reads = [
        _read_job(arrays, store, array, one, block)
        for key, array in opened.items()
        if isinstance(array, _Array)
        for one, part in parts[key]
        for block in _blocks(part, array)
    ]
    nbytes += sum(one for one in opened.values() if isinstance(one, int))
    return nbytes + sum(run_jobs(reads, thread_count=thread_count, name="dist_ckpt-read"))


def _blocks(part: Box, array: _Array) -> Iterator[Box]:
    return split_on_grid(part, array.chunk, array.opened.dtype.itemsize, _BLOCK_NBYTES)


def _batches(
    parts: Mapping[str, Sequence[tuple[Destination, Box]]], index: CheckpointIndex
) -> Iterator[list[str]]:
    """Yield keys that one job takes: few bytes, or one key."""
    batch: list[str] = []
    nbytes = 0
    for key, wanted in parts.items():
        itemsize = dtype_from_name(index.tensors[key].dtype).itemsize
        more = sum(part.numel for _, part in wanted) * itemsize
        if batch and (nbytes + more > _BLOCK_NBYTES or len(batch) == _KEYS_OF_A_JOB):
            yield batch
            batch, nbytes = [], 0
        batch.append(key)
        nbytes += more
    if batch:
        yield batch


def _stored_parts(one: Destination, index: CheckpointIndex) -> Iterator[Box]:
    """Yield what is stored of a wanted box."""
    if not one.box.numel:
        return
    for chunk in index.tensors[one.key].chunks:
        part = one.box.intersect(chunk.box)
        if part is not None:
            yield part


def _inside(one: Destination, part: Box) -> torch.Tensor:
    return one.view[part.relative_to(one.box).slices()] if part.shape else one.view


class _Opener:
    """Reads and compares the metadata of arrays."""

    def __init__(
        self, arrays: Arrays, index: CheckpointIndex, bare: Store, store: VerifiedStore
    ) -> None:
        self._arrays, self._index, self._bare, self._store = arrays, index, bare, store
        self._documents = Documents(store)

    def job(
        self, wanted: Mapping[str, Sequence[tuple[Destination, Box]]]
    ) -> Callable[[Callable[[], None]], dict[str, int | StoredTensor | _Array]]:
        """Return what opens arrays; it reads them, too, where each box is whole files of bytes.

        For each key it returns how many bytes it has read, or else the tensor as raw chunks, or
        what TensorStore has opened.
        """

        def job(check: Callable[[], None]) -> dict[str, int | StoredTensor | _Array]:
            opened = {}
            for key, boxes in wanted.items():
                check()
                opened[key] = self._open(key, boxes)
            return opened

        return job

    def _open(
        self, key: str, wanted: Sequence[tuple[Destination, Box]]
    ) -> int | StoredTensor | _Array:
        opened = self._documents.of(key, self._index.tensors[key])
        files, stored, handle = opened.files, opened.stored, None
        if not opened.is_ours:
            # What else its metadata may say, TensorStore judges.
            handle = self._arrays.open(files.path, opened.document, key=key)
        if files.is_plain:
            with _naming(key):
                nbytes = self._read(stored, wanted, files)
                if nbytes is not None:
                    return nbytes
                raw = as_raw(stored, [part for _, part in wanted], files, self._bare)
            if raw is not None:
                return raw
        handle = handle or self._arrays.open(files.path, opened.document, key=key)
        return _Array(handle, tuple(handle.chunk_layout.read_chunk.shape or ()), opened)

    def _read(
        self, stored: StoredTensor, wanted: Sequence[tuple[Destination, Box]], files: ChunkFiles
    ) -> int | None:
        """Fill the destinations from whole files; None if one needs another way."""
        nbytes = 0
        for one, part in wanted:
            more = read_cells(stored, part, _inside(one, part), files, self._store)
            if more is None:
                return None
            nbytes += more
        return nbytes


def _read_job(
    arrays: Arrays, store: VerifiedStore, array: _Array, one: Destination, block: Box
) -> Callable[[Callable[[], None]], int]:
    def job(check: Callable[[], None]) -> int:
        check()
        _check(array.opened, block, store, one.key)
        view, dtype = _inside(one, block), array.opened.dtype
        if view.device.type == "cpu" and view.dtype == dtype and _is_as_stored(view):
            arrays.read(array.handle, block, host_array(view), key=one.key)
        else:
            buffer = Scratch().take("block", block.shape, dtype)
            arrays.read(array.handle, block, host_array(buffer), key=one.key)
            copy_cast(view, buffer)
        return _chunk_nbytes(array, block)

    return job


def _check(opened: Described, block: Box, store: VerifiedStore, key: str) -> None:
    """Compare the files of a block before TensorStore reads them, which shows no bytes."""
    with _naming(key):
        opened.files.check(store, block, key=key)
        for numbers in cells_of(block, opened.files.cell):
            store.verify_whole(opened.files.name(numbers))


@contextmanager
def _naming(key: str) -> Iterator[None]:
    """Let damage name the key."""
    try:
        yield
    except CorruptedCheckpointError as error:
        if repr(key) in str(error):
            raise
        raise CorruptedCheckpointError(f"{key!r}: {error}") from error


def _is_as_stored(view: torch.Tensor) -> bool:
    return view.layout == torch.strided and not view.is_conj() and not view.is_neg()


def _chunk_nbytes(array: _Array, block: Box) -> int:
    """Bytes of the chunks that a block touches."""
    numel = 1
    for start, stop, c, n in zip(
        block.offset, block.stop, array.chunk, array.opened.stored.shape, strict=True
    ):
        numel *= min(-(-stop // c) * c, n) - start // c * c
    return numel * array.opened.dtype.itemsize
