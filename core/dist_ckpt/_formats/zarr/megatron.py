"""zarr v2 with what older Megatron-Core reads beside the arrays.

Here: ``common.pt`` and the files of sharded objects, written for that reader alone: ours never
reads them, see docs/decisions/0011-zarr.md. Not here: arrays (the other modules of this package).

Source of the layout: Megatron-Core 0.5 to 0.15, ``dist_checkpointing.strategies.common``.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

import numpy as np

from dist_ckpt._formats.base import Written
from dist_ckpt._formats.torch_dist.foreign import COMMON_PT
from dist_ckpt._formats.torch_saved import torch_saved
from dist_ckpt._formats.zarr.format import ZarrFormat
from dist_ckpt._formats.zarr.names import is_plain_path
from dist_ckpt._sharding.table import ROLES, ShardTable
from dist_ckpt.mapping import is_main_replica
from dist_ckpt.storage import open_store
from dist_ckpt.storage.base import checked_name
from dist_ckpt.storage.failures import storage_errors
from dist_ckpt.storage.trees import fsync_directory, make_parents

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from pathlib import Path

    from dist_ckpt._formats.base import SavePlan, WriteJob
    from dist_ckpt._sharding.shard_info import ShardInfo
    from dist_ckpt._sharding.split import SaveParts
    from dist_ckpt._sharding.together import JobTable

__all__ = ["MegatronZarrFormat"]

_CHUNK = re.compile(r"\d+(\.\d+)*")


class MegatronZarrFormat(ZarrFormat):
    """The format ``("zarr", 1)``."""

    common_backend = ("torch", 1)

    def __init__(self) -> None:
        """Make the arrays zarr v2."""
        super().__init__(1)

    def plan(self, job: JobTable, directory: Path) -> SavePlan:
        """Choose grids and share out cells; see which files for the other reader have no place."""
        plan = super().plan(job, directory)
        arrays = {array.path for work in plan.work for array in work.documents}
        names = {
            name
            for view in job.views
            for key in _object_keys(view)
            for name in _object_files(key)
            if _meets_chunks(arrays, name)
        }
        barred = tuple(sorted(names))
        return replace(plan, work=[replace(work, barred=barred) for work in plan.work])

    def write(self, job: WriteJob) -> Written:
        """Write arrays, then the files for the other reader. Every rank."""
        written = super().write(job)
        store, files = open_store(job.directory), dict(written.files or {})
        folders: set[Path] = set()
        for name, value in _companions(job.parts, job.rank).items():
            if name in job.work.barred:
                continue
            make_parents(job.directory, name)
            files[name] = store.create(name, torch_saved(value))
            folders.update((job.directory / name).parents)
        for folder in folders - set(job.directory.parents):
            with storage_errors("sync", folder):
                fsync_directory(folder)
        return replace(written, files=files)


def _companions(parts: SaveParts, rank: int) -> dict[str, Any]:
    """Return the values to write by file name; objects under names that are no path have none."""
    found = {
        checked_name(name): one.data
        for one in parts.objects
        if is_main_replica(one.replica_id) and is_plain_path(one.unique_key)
        for name in _object_files(one.unique_key)
    }
    return found | ({COMMON_PT: parts.common} if rank == 0 else {})


def _object_keys(view: Sequence[ShardInfo]) -> set[str]:
    """Return the keys of a rank's objects."""
    table = ShardTable.of(view)
    rows = np.flatnonzero(table.flags >> 4 & 3 == ROLES.index("object"))
    return {table.keys[number] for number in table.key[rows].tolist()}


def _meets_chunks(arrays: Collection[str], name: str) -> bool:
    """Whether a folder on the way to ``name`` would have the name of a chunk of an array.

    The older reader knows no other place: it cannot have both.
    """
    parts = name.split("/")
    return any(
        _CHUNK.fullmatch(parts[n]) and "/".join(parts[:n]) in arrays
        for n in range(1, len(parts) - 1)
    )


def _object_files(unique_key: str) -> set[str]:
    """Return the file names that readers look for: up to 0.6 they took the last dot for a suffix.

    ``key/shard_0.3_1.8`` is ``key/shard_0.3_1.pt`` for them. An object has one shape, so that no
    two of its cells meet under such a name.
    """
    return {f"{unique_key}.pt", PurePosixPath(unique_key).with_suffix(".pt").as_posix()}
