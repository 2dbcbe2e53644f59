"""The documents that every committed checkpoint of ours has, whatever its format.

Here: the manifest and the marker, written last and believed by nobody unchecked; what an opened
checkpoint is. Not here: the formats' own documents (``torch_dist.contents``, ``zarr``), recognition
(``_formats.opening``). Runs on rank 0; all ranks get its result.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dist_ckpt.core import CONFIG_FNAME, CheckpointingConfig
from dist_ckpt.errors import CheckpointNotFoundError, CorruptedCheckpointError
from dist_ckpt.storage import LocalStore
from dist_ckpt.storage.base import checked_name
from dist_ckpt.validation import shortened

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from dist_ckpt._planning.index import CheckpointIndex, StoredBytes
    from dist_ckpt.storage import Store

__all__ = [
    "COMMON_FILE",
    "INDEX_FILE",
    "MANIFEST_FILE",
    "MAX_DOCUMENT_NBYTES",
    "METADATA_FILE",
    "CheckpointContents",
    "Manifest",
    "check_files",
    "check_unchanged",
    "files_of_checkpoint",
    "read_manifest",
    "write_documents",
]

INDEX_FILE = "index.json"
COMMON_FILE = "common.json"
MANIFEST_FILE = "manifest.json"
METADATA_FILE = ".metadata"
OWN_DOCUMENTS = (INDEX_FILE, COMMON_FILE, MANIFEST_FILE, METADATA_FILE, CONFIG_FNAME)
MANIFEST_VERSION = 1
MAX_DOCUMENT_NBYTES = 1 << 31


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What belongs to a checkpoint: every file with its size, and which save made it."""

    files: Mapping[str, int]
    world_size: int
    checkpoint_id: str


def write_documents(
    store: Store,
    documents: Mapping[str, bytes],
    manifest: Manifest,
    config: CheckpointingConfig,
) -> None:
    """Write ``documents``, the manifest of them and of all files, and the marker last.

    Args:
        store: The attempt directory.
        documents: Small files by name.
        manifest: The files that are there already; ``documents`` are added to it.
        config: Content of the commit marker ``metadata.json``.
    """
    for name, data in documents.items():
        store.create(name, data)
    sizes = dict(manifest.files) | {name: len(data) for name, data in documents.items()}
    document = {
        "format": "dist_ckpt",
        "version": MANIFEST_VERSION,
        "checkpoint_id": manifest.checkpoint_id,
        "world_size": manifest.world_size,
        "files": {name: {"nbytes": nbytes} for name, nbytes in sorted(sizes.items())},
    }
    store.create(MANIFEST_FILE, json.dumps(document, indent=1).encode())
    # The marker comes last: whoever sees it may believe all the rest.
    store.create(CONFIG_FNAME, config.to_json())


def check_unchanged(contents: CheckpointContents) -> None:
    """Raise if another checkpoint has taken this one's place while it was read.

    A re-save swaps the directory under its name; what was read before and after would be a mixture
    of the two. Checkpoint ids are unique, so the same id at the end means the same files all along.

    Raises:
        CheckpointNotFoundError: The checkpoint was replaced or removed.
    """
    if not contents.checkpoint_id:
        return
    try:
        now = read_manifest(contents.directory).checkpoint_id
    except CheckpointNotFoundError:
        now = None
    if now != contents.checkpoint_id:
        what = "removed" if now is None else "replaced"
        raise CheckpointNotFoundError(f"{contents.directory} was {what} while it was read.")


def files_of_checkpoint(directory: Path) -> frozenset[str]:
    """Return the names in ``directory`` that belong to its checkpoint: all of them are ours.

    Empty if no checkpoint of ours is committed there.
    """
    store = LocalStore(directory)
    if not directory.is_dir() or store.nbytes(CONFIG_FNAME) is None:
        return frozenset()
    if store.nbytes(MANIFEST_FILE) is None:
        return frozenset()
    return frozenset({*OWN_DOCUMENTS, *read_manifest(directory).files})


def check_files(directory: Path, manifest: Manifest) -> None:
    """Raise if a file of the manifest is missing or has another size.

    Raises:
        CorruptedCheckpointError: Naming all of them.
    """
    store = LocalStore(directory)
    found = {name: store.nbytes(name) for name in manifest.files}
    problems = [
        f"{name} is missing" if found[name] is None else f"{name} has {found[name]} bytes, not {n}"
        for name, n in manifest.files.items()
        if found[name] != n
    ]
    if problems:
        raise CorruptedCheckpointError(
            f"{directory}: {shortened(problems)}.", hint="use another checkpoint."
        )


def read_manifest(directory: Path) -> Manifest:
    """Return the manifest of a checkpoint of ours, believing nothing.

    Raises:
        CheckpointNotFoundError: There is none.
        CorruptedCheckpointError: It is not what we write.
    """
    where = directory / MANIFEST_FILE
    data = LocalStore(directory).read(MANIFEST_FILE, max_nbytes=MAX_DOCUMENT_NBYTES)
    try:
        document: dict[str, Any] = json.loads(data)
        if document["format"] != "dist_ckpt" or document["version"] != MANIFEST_VERSION:
            raise ValueError(f"version {document['version']!r}")
        files = {checked_name(name): entry["nbytes"] for name, entry in document["files"].items()}
        if not all(type(n) is int and n >= 0 for n in files.values()):
            raise ValueError("sizes must not be negative")
        world_size, checkpoint_id = document["world_size"], document["checkpoint_id"]
        if type(world_size) is not int or type(checkpoint_id) is not str:
            raise TypeError("wrong type of world_size or checkpoint_id")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptedCheckpointError(f"{where}: not a manifest of ours ({error}).") from error
    return Manifest(files=files, world_size=world_size, checkpoint_id=checkpoint_id)
