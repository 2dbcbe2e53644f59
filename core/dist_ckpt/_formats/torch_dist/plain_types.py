"""What the names in a record's pickle may mean: values that are plain data.

Here: a table of names, made anew for each record, and what it costs to make a value. Not here: the
unpickler that asks for them (``unpickle``), numpy's (``plain_arrays``). Called on every rank.

A pickle calls what it names with anything, as often as it likes, and sets attributes of it. So each
name is a class of this one table, whose call makes the value, checks its arguments, and pays for
what it copies: in all no more than in proportion to the record.
"""

from __future__ import annotations

import argparse
import collections
import io
import math
import pathlib
import types
from typing import TYPE_CHECKING, Any

import torch

from dist_ckpt._formats.torch_dist.inert import size, torch_constant
from dist_ckpt._formats.torch_dist.mcore import checked_shape
from dist_ckpt._formats.torch_dist.plain_arrays import Array, Dtype, Made, scalar

if TYPE_CHECKING:
    from collections.abc import Callable

    from dist_ckpt._formats.torch_dist.archive import Archive

__all__ = ["STORAGE_DTYPES", "PlainTypes"]

STORAGE_DTYPES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
}
_FREE_NBYTES = 1 << 20
_ITEM_NBYTES = 8
_Storage = tuple[torch.UntypedStorage, torch.dtype | None]


class PlainTypes:
    """The names of one record, and the storages of its tensors.

    Args:
        archive: The record.
        nbytes: Its length, which bounds what is made of it.
    """

    def __init__(self, archive: Archive, nbytes: int) -> None:
        """Make the table."""
        self._archive = archive
        self._largest = 2 * nbytes + _FREE_NBYTES
        self._left = 8 * nbytes + _FREE_NBYTES
        self._storages: dict[str, torch.UntypedStorage] = {}
        self._table = self._names()

    def find(self, module: str, name: str) -> Any:
        """Return what a name means, None if it is none of ours."""
        found = self._table.get((module, name))
        if found is None and module == "torch":
            return STORAGE_DTYPES.get(name) or torch_constant(name)
        return found

    def storage(self, pid: Any) -> _Storage:
        """Return a storage that the pickle refers to, and the dtype that it goes by."""
        kind, dtype, key, _, _ = pid
        if kind != "storage" or type(key) is not str:
            raise ValueError("no storage")
        if key not in self._storages:
            data = self._archive.storage(key)
            flat = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0)
            self._storages[key] = flat.untyped_storage()
        return self._storages[key], dtype if isinstance(dtype, torch.dtype) else None

    def _pay(self, nbytes: int) -> None:
        self._left -= nbytes
        if self._left < 0:
            raise ValueError("a record that unfolds to much more than its own length")

    def _names(self) -> dict[tuple[str, str], type]:
        calls: dict[tuple[str, str], Callable[..., Any]] = {
            ("torch._utils", "_rebuild_tensor"): self._tensor,
            ("torch._utils", "_rebuild_tensor_v2"): self._tensor_v2,
            ("torch._utils", "_rebuild_tensor_v3"): self._tensor_v3,
            ("torch._utils", "_rebuild_parameter"): _parameter,
            ("torch", "Size"): lambda *values: Made(torch.Size(size(*values))),
            ("torch", "device"): lambda *words: Made(torch.device(*words)),
            ("torch.serialization", "_get_layout"): _layout,
            ("collections", "OrderedDict"): self._container(collections.OrderedDict),
            ("collections", "Counter"): self._container(collections.Counter),
            ("collections", "defaultdict"): self._default_dict,
            ("_codecs", "encode"): self._encoded,
            ("builtins", "bytearray"): self._bytearray,
            ("builtins", "bytes"): self._bytes,
            ("builtins", "set"): self._container(set),
            ("builtins", "complex"): lambda *parts: complex(*map(float, parts)),
            ("builtins", "slice"): lambda *parts: Made(slice(*parts)),
            ("pathlib", "PosixPath"): self._path,
            ("pathlib._local", "PosixPath"): self._path,
            ("numpy", "dtype"): Dtype,
            ("argparse", "Namespace"): argparse.Namespace,
            ("types", "SimpleNamespace"): types.SimpleNamespace,
        }
        for module in ("numpy.core.multiarray", "numpy._core.multiarray"):
            calls |= {
                (module, "_reconstruct"): lambda *_: Array(self._pay),
                (module, "scalar"): scalar,
            }
        table = {at: _as_class(at[1], call) for at, call in calls.items()}
        factories = {("builtins", one.__name__): one for one in (list, dict, int, float, str)}
        table |= {at: _as_class(at[1], self._container(one)) for at, one in factories.items()}
        markers = (("numpy", "ndarray"), ("torch.storage", "UntypedStorage"))
        table |= {at: type(at[1], (), {}) for at in markers}
        return table | {("_io", "BytesIO"): self._buffer_class()}

    def _container(self, cls: type) -> Callable[..., Any]:
        """Return what makes a container, or a number or text, of nothing or of a copy."""

        def make(*arguments: Any) -> Any:
            if len(arguments) > 1:
                raise ValueError(f"{cls.__name__} of {len(arguments)} arguments")
            for one in arguments:
                if type(one) in (list, tuple, dict, set, str, bytes):
                    self._pay(_ITEM_NBYTES * len(one))
                elif type(one) not in (int, float, bool):
                    raise ValueError(f"{cls.__name__} of a {type(one).__name__}")
            return cls(*arguments)

        return make

    def _default_dict(self, factory: Any = None, *rest: Any) -> Any:
        if rest:
            raise ValueError("defaultdict of more than its factory")
        known = {
            self._table["builtins", one.__name__]: one for one in (list, dict, set, int, float)
        }
        return collections.defaultdict(None if factory is None else known[factory])

    def _encoded(self, text: str, encoding: str = "latin1") -> bytes:
        if type(text) is not str or encoding not in ("latin1", "utf-8", "utf8"):
            raise ValueError(f"bytes as {encoding!r}")
        self._pay(len(text))
        return text.encode(encoding)

    def _bytearray(self, *arguments: Any) -> bytearray:
        if arguments and type(arguments[0]) is bytes and len(arguments) == 1:
            self._pay(len(arguments[0]))
            return bytearray(arguments[0])
        # As older pickle protocols have it: text and its encoding. Never a number of bytes.
        return bytearray(self._encoded(*arguments) if arguments else b"")

    def _bytes(self, *arguments: Any) -> bytes:
        if arguments:  # a number would ask for any memory
            raise ValueError("bytes of an argument")
        return b""

    def _path(self, *parts: str) -> Made:
        self._pay(sum(map(len, parts)))
        return Made(pathlib.Path(*parts))

    def _buffer_class(self) -> type:
        pay = self._pay

        class Buffer(Made):
            def __new__(cls) -> Buffer:  # noqa: PYI034 - a class of the table
                return object.__new__(cls)

            def __init__(self) -> None:
                super().__init__(io.BytesIO())

            def __setstate__(self, state: Any) -> None:
                data, position, attributes = state
                if type(data) is not bytes or attributes:
                    raise ValueError("no buffer of bytes")
                pay(len(data))
                self.value = io.BytesIO(data)
                self.value.seek(position)

        return Buffer

    def _tensor(self, storage: _Storage, offset: Any, shape: Any, strides: Any) -> Made:
        return self._made(storage, storage[1], offset, shape, strides)

    def _tensor_v2(
        self,
        storage: _Storage,
        offset: Any,
        shape: Any,
        strides: Any,
        requires_grad: Any,
        *rest: Any,
    ) -> Made:
        tensor = self._made(storage, storage[1], offset, shape, strides)
        return _finished_tensor(tensor, requires_grad, rest[1:])

    def _tensor_v3(
        self,
        storage: _Storage,
        offset: Any,
        shape: Any,
        strides: Any,
        requires_grad: Any,
        *rest: Any,
    ) -> Made:
        tensor = self._made(storage, rest[1], offset, shape, strides)
        return _finished_tensor(tensor, requires_grad, rest[2:])

    def _made(self, storage: _Storage, dtype: Any, offset: Any, shape: Any, strides: Any) -> Made:
        """Return a tensor that lies within its storage."""
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"a tensor of {dtype!r}")
        shape, strides = checked_shape(_plain(shape)), size(_plain(strides))
        if not all(type(n) is int and 0 <= n < 1 << 63 for n in (offset, *strides)):
            raise ValueError(f"a tensor at {offset!r} with strides {strides!r}")
        numel = math.prod(shape)
        last = sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
        stop = (offset + last + 1 if numel else 0) * dtype.itemsize
        if stop > storage[0].nbytes() or numel * dtype.itemsize > self._largest:
            raise ValueError(f"a tensor of shape {shape} in {storage[0].nbytes()} bytes")
        tensor = torch.empty(0, dtype=dtype)
        return Made(tensor.set_(storage[0], offset if numel else 0, shape, strides))


