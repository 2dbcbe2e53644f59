"""A save that remembers its plan for the next one.

Here: ``SaveMemory``, the steps of a synchronous save with it or without, and the events of such a
save. Not here: planning (``_saving.plan``), writing and committing (``_saving.execute``).
Collective.

Most saves of a job have the plan of the one before. Then one small exchange says so, and what is
left is to write.
"""

from __future__ import annotations

import functools
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dist_ckpt import events
from dist_ckpt._formats.base import Written
from dist_ckpt._formats.manifest import PACKED_INDEX_FILE
from dist_ckpt._formats.torch_dist.write import write_durably
from dist_ckpt._saving.execute import (
    Assignment,
    Coordinator,
    PendingSave,
    begin_save,
    commit_written,
)
from dist_ckpt._saving.plan import AsyncPlanner, PlannedSave
from dist_ckpt._saving.publish import publish, with_dcp_metadata
from dist_ckpt.errors import CoordinationError
from dist_ckpt.events import Committed, Event, Failed, SaveStarted, Staged, emit_to

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from dist_ckpt._saving.describe import SaveRequest
    from dist_ckpt._saving.describe_live import LiveDescriptions
    from dist_ckpt._saving.publish import Publication
    from dist_ckpt.events import EventSink
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
        self.planner = AsyncPlanner()
        self._published: tuple[Mapping[str, bytes], dict[str, bytes]] = ({}, {})
        self._count = 0

    @functools.cached_property
    def descriptions(self) -> LiveDescriptions:
        """What is known of live models; made late, for its import of FSDP takes a second."""
        from dist_ckpt._saving.describe_live import LiveDescriptions  # noqa: PLC0415

        return LiveDescriptions()

    def count(self) -> int:
        """Return the number of the save that begins, 1 for the first."""
        self._count += 1
        return self._count

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
    sinks: Iterable[EventSink] = (),
) -> None:
    """Save collectively, with the plan of the save before if it fits.

    On any failure nothing is committed and every rank raises. ``build`` makes this rank's request
    inside the first exchange, so that what it raises on one rank is raised on all. ``sinks`` get
    the same events as those of a background save.
    """
    events_of_save = _SaveEvents(
        tuple(sinks), target, comm.rank, 1 if memory is None else memory.count()
    )
    try:
        if memory is None:
            pending = begin_save(build, target, comm, options, check_coverage=check_coverage)
            write = pending.write
        else:
            planned = memory.planner.plan(
                build, target, comm, options,
                check_coverage=check_coverage, serve=lambda: None, number=0,
            )  # fmt: skip
            pending, write = _pending(planned, memory, target, comm, options)
        events_of_save.planned()
        write()
        events_of_save.wrote(pending.written)
        pending.commit()
    except BaseException as error:
        events_of_save.end(error)
        raise
    events_of_save.end(None)


class _SaveEvents:
    """Emits the events of a save that blocks.

    How long it has blocked is known only at its end, and that event precedes ``Written``, as in a
    background save: all but the first event are emitted at the end.
    """

    def __init__(self, sinks: tuple[EventSink, ...], target: Path, rank: int, number: int) -> None:
        """Emit ``SaveStarted``."""
        self._sinks = sinks
        self._common: Any = {"path": str(target), "rank": rank, "save": number, "is_async": False}
        self._asked = self._begun = time.monotonic()
        self._phase = "planning"
        self._written: events.Written | None = None
        emit_to(sinks, SaveStarted(**self._common))

    def planned(self) -> None:
        """Note that planning has ended and writing begins."""
        self._begun, self._phase = time.monotonic(), "writing"

    def wrote(self, written: Written | BaseException | None) -> None:
        """Note what this rank has written; a failure is reported by the commit."""
        if isinstance(written, Written):
            secs = time.monotonic() - self._begun
            self._written = events.Written(**self._common, secs=secs, nbytes=written.nbytes)

    def end(self, error: BaseException | None) -> None:
        """Emit the remaining events.

        Args:
            error: Why the save failed; None if it is committed.
        """
        secs, emitted = time.monotonic() - self._asked, list[Event]()
        if self._phase != "planning":
            emitted.append(
                Staged(**self._common, stall_secs=secs, wait_secs=0.0, copy_secs=0.0, nbytes=0)
            )
        if self._written is not None:
            emitted.append(replace(self._written, time=time.time()))
        if error is None:
            nbytes = 0 if self._written is None else self._written.nbytes
            emitted.append(Committed(**self._common, secs=secs, nbytes=nbytes))
        else:
            text = str(error) or repr(error)
            emitted.append(Failed(**self._common, secs=secs, phase=self._phase, error=text))
        for event in emitted:
            emit_to(self._sinks, event)


def _pending(
    planned: PlannedSave,
    memory: SaveMemory,
    target: Path,
    comm: Communicator,
    options: SaveOptions,
) -> tuple[PendingSave, Callable[[], None]]:
    """Return the save to commit, and a function that writes this rank's part."""
    if planned.pending is not None:
        pending, coordinator = planned.pending, planned.pending.coordinator
        pending.finish = lambda written: commit_written(
            written, pending.prepared, coordinator, options
        )
        return pending, pending.write
    pending = PendingSave(
        f"writing {target}", comm, options, planned.prepared,
        Assignment(planned.directory, (), passes_on=False), Coordinator(attempt=planned.attempt),
        lambda written: _publish(planned, written, memory),
    )  # fmt: skip
    return pending, lambda: pending.keep(lambda: _written(planned, options, comm.rank))


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
        raise CoordinationError(f"{planned.target}: rank 0 has no plan to commit.")
    files = {name: file for part in written for name, file in (part.files or {}).items()}
    publish(
        publication.attempt,
        memory.documents(publication),
        files,
        publication.config,
        world_size=publication.world_size,
        include_dir=publication.include_dir,
        dcp_metadata=False,  # if it is wanted, it is among the documents
    )
