"""zarr as a format: one array directory for each key, with our index beside them.

Here: what ``_formats.base`` asks of a format, put together from its parts, and the making of
arrays. Not here: the parts (``plan``, ``write``, ``index``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dist_ckpt._engine.transfer import run_jobs
from dist_ckpt._formats.base import SavePlan, WriteJob, Written
from dist_ckpt._formats.zarr.arrays import tensorstore
from dist_ckpt._formats.zarr.index import zarr_index_to_json
from dist_ckpt._formats.zarr.metadata import array_metadata, encode_metadata, metadata_name
from dist_ckpt._formats.zarr.plan import Array, plan_arrays
from dist_ckpt._formats.zarr.write import pass_on_pieces, write_cells
from dist_ckpt.errors import StorageError
from dist_ckpt.storage import open_store
from dist_ckpt.storage.local import fsync_directory, storage_errors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from dist_ckpt._checksums import FileSum
    from dist_ckpt._formats.base import WriteResult
    from dist_ckpt._formats.zarr.plan import RankWork
    from dist_ckpt._planning.describe import ShardInfo
    from dist_ckpt._planning.index import StoredTensor
    from dist_ckpt.storage import Store

__all__ = ["ZarrFormat"]

_MAKERS = 8
"""Arrays that rank 0 makes at a time: each is two small files' time of waiting for the disk."""


class ZarrFormat:
    """The formats ``("zarr", 1)``, zarr v2 as Megatron-Core wrote it, and ``("zarr", 2)``, zarr v3.

    Args:
        version: 1 or 2.

    Raises:
        UnknownStrategyError: TensorStore is not installed.
    """

    backend = "zarr"
    common_backend = ("json", 1)
    stores_common = True
    is_collective = False

    def __init__(self, version: int) -> None:
        """Look whether TensorStore is there, before anything is written."""
        tensorstore()
        self.version = version
        self._zarr_format = version + 1
        self._paths: dict[str, str] = {}

    def plan(self, views: Sequence[Sequence[ShardInfo]], directory: Path) -> SavePlan:
        """Choose grids, share out cells, make all arrays. Rank 0.

        Raises:
            StorageError: An array cannot be made; names it.
        """
        plan = plan_arrays(views, self._zarr_format)
        self._paths = {key: array.path for key, array in plan.arrays.items()}
        return SavePlan(
            work=plan.work,
            num_results=sum(
                len(work.whole) + sum(len(c.own) + len(c.received) for c in work.shared)
                for work in plan.work
            ),
            passes_on=any(work.passed_on for work in plan.work),
            files=self._make(plan.arrays.values(), directory),
        )

    def sources(self, work: RankWork) -> set[int]:
        """Return which shards a rank writes of; what it passes on is read before."""
        own = {item.shard for cell in work.shared for item in cell.own}
        return own | {item.shard for _, item in work.whole}

    def pass_on(self, job: WriteJob) -> None:
        """Put down this rank's pieces of cells that other ranks write. Every rank."""
        pass_on_pieces(job)

    def write(self, job: WriteJob) -> Written:
        """Write this rank's cells. Every rank."""
        if not job.work.whole and not job.work.shared:
            return Written(files={})
        if not job.directory.is_dir():
            raise StorageError(
                f"{job.directory} was made by rank 0 but is not there for rank {job.rank}.",
                hint="the checkpoint directory must be on a file system that all ranks share.",
            )
        return write_cells(job, self._zarr_format)

    def documents(
        self,
        results: Sequence[WriteResult],
        empty: Mapping[str, StoredTensor],
        directory: Path,
    ) -> dict[str, bytes]:
        """Return our index, and remove what was passed on. Rank 0."""
        for path in directory.glob(".pieces_*.bin"):
            with storage_errors("remove", path):
                path.unlink()
        return {"index.json": zarr_index_to_json(results, empty, self._paths, self._zarr_format)}

    def _make(self, arrays: Iterable[Array], directory: Path) -> dict[str, FileSum]:
        """Make the arrays' directories and metadata, durably; return the files with their sums."""
        folders = {directory}
        for array in arrays:
            path = directory / array.path
            with storage_errors("make", path):
                path.mkdir(parents=True, exist_ok=True)
            while path not in folders:
                folders.add(path)
                path = path.parent
        jobs = [self._make_job(array, open_store(directory)) for array in arrays]
        files = dict(run_jobs(jobs, thread_count=_MAKERS, name="dist_ckpt-make"))
        run_jobs(
            [_sync_job(path) for path in sorted(folders, reverse=True)],
            thread_count=_MAKERS,
            name="dist_ckpt-make",
        )
        return files

    def _make_job(
        self, array: Array, store: Store
    ) -> Callable[[Callable[[], None]], tuple[str, FileSum]]:
        def make(check: Callable[[], None]) -> tuple[str, FileSum]:
            check()
            document = array_metadata(array.shape, array.dtype, array.grid, self._zarr_format)
            name = f"{array.path}/{metadata_name(self._zarr_format)}"
            return name, store.create(name, encode_metadata(document))

        return make


def _sync_job(path: Path) -> Callable[[Callable[[], None]], None]:
    def sync(check: Callable[[], None]) -> None:
        check()
        with storage_errors("sync", path):
            fsync_directory(path)

    return sync
