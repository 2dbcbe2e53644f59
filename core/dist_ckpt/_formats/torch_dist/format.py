"""torch_dist as a format: DCP's data files with our index beside them.

Here: what ``_formats.base`` asks of a format, put together from its parts. Not here: the parts
(``write``, ``contents``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dist_ckpt._formats.base import SavePlan, Written
from dist_ckpt._formats.manifest import PACKED_INDEX_FILE
from dist_ckpt._formats.torch_dist.layout import ChunksOfJob, plan_files, rank_chunks
from dist_ckpt._formats.torch_dist.write import write_durably
from dist_ckpt._process.gc_pause import collector_paused
from dist_ckpt._sharding.assign import assign_writers
from dist_ckpt._sharding.packing import pack_index
from dist_ckpt.errors import StorageError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from dist_ckpt._formats.base import WriteJob
    from dist_ckpt._formats.torch_dist.layout import PlannedFile
    from dist_ckpt._sharding.assign import WriteItems
    from dist_ckpt._sharding.chunks import ChunkTable
    from dist_ckpt._sharding.index import StoredTensor
    from dist_ckpt._sharding.table import ShardTable
    from dist_ckpt._sharding.together import JobTable

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

    def plan(self, job: JobTable, directory: Path) -> SavePlan:  # noqa: ARG002 - nothing is made there
        """Share out the boxes. Rank 0."""
        plans = assign_writers(job)
        return SavePlan(
            work=plans, num_results=sum(map(len, plans)), combined=ChunksOfJob(job, plans)
        )

    def sources(self, work: WriteItems) -> set[int]:
        """Return which shards a rank writes of."""
        return set(work.shard.tolist())

    def pass_on(self, job: WriteJob) -> None:
        """Do nothing: each box is written by a rank that holds it."""

    def write(self, job: WriteJob) -> Written:
        """Write this rank's data files. Every rank."""
        if not job.work:
            return Written(files={})
        planned = self.files(
            job.shards.table,
            job.work,
            rank=job.rank,
            thread_count=job.thread_count,
        )
        files = write_durably(
            job.shards,
            planned,
            job.directory,
            thread_count=job.thread_count,
            rank=job.rank,
            pages=job.pages,
        )
        return Written(files=files, results=rank_chunks(planned))

    def files(
        self,
        infos: ShardTable,
        work: WriteItems,
        *,
        rank: int,
        thread_count: int,
    ) -> list[PlannedFile]:
        """Return this rank's data files before they are written. Every rank."""
        with collector_paused():
            return plan_files(
                infos,
                work,
                rank=rank,
                thread_count=thread_count,
                separation_hint=self.separation_hint,
            )

    def documents(
        self,
        results: ChunkTable,
        empty: Mapping[str, StoredTensor],  # noqa: ARG002 - they are among the results
        directory: Path,  # noqa: ARG002 - nothing is left there
    ) -> dict[str, bytes]:
        """Return our index; DCP's is made of it when it is published. Rank 0."""
        return {PACKED_INDEX_FILE: pack_index(results)}
