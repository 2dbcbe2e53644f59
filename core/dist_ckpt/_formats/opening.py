"""A checkpoint directory, recognised and indexed.

Here: whose checkpoint it is and which format reads its index. Not here: how an index is written or
read (``torch_dist.contents``, ``zarr``), the shared documents (``_formats.documents``). Runs on
rank 0; all ranks get its result.
"""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING

from dist_ckpt._formats.documents import (
    COMMON_FILE,
    INDEX_FILE,
    MANIFEST_FILE,
    MAX_DOCUMENT_NBYTES,
    METADATA_FILE,
    PACKED_INDEX_FILE,
    CheckpointContents,
    Manifest,
    read_manifest,
)
from dist_ckpt._formats.manifest import ManifestFiles
from dist_ckpt._formats.torch_dist.contents import open_foreign
from dist_ckpt._formats.verification import VerifiedStore, check_data, check_files
from dist_ckpt._sharding.coverage import overlaps
from dist_ckpt._sharding.index import CheckpointIndex
from dist_ckpt.core import CONFIG_FNAME, maybe_load_config
from dist_ckpt.errors import (
    CheckpointingException,
    CheckpointNotFoundError,
    CorruptedCheckpointError,
    IncompleteCheckpointError,
)
from dist_ckpt.storage import open_store
from dist_ckpt.storage.paths import exists, is_directory, sizes_below
from dist_ckpt.validation import shortened

if TYPE_CHECKING:
    from pathlib import Path

    from dist_ckpt.core import CheckpointingConfig
    from dist_ckpt.storage import Store

__all__ = ["open_contents", "open_sharded"]

logger = logging.getLogger(__name__)

COMMON_BACKEND = "json"
"""In ``metadata.json``: the checkpoint is ours, so that our other documents must be there."""
_OPEN_TRIES = 8
_TORCH_DIST = ("torch_dist", 1)
_ZARR = {("zarr", 1), ("zarr", 2)}
_INDICES = (PACKED_INDEX_FILE, INDEX_FILE)
_OF_OURS = (MANIFEST_FILE, *_INDICES)
"""Only checkpoints of ours have one of these."""


def open_contents(directory: Path) -> CheckpointContents:
    """Recognise and index the checkpoint in ``directory``.

    Raises:
        CheckpointNotFoundError: No checkpoint there.
        IncompleteCheckpointError: One that was never committed.
        CorruptedCheckpointError: A document or a file is missing, cut short or unreadable.
    """
    if not is_directory(directory):
        what = "is a file" if exists(directory) else "does not exist"
        raise CheckpointNotFoundError(f"Checkpoint directory {directory} {what}.")
    store = open_store(directory)
    config = maybe_load_config(directory)
    if config is None:
        return _open_without_marker(directory, store)
    own = any(store.nbytes(name) is not None for name in _OF_OURS)
    if own or config.common_backend == COMMON_BACKEND:
        return _open_own(directory, store, config)
    return _open_others(directory, config)


def open_sharded(directory: Path) -> CheckpointContents:
    """Index the sharded part in ``directory``, committed or not: for strategies on their own.

    Raises:
        CheckpointingException: As ``open_contents``.
    """
    store = open_store(directory)
    indices = [name for name in _INDICES if store.nbytes(name) is not None]
    if store.nbytes(CONFIG_FNAME) is not None or not indices:
        return open_contents(directory)
    sizes = sizes_below(directory)
    backend = _TORCH_DIST if PACKED_INDEX_FILE in sizes else ("zarr", 2)
    index = _read_index(directory, store, backend, sizes)
    return CheckpointContents(directory=directory, backend=backend, index=index)


def _open_without_marker(directory: Path, store: Store) -> CheckpointContents:
    names = store.list()
    ours = [name for name in (*_OF_OURS, COMMON_FILE) if name in names]
    if METADATA_FILE in names and not ours:
        return _checked(open_foreign(directory))
    if ours or any(name.endswith(".distcp") for name in names):
        raise IncompleteCheckpointError(
            f"{directory} holds data but no commit marker ({CONFIG_FNAME}, or {METADATA_FILE} if "
            "torch.distributed.checkpoint wrote it): its save never finished, or it was not copied "
            "as a whole.",
            hint="load an older checkpoint, or copy it again: `cp ckpt/*` leaves hidden files out.",
        )
    raise CheckpointNotFoundError(
        f"{directory} is not a distributed checkpoint: no {CONFIG_FNAME} and no {METADATA_FILE}."
    )


def _open_others(directory: Path, config: CheckpointingConfig) -> CheckpointContents:
    """Open a checkpoint that another library wrote, with a marker as Megatron-Core's."""
    backend = (config.sharded_backend, config.sharded_backend_version)
    if backend == _TORCH_DIST:
        return _checked(open_foreign(directory))
    if backend in _ZARR:
        from dist_ckpt._formats.zarr.foreign import open_foreign_zarr  # noqa: PLC0415 - heavy

        return _checked(open_foreign_zarr(directory))
    return CheckpointContents(
        directory=directory,
        backend=backend,
        common_backend=(config.common_backend, config.common_backend_version),
        index=CheckpointIndex({}),
        is_indexed=False,
    )


