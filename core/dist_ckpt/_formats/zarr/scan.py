"""Arrays of a directory that has no index of ours, as Megatron-Core left them.

Here: finding zarr v2 arrays by their metadata. Not here: the rest of such a checkpoint
(``foreign``). Runs on rank 0; all ranks get the index.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dist_ckpt._formats.zarr.metadata import MAX_METADATA_NBYTES, parse_metadata, torch_dtype
from dist_ckpt._sharding.index import CheckpointIndex, StoredChunk, StoredTensor
from dist_ckpt._sharding.shard_info import dtype_from_name
from dist_ckpt.box import Box
from dist_ckpt.errors import CorruptedCheckpointError
from dist_ckpt.storage import open_store
from dist_ckpt.storage.failures import storage_errors
from dist_ckpt.storage.paths import entries_of
from dist_ckpt.validation import shortened

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["scan_arrays"]

_MAX_FOLDERS = 1 << 20
_METADATA = ".zarray"
_LOCKS = ".sync"


def scan_arrays(directory: Path) -> CheckpointIndex:
    """Return an index of all zarr v2 arrays below ``directory``; a key is the path of its array.

    Folders named ``*.sync`` (locks that Megatron-Core leaves behind) are skipped, and no link is
    followed: it might lead out of the directory. Nothing is read but metadata: whether all chunks
    are there is found out when they are read.

    Raises:
        CorruptedCheckpointError: Some arrays cannot be read; names them all.
        StorageError: The file system failed.
    """
    tensors: dict[str, StoredTensor] = {}
    problems: list[str] = []
    store = open_store(directory)
    for path in _array_paths(directory):
        try:
            data = store.read(f"{path}/{_METADATA}", max_nbytes=MAX_METADATA_NBYTES)
            tensors[path] = _tensor(parse_metadata(data, f"{path}/{_METADATA}"), path)
        except (CorruptedCheckpointError, ValueError, KeyError, TypeError) as error:
            problems.append(f"{path!r}: {error!s}")
    if problems:
        raise CorruptedCheckpointError(f"{directory}: {shortened(problems)}")
    return CheckpointIndex(tensors)


def _array_paths(directory: Path) -> Iterator[str]:
    """Yield the folders below ``directory`` that hold an array, relative to it, sorted."""
    found, folders, count = [], [directory], 0
    while folders:
        folder, count = folders.pop(), count + 1
        if count > _MAX_FOLDERS:
            raise CorruptedCheckpointError(f"{directory}: more than {_MAX_FOLDERS} folders.")
        with storage_errors("list", folder):
            for entry in entries_of(folder):
                if entry.name == _METADATA and folder != directory and not entry.is_link:
                    found.append(folder.relative_to(directory).as_posix())
                if entry.is_folder and not entry.name.endswith(_LOCKS):
                    folders.append(folder / entry.name)
    yield from sorted(found)


def _tensor(document: dict[str, Any], path: str) -> StoredTensor:
    if document["zarr_format"] != 2:  # noqa: PLR2004 - of zarr
        raise ValueError(f"zarr_format {document['zarr_format']!r}, expected 2")
    shape = tuple(document["shape"])
    if not all(type(n) is int and 0 <= n < 1 << 63 for n in shape):
        raise ValueError(f"shape {document['shape']!r}")
    dtype = torch_dtype(document["dtype"])
    numel = math.prod(shape)
    whole = Box((0,) * len(shape), shape)
    nbytes = numel * dtype_from_name(dtype).itemsize
    chunks = (StoredChunk(whole, path, 0, nbytes, "zarr2_foreign"),) if numel else ()
    return StoredTensor(dtype, shape, chunks)
