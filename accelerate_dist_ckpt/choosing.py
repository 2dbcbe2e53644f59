"""Which checkpoint ``load_state`` means: the one that is named, or the newest that is good.

Here: the choice, decided once and the same on all ranks, and what becomes of damaged ones. Not
here: what checkpoints are called (``naming``), looking into them (``dist_ckpt.recovery``).
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from accelerate.accelerator import Accelerator

from accelerate_dist_ckpt import naming
from accelerate_dist_ckpt.io import DistCkptIO
from dist_ckpt.errors import CheckpointNotFoundError, CorruptedCheckpointError
from dist_ckpt.events import Event, EventSink, JsonLinesSink, Skipped
from dist_ckpt.recovery import newest_good
from dist_ckpt.types import Communicator

__all__ = ["choose", "count_on"]


def choose(
    accelerator: Accelerator, io: DistCkptIO, input_dir: Any, comm: Communicator
) -> tuple[Path, bool]:
    """Return which checkpoint is meant, and whether it is ours. Collective.

    One that is named is never replaced by another. What is neither ours nor natively complete is
    opened as ours, which says what is wrong with it.

    Raises:
        CheckpointNotFoundError: Nothing is named, and there is no finished checkpoint.
        CorruptedCheckpointError: Nothing is named, and none of the checkpoints is good.
        MismatchError: Accelerate saved there after us.
        ValueError: Nothing is named, and Accelerate does not name checkpoints.
    """
    listed = comm.broadcast(
        "choosing the checkpoint to load", lambda: _asked(accelerator, input_dir)
    )
    if not isinstance(listed, naming.Candidates):
        return listed
    notes = _Notes()
    found: Path | None = None
    try:
        found = newest_good(
            lambda: listed.own,
            level=io.config.verify_newest,
            options=io.load_options(),
            communicator=comm,
            sinks=[notes, *_files(io, comm)],
        )
    except CorruptedCheckpointError as error:
        if listed.native is None:
            raise
        notes.skipped.append(str(error))
    return comm.broadcast("settling what is loaded", lambda: _settle(listed, found, notes))


def count_on(accelerator: Accelerator, comm: Communicator) -> None:
    """Let the next save have a number that is free; after the newest one was loaded. Collective."""
    free = comm.broadcast("numbering", lambda: naming.first_free_number(accelerator))
    config = accelerator.project_configuration
    config.iteration = max(config.iteration, free)


class _Notes:
    """Keeps what is told of candidates that do not count."""

    def __init__(self) -> None:
        self.skipped: list[str] = []

    def emit(self, event: Event) -> None:
        if isinstance(event, Skipped):
            self.skipped.append(f"{Path(event.path).name} is {event.reason}")


def _files(io: DistCkptIO, comm: Communicator) -> list[EventSink]:
    """Return where such events are kept: one rank tells what all have decided."""
    path = io.config.events_file
    return [] if path is None or comm.rank else [JsonLinesSink(path)]


def _asked(accelerator: Accelerator, input_dir: Any) -> tuple[Path, bool] | naming.Candidates:
    """Return what is named, and whether it is ours; or what may be chosen from. Rank 0."""
    if input_dir is not None:
        return _looked_at(Path(input_dir).expanduser())
    if not naming.is_automatic(accelerator):
        raise ValueError("No input_dir provided and automatic checkpoint naming is disabled.")
    return naming.candidates(accelerator)


def _looked_at(path: Path) -> tuple[Path, bool]:
    if not path.is_dir():
        return path, False
    return path, naming.is_ours(path) or not naming.is_native(path)


def _settle(listed: naming.Candidates, found: Path | None, notes: _Notes) -> tuple[Path, bool]:
    """Bring what was set aside out of the way, tell the user, return the answer. Rank 0."""
    chosen = listed.native if found is None else found
    if chosen is None:
        raise CheckpointNotFoundError(
            f"{listed.folder}: no finished checkpoint among {len(listed.own)} checkpoint_<n>."
        )
    naming.move_out_damaged(listed.folder)
    if notes.skipped:
        warnings.warn(f"load_state() loads {chosen}: {'; '.join(notes.skipped)}", stacklevel=2)
    return _looked_at(chosen)
