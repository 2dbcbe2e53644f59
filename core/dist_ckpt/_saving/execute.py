"""A save, step by step: plan together, write alone, commit.

Here: the steps and what is handed from one to the next. Not here: any step's own logic, or what
lies on disk (``_formats``). Each function says on which rank it runs; two exchanges in all, three
if ranks hand pieces to each other.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from dist_ckpt._formats.base import SavePlan, WriteJob, Written
from dist_ckpt._formats.documents import COMMON_FILE
from dist_ckpt._process.gc_pause import collector_paused
from dist_ckpt._saving.common_parts import compare_common
from dist_ckpt._saving.describe import (
    CommonWriter,
    Prepared,
    SaveRequest,
    check_views,
    common_backend,
    prepare,
    with_values_copied,
)
from dist_ckpt._saving.publish import all_files, check_target, publish, with_dcp_metadata
from dist_ckpt._sharding.index import StoredTensor
from dist_ckpt.core import CheckpointingConfig
from dist_ckpt.errors import CoordinationError, StorageError
from dist_ckpt.storage import open_store
from dist_ckpt.storage.commit import Attempt
from dist_ckpt.storage.local import is_directory
from dist_ckpt.storage.page_cache import PagePolicy, num_writers_by_rank

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence, Sized
    from pathlib import Path

    import torch

    from dist_ckpt._formats.base import SaveFormat
    from dist_ckpt._sharding.split import SaveParts
    from dist_ckpt._sharding.together import JobTable
    from dist_ckpt.options import SaveOptions
    from dist_ckpt.types import Communicator
    from dist_ckpt.validation import RankView

__all__ = [
    "Assignment",
    "CommonWriter",
    "Coordinator",
    "PendingSave",
    "SaveRequest",
    "begin_save",
    "begin_sharded",
    "commit_written",
    "pass_on",
    "plan_work",
    "proven",
    "write_part",
]


@dataclass(frozen=True, slots=True)
class Assignment:
    """What one rank has to write, and where.

    ``num_writers`` is the number of ranks on this rank's host that write; ``target`` is the path of
    the checkpoint once it is committed; ``differs`` is whether the ranks' common parts differ.
    """

    directory: Path
    work: object
    passes_on: bool
    num_writers: int = 1
    target: Path | None = None
    differs: bool = False

    def pages(self, options: SaveOptions) -> PagePolicy:
        """Return the policy for the pages of this rank's files."""
        return PagePolicy(options.page_cache, self.num_writers, self.target)


@dataclass(slots=True)
class Coordinator:
    """What rank 0 remembers between the exchanges."""

    attempt: Attempt | None = None
    plan: SavePlan | None = None
    empty: dict[str, StoredTensor] = field(default_factory=dict)

    def abort(self) -> None:
        """Remove the attempt, if one is open here: nobody would ever finish it."""
        if self.attempt is not None:
            self.attempt.abort()


@dataclass(slots=True)
class PendingSave:
    """A save that is planned: ``write`` on every rank, from any thread, then ``commit``."""

    phase: str
    comm: Communicator
    options: SaveOptions
    prepared: Prepared
    assignment: Assignment
    coordinator: Coordinator
    finish: Callable[[Sequence[Written]], None]
    written: Written | BaseException | None = None

    @property
    def directory(self) -> Path:
        """Where this save writes."""
        return self.assignment.directory

    @property
    def parts(self) -> SaveParts:
        """This rank's state dict, taken apart."""
        return self.prepared.parts

    @property
    def format(self) -> SaveFormat:
        """How it is laid out."""
        return self.prepared.request.format

    def stage(self) -> None:
        """Copy the data, so that the caller may change it before ``write``.

        What goes wrong is kept for ``commit``, which tells all ranks.
        """
        try:
            sources, shards = self.format.sources(self.assignment.work), self.prepared.shards
            data: list[torch.Tensor | None] = [None] * len(shards)
            for number in sources:
                view = shards.view(number)
                data[number] = None if view is None else view.clone()
            self.prepared = replace(self.prepared, shards=shards.with_data(data))
            self.stage_values()
        except Exception as error:  # noqa: BLE001 - told to all ranks by `commit`
            self.written = error

    def forget_data(self) -> None:
        """Let go of the data: it was copied elsewhere."""
        self.prepared = replace(self.prepared, shards=self.prepared.shards.without_data())

    def stage_values(self) -> None:
        """Copy the common part and the objects, for those who write them later than now."""
        self.prepared = with_values_copied(self.prepared)

    def write(self) -> None:
        """Write this rank's part; what goes wrong is kept for ``commit``. No exchange inside."""
        if isinstance(self.written, BaseException):
            return
        self.keep(lambda: write_part(self.prepared, self.assignment, self.comm.rank, self.options))

    def write_common(self, written: Written) -> Written:
        """Write the common part, for those who do not call ``write``; return what was written."""
        return _with_common(written, self.prepared, self.directory, self.comm.rank)

    def keep(self, do: Callable[[], Written]) -> None:
        """Do something in place of ``write``, and keep its result or error for ``commit``."""
        try:
            self.written = do()
        except BaseException as error:  # noqa: BLE001 - told to all ranks by `commit`
            self.written = error

    def agree(self, number: int = 0) -> int:
        """Raise on every rank if something has failed on one; return the largest ``number``.

        Collective.
        """

        def local() -> int:
            _result(self.written)
            return number

        def largest(numbers: Sequence[int]) -> int:
            return max(numbers)

        try:
            return self.comm.map_reduce(self.phase, local, largest)
        except BaseException:
            self.coordinator.abort()
            raise

    def commit(self) -> None:
        """Commit if all ranks have written; else nothing is committed and every rank raises.

        Collective.
        """
        try:
            self.comm.map_reduce(self.phase, lambda: _result(self.written), self.finish)
        except BaseException:
            self.coordinator.abort()
            raise


