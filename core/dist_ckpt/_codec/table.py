"""The table of types that are written without pickle: one rule a class.

Here: what each class turns into, and back. Not here: nesting, paths and errors (``encoder``,
``decoder``); dicts and tensors, which need them. Pure functions, called by those two.
"""

from __future__ import annotations

import argparse
import base64
import collections
import datetime as dt
import decimal
import fractions
import io
import os
import pathlib
import types
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from dist_ckpt.types import ForeignValue

__all__ = ["BY_CLASS", "BY_TAG", "FACTORIES", "NUMPY_SCALAR", "Rule", "from_base64", "to_base64"]

_INLINE_NBYTES: Final = 4096  # arrays up to here stand in the document, larger ones beside it
_ARRAY_KINDS: Final = frozenset("biufcmM")  # numpy kinds without references: nothing to execute
FACTORIES: Final[Mapping[str, type]] = types.MappingProxyType(
    {factory.__name__: factory for factory in (list, dict, set, int, float)}
)
"""What a ``defaultdict`` may make its defaults with, by name."""


@dataclass(frozen=True, slots=True)
class Rule:
    """How one class is written: as ``tag`` with what ``dump`` returns, which has type ``payload``.

    ``dump`` returns something simpler, which is encoded in turn, or ``NotImplemented`` when this
    value of the class cannot be written so.
    """

    tag: str
    cls: type
    payload: type
    dump: Callable[[Any], Any]
    load: Callable[[Any], Any]


def _dump_moment(value: dt.datetime | dt.time) -> Any:
    zone, offset = value.tzinfo, None
    if zone is not None:
        offset = zone.utcoffset(None) if type(zone) is dt.timezone else None
        if offset is None or zone.tzname(None) != dt.timezone(offset).tzname(None):
            return NotImplemented  # a zone with rules or a name of its own
    # The offset goes apart: fromisoformat of python 3.11 loses one below a second.
    return [value.replace(tzinfo=None).isoformat(), value.fold, offset]


def _load_moment(cls: type[Any]) -> Callable[[list[Any]], Any]:
    def load(payload: list[Any]) -> Any:
        text, fold, offset = payload
        zone = None if offset is None else dt.timezone(offset)
        return cls.fromisoformat(text).replace(fold=fold, tzinfo=zone)

    return load


def _dump_array(value: np.ndarray[Any, Any] | np.generic) -> Any:
    name = value.dtype.str
    if value.dtype.kind not in _ARRAY_KINDS or np.dtype(name).type is not value.dtype.type:
        return NotImplemented
    flat = np.ascontiguousarray(value).reshape(-1)
    if flat.nbytes <= _INLINE_NBYTES:
        return [name, list(value.shape), flat.tobytes()]
    flat = flat if flat.flags.writeable else flat.copy()  # torch warns of read-only memory
    return [name, list(value.shape), torch.from_numpy(flat.view(np.uint8))]


def _load_array(payload: list[Any]) -> np.ndarray[Any, Any]:
    name, shape, raw = payload
    dtype = np.dtype(name)
    if dtype.kind not in _ARRAY_KINDS or min(shape, default=0) < 0:
        raise ValueError(f"no plain array: dtype {name!r}, shape {shape!r}")
    if type(raw) is bytes:
        return np.frombuffer(raw, dtype).reshape(shape).copy()
    if raw.dtype != torch.uint8 or raw.dim() != 1:
        raise ValueError("the data of an array is no row of bytes")
    return np.asarray(raw.contiguous().numpy().view(dtype).reshape(shape))


def _load_scalar(payload: list[Any]) -> Any:
    return _load_array(payload)[()]


def _load_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if type(dtype) is not torch.dtype:
        raise ValueError(f"torch.{name} is no dtype")
    return dtype


def _dump_bytes_io(value: io.BytesIO) -> Any:
    if value.closed or vars(value):
        return NotImplemented
    data = value.getvalue()
    if len(data) <= _INLINE_NBYTES:
        return [data, value.tell()]
    return [torch.frombuffer(bytearray(data), dtype=torch.uint8), value.tell()]


def _load_bytes_io(payload: list[Any]) -> io.BytesIO:
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


def _load_range(payload: list[Any]) -> range:
    return range(*payload)


def _load_slice(payload: list[Any]) -> slice:
    start, stop, step = payload
    return slice(start, stop, step)


def _load_complex(payload: list[Any]) -> complex:
    real, imag = payload
    return complex(float(real), float(imag))


