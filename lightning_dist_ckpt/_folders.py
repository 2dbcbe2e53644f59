"""Check of the folders that a fit will save to, before it begins.

Here: the folders of a Trainer, and the check of each. Not here: saving. On every rank.

A folder that cannot be created would otherwise fail at the first save, hours later. The check
creates and writes nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dist_ckpt.errors import ConfigError
from dist_ckpt.serialization import all_processes
from lightning_dist_ckpt._model_checkpoint import is_lightnings

if TYPE_CHECKING:
    from dist_ckpt.types import PathLike
    from lightning_dist_ckpt.io import DistCkptIO

__all__ = ["check_folders", "is_url", "without_scheme"]

_LOCAL = ("file://", "local://")  # fsspec's schemes for local paths
_FINDERS = ("LearningRateFinder", "BatchSizeFinder")


def without_scheme(path: PathLike) -> str:
    """Return a path without ``file://``."""
    text = os.fspath(path)
    return next((text.removeprefix(scheme) for scheme in _LOCAL if text.startswith(scheme)), text)


def is_url(path: PathLike) -> bool:
    """Whether a path leads to no local or mounted file system."""
    return "://" in without_scheme(path)


def check_folders(trainer: Any, io: DistCkptIO) -> None:
    """Refuse a fit whose checkpoints could not be saved. Collective.

    Raises:
        ConfigError: On every rank; all folders and ranks are named.
    """
    comm = all_processes(timeout_secs=io.config.timeout_secs)
    problems_by_rank = comm.map_reduce(
        "checking the folders of checkpoints",
        lambda: [
            f"{whose} {folder}: {problem}"
            for whose, folder in _folders(trainer, preemption=io.config.preemption)
            if (problem := _problem(folder))
        ],
        list,
    )
    ranks_of: dict[str, list[int]] = {}
    for rank, problems in enumerate(problems_by_rank):
        for problem in problems:
            ranks_of.setdefault(problem, []).append(rank)
    if ranks_of:
        places = (
            f"{problem} (rank {', '.join(map(str, ranks))})" for problem, ranks in ranks_of.items()
        )
        raise ConfigError(
            f"Checkpoints cannot be saved. {'; '.join(places)}.",
            hint="save to a folder on a local or mounted file system that every rank may write to; "
            "upload what is committed from there.",
        )


def _folders(trainer: Any, *, preemption: bool) -> Iterator[tuple[str, str]]:
    """Yield the folders that this fit may save to, each with the setting that names it."""
    if trainer.fast_dev_run:
        return
    root = trainer.default_root_dir
    known = False
    for callback in trainer.checkpoint_callbacks:
        folder = getattr(callback, "dirpath", None)
        if isinstance(folder, str | os.PathLike):
            known = True
            yield f"dirpath of {type(callback).__name__}", os.fspath(folder)
        elif folder is None and is_lightnings(callback, "ModelCheckpoint"):
            # As ModelCheckpoint will find it in its own setup(), which comes after ours.
            known = True
            logs = trainer.loggers[0].save_dir if trainer.loggers else None
            if logs is not None:
                yield f"save_dir of {type(trainer.loggers[0]).__name__}", os.fspath(logs)
            else:
                yield "default_root_dir", root
    environment = trainer._accelerator_connector.cluster_environment  # noqa: SLF001 - no public way
    requeues = is_lightnings(environment, "SLURMEnvironment") and environment.auto_requeue
    finds = any(
        is_lightnings(callback, name) for callback in trainer.callbacks for name in _FINDERS
    )
    if requeues or finds or (preemption and not known):
        yield "default_root_dir", root


def _problem(folder: str) -> str | None:
    """Return why nothing can be saved in a folder; None if it can."""
    if is_url(folder):
        return "is on no local or mounted file system"
    at = Path(without_scheme(folder)).absolute()
    while not os.path.lexists(at):
        at = at.parent
    if not at.is_dir():
        return f"{at} is no directory"
    by_effective_ids = os.access in os.supports_effective_ids
    if os.access(at, os.W_OK | os.X_OK, effective_ids=by_effective_ids):
        return None
    is_read_only = os.statvfs(at).f_flag & os.ST_RDONLY
    return f"{at} is {'on a read-only file system' if is_read_only else 'not writable'}"
