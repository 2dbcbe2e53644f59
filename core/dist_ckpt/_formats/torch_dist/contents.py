"""A checkpoint directory, recognised and indexed.

Here: which documents a checkpoint has, how they are written and believed. Not here: data files
(``write``, ``read``), the rename (``_engine.commit``). Runs on rank 0; all ranks get its result.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dist_ckpt._integrity.coverage import overlaps
from dist_ckpt._planning.index import CheckpointIndex, StoredTensor
from dist_ckpt.core import CONFIG_FNAME, CheckpointingConfig, maybe_load_config
from dist_ckpt.errors import (
    CheckpointingException,
    CheckpointNotFoundError,
    CorruptedCheckpointError,
    IncompleteCheckpointError,
    UnknownStrategyError,
)
from dist_ckpt.storage import LocalStore
from dist_ckpt.storage.base import checked_name
from dist_ckpt.validation import shortened

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from dist_ckpt._formats.torch_dist.metadata import ForeignCheckpoint, StoredBytes
    from dist_ckpt._formats.torch_dist.write import WrittenFile
    from dist_ckpt.storage import Store

__all__ = [
    "COMMON_FILE",
    "INDEX_FILE",
    "MANIFEST_FILE",
    "CheckpointContents",
    "check_unchanged",
    "files_of_checkpoint",
    "open_contents",
    "write_documents",
]

INDEX_FILE = "index.json"
COMMON_FILE = "common.json"
MANIFEST_FILE = "manifest.json"
METADATA_FILE = ".metadata"
OWN_DOCUMENTS = (INDEX_FILE, COMMON_FILE, MANIFEST_FILE, METADATA_FILE, CONFIG_FNAME)
MANIFEST_VERSION = 1
COMMON_BACKEND = "json"
"""In ``metadata.json``: the checkpoint is ours, so that our other documents must be there."""
_MAX_DOCUMENT_NBYTES = 1 << 31
_OPEN_TRIES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointContents:
    """What is in a committed checkpoint.

    Attributes:
        directory: Where it lies.
        checkpoint_id: Unique name of this save; empty for checkpoints of other writers.
        world_size: Number of ranks that saved it; 0 if unknown.
        index: The stored tensors, objects' documents included.
        common: Content of ``common.json``; None if another writer made the checkpoint.
        objects: Pickled objects of another writer.
        paths: Nested path of each flat key, as another writer noted it.
    """

    directory: Path
    checkpoint_id: str = ""
    world_size: int = 0
    index: CheckpointIndex
    common: bytes | None = None
    objects: Mapping[str, StoredBytes] = field(default_factory=dict)
    paths: Mapping[str, tuple[str | int, ...]] = field(default_factory=dict)


def write_documents(
    store: Store,
    files: Sequence[WrittenFile],
    empty: Mapping[str, StoredTensor],
    common: bytes,
    *,
    checkpoint_id: str,
    world_size: int,
) -> None:
    """Write everything but the data files; the commit marker ``metadata.json`` last."""
    from dist_ckpt._formats.torch_dist.metadata import encode_metadata  # noqa: PLC0415 - heavy

    results = [result for file in files for result in file.results]
    tensors: dict[str, StoredTensor] = dict(empty)
    chunks: dict[str, list[Any]] = {}
    for result in results:
        chunks.setdefault(result.info.key, []).append(result.chunk)
        tensors[result.info.key] = StoredTensor(
            result.info.dtype, result.info.global_shape, (), result.info.role
        )
    for key, found in chunks.items():
        one = tensors[key]
        ordered = tuple(sorted(found, key=lambda chunk: chunk.box))
        tensors[key] = StoredTensor(one.dtype, one.shape, ordered, one.role)
    documents = {
        INDEX_FILE: CheckpointIndex(tensors).to_json(),
        COMMON_FILE: common,
        METADATA_FILE: encode_metadata(results, empty),
    }
    sizes = {file.name: file.nbytes for file in files}
    sizes |= {name: len(data) for name, data in documents.items()}
    for name, data in documents.items():
        store.create(name, data)
    manifest = {
        "format": "dist_ckpt",
        "version": MANIFEST_VERSION,
        "checkpoint_id": checkpoint_id,
        "world_size": world_size,
        "files": {name: {"nbytes": nbytes} for name, nbytes in sorted(sizes.items())},
    }
    store.create(MANIFEST_FILE, json.dumps(manifest, indent=1).encode())
    # The marker comes last: whoever sees it may believe all the rest.
    config = CheckpointingConfig("torch_dist", 1, common_backend=COMMON_BACKEND)
    store.create(CONFIG_FNAME, config.to_json())


def open_contents(directory: Path) -> CheckpointContents:
    """Recognise and index the checkpoint in ``directory``.

    Raises:
        CheckpointNotFoundError: No checkpoint there.
        IncompleteCheckpointError: One that was never committed.
        CorruptedCheckpointError: A document or a file is missing, cut short or unreadable.
        UnknownStrategyError: A format that this release does not read.
    """
    if not directory.is_dir():
        what = "is a file" if directory.exists() else "does not exist"
        raise CheckpointNotFoundError(f"Checkpoint directory {directory} {what}.")
    store = LocalStore(directory)
    config = maybe_load_config(directory)
    if config is None:
        return _open_without_marker(directory, store)
    if (config.sharded_backend, config.sharded_backend_version) != ("torch_dist", 1):
        raise UnknownStrategyError(
            f"{directory}: format {config.sharded_backend!r} version "
            f"{config.sharded_backend_version}; this release reads ('torch_dist', 1)."
        )
    if store.nbytes(MANIFEST_FILE) is None and config.common_backend != COMMON_BACKEND:
        return _open_foreign(directory, store)
    return _open_own(directory, store)


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
        now = _manifest(contents.directory, LocalStore(contents.directory))["checkpoint_id"]
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
    return frozenset({*OWN_DOCUMENTS, *_manifest(directory, store)["files"]})


def _open_without_marker(directory: Path, store: Store) -> CheckpointContents:
    names = store.list()
    ours = [name for name in (INDEX_FILE, MANIFEST_FILE, COMMON_FILE) if name in names]
    if METADATA_FILE in names and not ours:
        return _open_foreign(directory, store)
    if ours or any(name.endswith(".distcp") for name in names):
        raise IncompleteCheckpointError(
            f"{directory} holds data but no commit marker ({CONFIG_FNAME}): "
            "its save never finished.",
            hint="load an older checkpoint; this directory may be deleted.",
        )
    raise CheckpointNotFoundError(
        f"{directory} is not a distributed checkpoint: no {CONFIG_FNAME} and no {METADATA_FILE}."
    )


def _open_foreign(directory: Path, store: Store) -> CheckpointContents:
    from dist_ckpt._formats.torch_dist.metadata import decode_metadata  # noqa: PLC0415 - heavy

    if store.nbytes(METADATA_FILE) is None:
        raise CorruptedCheckpointError(f"{directory}: {METADATA_FILE} is missing.")
    sizes = {name: store.nbytes(name) or 0 for name in store.list()}
    foreign: ForeignCheckpoint = decode_metadata(
        store.read(METADATA_FILE, max_nbytes=_MAX_DOCUMENT_NBYTES),
        where=str(directory / METADATA_FILE),
        sizes=sizes,
    )
    _check_disjoint(foreign.index, directory / METADATA_FILE)
    return CheckpointContents(
        directory=directory, index=foreign.index, objects=foreign.objects, paths=foreign.paths
    )


def _open_own(directory: Path, store: Store) -> CheckpointContents:
    if store.nbytes(MANIFEST_FILE) is None:
        raise CorruptedCheckpointError(
            f"{directory}: {MANIFEST_FILE} is missing.", hint="use another checkpoint."
        )
    manifest = _manifest(directory, store)
    for _ in range(_OPEN_TRIES):
        error: CheckpointingException | None = None
        try:
            contents = _read_own(directory, store, manifest)
        except CheckpointingException as e:
            error = e
        # A re-save may have swapped the directory between two of the documents: only what was read
        # under one manifest belongs together.
        now = _manifest(directory, store)
        if now["checkpoint_id"] == manifest["checkpoint_id"]:
            if error is not None:
                raise error
            return contents
        manifest = now
    raise CheckpointNotFoundError(f"{directory} is replaced again and again while it is opened.")


def _read_own(directory: Path, store: Store, manifest: dict[str, Any]) -> CheckpointContents:
    sizes: dict[str, int] = manifest["files"]
    found = {name: store.nbytes(name) for name in sizes}
    problems = [
        f"{name} is missing" if found[name] is None else f"{name} has {found[name]} bytes, not {n}"
        for name, n in sizes.items()
        if found[name] != n
    ]
    if problems:
        raise CorruptedCheckpointError(
            f"{directory}: {'; '.join(problems)}.", hint="use another checkpoint."
        )
    index = CheckpointIndex.from_json(
        store.read(INDEX_FILE, max_nbytes=_MAX_DOCUMENT_NBYTES),
        where=str(directory / INDEX_FILE),
        sizes=sizes,
    )
    _check_disjoint(index, directory / INDEX_FILE)
    return CheckpointContents(
        directory=directory,
        checkpoint_id=manifest["checkpoint_id"],
        world_size=manifest["world_size"],
        index=index,
        common=store.read(COMMON_FILE, max_nbytes=_MAX_DOCUMENT_NBYTES),
    )


def _check_disjoint(index: CheckpointIndex, where: Path) -> None:
    """Raise if two chunks of a tensor share an element: counting elements would then prove nothing.

    Raises:
        CorruptedCheckpointError: Naming the keys.
    """
    keys = [key for key, t in index.tensors.items() if overlaps([c.box for c in t.chunks])]
    if keys:
        raise CorruptedCheckpointError(f"{where}: chunks overlap in {shortened(keys)}.")


def _manifest(directory: Path, store: Store) -> dict[str, Any]:
    where = directory / MANIFEST_FILE
    try:
        document = json.loads(store.read(MANIFEST_FILE, max_nbytes=_MAX_DOCUMENT_NBYTES))
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
    return {"files": files, "world_size": world_size, "checkpoint_id": checkpoint_id}
