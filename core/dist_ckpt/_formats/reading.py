"""Boxes of tensors from the formats that stored them.

Here: which reader fills which destination. Not here: the readers (``torch_dist.read``,
``zarr.read``). Runs on every rank for its own boxes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from dist_ckpt._formats.torch_dist.read import Destination
from dist_ckpt._formats.torch_dist.read import read_into as read_from_files
from dist_ckpt._formats.torch_dist.runs import Memory, read_runs
from dist_ckpt._formats.verification import VerifiedStore
from dist_ckpt._sharding.wanted import runs_of
from dist_ckpt.storage import open_store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from dist_ckpt._sharding.index import CheckpointIndex
    from dist_ckpt._sharding.wanted import Wanted
    from dist_ckpt.storage.checksums import FileSum

__all__ = ["Destination", "Target", "read_wanted"]

_ZARR = ("zarr2", "zarr3", "zarr2_foreign")


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """Memory for the boxes that are wanted.

    Attributes:
        address: Of the first element of each box, ``[n]``, where its elements are plain host
            memory, row-major and of the stored dtype; else 0. Whoever asks keeps it alive.
        has_elements: Whether there is anything to fill, ``[n]``.
        destinations: Views of the boxes with these numbers, whatever their memory is.
    """

    address: NDArray[np.int64]
    has_elements: NDArray[np.bool_]
    destinations: Callable[[Sequence[int]], Iterable[Destination]]


def read_wanted(
    wanted: Wanted,
    target: Target,
    index: CheckpointIndex,
    directory: Path,
    *,
    files: Mapping[str, FileSum],
    thread_count: int,
) -> int:
    """Fill all boxes in place and return how many bytes that were.

    What is read of ``files`` is compared with their checksums.

    Raises:
        CorruptedCheckpointError: What is stored is damaged; names key and file.
        StorageError: The file system failed.
    """
    store = VerifiedStore(open_store(directory), files, directory)
    runs, filled = runs_of(wanted, target.address != 0)
    keys = wanted.stored.keys
    memory = Memory(
        target.address[runs.box] + runs.start, lambda run: keys[wanted.tensor[runs.box[run]]]
    )
    nbytes = read_runs(runs, memory, store, thread_count=thread_count)
    left = target.has_elements & ~filled
    if not wanted.stored.is_raw.all() and left.any():
        from dist_ckpt._formats.zarr.known import read_known  # noqa: PLC0415 - heavy

        chosen = left & (target.address != 0)
        more, filled = read_known(
            wanted, target.address, chosen, index.tensors, store, thread_count=thread_count
        )
        nbytes, left = nbytes + more, left & ~filled
    others = np.flatnonzero(left).tolist()
    if others:
        boxes = list(target.destinations(others))
        nbytes += _read_into(boxes, index, directory, store, thread_count=thread_count)
    return nbytes


def _read_into(
    destinations: Sequence[Destination],
    index: CheckpointIndex,
    directory: Path,
    store: VerifiedStore,
    *,
    thread_count: int,
) -> int:
    arrays: list[Destination] = []
    others: list[Destination] = []
    for one in destinations:
        chunks = index.tensors[one.key].chunks
        (arrays if chunks and chunks[0].encoding in _ZARR else others).append(one)
    nbytes = read_from_files(others, index, store, thread_count=thread_count)
    if arrays:
        from dist_ckpt._formats.zarr.read import read_into as read_from_arrays  # noqa: PLC0415

        nbytes += read_from_arrays(arrays, index, directory, store, thread_count=thread_count)
    return nbytes
