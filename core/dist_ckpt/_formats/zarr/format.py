"""zarr as a format: one array directory for each key, with our index beside them.

Here: what ``_formats.base`` asks of a format, put together from its parts. Not here: the parts
(``plan``, ``write``, ``index``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dist_ckpt._formats.base import SavePlan, WriteJob, Written
from dist_ckpt._formats.zarr.index import zarr_index_to_json
from dist_ckpt._formats.zarr.names import is_pieces_name, paths_of_keys
from dist_ckpt._formats.zarr.plan import plan_arrays
from dist_ckpt._formats.zarr.write import pass_on_pieces, write_arrays
from dist_ckpt.storage import open_store
from dist_ckpt.storage.paths import check_is_shared

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from dist_ckpt._formats.base import WriteResult
    from dist_ckpt._formats.zarr.plan import RankWork
    from dist_ckpt._sharding.index import StoredTensor
    from dist_ckpt._sharding.together import JobTable

__all__ = ["ZarrFormat"]


class ZarrFormat:
    """The formats ``("zarr", 1)``, zarr v2 as Megatron-Core wrote it, and ``("zarr", 2)``, zarr v3.

    Args:
        version: 1 or 2.
    """

    backend = "zarr"
    common_backend = ("json", 1)
    stores_common = True
    is_collective = False

    def __init__(self, version: int) -> None:
        """Remember the version."""
        self.version = version
        self._zarr_format = version + 1

    def plan(self, job: JobTable, directory: Path) -> SavePlan:  # noqa: ARG002 - the port's
        """Choose grids and share out cells; nothing is made yet. Rank 0."""
        plan = plan_arrays(job, self._zarr_format)
        return SavePlan(
            work=plan.work,
            num_results=sum(
                len(work.whole) + sum(len(c.own) + len(c.received) for c in work.shared)
                for work in plan.work
            ),
            passes_on=any(work.passed_on for work in plan.work),
        )

    def sources(self, work: RankWork) -> set[int]:
        """Return which shards a rank writes of; what it passes on is read before."""
        own = {item.shard for cell in work.shared for item in cell.own}
        return own | {item.shard for _, item in work.whole}

    def pass_on(self, job: WriteJob) -> None:
        """Put down this rank's pieces of cells that other ranks write. Every rank."""
        pass_on_pieces(job)

    def write(self, job: WriteJob) -> Written:
        """Write this rank's arrays and cells. Every rank."""
        if not (job.work.whole or job.work.shared or job.work.documents):
            return Written(files={})
        check_is_shared(job.directory, job.rank)
        return write_arrays(job, self._zarr_format)

    def documents(
        self,
        results: Sequence[WriteResult],
        empty: Mapping[str, StoredTensor],
        directory: Path,
    ) -> dict[str, bytes]:
        """Return our index, and remove what was passed on. Rank 0."""
        store = open_store(directory)
        for name in filter(is_pieces_name, store.list()):
            store.delete(name)
        paths = {result.info.key: result.chunk.file for result in results}
        if empty.keys() - paths.keys():
            paths = paths_of_keys(paths.keys() | empty.keys())
        return {"index.json": zarr_index_to_json(results, empty, paths, self._zarr_format)}
