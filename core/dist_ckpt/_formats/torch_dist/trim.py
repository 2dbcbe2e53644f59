"""Our own ``.metadata`` without some of its keys.

Here: one function. Not here: how it is read (``cached_reader``), the index (``_formats.removal``).
Runs in one process.
"""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import TYPE_CHECKING

from torch.distributed.checkpoint import metadata as dcp

from dist_ckpt._formats.torch_dist.cached_reader import read_metadata_file

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

__all__ = ["metadata_without"]


def metadata_without(path: Path, keys: Collection[str]) -> bytes:
    """Return the ``.metadata`` that we wrote at ``path``, without ``keys``.

    Raises:
        CorruptedCheckpointError: It is no metadata.
        UnsafeContentError: It names a class that metadata has no business with.
    """
    metadata = read_metadata_file(path)
    kept = {k: v for k, v in metadata.state_dict_metadata.items() if k not in keys}
    places = {i: v for i, v in (metadata.storage_data or {}).items() if i.fqn not in keys}
    trimmed = replace(
        metadata,
        state_dict_metadata=kept,
        planner_data={key: (key,) for key in kept},
        storage_data=places,
        storage_meta=dcp.StorageMeta(),
    )
    return pickle.dumps(trimmed)