def begin_save(
    build: Callable[[], SaveRequest],
    target: Path,
    comm: Communicator,
    options: SaveOptions,
    *,
    check_coverage: bool,
) -> PendingSave:
    """Plan a save and open its attempt. Collective.

    ``build`` makes this rank's request inside the first exchange, so that what it raises on one
    rank is raised on all.
    """
    prepared = functools.cache(lambda: prepare(build(), comm.rank))
    coordinator = Coordinator()

    def place() -> Path:
        check_target(target, options)
        coordinator.attempt = Attempt.begin(target, options.staging_dir)
        return coordinator.attempt.directory

    assignment = _planned(
        f"planning the save to {target}", prepared, place, coordinator, comm,
        check_coverage=check_coverage,
    )  # fmt: skip
    pending = PendingSave(
        f"writing {target}", comm, options, prepared(), assignment, coordinator,
        lambda written: commit_written(written, pending.prepared, coordinator, options),
    )  # fmt: skip
    pass_on(pending)
    return pending


def begin_sharded(
    build: Callable[[], SaveRequest], directory: Path, comm: Communicator, options: SaveOptions
) -> PendingSave:
    """Plan to write the sharded part alone into an existing directory. Collective.

    Its ``commit`` writes the format's own documents, no manifest and no marker.
    """
    prepared = functools.cache(lambda: prepare(build(), comm.rank))
    coordinator = Coordinator()

    def finish(written: Sequence[Written]) -> None:
        fmt, store = prepared().request.format, open_store(directory)
        results = proven([one.results for one in written], coordinator)
        documents = fmt.documents(results, coordinator.empty, directory)
        if options.dcp_metadata:
            documents = with_dcp_metadata(documents)
        for name, data in documents.items():
            store.create(name, data)

    phase = f"planning the save of shards to {directory}"
    assignment = _planned(
        phase, prepared, lambda: directory, coordinator, comm, check_coverage=False
    )
    pending = PendingSave(
        f"writing shards to {directory}", comm, options, prepared(), assignment, coordinator, finish
    )
    pass_on(pending)
    return pending


def _planned(
    phase: str,
    prepared: Callable[[], Prepared],
    place: Callable[[], Path],
    coordinator: Coordinator,
    comm: Communicator,
    *,
    check_coverage: bool,
) -> Assignment:
    """Describe, check and share out. Collective; ``place`` runs on rank 0."""

    def plan(views: Sequence[RankView]) -> list[Assignment]:
        with collector_paused():
            job = check_views(views, check_coverage=check_coverage)
            hosts = [view.host for view in views]
            work = plan_work(job, place(), prepared().request.format, coordinator, hosts)
            differs = len({view.common for view in views}) > 1
            return [replace(assignment, differs=True) for assignment in work] if differs else work

    try:
        assignment = comm.map_scatter(phase, lambda: prepared().view, plan)
        if assignment.differs:
            compare_common(comm, prepared().compared or {})
    except BaseException:
        # Also on Ctrl-C: an attempt that nobody finishes must not stay behind.
        coordinator.abort()
        raise
    return assignment


