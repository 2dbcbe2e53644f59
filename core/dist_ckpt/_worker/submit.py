"""Submits a planned save to the worker: sends its order and copies its bytes to staging memory.

Here: filling the staging memory, either before this returns, or during the next forward and
backward, or slot by slot. Not here: planning (``_saving.plan``), the memory and the copying
(``_staging_pool``), the worker (``worker``). Local, on every rank; runs in the training thread.

All ranks have planned the save already, so a failure here is reported to them by the worker.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from dist_ckpt._formats.torch_dist import sizes
from dist_ckpt._saving.execute import publication_of, without_data, write_part
from dist_ckpt._saving.image import FileImage
from dist_ckpt._staging_pool.arena import Arena
from dist_ckpt._staging_pool.copying import Copy, CopyPlan
from dist_ckpt._staging_pool.runs import Run
from dist_ckpt._worker.format_order import FormatOrder
from dist_ckpt._worker.orders import FileOrder

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dist_ckpt._saving.plan import PlannedSave
    from dist_ckpt._staging_pool.copying import Copier, CopyTask
    from dist_ckpt._staging_pool.pool import Lease, StagingPool
    from dist_ckpt._worker.orders import Order
    from dist_ckpt._worker.worker import Worker, WorkerSave

__all__ = ["StagingResources", "SubmittedSave", "submit_save"]

_SLOTS = 8
_GENERATIONS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class StagingResources:
    """What a rank needs to stage and submit a save."""

    pool: StagingPool
    copier: Copier
    worker: Worker
    overlap: bool
    timeout_secs: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmittedSave:
    """A save that was submitted to the worker.

    Attributes:
        save: Its messages and futures.
        lease: The staging memory, to be released once the worker has written.
        task: Copies that still run; None if all bytes are copied.
        nbytes: Bytes to copy in all.
        failure: Why staging failed; the worker reports it to all ranks.
    """

    save: WorkerSave
    lease: Lease
    task: CopyTask | None
    nbytes: int
    failure: BaseException | None = None

    @property
    def interrupt(self) -> BaseException | None:
        """Ctrl-C or the like during staging, to be raised again by the caller."""
        return None if isinstance(self.failure, Exception) else self.failure


def submit_save(planned: PlannedSave, number: int, resources: StagingResources) -> SubmittedSave:
    """Send the worker its order and stage the bytes.

    A failure to stage is not raised: it is in the result, and the worker reports it to all ranks.

    Raises:
        WorkerDiedError: The worker cannot be started, or has just died.
        BarrierTimeoutError: No staging memory became free in time.
    """
    nbytes = _nbytes(planned)
    what = f"the save number {number}, in {planned.directory}"
    lease = resources.pool.acquire(
        max(nbytes, sizes.PAGE_NBYTES), timeout_secs=resources.timeout_secs, what=what
    )
    try:
        for key in lease.retired:
            resources.worker.forget_arena(key)
        if planned.image is None:
            return _format_save(planned, number, resources, lease, nbytes)
        save = _begin(_file_order(planned), planned, number, resources, lease)
    except BaseException:
        lease.release()
        raise
    task, failure = None, None
    try:
        task = _stage(planned, planned.image, save, resources, lease)
    except BaseException as error:  # noqa: BLE001 - reported to all ranks; an interrupt is raised again
        failure = error
        save.abandon(error)
    copied = sum(size for _, size in planned.image.names)
    return SubmittedSave(save=save, lease=lease, task=task, nbytes=copied, failure=failure)


def _nbytes(planned: PlannedSave) -> int:
    if planned.image is not None:
        return planned.image.nbytes
    return Arena.nbytes_for(_source_views(planned))


def _begin(
    order: Order, planned: PlannedSave, number: int, resources: StagingResources, lease: Lease
) -> WorkerSave:
    return resources.worker.begin(
        number,
        order,
        descriptor=lease.arena.descriptor,
        arena_key=lease.key,
        nbytes=lease.nbytes,
        point=planned.point,
    )


def _file_order(planned: PlannedSave) -> FileOrder:
    assert planned.image is not None  # noqa: S101 - the caller has looked
    return FileOrder(
        directory=planned.directory,
        files=planned.image.names,
        rank=planned.point.rank if planned.point is not None else 0,
        publication=publication_of(planned),
        destination=str(planned.target),
        pages=planned.pages,
    )


def _stage(
    planned: PlannedSave,
    image: FileImage,
    save: WorkerSave,
    resources: StagingResources,
    lease: Lease,
) -> CopyTask | None:
    if lease.nbytes < image.nbytes:
        lease.layout = None
        _stream(image, planned, save, resources, lease)
        return None
    later = _copy_now(planned, image, resources, lease)
    if later is None:
        _all_staged(image.runs(), save)
        return None
    task = resources.copier.start(later)
    task.add_done_callback(_when_copied(image.runs(), save))
    return task


@dataclass(frozen=True, slots=True)
class _CopyPlans:
    """Copies of live tensors into one arena: those to make at once, and those that may wait."""

    targets: list[torch.Tensor]
    now: CopyPlan
    later: CopyPlan | None


def _copy_now(
    planned: PlannedSave, image: FileImage, resources: StagingResources, lease: Lease
) -> CopyPlan | None:
    """Make the copies that may not wait; return the others, or None if there are none."""
    targets, shards = _payload_targets(image, lease), planned.prepared.shards
    live = planned.prepared.request.live
    if live is None:
        resources.copier.run(image.copies(targets, shards))
        return None
    plans: _CopyPlans | None = live.memo.get(lease.key)
    if plans is None or plans.targets is not targets:
        if len(live.memo) > _GENERATIONS:
            live.memo.clear()  # plans for arenas that the pool has retired
        copies = image.copies(targets, live.shards)
        steady = live.steady if resources.overlap else frozenset[str]()
        waiting = [copy for copy in copies if copy.name in steady]
        plans = live.memo[lease.key] = _CopyPlans(
            targets,
            CopyPlan([copy for copy in copies if copy.name not in steady]),
            CopyPlan(waiting, watches=True) if waiting else None,
        )
    resources.copier.run(image.copies(targets, shards, first=len(live.shards)))
    resources.copier.run(plans.now)
    return plans.later


def _payload_targets(image: FileImage, lease: Lease) -> list[torch.Tensor]:
    """Return where the payloads go; write the bytes around them unless they are there already."""
    found: Any = lease.layout
    if found is None or found[0] is not image:
        lease.layout = None  # if writing the frames fails, the next save must not rely on them
        image.put_frames(lease.arena)
        lease.layout = found = (image, image.targets(lease.arena))
    targets: list[torch.Tensor] = found[1]
    return targets


def _all_staged(runs: Sequence[Run], save: WorkerSave) -> None:
    for run in runs:
        save.staged(run)
    save.all_staged()


def _when_copied(runs: Sequence[Run], save: WorkerSave) -> Callable[[BaseException | None], None]:
    def notify(error: BaseException | None) -> None:
        if error is not None:
            save.abandon(error)
        else:
            _all_staged(runs, save)

    return notify


def _stream(
    image: FileImage,
    planned: PlannedSave,
    save: WorkerSave,
    resources: StagingResources,
    lease: Lease,
) -> None:
    """Stage through slots of a memory that is smaller than the image; the worker frees them."""
    page = sizes.PAGE_NBYTES
    slot_nbytes = max(lease.nbytes // _SLOTS // page * page, min(lease.nbytes, page))
    free = deque(range(0, lease.nbytes - slot_nbytes + 1, slot_nbytes))
    out: deque[Run] = deque()

    def take() -> int:
        if free:
            return free.popleft()
        oldest = out.popleft()
        save.wait_freed(oldest, resources.timeout_secs)
        return oldest.offset

    for run in image.stream(lease.arena, planned.prepared.shards, take, slot_nbytes):
        out.append(run)
        save.staged(run)
    save.all_staged()


# -- formats that need tensors to write ------------------------------------------------------------


def _source_views(planned: PlannedSave) -> list[torch.Tensor]:
    sources = planned.prepared.request.format.sources(planned.work)
    views = (planned.prepared.shards.view(number) for number in sorted(sources))
    return [view for view in views if view is not None]


def _format_save(
    planned: PlannedSave, number: int, resources: StagingResources, lease: Lease, nbytes: int
) -> SubmittedSave:
    """Stage tensors for a format that needs them to write.

    A state that does not fit into the memory is written by this thread; the worker only commits.
    """
    lease.layout = None
    failure: BaseException | None = None
    copied = 0
    try:
        if lease.nbytes < nbytes:
            order = FormatOrder(without_data(planned), None, write_part(planned))
        else:
            order = _staged_order(planned, resources, lease)
            copied = sum(view.nbytes for view in _source_views(planned))
    except Exception as error:  # noqa: BLE001 - reported to all ranks
        failure = error
        order = FormatOrder(without_data(planned), None)
    save = _begin(order, planned, number, resources, lease)
    if failure is not None:
        save.abandon(failure)
    else:
        save.all_staged()
    return SubmittedSave(save=save, lease=lease, task=None, nbytes=copied, failure=failure)


def _staged_order(planned: PlannedSave, resources: StagingResources, lease: Lease) -> FormatOrder:
    prepared, shards = planned.prepared, planned.prepared.shards
    copies, position = [], 0
    staged: list[torch.Tensor | None] = [None] * len(shards)
    for index in sorted(prepared.request.format.sources(planned.work)):
        view = shards.view(index)
        if view is None:
            continue
        target = staged[index] = lease.arena.view(position, tuple(view.shape), view.dtype)
        position += Arena.nbytes_for([view])
        copies.append(Copy(view, target, shards.table[index].key))
    resources.copier.run(copies)
    prepared = replace(prepared, shards=shards.with_data(staged))
    return FormatOrder(replace(planned, prepared=prepared), lease.arena)
