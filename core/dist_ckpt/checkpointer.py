"""Checkpoints of this rank's nested state, written at once or in the background.

Here: ``Checkpointer`` and its two kinds. Not here: writing and reading (``checkpoint_writer``,
``checkpoint_reader``), the process (``checkpoint_process``), staging. The names are those of
torch's ``_experimental`` checkpointer (torch 2.13, and its state of July 2025).
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

from dist_ckpt.checkpoint_writer import in_order
from dist_ckpt.errors import ConfigError, MismatchError
from dist_ckpt.options import checked_path, path_to_tell
from dist_ckpt.storage.paths import real_path
from dist_ckpt.utils import follow, wrap_future

if TYPE_CHECKING:
    from dist_ckpt.checkpoint_process import CheckpointProcess
    from dist_ckpt.checkpoint_reader import CheckpointReader
    from dist_ckpt.checkpoint_writer import CheckpointWriter
    from dist_ckpt.staging import CheckpointStager
    from dist_ckpt.types import STATE_DICT, PathLike

__all__ = [
    "LOG_INTERVAL",
    "AsyncCheckpointer",
    "Checkpointer",
    "SyncCheckpointer",
    "T",
    "logger",
    "wrap_future",
]

logger = logging.getLogger(__name__)

LOG_INTERVAL = 60
"""Seconds; a name of torch's module that nothing uses."""

T = TypeVar("T")


class Checkpointer(ABC):
    """Saves and loads this rank's state.

    Plain tensors and values are this rank's own: another rank's are other ones. ``ShardedTensor``,
    ``ShardedObject`` and ``DTensor`` leaves are global: they load on any layout.
    """

    @abstractmethod
    def save(
        self, state_dict: STATE_DICT, path: PathLike, **kwargs: Any
    ) -> tuple[Future[None], Future[None]] | None:
        """Save. Collective; ``save(path, state_dict)`` is understood too.

        Args:
            state_dict: This rank's state: nested dicts, lists and tuples.
            path: Directory of the checkpoint, the same on all ranks. An older checkpoint there is
                replaced in one step.
            kwargs: Passed to the writer's hooks.

        Returns:
            None if the checkpoint is there; or two futures: one of the snapshot, after which the
            state may change, one of the commit.
        """

    @abstractmethod
    def load(
        self,
        path: PathLike,
        state_dict: STATE_DICT | None = None,
        *,
        default_map_location: Any = None,
        strict: bool = False,
        **kwargs: Any,
    ) -> STATE_DICT:
        """Load this rank's state. Each rank reads for itself.

        Args:
            path: Directory of the checkpoint.
            state_dict: What to load: only its keys, tensors in place, None for all below; the same
                object is returned. None for everything, as new objects.
            default_map_location: Where new tensors go, as in ``torch.load``; None is the CPU.
            strict: Whether a key of ``state_dict`` that is not stored is an error; else its value
                stays.
            kwargs: Passed to the reader.

        Raises:
            CheckpointNotFoundError: No checkpoint there, or none with a part of this rank.
            MismatchError: Keys are missing, or types, shapes or dtypes do not agree.
        """

    @abstractmethod
    def close(self) -> None:
        """Let go of everything. Do this on all ranks."""


class SyncCheckpointer(Checkpointer):
    """Returns from ``save`` when the checkpoint is committed on all ranks.

    Args:
        writer: Writes.
        reader: Reads.
    """

    def __init__(self, writer: CheckpointWriter, reader: CheckpointReader) -> None:
        """Hold both."""
        self._writer, self._reader = writer, reader

    def save(self, state_dict: STATE_DICT, path: PathLike, **kwargs: Any) -> None:
        """Save, see ``Checkpointer``. Collective.

        Raises:
            CheckpointingException: On every rank, whatever failed on any; nothing is committed.
        """
        state_dict, path = in_order(state_dict, path)
        # By name: a user's writer may have them in the other order.
        self._writer.write(state_dict=state_dict, path=path, **kwargs)

    def load(
        self,
        path: PathLike,
        state_dict: STATE_DICT | None = None,
        *,
        default_map_location: Any = None,
        strict: bool = False,
        **kwargs: Any,
    ) -> STATE_DICT:
        """Load, see ``Checkpointer``."""
        loaded = self._reader.read(path, state_dict, map_location=default_map_location, **kwargs)
        return _checked(loaded, path, strict=strict)

    def close(self) -> None:
        """Close the writer."""
        self._writer.close()


