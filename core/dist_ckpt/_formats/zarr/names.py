"""Keys of tensors -> directories of arrays.

Here: pure functions on names. Not here: what lies in the directories. Readers go by the names in
``index.json``, never by the rules here.
"""

from __future__ import annotations

import hashlib
import re
from typing import TYPE_CHECKING
from urllib.parse import quote

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["chunk_name", "is_pieces_name", "is_plain_path", "paths_of_keys", "pieces_name"]

_MAX_COMPONENT_NBYTES = 200
_MAX_PATH_NBYTES = 1024
_SAFE_COMPONENT = re.compile(r"[A-Za-z0-9_\-+=@,:~ \[\]()][A-Za-z0-9_.\-+=@,:~ \[\]()]*")
_PIECES = re.compile(r"\.pieces_\d+\.bin", re.ASCII)
_TAKEN_SUFFIXES = (".json", ".pt", ".sync", ".distcp")
"""What documents, sharded objects and locks beside the arrays end in, with us or with Megatron."""


def paths_of_keys(keys: Iterable[str]) -> dict[str, str]:
    """Return for each key the directory of its array, ``/``-separated, below the checkpoint.

    A key is its own path where that is safe: parts of plain characters, none of which begins with a
    dot, is very long, or ends like a file that is no array. No array lies within another, so that
    chunks of one never meet parts of the other's name. All other keys are percent-encoded into one
    part, or, when that is too long, named by their digest.
    """
    wanted = set(keys)
    plain = {key for key in wanted if is_plain_path(key)}
    nested = {key for key in plain if any(parent in plain for parent in _parents(key))}
    return {key: key if key in plain - nested else _escaped(key) for key in sorted(wanted)}


def is_plain_path(key: str) -> bool:
    """Whether a key may be a path below a checkpoint as it is, beside documents and arrays."""
    parts = key.split("/")
    return len(key) <= _MAX_PATH_NBYTES and all(
        _SAFE_COMPONENT.fullmatch(part)
        and len(part) <= _MAX_COMPONENT_NBYTES
        and not part.endswith((*_TAKEN_SUFFIXES, " "))
        for part in parts
    )


def chunk_name(cell: tuple[int, ...], zarr_format: int) -> str:
    """Return the file name of a chunk within its array's directory; numbers count cells."""
    numbers = ".".join(map(str, cell))
    if zarr_format == 2:  # noqa: PLR2004 - of zarr
        return numbers or "0"
    return f"c.{numbers}" if cell else "c"


def pieces_name(rank: int) -> str:
    """Return the file in which a rank puts down what other ranks write; no key has its name."""
    return f".pieces_{rank}.bin"


def is_pieces_name(name: str) -> bool:
    """Whether a name is one of ``pieces_name``."""
    return _PIECES.fullmatch(name) is not None


def _parents(key: str) -> Iterable[str]:
    at = key.find("/")
    while at >= 0:
        yield key[:at]
        at = key.find("/", at + 1)


def _escaped(key: str) -> str:
    """Return a name that no other key has: ``%`` never occurs in a safe one."""
    data = key.encode("utf-8", "surrogatepass")
    name = quote(data, safe=" +=@,:")
    if name.startswith(".") or name.endswith(_TAKEN_SUFFIXES):
        name = name.replace(".", "%2E")
    if "%" in name and len(name) <= _MAX_COMPONENT_NBYTES:
        return name
    return f"%-{hashlib.sha256(data).hexdigest()}"
