"""The documents of torch_dist: our index, DCP's ``.metadata``, and checkpoints of other writers.

Here: what the index of a torch_dist checkpoint is made of and read from. Not here: the manifest and
the marker (``_formats.documents``), data files (``write``, ``read``). Runs on rank 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dist_ckpt._formats.documents import (
    INDEX_FILE,
    MAX_DOCUMENT_NBYTES,
    METADATA_FILE,
    CheckpointContents,
)
from dist_ckpt._planning.index import CheckpointIndex, StoredTensor
from dist_ckpt.errors import CorruptedCheckpointError
from dist_ckpt.storage import open_store

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from dist_ckpt._formats.base import WriteResult

__all__ = ["index_documents", "open_foreign", "read_index"]

read_index = CheckpointIndex.from_json


def index_documents(
    results: Sequence[WriteResult], empty: Mapping[str, StoredTensor]
) -> dict[str, bytes]:
    """Return ``index.json``, which we read, and ``.metadata``, which DCP reads."""
    from dist_ckpt._formats.torch_dist.metadata import encode_metadata  # noqa: PLC0415 - heavy

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
    return {
        INDEX_FILE: CheckpointIndex(tensors).to_json(),
        METADATA_FILE: encode_metadata(results, empty),
    }


def open_foreign(directory: Path) -> CheckpointContents:
    """Index a checkpoint that torch's DCP or Megatron-Core wrote.

    Raises:
        CorruptedCheckpointError: ``.metadata`` is missing, or is not what they write.
        UnsafeContentError: It names a class that metadata has no business with.
    """
    from dist_ckpt._formats.torch_dist.metadata import decode_metadata  # noqa: PLC0415 - heavy

    store = open_store(directory)
    if store.nbytes(METADATA_FILE) is None:
        raise CorruptedCheckpointError(f"{directory}: {METADATA_FILE} is missing.")
    sizes = {name: store.nbytes(name) or 0 for name in store.list()}
    foreign = decode_metadata(
        store.read(METADATA_FILE, max_nbytes=MAX_DOCUMENT_NBYTES),
        where=str(directory / METADATA_FILE),
        sizes=sizes,
    )
    return CheckpointContents(
        directory=directory, index=foreign.index, objects=foreign.objects, paths=foreign.paths
    )
