"""What every committed checkpoint of ours has, in a module that needs no framework.

Here: the names of its documents, the manifest and the marker, written last and believed by nobody
unchecked. Not here: what an opened checkpoint is (``documents``), the formats' own documents.
Written by rank 0, or by the process that writes in the background for it: nothing imported here may
import torch.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dist_ckpt.core import CONFIG_FNAME
from dist_ckpt.errors import (
    CheckpointNotFoundError,
    CorruptedCheckpointError,
    UnknownStrategyError,
)
from dist_ckpt.storage import open_store
from dist_ckpt.storage.base import checked_name
from dist_ckpt.storage.checksums import ALGORITHM, BLOCK_NBYTES, FileSum, sum_of
from dist_ckpt.storage.paths import is_directory
from dist_ckpt.storage.sealed import has_seal, sealed, unsealed

if TYPE_CHECKING:
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
    "PACKED_INDEX_FILE",
    "Manifest",
    "ManifestFiles",
    "check_same",
    "files_of_checkpoint",
    "read_manifest",
    "write_documents",
]

INDEX_FILE = "index.json"
PACKED_INDEX_FILE = "index.bin"
COMMON_FILE = "common.json"
MANIFEST_FILE = "manifest.json"
METADATA_FILE = ".metadata"
OWN_DOCUMENTS = (
    INDEX_FILE,
    PACKED_INDEX_FILE,
    COMMON_FILE,
    MANIFEST_FILE,
    METADATA_FILE,
    CONFIG_FNAME,
)
MANIFEST_VERSION = 2
MAX_DOCUMENT_NBYTES = 1 << 31


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What belongs to a checkpoint, and which save made it.

    Attributes:
        files: Every file but the manifest, with its size and checksums.
        world_size: Number of ranks that saved.
        checkpoint_id: Unique name of the save.
        name: What the directory was called when it was saved.
        seal: Checksum of the document that it was read from; empty if it was not read.
    """

    files: Mapping[str, FileSum]
    world_size: int
    checkpoint_id: str
    name: str = ""
    seal: str = ""

    @property
    def sizes(self) -> dict[str, int]:
        """Size of each file in bytes."""
        return {name: found.nbytes for name, found in self.files.items()}

    @property
    def nbytes(self) -> int:
        """Size of all files together."""
        return sum(found.nbytes for found in self.files.values())


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
    marker = config.to_json()
    files = dict(manifest.files) | {name: store.create(name, documents[name]) for name in documents}
    files[CONFIG_FNAME] = sum_of(marker)
    document = {
        "format": "dist_ckpt",
        "version": MANIFEST_VERSION,
        "checkpoint_id": manifest.checkpoint_id,
        "name": printable(manifest.name),
        "world_size": manifest.world_size,
        "checksum": {"algorithm": ALGORITHM, "block_nbytes": BLOCK_NBYTES},
        "files": {name: _entry(found) for name, found in sorted(files.items())},
    }
    store.create(MANIFEST_FILE, sealed(document, indent=1))
    # The marker comes last: whoever sees it may believe all the rest.
    store.create(CONFIG_FNAME, marker)


def printable(name: str) -> str:
    """Return a file name without what is no text in it; such names are not found by it again."""
    return name.encode("utf-8", "replace").decode()


def _entry(found: FileSum) -> dict[str, Any]:
    return {"nbytes": found.nbytes, "blocks": base64.b64encode(found.blocks).decode("ascii")}


def _file_sum(entry: Mapping[str, Any]) -> FileSum:
    nbytes = entry["nbytes"]
    if type(nbytes) is not int or not 0 <= nbytes < 1 << 63:
        raise ValueError(f"a file of {nbytes!r} bytes")
    return FileSum(nbytes, base64.b64decode(entry["blocks"], validate=True))


def files_of_checkpoint(directory: Path) -> frozenset[str]:
    """Return the names in ``directory`` that belong to its checkpoint: all of them are ours.

    Empty if no checkpoint of ours is committed there.
    """
    store = open_store(directory)
    if not is_directory(directory) or store.nbytes(CONFIG_FNAME) is None:
        return frozenset()
    if store.nbytes(MANIFEST_FILE) is None:
        return frozenset()
    return frozenset({*OWN_DOCUMENTS, *read_manifest(directory).files})


def read_manifest(directory: Path, known: Manifest | None = None) -> Manifest:
    """Return the manifest of a checkpoint of ours, believing nothing.

    Args:
        directory: The checkpoint.
        known: What was read there before: returned if it still stands there, byte for byte.

    Raises:
        CheckpointNotFoundError: There is none.
        CorruptedCheckpointError: It is not what we write.
        UnknownStrategyError: A newer release wrote it.
    """
    where = str(directory / MANIFEST_FILE)
    data = _manifest_bytes(directory)
    if known is not None and has_seal(data, known.seal):
        return known
    document = unsealed(data, where=where)
    try:
        return _manifest(document, where)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptedCheckpointError(
            f"{where}: not a manifest of ours ({type(error).__name__}: {error})."
        ) from error


