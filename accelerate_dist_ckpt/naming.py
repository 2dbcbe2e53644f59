"""Which directory a call means: given, named automatically, the newest, too old.

Here: ``automatic_checkpoint_naming``, ``total_limit`` and what tells checkpoints apart. Not here:
what stands in the directories. Only rank 0 looks at the disk; the others are told.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from accelerate.accelerator import Accelerator

from dist_ckpt.errors import (
    CheckpointingException,
    ConfigError,
    MismatchError,
)
from dist_ckpt.recovery import verify_checkpoint
from dist_ckpt.serialization import single_process
from dist_ckpt.training_state import is_checkpoint, remove_checkpoint

__all__ = [
    "Candidates",
    "announced_target",
    "candidates",
    "first_free_number",
    "is_automatic",
    "is_native",
    "is_ours",
    "move_out_damaged",
    "next_target",
    "pruner",
]

logger = logging.getLogger(__name__)

_NUMBERED = re.compile(r"checkpoint_(\d+)")
_MARKER = "metadata.json"  # the file that makes a directory a checkpoint of ours


def is_automatic(accelerator: Accelerator) -> bool:
    """Whether Accelerate names checkpoints itself."""
    return bool(accelerator.project_configuration.automatic_checkpoint_naming)


def announced_target(accelerator: Accelerator, output_dir: Any) -> str:
    """Return what a save goes to, in words that are equal on all ranks. Any rank.

    Raises:
        ConfigError: Neither a directory nor automatic naming.
    """
    if is_automatic(accelerator):
        return os.fspath(_folder(accelerator))
    if output_dir is None:
        raise ConfigError("save_state() got no output_dir, and automatic_checkpoint_naming is off.")
    return _local(output_dir)


def next_target(accelerator: Accelerator, in_flight: Collection[Path]) -> Path:
    """Return the automatically named directory of the next save. Rank 0.

    Args:
        accelerator: Counts saves.
        in_flight: Where saves in the background go.

    Raises:
        ValueError: A checkpoint stands there, or will; Accelerate's own error. What is left of a
            save that never finished does not count.
    """
    target = _folder(accelerator) / f"checkpoint_{accelerator.save_iteration}"
    if target in in_flight or is_checkpoint(target) or is_native(target):
        raise ValueError(
            f"Checkpoint directory {target} ({accelerator.save_iteration}) already exists. Please "
            "manually override `self.save_iteration` with what iteration to start with."
        )
    return target


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """Automatically named checkpoints, the highest number first.

    Attributes:
        folder: Where they are.
        own: Those above the first that Accelerate wrote; what is none after all may be among them.
        native: That one; it counts as good.
    """

    folder: Path
    own: tuple[Path, ...]
    native: Path | None


def candidates(accelerator: Accelerator) -> Candidates:
    """Return what may be loaded where nothing is named. Rank 0."""
    folder, own = _folder(accelerator), list[Path]()
    for path in reversed(_numbered(folder)):
        if is_native(path) and not (path / _MARKER).exists():
            return Candidates(folder=folder, own=tuple(own), native=path)
        own.append(path)
    return Candidates(folder=folder, own=tuple(own), native=None)


def first_free_number(accelerator: Accelerator) -> int:
    """Return a number above those of all that stands there and cannot be saved over. Rank 0."""
    for path in reversed(_numbered(_folder(accelerator))):
        if _stands_there(path):
            return _number(path) + 1
    return 0


def _stands_there(path: Path) -> bool:
    try:
        return is_checkpoint(path) or is_native(path)
    except CheckpointingException:  # damaged, and it could not be set aside
        return True


def move_out_damaged(folder: Path) -> None:
    """Move what was set aside out of the folder whose every entry Accelerate parses. Rank 0.

    Nothing of it is raised.
    """
    for aside in folder.glob(".dist-ckpt-*.damaged"):
        place = folder.parent / aside.name
        try:
            aside.rename(place)
        except OSError as error:
            logger.warning("%s stays there: %s", aside, error)
        else:
            logger.warning("%s is now %s.", aside, place)


def pruner(accelerator: Accelerator) -> Callable[[], list[Path]] | None:
    """Return what removes the lowest numbered checkpoints above ``total_limit``; None without one.

    To be called on rank 0 when a save is committed, on any thread; it returns what it removed. What
    is not finished at that time, a save in flight too, neither counts nor is touched. If nothing
    that stays is good, nothing is removed.
    """
    limit = cast("int | None", accelerator.project_configuration.total_limit)
    if limit is None:
        return None
    folder, kept = _folder(accelerator), max(1, limit)

    def prune() -> list[Path]:
        finished = [path for path in _numbered(folder) if _is_finished(path)]
        doomed, staying = finished[:-kept], finished[-kept:]
        if doomed and not any(_is_good(path) for path in reversed(staying)):
            logger.warning(
                "%s: %d checkpoint(s) above total_limit are kept: none of the others is good.",
                folder, len(doomed),
            )  # fmt: skip
            return []
        return [path for path in doomed if _is_removed(path)]

    return prune


def _is_good(path: Path) -> bool:
    if is_native(path) and not (path / _MARKER).exists():
        return True
    try:
        verify_checkpoint(path, level="files", communicator=single_process())
    except CheckpointingException as error:
        logger.warning("%s does not count as one that stays: %s", path, error)
        return False
    return True


def _is_removed(path: Path) -> bool:
    try:
        remove_checkpoint(path)
    except (OSError, CheckpointingException) as error:
        # The new checkpoint is safe: an old one too many is no failure.
        logger.warning("%s could not be removed: %s", path, error)
        return False
    return True


def is_native(path: Path) -> bool:
    """Whether Accelerate wrote a whole checkpoint of its own there: random states come last."""
    return path.is_dir() and any(path.glob("random_states_*.pkl"))


def is_ours(path: Path) -> bool:
    """Whether a checkpoint of ours is to be loaded from there, not one of Accelerate's own.

    Raises:
        MismatchError: Accelerate saved there after us, and its checkpoint is the newer one.
    """
    if not is_checkpoint(path):
        return False
    marker = path / _MARKER
    native = [file.stat().st_mtime_ns for file in path.glob("random_states_*.pkl")]
    if native and marker.exists() and max(native) > marker.stat().st_mtime_ns:
        raise MismatchError(
            f"{path} holds a checkpoint of ours and a newer one that Accelerate itself wrote.",
            hint="remove metadata.json to load the newer one, random_states_*.pkl to load ours.",
        )
    return True


def _is_finished(path: Path) -> bool:
    try:
        return is_checkpoint(path) or is_native(path)
    except CheckpointingException:  # damaged: nothing that this save has to decide about
        return False


def _folder(accelerator: Accelerator) -> Path:
    project_dir = cast("str | None", accelerator.project_dir)
    if project_dir is None:
        raise ConfigError("automatic_checkpoint_naming needs a project_dir, found None.")
    return Path(_local(project_dir)) / "checkpoints"


def _local(path: str | os.PathLike[str]) -> str:
    text = os.fspath(path)
    if "://" in text:  # it would become a folder of that name in the working directory
        raise ConfigError(
            f"{text}: checkpoints are saved to local or mounted file systems only.",
            hint="save to a local folder, and upload what is committed from there.",
        )
    return os.path.abspath(text)  # noqa: PTH100 - resolve() would follow a link


def _numbered(folder: Path) -> list[Path]:
    """Return the numbered entries of a folder, the lowest number first."""
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if _NUMBERED.fullmatch(path.name)]
    return sorted(found, key=_number)


def _number(path: Path) -> int:
    return int(path.name.rpartition("_")[2])
