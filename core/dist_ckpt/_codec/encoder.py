"""From a value to its document.

Here: ``encode``. Not here: the way back (``decoder``), single types (``table``).
"""

from __future__ import annotations

import collections
import json
import math
import pickle
from dataclasses import dataclass
from typing import Any, Final

import torch

from dist_ckpt._codec.names import MAX_DEPTH, escape, render
from dist_ckpt._codec.subclasses import is_admitted, is_distributed, is_wrapper, take_apart
from dist_ckpt._codec.table import FACTORIES, Rule, rule_of, to_base64
from dist_ckpt.errors import InvalidShardingError
from dist_ckpt.types import ValueType, ValueTypes, value_types

__all__ = ["Encoded", "encode"]

_INT_LIMIT: Final = 2**63  # larger integers are not for every JSON parser, nor fast in python's


@dataclass(frozen=True, slots=True)
class Encoded:
    """What ``encode`` returns.

    Attributes:
        document: Nested JSON types only; ``json.dumps(document)`` always works.
        tensors: The tensors that the document refers to by position, detached.
        has_pickles: Whether a value in it is pickled.
    """

    document: Any
    tensors: tuple[torch.Tensor, ...]
    has_pickles: bool = False


def encode(value: object, *, path: str = "", own: ValueTypes | None = None) -> Encoded:
    """Turn a value into a JSON document and the tensors in it.

    Args:
        value: Any nesting of the supported types; others are pickled.
        path: Name of the value in error messages.
        own: The users' types; None for those that are registered in this process.

    Raises:
        InvalidShardingError: Something cannot be stored: it contains itself, is too deep, is a
            tensor of a special class, or cannot be pickled. All such places are named at once.
    """
    encoder = Encoder(value_types if own is None else own)
    document = encoder.value(value)
    if encoder.problems:
        problems = "; ".join(
            f"{render(path, trail) or 'the value'}: {text}" for trail, text in encoder.problems
        )
        raise InvalidShardingError(f"cannot store {len(encoder.problems)} value(s): {problems}")
    return Encoded(document, tuple(encoder.tensors), has_pickles=encoder.has_pickles)


def _stands_for_itself(value: object) -> bool:
    kind = type(value)
    if kind is str:
        return _is_text(value)
    if value is None or kind is bool:
        return True
    if kind is dict:
        return not value
    if isinstance(value, int):
        return kind is int and -_INT_LIMIT <= value < _INT_LIMIT
    return kind is float and isinstance(value, float) and math.isfinite(value)


def _is_text(value: object) -> bool:
    """Whether this is a plain string that JSON keeps: two lone surrogates would be joined."""
    if type(value) is not str:
        return False
    return value.isascii() or not any("\ud800" <= char <= "\udfff" for char in value)


