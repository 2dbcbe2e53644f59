"""``index.json`` of a zarr checkpoint: which array each key is, and what of it is written.

Here: our index, written and believed by nobody unchecked. Not here: arrays' own metadata
(``metadata``). Written by rank 0 at the end of a save; read by rank 0 at the start of a load.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from dist_ckpt._formats.zarr.metadata import array_dtype, metadata_name
from dist_ckpt._sharding.index import CheckpointIndex, Encoding, StoredChunk, StoredTensor
from dist_ckpt._sharding.shard_info import dtype_from_name
from dist_ckpt.box import Box
from dist_ckpt.errors import CorruptedCheckpointError
from dist_ckpt.storage.base import checked_name
from dist_ckpt.storage.sealed import sealed, unsealed

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from dist_ckpt._formats.base import WriteResult

__all__ = ["zarr_index_from_json", "zarr_index_to_json", "zarr_index_without"]

_VERSION = 1
_FORMATS: dict[str, tuple[int, Encoding]] = {"zarr2": (2, "zarr2"), "zarr3": (3, "zarr3")}
_MALFORMED = (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError)


def zarr_index_to_json(
    results: Sequence[WriteResult],
    empty: Mapping[str, StoredTensor],
    paths: Mapping[str, str],
    zarr_format: int,
) -> bytes:
    """Return the index of what was written, as a sealed document.

    Args:
        results: The boxes that all ranks wrote; no two of a key overlap.
        empty: Tensors without elements.
        paths: The array directory of each key.
        zarr_format: 2 or 3.

    A tensor that was written in full is one box: how it is cut stands in the array's metadata.
    """
    boxes: dict[str, list[Box]] = defaultdict(list)
    told = {key: (tensor.dtype, tensor.shape, tensor.role) for key, tensor in empty.items()}
    for result in results:
        info = result.info
        boxes[info.key].append(result.chunk.box)
        told[info.key] = info.dtype, info.global_shape, info.role
    tensors = {}
    for key, (dtype, shape, role) in sorted(told.items()):
        written = sorted(boxes[key])
        if written and sum(box.numel for box in written) == math.prod(shape):
            written = [Box((0,) * len(shape), shape)]
        tensors[key] = {
            "dtype": dtype,
            "shape": shape,
            "role": role,
            "path": paths[key],
            "boxes": [[box.offset, box.shape] for box in written],
        }
    document = {"version": _VERSION, "format": f"zarr{zarr_format}", "tensors": tensors}
    return sealed(document)


def zarr_index_without(data: bytes, keys: Collection[str]) -> bytes:
    """Return an index of ours, which has been believed before, without some of its keys."""
    document = unsealed(data, where="index")
    tensors = {key: entry for key, entry in document["tensors"].items() if key not in keys}
    told = {name: document[name] for name in ("version", "format")}
    return sealed({**told, "tensors": tensors})


def zarr_index_from_json(data: bytes, *, where: str, sizes: Mapping[str, int]) -> CheckpointIndex:
    """Return the index of ``data``, believing nothing: every name, size and offset is checked.

    Args:
        data: The file's bytes.
        where: Its path, for errors.
        sizes: The files of the manifest with their sizes; each array's metadata must be among them.

    Raises:
        CorruptedCheckpointError: Anything is not as it must be.
    """
    document = unsealed(data, where=where)
    try:
        if document["version"] != _VERSION:
            raise CorruptedCheckpointError(
                f"{where}: index version {document['version']!r}; this release reads {_VERSION}.",
                hint="upgrade dist-ckpt.",
            )
        zarr_format, encoding = _FORMATS[document["format"]]
        tensors, paths = {}, set()
        nbytes: dict[str, int] = defaultdict(int)
        for name, n in sizes.items():
            nbytes[name.rpartition("/")[0]] += n
        for key, entry in document["tensors"].items():
            path = checked_name(entry["path"])
            if f"{path}/{metadata_name(zarr_format)}" not in sizes or path in paths:
                raise ValueError(f"{key!r}: {path!r} is no array of its own in the manifest")
            paths.add(path)
            tensors[key] = _tensor(key, entry, path, encoding)
            # Ours are not compressed: nothing is allocated that the files cannot fill.
            wanted = sum(chunk.nbytes for chunk in tensors[key].chunks)
            if nbytes[path] < wanted:
                raise ValueError(f"{key!r}: {nbytes[path]} bytes for {wanted} of the tensor")
    except _MALFORMED as error:
        raise CorruptedCheckpointError(
            f"{where}: not an index of ours ({type(error).__name__}: {error})."
        ) from error
    return CheckpointIndex(tensors)


def _tensor(key: str, entry: dict[str, Any], path: str, encoding: Encoding) -> StoredTensor:
    shape, dtype, role = _sizes(entry["shape"]), entry["dtype"], entry["role"]
    array_dtype(dtype)
    if role not in ("tensor", "object", "part"):
        raise ValueError(f"{key!r}: unknown role {role!r}")
    if role == "object" and dtype != "uint8":
        raise ValueError(f"{key!r}: an object is stored as uint8, not {dtype}")
    boxes = [Box(_sizes(offset), _sizes(extent)) for offset, extent in entry["boxes"]]
    outside = [box for box in boxes if not box.within(shape) or not box.numel]
    if outside:
        raise ValueError(f"{key!r}: {outside[0]} does not fit shape {shape}")
    stored = sum(box.numel for box in boxes)
    if stored > math.prod(shape):
        raise ValueError(f"{key!r}: {stored} elements are stored of {math.prod(shape)}")
    itemsize = dtype_from_name(dtype).itemsize
    chunks = (StoredChunk(box, path, 0, box.numel * itemsize, encoding) for box in boxes)
    return StoredTensor(dtype, shape, tuple(chunks), role)


def _sizes(values: Any) -> tuple[int, ...]:
    result = tuple(values)
    if not all(type(n) is int and 0 <= n < 1 << 63 for n in result):
        raise ValueError(f"expected sizes, found {values!r}")
    return result
