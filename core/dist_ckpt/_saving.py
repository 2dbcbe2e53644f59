"""A save, step by step: plan together, write alone, commit.

Here: the steps and what is handed from one to the next. Not here: any step's own logic. Each
function says on which rank it runs; two exchanges in all.
"""

from __future__ import annotations

import functools
import os
import shutil
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from dist_ckpt._engine.commit import Attempt
from dist_ckpt._formats.torch_dist.contents import files_of_checkpoint, write_documents
from dist_ckpt._formats.torch_dist.objects import encode_common, object_shards
from dist_ckpt._formats.torch_dist.write import WrittenFile, write_shards
from dist_ckpt._planning.describe import LocalShard, local_shards
from dist_ckpt._planning.distribution import WriteItem, assign_writers
from dist_ckpt._planning.index import StoredTensor
from dist_ckpt._state import split_for_save
from dist_ckpt.errors import CheckpointingException, CoordinationError, StorageError
from dist_ckpt.storage import LocalStore
from dist_ckpt.storage.local import fsync_directory, storage_errors
from dist_ckpt.validation import RankView, check_objects, check_sharding, check_storable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dist_ckpt.options import SaveOptions
    from dist_ckpt.types import Communicator, ShardedStateDict

__all__ = ["run_save"]

_REPLACEABLE = (stat.S_ISDIR, stat.S_ISREG, stat.S_ISLNK)


@dataclass(frozen=True, slots=True)
class _Prepared:
    """This rank's shards, in the order in which they were described to rank 0."""

    shards: list[LocalShard]
    view: RankView
    common: bytes


@dataclass(frozen=True, slots=True)
class _Assignment:
    """What one rank has to write, and where."""

    directory: Path
    items: list[WriteItem]


@dataclass(slots=True)
class _Coordinator:
    """What rank 0 remembers between the two exchanges."""

    attempt: Attempt | None = None
    empty: dict[str, StoredTensor] = field(default_factory=dict)
    planned: int = 0


def run_save(
    build: Callable[[], ShardedStateDict],
    target: Path,
    comm: Communicator,
    options: SaveOptions,
    *,
    check_coverage: bool,
) -> None:
    """Save collectively; on any failure nothing is committed and every rank raises.

    ``build`` makes this rank's state dict inside the first exchange, so that what it raises on one
    rank is raised on all.
    """
    coordinator = _Coordinator()
    prepare = functools.cache(lambda: _prepare(build(), comm.rank))
    try:
        assignment = comm.map_scatter(
            f"planning the save to {target}",
            lambda: prepare().view,
            lambda views: _plan(views, target, options, coordinator, check_coverage=check_coverage),
        )
        comm.map_reduce(
            f"writing {target}",
            lambda: _write(prepare(), assignment, comm.rank, options),
            lambda files: _commit(files, prepare(), coordinator, options),
        )
    except BaseException:
        # Also on Ctrl-C: an attempt that nobody finishes must not stay behind.
        if coordinator.attempt is not None:
            coordinator.attempt.abort()
        raise


def _prepare(sharded_state_dict: ShardedStateDict, rank: int) -> _Prepared:
    """Take the state dict apart and describe it. Every rank."""
    parts = split_for_save(sharded_state_dict)
    shards = local_shards(parts.tensors) + object_shards(parts.objects)
    common = b""
    if rank == 0:
        encoded = encode_common(parts.common)
        common, shards = encoded.data, shards + encoded.shards
    view = RankView(
        tuple(shard.info for shard in shards),
        tuple(one.without_data() for one in parts.objects),
    )
    return _Prepared(shards, view, common)