def _manifest_bytes(directory: Path) -> bytes:
    return open_store(directory).read(MANIFEST_FILE, max_nbytes=MAX_DOCUMENT_NBYTES)


def _manifest(document: Mapping[str, Any], where: str) -> Manifest:
    version = document["version"]
    if document["format"] != "dist_ckpt" or type(version) is not int or version < MANIFEST_VERSION:
        raise ValueError(f"version {version!r}, this release reads {MANIFEST_VERSION}")
    if version > MANIFEST_VERSION:
        # Nothing is damaged: it must not be set aside.
        raise UnknownStrategyError(
            f"{where}: manifest version {version}; this release reads {MANIFEST_VERSION}.",
            hint="upgrade dist-ckpt.",
        )
    expected = {"algorithm": ALGORITHM, "block_nbytes": BLOCK_NBYTES}
    if document["checksum"] != expected:
        raise ValueError(f"checksums {document['checksum']!r}, expected {expected!r}")
    world_size = document["world_size"]
    checkpoint_id, name = document["checkpoint_id"], document["name"]
    if type(world_size) is not int or type(checkpoint_id) is not str or type(name) is not str:
        raise TypeError("wrong type of world_size, checkpoint_id or name")
    files = {checked_name(one): _file_sum(entry) for one, entry in document["files"].items()}
    if CONFIG_FNAME not in files:
        raise ValueError(f"no {CONFIG_FNAME} among the files")
    return Manifest(
        files=files,
        world_size=world_size,
        checkpoint_id=checkpoint_id,
        name=name,
        seal=document["xxh3_64"],
    )


def check_same(directory: Path, checkpoint_id: str, seal: str = "") -> None:
    """Raise if there is another checkpoint than this one, or none; nothing for one without an id.

    Args:
        directory: Where it lies.
        checkpoint_id: Its id.
        seal: Checksum of its manifest, which need not be taken apart if that is still the same.

    Raises:
        CheckpointNotFoundError: The checkpoint was replaced or removed.
    """
    if not checkpoint_id:
        return
    try:
        if seal and has_seal(_manifest_bytes(directory), seal):
            return
        now = read_manifest(directory).checkpoint_id
    except CheckpointNotFoundError:
        now = None
    if now != checkpoint_id:
        what = "removed" if now is None else "replaced"
        raise CheckpointNotFoundError(f"{directory} was {what} while it was read.")


class ManifestFiles(Mapping[str, FileSum]):
    """The files of a manifest with their checksums.

    Another process gets only where the manifest is and what its seal is: it reads the checksums for
    itself, when it asks for the first of them.

    Args:
        directory: The checkpoint.
        manifest: What was read there.
        absent: Files of the manifest that are not there and that no reader needs.
    """

    def __init__(
        self, directory: Path, manifest: Manifest, absent: frozenset[str] = frozenset()
    ) -> None:
        """Keep what was read."""
        self._directory, self._seal = directory, manifest.seal
        self._checkpoint_id, self._absent = manifest.checkpoint_id, absent
        self._files: Mapping[str, FileSum] | None = self._present(manifest)
        self._count = len(self._files)

    def __getstate__(self) -> dict[str, Any]:
        """Return all but the files."""
        return self.__dict__ | {"_files": None}

    @property
    def seal(self) -> str:
        """Checksum of the manifest."""
        return self._seal

    @property
    def files(self) -> Mapping[str, FileSum]:
        """The files, read now if they were not yet.

        Raises:
            CheckpointNotFoundError: The checkpoint was replaced or removed meanwhile.
            CorruptedCheckpointError: The manifest is not the one that was told of.
        """
        if self._files is None:
            manifest = read_manifest(self._directory)
            if manifest.checkpoint_id != self._checkpoint_id:
                raise CheckpointNotFoundError(f"{self._directory} was replaced while it was read.")
            if manifest.seal != self._seal:
                raise CorruptedCheckpointError(
                    f"{self._directory / MANIFEST_FILE}: its checksum is {manifest.seal}, "
                    f"{self._seal} is expected.",
                    hint="the file was altered while the checkpoint was read.",
                )
            self._files = self._present(manifest)
        return self._files

    def _present(self, manifest: Manifest) -> Mapping[str, FileSum]:
        if self._absent:
            return {n: one for n, one in manifest.files.items() if n not in self._absent}
        return manifest.files

    def __len__(self) -> int:
        """Return the number of files; nothing is read for it."""
        return self._count

    def __iter__(self) -> Iterator[str]:
        """Yield the names."""
        return iter(self.files)

    def __getitem__(self, name: str) -> FileSum:
        """Return size and checksums of a file."""
        return self.files[name]
