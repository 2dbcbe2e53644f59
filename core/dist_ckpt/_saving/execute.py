"""Writing and committing a planned save.

Here: ``write_part`` and ``commit``, and ``SaveInSteps`` for callers that run the steps one by one,
from several threads. Not here: planning (``_saving.plan``), what lies on disk (``_formats``), the
rename (``_saving.publish``). Each function says on which rank it runs; the commit is one exchange.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from dist_ckpt._comm.outcome import Outcome, attempt, reduce
from dist_ckpt._formats.base import Written
from dist_ckpt._formats.documents import COMMON_FILE
from dist_ckpt._formats.torch_dist.write import write_durably
from dist_ckpt._process.gc_pause import collector_paused
from dist_ckpt._saving.describe import common_backend, with_values_copied
from dist_ckpt._saving.plan import proven, thread_count
from dist_ckpt._saving.publish import Publication, all_files, publish, with_dcp_metadata
from dist_ckpt._staging_pool.memory import host_copy
from dist_ckpt.core import CheckpointingConfig
from dist_ckpt.errors import CoordinationError
from dist_ckpt.storage import open_store
from dist_ckpt.storage.paths import check_is_shared

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch

    from dist_ckpt._saving.plan import Decision, PlannedSave
    from dist_ckpt.types import Communicator

__all__ = ["SaveInSteps", "commit", "finish", "publication_of", "write_common", "write_part"]


def write_part(planned: PlannedSave) -> Written:
    """Write this rank's files and make them durable. Every rank; no exchange inside."""
    prepared, directory = planned.prepared, planned.directory
    request = prepared.request
    if planned.image is not None:
        files = planned.image.files
        if not files:
            return Written(files={})
        return Written(
            files=write_durably(
                prepared.shards, files, directory,
                thread_count=thread_count(request, planned.options), rank=planned.rank,
                pages=planned.pages,
            )
        )  # fmt: skip
    writes_common = request.common is not None and planned.rank == 0
    if not planned.work and not request.format.is_collective and not writes_common:
        return Written(files={})
    check_is_shared(directory, planned.rank)
    return write_common(planned, request.format.write(planned.job()))


def write_common(planned: PlannedSave, written: Written) -> Written:
    """Write the common part by the strategy that was given for it, if there is one. Rank 0.

    Args:
        planned: The save.
        written: What this rank has written so far.

    Returns:
        What this rank has written in all.
    """
    common = planned.prepared.request.common
    if common is None or planned.rank != 0:
        return written
    common.write(planned.prepared.parts.common, planned.directory)
    return replace(written, files=None)


def commit(
    comm: Communicator,
    planned: PlannedSave,
    written: Outcome[Written],
    encode: Callable[[Mapping[str, bytes]], dict[str, bytes]] = with_dcp_metadata,
) -> None:
    """Commit if all ranks have written; otherwise commit nothing and raise on every rank.

    Collective.

    Args:
        comm: The ranks.
        planned: The save.
        written: What this rank has written, or its error.
        encode: Adds DCP's document to ours.
    """
    try:
        reduce(comm, planned.phase, written, partial(finish, planned, encode=encode))
    except BaseException:
        planned.abort()
        raise


def finish(
    planned: PlannedSave,
    written: Sequence[Written],
    encode: Callable[[Mapping[str, bytes]], dict[str, bytes]] = with_dcp_metadata,
) -> None:
    """Check that the attempt is complete, write its documents and publish it. Rank 0."""
    decision, options = planned.decision, planned.options
    if decision is None:
        raise CoordinationError(f"{planned.target}: rank 0 has no plan to commit.")
    documents = _documents(planned, decision, written)
    if options.dcp_metadata:
        documents = encode(documents)
    if decision.attempt is None:
        store = open_store(planned.directory)
        for name, data in documents.items():
            store.create(name, data)
        return
    publish(
        decision.attempt,
        documents,
        all_files(written, decision.plan, planned.directory),
        _config(planned),
        world_size=len(written),
        include_dir=options.include_dir,
    )


