"""torch_dist as a format: DCP's data files with our index beside them.

Here: what ``_formats.base`` asks of a format, put together from its parts. Not here: the parts
(``write``, ``contents``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dist_ckpt._formats.base import SavePlan, Written
from dist_ckpt._formats.torch_dist.contents import index_documents
from dist_ckpt._formats.torch_dist.write import plan_files, write_shards
from dist_ckpt._planning.distribution import assign_writers
from dist_ckpt.errors import StorageError
from dist_ckpt.storage import open_store
from dist_ckpt.storage.local import fsync_directory, storage_errors

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from dist_ckpt._formats.base import WriteJob, WriteResult
    from dist_ckpt._formats.torch_dist.write import PlannedFile
    from dist_ckpt._planning.describe import ShardInfo
    from dist_ckpt._planning.distribution import WriteItem
    from dist_ckpt._planning.index import StoredTensor

__all__ = ["TorchDistFormat"]


class TorchDistFormat:
    """The format ``("torch_dist", 1)``.

    Args:
        separation_hint: Tensors whose key begins with it get files of their own.
    """

    backend = "torch_dist"
    version = 1
    common_backend = ("json", 1)
    stores_common = True
    is_collective = False

    def __init__(self, separation_hint: str | None = None) -> None:
        """Remember the hint, which becomes a part of file names."""
        if separation_hint is not None and ("/" in separation_hint or "\0" in separation_hint):
            raise StorageError(
                f"separation_hint={separation_hint!r} cannot be a part of a file name."
            )
        self.separation_hint = separation_hint

    def plan(self, views: Sequence[Sequence[ShardInfo]], directory: Path) -> SavePlan:  # noqa: ARG002 - nothing is made there
        """Share out the boxes. Rank 0."""
        plans = assign_writers(views)
        return SavePlan(work=plans, num_results=sum(map(len, plans)))

    def sources(self, work: Sequence[WriteItem]) -> set[int]:
        """Return which shards a rank writes of."""
        return {item.shard for item in work}

    def pass_on(self, job: WriteJob) -> None:
        """Do nothing: each box is written by a rank that holds it."""

    def write(self, job: WriteJob) -> Written:
        """Write this rank's data files. Every rank."""
        if not job.work:
            return Written(files={})
        planned = self.files(
            [shard.info for shard in job.shards],
            job.work,
            rank=job.rank,
            thread_count=job.thread_count,
        )
        files = write_shards(
            job.shards, planned, open_store(job.directory), thread_count=job.thread_count
        )
        with storage_errors("sync", job.directory):
            fsync_directory(job.directory)
        return Written(
            files={file.name: file.found for file in files},
            results=[result for file in files for result in file.results],
        )

    def files(
        self,
        infos: Sequence[ShardInfo],
        work: Sequence[WriteItem],
        *,
        rank: int,
        thread_count: int,
    ) -> list[PlannedFile]:
        """Return this rank's data files before they are written. Every rank."""
        return plan_files(
            infos,
            work,
            rank=rank,
            thread_count=thread_count,
            separation_hint=self.separation_hint,
        )

    def documents(
        self,
        results: Sequence[WriteResult],
        empty: Mapping[str, StoredTensor],
        directory: Path,  # noqa: ARG002 - nothing is left there
    ) -> dict[str, bytes]:
        """Return our index and DCP's. Rank 0."""
        return index_documents(results, empty)
