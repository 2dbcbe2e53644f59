"""Tags and paths of the document, and how deep it may be.

Here: what encoder and decoder must agree on besides the table. Not here: the types (``table``).
"""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from typing import Final

__all__ = ["MAX_DEPTH", "PAIR_TAGS", "escape", "is_tag", "render", "unescape"]

MAX_DEPTH: Final = 100
"""Documents nest at most this deep, so that neither this code nor a JSON parser overflows."""

PAIR_TAGS: Final = frozenset({"$dict", "$ordered_dict", "$counter"})
"""Tags whose payload is a list of ``[key, value]`` pairs."""


def is_tag(key: object) -> bool:
    return isinstance(key, str) and key.startswith("$") and not key.startswith("$$")


def escape(key: str) -> str:
    return f"${key}" if key.startswith("$") else key


def unescape(key: str) -> str:
    return key[1:] if key.startswith("$$") else key


def render(root: str, trail: Sequence[object]) -> str:
    """Return a path as one would write it in python: ``root.key['odd key'][0]``."""
    text = root
    for step in trail:
        if type(step) is str and step.isidentifier():
            text += f".{step}" if text else step
        else:
            text += f"[{reprlib.repr(step)}]"
    return text
