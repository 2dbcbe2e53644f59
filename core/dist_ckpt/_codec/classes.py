"""Values of classes that a program defines itself, told by the class's name.

Here: members of enums, named tuples, dicts of known subclasses, and a few classes as values; and
how such a name becomes a class again. Not here: the table of fixed types (``table``).

A name in a document never imports anything and calls nothing. It is looked for among the modules
that the program has already imported, step by step in their dictionaries, so that no lazy attribute
is woken. What is found must be a class of the right kind, and of that only a member is taken, or an
instance made without its own ``__new__`` and ``__init__``. Where the class is not there, a
``ForeignValue`` stands for the value.
"""

from __future__ import annotations

import enum
import functools
import operator
import sys
import types
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import torch

from dist_ckpt.types import ForeignValue

__all__ = [
    "dump_enum",
    "dump_known_dict",
    "dump_named_tuple",
    "dump_type",
    "is_known_dict",
    "is_named_tuple",
    "load_enum",
    "load_known_dict",
    "load_named_tuple",
    "load_type",
]

_KNOWN_DICTS: Final = frozenset(
    {
        ("lightning.fabric.utilities.data", "AttributeDict"),
        ("lightning_fabric.utilities.data", "AttributeDict"),
    }
)
"""Subclasses of dict that hold nothing but their items."""

_KNOWN_TYPES: Final[Mapping[str, type]] = types.MappingProxyType(
    {
        f"{one.__module__}.{one.__qualname__}": one
        for one in (
            *(bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset, type(None)),
            *(
                one
                for one in vars(np).values()
                if isinstance(one, type) and issubclass(one, np.generic)
            ),
            *(torch.Tensor, torch.nn.Parameter),
        )
    }
)
"""Classes that may be values: calling one with anything makes plain data of it."""

_CONFIG_TYPES: Final = frozenset(
    {"omegaconf.dictconfig.DictConfig", "omegaconf.listconfig.ListConfig"}
)
_PLAIN: Final = (bool, int, float, str, bytes, type(None))


def imported_class(module: object, qualname: object) -> type | None:
    """Return the class of that name if the program has imported it; runs nothing."""
    if type(module) is not str or type(qualname) is not str:
        raise ValueError("the name of a class is text")
    found: Any = sys.modules.get(module)
    if not isinstance(found, types.ModuleType):
        return None
    names = object.__getattribute__(found, "__dict__")  # a lazy module would wake up
    for part in qualname.split("."):
        found = names.get(part)
        if not isinstance(found, type):
            return None
        names = type.__getattribute__(found, "__dict__")
    return found if isinstance(found, type) else None


def _name(cls: type) -> list[str]:
    return [cls.__module__, cls.__qualname__]


def dump_enum(value: enum.Enum) -> Any:
    """Return ``[module, class, member names, value]``; the value only where it is plain."""
    cls = type(value)
    if value.name in cls.__members__:
        names = [value.name]
    elif isinstance(value, enum.Flag):
        names = [one.name for one in cls if _bits(one) & _bits(value) == _bits(one) != 0]
        known = functools.reduce(operator.or_, (_bits(cls[name]) for name in names), 0)
        if known != _bits(value):
            return NotImplemented  # bits without a name
    else:
        return NotImplemented
    plain = value.value if _is_plain(value.value) else None
    return [*_name(cls), names, plain]


def _bits(member: Any) -> int:
    return int(member.value)


def _is_plain(value: object) -> bool:
    if type(value) is tuple:
        return all(type(one) in _PLAIN for one in value)
    return type(value) in _PLAIN


def load_enum(payload: list[Any]) -> Any:
    """Return the member, or what stands for it."""
    module, qualname, names, value = payload
    if type(names) is not list or not all(type(name) is str for name in names):
        raise ValueError("expected names of members")
    cls = imported_class(module, qualname)
    if cls is None or not issubclass(cls, enum.Enum):
        return ForeignValue(f"{module}.{qualname}", value)
    members = [cls.__members__.get(name) for name in names]
    if None in members or (len(members) != 1 and not issubclass(cls, enum.Flag)):
        return ForeignValue(f"{module}.{qualname}", value)
    if len(members) == 1:
        return members[0]
    return functools.reduce(operator.or_, members, cls(0))


def is_named_tuple(cls: type) -> bool:
    """Whether ``cls`` was made by ``namedtuple`` or ``NamedTuple`` and is no further subclass."""
    fields = getattr(cls, "_fields", None)
    return (
        cls.__bases__ == (tuple,)
        and cls.__dictoffset__ == 0  # nothing but its items
        and type(fields) is tuple
        and all(type(name) is str for name in fields)
    )


def dump_named_tuple(value: Any) -> Any:
    """Return ``[module, class, fields, items]``; one that was made with other items is pickled."""
    if len(value) != len(value._fields):
        return NotImplemented
    return [*_name(type(value)), list(value._fields), list(value)]


def load_named_tuple(payload: list[Any]) -> Any:
    """Return the named tuple, or what stands for it."""
    module, qualname, fields, items = payload
    if type(fields) is not list or type(items) is not list or len(fields) != len(items):
        raise ValueError("expected as many items as fields")
    cls = imported_class(module, qualname)
    if cls is None or not is_named_tuple(cls) or list(cls._fields) != fields:  # type: ignore[attr-defined]  # asked just before
        return ForeignValue(f"{module}.{qualname}", *items)
    return tuple.__new__(cls, items)


def is_known_dict(cls: type) -> bool:
    """Whether ``cls`` is one of the subclasses of dict that may be written as their items."""
    return (cls.__module__, cls.__qualname__) in _KNOWN_DICTS and issubclass(cls, dict)


def dump_known_dict(value: dict[Any, Any]) -> Any:
    """Return ``[module, class, dict]``."""
    return NotImplemented if vars(value) else [*_name(type(value)), dict(value)]


def load_known_dict(payload: list[Any]) -> Any:
    """Return the dict of its class, or what stands for it."""
    module, qualname, items = payload
    if (module, qualname) not in _KNOWN_DICTS or type(items) is not dict:
        raise ValueError(f"no known kind of dict: {module!r}, {qualname!r}")
    cls = imported_class(module, qualname)
    if cls is None or not is_known_dict(cls):
        return ForeignValue(f"{module}.{qualname}", items)
    value: dict[Any, Any] = dict.__new__(cls)
    dict.update(value, items)
    return value


def dump_type(value: type) -> Any:
    """Return the name of a class that may be a value."""
    name = ".".join(_name(value))
    is_known = _KNOWN_TYPES.get(name) is value or name in _CONFIG_TYPES
    return name if is_known else NotImplemented


def load_type(name: str) -> Any:
    """Return the class, or what stands for it."""
    if name in _CONFIG_TYPES:
        return imported_class(*name.rsplit(".", 1)) or ForeignValue(name)
    return _KNOWN_TYPES[name]