class Encoder:
    """One run of ``encode``: the tensors met, the places that failed, and where we are."""

    def __init__(self, own: ValueTypes) -> None:
        self._own = own
        self.tensors: list[torch.Tensor] = []
        self.problems: list[tuple[tuple[Any, ...], str]] = []
        self.has_pickles = False
        self._trail: list[Any] = []
        self._open: set[int] = set()  # ids of the containers we are inside of
        # The tensor itself is kept with its number: an id is only unique while its owner lives.
        self._numbers: dict[int, tuple[torch.Tensor, int]] = {}

    def value(self, value: object) -> Any:
        """Return the document of one value."""
        if _stands_for_itself(value):
            return value
        if id(value) in self._open:
            return self._fail("contains itself")
        if len(self._open) >= MAX_DEPTH:
            return self._fail(f"nested deeper than {MAX_DEPTH} levels")
        self._open.add(id(value))
        document = self._compound(value)
        self._open.remove(id(value))
        return document

    def _fail(self, text: str) -> None:
        self.problems.append((tuple(self._trail), text))

    def _child(self, step: object, value: object) -> Any:
        self._trail.append(step)
        document = self.value(value)
        self._trail.pop()
        return document

    def _compound(self, value: object) -> Any:
        if type(value) is list:
            if set(map(type, value)) == {str} and "".join(value).isascii():
                return list(value)  # names of tensors, by the ten thousand
            return [
                item if _stands_for_itself(item) else self._child(i, item)
                for i, item in enumerate(value)
            ]
        if (one := self._own.of_class(type(value))) is not None:
            return self._own_value(value, one)
        if isinstance(value, dict) and (document := self._mapping(value)) is not None:
            # As of ``Module.state_dict()``.
            attributes = getattr(value, "__dict__", None)
            return {"$attributes": [document, self.value(attributes)]} if attributes else document
        if isinstance(value, torch.Tensor):
            document = self._wrapper(value) if is_wrapper(value) else self._tensor(value)
            is_parameter = isinstance(value, torch.nn.Parameter)
            return {"$parameter": [document, value.requires_grad]} if is_parameter else document
        return self._by_rule(value, rule_of(value))

    def _by_rule(self, value: object, rule: Rule | None) -> Any:
        payload = rule.dump(value) if rule else NotImplemented
        if rule is None or payload is NotImplemented:
            return self._pickle(value)
        inner = self.value(payload)
        if rule.cls in {set, frozenset} and isinstance(inner, list):
            inner.sort(key=json.dumps)  # the order of a set differs from process to process
        return {rule.tag: inner}

    def _own_value(self, value: object, one: ValueType) -> Any:
        try:
            payload = one.dump(value)
        except Exception as error:  # noqa: BLE001 - the user's function; reported by path
            return self._fail(f"the dump function of {one.tag!r} failed: {error!r}")
        return {"$own": [one.tag, self.value(payload)]}

    def _mapping(self, value: dict[Any, Any]) -> Any:
        kind = type(value)
        if kind is dict and all(map(_is_text, value)):
            return {
                escape(key): item if _stands_for_itself(item) else self._child(key, item)
                for key, item in value.items()
            }
        if kind is dict:
            return {"$dict": self._pairs(value)}
        if kind is collections.OrderedDict:
            return {"$ordered_dict": self._pairs(value)}
        if kind is collections.Counter:
            return {"$counter": self._pairs(value)}
        if isinstance(value, collections.defaultdict) and kind is collections.defaultdict:
            factory = value.default_factory
            name = getattr(factory, "__name__", None)
            if factory is None or (name and FACTORIES.get(name) is factory):
                return {"$defaultdict": [name, self._pairs(value)]}
        return None

    def _pairs(self, value: dict[Any, Any]) -> list[list[Any]]:
        return [[self._child(k, k), self._child(k, item)] for k, item in value.items()]

    def _tensor(self, value: torch.Tensor) -> Any:
        if type(value) not in {torch.Tensor, torch.nn.Parameter}:
            return self._fail(_why_not_plain(type(value)))
        if value.is_meta:
            return self._fail("is a tensor on the meta device, which has no data")
        if value.layout is not torch.strided or value.is_quantized or value.is_nested:
            return self._not_dense(value.detach())
        if id(value) not in self._numbers:
            self._numbers[id(value)] = (value, len(self.tensors))
            self.tensors.append(value.detach().resolve_conj().resolve_neg())
        return {"$tensor": self._numbers[id(value)][1]}

    def _not_dense(self, value: torch.Tensor) -> Any:
        if value.layout is torch.sparse_coo:
            return {"$sparse": self.value(_sparse_parts(value))}
        parts = _quantized_parts(value) if value.is_quantized else None
        return self._pickle(value) if parts is None else {"$quantized": self.value(parts)}

    def _wrapper(self, value: torch.Tensor) -> Any:
        cls = type(value)
        if not is_admitted(cls):
            return self._fail(
                f"is a {cls.__module__}.{cls.__qualname__}, which a load rebuilds only after "
                f"torch.serialization.add_safe_globals([{cls.__name__}])"
            )
        parts = take_apart(value)
        had_pickles, self.has_pickles = self.has_pickles, False
        context = self.value(parts.context)
        has_pickles, self.has_pickles = self.has_pickles, had_pickles
        if has_pickles:
            return self._fail(f"is a {cls.__name__} whose context can only be pickled")
        inner = [[name, self._child(name, one)] for name, one in parts.tensors.items()]
        sizes = [list(parts.shape), list(parts.stride)]
        return {"$subclass": [[cls.__module__, cls.__qualname__], sizes, inner, context]}

    def _pickle(self, value: object) -> Any:
        name = f"{type(value).__module__}.{type(value).__qualname__}"
        self.has_pickles = True
        try:
            data = pickle.dumps(value)
        except Exception as error:  # noqa: BLE001 - __reduce__ may raise anything; reported by path
            return self._fail(f"{name} cannot be pickled: {error}")
        return {"$pickle": {"type": name, "data": to_base64(data)}}


def _why_not_plain(cls: type) -> str:
    if is_distributed(cls):
        return (
            f"is a {cls.__name__}, and values are stored whole: save the module that holds it as a "
            "model (torch.optim.swa_utils.AveragedModel is one), or store its full_tensor() and "
            "distribute_tensor() it after the load"
        )
    return (
        f"is a {cls.__name__}, a tensor class without __tensor_flatten__: store a plain tensor "
        "(value.as_subclass(torch.Tensor))"
    )


def _sparse_parts(value: torch.Tensor) -> list[Any]:
    return [value._indices(), value._values(), list(value.shape), value.is_coalesced()]  # noqa: SLF001 - indices() refuses what is not coalesced


def _quantized_parts(value: torch.Tensor) -> list[Any] | None:
    """Return integers, scale, zero point and axis; None for kinds that are packed otherwise."""
    if value.dtype not in {torch.qint8, torch.quint8, torch.qint32}:
        return None
    if value.qscheme() is torch.per_tensor_affine:
        return [value.int_repr(), value.q_scale(), value.q_zero_point(), None]
    if value.qscheme() in {torch.per_channel_affine, torch.per_channel_affine_float_qparams}:
        channels = value.q_per_channel_scales(), value.q_per_channel_zero_points()
        return [value.int_repr(), *channels, value.q_per_channel_axis()]
    return None
