"""Pickled values of other writers: what is loaded from them, and what is refused.

Here: ``torch.load`` with ``weights_only=True``, widened by a few types that are plain values, or
unguarded when the caller allows it. Not here: which records there are (``foreign``). Called on
every rank, from the thread that loads.
"""

from __future__ import annotations

import argparse
import functools
import io
import logging
import math
import pathlib
import pickle
import re
import threading
import types
from typing import TYPE_CHECKING, Any

import torch

from dist_ckpt._formats.torch_dist.mcore import checked_shape
from dist_ckpt.errors import ConfigError, CorruptedCheckpointError, UnsafeContentError
from dist_ckpt.types import ForeignValue
from dist_ckpt.validation import shortened

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

__all__ = ["unpickled"]

logger = logging.getLogger(__name__)

_WIDENING = threading.Lock()
"""``torch.serialization.safe_globals`` changes what the whole process admits."""

_PLAIN_KINDS = re.compile(r"([biufc]\d{1,2}|[SU]\d{1,9})", re.ASCII)
_NUMPY = "numpy."
_MEGATRON = "megatron."


def unpickled(data: bytes, *, what: str, where: str, allow_pickle: bool) -> Any:
    """Return the value of a ``torch.save`` record.

    Without ``allow_pickle``: tensors, dtypes, numbers, text, bytes, lists, tuples, dicts and sets;
    ``argparse.Namespace``, ``types.SimpleNamespace``, paths, ``io.BytesIO``; numpy's numbers, and
    its arrays of numbers and text; ``ForeignValue`` for members of Megatron-Core's enums.

    Args:
        data: The record.
        what: Its key, for errors.
        where: Its file, for errors.
        allow_pickle: Whether it may run code.

    Raises:
        UnsafeContentError: It needs more than that; names the types.
        ConfigError: A module that it needs is not installed.
        CorruptedCheckpointError: It is no record.
    """
    try:
        if allow_pickle:
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)
        return _restricted(data)
    except pickle.UnpicklingError as error:
        if not allow_pickle:
            raise UnsafeContentError(
                f"{what!r} in {where} is pickled and holds more than tensors and plain values: "
                f"{_offenders(data, error)}.",
                hint="allow_pickle=True loads it, which runs code from the checkpoint.",
            ) from error
        raise CorruptedCheckpointError(f"{what!r} in {where}: {error}") from error
    except (ImportError, AttributeError) as error:
        if not allow_pickle:
            raise CorruptedCheckpointError(f"{what!r} in {where}: {error}.") from error
        name = getattr(error, "name", None)
        missing = f"module {name!r}" if isinstance(error, ImportError) and name else str(error)
        raise ConfigError(
            f"{what!r} in {where} was pickled with classes that cannot be imported here: "
            f"{missing}.",
            hint="install the library that wrote the checkpoint.",
        ) from error
    except Exception as error:  # a torn record makes torch raise almost anything
        raise CorruptedCheckpointError(f"{what!r} in {where}: not a record ({error}).") from error


def _restricted(data: bytes) -> Any:
    try:
        value = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        # Only now the wider way, which for its duration is open to the whole process. So the plain
        # way may meet stand-ins, too, while another thread is at the wider one.
        with _WIDENING, torch.serialization.safe_globals(_plain_types()):
            value = _widened(data)
    return _finished(value, {})


def _widened(data: bytes) -> Any:
    """Load with the plain types; names of Megatron-Core, which need not be here, are values.

    Its ``args`` hold members of its enums: a name and a number, nothing that has to run.
    """
    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(data))
        if not names or not all(name.startswith(_MEGATRON) for name in names):
            raise
        logger.warning("not imported, but named: %s", shortened(sorted(names)))
        stand_ins = [(functools.partial(ForeignValue, name), name) for name in names]
        with torch.serialization.safe_globals(stand_ins):  # type: ignore[arg-type]  # pairs, too
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def _offenders(data: bytes, error: Exception) -> str:
    """Return the names of the types that were refused."""
    try:
        with _WIDENING, torch.serialization.safe_globals(_plain_types()):
            names = torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(data))
    except Exception:  # noqa: BLE001 - a record in another form; the message says something too
        names = []
    if names:
        return shortened(sorted(names))
    reason = str(error).rsplit("WeightsUnpickler error:", maxsplit=1)[-1]
    return reason.strip().split("\n", maxsplit=1)[0]


