"""Tensors taken out of a checkpoint that is already there.

Here: a checkpoint without some of its tensors, made of links and published in one step. Not here:
whole checkpoints (``storage.commit.remove_tree``). Runs in one process.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from dist_ckpt._formats.documents import (
    INDEX_FILE,
    MANIFEST_FILE,
    MAX_DOCUMENT_NBYTES,
    METADATA_FILE,
    check_unchanged,
    files_of_checkpoint,
    read_manifest,
    write_documents,
)
from dist_ckpt._formats.opening import open_contents
from dist_ckpt._formats.torch_dist.contents import index_documents
from dist_ckpt._formats.verification import VerifiedStore
from dist_ckpt._sharding.chunks import table_of
from dist_ckpt.core import CONFIG_FNAME, maybe_load_config
from dist_ckpt.errors import CheckpointNotFoundError
from dist_ckpt.storage import open_store
from dist_ckpt.storage.commit import Attempt
from dist_ckpt.storage.trees import link_files

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from dist_ckpt._formats.documents import CheckpointContents

__all__ = ["remove_tensors"]

logger = logging.getLogger(__name__)

_OBJECT_SUFFIX = ".pt"
"""Sharded objects that zarr v2 keeps for Megatron-Core, in the folder of their key."""


def remove_tensors(directory: Path, key_prefix: str) -> None:
    """Replace the checkpoint by one without the tensors whose key starts with ``key_prefix``.

    At every instant the checkpoint is whole: with all of them, or with none.

    Raises:
        CheckpointNotFoundError: No checkpoint of ours: those of others are left as they are. Or it
            was replaced meanwhile.
        CorruptedCheckpointError: A document is not as it was written.
    """
    contents = open_contents(directory)
    if not contents.checkpoint_id:
        raise CheckpointNotFoundError(
            f"{directory} was not written by this library; tensors are removed from our own "
            "checkpoints only."
        )
    doomed = {
        key
        for key, one in contents.index.tensors.items()
        if one.role == "tensor" and key.startswith(key_prefix)
    }
    if not doomed:
        logger.warning("%s: no tensor's key starts with %r", directory, key_prefix)
        return
    attempt = Attempt.begin(directory, None)
    try:
        try:
            _fill(attempt, contents, doomed)
        finally:
            # What was read and linked is of one save only if that still stands there; and what was
            # replaced meanwhile is no damage.
            check_unchanged(contents)
        attempt.publish(old_files=files_of_checkpoint(attempt.target))
    except BaseException:
        attempt.abort()
        raise


def _fill(attempt: Attempt, contents: CheckpointContents, doomed: set[str]) -> None:
    """Make the new checkpoint in the attempt: links to the files that are still needed."""
    old = contents.directory
    # What is written anew gets new checksums: damage must not get them too.
    store, config = VerifiedStore(open_store(old), contents.files, old), maybe_load_config(old)
    if config is None:
        raise CheckpointNotFoundError(f"{old} was removed while it was read.")
    documents = _documents(store, contents, doomed)
    kept = {k: t for k, t in contents.index.tensors.items() if k not in doomed}
    unneeded = {c.file for k in doomed for c in contents.index.tensors[k].chunks}
    unneeded -= {chunk.file for tensor in kept.values() for chunk in tensor.chunks}
    manifest = read_manifest(old)
    files = {
        name: found
        for name, found in contents.files.items()
        if name not in documents and not _is_below(name, unneeded)
    }
    link_files(old, attempt.directory, files)
    manifest = replace(manifest, files=files, checkpoint_id=attempt.checkpoint_id)
    write_documents(open_store(attempt.directory), documents, manifest, config)


def _documents(
    store: VerifiedStore, contents: CheckpointContents, doomed: set[str]
) -> Mapping[str, bytes]:
    """Return the documents that tell of tensors, without the doomed ones."""
    if contents.backend[0] == "zarr":
        from dist_ckpt._formats.zarr.index import zarr_index_without  # noqa: PLC0415 - heavy

        index = store.read(INDEX_FILE, max_nbytes=MAX_DOCUMENT_NBYTES)
        return {INDEX_FILE: zarr_index_without(index, doomed)}
    kept = {k: t for k, t in contents.index.tensors.items() if k not in doomed}
    has_metadata = METADATA_FILE in contents.files or METADATA_FILE in contents.absent
    return index_documents(table_of(kept), dcp_metadata=has_metadata)


def _is_below(name: str, unneeded: set[str]) -> bool:
    """Whether ``name`` is one of the files, or lies in one of the array directories."""
    if name in (MANIFEST_FILE, CONFIG_FNAME) or name in unneeded:
        return True
    if name.endswith(_OBJECT_SUFFIX):  # of an object with the same key: it is kept
        return False
    parts = name.split("/")
    return any("/".join(parts[:n]) in unneeded for n in range(1, len(parts)))
