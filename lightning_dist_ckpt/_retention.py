"""What may be removed: nothing, as long as nothing that stays is good.

Here: the look at what stays before ``ModelCheckpoint`` removes a checkpoint, and the sweeping of
what dead saves left. Not here: which ones it removes (Lightning), in which order things happen
(``_pending``). On rank 0, in the thread that trains or in the saver's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dist_ckpt.errors import CheckpointingException
from dist_ckpt.recovery import verify_checkpoint
from dist_ckpt.serialization import single_process
from lightning_dist_ckpt._candidates import model_checkpoints
from lightning_dist_ckpt.export import is_stock

if TYPE_CHECKING:
    from dist_ckpt.types import PathLike

__all__ = ["may_go"]

logger = logging.getLogger(__name__)


def may_go(trainer: Any, path: PathLike, is_doomed: Callable[[Path], bool]) -> bool:
    """Return whether a checkpoint may be removed; if not, say so in the log.

    What is no ``ModelCheckpoint``'s (of a tuner, of an exception), and links, may go at any time.

    Args:
        trainer: Its callbacks know what stays.
        path: The checkpoint.
        is_doomed: Whether another name is about to be removed, too.
    """
    doomed = Path(path)
    folders = [Path(one.dirpath) for one in model_checkpoints(trainer) if one.dirpath]
    is_theirs = any(folder in doomed.parents for folder in folders)
    if doomed.name.startswith(".") or doomed.is_symlink() or not doomed.exists() or not is_theirs:
        return True
    gone = doomed.resolve()
    staying = {
        one.resolve()
        for one in _known(trainer, doomed)
        if one.exists() and one.resolve() != gone and not is_doomed(one)
    }
    newest_first = sorted(staying, key=_mtime_ns, reverse=True)
    if any(_is_good(one) for one in newest_first):
        return True
    logger.warning(
        "%s is kept: none of the %d checkpoint(s) that stay is good.", path, len(newest_first)
    )
    return False


def _known(trainer: Any, doomed: Path) -> set[Path]:
    """Return names that callbacks know, or that stand beside a checkpoint."""
    callbacks = model_checkpoints(trainer)
    known = {name for one in callbacks for name in (*one.best_k_models, one.best_model_path)}
    known |= {one.last_model_path for one in callbacks}
    beside = {one for one in doomed.parent.glob(f"*{doomed.suffix}") if one.name[0] != "."}
    return beside | {Path(name) for name in known if name and "://" not in name}


def _is_good(path: Path) -> bool:
    if is_stock(path):
        return True
    try:
        verify_checkpoint(path, level="files", communicator=single_process())
    except CheckpointingException as error:
        logger.warning("%s does not count as one that stays: %s", path, error)
        return False
    return True


def _mtime_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0
