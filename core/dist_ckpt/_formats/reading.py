"""Boxes of tensors from the formats that stored them.

Here: which reader fills which destination. Not here: the readers (``torch_dist.read``,
``zarr.read``). Runs on every rank for its own boxes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dist_ckpt._formats.torch_dist.read import Destination
from dist_ckpt._formats.torch_dist.read import read_into as read_from_files
from dist_ckpt._formats.verification import VerifiedStore
from dist_ckpt.storage import open_store

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from dist_ckpt._checksums import FileSum
    from dist_ckpt._planning.index import CheckpointIndex

__all__ = ["Destination", "read_into"]

_ZARR = ("zarr2", "zarr3", "zarr2_foreign")


def read_into(
    destinations: Sequence[Destination],
    index: CheckpointIndex,
    directory: Path,
    *,
    files: Mapping[str, FileSum],
    thread_count: int,
) -> int:
    """Fill all destinations in place and return the number of bytes read.

    What is read of ``files`` is compared with their checksums.

    Raises:
        CorruptedCheckpointError: What is stored is damaged; names key and file.
        StorageError: The file system failed.
    """
    arrays: list[Destination] = []
    others: list[Destination] = []
    for one in destinations:
        chunks = index.tensors[one.key].chunks
        (arrays if chunks and chunks[0].encoding in _ZARR else others).append(one)
    store = VerifiedStore(open_store(directory), files, directory)
    nbytes = read_from_files(others, index, store, thread_count=thread_count)
    if arrays:
        from dist_ckpt._formats.zarr.read import read_into as read_from_arrays  # noqa: PLC0415

        nbytes += read_from_arrays(arrays, index, directory, store, thread_count=thread_count)
    return nbytes