def _plain_types() -> list[Callable[..., Any] | tuple[Callable[..., Any], str]]:
    """Return what is admitted beyond torch's own list, under the names in pickles.

    numpy's own functions would believe a dtype that calls any bytes objects; so arrays go through
    stand-ins that check everything. Names that the program has admitted itself stay its own.
    """
    table: list[tuple[Any, str]] = [
        (argparse.Namespace, "argparse.Namespace"),
        (types.SimpleNamespace, "types.SimpleNamespace"),
        (io.BytesIO, "_io.BytesIO"),
        (_no_bytes, "builtins.bytes"),
        (_path, "pathlib.PosixPath"),
        (_path, "pathlib._local.PosixPath"),
        (_Array, "numpy.ndarray"),
        (_Dtype, "numpy.dtype"),
    ]
    for module in ("numpy.core.multiarray", "numpy._core.multiarray"):
        table += [(_Array.begun, f"{module}._reconstruct"), (_scalar, f"{module}.scalar")]
    theirs = {
        one[1] if isinstance(one, tuple) else f"{one.__module__}.{one.__qualname__}"
        for one in torch.serialization.get_safe_globals()
    }
    has_numpy = any(name.startswith(_NUMPY) for name in theirs)
    return [
        (one, name)
        for one, name in table
        if name not in theirs and not (has_numpy and name.startswith(_NUMPY))
    ]


def _no_bytes() -> bytes:
    """Return what ``bytes()`` in a pickle means; with an argument it could ask for any memory."""
    return b""


def _path(*parts: str) -> pathlib.Path:
    return pathlib.Path(*parts)


class _Dtype:
    """Stands for a ``numpy.dtype`` of numbers or text."""

    def __init__(self, name: str, _align: object = None, _copy: object = None) -> None:
        if not _PLAIN_KINDS.fullmatch(name):
            raise pickle.UnpicklingError(f"numpy dtype {name!r}")
        self._name, self._order = name, "="

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, order, subarray, names, fields, *_ = state
        if order not in ("<", ">", "=", "|") or (subarray, names, fields) != (None, None, None):
            raise pickle.UnpicklingError("numpy dtype of several parts")
        self._order = order

    def resolved(self) -> np.dtype[Any]:
        import numpy as np  # noqa: PLC0415 - only where a record holds its arrays

        return np.dtype(self._order + self._name)


class _Array:
    """Stands for a ``numpy.ndarray`` of numbers or text."""

    value: np.ndarray[Any, Any] | None = None

    @staticmethod
    def begun(_kind: object, _shape: object, _typecode: object) -> _Array:
        return _Array()

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        import numpy as np  # noqa: PLC0415 - only where a record holds its arrays

        _, shape, dtype, is_fortran, data = state
        if not isinstance(dtype, _Dtype) or not isinstance(data, bytes):
            raise pickle.UnpicklingError("numpy array of objects")
        resolved, shape = dtype.resolved(), checked_shape(shape)
        if len(data) != math.prod(shape) * resolved.itemsize:
            raise ValueError(f"{len(data)} bytes for an array of shape {shape}, {resolved}")
        flat = np.frombuffer(data, resolved) if data else np.empty(0, resolved)
        self.value = flat.reshape(shape, order="F" if is_fortran else "C").copy()


def _scalar(dtype: _Dtype, data: bytes) -> Any:
    import numpy as np  # noqa: PLC0415 - only where a record holds its numbers

    (value,) = np.frombuffer(data, dtype.resolved())
    return value


def _finished(value: Any, done: dict[int, tuple[Any, Any]]) -> Any:
    """Put arrays and dtypes in the place of what stands for them, in containers too.

    ``done`` holds containers by their id, with themselves so that no other gets it: each is done
    once, however often it is referred to.
    """
    if isinstance(value, _Array):
        return value.value
    if isinstance(value, _Dtype):
        return value.resolved()
    if id(value) in done:
        return done[id(value)][1]
    if type(value) is tuple:
        finished = tuple(_finished(one, done) for one in value)
        done[id(value)] = value, finished
        return finished
    done[id(value)] = value, value
    if isinstance(value, list):
        value[:] = [_finished(one, done) for one in value]
    elif isinstance(value, dict):
        items = [(_finished(k, done), _finished(v, done)) for k, v in value.items()]
        value.clear()
        value.update(items)
    elif isinstance(value, set):
        items = [_finished(one, done) for one in value]
        value.clear()
        value.update(items)
    elif isinstance(value, argparse.Namespace | types.SimpleNamespace):
        _finished(value.__dict__, done)
    return value
