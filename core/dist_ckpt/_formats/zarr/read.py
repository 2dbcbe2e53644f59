"""Arrays -> boxes of tensors, straight into the tensors' memory.

Here: which chunks a box needs and how each is read. Not here: TensorStore (``arrays``), threads
(``_engine.transfer``). Runs on every rank for its own boxes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from dist_ckpt._engine.memory import Scratch, bits
from dist_ckpt._engine.transfer import run_jobs
from dist_ckpt._formats.base import Destination
from dist_ckpt._formats.zarr.arrays import Arrays, host_array
from dist_ckpt._formats.zarr.files import ChunkFiles, chunk_files, is_as_written
from dist_ckpt._formats.zarr.grid import cells_of, split_on_grid
from dist_ckpt._formats.zarr.metadata import (
    MAX_METADATA_NBYTES,
    check_metadata,
    metadata_name,
    parse_metadata,
)
from dist_ckpt._formats.zarr.slices import has_large_plain_chunks, read_slices
from dist_ckpt._planning.describe import dtype_from_name
from dist_ckpt.errors import CheckpointNotFoundError, CorruptedCheckpointError, MismatchError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from dist_ckpt._formats.verification import VerifiedStore
    from dist_ckpt._geometry import Box
    from dist_ckpt._planning.index import CheckpointIndex, StoredTensor

__all__ = ["read_into"]

_BLOCK_NBYTES = 8 << 20
"""What one job reads at a time, if that is more than a chunk."""


@dataclass(frozen=True, slots=True)
class _Opened:
    """An array that has been compared with the index.

    Attributes:
        array: What TensorStore reads.
        document: Its metadata.
        stored: What the index says.
        chunk: Extents of what can be read.
        files: The files of its chunks.
    """

    array: Any
    document: dict[str, Any]
    stored: StoredTensor
    chunk: tuple[int, ...]
    files: ChunkFiles

    @property
    def is_large(self) -> bool:
        """Whether it is better read without TensorStore."""
        return has_large_plain_chunks(self.document, self.files)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the tensor."""
        return dtype_from_name(self.stored.dtype)


def read_into(
    destinations: Sequence[Destination],
    index: CheckpointIndex,
    directory: Path,
    store: VerifiedStore,
    *,
    thread_count: int,
) -> int:
    """Fill all destinations in place and return the number of bytes of the chunks that were read.

    A destination of another dtype than the stored one is cast; whether that is wanted has been
    decided before (``_integrity.match``).

    Raises:
        CorruptedCheckpointError: An array is not what the index says, or a chunk is missing, cut
            short or altered; names the key.
        StorageError: The file system failed.
    """
    arrays = Arrays(directory, thread_count)
    wanted = [(one, part) for one in destinations for part in _stored_parts(one, index)]
    keys = list(dict.fromkeys(one.key for one, _ in wanted))
    jobs = [_open_job(arrays, store, key, index.tensors[key]) for key in keys]
    opened = dict(
        zip(keys, run_jobs(jobs, thread_count=thread_count, name="dist_ckpt-open"), strict=True)
    )
    large = {key: one.files for key, one in opened.items() if one.is_large}
    sliced = [
        Destination(one.key, part, _inside(one, part)) for one, part in wanted if one.key in large
    ]
    nbytes = read_slices(sliced, index, large, store, thread_count=thread_count) if sliced else 0
    reads = [
        _read_job(arrays, store, opened[one.key], one, block)
        for one, part in wanted
        if one.key not in large
        for block in _blocks(part, opened[one.key])
    ]
    return nbytes + sum(run_jobs(reads, thread_count=thread_count, name="dist_ckpt-read"))


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


def _blocks(part: Box, opened: _Opened) -> Iterator[Box]:
    return split_on_grid(part, opened.chunk, opened.dtype.itemsize, _BLOCK_NBYTES)


def _open_job(
    arrays: Arrays, store: VerifiedStore, key: str, stored: StoredTensor
) -> Callable[[Callable[[], None]], _Opened]:
    def job(check: Callable[[], None]) -> _Opened:
        check()
        path, encoding = stored.chunks[0].file, stored.chunks[0].encoding
        name = f"{path}/{metadata_name(3 if encoding == 'zarr3' else 2)}"
        try:
            data = store.read(name, max_nbytes=MAX_METADATA_NBYTES)
        except CheckpointNotFoundError as error:
            raise CorruptedCheckpointError(
                f"{key!r}: {error}", hint="use another checkpoint."
            ) from error
        document = parse_metadata(data, name)
        check_metadata(document, key, stored.dtype, stored.shape, name)
        itemsize = dtype_from_name(stored.dtype).itemsize
        files = chunk_files(document, path, itemsize, key=key, where=name)
        if encoding == "zarr2" and not is_as_written(document):
            raise CorruptedCheckpointError(
                f"{key!r}: {name} describes chunks that are not laid out as they were written.",
                hint="use another checkpoint.",
            )
        array = arrays.open(path, document, key=key)
        chunk = tuple(array.chunk_layout.read_chunk.shape or ())
        return _Opened(array, document, stored, chunk, files)

    return job


def _read_job(
    arrays: Arrays, store: VerifiedStore, opened: _Opened, one: Destination, block: Box
) -> Callable[[Callable[[], None]], int]:
    def job(check: Callable[[], None]) -> int:
        check()
        _check(opened, block, store, one.key)
        view = _inside(one, block)
        if view.device.type == "cpu" and view.dtype == opened.dtype and _is_as_stored(view):
            arrays.read(opened.array, block, host_array(view), key=one.key)
        else:
            buffer = Scratch().take("block", block.shape, opened.dtype)
            arrays.read(opened.array, block, host_array(buffer), key=one.key)
            _copy(view, buffer)
        return _chunk_nbytes(opened, block)

    return job


def _check(opened: _Opened, block: Box, store: VerifiedStore, key: str) -> None:
    """Compare the files of a block before TensorStore reads them, which shows no bytes."""
    try:
        opened.files.check(store, block, key=key)
        for numbers in cells_of(block, opened.files.cell):
            store.verify_whole(opened.files.name(numbers))
    except CorruptedCheckpointError as error:
        if repr(key) in str(error):
            raise
        raise CorruptedCheckpointError(f"{key!r}: {error}") from error


def _is_as_stored(view: torch.Tensor) -> bool:
    return view.layout == torch.strided and not view.is_conj() and not view.is_neg()


def _chunk_nbytes(opened: _Opened, block: Box) -> int:
    """Bytes of the chunks that a block touches."""
    numel = 1
    for start, stop, c, n in zip(
        block.offset, block.stop, opened.chunk, opened.stored.shape, strict=True
    ):
        numel *= min(-(-stop // c) * c, n) - start // c * c
    return numel * opened.dtype.itemsize


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy the bits of ``source``, or cast if the dtypes differ."""
    with torch.no_grad():
        if target.dtype == source.dtype and _is_as_stored(target):
            bits(target).copy_(bits(source))
            return
        try:
            target.copy_(source)
        except RuntimeError as error:  # some dtypes have no conversion
            raise MismatchError(
                f"{source.dtype} cannot be converted to {target.dtype} ({error})."
            ) from error
