"""The end of a save: whether it may replace its target, and how it does.

Here: the check of the target, the manifest of all files, the marker, the rename. Not here: the
steps before (``_saving.execute``), the rename itself (``storage.commit``). Runs on rank 0 alone, or
in the process that writes in the background for it: nothing imported here may import torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dist_ckpt._formats.manifest import (
    METADATA_FILE,
    PACKED_INDEX_FILE,
    Manifest,
    files_of_checkpoint,
    read_manifest,
    write_documents,
)
from dist_ckpt._formats.torch_dist.dcp_metadata import encode_metadata
from dist_ckpt._process.gc_pause import collector_paused
from dist_ckpt._saving.in_flight import check_not_in_flight
from dist_ckpt.errors import (
    CheckpointingException,
    CoordinationError,
    CorruptedCheckpointError,
    StorageError,
)
from dist_ckpt.storage import open_store
from dist_ckpt.storage.commit import attempt_name, discard, locate
from dist_ckpt.storage.failures import storage_errors
from dist_ckpt.storage.paths import is_empty, is_taken, kind_of
from dist_ckpt.storage.trees import move_into, synced_files

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from dist_ckpt._formats.base import SavePlan, Written
    from dist_ckpt._saving.in_flight import Writer
    from dist_ckpt._worker.hub import HubAddress
    from dist_ckpt.core import CheckpointingConfig
    from dist_ckpt.options import SaveOptions
    from dist_ckpt.storage.checksums import FileSum
    from dist_ckpt.storage.commit import Attempt

__all__ = [
    "CommitPoint",
    "Publication",
    "all_files",
    "check_target",
    "is_published",
    "publish",
    "was_published",
    "with_dcp_metadata",
]


def check_target(target: Path, options: SaveOptions, writer: Writer | None = None) -> None:
    """Raise if a save may not write there; ``writer`` is the one of a background save. Rank 0."""
    check_not_in_flight(target, "saved", but_for=writer)
    with storage_errors("look at", target):
        kind = kind_of(target)
        if kind == "other":
            raise StorageError(
                f"{target} is a device, pipe or socket, which is never replaced.",
                hint="choose another path.",
            )
        if options.replace == "any":
            return
        if kind in ("file", "link"):
            raise StorageError(f"{target} is a file or a link, not a checkpoint directory.")
        occupied = kind == "directory" and not is_empty(target)
        if occupied and not _is_ours(target):
            raise StorageError(
                f"Checkpoint destination directory ({target}) is not empty, and no checkpoint of "
                "ours is committed there.",
                hint="choose another path, or remove what stands there.",
            )


def _is_ours(target: Path) -> bool:
    """Whether a checkpoint of this library is there; a damaged one may be replaced, too."""
    try:
        return bool(files_of_checkpoint(target))
    except CorruptedCheckpointError:
        return True


def publish(
    attempt: Attempt,
    documents: Mapping[str, bytes],
    files: Mapping[str, FileSum],
    config: CheckpointingConfig,
    *,
    world_size: int,
    include_dir: Path | None,
) -> None:
    """Write the documents, the marker last, and rename the attempt into place.

    Args:
        attempt: The attempt, complete except for its documents.
        documents: All of them but the manifest and the marker.
        files: All data files with their checksums.
        config: What the marker says.
        world_size: Number of ranks that saved.
        include_dir: Its entries are moved into the checkpoint.
    """
    if include_dir is not None:
        files = {**files, **move_into(include_dir, attempt.directory)}
    manifest = Manifest(
        files=files,
        world_size=world_size,
        checkpoint_id=attempt.checkpoint_id,
        name=attempt.target.name,
    )
    write_documents(open_store(attempt.directory), documents, manifest, config)
    try:
        old_files = files_of_checkpoint(attempt.target)
    except CheckpointingException:
        # An unreadable old manifest must not prevent a good new checkpoint: then all old files are
        # kept beside it.
        old_files = frozenset()
    attempt.publish(old_files=old_files)


def with_dcp_metadata(documents: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return the documents with DCP's ``.metadata``, if there is an index that it is made of."""
    found = dict(documents)
    if PACKED_INDEX_FILE in found:
        with collector_paused():
            found[METADATA_FILE] = encode_metadata(found[PACKED_INDEX_FILE])
    return found


