"""Tensors of classes that wrap other tensors (``__tensor_flatten__``), taken apart and rebuilt.

Here: what such a tensor is made of, and the classes that a document may name. Not here: their
documents (``encoder``, ``decoder``).

A document's class is rebuilt only if the program, or the library that defines it, has declared it
safe to rebuild (``torch.serialization.add_safe_globals``): the rule of ``torch.load``. What is
called then is its ``__tensor_unflatten__``, with tensors and a context of safe values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

__all__ = [
    "TensorParts",
    "admitted_class",
    "is_admitted",
    "is_distributed",
    "is_wrapper",
    "join",
    "take_apart",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorParts:
    """What a tensor of a wrapper class is made of.

    Attributes:
        tensors: The tensors in it by name, not detached; each may be of a wrapper class again.
        context: What else ``__tensor_flatten__`` returns.
        shape: Of the outer tensor.
        stride: Likewise.
    """

    tensors: dict[str, torch.Tensor]
    context: Any
    shape: tuple[int, ...]
    stride: tuple[int, ...]


def is_wrapper(value: object) -> bool:
    """Whether this is a tensor made of other tensors, and of a class that says how.

    A ``DTensor`` is none: what it holds is described by its placements. Nor is a nested tensor,
    whose shape is symbolic.
    """
    return (
        isinstance(value, torch.Tensor)
        and type(value) not in {torch.Tensor, torch.nn.Parameter}
        and not is_distributed(type(value))
        and not value.is_nested
        and is_traceable_wrapper_subclass(value)
    )


def take_apart(value: torch.Tensor) -> TensorParts:
    """Return what the tensor is made of; its tensors alias it."""
    wrapper: Any = value
    names, context = wrapper.__tensor_flatten__()
    return TensorParts(
        tensors={name: getattr(wrapper, name) for name in names},
        context=context,
        shape=tuple(value.shape),
        stride=tuple(value.stride()),
    )


def join(cls: type, parts: TensorParts) -> torch.Tensor:
    """Return a tensor of a wrapper class, made of ``parts``.

    Raises:
        ValueError: What the class made of them is not what the parts say.
    """
    unflatten: Any = cls.__tensor_unflatten__  # type: ignore[attr-defined]  # of every wrapper class
    try:
        with torch.no_grad():
            value: torch.Tensor = unflatten(parts.tensors, parts.context, parts.shape, parts.stride)
    except AssertionError as error:  # how such classes check what they are given
        raise ValueError(f"{cls.__name__} cannot be made of these parts: {error}") from error
    if type(value) is not cls or tuple(value.shape) != parts.shape:
        raise ValueError(
            f"{cls.__name__} made a {type(value).__name__} of shape "
            f"{tuple(getattr(value, 'shape', ()))}, expected shape {parts.shape}"
        )
    return value


def is_admitted(cls: type) -> bool:
    """Whether the class is one that ``torch.load(weights_only=True)`` rebuilds in this process."""
    return any(admitted is cls for admitted in _safe_globals())


def admitted_class(module: object, qualname: object) -> type | None:
    """Return the wrapper class of that name if it is admitted; imports and calls nothing."""
    for cls in _safe_globals():
        if (cls.__module__, cls.__qualname__) == (module, qualname):
            return cls
    return None


def _safe_globals() -> list[type]:
    listed = torch.serialization.get_safe_globals()
    entries = [entry[0] if isinstance(entry, tuple) else entry for entry in listed]
    return [
        cls
        for cls in entries
        if isinstance(cls, type)
        and issubclass(cls, torch.Tensor)
        and hasattr(cls, "__tensor_flatten__")
        and hasattr(cls, "__tensor_unflatten__")
        and not is_distributed(cls)
    ]


def is_distributed(cls: type) -> bool:
    """Whether this is ``DTensor`` or another tensor class of torch.distributed."""
    return any(base.__module__.startswith("torch.distributed.") for base in cls.__mro__)
