"""Planning: what each rank writes, agreed by all ranks before the first byte.

Here: ``Planner``, for synchronous saves, background saves and strategies. One exchange: every rank
describes its shards, rank 0 checks them, opens the attempt and sends each rank its work. Not here:
describing (``_saving.describe``), writing and committing (``_saving.execute``).
See docs/decisions/0028-planning-in-columns.md and 0040-one-planner.md.

A planner that remembers lays out the files of a new plan at once, which takes a second exchange. If
every rank's description at the next save is the same, planning is one exchange of 12 bytes a rank.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from dist_ckpt._comm.outcome import Outcome, agree, attempt, scatter
from dist_ckpt._formats.base import SavePlan, WriteJob
from dist_ckpt._formats.objects import DocumentPadding
from dist_ckpt._formats.torch_dist.format import TorchDistFormat
from dist_ckpt._formats.torch_dist.layout import rank_chunks
from dist_ckpt._process.gc_pause import collector_paused
from dist_ckpt._saving.common_parts import compare_common
from dist_ckpt._saving.describe import Prepared, check_views, prepare
from dist_ckpt._saving.image import FileImage
from dist_ckpt._saving.publish import CommitPoint, check_target
from dist_ckpt._sharding.index import StoredTensor
from dist_ckpt.errors import CoordinationError
from dist_ckpt.storage.commit import Attempt
from dist_ckpt.storage.page_cache import PagePolicy, num_writers_by_rank
from dist_ckpt.storage.paths import absolute
from dist_ckpt.validation import RankView

if TYPE_CHECKING:
    from collections.abc import Sized
    from typing import Any

    from dist_ckpt._formats.torch_dist.layout import RankChunks
    from dist_ckpt._saving.in_flight import Writer
    from dist_ckpt._saving.request import SaveCall, SaveRequest
    from dist_ckpt._sharding.together import JobTable
    from dist_ckpt._worker.hub import HubAddress
    from dist_ckpt.options import SaveOptions

__all__ = ["Decision", "PlannedSave", "Planner", "proven"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What rank 0 has decided, and keeps for the commit.

    Attributes:
        plan: The format's plan.
        empty: Tensors without elements, of which no rank writes anything.
        attempt: The attempt; None if the caller's own directory is written into.
        documents: The format's documents, if the files were laid out while planning.
    """

    plan: SavePlan
    empty: Mapping[str, StoredTensor]
    attempt: Attempt | None = None
    documents: Mapping[str, bytes] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedSave:
    """A save that all ranks have planned, as one rank has it: it remains to write and commit.

    Attributes:
        phase: What the ranks do next, for messages.
        target: The path of the checkpoint, as rank 0 resolves it.
        directory: Where its files are written.
        rank: This rank.
        world_size: Number of ranks.
        options: Choices.
        prepared: This rank's shards.
        work: What this rank has to write; only the format looks inside.
        pages: What becomes of the pages of what is written.
        image: This rank's files, if they consist of known bytes and are laid out already.
        decision: Rank 0's; None elsewhere.
        saver: Name of the planner, the same on all ranks.
        number: Of the save, within the planner.
        point: Where the workers commit; None for one rank, and for synchronous saves.
    """

    phase: str
    target: Path
    directory: Path
    rank: int
    world_size: int
    options: SaveOptions
    prepared: Prepared
    work: object = None
    pages: PagePolicy = PagePolicy()  # noqa: RUF009 - frozen
    image: FileImage | None = None
    decision: Decision | None = None
    saver: str = ""
    number: int = 0
    point: CommitPoint | None = None

    @property
    def attempt(self) -> Attempt | None:
        """The attempt; None on ranks other than 0, and if the caller gave a directory."""
        return None if self.decision is None else self.decision.attempt

    @property
    def name(self) -> str:
        """Name of the save, unique in the job."""
        return self.name_of(self.number)

    def name_of(self, number: int) -> str:
        """Return the name of another save of the same planner."""
        return f"{self.saver}/{number}"

    def job(self) -> WriteJob:
        """Return what the format has to write on this rank."""
        return WriteJob(
            parts=self.prepared.parts,
            shards=self.prepared.shards,
            work=self.work,
            directory=self.directory,
            rank=self.rank,
            thread_count=thread_count(self.prepared.request, self.options),
            pages=self.pages,
        )

    def abort(self) -> None:
        """Remove the attempt, on rank 0: no rank will finish it."""
        if self.attempt is not None:
            self.attempt.abort()


