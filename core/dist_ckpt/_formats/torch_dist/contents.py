"""The documents of torch_dist: our index, DCP's ``.metadata``, and checkpoints of other writers.

Here: what the index of a torch_dist checkpoint is made of and read from. Not here: the manifest and
the marker (``_formats.documents``), data files (``write``, ``read``). Runs on rank 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dist_ckpt._formats.documents import (
    MAX_DOCUMENT_NBYTES,
    METADATA_FILE,
    PACKED_INDEX_FILE,
    CheckpointContents,
)
from dist_ckpt.errors import CorruptedCheckpointError
from dist_ckpt.storage import open_store

if TYPE_CHECKING:
    from pathlib import Path

    from dist_ckpt._sharding.chunks import ChunkTable

__all__ = ["index_documents", "open_foreign"]


def index_documents(table: ChunkTable, *, dcp_metadata: bool = True) -> dict[str, bytes]:
    """Return ``index.bin``, which we read, and ``.metadata``, which DCP reads.

    Args:
        table: Where each chunk lies, tensors without elements included.
        dcp_metadata: Whether there is to be a ``.metadata``.

    Raises:
        StorageError: The index would be too large to be read.
    """
    from dist_ckpt._formats.torch_dist.dcp_metadata import encode_metadata  # noqa: PLC0415 - heavy
    from dist_ckpt._sharding.packing import pack_index  # noqa: PLC0415 - heavy

    index = pack_index(table)
    documents = {PACKED_INDEX_FILE: index}
    if dcp_metadata:
        documents[METADATA_FILE] = encode_metadata(index)
    return documents


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
