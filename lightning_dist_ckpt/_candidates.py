"""Which checkpoints a Trainer could resume from, the likeliest first.

Here: what Lightning would choose, what else lies in the folders of its callbacks, and what was set
aside there. Not here: looking into a checkpoint (``dist_ckpt.recovery``), choosing (``_resuming``).
Rank 0 alone looks at the disk.
"""

from __future__ import annotations

import json
import logging
import math
import operator
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dist_ckpt.errors import (
    CheckpointingException,
    CheckpointNotFoundError,
    CorruptedCheckpointError,
    IncompleteCheckpointError,
    StorageError,
)
from dist_ckpt.options import LoadOptions
from dist_ckpt.serialization import load_common_state_dict
from lightning_dist_ckpt._model_checkpoint import is_lightnings
from lightning_dist_ckpt.export import is_stock

if TYPE_CHECKING:
    from lightning_dist_ckpt._requests import Request

__all__ = [
    "is_wanted",
    "likeliest",
    "model_checkpoints",
    "others",
    "set_aside_names",
    "traces_of",
]

logger = logging.getLogger(__name__)

_HPC = re.compile(r"hpc_ckpt_(\d+)\.ckpt")
_STEP = re.compile(r"step=(\d+)")
_DAMAGED = ".dist-ckpt-*.damaged/damaged.json"


def model_checkpoints(trainer: Any) -> list[Any]:
    """Return the Trainer's callbacks that are ``ModelCheckpoint``."""
    return [one for one in trainer.checkpoint_callbacks if is_lightnings(one, "ModelCheckpoint")]


def is_wanted(trainer: Any, request: Request) -> bool:
    """Whether a Trainer that finds nothing may not just start afresh.

    Where nobody asked in words, only if something was there.
    """
    return request.path is not None or not request.is_implied or bool(traces_of(trainer, request))


def traces_of(trainer: Any, request: Request) -> list[Path]:
    """Return what tells of checkpoints that were there, where Lightning finds none.

    That is a ``last`` that leads to nothing, and what was set aside of those that Lightning would
    have found.
    """
    if request.kind == "hpc":
        return _set_aside(Path(trainer.default_root_dir), _HPC.fullmatch)
    traces = _last_of(trainer)
    for callback in model_checkpoints(trainer):
        is_last = operator.methodcaller("startswith", callback.CHECKPOINT_NAME_LAST)
        traces += _set_aside(Path(callback.dirpath or ""), is_last)
    for path in _on_exception(trainer):
        traces += _set_aside(path.parent, path.name.__eq__)
    return traces


def _set_aside(folder: Path, was_called: Callable[[str], object]) -> list[Path]:
    notes = sorted(folder.glob(_DAMAGED))
    return [note.parent for note in notes if was_called(_told(note, "name"))]


def _on_exception(trainer: Any) -> list[Path]:
    """Return what is saved when an exception ends a fit."""
    watching = [one for one in trainer.callbacks if is_lightnings(one, "OnExceptionCheckpoint")]
    return [Path(one.ckpt_path) for one in watching]


def likeliest(trainer: Any, request: Request) -> list[Path]:
    """Return what Lightning chose, then what it would choose without that."""
    if request.kind == "hpc":
        folder = Path(trainer.default_root_dir)
        numbered = {p: int(m[1]) for p in _entries(folder) if (m := _HPC.fullmatch(p.name))}
        rest = sorted(numbered, key=numbered.__getitem__, reverse=True)
    else:
        rest = sorted({*_last_of(trainer), *_on_exception(trainer)}, key=_mtime_ns, reverse=True)
    first = [] if request.path is None else [Path(request.path)]
    return _each_once([*first, *rest])


