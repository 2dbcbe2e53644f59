"""JSON documents that carry their own checksum, and JSON that is read with care.

Here: ``sealed``, ``unsealed``, ``parse_document``. Not here: what the documents say. No torch: the
process that writes in the background uses it too.
"""

from __future__ import annotations

import json
import math
import reprlib
from collections import Counter
from collections.abc import Mapping
from typing import Any, NoReturn

from dist_ckpt.errors import CorruptedCheckpointError
from dist_ckpt.storage.checksums import digest

__all__ = ["has_seal", "parse_document", "sealed", "unsealed"]

_SEAL = b'{"xxh3_64":"'
_DIGITS = 16
_NO_DIGITS = b"0" * _DIGITS


def sealed(document: Mapping[str, Any], *, indent: int | None = None) -> bytes:
    """Return a document as JSON that begins with the checksum of all of it.

    The checksum is of the whole file with its own sixteen digits as zeros.
    """
    separators = (",", ":") if indent is None else None
    body = json.dumps(document, indent=indent, separators=separators).encode("ascii")
    rest = b'",' + body.removeprefix(b"{")
    number = digest(_SEAL + _NO_DIGITS + rest)
    return _SEAL + f"{number:016x}".encode("ascii") + rest


def has_seal(data: bytes, seal: str) -> bool:
    """Whether these are the bytes that ``sealed`` gave the checksum ``seal``, unaltered."""
    begin = _SEAL + seal.encode()
    return data.startswith(begin + b'"') and (
        f"{digest(_SEAL + _NO_DIGITS + data[len(begin) :]):016x}" == seal
    )


def unsealed(data: bytes, *, where: str) -> dict[str, Any]:
    """Return a document of ``sealed``, if it is just as it was written.

    Raises:
        CorruptedCheckpointError: It is not, or no JSON object, or a key stands there twice.
    """
    start, end = len(_SEAL), len(_SEAL) + _DIGITS
    found = f"{digest(_SEAL + _NO_DIGITS + data[end:]):016x}".encode("ascii")
    if data[:start] != _SEAL or data[start:end] != found:
        raise CorruptedCheckpointError(
            f"{where}: its checksum is {found.decode()}, and not what its first bytes say: "
            f"{data[:end]!r}.",
            hint="the file was altered or cut short, or is not ours; use another checkpoint.",
        )
    return parse_document(data, where=where)


def parse_document(data: bytes, *, where: str) -> dict[str, Any]:
    """Return a JSON object of a checkpoint.

    Raises:
        CorruptedCheckpointError: It is none, a key stands there twice, or a number is not finite.
    """
    try:
        document = json.loads(
            data.decode(),
            object_pairs_hook=_unique_pairs,
            parse_constant=_no_number,
            parse_float=_finite,
        )
        if type(document) is not dict:
            raise TypeError(f"a {type(document).__name__}, expected an object")
    except (ValueError, TypeError, RecursionError) as error:
        raise CorruptedCheckpointError(
            f"{where}: not a document of ours ({type(error).__name__}: {error})."
        ) from error
    return document


def _unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        ((twice, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"{reprlib.repr(twice)} stands there twice")
    return found


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{reprlib.repr(text)} is too large a number")
    return value
