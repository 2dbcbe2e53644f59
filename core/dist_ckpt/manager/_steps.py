"""The steps in a folder: what is known of each, and which are removed.

Here: names, the document that is kept with a step, removal by a policy. Not here: the policies
(``retention``), when to remove (``manager``), how a directory is removed (``storage.commit``). Runs
on rank 0 alone, behind the commit of a save or when asked to; nothing here exchanges.
"""

from __future__ import annotations

import logging
import math
import re
import time
from typing import TYPE_CHECKING, Any

from dist_ckpt._formats.documents import MANIFEST_FILE
from dist_ckpt._loading.open import open_checkpoint
from dist_ckpt._loading.search import checkpoint_names, open_closely
from dist_ckpt.core import CONFIG_FNAME
from dist_ckpt.errors import (
    CheckpointingException,
    CheckpointNotFoundError,
    ConfigError,
    CorruptedCheckpointError,
    IncompleteCheckpointError,
)
from dist_ckpt.retention import CheckpointInfo
from dist_ckpt.storage import open_store
from dist_ckpt.storage.commit import locate
from dist_ckpt.storage.failures import storage_errors
from dist_ckpt.storage.leftovers import move_aside
from dist_ckpt.storage.paths import is_file, is_taken, stamp_of
from dist_ckpt.storage.sealed import sealed, unsealed
from dist_ckpt.training_state import remove_checkpoint

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from pathlib import Path

    from dist_ckpt.options import LoadOptions
    from dist_ckpt.retention import RetentionPolicy

__all__ = [
    "INFO_FILE",
    "candidates_in",
    "clear_the_way",
    "info_document",
    "infos_in",
    "named_steps",
    "prune_steps",
    "step_path",
]

logger = logging.getLogger(__name__)

INFO_FILE = "step.json"
_VERSION = 1
_STEP = re.compile(r"step_(0|[1-9][0-9]*)")
_MAX_INFO_NBYTES = 1 << 20
_NO_INFO = (
    CheckpointingException, KeyError, TypeError, ValueError, AttributeError, OverflowError,
)  # fmt: skip


def step_path(folder: Path, step: Any) -> Path:
    """Return where a step is, or would be.

    Raises:
        ConfigError: It is no integer from 0 on.
    """
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise ConfigError(f"a step is an integer from 0 on, not {step!r}.")
    return folder / f"step_{step}"


def named_steps(folder: Path) -> list[int]:
    """Return the steps that have a directory, committed or not, in order."""
    names = checkpoint_names(folder)
    return sorted(int(found[1]) for name in names if (found := _STEP.fullmatch(name)))


def candidates_in(folder: Path) -> list[Path]:
    """Return what may be the newest step, newest first; at the end what a crash left nameless."""
    nameless = sorted(name for name in checkpoint_names(folder) if name.startswith("."))
    steps = [step_path(folder, step) for step in reversed(named_steps(folder))]
    return steps + [folder / name for name in nameless]


def clear_the_way(path: Path) -> None:
    """Set aside what stands where a step is to be saved again, and is no good checkpoint.

    A save replaces a checkpoint, and refuses what it does not know for one.
    """
    while is_taken(locate(path)):
        try:
            open_checkpoint(path)
        except (CorruptedCheckpointError, IncompleteCheckpointError) as error:
            logger.warning("%s is saved again; what was there is no good. %s", path, error)
            move_aside(path, str(error))
        except CheckpointNotFoundError:
            return  # something else: the save will tell
        else:
            return


def info_document(step: int, metrics: Mapping[str, float]) -> bytes:
    """Return what is kept with a step for the policy; numbers as text, for JSON has no NaN.

    Raises:
        ConfigError: A metric is no number.
    """
    try:
        numbers = {str(name): repr(float(value)) for name, value in metrics.items()}
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        raise ConfigError(f"metrics are numbers by name, found {metrics!r}.") from error
    return sealed(
        {
            "format": "dist_ckpt.step",
            "version": _VERSION,
            "step": step,
            "time": repr(time.time()),
            "metrics": numbers,
        }
    )