def _plan(
    views: Sequence[RankView],
    target: Path,
    options: SaveOptions,
    coordinator: _Coordinator,
    *,
    check_coverage: bool,
) -> list[_Assignment]:
    """Check all descriptions, share out the work, open the attempt. Rank 0."""
    shards = [view.shards for view in views]
    if check_coverage:
        # First: a double object is a double tensor too, which would tell the user less.
        check_objects([view.objects for view in views])
    check_sharding(shards, coverage=check_coverage)
    check_storable(shards)
    _check_target(target, options)
    plans = assign_writers(shards)
    coordinator.planned = sum(len(items) for items in plans)
    for info in (info for view in shards for info in view):
        if 0 in info.global_shape:
            coordinator.empty[info.key] = StoredTensor(info.dtype, info.global_shape, (), info.role)
    coordinator.attempt = Attempt.begin(target, options.staging_dir)
    return [_Assignment(coordinator.attempt.directory, items) for items in plans]


def _check_target(target: Path, options: SaveOptions) -> None:
    with storage_errors("look at", target):
        mode = target.lstat().st_mode if os.path.lexists(target) else None
        if mode is not None and not any(kind(mode) for kind in _REPLACEABLE):
            raise StorageError(
                f"{target} is a device, pipe or socket, which is never replaced.",
                hint="choose another path.",
            )
        if options.replace == "any":
            return
        if mode is not None and not stat.S_ISDIR(mode):
            raise StorageError(f"{target} is a file or a link, not a checkpoint directory.")
        occupied = target.is_dir() and any(target.iterdir())
        if occupied and not files_of_checkpoint(target):
            raise StorageError(
                f"Checkpoint destination directory ({target}) is not empty, and no checkpoint of "
                "ours is committed there.",
                hint="choose another path, or remove what stands there.",
            )


def _write(
    prepared: _Prepared, assignment: _Assignment, rank: int, options: SaveOptions
) -> list[WrittenFile]:
    """Write this rank's files and make them durable. Every rank, no exchange inside."""
    directory = assignment.directory
    if not assignment.items:
        return []
    if not directory.is_dir():
        raise StorageError(
            f"{directory} was made by rank 0 but is not there for rank {rank}.",
            hint="the checkpoint directory must be on a file system that all ranks share.",
        )
    files = write_shards(
        prepared.shards,
        assignment.items,
        LocalStore(directory),
        rank=rank,
        thread_count=options.thread_count,
    )
    with storage_errors("sync", directory):
        fsync_directory(directory)
    return files


def _commit(
    written: Sequence[list[WrittenFile]],
    prepared: _Prepared,
    coordinator: _Coordinator,
    options: SaveOptions,
) -> None:
    """Write the documents, the marker last, and rename the attempt into place. Rank 0."""
    attempt = coordinator.attempt
    if attempt is None:
        raise CoordinationError("a commit without an attempt")
    files = [file for of_rank in written for file in of_rank]
    proven = sum(len(file.results) for file in files)
    if proven != coordinator.planned:
        raise CoordinationError(f"{coordinator.planned} chunks were planned, {proven} written")
    store = LocalStore(attempt.directory)
    if options.include_dir is not None:
        with storage_errors("include", options.include_dir):
            _include(options.include_dir, attempt.directory)
    write_documents(
        store,
        files,
        coordinator.empty,
        prepared.common,
        checkpoint_id=attempt.checkpoint_id,
        world_size=len(written),
    )
    try:
        old_files = files_of_checkpoint(attempt.target)
    except CheckpointingException:
        # An unreadable old manifest must not stand in the way of a good new checkpoint: all that
        # lies there is then kept beside it.
        old_files = frozenset()
    attempt.publish(old_files=old_files)
    coordinator.attempt = None


def _include(source: Path, destination: Path) -> None:
    for entry in sorted(source.iterdir()):
        shutil.move(entry, destination / entry.name)
        _sync_tree(destination / entry.name)


def _sync_tree(path: Path) -> None:
    """Make a file, or a folder with all that is in it, durable."""
    if path.is_symlink():
        return
    if path.is_dir():
        for entry in path.iterdir():
            _sync_tree(entry)
        fsync_directory(path)
        return
    with path.open("rb") as file:
        os.fsync(file.fileno())
