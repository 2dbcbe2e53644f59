"""From a document back to the value.

Here: ``decode``, and ``iter_pickled``, which looks without loading. Not here: the way there
(X
"""

from __future__ import annotations

import collections
import logging
import pickle
import reprlib
from collections.abc import Iterator, Sequence
from typing import Any, Final, NoReturn

import torch

from dist_ckpt._codec.names import MAX_DEPTH, PAIR_TAGS, is_tag, render, unescape
from dist_ckpt._codec.subclasses import TensorParts, admitted_class, join
from dist_ckpt._codec.table import BY_TAG, FACTORIES, from_base64
from dist_ckpt.errors import (
    CheckpointingException,
    ConfigError,
    CorruptedCheckpointError,
    UnsafeContentError,
)
from dist_ckpt.types import ForeignValue, ValueTypes, value_types

__all__ = ["decode", "iter_pickled"]

logger = logging.getLogger(__name__)

_MALFORMED: Final = (
    TypeError,
    ValueError,
    LookupError,
    ArithmeticError,
    AttributeError,
    RuntimeError,
)


_MOST_OF_A_HASH: Final = 100


def decode(
    document: object,
    tensors: Sequence[torch.Tensor],
    *,
    allow_pickle: bool = False,
    where: str = "",
    own: ValueTypes | None = None,
) -> Any:
    """Turn a document of ``encode`` back into the value.

    Args:
        document: The document, as JSON returned it.
        tensors: The tensors in the order of ``Encoded.tensors``; they are used, not copied.
        allow_pickle: Whether pickled values are loaded. They can run any code: trust the source.
        where: The file, for error messages.
        own: The users' types; None for those that are registered in this process.

    Raises:
        ConfigError: A value is of a user's type that is not registered here, or of a time zone that
            is not known here; names it.
        UnsafeContentError: There are pickled values and ``allow_pickle`` is false; names them all.
        CorruptedCheckpointError: This is no document of ``encode``.
    """
    prefix = f"{where}: " if where else ""
    if not allow_pickle:
        found = list(iter_pickled(document))
        if found:
            listing = ", ".join(f"{path or 'the value'} ({name})" for path, name in found)
            raise UnsafeContentError(
                f"{prefix}{len(found)} value(s) are pickled, loading them can run code: {listing}.",
                hint="pass allow_pickle=True if you trust whoever wrote the checkpoint.",
            )
    decoder = Decoder(
        tensors, prefix=prefix, allow_pickle=allow_pickle, own=value_types if own is None else own
    )
    value = decoder.value(document)
    if decoder.not_imported:
        logger.warning(
            "%snot imported here, so that a ForeignValue stands for values of: %s",
            prefix,
            ", ".join(sorted(decoder.not_imported)),
        )
    return value


def iter_pickled(document: object) -> Iterator[tuple[str, str]]:
    """Yield path and class name of every pickled value in a document."""
    yield from scan(document, (), 0)