def _load_parameter(payload: list[Any]) -> torch.nn.Parameter:
    tensor, requires_grad = payload
    return torch.nn.Parameter(tensor, requires_grad=requires_grad)


def _load_deque(payload: list[Any]) -> collections.deque[Any]:
    maxlen, items = payload
    return collections.deque(items, maxlen)


def _load_attributes(cls: type[Any]) -> Callable[[dict[str, Any]], Any]:
    def load(payload: dict[str, Any]) -> Any:
        value = cls()
        vars(value).update(payload)
        return value

    return load


def to_base64(data: bytes | bytearray) -> str:
    return base64.b64encode(data).decode("ascii")


def from_base64(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


_POSIX: Final = pathlib.PosixPath if os.name == "posix" else pathlib.PurePosixPath
_WINDOWS: Final = pathlib.WindowsPath if os.name == "nt" else pathlib.PureWindowsPath
NUMPY_SCALAR: Final = Rule("$scalar", np.generic, list, _dump_array, _load_scalar)
_TABLE: Final = (
    Rule("$str", str, bytes, lambda x: x.encode("utf-8", "surrogatepass"),
         lambda x: x.decode("utf-8", "surrogatepass")),
    Rule("$int", int, str, hex, lambda x: int(x, 16)),
    Rule("$float", float, str, repr, float),
    Rule("$complex", complex, list, lambda x: [repr(x.real), repr(x.imag)], _load_complex),
    Rule("$bytes", bytes, str, to_base64, from_base64),
    Rule("$bytearray", bytearray, str, to_base64, lambda x: bytearray(from_base64(x))),
    Rule("$bytes_io", io.BytesIO, list, _dump_bytes_io, _load_bytes_io),
    Rule("$tuple", tuple, list, list, tuple),
    Rule("$set", set, list, list, set),
    Rule("$frozenset", frozenset, list, list, frozenset),
    Rule("$deque", collections.deque, list, lambda x: [x.maxlen, list(x)], _load_deque),
    Rule("$range", range, list, lambda x: [x.start, x.stop, x.step], _load_range),
    Rule("$slice", slice, list, lambda x: [x.start, x.stop, x.step], _load_slice),
    Rule("$namespace", argparse.Namespace, dict, lambda x: dict(vars(x)),
         _load_attributes(argparse.Namespace)),
    Rule("$simple_namespace", types.SimpleNamespace, dict, lambda x: dict(vars(x)),
         _load_attributes(types.SimpleNamespace)),
    Rule("$foreign", ForeignValue, list, lambda x: [x.type_name, *x.arguments],
         lambda x: ForeignValue(*x)),
    Rule("$posix_path", pathlib.PosixPath, str, str, _POSIX),
    Rule("$windows_path", pathlib.WindowsPath, str, str, _WINDOWS),
    Rule("$pure_posix_path", pathlib.PurePosixPath, str, str, pathlib.PurePosixPath),
    Rule("$pure_windows_path", pathlib.PureWindowsPath, str, str, pathlib.PureWindowsPath),
    Rule("$datetime", dt.datetime, list, _dump_moment, _load_moment(dt.datetime)),
    Rule("$time", dt.time, list, _dump_moment, _load_moment(dt.time)),
    Rule("$date", dt.date, str, lambda x: x.isoformat(), dt.date.fromisoformat),
    Rule("$timedelta", dt.timedelta, list, lambda x: [x.days, x.seconds, x.microseconds],
         lambda x: dt.timedelta(*x)),
    Rule("$decimal", decimal.Decimal, str, str, decimal.Decimal),
    Rule("$fraction", fractions.Fraction, list, lambda x: [x.numerator, x.denominator],
         lambda x: fractions.Fraction(*x)),
    Rule("$uuid", uuid.UUID, str, str, uuid.UUID),
    Rule("$size", torch.Size, list, list, torch.Size),
    Rule("$dtype", torch.dtype, str, lambda x: str(x).removeprefix("torch."), _load_dtype),
    Rule("$device", torch.device, str, str, torch.device),
    Rule("$parameter", torch.nn.Parameter, list, list, _load_parameter),  # dump: see encoder
    Rule("$ndarray", np.ndarray, list, _dump_array, _load_array),
)  # fmt: skip
BY_CLASS: Final[Mapping[type, Rule]] = types.MappingProxyType({r.cls: r for r in _TABLE})
BY_TAG: Final[Mapping[str, Rule]] = types.MappingProxyType(
    {r.tag: r for r in (*_TABLE, NUMPY_SCALAR)}
)
