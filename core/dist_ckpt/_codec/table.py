"""The table of types that are written without pickle: one rule a class.

Here: what each class turns into, and back. Not here: nesting, paths and errors (``encoder``,
``decoder``); dicts and tensors, which need them. Pure functions, called by those two.
"""

from __future__ import annotations

import argparse
import array
import base64
import collections
import datetime as dt
import decimal
import enum
import fractions
import io
import ipaddress
import os
import pathlib
import random
import re
import types
import uuid
import zoneinfo
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import numpy as np
import torch

from dist_ckpt._codec import arrays, classes, configs, generators, moments
from dist_ckpt.types import ForeignValue

__all__ = ["BY_CLASS", "BY_TAG", "FACTORIES", "Rule", "from_base64", "rule_of", "to_base64"]

T = TypeVar("T")

FACTORIES: Final[Mapping[str, type]] = types.MappingProxyType(
    {
        factory.__name__: factory
        for factory in (
            *(list, dict, set, tuple, frozenset, int, float, complex, bool, str, bytes),
            *(collections.Counter, collections.OrderedDict, collections.deque),
        )
    }
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


def _load_of_torch(kind: type[T]) -> Callable[[str], T]:
    def load(name: str) -> T:
        value = vars(torch).get(name)
        if type(value) is not kind:
            raise ValueError(f"torch.{name} is no {kind.__name__}")
        return value

    return load


def _torch_name(value: object) -> str:
    return str(value).removeprefix("torch.")


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
    if not isinstance(tensor, torch.Tensor) or type(requires_grad) is not bool:
        raise TypeError("expected a tensor, and whether it requires a gradient")
    return torch.nn.Parameter(tensor, requires_grad=requires_grad)


def _load_sparse(payload: list[Any]) -> torch.Tensor:
    indices, values, shape, is_coalesced = payload
    return torch.sparse_coo_tensor(
        indices, values, shape, is_coalesced=is_coalesced, check_invariants=True
    )


_QUANTIZED_AS: Final = {
    torch.int8: torch.qint8,
    torch.uint8: torch.quint8,
    torch.int32: torch.qint32,
}


def _load_quantized(payload: list[Any]) -> torch.Tensor:
    integers, scale, zero_point, axis = payload
    if not isinstance(integers, torch.Tensor) or integers.dtype not in _QUANTIZED_AS:
        raise TypeError("expected a tensor of int8, uint8 or int32")
    if axis is None:
        if type(scale) is not float or type(zero_point) is not int:
            raise TypeError("expected a float scale and an integer zero point")
        return torch._make_per_tensor_quantized_tensor(integers, scale, zero_point)  # noqa: SLF001 - the only way from integers
    fits = (
        type(axis) is int
        and 0 <= axis < integers.ndim
        and all(
            isinstance(one, torch.Tensor) and one.shape == (integers.shape[axis],)
            for one in (scale, zero_point)
        )
    )
    if not fits:
        raise ValueError("expected scales and zero points for each element of an axis")
    return torch._make_per_channel_quantized_tensor(integers, scale, zero_point, axis)  # noqa: SLF001


def _dump_pattern(value: re.Pattern[Any]) -> list[Any]:
    return [value.pattern, value.flags & ~int(re.DEBUG)]


def _load_pattern(payload: list[Any]) -> re.Pattern[Any]:
    pattern, flags = payload
    if type(pattern) not in (str, bytes) or type(flags) is not int or flags & int(re.DEBUG):
        raise ValueError("no pattern")
    try:
        return re.compile(pattern, flags)
    except re.error as error:
        raise ValueError(f"no pattern: {error}") from error


def _load_foreign(payload: list[Any]) -> ForeignValue:
    if not payload or type(payload[0]) is not str:
        raise ValueError("expected the name of a class")
    return ForeignValue(*payload)


def _load_deque(payload: list[Any]) -> collections.deque[Any]:
    maxlen, items = payload
    if type(items) is not list:  # a range of any length would be gone through
        raise TypeError("expected a list of items")
    return collections.deque(items, maxlen)


def _load_fraction(payload: list[Any]) -> fractions.Fraction:
    numerator, denominator = payload
    if type(numerator) is not int or type(denominator) is not int:  # "1e999999999" is a number, too
        raise TypeError("expected two integers")
    return fractions.Fraction(numerator, denominator)


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
_ADDRESSES: Final = (
    *(ipaddress.IPv4Address, ipaddress.IPv4Interface, ipaddress.IPv4Network),
    *(ipaddress.IPv6Address, ipaddress.IPv6Interface, ipaddress.IPv6Network),
)
_TABLE: Final = (
    Rule("$str", str, bytes, lambda x: x.encode("utf-8", "surrogatepass"),
         lambda x: x.decode("utf-8", "surrogatepass")),
    Rule("$int", int, str, hex, lambda x: int(x, 16)),
    Rule("$float", float, str, repr, float),
    Rule("$complex", complex, list, lambda x: [repr(x.real), repr(x.imag)], _load_complex),
    Rule("$bytes", bytes, str, to_base64, from_base64),
    Rule("$bytearray", bytearray, str, to_base64, lambda x: bytearray(from_base64(x))),
    Rule("$bytes_io", io.BytesIO, list, arrays.dump_bytes_io, arrays.load_bytes_io),
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
         _load_foreign),
    Rule("$posix_path", pathlib.PosixPath, str, str, _POSIX),
    Rule("$windows_path", pathlib.WindowsPath, str, str, _WINDOWS),
    Rule("$pure_posix_path", pathlib.PurePosixPath, str, str, pathlib.PurePosixPath),
    Rule("$pure_windows_path", pathlib.PureWindowsPath, str, str, pathlib.PureWindowsPath),
    Rule("$datetime", dt.datetime, list, moments.dump_moment,
         moments.load_moment(dt.datetime)),
    Rule("$time", dt.time, list, moments.dump_moment, moments.load_moment(dt.time)),
    Rule("$timezone", dt.timezone, list, moments.dump_timezone, moments.load_timezone),
    Rule("$zone", zoneinfo.ZoneInfo, str, moments.dump_zone, moments.load_zone),
    Rule("$date", dt.date, str, lambda x: x.isoformat(), dt.date.fromisoformat),
    Rule("$timedelta", dt.timedelta, list, lambda x: [x.days, x.seconds, x.microseconds],
         lambda x: dt.timedelta(*x)),
    Rule("$decimal", decimal.Decimal, str, str, decimal.Decimal),
    Rule("$fraction", fractions.Fraction, list, lambda x: [x.numerator, x.denominator],
         _load_fraction),
    Rule("$uuid", uuid.UUID, str, str, uuid.UUID),
    Rule("$size", torch.Size, list, list, torch.Size),
    Rule("$dtype", torch.dtype, str, _torch_name, _load_of_torch(torch.dtype)),
    Rule("$layout", torch.layout, str, _torch_name, _load_of_torch(torch.layout)),
    Rule("$memory_format", torch.memory_format, str, _torch_name,
         _load_of_torch(torch.memory_format)),
    Rule("$device", torch.device, str, str, torch.device),
    Rule("$parameter", torch.nn.Parameter, list, list, _load_parameter),  # dump: see encoder
    Rule("$ndarray", np.ndarray, list, arrays.dump_array, arrays.load_array),
    Rule("$array", array.array, list, arrays.dump_typed_array, arrays.load_typed_array),
    Rule("$pattern", re.Pattern, list, _dump_pattern, _load_pattern),
    Rule("$ellipsis", type(...), type(None), lambda _: None, lambda _: ...),
    Rule("$mapping_proxy", types.MappingProxyType, dict, dict, types.MappingProxyType),
    Rule("$random", random.Random, tuple, lambda x: x.getstate(),
         generators.load_python_generator),
    Rule("$numpy_generator", np.random.Generator, dict, generators.dump_numpy_generator,
         generators.load_numpy_generator),
    Rule("$numpy_random_state", np.random.RandomState, dict, generators.dump_random_state,
         generators.load_random_state),
    Rule("$generator", torch.Generator, torch.Tensor, generators.dump_torch_generator,
         generators.load_torch_generator),
    *(Rule(f"${one.__name__.lower()}", one, str, str, one) for one in _ADDRESSES),
)  # fmt: skip
_SPARSE: Final = Rule("$sparse", torch.Tensor, list, lambda _: NotImplemented, _load_sparse)
_QUANTIZED: Final = Rule(
    "$quantized", torch.Tensor, list, lambda _: NotImplemented, _load_quantized
)
_NUMPY_SCALAR: Final = Rule("$scalar", np.generic, list, arrays.dump_array, arrays.load_scalar)
_NUMPY_DTYPE: Final = Rule("$numpy_dtype", np.dtype, str, arrays.dump_dtype, arrays.load_dtype)
_ENUM: Final = Rule("$enum", enum.Enum, list, classes.dump_enum, classes.load_enum)
_NAMED_TUPLE: Final = Rule(
    "$named_tuple", tuple, list, classes.dump_named_tuple, classes.load_named_tuple
)
_KNOWN_DICT: Final = Rule(
    "$known_dict", dict, list, classes.dump_known_dict, classes.load_known_dict
)
_TYPE: Final = Rule("$type", type, str, classes.dump_type, classes.load_type)
_CONFIG: Final = Rule("$config", object, list, configs.dump_config, configs.load_config)
BY_CLASS: Final[Mapping[type, Rule]] = types.MappingProxyType({r.cls: r for r in _TABLE})
BY_TAG: Final[Mapping[str, Rule]] = types.MappingProxyType(
    {
        rule.tag: rule
        for rule in (
            *(*_TABLE, _SPARSE, _QUANTIZED, _NUMPY_SCALAR, _NUMPY_DTYPE),
            *(_ENUM, _NAMED_TUPLE, _KNOWN_DICT, _TYPE, _CONFIG),
        )
    }
)


def rule_of(value: object) -> Rule | None:
    """Return the rule for a value that is no list, dict or tensor of torch; None if there is none.

    A class that the table lists must be exactly the value's. The others are kinds of classes: the
    value's own name is then written too.
    """
    cls = type(value)
    if cls in BY_CLASS:
        return BY_CLASS[cls]
    if isinstance(value, enum.Enum):
        return _ENUM
    kinds = (
        (_NUMPY_SCALAR, isinstance(value, np.generic)),
        (_NUMPY_DTYPE, isinstance(value, np.dtype)),
        (_TYPE, isinstance(value, type)),
        (_NAMED_TUPLE, isinstance(value, tuple) and classes.is_named_tuple(cls)),
        (_KNOWN_DICT, isinstance(value, dict) and classes.is_known_dict(cls)),
        (_CONFIG, configs.is_config(value)),
    )
    return next((rule for rule, is_kind in kinds if is_kind), None)