class Decoder:
    """One run of ``decode``: what may be used, and where we are."""

    def __init__(
        self, tensors: Sequence[torch.Tensor], *, prefix: str, allow_pickle: bool, own: ValueTypes
    ) -> None:
        self.not_imported: set[str] = set()
        self._own = own
        self._tensors = tensors
        self._prefix = prefix
        self._allow_pickle = allow_pickle
        self._trail: list[Any] = []
        self._depth = 0

    def value(self, document: object) -> Any:
        """Return the value of one document."""
        if document is None or type(document) in {bool, int, float, str}:
            return document
        if self._depth >= MAX_DEPTH:
            self._corrupted(f"nested deeper than {MAX_DEPTH} levels")
        self._depth += 1
        if isinstance(document, list):
            value: Any = [self._child(i, item) for i, item in enumerate(document)]
        elif isinstance(document, dict):
            value = self._object(document)
        else:
            self._corrupted(f"{type(document).__name__} is no JSON type")
        self._depth -= 1
        return value

    def _corrupted(self, text: str, cause: BaseException | None = None) -> NoReturn:
        path = render("", self._trail) or "the value"
        raise CorruptedCheckpointError(f"{self._prefix}{path}: {text}.") from cause

    def _child(self, step: object, document: object) -> Any:
        self._trail.append(step)
        value = self.value(document)
        self._trail.pop()
        return value

    def _object(self, document: dict[Any, Any]) -> Any:
        if not all(type(key) is str for key in document):
            self._corrupted("a JSON object has string keys only")
        tags = [key for key in document if is_tag(key)]
        if not tags:
            items = {unescape(key): inner for key, inner in document.items()}
            return {key: self._child(key, inner) for key, inner in items.items()}
        tag = tags[0]
        if len(document) != 1:
            self._corrupted(f"{tag!r} stands beside other keys: {reprlib.repr(list(document))}")
        try:
            return self._tagged(tag, document[tag])
        except CheckpointingException:
            raise
        except _MALFORMED as error:
            self._corrupted(f"malformed {tag!r}: {error}", error)

    def _tagged(self, tag: str, payload: Any) -> Any:
        if tag in PAIR_TAGS:
            pairs = self._pairs(payload)
            if tag == "$dict":
                return pairs
            return collections.OrderedDict(pairs) if tag == "$ordered_dict" else _counter(pairs)
        if tag == "$defaultdict":
            factory, pairs = payload
            return collections.defaultdict(
                None if factory is None else FACTORIES[factory], self._pairs(pairs)
            )
        special = {
            "$tensor": self._tensor,
            "$pickle": self._unpickle,
            "$own": self._own_value,
            "$attributes": self._with_attributes,
            "$subclass": self._subclass,
        }
        if tag in special:
            return special[tag](payload)
        rule = BY_TAG.get(tag)
        if rule is None:
            self._corrupted(f"unknown tag {tag!r}: written by a newer version, or altered")
        inner = self.value(payload)
        if type(inner) is not rule.payload:
            self._corrupted(
                f"malformed {tag!r}: expected {rule.payload.__name__}, found {type(inner).__name__}"
            )
        if rule.cls in {set, frozenset} and isinstance(inner, list):
            _check_hashes(inner)
        value = rule.load(inner)
        if isinstance(value, ForeignValue) and tag != "$foreign":
            self.not_imported.add(value.type_name)
        return value

    def _own_value(self, payload: Any) -> Any:
        tag, document = payload
        if type(tag) is not str:
            raise TypeError("the tag of a registered type is text")
        path = render("", self._trail) or "the value"
        one = self._own.of_tag(tag)
        if one is None:
            raise ConfigError(
                f"{self._prefix}{path}: no type is registered here for the tag {tag!r}.",
                hint="call dist_ckpt.types.register_value_type for it before loading.",
            )
        inner = self.value(document)
        try:
            return one.load(inner)
        except Exception as error:
            raise CorruptedCheckpointError(
                f"{self._prefix}{path}: the load function of {tag!r} failed: {error!r}."
            ) from error

    def _pairs(self, payload: Any) -> dict[Any, Any]:
        if type(payload) is not list:
            raise TypeError(f"expected a list of pairs, found {type(payload).__name__}")
        items: dict[Any, Any] = {}
        keys = [self._child(position, key) for position, (key, _) in enumerate(payload)]
        _check_hashes(keys)
        for key, (_, document) in zip(keys, payload, strict=True):
            if key in items:
                raise ValueError(f"key {reprlib.repr(key)} stands there twice")
            items[key] = self._child(key, document)
        return items

    def _with_attributes(self, payload: Any) -> Any:
        value, attributes = self.value(payload)
        if type(value) not in {collections.OrderedDict, collections.Counter}:
            raise TypeError(f"attributes of a {type(value).__name__}")
        if type(attributes) is not dict or not all(type(name) is str for name in attributes):
            raise TypeError("expected attributes by their names")
        vars(value).update(attributes)
        return value

    def _tensor(self, number: Any) -> torch.Tensor:
        if type(number) is not int or not 0 <= number < len(self._tensors):
            raise ValueError(f"there is no tensor {number!r} among {len(self._tensors)}")
        return self._tensors[number]

    def _subclass(self, payload: Any) -> torch.Tensor:
        (module, qualname), sizes, inner, context = payload
        shape, stride = (tuple(size) for size in sizes)
        if not all(type(size) is int and size >= 0 for size in (*shape, *stride)):
            raise ValueError("expected sizes")
        cls = admitted_class(module, qualname)
        if cls is None:
            path = render("", self._trail) or "the value"
            raise UnsafeContentError(
                f"{self._prefix}{path}: a tensor of class {module}.{qualname}, which is not among "
                f"those that may be rebuilt here.",
                hint="import what defines it; if you trust the class, call "
                "torch.serialization.add_safe_globals with it.",
            )
        tensors = {name: self._child(name, one) for name, one in inner}
        if not all(isinstance(tensor, torch.Tensor) for tensor in tensors.values()):
            raise TypeError("expected tensors")
        parts = TensorParts(
            tensors=tensors, context=self.value(context), shape=shape, stride=stride
        )
        return join(cls, parts)

    def _unpickle(self, payload: Any) -> Any:
        name, data = payload["type"], from_base64(payload["data"])
        if not self._allow_pickle:
            raise UnsafeContentError(f"{self._prefix}{render('', self._trail)} is pickled")
        try:
            return pickle.loads(data)  # noqa: S301 - the caller trusts the source
        except Exception as error:
            path = render("", self._trail) or "the value"
            raise CheckpointingException(
                f"{self._prefix}{path}: cannot unpickle a {name}: {error!r}.",
                hint="the module that defines the class must be importable, in the same version.",
            ) from error