def publication_of(planned: PlannedSave) -> Publication | None:
    """Return rank 0's part of the commit, for a worker; None on other ranks."""
    decision, options = planned.decision, planned.options
    if decision is None or decision.attempt is None:
        return None
    return Publication(
        attempt=decision.attempt,
        documents=_documents(planned, decision, ()),
        files={},
        config=_config(planned),
        world_size=planned.world_size,
        include_dir=options.include_dir,
        dcp_metadata=options.dcp_metadata,
    )


def _documents(
    planned: PlannedSave, decision: Decision, written: Sequence[Written]
) -> dict[str, bytes]:
    """Return the format's documents, and our common part if the format keeps it. Rank 0."""
    fmt, common = planned.prepared.request.format, planned.prepared.common
    if decision.documents is not None:
        documents = dict(decision.documents)
    else:
        with collector_paused():
            results = proven([one.results for one in written], decision)
            documents = fmt.documents(results, decision.empty, planned.directory)
    if common is not None and decision.attempt is not None:
        documents[COMMON_FILE] = common
    return documents


def _config(planned: PlannedSave) -> CheckpointingConfig:
    request = planned.prepared.request
    return CheckpointingConfig(
        request.format.backend, request.format.version, *common_backend(request)
    )


@dataclass(slots=True)
class SaveInSteps:
    """A planned save whose steps are functions of an ``AsyncRequest``.

    ``written`` is the outcome so far. A step that fails keeps its error there, later steps do
    nothing, and the commit raises the error on all ranks.
    """

    comm: Communicator
    planned: PlannedSave
    written: Outcome[Written] | None = None

    @property
    def has_failed(self) -> bool:
        """Whether a step has failed on this rank."""
        return self.written is not None and self.written.error is not None

    def stage(self) -> None:
        """Copy the data, so that the caller may change it before ``write``."""
        copied = attempt(_with_data_copied, self.planned)
        if copied.error is not None:
            self.written = Outcome(error=copied.error)
        else:
            self.planned = copied.get()

    def stage_values(self) -> None:
        """Copy the common part and the objects, which will be written later."""
        self.planned = replace(self.planned, prepared=with_values_copied(self.planned.prepared))

    def forget_data(self) -> None:
        """Drop the references to the tensors, whose data was copied."""
        self.planned = without_data(self.planned)

    def write(self) -> None:
        """Write this rank's part. From any thread; no exchange inside."""
        if not self.has_failed:
            self.written = attempt(write_part, self.planned)

    def agree(self, number: int = 0) -> int:
        """Raise on every rank if a step has failed on one; return the largest ``number``.

        Collective.
        """
        own = self._result().then(lambda _: number)
        try:
            return reduce(self.comm, self.planned.phase, own, max)
        except BaseException:
            self.planned.abort()
            raise

    def commit(self) -> None:
        """Commit if all ranks have written; otherwise commit nothing and raise on every rank.

        Collective.
        """
        commit(self.comm, self.planned, self._result())

    def _result(self) -> Outcome[Written]:
        never = CoordinationError("the commit of a save that was never written.")
        return Outcome(error=never) if self.written is None else self.written


def _with_data_copied(planned: PlannedSave) -> PlannedSave:
    prepared, shards = planned.prepared, planned.prepared.shards
    data: list[torch.Tensor | None] = [None] * len(shards)
    for number in prepared.request.format.sources(planned.work):
        view = shards.view(number)
        data[number] = None if view is None else host_copy(view)
    prepared = replace(prepared, shards=shards.with_data(data))
    return replace(planned, prepared=with_values_copied(prepared))


def without_data(planned: PlannedSave) -> PlannedSave:
    """Return the save without the tensors."""
    prepared = planned.prepared
    return replace(planned, prepared=replace(prepared, shards=prepared.shards.without_data()))