def is_published(target: Path, directory: Path) -> bool:
    """Whether the save that was written into ``directory`` is committed at its target.

    For processes that do not know the outcome. The name of an attempt's directory contains the id
    of the checkpoint, so every rank can compare it.
    """
    try:
        manifest = read_manifest(locate(target))
    except CheckpointingException:
        return False
    return attempt_name(target, manifest.checkpoint_id) == directory.name


def was_published(target: Path, directory: Path) -> bool:
    """Decide whether a save is committed when rank 0 cannot be asked. Any rank, also several.

    If it is not published yet, this prevents it: the attempt is removed, first by a rename.
    Publishing renames the same directory, so only one of the two succeeds. The target is read
    again afterwards, as the save may have been published in between.

    Raises:
        StorageError: The directory cannot be removed, so that the save may still be published.
    """
    is_committed = is_published(target, directory)
    discard(target, directory)  # if the two names were exchanged: the replaced checkpoint
    if is_committed or is_published(target, directory):
        return True
    if is_taken(directory):
        raise StorageError(
            f"{directory} cannot be removed, so {target} may still be committed.",
            hint="check its permissions and the file system; look at the target again later.",
        )
    return False


def all_files(written: Sequence[Written], plan: SavePlan, directory: Path) -> dict[str, FileSum]:
    """Return all data files with their checksums: from the reports, or read from the directory."""
    files = dict(plan.files)
    for one in written:
        if one.files is None:
            return synced_files(directory)
        files |= one.files
    return files


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """Rank 0's part of a commit, all of it made while planning.

    Attributes:
        attempt: Where the ranks write.
        documents: Small files by name.
        files: Data files that were made while planning, with their checksums.
        config: What the marker says.
        world_size: Number of ranks that save.
        include_dir: Its entries are moved into the checkpoint.
        dcp_metadata: Whether DCP's own document stands beside our index.
    """

    attempt: Attempt
    documents: Mapping[str, bytes]
    files: Mapping[str, FileSum]
    config: CheckpointingConfig
    world_size: int
    include_dir: Path | None = None
    dcp_metadata: bool = True

    def publish(self, reports: Sequence[Mapping[str, FileSum]]) -> None:
        """Write documents and marker, and rename. ``reports``: each rank's files.

        Raises:
            CoordinationError: Two ranks wrote the same file, or a rank is not among them.
            StorageError: It could not be written; nothing is committed.
        """
        if len(reports) != self.world_size:
            raise CoordinationError(
                f"{self.attempt.target}: {len(reports)} ranks have written, not {self.world_size}"
            )
        files = dict(self.files)
        for rank, report in enumerate(reports):
            if twice := sorted(files.keys() & report.keys()):
                raise CoordinationError(
                    f"{self.attempt.target}: {', '.join(twice[:5])} of rank {rank} was written "
                    "before."
                )
            files |= report
        publish(
            self.attempt,
            with_dcp_metadata(self.documents) if self.dcp_metadata else self.documents,
            files,
            self.config,
            world_size=self.world_size,
            include_dir=self.include_dir,
        )

    def is_published(self) -> bool:
        """Whether this save is committed; for processes that do not know the outcome."""
        return is_published(self.attempt.target, self.attempt.directory)


@dataclass(frozen=True, slots=True)
class CommitPoint:
    """Where and under which name the ranks of one save agree.

    Attributes:
        address: The hub.
        name: Unique for each save; equal on all ranks.
        rank: This rank.
        size: Number of ranks.
        timeout_secs: How long a rank that is ready waits for the others.
    """

    address: HubAddress
    name: str
    rank: int
    size: int
    timeout_secs: float
