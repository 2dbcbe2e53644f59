"""Checkpoints that Megatron-Core wrote as zarr: arrays, objects in files, ``common.pt``.

Here: putting them together, and checking what the arrays promise. Not here: finding arrays
(``scan``) and objects (``_formats.object_files``), reading (``read``, ``torch_dist.foreign``). Runs
on rank 0; all ranks get its result.
"""

from __future__ import annotations

import re
from collections import defaultdict
from typing import TYPE_CHECKING

from dist_ckpt._formats.documents import CheckpointContents
from dist_ckpt._formats.object_files import files_below, objects_in_files
from dist_ckpt._formats.torch_dist.mcore import checked_shape
from dist_ckpt._formats.zarr.metadata import MAX_METADATA_NBYTES, metadata_name, parse_metadata
from dist_ckpt._formats.zarr.scan import scan_arrays
from dist_ckpt.errors import CorruptedCheckpointError
from dist_ckpt.storage import open_store
from dist_ckpt.validation import shortened

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from dist_ckpt._sharding.index import CheckpointIndex

__all__ = ["open_foreign_zarr"]

_CHUNK = re.compile(r"\d+(\.\d+)*", re.ASCII)
_MOST_COMPRESSION = 1 << 16
"""No array that anybody trained shrinks further; one that claims to would only take memory."""


def open_foreign_zarr(directory: Path) -> CheckpointContents:
    """Index a zarr checkpoint that has no index of ours.

    Raises:
        CorruptedCheckpointError: An array cannot be read or has too few bytes for its shape, or a
            link lies in the checkpoint; names them all.
        StorageError: The file system failed.
    """
    index = scan_arrays(directory)
    files = list(files_below(directory))
    links = sorted(f"{one.folder}/{one.name}".lstrip("/") for one in files if one.is_link)
    nbytes: dict[str, int] = defaultdict(int)
    for one in files:
        nbytes[one.folder] += one.nbytes
    orphans = {one.folder for one in files if _CHUNK.fullmatch(one.name)} - index.tensors.keys()
    problems = [f"{name} is a link" for name in links]
    problems += [f"{name!r} has chunks but no .zarray" for name in sorted(orphans)]
    problems += _too_short(index, nbytes, directory)
    if problems:
        raise CorruptedCheckpointError(
            f"{directory}: {shortened(problems)}.",
            hint="links are not followed; put the files in their place." if links else None,
        )
    return CheckpointContents(
        directory=directory, backend=("zarr", 1), index=index, objects=objects_in_files(files)
    )


def _too_short(index: CheckpointIndex, nbytes: Mapping[str, int], directory: Path) -> Iterator[str]:
    """Yield the arrays whose files cannot hold their shape: nothing that large is allocated."""
    store = open_store(directory)
    for key, tensor in index.tensors.items():
        try:
            checked_shape(tensor.shape)
        except ValueError as error:
            yield f"{key!r}: {error}"
            continue
        wanted = sum(chunk.nbytes for chunk in tensor.chunks)
        if nbytes[key] >= wanted:
            continue
        name = f"{key}/{metadata_name(2)}"
        document = parse_metadata(store.read(name, max_nbytes=MAX_METADATA_NBYTES), name)
        is_plain = document.get("compressor") is None and not document.get("filters")
        if is_plain or nbytes[key] * _MOST_COMPRESSION < wanted:
            yield f"{key!r} of shape {tensor.shape} needs {wanted} bytes, {nbytes[key]} are there"
