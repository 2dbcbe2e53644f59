"""The checkpoints of one job, in one folder: save, find the newest good one, prune.

Here: ``CheckpointManager``, which composes saving, ``recovery`` and ``retention``. Not here: any of
these by itself. Called on every rank alike; files are removed by rank 0 alone.

The laws of removal: only behind the commit of the save that makes it due; never the newest good
checkpoint nor the one just saved, whatever the policy says; nothing unless the newest verifies; and
so that at no instant half of a checkpoint looks whole.
"""

from __future__ import annotations

import functools
import logging
import uuid
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

from dist_ckpt._comm import default_communicator
from dist_ckpt._loading.search import checked_level
from dist_ckpt._saving.request import SaveCall
from dist_ckpt._saving.save import run_save
from dist_ckpt.background import BackgroundSaver
from dist_ckpt.errors import CheckpointingException, CheckpointNotFoundError, ConfigError
from dist_ckpt.events import LoggingSink, emit_pruned
from dist_ckpt.manager._steps import (
    INFO_FILE,
    candidates_in,
    clear_the_way,
    info_document,
    infos_in,
    prune_steps,
    step_path,
)
from dist_ckpt.options import LoadOptions, SaveOptions, checked_path
from dist_ckpt.recovery import newest_good, sweep
from dist_ckpt.serialization import StrictHandling, load
from dist_ckpt.storage import open_store
from dist_ckpt.storage.paths import absolute
from dist_ckpt.storage.trees import make_directory, make_temporary, remove_temporary
from dist_ckpt.strategies.selection import chosen_save
from dist_ckpt.training_state import (
    CheckpointView,
    SaveMemory,
    TrainingState,
    save_training_state,
)
from dist_ckpt.validation import shortened

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from dist_ckpt.events import EventSink
    from dist_ckpt.recovery import VerifyLevel
    from dist_ckpt.retention import CheckpointInfo, RetentionPolicy
    from dist_ckpt.types import Communicator, PathLike, ShardedStateDict

__all__ = ["CheckpointManager"]

logger = logging.getLogger(__name__)

R = TypeVar("R")

_REASON = "retention"


