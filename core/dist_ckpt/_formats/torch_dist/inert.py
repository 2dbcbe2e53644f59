"""Pickles of others, taken apart without making anything real.

Here: what stands for a pickled instance, and what a pickle may not do to the unpickler. Not here:
which names a pickle may use (``mcore``, ``payload``). Called on every rank.
"""

from __future__ import annotations

import pickletools
from typing import Any

import torch

__all__ = ["Node", "check_memo", "torch_constant"]


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
    value = getattr(torch, name, None) if name.isidentifier() else None
    return value if isinstance(value, torch.dtype | torch.layout | torch.memory_format) else None


def check_memo(data: bytes) -> None:
    """Raise if the pickle puts at a memo index that its length cannot have reached.

    The C unpickler keeps an array as long as the highest index: five bytes could take 64 GiB.
    """
    for opcode, argument, _ in pickletools.genops(data):
        if opcode.name not in {"PUT", "BINPUT", "LONG_BINPUT"}:
            continue
        if not isinstance(argument, int) or not 0 <= argument <= len(data):
            raise ValueError(f"memo index {argument} in a pickle of {len(data)} bytes")