def thread_count(request: SaveRequest, options: SaveOptions) -> int:
    """Return how many files or requests a rank writes at a time; a strategy may set it."""
    return request.thread_count or options.thread_count


_PlanRequest: TypeAlias = "tuple[int, RankView | bytes | None]"
"""A rank's message: the number of the plan that it remembers, and its description. If that is the
same as in the plan, only the digest of its common part, or None without one. A plain tuple, because
the name of a class would make the pickle twice as long."""


@dataclass(frozen=True, slots=True)
class _PlanReply:
    """Rank 0's answer to one rank.

    Attributes:
        number: The number of the plan, which is never used again.
        directory: Where to write; None to ask every rank for its description.
        work: What to write; None for the plan that this rank remembers.
        passes_on: Whether ranks pass pieces to each other before they write.
        num_writers: Ranks of this rank's host that write.
        address: The hub of the workers.
        saver: Name of rank 0's planner.
        differs: Whether the ranks' common parts differ.
        decision: Only for rank 0, like ``views``, the descriptions of all ranks.
    """

    number: int
    directory: Path | None = None
    work: object = None
    passes_on: bool = False
    num_writers: int = 1
    address: HubAddress | None = None
    saver: str = ""
    differs: bool = False
    decision: Decision | None = None
    views: tuple[RankView, ...] = ()


@dataclass(frozen=True, slots=True)
class _RememberedPlan:
    """The plan of the last save, as far as it concerns this rank.

    ``kind`` is what the plan depends on besides the descriptions. Only rank 0 has ``views`` and
    ``decision``.
    """

    number: int
    kind: tuple[object, ...]
    view: RankView
    image: FileImage
    num_writers: int
    views: tuple[RankView, ...]
    decision: Decision | None


class Planner:
    """Plans one save after the other; collective over all ranks.

    The plan of the last save is used again only if every rank reports that its description is the
    same, element by element.

    Args:
        writer: The writer of the planned saves, if they are written in the background.
        remembers: Whether to keep the last plan, and lay out its files for that.
    """

    def __init__(self, writer: Writer | None = None, *, remembers: bool = True) -> None:
        """Start without a plan."""
        self.writer, self.remembers = writer, remembers
        self.name = secrets.token_hex(8)
        self.known: _RememberedPlan | None = None
        self.padding = DocumentPadding()

    def plan(
        self,
        call: SaveCall,
        *,
        serve: Callable[[], HubAddress | None] = lambda: None,
        number: int = 0,
    ) -> PlannedSave:
        """Plan a save and open its attempt.

        Args:
            call: What to save, and how.
            serve: Returns the address of the workers' hub; called on rank 0.
            number: Of this save, the same on all ranks.

        Raises:
            CheckpointingException: On every rank, if any failed; no attempt is left.
        """
        step = _Step(self, _with_absolute_include(call), serve, number)
        try:
            return step.run()
        except BaseException:
            # Also on Ctrl-C: an attempt that will not be finished must not stay behind.
            if step.opened is not None:
                step.opened.abort()
            raise


def _with_absolute_include(call: SaveCall) -> SaveCall:
    """Return the call with an absolute path: a worker may have another working directory."""
    if call.options.include_dir is None:
        return call
    include_dir = absolute(call.options.include_dir)
    return replace(call, options=replace(call.options, include_dir=include_dir))


