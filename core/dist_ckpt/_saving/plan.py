"""Planning that remembers: the part of a background save that the training thread pays for.

Here: ``AsyncPlanner``, which plans a save with all ranks, and plans anew only what has changed;
saves that wait use it too (``_saving.memory``). Not here: copying and handing over
(``_worker.submit``), what the worker does (``_worker``), the order of saves (``background``).
See docs/decisions/0017-background-saves.md and 0028-planning-in-columns.md.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from dist_ckpt._formats.documents import COMMON_FILE
from dist_ckpt._formats.objects import Room
from dist_ckpt._formats.torch_dist.format import TorchDistFormat
from dist_ckpt._formats.torch_dist.layout import rank_chunks
from dist_ckpt._saving.common_parts import compare_common
from dist_ckpt._saving.describe import Prepared, check_views, common_backend, prepare
from dist_ckpt._saving.execute import (
    Assignment,
    Coordinator,
    PendingSave,
    pass_on,
    plan_work,
    proven,
)
from dist_ckpt._saving.image import FileImage
from dist_ckpt._saving.publish import CommitPoint, Publication, check_target
from dist_ckpt.core import CheckpointingConfig
from dist_ckpt.errors import CoordinationError
from dist_ckpt.storage.commit import Attempt
from dist_ckpt.storage.page_cache import PagePolicy
from dist_ckpt.validation import RankView

if TYPE_CHECKING:
    from dist_ckpt._formats.torch_dist.layout import RankChunks
    from dist_ckpt._saving.describe import SaveRequest
    from dist_ckpt._saving.in_flight import Writer
    from dist_ckpt._worker.hub import HubAddress
    from dist_ckpt.options import SaveOptions
    from dist_ckpt.types import Communicator

__all__ = ["AsyncPlanner", "PlannedSave"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedSave:
    """What one rank has to write, and where all meet.

    Attributes:
        saver: Name of the saver, the same on all ranks.
        number: Of the save, within the saver.
        target: Where the checkpoint shall be.
        directory: The attempt directory.
        prepared: This rank's shards.
        point: Where the workers of all ranks meet; None for one rank.
        image: What is written, for data files that are made of bytes alone.
        publication: Rank 0's part of the commit of such files.
        pending: The planned save, for other formats.
        attempt: The attempt; rank 0 only.
        pages: What becomes of the pages of what is written, for data files.
    """

    saver: str
    number: int
    target: Path
    directory: Path
    prepared: Prepared
    point: CommitPoint | None
    image: FileImage | None = None
    publication: Publication | None = None
    pending: PendingSave | None = None
    attempt: Attempt | None = None
    pages: PagePolicy = PagePolicy()  # noqa: RUF009 - frozen

    @property
    def name(self) -> str:
        """Name of the save, unique in the job."""
        return self.name_of(self.number)

    def name_of(self, number: int) -> str:
        """Return the name of another save of the same saver."""
        return f"{self.saver}/{number}"


_Arrival: TypeAlias = "tuple[int, RankView | bytes | None]"
"""A rank's message: the number of the plan that it remembers, and its description. If that is the
plan's, only the digest of its common part, or None without one. A plain tuple: pickled with the
name of a class it would be twice as long."""


@dataclass(frozen=True, slots=True)
class _Departure:
    """What a rank is told: what to write, None for what it remembers; or to tell all again."""

    plan: int
    directory: Path | None = None
    assignment: Assignment | None = None
    address: HubAddress | None = None
    saver: str = ""
    differs: bool = False


@dataclass(frozen=True, slots=True)
class _Known:
    """The plan of the save before, as far as it concerns this rank.

    ``num_writers``: ranks of this rank's host that write. ``views`` and ``documents`` are rank 0's.
    """

    plan: int
    kind: tuple[object, ...]
    view: RankView
    image: FileImage
    num_writers: int = 1
    views: tuple[RankView, ...] = ()
    documents: dict[str, bytes] | None = None


class AsyncPlanner:
    """Plans one save after the other; collective over all ranks, from the training thread.

    The plan of the save before is taken again only if every rank says that its description is the
    same, element by element: then one small exchange is all there is.

    Args:
        writer: The writer of the planned saves, if they are written in the background.
    """

    def __init__(self, writer: Writer | None = None) -> None:
        """Start without a plan."""
        self.writer = writer
        self.name = secrets.token_hex(8)
        self._known: _Known | None = None
        self._room = Room()

    def plan(
        self,
        build: Callable[[], SaveRequest],
        target: Path,
        comm: Communicator,
        options: SaveOptions,
        *,
        check_coverage: bool,
        serve: Callable[[], HubAddress | None],
        number: int,
    ) -> PlannedSave:
        """Plan a save and open its attempt.

        Args:
            build: Makes this rank's request, inside of the exchange.
            target: Where the checkpoint shall be.
            comm: The ranks.
            options: Choices.
            check_coverage: Whether main replicas must tile every tensor.
            serve: Returns where workers meet; called on rank 0.
            number: Of this save, the same on all ranks.

        Raises:
            CheckpointingException: On every rank, whatever failed on any; no attempt is left.
        """
        step = _Step(self, build, target, comm, options, check_coverage, serve, number)
        try:
            return step.run()
        except BaseException:
            # Also on Ctrl-C: an attempt that nobody finishes must not stay behind.
            step.coordinator.abort()
            raise

    def remember(self, known: _Known | None) -> None:
        """Take this as the plan of the save before."""
        self._known = known

    @property
    def known(self) -> _Known | None:
        """The plan of the save before."""
        return self._known

    @property
    def room(self) -> Room:
        """How long documents are made."""
        return self._room


@dataclass(slots=True)
class _Step:
    """One planning: what its exchanges share."""

    planner: AsyncPlanner
    build: Callable[[], SaveRequest]
    target: Path
    comm: Communicator
    options: SaveOptions
    check_coverage: bool
    serve: Callable[[], HubAddress | None]
    number: int
    coordinator: Coordinator = field(default_factory=Coordinator)
    views: tuple[RankView, ...] = ()
    prepared: Prepared | None = None

    def _prepared(self) -> Prepared:
        if self.prepared is None:
            self.prepared = prepare(self.build(), self.comm.rank, self.planner.room)
        return self.prepared

    def run(self) -> PlannedSave:
        told = self._exchange(tell_all=False)
        if told.directory is None:
            told = self._exchange(tell_all=True)
        if told.directory is None:
            raise CoordinationError(f"planning the save to {self.target}: nobody told of a plan.")
        prepared, known = self._prepared(), self.planner.known
        if told.differs:
            compare_common(self.comm, prepared.compared or {})
        point = self._point(told)
        if not _is_plain(prepared.request):
            return self._other(told, prepared, point)
        if told.assignment is not None:
            self.planner.remember(None)  # until all ranks have come through
            known = self._known_anew(told, prepared)
            self.planner.remember(known)
        assert known is not None  # noqa: S101 - rank 0 has compared the numbers of the plans
        return PlannedSave(
            saver=told.saver,
            number=self.number,
            target=self._absolute(told.directory),
            directory=told.directory,
            prepared=prepared,
            point=point,
            image=known.image,
            publication=self._publication(known, prepared),
            attempt=self.coordinator.attempt,
            pages=PagePolicy(self.options.page_cache, known.num_writers, self.target),
        )

    def _exchange(self, *, tell_all: bool) -> _Departure:
        return self.comm.map_scatter(
            f"planning the save to {self.target}", lambda: self._arrive(tell_all=tell_all),
            self._depart,
        )  # fmt: skip

    def _arrive(self, *, tell_all: bool) -> _Arrival:
        prepared, known = self._prepared(), self.planner.known
        if known is None:
            return 0, prepared.view
        is_same = (
            _is_plain(prepared.request)
            and known.kind == self._kind(prepared)
            and known.view == prepared.view
        )
        if is_same and not tell_all:
            return known.plan, prepared.view.common or None
        return known.plan, prepared.view

    def _depart(self, found: Sequence[_Arrival]) -> list[_Departure]:
        """Take the plan that is known, or make one. Rank 0."""
        arrivals = [(n, one if isinstance(one, RankView) else None) for n, one in found]
        common = {one.common if isinstance(one, RankView) else one or b"" for _, one in found}
        differs = len(common) > 1
        known = self.planner.known
        if known is not None and not known.views:
            known = None  # of a plan that another process has made, as rank 0
        number = known.plan if known is not None else 0
        if any(plan != number and view is None for plan, view in arrivals):
            return [_Departure(0) for _ in arrivals]
        if known is not None and all(view is None for _, view in arrivals):
            directory = self._begin()
            told = _Departure(number, directory, None, self.serve(), self.planner.name, differs)
            return [told for _ in arrivals]
        remembered = known.views if known is not None else ()
        views = tuple(
            view if view is not None else remembered[rank]
            for rank, (_, view) in enumerate(arrivals)
        )
        job = check_views(views, check_coverage=self.check_coverage)
        directory = self._begin()
        work = plan_work(
            job, directory, self._prepared().request.format, self.coordinator,
            [view.host for view in views],
        )  # fmt: skip
        self.views = views
        address = self.serve()
        # No number comes twice, so that nobody takes another plan for the one he remembers.
        number = secrets.randbits(62) + 1
        return [
            _Departure(number, directory, assignment, address, self.planner.name, differs)
            for assignment in work
        ]

    def _begin(self) -> Path:
        if self.options.include_dir is not None:
            # Named by this process's working directory, found by the worker from its own.
            include_dir = Path(os.path.abspath(self.options.include_dir))  # noqa: PTH100 - resolve() would follow a link
            self.options = replace(self.options, include_dir=include_dir)
        check_target(self.target, self.options, self.planner.writer)
        self.coordinator.attempt = Attempt.begin(self.target, self.options.staging_dir)
        return self.coordinator.attempt.directory

    def _absolute(self, directory: Path) -> Path:
        """Return the target as rank 0 resolves it, whose working directory may differ."""
        target = Path(os.path.abspath(self.target))  # noqa: PTH100 - resolve() would follow a link
        return target if self.options.staging_dir is not None else directory.parent / target.name

    def _kind(self, prepared: Prepared) -> tuple[object, ...]:
        """Return what a plan depends on besides the descriptions."""
        hint = getattr(prepared.request.format, "separation_hint", None)
        threads = prepared.request.thread_count or self.options.thread_count
        # The rank, too: a job that goes on may have given it to another process.
        place = self.comm.rank, self.comm.size
        return (type(prepared.request.format), hint, threads, self.check_coverage, *place)

    def _known_anew(self, told: _Departure, prepared: Prepared) -> _Known:
        """Lay this rank's files out, and make the documents of all. Collective."""
        fmt, assignment = prepared.request.format, told.assignment
        assert isinstance(fmt, TorchDistFormat)  # noqa: S101 - `_is_plain` has looked
        assert assignment is not None  # noqa: S101 - the plan is new
        images: list[FileImage] = []

        def lay_out() -> RankChunks:
            files = fmt.files(
                prepared.shards.table,
                assignment.work,  # type: ignore[arg-type]  # of our own plan
                rank=self.comm.rank,
                thread_count=prepared.request.thread_count or self.options.thread_count,
            )
            images.append(FileImage.of(files))
            return rank_chunks(files)

        documents: list[dict[str, bytes]] = []

        def document(results: Sequence[RankChunks]) -> None:
            found = proven(results, self.coordinator)
            documents.append(fmt.documents(found, self.coordinator.empty, assignment.directory))

        self.comm.map_reduce(f"laying out the save to {self.target}", lay_out, document)
        return _Known(
            plan=told.plan,
            kind=self._kind(prepared),
            view=prepared.view,
            image=images[0],
            num_writers=assignment.num_writers,
            views=self.views,
            documents=documents[0] if documents else None,
        )

    def _publication(self, known: _Known, prepared: Prepared) -> Publication | None:
        if self.coordinator.attempt is None or known.documents is None:
            return None
        documents = dict(known.documents)
        if prepared.common is not None:
            documents[COMMON_FILE] = prepared.common
        fmt = prepared.request.format
        return Publication(
            attempt=self.coordinator.attempt,
            documents=documents,
            files={},
            config=CheckpointingConfig(fmt.backend, fmt.version, *common_backend(prepared.request)),
            world_size=self.comm.size,
            include_dir=self.options.include_dir,
            dcp_metadata=self.options.dcp_metadata,
        )

    def _other(
        self, told: _Departure, prepared: Prepared, point: CommitPoint | None
    ) -> PlannedSave:
        """Return a save in a format that has more to it than bytes in files. Collective."""
        assert told.assignment is not None  # noqa: S101 - such plans are never remembered
        pending = PendingSave(
            f"writing {self.target}", self.comm, self.options, prepared, told.assignment,
            self.coordinator, lambda _: None,
        )  # fmt: skip
        pass_on(pending)
        return PlannedSave(
            saver=told.saver,
            number=self.number,
            target=self._absolute(told.assignment.directory),
            directory=told.assignment.directory,
            prepared=prepared,
            point=point,
            pending=pending,
            attempt=self.coordinator.attempt,
        )

    def _point(self, told: _Departure) -> CommitPoint | None:
        if told.address is None:
            return None
        return CommitPoint(
            address=told.address,
            name=f"{told.saver}/{self.number}",
            rank=self.comm.rank,
            size=self.comm.size,
            timeout_secs=self.options.timeout_secs,
        )


def _is_plain(request: SaveRequest) -> bool:
    return isinstance(request.format, TorchDistFormat) and request.common is None
