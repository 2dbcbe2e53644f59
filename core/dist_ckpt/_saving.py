"""A save, step by step: plan together, write alone, commit.

Here: the steps and what is handed from one to the next. Not here: any step's own logic, or what
lies on disk (``_formats``). Each function says on which rank it runs; two exchanges in all, three
if ranks hand pieces to each other.
"""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from dist_ckpt._engine.commit import Attempt
from dist_ckpt._formats.base import SavePlan, WriteJob, Written
from dist_ckpt._formats.documents import COMMON_FILE
from dist_ckpt._formats.objects import encode_common, object_shards
from dist_ckpt._planning.describe import LocalShard, local_shards
from dist_ckpt._planning.index import StoredTensor
from dist_ckpt._publishing import all_files, check_target, publish
from dist_ckpt._state import SaveParts, split_for_save
from dist_ckpt.core import CheckpointingConfig
from dist_ckpt.errors import CoordinationError, StorageError
from dist_ckpt.storage import LocalStore
from dist_ckpt.validation import (
    RankView,
    check_formats,
    check_objects,
    check_sharding,
    check_storable,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from dist_ckpt._formats.base import SaveFormat, WriteResult
    from dist_ckpt.options import SaveOptions
    from dist_ckpt.types import Communicator, ShardedStateDict, StateDict

__all__ = ["CommonWriter", "PendingSave", "SaveRequest", "begin_save", "begin_sharded", "run_save"]


@dataclass(frozen=True, slots=True)
class CommonWriter:
    """Another way to store the common part than ours: called on rank 0 with part and directory."""

    backend: str
    version: int
    write: Callable[[StateDict, Path], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRequest:
    """What one rank brings to a save; made inside of an exchange, so that all hear if it fails.

    ``thread_count`` stands before that of the options: a strategy has one of its own.
    """

    state_dict: ShardedStateDict
    format: SaveFormat
    common: CommonWriter | None = None
    thread_count: int | None = None


@dataclass(frozen=True, slots=True)
class _Prepared:
    """This rank's shards, in the order in which they were described to rank 0."""

    request: SaveRequest
    parts: SaveParts
    shards: list[LocalShard]
    view: RankView
    common: bytes | None


@dataclass(frozen=True, slots=True)
class _Assignment:
    """What one rank has to write, and where."""

    directory: Path
    work: object
    passes_on: bool


@dataclass(slots=True)
class _Coordinator:
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
    prepared: _Prepared
    assignment: _Assignment
    coordinator: _Coordinator
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
            shards = [
                replace(shard, view=None if shard.view is None else shard.view.detach().clone())
                for shard in self.prepared.shards
            ]
            self.prepared = replace(self.prepared, shards=shards)
            self.stage_values()
        except Exception as error:  # noqa: BLE001 - told to all ranks by `commit`
            self.written = error

    def stage_values(self) -> None:
        """Copy the common part and the objects, for those who write them later than now."""
        parts = self.prepared.parts
        objects = tuple(replace(one, data=_value_copied(one.data)) for one in parts.objects)
        parts = replace(parts, common=_value_copied(parts.common), objects=objects)
        self.prepared = replace(self.prepared, parts=parts)

    def write(self) -> None:
        """Write this rank's part; what goes wrong is kept for ``commit``. No exchange inside."""
        if isinstance(self.written, BaseException):
            return
        self.keep(lambda: _write(self.prepared, self.assignment, self.comm.rank, self.options))

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


def run_save(
    build: Callable[[], SaveRequest],
    target: Path,
    comm: Communicator,
    options: SaveOptions,
    *,
    check_coverage: bool,
) -> None:
    """Save collectively; on any failure nothing is committed and every rank raises.

    ``build`` makes this rank's request inside the first exchange, so that what it raises on one
    rank is raised on all.
    """
    pending = begin_save(build, target, comm, options, check_coverage=check_coverage)
    pending.write()
    pending.commit()


def begin_save(
    build: Callable[[], SaveRequest],
    target: Path,
    comm: Communicator,
    options: SaveOptions,
    *,
    check_coverage: bool,
) -> PendingSave:
    """Plan a save and open its attempt; arguments as for ``run_save``. Collective."""
    prepare = functools.cache(lambda: _prepare(build(), comm.rank))
    coordinator = _Coordinator()

    def place(views: Sequence[RankView]) -> Path:
        _check_views(views, check_coverage=check_coverage)
        check_target(target, options)
        coordinator.attempt = Attempt.begin(target, options.staging_dir)
        return coordinator.attempt.directory

    assignment = _planned(f"planning the save to {target}", prepare, place, coordinator, comm)
    pending = PendingSave(
        f"writing {target}", comm, options, prepare(), assignment, coordinator,
        lambda written: _commit(written, pending.prepared, coordinator, options),
    )  # fmt: skip
    _pass_on(pending)
    return pending


def begin_sharded(
    build: Callable[[], SaveRequest], directory: Path, comm: Communicator, options: SaveOptions
) -> PendingSave:
    """Plan to write the sharded part alone into an existing directory. Collective.

    Its ``commit`` writes the format's own documents, no manifest and no marker.
    """
    prepare = functools.cache(lambda: _prepare(build(), comm.rank))
    coordinator = _Coordinator()

    def place(views: Sequence[RankView]) -> Path:
        _check_views(views, check_coverage=False)
        return directory

    def finish(written: Sequence[Written]) -> None:
        fmt, store = prepare().request.format, LocalStore(directory)
        documents = fmt.documents(_proven(written, coordinator), coordinator.empty, directory)
        for name, data in documents.items():
            store.create(name, data)

    phase = f"planning the save of shards to {directory}"
    assignment = _planned(phase, prepare, place, coordinator, comm)
    pending = PendingSave(
        f"writing shards to {directory}", comm, options, prepare(), assignment, coordinator, finish
    )
    _pass_on(pending)
    return pending


def _planned(
    phase: str,
    prepare: Callable[[], _Prepared],
    place: Callable[[Sequence[RankView]], Path],
    coordinator: _Coordinator,
    comm: Communicator,
) -> _Assignment:
    """Describe, check and share out. Collective; ``place`` runs on rank 0."""
    try:
        return comm.map_scatter(
            phase,
            lambda: prepare().view,
            lambda views: _plan(views, place(views), prepare().request.format, coordinator),
        )
    except BaseException:
        # Also on Ctrl-C: an attempt that nobody finishes must not stay behind.
        coordinator.abort()
        raise


def _pass_on(pending: PendingSave) -> None:
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


def _prepare(request: SaveRequest, rank: int) -> _Prepared:
    """Take the state dict apart and describe it. Every rank."""
    parts = split_for_save(request.state_dict)
    shards = local_shards(parts.tensors)
    common = None
    if request.format.stores_common:
        shards += object_shards(parts.objects)
        if rank == 0 and request.common is None:
            encoded = encode_common(parts.common)
            common, shards = encoded.data, shards + encoded.shards
    view = RankView(
        tuple(shard.info for shard in shards),
        tuple(one.without_data() for one in parts.objects),
        (
            (request.format.backend, request.format.version),
            _common_backend(request),
        ),
    )
    return _Prepared(request, parts, shards, view, common)


def _common_backend(request: SaveRequest) -> tuple[str, int]:
    common = request.common
    return (common.backend, common.version) if common else request.format.common_backend


def _check_views(views: Sequence[RankView], *, check_coverage: bool) -> None:
    check_formats(views)
    shards = [view.shards for view in views]
    if check_coverage:
        # First: a double object is a double tensor too, which would tell the user less.
        check_objects([view.objects for view in views])
    check_sharding(shards, coverage=check_coverage)
    check_storable(shards)


def _plan(
    views: Sequence[RankView], directory: Path, fmt: SaveFormat, coordinator: _Coordinator
) -> list[_Assignment]:
    """Share out the work. Rank 0."""
    shards = [view.shards for view in views]
    plan = coordinator.plan = fmt.plan(shards, directory)
    for info in (info for view in shards for info in view):
        if 0 in info.global_shape:
            coordinator.empty[info.key] = StoredTensor(info.dtype, info.global_shape, (), info.role)
    return [_Assignment(directory, work, plan.passes_on) for work in plan.work]


def _value_copied(value: Any) -> Any:
    # By itself deepcopy refuses tensors that some function of autograd has made.
    return copy.deepcopy(value, {id(t): t.detach().clone() for t in _tensors_in(value)})


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(one)


def _job(prepared: _Prepared, assignment: _Assignment, rank: int, options: SaveOptions) -> WriteJob:
    return WriteJob(
        parts=prepared.parts,
        shards=prepared.shards,
        work=assignment.work,
        directory=assignment.directory,
        rank=rank,
        thread_count=prepared.request.thread_count or options.thread_count,
    )


def _write(
    prepared: _Prepared, assignment: _Assignment, rank: int, options: SaveOptions
) -> Written:
    """Write this rank's files and make them durable. Every rank."""
    directory, fmt, common = assignment.directory, prepared.request.format, prepared.request.common
    if not assignment.work and not fmt.is_collective and (common is None or rank != 0):
        return Written(files={})
    if not directory.is_dir():
        raise StorageError(
            f"{directory} was made by rank 0 but is not there for rank {rank}.",
            hint="the checkpoint directory must be on a file system that all ranks share.",
        )
    written = fmt.write(_job(prepared, assignment, rank, options))
    return _with_common(written, prepared, directory, rank)


def _with_common(written: Written, prepared: _Prepared, directory: Path, rank: int) -> Written:
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


def _proven(written: Sequence[Written], coordinator: _Coordinator) -> list[WriteResult]:
    """Return what all ranks wrote, or raise if something is missing. Rank 0."""
    results = [result for one in written for result in one.results]
    planned = coordinator.plan.num_results if coordinator.plan is not None else 0
    if len(results) != planned:
        raise CoordinationError(f"{planned} chunks were planned, {len(results)} written")
    return results


def _commit(
    written: Sequence[Written],
    prepared: _Prepared,
    coordinator: _Coordinator,
    options: SaveOptions,
) -> None:
    """Make the attempt the checkpoint, if it is complete. Rank 0."""
    attempt, plan = coordinator.attempt, coordinator.plan
    if attempt is None or plan is None:
        raise CoordinationError("a commit without an attempt")
    fmt = prepared.request.format
    results = _proven(written, coordinator)
    documents = fmt.documents(results, coordinator.empty, attempt.directory)
    if prepared.common is not None:
        documents[COMMON_FILE] = prepared.common
    publish(
        attempt,
        documents,
        all_files(written, plan, attempt.directory),
        CheckpointingConfig(fmt.backend, fmt.version, *_common_backend(prepared.request)),
        world_size=len(written),
        include_dir=options.include_dir,
    )
    coordinator.attempt = None
