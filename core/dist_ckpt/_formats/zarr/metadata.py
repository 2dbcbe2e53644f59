"""The documents in which zarr describes an array: ``.zarray`` (v2) and ``zarr.json`` (v3).

Here: names of dtypes, and both documents, written and believed. Not here: our index (``index``),
chunks (``arrays``). Formats: the zarr v2 and v3 specifications; names of dtypes that they lack are
TensorStore's, which Megatron-Core used too.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from dist_ckpt._sharding.shard_info import dtype_from_name
from dist_ckpt.errors import CorruptedCheckpointError
from dist_ckpt.storage.sealed import parse_document

if TYPE_CHECKING:
    from dist_ckpt._formats.zarr.grid import Grid

__all__ = [
    "MAX_METADATA_NBYTES",
    "array_dtype",
    "array_metadata",
    "check_metadata",
    "encode_metadata",
    "metadata_name",
    "parse_metadata",
    "torch_dtype",
]

MAX_METADATA_NBYTES = 1 << 20

_V2_NAMES = {
    "bool": "|b1",
    "int8": "|i1",
    "int16": "<i2",
    "int32": "<i4",
    "int64": "<i8",
    "uint8": "|u1",
    "uint16": "<u2",
    "uint32": "<u4",
    "uint64": "<u8",
    "float16": "<f2",
    "float32": "<f4",
    "float64": "<f8",
    "complex64": "<c8",
    "complex128": "<c16",
    "bfloat16": "bfloat16",
    "float8_e4m3fn": "float8_e4m3fn",
    "float8_e4m3fnuz": "float8_e4m3fnuz",
    "float8_e5m2": "float8_e5m2",
    "float8_e5m2fnuz": "float8_e5m2fnuz",
}
"""Dtype in numpy, torch and zarr v3 -> the same in zarr v2."""

_TORCH_NAMES = {
    **{name.lstrip("<|"): dtype for dtype, name in _V2_NAMES.items()},
    **{dtype: dtype for dtype in _V2_NAMES},
}


def array_dtype(name: str) -> str:
    """Return the dtype of the array that stores tensors of a torch dtype.

    The same one, or for dtypes that zarr has no name for the unsigned integer of the same width,
    which then holds the bits.

    Raises:
        ValueError: There is no such torch dtype, or it is no plain one.
    """
    if name in _V2_NAMES:
        return name
    integer = f"uint{8 * dtype_from_name(name).itemsize}"
    if integer not in _V2_NAMES or name.startswith("q"):  # quantised: more than its elements
        raise ValueError(f"no array can hold the bits of {name}")
    return integer


def torch_dtype(zarr_name: object) -> str:
    """Return the torch dtype of a name in zarr v2, in either byte order, or in v3.

    Raises:
        ValueError: Torch has no such dtype.
    """
    name = zarr_name.lstrip("<>|") if isinstance(zarr_name, str) else ""
    if name not in _TORCH_NAMES:
        raise ValueError(f"dtype {zarr_name!r}, which torch does not have")
    return _TORCH_NAMES[name]


def metadata_name(zarr_format: int) -> str:
    """Return the name of the document in the array's directory."""
    return ".zarray" if zarr_format == 2 else "zarr.json"  # noqa: PLR2004 - of zarr


def array_metadata(
    shape: tuple[int, ...], dtype: str, grid: Grid, zarr_format: int
) -> dict[str, Any]:
    """Return the document of an array for tensors of the torch dtype ``dtype``.

    Chunks are not compressed. v2 is as Megatron-Core wrote it; v3 has shards, whose index carries a
    checksum, and chunk names without ``/``, so that an array is one directory.
    """
    name = array_dtype(dtype)
    if zarr_format == 2:  # noqa: PLR2004 - of zarr
        return {
            "chunks": list(grid.cell),
            "compressor": None,
            "dtype": _V2_NAMES[name],
            "fill_value": None,
            "filters": None,
            "order": "C",
            "shape": list(shape),
            "zarr_format": 2,
        }
    to_bytes = {"name": "bytes", "configuration": {"endian": "little"}}
    shards = {
        "chunk_shape": list(grid.inner),
        "codecs": [to_bytes],
        "index_codecs": [to_bytes, {"name": "crc32c"}],
        "index_location": "end",
    }
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(shape),
        "data_type": name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(grid.cell)}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
        "fill_value": _zero(name),
        "codecs": [{"name": "sharding_indexed", "configuration": shards}],
        "attributes": {},
    }


def _zero(name: str) -> Any:
    if name.startswith("complex"):
        return [0.0, 0.0]
    if "float" in name:
        return 0.0
    return False if name == "bool" else 0


def encode_metadata(document: dict[str, Any]) -> bytes:
    """Return the document as it is stored."""
    return json.dumps(document).encode("ascii")


def parse_metadata(data: bytes, where: str) -> dict[str, Any]:
    """Return the document in ``data``.

    Raises:
        CorruptedCheckpointError: It is no JSON object as ``parse_document`` wants it, or too long.
    """
    if len(data) > MAX_METADATA_NBYTES:
        raise CorruptedCheckpointError(
            f"{where}: not the metadata of an array: longer than {MAX_METADATA_NBYTES} bytes."
        )
    try:
        return parse_document(data, where=where)
    except CorruptedCheckpointError as error:
        raise CorruptedCheckpointError(f"{error} It should be the metadata of an array.") from error


def check_metadata(
    document: dict[str, Any], key: str, dtype: str, shape: tuple[int, ...], where: str
) -> None:
    """Raise unless the array on disk is the one that the index tells of.

    Raises:
        CorruptedCheckpointError: Naming what is expected and what is found.
    """
    is_v2 = document.get("zarr_format") == 2  # noqa: PLR2004 - of zarr
    try:
        found = (
            torch_dtype(document.get("dtype" if is_v2 else "data_type")),
            tuple(document["shape"]),
        )
    except (ValueError, TypeError, KeyError) as error:
        raise CorruptedCheckpointError(
            f"{key!r}: {where} describes no array that can be read ({error})."
        ) from error
    expected = (array_dtype(dtype), shape)
    if found != expected:
        raise CorruptedCheckpointError(
            f"{key!r}: {where} describes an array of {found[0]} {found[1]}; the index expects "
            f"{expected[0]} {expected[1]}.",
            hint="use another checkpoint.",
        )