def _check_hashes(values: Sequence[Any]) -> None:
    """Raise if many values share a hash: to make a table of them takes the square of their number.

    Hashes of numbers are no secret.
    """
    if len(values) > _MOST_OF_A_HASH:
        ((_, most),) = collections.Counter(map(hash, values)).most_common(1)
        if most > _MOST_OF_A_HASH:
            raise ValueError(f"{most} keys or items have the same hash")


def _counter(items: dict[Any, Any]) -> collections.Counter[Any]:
    return collections.Counter(items)


def scan(document: object, trail: tuple[Any, ...], depth: int) -> Iterator[tuple[str, str]]:
    if depth > 3 * MAX_DEPTH:
        path = render("", trail)
        raise CorruptedCheckpointError(f"{path}: nested deeper than {MAX_DEPTH} levels.")
    if isinstance(document, list):
        for position, item in enumerate(document):
            yield from scan(item, (*trail, position), depth + 1)
    elif isinstance(document, dict):
        for key, inner in document.items():
            if key == "$pickle":
                name = inner.get("type") if isinstance(inner, dict) else None
                yield render("", trail), str(name or "of unknown class")
            elif key in PAIR_TAGS or key == "$defaultdict":
                has_factory = key == "$defaultdict" and isinstance(inner, list) and inner
                pairs = inner[-1] if has_factory else inner
                yield from _scan_pairs(pairs, trail, depth + 1)
            else:
                step = () if is_tag(key) else (unescape(str(key)),)
                yield from scan(inner, (*trail, *step), depth + 1)


def _scan_pairs(pairs: object, trail: tuple[Any, ...], depth: int) -> Iterator[tuple[str, str]]:
    if not isinstance(pairs, list):  # malformed: decode says so
        return
    for position, pair in enumerate(pairs):
        key = pair[0] if isinstance(pair, list) and pair else None
        step = key if isinstance(key, str | int) else position
        for item in pair if isinstance(pair, list) else [pair]:
            yield from scan(item, (*trail, step), depth + 1)
