"""Arrays, scalars and dtypes of numpy, and buffers of bytes.

Here: what each turns into, and back. Not here: the table that names them (``table``).
"""

from __future__ import annotations

import array
import io
import re
from typing import Any, Final

import numpy as np
import torch

__all__ = [
    "dump_array",
    "dump_bytes_io",
    "dump_dtype",
    "dump_typed_array",
    "load_array",
    "load_bytes_io",
    "load_dtype",
    "load_scalar",
    "load_typed_array",
]

_INLINE_NBYTES: Final = 4096  # arrays up to here stand in the document, larger ones beside it
_KINDS: Final = frozenset("biufcmMSU")  # numpy kinds without references: nothing to execute
_NAMES: Final = re.compile(
    r"[<>|=]?(b1|[iufc]\d{1,2}|[mM]8(\[\d{0,9}[A-Za-z]{1,2}\])?|[SU]\d{1,9})"
)
_MOST_CHARACTER: Final = 0x10FFFF


def dump_array(value: np.ndarray[Any, Any] | np.generic) -> Any:
    """Return ``[dtype, shape, bytes]``; many bytes as a tensor, which is stored beside."""
    name = value.dtype.str
    if not _is_plain(value.dtype) or np.dtype(name).type is not value.dtype.type:
        return NotImplemented
    flat = np.ascontiguousarray(value).reshape(-1)
    if flat.nbytes <= _INLINE_NBYTES:
        return [name, list(value.shape), flat.tobytes()]
    flat = flat if flat.flags.writeable else flat.copy()  # torch warns of read-only memory
    return [name, list(value.shape), torch.from_numpy(flat.view(np.uint8))]


def _is_plain(dtype: np.dtype[Any]) -> bool:
    return dtype.kind in _KINDS and dtype.itemsize > 0 and _NAMES.fullmatch(dtype.str) is not None


def load_array(payload: list[Any]) -> np.ndarray[Any, Any]:
    """Return the array; its memory is its own."""
    name, shape, raw = payload
    dtype = load_dtype(name) if type(name) is str else None
    if dtype is None or not _is_shape(shape):
        raise ValueError(f"no plain array: dtype {name!r}, shape {shape!r}")
    if type(raw) is bytes:
        value = np.frombuffer(raw, dtype).reshape(shape).copy()
    elif isinstance(raw, torch.Tensor) and raw.dtype == torch.uint8 and raw.dim() == 1:
        value = np.asarray(raw.contiguous().numpy().view(dtype).reshape(shape))
    else:
        raise ValueError("the data of an array is no row of bytes")
    if dtype.kind == "U" and value.size:
        characters = np.ascontiguousarray(value).view(dtype.str[0] + "u4")
        if int(characters.max()) > _MOST_CHARACTER:
            raise ValueError("there is no such character")
    return value


def _is_shape(shape: object) -> bool:
    return type(shape) is list and all(type(n) is int and n >= 0 for n in shape)


def load_scalar(payload: list[Any]) -> Any:
    """Return a scalar of numpy."""
    return load_array(payload)[()]


def dump_dtype(value: np.dtype[Any]) -> Any:
    """Return the name of a plain dtype."""
    return value.str if _is_plain(value) and np.dtype(value.str) == value else NotImplemented


def load_dtype(name: str) -> np.dtype[Any]:
    """Return a plain dtype of numpy."""
    if _NAMES.fullmatch(name) is None:
        raise ValueError(f"no plain array: dtype {name!r}")
    return np.dtype(name)


def dump_typed_array(value: array.array[Any]) -> Any:
    """Return ``[dtype, bytes]`` of an ``array.array``."""
    if value.typecode in ("u", "w"):
        return NotImplemented
    return [value.typecode, np.dtype(value.typecode).str, value.tobytes()]


def load_typed_array(payload: list[Any]) -> array.array[Any]:
    """Return the ``array.array``, whose items must be as large here as where it was written."""
    code, name, raw = payload
    if code in ("u", "w") or np.dtype(code) != load_dtype(name):
        raise ValueError(f"no array of {code!r} as {name!r} here")
    if type(raw) is not bytes:  # a range of any length would be gone through
        raise ValueError("the data of an array is no bytes")
    return array.array(code, raw)


def dump_bytes_io(value: io.BytesIO) -> Any:
    """Return ``[bytes, position]``."""
    if value.closed or vars(value):
        return NotImplemented
    data = value.getvalue()
    if len(data) <= _INLINE_NBYTES:
        return [data, value.tell()]
    return [torch.frombuffer(bytearray(data), dtype=torch.uint8), value.tell()]


def load_bytes_io(payload: list[Any]) -> io.BytesIO:
    """Return the buffer, at its position."""
    raw, position = payload
    if isinstance(raw, torch.Tensor):
        if raw.dtype != torch.uint8 or raw.dim() != 1:
            raise ValueError("the data of a buffer is no row of bytes")
        raw = raw.contiguous().numpy().tobytes()
    if type(raw) is not bytes:
        raise ValueError("the data of a buffer is no bytes")
    value = io.BytesIO(raw)
    value.seek(position)
    return value
