"""Which directory a call means: given, named automatically, the newest, too old.

Here: ``automatic_checkpoint_naming``, ``total_limit`` and what tells checkpoints apart. Not here:
what stands in the directories. Only rank 0 looks at the disk; the others are told.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, cast

from accelerate.accelerator import Accelerator

from dist_ckpt.errors import (
    CheckpointingException,
    CheckpointNotFoundError,
    ConfigError,
    MismatchError,
)
from dist_ckpt.training_state import is_checkpoint, remove_checkpoint

__all__ = [
    "announced_target",
    "is_automatic",
    "is_native",
    "is_ours",
    "newest_checkpoint",
    "next_target",
    "pruner",
]

logger = logging.getLogger(__name__)

_NUMBERED = re.compile(r"checkpoint_(\d+)")


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
    return str(os.path.abspath(output_dir))  # noqa: PTH100 - resolve() would follow a link


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


def newest_checkpoint(accelerator: Accelerator) -> Path:
    """Return the highest numbered checkpoint that was finished. Rank 0.

    Raises:
        CheckpointNotFoundError: There is none.
    """
    numbered = _numbered(_folder(accelerator))
    for path in reversed(numbered):
        if is_checkpoint(path) or is_native(path):
            return path
    raise CheckpointNotFoundError(
        f"{_folder(accelerator)}: no finished checkpoint among {len(numbered)} checkpoint_<n>."
    )


def pruner(accelerator: Accelerator) -> Callable[[], list[Path]] | None:
    """Return what removes the lowest numbered checkpoints above ``total_limit``; None without one.

    To be called on rank 0 when a save is committed, on any thread; it returns what it removed. What
    is not finished at that time, a save in flight too, neither counts nor is touched.
    """
    limit = cast("int | None", accelerator.project_configuration.total_limit)
    if limit is None:
        return None
    folder, kept = _folder(accelerator), max(1, limit)

    def prune() -> list[Path]:
        finished = [path for path in _numbered(folder) if _is_finished(path)]
        return [path for path in finished[:-kept] if _is_removed(path)]

    return prune


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
    marker = path / "metadata.json"
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
    return Path(os.path.abspath(project_dir)) / "checkpoints"  # noqa: PTH100 - same


def _numbered(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    found = {
        int(match[1]): path
        for path in folder.iterdir()
        if (match := _NUMBERED.fullmatch(path.name))
    }
    return [found[number] for number in sorted(found)]
