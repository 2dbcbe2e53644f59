"""The error tree: what went wrong, sorted by what a handler would do about it.

Here: exception classes only. Not here: the checks that raise them. Raised on every rank alike;
``dist_ckpt._comm`` carries them between ranks, so each of them survives pickling.

::

    CheckpointingException(Exception)
    ├── ConfigError                 (also ValueError)        fix the config
    ├── InvalidShardingError        (also ValueError)        fix the description of the shards
    │   └── OptimizerShapeError     (also AssertionError)    exclude the state, or describe it
    ├── CheckpointNotFoundError     (also FileNotFoundError) wrong path, or never committed
    │   └── IncompleteCheckpointError                        data there, no commit marker
    ├── CorruptedCheckpointError                             use another copy
    ├── MismatchError               (also RuntimeError)      request and checkpoint do not agree
    ├── UnknownStrategyError        (also LookupError)       backend or version nobody handles
    ├── UnsafeContentError                                   needs ``allow_pickle=True``
    ├── StorageError                                         the store failed
    ├── CoordinationError                                    ranks disagree or vanished
    │   ├── RankFailedError                                  ``failures``: rank -> what it raised
    │   └── BarrierTimeoutError     (also TimeoutError)      names the ranks that did not arrive
    └── AsyncSaveError                                       a background save failed; raised once
        └── WorkerDiedError                                  exit code, and what it did last
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

__all__ = [
    "AsyncSaveError",
    "BarrierTimeoutError",
    "CheckpointNotFoundError",
    "CheckpointingException",
    "ConfigError",
    "CoordinationError",
    "CorruptedCheckpointError",
    "ErrorKind",
    "IncompleteCheckpointError",
    "InvalidShardingError",
    "MismatchError",
    "OptimizerShapeError",
    "RankFailedError",
    "RankFailure",
    "StorageError",
    "UnknownStrategyError",
    "UnsafeContentError",
    "WorkerDiedError",
]


class ErrorKind(StrEnum):
    """Stable code of an error. Append-only: existing codes are never renamed or removed."""

    UNKNOWN = "unknown"
    CONFIG = "config"
    INVALID_SHARDING = "invalid_sharding"
    OPTIMIZER_SHAPE = "optimizer_shape"
    NOT_FOUND = "not_found"
    INCOMPLETE = "incomplete"
    CORRUPTED = "corrupted"
    MISMATCH = "mismatch"
    UNKNOWN_STRATEGY = "unknown_strategy"
    UNSAFE_CONTENT = "unsafe_content"
    STORAGE = "storage"
    COORDINATION = "coordination"
    RANK_FAILED = "rank_failed"
    BARRIER_TIMEOUT = "barrier_timeout"
    ASYNC_SAVE = "async_save"
    WORKER_DIED = "worker_died"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFailure:
    """What one rank raised: class name, stable kind, message and traceback text."""

    error: str
    kind: str
    message: str
    traceback: str


def _rebuild(cls: type[CheckpointingException], message: str, state: dict[str, Any]) -> Any:
    error = cls(message)
    error.__dict__.update(state)
    return error


class CheckpointingException(Exception):  # noqa: N818 - the name is part of the seeds' API
    """Base of every error of this library.

    Args:
        message: What, where (key, rank, path), expected and found.
        hint: What the user can do about it; appended as ``hint: ...``.
    """

    kind: ErrorKind = ErrorKind.UNKNOWN

    def __init__(self, message: str = "", *, hint: str | None = None) -> None:
        """Store the message, with the hint behind it."""
        super().__init__(f"{message} hint: {hint}" if hint else message)
        self.failures: Mapping[int, RankFailure] = {}

    def __str__(self) -> str:
        """Return the message as it was given (builtin parents would reformat it)."""
        return str(self.args[0]) if self.args else ""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as class, message and attributes, whatever the builtin parents do."""
        return _rebuild, (type(self), str(self), dict(self.__dict__))


class ConfigError(CheckpointingException, ValueError):
    """The configuration is wrong: unknown field, bad value, unsupported combination."""

    kind = ErrorKind.CONFIG


class InvalidShardingError(CheckpointingException, ValueError):
    """The description of the shards is wrong: overlap, gap, dtype or shape disagreement."""

    kind = ErrorKind.INVALID_SHARDING


class OptimizerShapeError(InvalidShardingError, AssertionError):
    """A state of the optimizer does not have the shape of its parameter."""

    kind = ErrorKind.OPTIMIZER_SHAPE


class CheckpointNotFoundError(CheckpointingException, FileNotFoundError):
    """There is no checkpoint at this path, or a file of it is missing."""

    kind = ErrorKind.NOT_FOUND


class IncompleteCheckpointError(CheckpointNotFoundError):
    """Data is there but the commit marker is not: the save never finished."""

    kind = ErrorKind.INCOMPLETE


class CorruptedCheckpointError(CheckpointingException):
    """The stored bytes are not what the index says: truncated, altered or undecodable."""

    kind = ErrorKind.CORRUPTED


class MismatchError(CheckpointingException, RuntimeError):
    """Request and checkpoint do not agree: missing or unexpected keys, shape or dtype."""

    kind = ErrorKind.MISMATCH


class UnknownStrategyError(CheckpointingException, LookupError):
    """No strategy handles this backend and version."""

    kind = ErrorKind.UNKNOWN_STRATEGY


class UnsafeContentError(CheckpointingException):
    """Loading this would run code from the checkpoint; it needs ``allow_pickle=True``."""

    kind = ErrorKind.UNSAFE_CONTENT


class StorageError(CheckpointingException):
    """The store failed: no space, no permission, input/output error. ``__cause__`` is kept."""

    kind = ErrorKind.STORAGE


class CoordinationError(CheckpointingException):
    """Ranks disagree, or one of them vanished."""

    kind = ErrorKind.COORDINATION


class RankFailedError(CoordinationError):
    """Some ranks failed; ``failures`` maps each of them to what it raised."""

    kind = ErrorKind.RANK_FAILED


class BarrierTimeoutError(CoordinationError, TimeoutError):
    """Some ranks did not arrive in time; the message names them."""

    kind = ErrorKind.BARRIER_TIMEOUT


class AsyncSaveError(CheckpointingException):
    """A background save failed. Raised once, on every rank, at the next touch.

    ``__cause__`` is what failed, ``failures`` has it by rank. Nothing of that save is committed.
    """

    kind = ErrorKind.ASYNC_SAVE


class WorkerDiedError(AsyncSaveError):
    """The process that writes died; the message has its exit code and what it did last."""

    kind = ErrorKind.WORKER_DIED
