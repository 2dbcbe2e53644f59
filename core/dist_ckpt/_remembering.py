"""A save that remembers its plan for the next one.

Here: ``SaveMemory``, and the steps of a synchronous save with it. Not here: planning
(``_async_saving``), writing and committing (``_saving``). Collective.

Most saves of a job have the plan of the one before. Then one small exchange says so, and what is
left is to write.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dist_ckpt._async_saving import AsyncPlanner, PlannedSave
from dist_ckpt._formats.base import Written
from dist_ckpt._formats.manifest import PACKED_INDEX_FILE
from dist_ckpt._formats.torch_dist.write import write_durably
from dist_ckpt._live import LiveDescriptions
from dist_ckpt._publishing import publish, with_dcp_metadata
from dist_ckpt._saving import Assignment, Coordinator, PendingSave, commit_written, run_save
from dist_ckpt.errors import CoordinationError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from dist_ckpt._background.orders import Publication
    from dist_ckpt._preparing import SaveRequest
    from dist_ckpt.options import SaveOptions
    from dist_ckpt.types import Communicator

__all__ = ["SaveMemory", "run_remembered"]


class SaveMemory:
    """What one save leaves for the next: descriptions of live models and optimizers, and the plan.

    Pass the same one to all saves of a job, on every rank. Whether the plan still fits is looked at
    each time, tensor by tensor, and agreed on by all ranks. A copy remembers nothing.
    """

    def __init__(self) -> None:
        """Remember nothing yet."""
        self.descriptions = LiveDescriptions()
        self.planner = AsyncPlanner()
        self._published: tuple[Mapping[str, bytes], dict[str, bytes]] = ({}, {})

    def documents(self, publication: Publication) -> dict[str, bytes]:
        """Return all documents of a save; DCP's is made once for each index."""
        if not publication.dcp_metadata:
            return dict(publication.documents)
        index = publication.documents.get(PACKED_INDEX_FILE)
        known, made = self._published
        if index is None or known.get(PACKED_INDEX_FILE) is not index:
            known, made = publication.documents, with_dcp_metadata(publication.documents)
            self._published = known, made
        return {**made, **publication.documents}

    def __reduce__(self) -> tuple[Any, ...]:
        """Begin anew where it is copied to: other processes have other objects."""
        return SaveMemory, ()


def run_remembered(
    memory: SaveMemory | None,
    build: Callable[[], SaveRequest],
    target: Path,
    comm: Communicator,
    options: SaveOptions,
    *,
    check_coverage: bool,
) -> None:
    """Save collectively, as ``_saving.run_save``, with the plan of the save before if it fits."""
    if memory is None:
        run_save(build, target, comm, options, check_coverage=check_coverage)
        return
    planned = memory.planner.plan(
        build, target, comm, options,
        check_coverage=check_coverage, serve=lambda: None, number=0,
    )  # fmt: skip
    coordinator = Coordinator(attempt=planned.attempt)
    if planned.pending is not None:
        pending, coordinator = planned.pending, planned.pending.coordinator
        pending.finish = lambda written: commit_written(
            written, pending.prepared, coordinator, options
        )
        pending.write()
    else:
        pending = PendingSave(
            f"writing {target}", comm, options, planned.prepared,
            Assignment(planned.directory, (), passes_on=False), coordinator,
            lambda written: _publish(planned, written, memory),
        )  # fmt: skip
        pending.keep(lambda: _written(planned, options, comm.rank))
    pending.commit()


def _written(planned: PlannedSave, options: SaveOptions, rank: int) -> Written:
    prepared, image = planned.prepared, planned.image
    if image is None or not image.files:
        return Written(files={})
    return Written(
        files=write_durably(
            prepared.shards, image.files, planned.directory,
            thread_count=prepared.request.thread_count or options.thread_count, rank=rank,
            pages=planned.pages,
        )
    )  # fmt: skip


def _publish(planned: PlannedSave, written: Sequence[Written], memory: SaveMemory) -> None:
    """Make the attempt the checkpoint. Rank 0."""
    publication = planned.publication
    if publication is None:
        raise CoordinationError("a commit without a plan")
    files = {name: found for one in written for name, found in (one.files or {}).items()}
    publish(
        publication.attempt,
        memory.documents(publication),
        files,
        publication.config,
        world_size=publication.world_size,
        include_dir=publication.include_dir,
        dcp_metadata=False,  # it is among the documents, if it is wanted
    )
