"""Pickles of others, taken apart without making anything real.

Here: what stands for a pickled instance. Not here: what a pickle may cost (``pickle_bounds``),
which names one may use (``mcore``, ``payload``, ``unpickle``). Called on every rank.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch

__all__ = ["Node", "Refused", "ordered_dict", "size", "torch_constant"]

_MAX_AXES = 64


class Refused(Exception):  # noqa: N818 - becomes an error of our tree where it is caught
    """A pickle holds more than plain values; the text says what."""


class Node:
    """A pickled instance of anything: what it was called with, and its state; no behaviour."""

    def __init__(self, *args: object) -> None:
        """Keep the arguments."""
        self.args = args
        self.state: Any = {}

    def __setstate__(self, state: object) -> None:
        """Keep the state."""
        self.state = state

    @property
    def kind(self) -> str:
        """Name of the class it stands for."""
        return type(self).__name__

    def get(self, name: str, default: object = None) -> Any:
        """Return an attribute of the pickled instance."""
        return self.state.get(name, default)


def torch_constant(name: str) -> object | None:
    """Return ``torch.<name>`` if it is a dtype, a layout or a memory format."""
    value = vars(torch).get(name)
    return value if isinstance(value, torch.dtype | torch.layout | torch.memory_format) else None


def size(values: object = ()) -> tuple[Any, ...]:
    """Return what ``torch.Size(values)`` in a pickle means, as a tuple; copies nothing large."""
    if not isinstance(values, list | tuple) or len(values) > _MAX_AXES:
        raise ValueError(f"expected at most {_MAX_AXES} sizes")
    return tuple(values)


def ordered_dict() -> OrderedDict[Any, Any]:
    """Return what ``OrderedDict()`` in a pickle means; its items come one by one."""
    return OrderedDict()
