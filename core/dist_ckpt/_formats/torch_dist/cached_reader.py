"""DCP's file reader, with metadata that is unpickled with care and kept while its file is the same.

Here: ``CachedMetadataFileSystemReader`` and ``read_metadata_file``, which give DCP's own classes.
Not here: our index of a checkpoint of others (``metadata``). Called on whatever rank reads; not
collective.

Source of the name: Megatron-Core 0.12 to 0.18.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections import OrderedDict
from pathlib import Path, PosixPath, WindowsPath
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint import filesystem as dcp_filesystem
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint import planner as dcp_planner
from torch.distributed.checkpoint.filesystem import FileSystemReader

from dist_ckpt._formats.manifest import METADATA_FILE
from dist_ckpt._formats.torch_dist.pickle_bounds import check_pickle
from dist_ckpt.errors import CorruptedCheckpointError, UnsafeContentError
from dist_ckpt.storage import open_store
from dist_ckpt.storage.failures import storage_errors
from dist_ckpt.storage.paths import Stamp, stamp_of

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

__all__ = ["CachedMetadataFileSystemReader", "metadata_name", "read_metadata_file"]

_MAX_NBYTES = 1 << 31


def metadata_name(rank: int | None = None) -> str:
    """Return the name of a checkpoint's metadata, or of what a rank writes without collectives."""
    return METADATA_FILE if rank is None else f"__{rank}{METADATA_FILE}"


class CachedMetadataFileSystemReader(FileSystemReader):
    """Reads ``.metadata`` once for each state of the file.

    The cache belongs to the object, and is asked for the file's path, time, size and inode: two
    checkpoints never share it, and a replaced one is read again.

    Args:
        path: Directory of the checkpoint.
        cache_metadata: Whether to keep anything.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        cache_metadata: bool = True,  # noqa: FBT001, FBT002 - the lineage's signature
    ) -> None:
        """Remember the path; nothing is read yet."""
        super().__init__(path)
        self.cache_metadata = cache_metadata
        self._cached: tuple[tuple[str, Stamp], dcp.Metadata] | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> dcp.Metadata:  # noqa: ARG002 - DCP's signature
        """Return the metadata. What is returned is the caller's: the cache keeps its own.

        Raises:
            CheckpointNotFoundError: There is no such file.
            UnsafeContentError: It names a class that metadata has no business with.
            CorruptedCheckpointError: It is no metadata.
        """
        path = Path(self.path) / metadata_name(kwargs.get("rank"))
        with storage_errors("read", path):
            identity = str(path), stamp_of(path)
        if self._cached is None or self._cached[0] != identity:
            metadata = read_metadata_file(path)
            self._cached = (identity, metadata) if self.cache_metadata else None
        else:
            metadata = self._cached[1]
        given = copy.copy(metadata)
        given.state_dict_metadata = dict(metadata.state_dict_metadata)
        given.storage_meta = copy.copy(getattr(metadata, "storage_meta", None)) or dcp.StorageMeta()
        given.storage_meta.load_id = self.load_id
        return given


def read_metadata_file(path: Path) -> dcp.Metadata:
    """Return the metadata in a file, as DCP's object, with a restricted unpickler.

    Raises:
        CheckpointNotFoundError: There is no such file.
        UnsafeContentError: It names a class that metadata has no business with.
        CorruptedCheckpointError: It is no metadata.
    """
    data = open_store(path.parent).read(path.name, max_nbytes=_MAX_NBYTES)
    try:
        check_pickle(data)
        metadata = _Unpickler(io.BytesIO(data), str(path)).load()
    except UnsafeContentError:
        raise
    except Exception as error:  # a torn pickle makes pickle raise almost anything
        raise CorruptedCheckpointError(
            f"{path}: not the metadata of a distributed checkpoint "
            f"({type(error).__name__}: {error})."
        ) from error
    if not isinstance(metadata, dcp.Metadata) or not isinstance(metadata.state_dict_metadata, dict):
        raise CorruptedCheckpointError(
            f"{path}: expected Metadata, found {type(metadata).__name__}."
        )
    return metadata


_METADATA, _PLANNER, _FILESYSTEM = (
    f"torch.distributed.checkpoint.{name}" for name in ("metadata", "planner", "filesystem")
)
_ALLOWED: Mapping[tuple[str, str], object] = {
    **{(_METADATA, cls.__name__): cls for cls in (
        dcp.Metadata, dcp.TensorStorageMetadata, dcp.BytesStorageMetadata, dcp.TensorProperties,
        dcp.ChunkStorageMetadata, dcp.MetadataIndex, dcp.StorageMeta,
        dcp._MEM_FORMAT_ENCODING,  # noqa: SLF001 - part of DCP's file format
    )},
    **{(_PLANNER, cls.__name__): cls for cls in (
        dcp_planner.SavePlan, dcp_planner.WriteItem, dcp_planner.WriteItemType,
        dcp_planner.TensorWriteData, dcp_planner.BytesIOWriteData,
    )},
    (_FILESYSTEM, "_StorageInfo"): dcp_filesystem._StorageInfo,  # noqa: SLF001 - same
    (_FILESYSTEM, "_StoragePrefix"): dcp_filesystem._StoragePrefix,  # noqa: SLF001 - same
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,  # noqa: SLF001 - same
    ("collections", "OrderedDict"): OrderedDict,
    ("pathlib", "PosixPath"): PosixPath,
    ("pathlib", "WindowsPath"): WindowsPath,
}  # fmt: skip


class _Unpickler(pickle.Unpickler):
    """Resolves the names that DCP's metadata and plans consist of, and nothing else."""

    def __init__(self, file: io.BytesIO, where: str) -> None:
        super().__init__(file)
        self._where = where

    def find_class(self, module: str, name: str) -> object:
        if (module, name) in _ALLOWED:
            return _ALLOWED[module, name]
        if module == "torch" and name.isidentifier():
            value = getattr(torch, name, None)
            if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
                return value
        raise UnsafeContentError(
            f"{self._where} names {module}.{name}, which checkpoint metadata does not need.",
            hint="it may be hostile; it was not loaded.",
        )