def _open_own(directory: Path, store: Store, config: CheckpointingConfig) -> CheckpointContents:
    if store.nbytes(MANIFEST_FILE) is None:
        raise CorruptedCheckpointError(
            f"{directory}: {MANIFEST_FILE} is missing.", hint="use another checkpoint."
        )
    manifest = read_manifest(directory)
    for _ in range(_OPEN_TRIES):
        error: CheckpointingException | None = None
        try:
            # Again: the marker that was seen first may be of the checkpoint before this one.
            config = maybe_load_config(directory) or config
            contents = _read_own(directory, store, manifest, config)
        except CheckpointingException as e:
            error = e
        # A re-save may have swapped the directory between two of the documents: only what was read
        # under one manifest belongs together.
        now = read_manifest(directory, manifest)
        if now.checkpoint_id == manifest.checkpoint_id:
            if error is not None:
                raise error
            return contents
        manifest = now
    raise CheckpointNotFoundError(f"{directory} is replaced again and again while it is opened.")


def _read_own(
    directory: Path, store: Store, manifest: Manifest, config: CheckpointingConfig
) -> CheckpointContents:
    backend = (config.sharded_backend, config.sharded_backend_version)
    # DCP's document repeats our index, and our readers do not need it. A strategy of another
    # package may need a file of this name.
    is_spare = backend == _TORCH_DIST and PACKED_INDEX_FILE in manifest.files
    optional = frozenset({METADATA_FILE} if is_spare else ())
    absent = check_files(directory, manifest, optional=optional)
    if absent:
        _warn_of_absent_metadata(directory, manifest.checkpoint_id)
    files = ManifestFiles(directory, manifest, absent)
    store = VerifiedStore(store, files.files, directory)
    # The marker was read before the manifest, which knows what it must be.
    check_data(str(directory / CONFIG_FNAME), config.to_json(), manifest.files[CONFIG_FNAME])
    # A third party's format may have files of these names, in which it says something else.
    has_index = backend in {_TORCH_DIST, *_ZARR}
    expected = INDEX_FILE if backend in _ZARR else PACKED_INDEX_FILE
    if has_index and expected not in manifest.files:
        raise CorruptedCheckpointError(f"{directory}: {MANIFEST_FILE} names no {expected}.")
    common = None
    if has_index and COMMON_FILE in manifest.files:
        common = store.read(COMMON_FILE, max_nbytes=MAX_DOCUMENT_NBYTES)
    index = CheckpointIndex({})
    if has_index:
        index = _read_index(
            directory, store, backend, manifest.sizes, checkpoint_id=manifest.checkpoint_id
        )
    return CheckpointContents(
        directory=directory,
        backend=backend,
        common_backend=(config.common_backend, config.common_backend_version),
        checkpoint_id=manifest.checkpoint_id,
        world_size=manifest.world_size,
        index=index,
        is_indexed=has_index,
        common=common,
        files=files,
        absent=absent,
    )


@functools.lru_cache(maxsize=128)  # one warning for a checkpoint, however often it is opened
def _warn_of_absent_metadata(directory: Path, checkpoint_id: str) -> None:
    logger.warning(
        "%s: %s is missing (was it copied by `cp ckpt/* dst/`?). The checkpoint is whole without "
        "it; only tools of torch.distributed.checkpoint need it. "
        "`dist_ckpt.recovery.restore_dcp_metadata` writes it again.",
        directory,
        METADATA_FILE,
    )
    del checkpoint_id  # a part of the cache's key


def _read_index(
    directory: Path,
    store: Store,
    backend: tuple[str, int],
    sizes: dict[str, int],
    *,
    checkpoint_id: str = "",
) -> CheckpointIndex:
    if backend == _TORCH_DIST:
        from dist_ckpt._formats.torch_dist.index_file import read_packed_index  # noqa: PLC0415 - heavy

        return read_packed_index(directory, store, sizes=sizes, checkpoint_id=checkpoint_id)
    from dist_ckpt._formats.zarr.index import zarr_index_from_json  # noqa: PLC0415 - heavy

    data = store.read(INDEX_FILE, max_nbytes=MAX_DOCUMENT_NBYTES)
    index = zarr_index_from_json(data, where=str(directory / INDEX_FILE), sizes=sizes)
    _check_disjoint(index, directory / INDEX_FILE)
    return index


def _checked(contents: CheckpointContents) -> CheckpointContents:
    _check_disjoint(contents.index, contents.directory)
    return contents


def _check_disjoint(index: CheckpointIndex, where: Path) -> None:
    """Raise if two chunks of a tensor share an element: counting elements would then prove nothing.

    Raises:
        CorruptedCheckpointError: Naming the keys.
    """
    keys = [key for key, t in index.tensors.items() if overlaps([c.box for c in t.chunks])]
    if keys:
        raise CorruptedCheckpointError(f"{where}: chunks overlap in {shortened(keys)}.")
