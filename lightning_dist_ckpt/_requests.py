"""What a Trainer was asked to resume from, before Lightning makes a path of it.

Here: ``note_requests``, which lets Lightning's connector keep the question beside its answer. Not
here: what is done with it (``_resuming``). On every rank.

When a strategy comes to load, ``ckpt_path="last"`` and a path that the user typed are the same
string, and "last" without a last checkpoint is no question at all. No hook stands between the
making of a Trainer and that choice. So the method that chooses gets a shell on Lightning's own
class, once for a process: it notes, and changes neither question nor answer, for any Trainer.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from lightning_dist_ckpt._model_checkpoint import is_lightnings

__all__ = ["Request", "note_requests", "noted_path", "take_request"]

_NATIVE = "dist_ckpt_native"
_NOTE = "dist_ckpt_request"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A question for a checkpoint, and Lightning's answer.

    Attributes:
        kind: ``given``: a certain one, by its path or as the best; no other will do. ``last``,
            ``hpc``: the newest there is, of ModelCheckpoint or of saves before a requeue.
        is_implied: Nobody used that word: ``fit(ckpt_path=None)``, where Lightning resumes by
            itself.
        path: What Lightning chose; None for nothing.
    """

    kind: Literal["given", "last", "hpc"]
    is_implied: bool = False
    path: Any = None


def note_requests(connector: type) -> None:
    """Let the checkpoint connector of Lightning (its class) keep what it was asked. Idempotent."""
    native = connector._select_ckpt_path  # type: ignore[attr-defined]  # noqa: SLF001 - Lightning's
    if not hasattr(native, _NATIVE):
        connector._select_ckpt_path = _noting(native)  # type: ignore[attr-defined]  # noqa: SLF001 - same


def take_request(connector: Any, path: Any) -> Request | None:
    """Return what led to ``path``, once; None if that was not asked of this connector."""
    request: Request | None = vars(connector).get(_NOTE)
    if request is None or request.path != path:
        return None
    del vars(connector)[_NOTE]
    return request


def noted_path(connector: Any) -> Any:
    """Return what a connector is about to load; None for nothing."""
    request: Request | None = vars(connector).get(_NOTE)
    return None if request is None else request.path


def _noting(native: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(native)
    def select(self: Any, state_fn: Any, ckpt_path: Any = None, *args: Any, **kwargs: Any) -> Any:
        vars(self).pop(_NOTE, None)
        path = native(self, state_fn, ckpt_path, *args, **kwargs)
        kind = _kind(self, ckpt_path, path)
        vars(self)[_NOTE] = Request(kind=kind, is_implied=ckpt_path is None, path=path)
        return path

    setattr(select, _NATIVE, native)
    return select


def _kind(connector: Any, asked: Any, path: Any) -> Literal["given", "last", "hpc"]:
    if connector._user_managed:  # noqa: SLF001 - Lightning's; `trainer.ckpt_path = ...`
        return "given"
    if asked == "last":
        return "last"
    if asked == "hpc" or (asked is None and _is_requeued(connector, path)):
        return "hpc"
    trainer = connector.trainer
    if asked is None and trainer.state.fn == "fit":
        watching = [one for one in trainer.callbacks if is_lightnings(one, "OnExceptionCheckpoint")]
        return "last" if watching else "given"
    return "given"


def _is_requeued(connector: Any, path: Any) -> bool:
    """Whether Lightning looks for what it saved before a requeue, and found ``path`` or nothing."""
    slurm = vars(sys.modules[connector._select_ckpt_path.__module__])["SLURMEnvironment"]  # noqa: SLF001 - Lightning's
    return bool(slurm.detect()) and path in {None, connector._hpc_resume_path}  # noqa: SLF001 - same
