"""What every committed checkpoint of ours has, in a module that needs no framework.

Here: the names of its documents, the manifest and the marker, written last and believed by nobody
unchecked. Not here: what an opened checkpoint is (``documents``), the formats' own documents.
Written by rank 0, or by the process that writes in the background for it: nothing imported here may
import torch.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dist_ckpt.core import CONFIG_FNAME
from dist_ckpt.errors import CorruptedCheckpointError
from dist_ckpt.storage import LocalStore
from dist_ckpt.storage.base import checked_name

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from dist_ckpt.core import CheckpointingConfig
    from dist_ckpt.storage import Store

__all__ = [
    "COMMON_FILE",
    "INDEX_FILE",
    "MANIFEST_FILE",
    "MAX_DOCUMENT_NBYTES",
    "METADATA_FILE",
    "OWN_DOCUMENTS",
    "Manifest",
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
