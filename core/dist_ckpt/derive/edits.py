"""Whether somebody has edited a state dict that was lent to them.

Here: ``LentStateDict``. Not here: who lends it, what follows from an edit. Local; called by the
adapters around hooks of the user's.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import torch

__all__ = ["LentStateDict"]

_PLAIN = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.Size)


class LentStateDict:
    """What stood in a state dict when it was lent: entries, what is in them, and ``_metadata``.

    No tensor is copied: torch counts the changes in place. Of an object that is neither a tensor, a
    container nor plain data only the identity is known.
    """

    def __init__(self, state_dict: Mapping[str, Any]) -> None:
        """Note what is there now."""
        self._entries = dict(state_dict)
        self._content = _content(state_dict), _content(getattr(state_dict, "_metadata", None))

    def was_edited(self, now: Mapping[str, Any]) -> bool:
        """Whether ``now``, the same state dict or what was put in its place, says anything else."""
        before = self._entries
        if now.keys() != before.keys() or any(now[name] is not before[name] for name in now):
            return True
        return self._content != (_content(now), _content(getattr(now, "_metadata", None)))


def _content(value: Any) -> Any:
    """Return what is equal as long as a value is as it was."""
    if isinstance(value, torch.Tensor):
        return id(value), _changes(value)
    if isinstance(value, Mapping):
        return type(value), [(key, _content(one)) for key, one in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value), [_content(one) for one in value]
    if isinstance(value, (set, frozenset, bytearray)):
        return type(value), frozenset(value) if not isinstance(value, bytearray) else bytes(value)
    if isinstance(value, io.BytesIO):
        return id(value), value.getvalue()
    return (type(value), value) if type(value) in _PLAIN else id(value)


def _changes(tensor: torch.Tensor) -> int:
    """Return how often a tensor was changed in place; 0 if it is not counted (inference mode)."""
    return 0 if tensor.is_inference() else tensor._version  # noqa: SLF001 - no other way to see it