class AsyncCheckpointer(Checkpointer):
    """Returns from ``save`` when there is a snapshot; a process of its own writes it.

    At most one save is under way: the next waits for it. A save that failed is reported once: by
    its future if somebody asks it, else by the next ``save`` or ``close``, or by a ``load`` of its
    path.

    Args:
        checkpoint_stager: Makes the snapshot.
        checkpoint_process: Writes it.
        reader: Reads.
    """

    def __init__(
        self,
        checkpoint_stager: CheckpointStager,
        checkpoint_process: CheckpointProcess,
        reader: CheckpointReader,
    ) -> None:
        """Hold the three."""
        self._checkpoint_stager = checkpoint_stager
        self._checkpoint_process = checkpoint_process
        self._reader = reader
        self._write_future: _ReportedFuture[None] | None = None
        self._write_path = ""

    def save(
        self, state_dict: STATE_DICT, path: PathLike, **kwargs: Any
    ) -> tuple[Future[None], Future[None]]:
        """Stage, and have the snapshot written; see ``Checkpointer``. Collective.

        Returns:
            A future of the snapshot and one of the commit, which fails on every rank if it fails on
            any; nothing is committed then. With the stager's defaults the first is done.

        Raises:
            CheckpointingException: The save before failed and nobody was told; or this rank's state
                cannot be staged. This save does not take place then, on any rank.
        """
        state_dict, path = in_order(state_dict, path)
        try:
            self._finish_pending()
            checked_path(path)
            if not isinstance(state_dict, Mapping):
                raise ConfigError(f"expected a state dict, found a {type(state_dict).__name__}.")
            staged = self._checkpoint_stager.stage(state_dict, **kwargs)
        except BaseException as error:
            # A user's process class need not have this method.
            abstain = getattr(self._checkpoint_process, "abstain", None)
            if abstain is not None:
                abstain(error)
            raise
        written = self._checkpoint_process.write(staged, path, **kwargs)
        self._write_future, self._write_path = _ReportedFuture(written), _location(path)
        return wrap_future(staged), self._write_future

    def load(
        self,
        path: PathLike,
        state_dict: STATE_DICT | None = None,
        *,
        default_map_location: Any = None,
        strict: bool = False,
        **kwargs: Any,
    ) -> STATE_DICT:
        """Load, see ``Checkpointer``; a save to this path that is under way is waited for.

        Raises:
            CheckpointingException: That save failed and nobody was told.
        """
        if self._write_path == _location(path):
            self._finish_pending()
        loaded = self._reader.read(path, state_dict, map_location=default_map_location, **kwargs)
        return _checked(loaded, path, strict=strict)

    def close(self) -> None:
        """Let the save end that is under way, then close stager and process.

        Raises:
            CheckpointingException: It failed and nobody was told; all is closed then, too.
        """
        try:
            self._finish_pending()
        finally:
            try:
                self._checkpoint_stager.close()
            finally:
                self._checkpoint_process.close()

    def _finish_pending(self) -> None:
        """Wait for the save under way, and raise its failure if nobody was told."""
        error = self._write_future.untold_failure() if self._write_future is not None else None
        self._write_future, self._write_path = None, ""
        if error is not None:
            raise error


def _location(path: PathLike) -> str:
    """Return what is equal for two paths of one place, also if a link leads there."""
    return real_path(path_to_tell(path))


def _checked(loaded: tuple[STATE_DICT, list[str]], path: PathLike, *, strict: bool) -> STATE_DICT:
    state_dict, missing = loaded
    if strict and missing:
        raise MismatchError(f"Checkpoint at {path} is missing keys: {missing}")
    return state_dict


class _ReportedFuture(Future[T]):
    """A future that remembers whether somebody has been told how it ended.

    ``concurrent.futures`` does not tell whether an exception was ever looked at; the next save and
    ``close`` must know, so that a failure is raised once and not lost.
    """

    def __init__(self, original: Future[T]) -> None:
        """Follow ``original``: end when it ends, the same way."""
        super().__init__()
        self._told = False
        follow(original, self, lambda result: result)

    def result(self, timeout: float | None = None) -> T:
        """Return the result, or raise the failure, which has then been told."""
        try:
            return super().result(timeout)
        finally:
            self._told = self._told or self.done()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return the failure, which has then been told."""
        try:
            return super().exception(timeout)
        finally:
            self._told = self._told or self.done()

    def untold_failure(self) -> BaseException | None:
        """Wait; return the failure if nobody has been told of it, which has then been told."""
        told = self._told
        error = self.exception()
        return None if told else error
