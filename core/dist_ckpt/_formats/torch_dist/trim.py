"""Our own ``.metadata`` without some of its keys.

Here: one function and the restricted unpickler that it needs. Not here: the ``.metadata`` of others
(``metadata``). Runs in one process.
"""

from __future__ import annotations

import io
import pickle
from typing import TYPE_CHECKING

import torch
from torch.distributed.checkpoint import filesystem as dcp_filesystem
from torch.distributed.checkpoint import metadata as dcp

from dist_ckpt._formats.torch_dist.metadata import check_memo
from dist_ckpt.errors import CorruptedCheckpointError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

__all__ = ["metadata_without"]


def metadata_without(data: bytes, keys: Collection[str], *, where: str) -> bytes:
    """Return the ``.metadata`` that we wrote, without ``keys``.

    Args:
        data: The file's bytes.
        keys: Tensors to leave out.
        where: Its path, for errors.

    Raises:
        CorruptedCheckpointError: It is not what we write.
    """
    try:
        check_memo(data)
        metadata = _OwnUnpickler(io.BytesIO(data)).load()
        kept = {k: v for k, v in metadata.state_dict_metadata.items() if k not in keys}
        places = {i: v for i, v in metadata.storage_data.items() if i.fqn not in keys}
        trimmed = dcp.Metadata(
            state_dict_metadata=kept,
            planner_data={key: (key,) for key in kept},
            storage_data=places,
            storage_meta=dcp.StorageMeta(),
            version=metadata.version,
        )
        return pickle.dumps(trimmed)
    except Exception as error:  # a torn pickle makes pickle raise almost anything
        raise CorruptedCheckpointError(
            f"{where}: not metadata of ours ({type(error).__name__}: {error})."
        ) from error


_CLASSES: Mapping[tuple[str, str], object] = {
    **{("torch.distributed.checkpoint.metadata", cls.__name__): cls for cls in (
        dcp.Metadata, dcp.TensorStorageMetadata, dcp.TensorProperties, dcp.ChunkStorageMetadata,
        dcp.MetadataIndex, dcp.StorageMeta,
        dcp._MEM_FORMAT_ENCODING,  # noqa: SLF001 - part of DCP's file format
    )},
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): dcp_filesystem._StorageInfo,  # noqa: SLF001 - same
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,  # noqa: SLF001 - same
}  # fmt: skip


class _OwnUnpickler(pickle.Unpickler):
    """Resolves the names that ``encode_metadata`` writes, and nothing else."""

    def find_class(self, module: str, name: str) -> object:
        if (module, name) in _CLASSES:
            return _CLASSES[module, name]
        value = getattr(torch, name, None) if module == "torch" and name.isidentifier() else None
        if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
            return value
        raise pickle.UnpicklingError(f"{module}.{name}")