def _plain(values: Any) -> Any:
    return values.value if isinstance(values, Made) else values


def _finished_tensor(tensor: Made, requires_grad: Any, metadata: tuple[Any, ...]) -> Made:
    for told in filter(None, metadata):
        if not isinstance(told, dict) or not set(told) <= {"conj", "neg"}:
            raise ValueError(f"a tensor with {told!r}")
        value = tensor.value
        value = torch.conj(value) if told.get("conj") else value
        tensor = Made(torch._neg_view(value) if told.get("neg") else value)  # noqa: SLF001 - the other lazy bit
    if requires_grad:
        tensor.value.requires_grad_()
    return tensor


def _parameter(tensor: Any, requires_grad: Any, *_: object) -> Made:
    if not isinstance(tensor, Made) or not isinstance(tensor.value, torch.Tensor):
        raise TypeError("a parameter that is no tensor")
    return Made(torch.nn.Parameter(tensor.value.detach(), requires_grad=bool(requires_grad)))


def _layout(name: str) -> object:
    value = torch_constant(str(name).removeprefix("torch."))
    if not isinstance(value, torch.layout):
        raise TypeError(f"layout {name!r}")
    return value


def _as_class(name: str, call: Callable[..., Any]) -> type:
    """Return a class whose call is ``call``: a pickle may set attributes of it, to no effect."""
    return type(name, (), {"__new__": lambda _, *arguments: call(*arguments)})
