"""The documents that every committed checkpoint of ours has, whatever its format.

Here: what an opened checkpoint is, and whether it still is. Not here: the manifest and the marker
(``manifest``, whose names this module hands on), comparing files with it (``verification``), the
formats' own documents (``torch_dist.contents``, ``zarr``), recognition (``_formats.opening``). Runs
on rank 0; all ranks get its result.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dist_ckpt._formats.manifest import (
    COMMON_FILE,
    INDEX_FILE,
    MANIFEST_FILE,
    MAX_DOCUMENT_NBYTES,
    METADATA_FILE,
    OWN_DOCUMENTS,
    PACKED_INDEX_FILE,
    Manifest,
    ManifestFiles,
    check_same,
    files_of_checkpoint,
    read_manifest,
    write_documents,
)

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from dist_ckpt._sharding.index import CheckpointIndex, StoredBytes
    from dist_ckpt.storage.checksums import FileSum

__all__ = [
    "COMMON_FILE",
    "INDEX_FILE",
    "MANIFEST_FILE",
    "MAX_DOCUMENT_NBYTES",
    "METADATA_FILE",
    "OWN_DOCUMENTS",
    "PACKED_INDEX_FILE",
    "CheckpointContents",
    "Manifest",
    "check_unchanged",
    "files_of_checkpoint",
    "read_manifest",
    "write_documents",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointContents:
    """What is in a committed checkpoint.

    Attributes:
        directory: Where it lies.
        backend: Format of its sharded part, and the format's version.
        common_backend: The same of its common part.
        checkpoint_id: Unique name of this save; empty for checkpoints of other writers.
        world_size: Number of ranks that saved it; 0 if unknown.
        index: The stored tensors, objects' documents included.
        is_indexed: Whether ``index`` tells all; else only the strategy of ``backend`` knows.
        common: Content of ``common.json``; None if there is none.
        objects: Pickled objects of another writer.
        paths: Nested path of each flat key, as another writer noted it.
        files: Sizes and checksums of all files; empty for checkpoints of other writers.
        absent: Files of the manifest that are missing and that no reader needs.

    What is large in it (the index, the checksums) is not sent to other ranks: they are told where
    it is and what its seal is, read what they need of it when they need it, and refuse what does
    not match.
    """

    directory: Path
    backend: tuple[str, int] = ("torch_dist", 1)
    common_backend: tuple[str, int] = ("torch", 1)
    checkpoint_id: str = ""
    world_size: int = 0
    index: CheckpointIndex
    is_indexed: bool = True
    common: bytes | None = None
    objects: Mapping[str, StoredBytes] = field(default_factory=dict)
    paths: Mapping[str, tuple[str | int, ...]] = field(default_factory=dict)
    files: Mapping[str, FileSum] = field(default_factory=dict)
    absent: frozenset[str] = frozenset()


def check_unchanged(contents: CheckpointContents) -> None:
    """Raise if another checkpoint has taken this one's place while it was read.

    A re-save swaps the directory under its name; what was read before and after would be a mixture
    of the two. Checkpoint ids are unique, so the same id at the end means the same files all along.

    Raises:
        CheckpointNotFoundError: The checkpoint was replaced or removed.
    """
    files = contents.files
    seal = files.seal if isinstance(files, ManifestFiles) else ""
    check_same(contents.directory, contents.checkpoint_id, seal)