def pass_on(pending: PendingSave) -> None:
    """Let ranks put down what others will write. Collective, if the plan says so."""
    if not pending.assignment.passes_on:
        return
    prepared, assignment = pending.prepared, pending.assignment
    try:
        pending.comm.map_reduce(
            f"passing on pieces in {pending.directory}",
            lambda: prepared.request.format.pass_on(
                _job(prepared, assignment, pending.comm.rank, pending.options)
            ),
            lambda _: None,
        )
    except BaseException:
        pending.coordinator.abort()
        raise


def plan_work(
    job: JobTable,
    directory: Path,
    fmt: SaveFormat,
    coordinator: Coordinator,
    hosts: Sequence[str],
) -> list[Assignment]:
    """Share out the work. Rank 0."""
    plan = coordinator.plan = fmt.plan(job, directory)
    for row in np.flatnonzero((job.sizes[2] == 0).any(axis=1)).tolist():
        info = job.views[job.rank[row]][job.index[row]]
        coordinator.empty[info.key] = StoredTensor(info.dtype, info.global_shape, (), info.role)
    attempt = coordinator.attempt
    target = attempt.target if attempt is not None else directory
    return [
        Assignment(directory, work, plan.passes_on, num_writers, target)
        for work, num_writers in zip(plan.work, num_writers_by_rank(hosts, plan.work), strict=True)
    ]


def _job(prepared: Prepared, assignment: Assignment, rank: int, options: SaveOptions) -> WriteJob:
    return WriteJob(
        parts=prepared.parts,
        shards=prepared.shards,
        work=assignment.work,
        directory=assignment.directory,
        rank=rank,
        thread_count=prepared.request.thread_count or options.thread_count,
        pages=assignment.pages(options),
    )


def write_part(
    prepared: Prepared, assignment: Assignment, rank: int, options: SaveOptions
) -> Written:
    """Write this rank's files and make them durable. Every rank."""
    directory, fmt, common = assignment.directory, prepared.request.format, prepared.request.common
    if not assignment.work and not fmt.is_collective and (common is None or rank != 0):
        return Written(files={})
    if not is_directory(directory):
        raise StorageError(
            f"{directory} was made by rank 0 but is not there for rank {rank}.",
            hint="the checkpoint directory must be on a file system that all ranks share.",
        )
    written = fmt.write(_job(prepared, assignment, rank, options))
    return _with_common(written, prepared, directory, rank)


def _with_common(written: Written, prepared: Prepared, directory: Path, rank: int) -> Written:
    """Write the common part another way than ours, if that was asked for. Rank 0."""
    common = prepared.request.common
    if common is None or rank != 0:
        return written
    common.write(prepared.parts.common, directory)
    return replace(written, files=None)


def _result(written: Written | BaseException | None) -> Written:
    if isinstance(written, BaseException):
        raise written
    if written is None:
        raise CoordinationError("the commit of a save that was never written.")
    return written


def proven(results: Sequence[Sized], coordinator: Coordinator) -> Any:
    """Return what all ranks wrote as the format's documents take it. Rank 0.

    Args:
        results: What each rank has told, in rank order.
        coordinator: Has the plan.

    Raises:
        CoordinationError: Something is missing.
    """
    plan, count = coordinator.plan, sum(map(len, results))
    if plan is None or count != plan.num_results:
        planned = plan.num_results if plan is not None else 0
        raise CoordinationError(f"{planned} chunks were planned, {count} written")
    return plan.combined(results)


def commit_written(
    written: Sequence[Written],
    prepared: Prepared,
    coordinator: Coordinator,
    options: SaveOptions,
) -> None:
    """Make the attempt the checkpoint, if it is complete. Rank 0."""
    attempt, plan = coordinator.attempt, coordinator.plan
    if attempt is None or plan is None:
        raise CoordinationError("a commit without an attempt")
    fmt = prepared.request.format
    with collector_paused():
        results = proven([one.results for one in written], coordinator)
        documents = fmt.documents(results, coordinator.empty, attempt.directory)
    if prepared.common is not None:
        documents[COMMON_FILE] = prepared.common
    publish(
        attempt,
        documents,
        all_files(written, plan, attempt.directory),
        CheckpointingConfig(fmt.backend, fmt.version, *common_backend(prepared.request)),
        world_size=len(written),
        include_dir=options.include_dir,
        dcp_metadata=options.dcp_metadata,
    )
    coordinator.attempt = None
