"""Pickled values of other writers: what is loaded from them, and what is refused.

Here: ``torch.save`` records, with an unpickler that knows plain values only, or as ``torch.load``
does if the caller allows it. Not here: which records there are (``foreign``), what the names in
them mean (``plain_types``), what a pickle may cost (``pickle_bounds``). Called on every rank, from
the thread that loads; nothing of the process is changed, and nothing is shared between loads.
"""

from __future__ import annotations

import argparse
import io
import logging
import pickle
import types
from typing import Any

import torch

from dist_ckpt._formats.torch_dist.archive import Archive
from dist_ckpt._formats.torch_dist.inert import Node, Refused
from dist_ckpt._formats.torch_dist.pickle_bounds import check_pickle
from dist_ckpt._formats.torch_dist.plain_arrays import Made
from dist_ckpt._formats.torch_dist.plain_types import PlainTypes
from dist_ckpt.errors import ConfigError, CorruptedCheckpointError, UnsafeContentError
from dist_ckpt.types import ForeignValue
from dist_ckpt.validation import shortened

__all__ = ["tensor_of_record", "unpickled"]

logger = logging.getLogger(__name__)

_MEGATRON = "megatron."
_RENAMED = {"__builtin__": "builtins", "copy_reg": "copyreg"}
"""Names of python 2, which the protocol of ``torch.save`` still writes."""


def tensor_of_record(data: bytes | bytearray) -> torch.Tensor:
    """Return the tensor that a record holds and nothing else.

    Raises:
        ValueError: It holds something else, or is no record.
    """
    try:
        value = _restricted(data)
    except Exception as error:  # a torn record makes pickle raise almost anything
        raise ValueError(str(error)) from error
    if not isinstance(value, torch.Tensor):
        raise ValueError(f"a {type(value).__name__}")  # noqa: TRY004 - damage, no wrong argument
    return value.detach().resolve_conj().resolve_neg()


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
    except Refused as error:
        raise UnsafeContentError(
            f"{what!r} in {where} is pickled and holds more than tensors and plain values: "
            f"{error}.",
            hint="allow_pickle=True loads it, which runs code from the checkpoint.",
        ) from error
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


def _restricted(data: bytes | bytearray) -> Any:
    """Return the value of a record.

    Raises:
        Refused: It names more than plain types; its text is these names.
        Exception: It is no record.
    """
    archive = Archive(data)
    pickled = archive.pickle
    check_pickle(pickled)
    first = _Unpickler(pickled, PlainTypes(archive, len(data)), {})
    try:
        value = first.load()
    except Exception:
        if not first.unknown:  # what stands for the unknown fits nowhere
            raise
    if first.unknown:
        meanings = _meanings(first.unknown)
        value = _Unpickler(pickled, PlainTypes(archive, len(data)), meanings).load()
    return _finished(value, {})


def _meanings(names: set[str]) -> dict[str, Any]:
    """Return what names mean that are no plain types: the program has admitted them, or a value.

    Megatron-Core's ``args`` hold members of its enums: a name and a number, nothing that has to
    run. They stand for themselves if nothing else is in the way.
    """
    admitted = _admitted_by_program()
    rest = names - admitted.keys()
    if not all(name.startswith(_MEGATRON) for name in rest):
        raise Refused(shortened(sorted(rest)))
    if rest:
        logger.warning("not imported, but named: %s", shortened(sorted(rest)))
    return admitted | {name: _foreign_class(name) for name in rest}


def _admitted_by_program() -> dict[str, Any]:
    """Return what the program has admitted for ``torch.load``, by the names in pickles."""
    admitted: dict[str, Any] = {}
    for one in torch.serialization.get_safe_globals():
        if isinstance(one, tuple):
            admitted[one[1]] = one[0]
        else:
            admitted[f"{one.__module__}.{one.__qualname__}"] = one
    return admitted


def _foreign_class(name: str) -> type:
    make = lambda _, *arguments: ForeignValue(name, *arguments)  # noqa: E731 - a method
    return type(name, (), {"__new__": make})


class _Unpickler(pickle.Unpickler):
    """Resolves names to plain types, to what the caller says, or to what stands for anything.

    Args:
        data: The pickle.
        plain: The plain types, and the storages.
        meanings: What other names mean.
    """

    def __init__(self, data: bytes, plain: PlainTypes, meanings: dict[str, Any]) -> None:
        super().__init__(io.BytesIO(data), encoding="utf-8")
        self._plain = plain
        self._meanings = meanings
        self.unknown: set[str] = set()

    def find_class(self, module: str, name: str) -> Any:
        module = _RENAMED.get(module, module)
        full = f"{module}.{name}"
        if full in self._meanings:
            return self._meanings[full]
        found = self._plain.find(module, name)
        if found is None:
            self.unknown.add(full)
            return type("Unknown", (Node,), {})
        return found

    def persistent_load(self, pid: Any) -> Any:
        return self._plain.storage(pid)


def _finished(value: Any, done: dict[int, tuple[Any, Any]]) -> Any:
    """Put values in the place of what stands for them, in containers too.

    ``done`` holds containers by their id, with themselves so that no other gets it: each is done
    once, however often it is referred to.
    """
    if isinstance(value, Made):
        return value.value
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
        # Not its own methods: a pickle may have given it others.
        items = [(_finished(k, done), _finished(v, done)) for k, v in dict.items(value)]
        type(value).clear(value)
        type(value).update(value, items)
    elif isinstance(value, set):
        items = [_finished(one, done) for one in value]
        value.clear()
        value.update(items)
    elif isinstance(value, argparse.Namespace | types.SimpleNamespace):
        _finished(value.__dict__, done)
    return value
