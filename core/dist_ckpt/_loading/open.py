"""A checkpoint opened by all ranks together: found, indexed, verified.

Here: which directory a path means, and what all ranks learn of it from rank 0. Not here: what a
checkpoint looks like (``_formats``), reading it (``_loading.execute``).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from dist_ckpt._formats.documents import CheckpointContents, check_unchanged
from dist_ckpt._formats.opening import open_contents
from dist_ckpt._formats.verification import shared_out, verify_files
from dist_ckpt._sharding.index import LazyTensors
from dist_ckpt.errors import (
    CheckpointingException,
    ConfigError,
    CorruptedCheckpointError,
    UnknownStrategyError,
)
from dist_ckpt.storage import open_store
from dist_ckpt.storage.commit import locate
from dist_ckpt.storage.paths import absolute
from dist_ckpt.validation import shortened

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dist_ckpt.options import LoadOptions
    from dist_ckpt.types import Communicator

__all__ = ["check_indexed", "open_checkpoint", "open_together", "verify_together"]


def open_checkpoint(checkpoint_dir: Path) -> CheckpointContents:
    """Recognise and index a checkpoint. Not collective."""
    checkpoint_dir = absolute(checkpoint_dir)
    found = locate(checkpoint_dir)
    try:
        return open_contents(found)
    except CheckpointingException:
        # A re-save without an atomic exchange moves the old one aside and back into nothing.
        again = locate(checkpoint_dir)
        if again == found:
            raise
        return open_contents(again)


def open_together(
    checkpoint_dir: Path,
    comm: Communicator,
    options: LoadOptions,
    *,
    check: Callable[[], object] = lambda: None,
) -> CheckpointContents:
    """Recognise and index a checkpoint on rank 0, for all; verify it, if asked to. Collective.

    What only a strategy of another package can read is verified as a whole: who knows what it
    reads. ``check`` looks at each rank's arguments first; what it raises on one is raised on all.

    Raises:
        CheckpointingException: It cannot be opened, or is not as it was written.
        ConfigError: Ranks do not agree on ``options.verify``.
    """

    def told() -> str:
        check()
        return options.verify

    def opened(levels: Sequence[str]) -> CheckpointContents:
        if len(set(levels)) > 1:
            raise ConfigError(f"verify differs from rank to rank: {shortened(levels)}.")
        return open_checkpoint(checkpoint_dir)

    contents = comm.map_reduce(f"opening {checkpoint_dir}", told, opened)
    # Rank 0 tells where the index is; who cannot read it must not be alone with that.
    if comm.size > 1 and isinstance(contents.index.tensors, LazyTensors):
        comm.map_reduce(f"opening {checkpoint_dir}", contents.index.tensors.load, lambda _: None)
    if options.verify == "full" or (options.verify == "read" and not contents.is_indexed):
        verify_together(contents, comm, options.thread_count)
    return contents


def check_indexed(contents: CheckpointContents) -> None:
    """Raise if only a strategy can read this checkpoint: the verdict is the same on all ranks.

    Raises:
        UnknownStrategyError: It is of a third party's format.
    """
    if not contents.is_indexed:
        raise UnknownStrategyError(
            f"{contents.directory}: format {contents.backend} is not one of ours.",
            hint="`dist_ckpt.load` reads it, if its strategy is installed or given.",
        )


def verify_together(contents: CheckpointContents, comm: Communicator, thread_count: int) -> None:
    """Compare every byte of a checkpoint with its checksums; each rank takes a share. Collective.

    Checkpoints of other writers have none: there is nothing to compare.

    Raises:
        CorruptedCheckpointError: On every rank, naming each file with offset, expected and found.
        CheckpointNotFoundError: The checkpoint was replaced or removed meanwhile.
        StorageError: A file cannot be read.
    """
    if not contents.files:
        return

    def local() -> list[str]:
        share = shared_out(contents.files, comm.size)[comm.rank]
        return verify_files(open_store(contents.directory), share, thread_count=thread_count)

    def combine(found: Sequence[list[str]]) -> None:
        problems = [
            f"rank {rank}: {problem}" if len(found) > 1 else problem
            for rank, one in enumerate(found)
            for problem in one
        ]
        if problems:
            # What was replaced is no damage, and is told apart.
            check_unchanged(contents)
            raise CorruptedCheckpointError(
                f"{contents.directory}: {shortened(problems)}.", hint="use another checkpoint."
            )

    comm.map_reduce(f"verifying {contents.directory}", local, combine)
