"""From which checkpoint a Trainer goes on: decided once, by all ranks, before anything is loaded.

Here: the connector of a bound Trainer, which looks into a checkpoint that Lightning chose before it
resumes from it, and takes the next best one if it is damaged. Not here: what was asked for
(``_requests``), where to look (``_candidates``), loading (``_overrides``). On every rank.

A checkpoint that the user named, by its path or as the best, is never replaced by another.
"""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dist_ckpt.errors import CheckpointNotFoundError, CorruptedCheckpointError
from dist_ckpt.events import JsonLinesSink, Skipped
from dist_ckpt.recovery import newest_good
from dist_ckpt.serialization import all_processes
from lightning_dist_ckpt._candidates import (
    is_wanted,
    likeliest,
    model_checkpoints,
    others,
    set_aside_names,
    traces_of,
)
from lightning_dist_ckpt._model_checkpoint import forget_name
from lightning_dist_ckpt._overrides import LOADING_MODEL, FailedDump
from lightning_dist_ckpt._pending import flip_link
from lightning_dist_ckpt._requests import Request, take_request
from lightning_dist_ckpt.export import is_stock

if TYPE_CHECKING:
    from dist_ckpt.events import Event, EventSink
    from dist_ckpt.types import Communicator
    from lightning_dist_ckpt.io import DistCkptIO

__all__ = ["bind_connector"]


def bind_connector(connector: Any) -> None:
    """Let the checkpoint connector of one Trainer resume as we do. Idempotent."""
    base = type(connector)
    if "dist_ckpt_base" in vars(base):
        return
    own = {name: value for name, value in vars(_Overrides).items() if name in _OVERRIDDEN}
    names = {name: getattr(base, name) for name in ("__module__", "__qualname__", "__doc__")}
    connector.__class__ = type(base.__name__, (base,), {**own, **names, "dist_ckpt_base": base})


_OVERRIDDEN = frozenset(
    {
        "__reduce_ex__",
        "dump_checkpoint",
        "restore_callbacks",
        "restore_datamodule",
        "restore_model",
        "resume_start",
    }
)


def _stock(connector: Any) -> Any:
    """Return the connector as Lightning has it: what ``super()`` would be."""
    return super(type(connector), connector)