def infos_in(folder: Path) -> list[CheckpointInfo]:
    """Return what is known of each committed step in ``folder``, in order."""
    found = (_info_of(locate(step_path(folder, step)), step) for step in named_steps(folder))
    return [one for one in found if one is not None]


def _info_of(directory: Path, step: int) -> CheckpointInfo | None:
    """Return what is known of one, None if it is not committed; metrics only from the document."""
    committed = _committed(directory)
    if committed is None:
        return None
    where = str(directory / INFO_FILE)
    try:
        data = open_store(directory).read(INFO_FILE, max_nbytes=_MAX_INFO_NBYTES)
        document = unsealed(data, where=where)
        return _info(step, document)
    except CheckpointNotFoundError:
        logger.debug("%s: saved without it.", where)
    except _NO_INFO as error:
        logger.warning("%s: no metrics: %s", where, error)
    return CheckpointInfo(step=step, time=committed[1] / 1e9)


def _info(step: int, document: Mapping[str, Any]) -> CheckpointInfo:
    metrics = {str(name): float(value) for name, value in document["metrics"].items()}
    saved = float(document["time"])
    if not math.isfinite(saved):
        raise ValueError(f"a time of {saved}")
    return CheckpointInfo(step=step, metrics=metrics, time=saved)


def _committed(directory: Path) -> tuple[int, int] | None:
    """Return what tells one save to a path from another: a file of it, and its time in ns.

    None if nothing is committed there.
    """
    try:
        found = stamp_of(directory / CONFIG_FNAME)
        if is_file(directory / MANIFEST_FILE):
            found = stamp_of(directory / MANIFEST_FILE)
    except OSError:
        return None
    return found.inode, found.mtime_ns


def prune_steps(
    folder: Path,
    policy: RetentionPolicy,
    *,
    spared: Collection[int],
    in_flight: Collection[Path],
    options: LoadOptions,
) -> list[int]:
    """Remove the steps that a policy does not keep; return them.

    The newest step that verifies (its documents, and all files with their sizes) is always kept.
    Newer ones, which do not, are not counted and not removed: whoever looks for the newest is to
    report them. If none verifies, nothing is removed.

    Args:
        folder: Where the steps are.
        policy: Says which to keep.
        spared: Steps to keep whatever the policy says.
        in_flight: Where saves are on their way to.
        options: For opening the newest.

    Raises:
        StorageError: One could not be removed.
    """
    marks = {step: _committed(locate(step_path(folder, step))) for step in named_steps(folder)}
    infos = infos_in(folder)
    while doomed := _doomed(infos, policy, spared):
        if not _is_good(step_path(folder, infos[-1].step), options):
            infos.pop()
            continue
        paths = {step: step_path(folder, step) for step in doomed}
        return [
            step
            for step, path in paths.items()
            if path not in in_flight and _remove(path, marks.get(step))
        ]
    return []


def _doomed(
    infos: Sequence[CheckpointInfo], policy: RetentionPolicy, spared: Collection[int]
) -> list[int]:
    """Return the steps that need not be kept, if the newest is good."""
    if not infos:
        return []
    kept = {*policy.keep(infos), infos[-1].step, *spared}
    return [one.step for one in infos if one.step not in kept]


def _is_good(path: Path, options: LoadOptions) -> bool:
    try:
        open_closely(path, "files", 1, options)
    except CheckpointingException as error:
        logger.warning("%s does not count for what is kept: %s", path, error)
        return False
    return True


def _remove(path: Path, mark: tuple[int, int] | None) -> bool:
    """Remove one checkpoint, if it is the one that was looked at."""
    if mark is None or _committed(locate(path)) != mark:
        return False  # another job has removed or replaced it
    with storage_errors("remove", path):
        remove_checkpoint(path)
    logger.info("removed %s, which need not be kept.", path)
    return True
