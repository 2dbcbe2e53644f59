"""Live tensors of wrapper classes (``__tensor_flatten__``): as named plain tensors, and back.

Here: ``flatten``, the form that a load compares, and rebuilding after the pattern of a live tensor.
Not here: values of such classes in a document (``_codec.subclasses``). Local, on every rank.

Nothing here looks a class up by a name from a checkpoint: the form is only compared, and what is
rebuilt has the class and the context of the live tensor. A ``DTensor`` is no such tensor; its local
tensor may be one.

Example:
    >>> import torch
    >>> flatten(torch.ones(2))  # a plain tensor stands for itself, under the name ""
    Flattened(tensors={'': tensor([1., 1.])}, form=None)
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from dist_ckpt._codec.subclasses import is_wrapper, join, take_apart
from dist_ckpt.errors import InvalidShardingError, MismatchError

__all__ = ["Flattened", "check_form", "flatten", "is_wrapper", "rebuild"]

Form = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Flattened:
    """A tensor as plain ones.

    Attributes:
        tensors: Plain detached tensors that alias the live one, by name: the attributes' names,
            joined by ``/`` where a wrapped tensor is of a wrapper class itself; ``""`` for a tensor
            of no wrapper class.
        form: Class, shape, dtype and context, as JSON types: equal forms mean that the tensors are
            read in the same way. None for a tensor of no wrapper class.
    """

    tensors: dict[str, torch.Tensor]
    form: Form | None


def flatten(value: torch.Tensor) -> Flattened:
    """Take a tensor apart; to fill the tensors that are returned fills ``value``.

    Raises:
        InvalidShardingError: A context that cannot be compared, or an inner tensor of a class that
            says nothing of what it is made of.
    """
    tensors: dict[str, torch.Tensor] = {}
    form = _flatten_into(tensors, value, "")
    return Flattened(tensors=tensors, form=form)


def check_form(live: torch.Tensor, stored: object, *, name: str) -> None:
    """Compare the form that a checkpoint has with that of the tensor to fill.

    Args:
        live: The tensor.
        stored: ``Flattened.form`` of the saved one, as JSON returned it.
        name: Of the tensor, for the error.

    Raises:
        MismatchError: Another class, shape, dtype or context.
    """
    own = flatten(live).form
    if own != stored:
        differing = _differences(stored, own, "")
        raise MismatchError(
            f"{name!r}: the stored tensor and the live one are made in different ways: "
            f"{'; '.join(differing)}.",
            hint="quantise, wrap or configure the model or optimizer as it was at saving.",
        )


def rebuild(template: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return a new tensor like ``template`` that is made of ``tensors``, without copying them.

    Args:
        template: A live tensor: its class, context and shape are taken.
        tensors: By the names that ``flatten(template)`` gives.

    Raises:
        MismatchError: Other names, or a shape that differs from the template's.
    """
    expected = flatten(template).tensors
    problems = [
        f"{name or 'the tensor'}: expected {_shape(expected.get(name))}, "
        f"found {_shape(tensors.get(name))}"
        for name in sorted({*expected, *tensors})
        if _shape(expected.get(name)) != _shape(tensors.get(name))
    ]
    if problems:
        raise MismatchError(
            f"a {type(template).__name__} cannot be made of what was loaded: {'; '.join(problems)}."
        )
    return _rebuilt(template, tensors, "")


def _flatten_into(tensors: dict[str, torch.Tensor], value: torch.Tensor, name: str) -> Form | None:
    if not is_wrapper(value):
        if type(value) not in {torch.Tensor, torch.nn.Parameter, torch.nn.Buffer}:
            raise InvalidShardingError(
                f"{name or 'the tensor'} is a {type(value).__name__}, which does not say by "
                f"__tensor_flatten__ what it is made of."
            )
        tensors[name] = value.detach()
        return None
    parts = take_apart(value)
    inner = {
        short: _flatten_into(tensors, one, f"{name}/{short}" if name else short)
        for short, one in parts.tensors.items()
    }
    return {
        "class": _class_name(type(value)),
        "shape": list(parts.shape),
        "dtype": str(value.dtype),
        "context": _comparable(parts.context, type(value)),
        "tensors": inner,
    }


def _rebuilt(
    template: torch.Tensor, tensors: Mapping[str, torch.Tensor], name: str
) -> torch.Tensor:
    if not is_wrapper(template):
        return tensors[name]
    parts = take_apart(template)
    inner = {
        short: _rebuilt(one, tensors, f"{name}/{short}" if name else short)
        for short, one in parts.tensors.items()
    }
    return join(type(template), replace(parts, tensors=inner))


def _comparable(value: object, cls: type) -> Any:
    """Return a context as JSON types. Devices are left out: a load may be for another one."""
    if value is None or type(value) in {bool, int, float, str}:
        return value
    if isinstance(value, Mapping):
        return {str(key): _comparable(one, cls) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_comparable(one, cls) for one in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        values = {one.name: _comparable(getattr(value, one.name), cls) for one in fields}
        return {"class": _class_name(type(value)), **values}
    text = _as_text(value)
    if text is None:
        raise InvalidShardingError(
            f"the context of a {_class_name(cls)} has a {_class_name(type(value))}, which cannot "
            f"be compared with that of the tensor a checkpoint is loaded into."
        )
    return text


def _as_text(value: object) -> str | None:
    if isinstance(value, torch.device):
        return "device"
    if isinstance(value, enum.Enum):
        return f"{_class_name(type(value))}.{value.name}"
    if isinstance(value, type):
        return _class_name(value)
    plain = (torch.dtype, torch.layout, torch.memory_format, bool, int, float, str)
    return str(value) if isinstance(value, plain) else None


def _differences(stored: object, own: object, where: str) -> list[str]:
    if isinstance(stored, dict) and isinstance(own, dict):
        keys = dict.fromkeys([*stored, *own])
        steps = ((key, f"{where}.{key}".removeprefix(".")) for key in keys)
        return [
            text
            for key, step in steps
            for text in _differences(stored.get(key), own.get(key), step)
        ]
    if stored == own:
        return []
    return [f"{where or 'class'}: stored {_brief(stored)}, now {_brief(own)}"]


def _brief(value: object) -> str:
    if isinstance(value, dict) and "class" in value:
        return f"a {value['class']}"
    return "a plain tensor" if value is None else repr(value)


def _shape(tensor: torch.Tensor | None) -> object:
    return None if tensor is None else tuple(tensor.shape)


def _class_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