class _Overrides:
    """Methods for ``bind_connector``; never an object of its own. ``self`` is a connector."""

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        """Pickle by the class that can be imported; the next run binds again."""
        del protocol
        return object.__new__, (type(self).dist_ckpt_base,), self.__getstate__()

    def resume_start(self: Any, checkpoint_path: Any = None, *args: Any, **kwargs: Any) -> None:
        """Open what the run resumes from; another checkpoint than asked for, if need be."""
        request = take_request(self, checkpoint_path)
        if request is not None:
            checkpoint_path = _choose(self.trainer, request)
        _stock(self).resume_start(checkpoint_path, *args, **kwargs)

    def dump_checkpoint(self: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return Lightning's dict. What hooks raise on one rank, the save raises on all of them."""
        dumped: dict[str, Any]
        try:
            dumped = _stock(self).dump_checkpoint(*args, **kwargs)
        except Exception as error:
            if self.trainer.world_size == 1:
                raise
            dumped = FailedDump(error)
        return dumped

    def restore_datamodule(self: Any) -> None:
        """Restore the data module; what it raises on one rank is raised on all."""
        if not self._loaded_checkpoint or self.trainer.datamodule is None:
            return
        restore = _stock(self).restore_datamodule
        _communicator(self.trainer).map_reduce("restoring data", restore, lambda _: None)

    def restore_model(self: Any) -> None:
        """Call the hooks and load the model; what a hook raises on one rank is raised on all."""
        binding = self.trainer.strategy.dist_ckpt_binding
        binding.hooks_are_done = not (self._loaded_checkpoint and binding.restores)
        try:
            _stock(self).restore_model()
        except Exception as error:
            if binding.hooks_are_done:
                raise
            failed = functools.partial(_raise, error)
            _communicator(self.trainer).map_reduce(LOADING_MODEL, failed, lambda _: None)

    def restore_callbacks(self: Any) -> None:
        """Restore callbacks; they do not know checkpoints any more that were set aside.

        What they raise on one rank is raised on all.
        """
        if not self._loaded_checkpoint:
            return
        callbacks = model_checkpoints(self.trainer)
        gone = _communicator(self.trainer).map_reduce(
            "restoring callbacks",
            _stock(self).restore_callbacks,
            lambda _: [_gone(one) for one in callbacks],
        )
        for callback, names in zip(callbacks, gone, strict=True):
            for name in names:
                forget_name(callback, name)


def _raise(error: Exception) -> None:
    raise error


def _gone(callback: Any) -> list[str]:
    """Return which names a callback has that were set aside. Rank 0."""
    known = {*callback.best_k_models, callback.best_model_path, callback.last_model_path}
    missing = [path for path in sorted(known) if path and not Path(path).exists()]
    aside = {folder: set_aside_names(folder) for folder in {Path(path).parent for path in missing}}
    return [path for path in missing if Path(path).name in aside[Path(path).parent]]


def _communicator(trainer: Any) -> Communicator:
    return all_processes(timeout_secs=_io(trainer).config.timeout_secs)


def _io(trainer: Any) -> DistCkptIO:
    io: DistCkptIO = trainer.strategy.dist_ckpt_binding.io
    return io


@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidates:
    """Where to look, the likeliest first, up to the first that Lightning itself saved.

    Attributes:
        own: Ours: by where they are, how they are called.
        stock: Lightning's; it counts as good.
    """

    own: dict[Path, Path]
    stock: Path | None

    @classmethod
    def of(cls, paths: Sequence[Path]) -> _Candidates:
        """Look which of them are ours. Rank 0."""
        own = list(itertools.takewhile(lambda path: not is_stock(path), paths))
        stock = paths[len(own)] if len(own) < len(paths) else None
        return cls(own={path.resolve(): path for path in own}, stock=stock)

    @property
    def paths(self) -> list[Path]:
        """All of them, as they are called."""
        return [*self.own.values(), *([] if self.stock is None else [self.stock])]


class _Notes:
    """Keeps what is told of candidates that do not count."""

    def __init__(self) -> None:
        self.reasons: dict[str, str] = {}

    def emit(self, event: Event) -> None:
        if isinstance(event, Skipped):
            self.reasons[event.path] = event.reason


def _choose(trainer: Any, request: Request) -> Any:
    """Return what to resume from; None for nothing. Collective, the same on all ranks.

    Raises:
        CorruptedCheckpointError: There are checkpoints, and none is good.
        CheckpointNotFoundError: There are none, but there have been.
    """
    comm = _communicator(trainer)
    asked, first = comm.map_reduce(
        "choosing a checkpoint",
        lambda: request,
        lambda requests: (requests[0], _first(trainer, requests[0])),
    )
    if first is None:
        return asked.path
    notes = _Notes()
    try:
        found = _newest_good(trainer, first, notes)
    except CorruptedCheckpointError:
        found = None
    if found is None:
        more = comm.broadcast(
            "listing checkpoints",
            lambda: _Candidates.of([*first.paths, *others(trainer, first.paths)]),
        )
        found = _newest_good(trainer, more, notes)
    if found is None:
        comm.broadcast("beginning anew", lambda: _check_never_saved(trainer, asked))
    if found is None or (asked.path is not None and found == Path(asked.path)):
        return asked.path  # of what is no checkpoint at all, the load says so
    comm.broadcast("telling what was chosen", lambda: _settle(asked, found, first.paths, notes))
    return str(found)


def _first(trainer: Any, request: Request) -> _Candidates | None:
    """Return where to look first; None to do as Lightning does. Rank 0."""
    if request.kind == "given" or "://" in str(request.path) or not is_wanted(trainer, request):
        return None
    return _Candidates.of(likeliest(trainer, request))


def _newest_good(trainer: Any, candidates: _Candidates, notes: _Notes) -> Path | None:
    """Return the name of the first good one. Collective.

    Raises:
        CorruptedCheckpointError: None is.
    """
    io = _io(trainer)
    sinks: list[EventSink] = [notes]
    if io.config.events_file is not None and trainer.is_global_zero:
        sinks.append(JsonLinesSink(io.config.events_file))  # one rank tells what all have decided
    try:
        found = newest_good(
            lambda: list(candidates.own),
            level=io.config.verify_newest,
            options=io.load_options(),
            communicator=_communicator(trainer),
            sinks=sinks,
        )
    except CorruptedCheckpointError as error:
        if candidates.stock is None:
            raise
        notes.reasons["all that were saved since"] = str(error)
        found = None
    return candidates.stock if found is None else candidates.own[found]


def _check_never_saved(trainer: Any, asked: Request) -> None:
    """Raise if there were checkpoints once. Rank 0."""
    traces = [] if asked.path is not None else traces_of(trainer, asked)
    if traces:
        raise CheckpointNotFoundError(
            f"ckpt_path={asked.kind!r}: there is no checkpoint any more, but "
            f"{', '.join(map(str, traces))}.",
            hint="to begin anew, remove that.",
        )


def _settle(asked: Request, found: Path, tried: Sequence[Path], notes: _Notes) -> None:
    """Let links to what was set aside lead to what was found, and tell the user. Rank 0."""
    for path in tried:
        if path.is_symlink() and not path.exists():
            flip_link(found.resolve(), path)
    reasons = [f"{Path(path).name} is {reason}" for path, reason in notes.reasons.items()]
    why = "; ".join(reasons) or "Lightning found no checkpoint of that name"
    warnings.warn(f"ckpt_path={asked.kind!r} resumes from {found}: {why}", stacklevel=2)