@dataclass(slots=True)
class _Step:
    """One planning. ``opened`` is the attempt of rank 0, to be removed if the planning fails."""

    planner: Planner
    call: SaveCall
    serve: Callable[[], HubAddress | None]
    number: int
    opened: Attempt | None = field(default=None, init=False)

    def run(self) -> PlannedSave:
        own = attempt(self._prepare)
        reply = self._exchange(own, sends_all=False)
        if reply.directory is None:
            reply = self._exchange(own, sends_all=True)
        if reply.directory is None:
            raise CoordinationError(
                f"planning the save to {self.call.target}: rank 0 sent no plan."
            )
        prepared = own.get()
        if reply.differs:
            compare_common(self.call.comm, prepared.compared or {})
        planned = self._planned(reply, prepared)
        if reply.passes_on:
            phase = f"passing on pieces in {reply.directory}"
            agree(self.call.comm, phase, attempt(_pass_on, planned))
        if not self._is_laid_out(prepared.request):
            return planned
        known = self.planner.known
        if reply.work is not None:
            # If laying out fails on any rank, all ranks must plan anew next time.
            self.planner.known = None
            known = self.planner.known = self._laid_out(reply, planned)
        assert known is not None  # noqa: S101 - rank 0 has compared the numbers of the plans
        decision = planned.decision
        if decision is not None and known.decision is not None:
            decision = replace(known.decision, attempt=decision.attempt)
        pages = replace(planned.pages, num_writers=known.num_writers)
        return replace(planned, image=known.image, decision=decision, pages=pages)

    def _prepare(self) -> Prepared:
        padding = self.planner.padding if self.planner.remembers else None
        return prepare(self.call.build(), self.call.comm.rank, padding)

    def _is_laid_out(self, request: SaveRequest) -> bool:
        return self.planner.remembers and is_made_of_bytes(request)

    # -- the exchange

    def _exchange(self, own: Outcome[Prepared], *, sends_all: bool) -> _PlanReply:
        what = "the save of shards" if self.call.shards_only else "the save"
        phase = f"planning {what} to {self.call.target}"
        request = own.then(partial(self._request, sends_all=sends_all))
        return scatter(self.call.comm, phase, request, lambda found: self._reply(found, own.get()))

    def _request(self, prepared: Prepared, *, sends_all: bool) -> _PlanRequest:
        known = self.planner.known
        if known is None:
            return 0, prepared.view
        is_same = (
            self._is_laid_out(prepared.request)
            and known.kind == self._kind(prepared)
            and known.view == prepared.view
        )
        if is_same and not sends_all:
            return known.number, prepared.view.common or None
        return known.number, prepared.view

    def _reply(self, found: Sequence[_PlanRequest], prepared: Prepared) -> list[_PlanReply]:
        """Use the remembered plan, or make one. Rank 0."""
        requests = [
            (number, sent if isinstance(sent, RankView) else None) for number, sent in found
        ]
        digests = {sent.common if isinstance(sent, RankView) else sent or b"" for _, sent in found}
        known = self.planner.known
        if known is not None and not known.views:
            known = None  # this process was not rank 0 when that plan was made
        number = known.number if known is not None else 0
        if any(theirs != number and view is None for theirs, view in requests):
            return [_PlanReply(0) for _ in requests]
        views: tuple[RankView, ...] = ()
        if known is not None and all(view is None for _, view in requests):
            replies = [_PlanReply(number, self._begin())] * len(requests)
            decision = known.decision
        else:
            remembered = known.views if known is not None else ()
            views = tuple(
                view if view is not None else remembered[rank]
                for rank, (_, view) in enumerate(requests)
            )
            replies, decision = self._share_out(views, prepared)
        assert decision is not None  # noqa: S101 - this is rank 0
        address, differs = self.serve(), len(digests) > 1
        replies = [
            replace(reply, address=address, saver=self.planner.name, differs=differs)
            for reply in replies
        ]
        decision = replace(decision, attempt=self.opened)
        replies[0] = replace(replies[0], decision=decision, views=views)
        return replies

    def _share_out(
        self, views: Sequence[RankView], prepared: Prepared
    ) -> tuple[list[_PlanReply], Decision]:
        """Check the descriptions of all ranks, open the attempt, assign the work. Rank 0."""
        with collector_paused():
            job = check_views(views, check_coverage=self.call.check_coverage)
            directory = self._begin()
            plan = prepared.request.format.plan(job, directory)
            decision = Decision(plan=plan, empty=_without_elements(job))
        # Random, so that no rank mistakes this plan for one that it remembers of another job.
        number = secrets.randbits(62) + 1
        writers = num_writers_by_rank([view.host for view in views], plan.work)
        replies = [
            _PlanReply(number, directory, work, plan.passes_on, num_writers)
            for work, num_writers in zip(plan.work, writers, strict=True)
        ]
        return replies, decision

    def _begin(self) -> Path:
        """Open the attempt; return where to write. Rank 0."""
        target, options = self.call.target, self.call.options
        if self.call.shards_only:
            return target
        check_target(target, options, self.planner.writer)
        self.opened = Attempt.begin(target, options.staging_dir)
        return self.opened.directory

    # -- the result

    def _planned(self, reply: _PlanReply, prepared: Prepared) -> PlannedSave:
        comm, options, directory = self.call.comm, self.call.options, reply.directory
        assert directory is not None  # noqa: S101 - the caller has looked
        point = None
        if reply.address is not None:
            point = CommitPoint(
                address=reply.address,
                name=f"{reply.saver}/{self.number}",
                rank=comm.rank,
                size=comm.size,
                timeout_secs=options.timeout_secs,
            )
        what = "shards to " if self.call.shards_only else ""
        return PlannedSave(
            phase=f"writing {what}{self.call.target}",
            target=self._target(directory),
            directory=directory,
            rank=comm.rank,
            world_size=comm.size,
            options=options,
            prepared=prepared,
            work=reply.work,
            pages=PagePolicy(options.page_cache, reply.num_writers, self.call.target),
            decision=reply.decision,
            saver=reply.saver,
            number=self.number,
            point=point,
        )

    def _target(self, directory: Path) -> Path:
        """Return the target as rank 0 resolves it, whose working directory may differ."""
        if self.call.shards_only:
            return directory
        target = absolute(self.call.target)
        is_aside = self.call.options.staging_dir is not None
        return target if is_aside else directory.parent / target.name

    def _kind(self, prepared: Prepared) -> tuple[object, ...]:
        """Return what a plan depends on besides the descriptions."""
        fmt, comm = prepared.request.format, self.call.comm
        hint = getattr(fmt, "separation_hint", None)
        threads = thread_count(prepared.request, self.call.options)
        # Includes the rank: after a restart within the job another process may have it.
        return (type(fmt), hint, threads, self.call.check_coverage, comm.rank, comm.size)

    def _laid_out(self, reply: _PlanReply, planned: PlannedSave) -> _RememberedPlan:
        """Lay out this rank's files, and make the documents of the checkpoint. Collective."""
        image = attempt(lay_out, planned)
        phase = f"laying out the save to {self.call.target}"
        documents = scatter(
            self.call.comm, phase, image.then(_chunks), partial(_documents, planned)
        )
        decision = planned.decision
        return _RememberedPlan(
            number=reply.number,
            kind=self._kind(planned.prepared),
            view=planned.prepared.view,
            image=image.get(),
            num_writers=reply.num_writers,
            views=reply.views,
            decision=None if decision is None else replace(decision, documents=documents),
        )