def others(trainer: Any, tried: Sequence[Path]) -> list[Path]:
    """Return all else in the folders of the callbacks, by optimizer steps, the most first.

    What does not tell its steps, as it is damaged, comes before all; if one that is sound does not
    tell them either, the time of its commit decides among all of them.
    """
    known = {os.path.realpath(path) for path in tried}  # resolve() refuses a link to itself
    found = [path for _, path in _named(trainer) if os.path.realpath(path) not in known]
    steps: dict[Path, float | None] = {}
    for path in _each_once(sorted(found, key=Path.is_symlink)):  # a link, if it has no other name
        try:
            steps[path] = _step_of(path)
        except (CorruptedCheckpointError, IncompleteCheckpointError, StorageError):
            steps[path] = math.inf
        except CheckpointNotFoundError:
            continue  # no checkpoint at all
    if any(step is None for step in steps.values()):
        steps = {path: math.inf if step == math.inf else 0 for path, step in steps.items()}
    return sorted(steps, key=lambda path: (steps[path], _mtime_ns(path)), reverse=True)


def set_aside_names(folder: Path) -> set[str]:
    """Return what the checkpoints were called that were set aside in ``folder``."""
    return {_told(note, "name") for note in folder.glob(_DAMAGED)}


def _last_of(trainer: Any) -> list[Path]:
    """Return what is called ``last``, as Lightning sees it, links that lead to nothing too."""
    return [
        path
        for callback, path in _named(trainer)
        if path.parent == Path(callback.dirpath)
        and path.stem.startswith(callback.CHECKPOINT_NAME_LAST)
    ]


def _named(trainer: Any) -> Iterator[tuple[Any, Path]]:
    """Yield what may be checkpoints of a callback, with it; links that lead to nothing too."""
    for callback in model_checkpoints(trainer):
        if callback.dirpath and "://" not in os.fspath(callback.dirpath):
            depth = (callback.filename or "").count("/")  # a file name may have folders in it
            for path in _checkpoints_in(Path(callback.dirpath), callback.FILE_EXTENSION, depth):
                yield callback, path


def _checkpoints_in(folder: Path, suffix: str, depth: int) -> Iterator[Path]:
    for path in [*_entries(folder), *_between_renames(folder)]:
        if path.name.startswith("."):  # being saved, removed, or set aside
            continue
        if path.suffix == suffix:
            yield path
        elif depth and path.is_dir() and not path.is_symlink():
            yield from _checkpoints_in(path, suffix, depth - 1)


def _between_renames(folder: Path) -> list[Path]:
    """Return the names whose only checkpoint a crash in a save has left aside."""
    found = {
        folder / _told(note, "name") for note in folder.glob(".dist-ckpt-*.previous/manifest.json")
    }
    return sorted(path for path in found if not os.path.lexists(path))


def _told(note: Path, key: str) -> str:
    """Return a name that stands in a small JSON file; none that leads elsewhere."""
    try:
        if not note.is_file():
            raise FileNotFoundError(note)  # a pipe would be waited for
        return Path(str(json.loads(note.read_bytes())[key])).name
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        logger.warning("%s: not readable", note)
        return ""


def _entries(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _each_once(paths: Sequence[Path]) -> list[Path]:
    """Leave out what leads to nothing, or to where one before it led."""
    found: dict[Path, Path] = {}
    for path in paths:
        if path.exists() or path in _between_renames(path.parent):
            found.setdefault(path.resolve(), path)
    return list(found.values())


def _step_of(path: Path) -> float | None:
    """Return the optimizer steps before a save; None if it does not tell."""
    named = _STEP.search(path.name)
    by_name = float(named[1]) if named else None
    if is_stock(path):
        return by_name
    try:
        step = load_common_state_dict(path, options=LoadOptions()).get("common", {}).get("step")
    except (CheckpointNotFoundError, CorruptedCheckpointError, StorageError):
        raise
    except CheckpointingException:  # it may not be loaded as it is: the load will say so
        return by_name
    return float(step) if type(step) is int else by_name


def _mtime_ns(path: Path) -> int:
    try:
        return path.lstat().st_mtime_ns
    except OSError:
        return 0
