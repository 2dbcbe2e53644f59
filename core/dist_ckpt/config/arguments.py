"""How a class that takes the configuration shows its fields as keyword arguments.

Here: ``takes_fields``, for the run time: ``inspect.signature``, ``help`` and jsonargparse. Not
here: the fields (``models``), and what type checkers read (``fields``). Called by the adapters,
when their class is defined.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from typing import Any, TypeVar, get_type_hints

from dist_ckpt.config.models import DistCkptConfig

__all__ = ["keyword_parameters", "takes_fields"]

_Class = TypeVar("_Class", bound=type[Any])
_PLACE = re.compile(r"(?m)^( *)\*\*fields: .*$")
_DOC_WIDTH = 100


def takes_fields(cls: _Class) -> _Class:
    """Show the fields of the configuration in the signature and the docstring of ``cls``.

    Its ``__init__`` takes ``**fields: Unpack[ConfigFields]``, and its docstring has a line
    ``**fields: ...``, in the place of which each field is described. Every field shows None as its
    default: it is not given then, and comes from the environment, from YAML or from the model.
    """
    init = vars(cls)["__init__"]
    signature = inspect.signature(init)
    this, *own = (p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD)
    init.__signature__ = signature.replace(parameters=[this, *keyword_parameters(), *own])
    if cls.__doc__:  # python -OO has none
        cls.__doc__ = _PLACE.sub(lambda place: _described(place[1]), cls.__doc__)
    return cls


def keyword_parameters() -> list[inspect.Parameter]:
    """Return each field as a keyword-only parameter that may be None."""
    types = get_type_hints(DistCkptConfig)  # without bounds, also those inside of a union
    return [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=types[name] | None
        )
        for name in DistCkptConfig.model_fields
    ]


def _described(indent: str) -> str:
    return "\n".join(
        textwrap.fill(
            f"{name}: {inspect.cleandoc(field.description or '')}",
            _DOC_WIDTH,
            initial_indent=indent,
            subsequent_indent=f"{indent}    ",
        )
        for name, field in DistCkptConfig.model_fields.items()
    )