def _pass_on(planned: PlannedSave) -> None:
    planned.prepared.request.format.pass_on(planned.job())


def is_made_of_bytes(request: SaveRequest) -> bool:
    """Whether the files consist only of bytes that are known before any is written."""
    return isinstance(request.format, TorchDistFormat) and request.common is None


def lay_out(planned: PlannedSave) -> FileImage:
    """Return this rank's files of a save that ``is_made_of_bytes``. Local."""
    request = planned.prepared.request
    assert isinstance(request.format, TorchDistFormat)  # noqa: S101 - the caller has looked
    files = request.format.files(
        planned.prepared.shards.table,
        planned.work,  # type: ignore[arg-type]  # of our own plan
        rank=planned.rank,
        thread_count=thread_count(request, planned.options),
    )
    return FileImage.of(files)


def _chunks(image: FileImage) -> RankChunks:
    return rank_chunks(image.files)


def _documents(
    planned: PlannedSave, results: Sequence[RankChunks]
) -> list[Mapping[str, bytes] | None]:
    """Return the format's documents for rank 0, and nothing for the others. Rank 0."""
    decision = planned.decision
    assert decision is not None  # noqa: S101 - this is rank 0
    chunks, fmt = proven(results, decision), planned.prepared.request.format
    documents = fmt.documents(chunks, decision.empty, planned.directory)
    return [documents, *(None for _ in results[1:])]


def proven(results: Sequence[Sized], decision: Decision) -> Any:
    """Check that all planned chunks were written; return them for the documents. Rank 0.

    Args:
        results: What each rank has reported, in rank order.
        decision: Has the plan.

    Raises:
        CoordinationError: Something is missing.
    """
    count, planned = sum(map(len, results)), decision.plan.num_results
    if count != planned:
        raise CoordinationError(f"{planned} chunks were planned, {count} written")
    return decision.plan.combined(results)


def _without_elements(job: JobTable) -> dict[str, StoredTensor]:
    """Return the tensors without elements, which have no chunks."""
    found = {}
    for row in np.flatnonzero((job.sizes[2] == 0).any(axis=1)).tolist():
        info = job.views[job.rank[row]][job.index[row]]
        found[info.key] = StoredTensor(info.dtype, info.global_shape, (), info.role)
    return found