class CheckpointManager:
    """Saves a job's checkpoints as ``step_{n}`` in a folder, and keeps the folder in order.

    Every method is collective unless it says otherwise, and raises on every rank if it raises on
    one. Use it as a context manager, or call ``close``.

    Args:
        folder: Where the checkpoints are; made by the first save.
        retention: Which of them to keep; None for all.
        async_save: Whether to save in the background, with a saver of the manager's own.
        saver: Or with this one, which stays the caller's.
        save_options: Choices of every save.
        load_options: Choices of every load, and of verifying.
        communicator: The ranks, if not those of the default process group.
        verify_newest: How closely a checkpoint is looked at before it counts as the newest.
        sweep_after_secs: How old leftovers of dead saves must be for the first save to remove them,
            see ``recovery.sweep``; None to leave them.
        sinks: Take the events of saves, and of what is skipped and removed, as the log does. A
            saver that is given has its own for its saves.

    Raises:
        ConfigError: ``async_save`` and ``saver``; an ``include_dir``, which is one save's own; or a
            value is wrong.
    """

    def __init__(  # noqa: PLR0913 - each is a choice of its own
        self,
        folder: PathLike,
        *,
        retention: RetentionPolicy | None = None,
        async_save: bool = False,
        saver: BackgroundSaver | None = None,
        save_options: SaveOptions | None = None,
        load_options: LoadOptions | None = None,
        communicator: Communicator | None = None,
        verify_newest: VerifyLevel = "full",
        sweep_after_secs: float | None = 86400.0,
        sinks: Iterable[EventSink] = (),
    ) -> None:
        """Look at nothing yet."""
        self.folder = absolute(checked_path(folder))
        self._retention, self._verify_newest = retention, verify_newest
        self._save_options = save_options or SaveOptions()
        self._memory = SaveMemory()
        self._load_options = load_options or LoadOptions()
        self._communicator, self._sinks = communicator, (LoggingSink(), *sinks)
        self._sweep_after_secs = sweep_after_secs
        self._own_saver: BackgroundSaver | None = None
        self._given_saver, self._is_async = saver, async_save
        self._is_closed = False
        if saver is not None and async_save:
            raise ConfigError("async_save makes a saver, and one was given.")
        if self._save_options.include_dir is not None:
            raise ConfigError("save_options.include_dir is of one save, not of all.")
        checked_level(verify_newest)
        if sweep_after_secs is not None and not sweep_after_secs >= 0:
            raise ConfigError(f"sweep_after_secs must not be negative: {sweep_after_secs!r}.")

    def __enter__(self) -> Self:
        """Return the manager."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()

    @property
    def saver(self) -> BackgroundSaver | None:
        """What saves in the background, to ``poll`` and ``wait``; None before the first such save.

        Not collective.
        """
        return self._given_saver or self._own_saver

    def path(self, step: int) -> Path:
        """Return where a step is, or would be. Not collective.

        Raises:
            ConfigError: ``step`` is no integer from 0 on.
        """
        return step_path(self.folder, step)

    # -- saving ------------------------------------------------------------------------------------

    def save(
        self,
        step: int,
        state: TrainingState | Callable[[], TrainingState] | ShardedStateDict,
        *,
        metrics: Mapping[str, float] | None = None,
    ) -> Path:
        """Save a step; one that is there is replaced. Then remove what need not be kept any more.

        In the background, this returns when the state may change, and what need not be kept is
        removed behind the commit. What fails in removing is logged: the save is good.

        Args:
            step: Its number, from 0 on.
            state: A job's state, or what returns it; or a sharded state dict.
            metrics: Numbers for the policy, kept with the checkpoint; rank 0's are.

        Returns:
            The checkpoint.

        Raises:
            CheckpointingException: Whatever failed on any rank; nothing of the step is committed
                then, and nothing is removed.
            AsyncSaveError: A background save before this one failed; this one does not begin.
        """
        comm, saver = self._comm(self._save_options), self._saver()
        made: list[Path] = []
        try:
            comm.map_reduce(
                f"opening a save in {self.folder}",
                lambda: (self._checked(step), saver is not None),
                lambda views: made.append(self._begin(views, metrics or {})),
            )
            self._write(step, state, made[0] if made else None)
        except BaseException:
            _discard(made)
            raise
        if saver is None:
            _discard(made)
        if comm.rank == 0 and self._retention is not None:
            due = functools.partial(self._prune_quietly, step)
            if saver is None:
                due()
            else:
                what = f"removing checkpoints from {self.folder}"
                saver.after_commit(due, what=what, frees_space=True)
        return self.path(step)

    def _checked(self, step: int) -> int:
        if self._is_closed:
            raise ConfigError("the manager is closed.")
        self.path(step)
        return step

    def _begin(self, views: Sequence[tuple[int, bool]], metrics: Mapping[str, float]) -> Path:
        """Make the folder ready, and the document that goes into the checkpoint. Rank 0."""
        steps = sorted({step for step, _ in views})
        if len(steps) > 1:
            raise ConfigError(
                f"ranks save different steps: {shortened([str(step) for step in steps])}."
            )
        if len({is_async for _, is_async in views}) > 1:
            raise ConfigError("some ranks save in the background and some do not.")
        document = info_document(steps[0], metrics)
        parent = self._save_options.staging_dir or self.folder
        # A name that is not durable would take all that is committed below it along.
        make_directory(self.folder)
        make_directory(parent)
        self._sweep()
        clear_the_way(self.path(steps[0]))
        directory = parent / f".dist-ckpt-{uuid.uuid4().hex[:12]}.hooks"
        try:
            make_temporary(directory)
            open_store(directory).create(INFO_FILE, document)
        except BaseException:
            _discard([directory])
            raise
        return directory

    def _sweep(self) -> None:
        """Remove what dead saves left, once. Rank 0."""
        limit, self._sweep_after_secs = self._sweep_after_secs, None
        if limit is None:
            return
        for folder in {self.folder, self._save_options.staging_dir or self.folder}:
            try:
                sweep(folder, older_than_secs=limit)
            except (CheckpointingException, OSError):
                logger.warning("%s was not swept.", folder, exc_info=True)

    def _write(
        self,
        step: int,
        state: TrainingState | Callable[[], TrainingState] | ShardedStateDict,
        include_dir: Path | None,
    ) -> None:
        discard = functools.partial(_discard, [] if include_dir is None else [include_dir])
        options = replace(self._save_options, include_dir=include_dir)
        comm, saver, target = self._comm(self._save_options), self._saver(), self.path(step)
        if not isinstance(state, dict):
            save_training_state(
                target, state, options=options, communicator=comm, saver=saver,
                on_settled=lambda _: discard(), memory=self._memory, sinks=self._sinks,
            )  # fmt: skip
            return
        call = SaveCall(
            build=lambda: chosen_save(None, None, options, state),
            target=target,
            comm=comm,
            options=options,
            check_coverage=options.verify_sharding,
        )
        if saver is None:
            run_save(call, self._memory, self._sinks)
        else:
            saver.submit(call, on_settled=lambda _: discard())

    # -- finding and loading -----------------------------------------------------------------------

    def steps(self) -> list[int]:
        """Return the steps that are committed, in order; whether they are good is not looked at."""
        return [one.step for one in self.checkpoints()]

    def checkpoints(self) -> list[CheckpointInfo]:
        """Return what is known of each committed step, in order of the steps."""
        return self._comm(self._load_options).broadcast(
            f"listing {self.folder}", lambda: infos_in(self.folder)
        )

    def latest(self) -> Path | None:
        """Return the newest good checkpoint; None if there is none at all.

        What is in flight is waited for. Damaged ones are set aside, see ``recovery.newest_good``.

        Raises:
            CorruptedCheckpointError: There are checkpoints, and none is good.
            AsyncSaveError: A background save failed and nobody was told.
        """
        self._settle()
        return newest_good(
            lambda: candidates_in(self.folder),
            level=self._verify_newest,
            options=self._load_options,
            communicator=self._comm(self._load_options),
            sinks=self._sinks,
        )

    def restore(
        self, state: TrainingState, *, step: int | None = None, strict: bool = True
    ) -> CheckpointView | None:
        """Fill the models and optimizers of a state in place.

        Args:
            state: As it is saved; its other values are not changed, the view has the stored ones.
            step: Which; the newest good one if None.
            strict: Whether names that only one side has are an error.

        Returns:
            The checkpoint, for ``common`` and ``per_rank()``; None if ``step`` is None and there is
            no checkpoint at all.

        Raises:
            CheckpointNotFoundError: There is no such step.
            MismatchError: Names, shapes or dtypes do not agree.
        """

        def fill(path: Path) -> CheckpointView:
            view = CheckpointView.open(
                path, options=self._load_options, communicator=self._comm(self._load_options)
            )
            for i, model in enumerate(state.models):
                view.load_model(i, model, strict=strict)
            for j, optimizer in enumerate(state.optimizers):
                view.load_optimizer(j, optimizer, state.models)
            return view

        return self._use(step, fill)

    def load(
        self,
        sharded_state_dict: ShardedStateDict,
        *,
        step: int | None = None,
        strict: StrictHandling | str = StrictHandling.ASSUME_OK_UNEXPECTED,
    ) -> Any:
        """Load a sharded state dict, as ``dist_ckpt.load`` does.

        Args:
            sharded_state_dict: The request.
            step: Which; the newest good one if None.
            strict: What to do about keys that only one side has.

        Returns:
            What ``dist_ckpt.load`` returns; None if ``step`` is None and there is no checkpoint.
        """
        options, comm = self._load_options, self._comm(self._load_options)
        return self._use(
            step,
            lambda path: load(
                sharded_state_dict, path, strict=strict, options=options, communicator=comm
            ),
        )

    def _use(self, step: int | None, use: Callable[[Path], R]) -> R | None:
        if step is not None:
            self._settle()
            return use(self.path(step))
        found = self.latest()
        if found is None:
            return None
        try:
            return use(found)
        except CheckpointNotFoundError:
            # Another job has removed or replaced it meanwhile; all ranks are told the same.
            again = self.latest()
            if again is None:
                raise
            return use(again)

    # -- removing ----------------------------------------------------------------------------------

    def prune(self) -> list[int]:
        """Remove what the policy does not keep; return these steps. In flight is waited for.

        Never the newest good one, and nothing at all unless there is one.

        Raises:
            StorageError: One cannot be removed.
            AsyncSaveError: A background save failed and nobody was told.
        """
        self._settle()
        return self._comm(self._load_options).broadcast(f"pruning {self.folder}", self._prune)

    def _prune_quietly(self, saved: int) -> None:
        try:
            self._prune(saved)
        except Exception:
            logger.warning("%s was not pruned.", self.folder, exc_info=True)

    def _prune(self, saved: int | None = None) -> list[int]:
        """Remove what need not be kept. Rank 0; no exchange inside."""
        if self._retention is None:
            return []
        saver = self.saver
        removed = prune_steps(
            self.folder,
            self._retention,
            spared=set() if saved is None else {saved},
            in_flight=() if saver is None else saver.in_flight,
            options=self._load_options,
        )
        for step in removed:
            path = self.path(step)
            if saver is not None:
                saver.pruned(path, _REASON)
            if saver is None or saver is self._given_saver:  # which has sinks of its own
                emit_pruned(self._sinks, path, _REASON)
        return removed

    def close(self) -> None:
        """Wait for what is in flight and end what the manager has started; again does nothing.

        Raises:
            AsyncSaveError: A save failed and nobody was told; all is closed then, too.
        """
        self._is_closed = True
        saver, self._own_saver = self._own_saver, None
        if saver is not None:
            saver.close()

    # -- helpers -----------------------------------------------------------------------------------

    def _comm(self, options: SaveOptions | LoadOptions) -> Communicator:
        timeout_secs = options.timeout_secs
        return self._communicator or default_communicator(timeout_secs=timeout_secs)

    def _saver(self) -> BackgroundSaver | None:
        if self._is_async and self._own_saver is None and not self._is_closed:
            timeout_secs = self._save_options.timeout_secs
            self._own_saver = BackgroundSaver(sinks=self._sinks, timeout_secs=timeout_secs)
        return self.saver

    def _settle(self) -> None:
        if self.saver is not None:
            self.saver.drain()


def _discard(directories: Sequence[Path]) -> None:
    """Remove directories whose content went into a checkpoint. From any thread."""
    for directory in directories:
        remove_temporary(directory)
