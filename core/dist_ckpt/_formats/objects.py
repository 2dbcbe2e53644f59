"""Objects as tensors: a sharded object's typed JSON document becomes a uint8 tensor.

Here: sharded objects and the common part to shards to write, and back. Not here: the JSON codec
(``_codec``). Nothing is pickled by default, see ``_codec``; so DCP shows such an object as bytes.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from dist_ckpt._codec import Encoded, decode, encode, iter_pickled
from dist_ckpt._sharding.table import local_shards
from dist_ckpt.errors import CorruptedCheckpointError
from dist_ckpt.mapping import ShardedTensor, is_main_replica
from dist_ckpt.storage.sealed import parse_document

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dist_ckpt._sharding.table import LocalShards
    from dist_ckpt.mapping import ShardedObject
    from dist_ckpt.types import StateDict

__all__ = [
    "COMMON_KEY",
    "DocumentPadding",
    "EncodedCommon",
    "PickleReport",
    "decode_document",
    "encode_alone",
    "encode_common",
    "object_shards",
    "part_key",
    "pickle_report",
]

logger = logging.getLogger(__name__)

COMMON_KEY = "common"
DOCUMENT_VERSION = 1
_READABLE_NBYTES = 1 << 14
_REFERENCE_NBYTES = len('{"$tensor":0}')
_MOST_REPORTED = 10_000


@dataclass(frozen=True, slots=True)
class EncodedCommon:
    """The common part: the bytes of ``common.json``, and the tensors in it as shards."""

    data: bytes
    shards: LocalShards


class DocumentPadding:
    """Pads each object's document to the length that it had at the last save.

    A document whose length differs from save to save (random states, floats) would make a new plan
    each time. Spaces at the end change nothing in JSON.
    """

    def __init__(self) -> None:
        """Start without a length for any key."""
        self._nbytes: dict[str, int] = {}

    def padded(self, key: str, data: bytes) -> bytes:
        """Return a document with spaces at the end, as long as the last one of its key if it fits.

        A new length is an eighth more than needed, and at least 64 bytes more.
        """
        if len(data) > self._nbytes.get(key, 0):
            self._nbytes[key] = max(len(data) + len(data) // 8, len(data) + 64)
        return data.ljust(self._nbytes[key])


def part_key(key: str, number: int) -> str:
    """Return the key of tensor ``number`` inside the document of ``key``."""
    return f"{key}/part_{number}"


def encode_common(common: StateDict) -> EncodedCommon:
    """Return the common part, encoded. Rank 0 only."""
    encoded = _encode(common, "common")
    shards = local_shards(_parts(COMMON_KEY, encoded.tensors), role="part")
    document = _document(encoded.document, len(encoded.tensors), is_read=True)
    return EncodedCommon(document, shards)


def object_shards(
    objects: Sequence[ShardedObject], padding: DocumentPadding | None = None
) -> LocalShards:
    """Return the main replicas of ``objects`` as shards to write.

    Args:
        objects: All that this rank has.
        padding: Makes documents as long as those of the last save.
    """
    documents, parts = [], []
    for one in objects:
        if not is_main_replica(one.replica_id):
            continue
        key = one.unique_key
        encoded = _encode(one.data, one.key)
        data = _document(encoded.document, len(encoded.tensors))
        if padding is not None:
            data = padding.padded(key, data)
        documents.append(_whole(key, torch.frombuffer(bytearray(data), dtype=torch.uint8)))
        parts += _parts(key, encoded.tensors)
    return local_shards(documents, role="object") + local_shards(parts, role="part")


def decode_document(
    data: bytes,
    *,
    key: str,
    where: str,
    allow_pickle: bool,
    fetch: Callable[[Sequence[str]], Sequence[torch.Tensor]],
) -> Any:
    """Return the object of a document.

    Args:
        data: The document.
        key: Key of the object, ``common`` for the common part.
        where: File or key, for errors.
        allow_pickle: Whether pickled values may be loaded.
        fetch: Reads whole tensors by their keys.
    """
    wrapper = parse_document(data, where=where)
    try:
        version, document, count = wrapper["version"], wrapper["document"], wrapper["tensors"]
    except KeyError as error:
        raise CorruptedCheckpointError(f"{where}: not a document of ours ({error}).") from error
    # Each tensor is referred to in the document: a number alone takes no memory.
    most = len(data) // _REFERENCE_NBYTES
    is_ours = type(version) is int and version == DOCUMENT_VERSION
    if not is_ours or type(count) is not int or not 0 <= count <= most:
        raise CorruptedCheckpointError(
            f"{where}: not a document of ours (version {version!r}, tensors {count!r})."
        )
    tensors = fetch([part_key(key, number) for number in range(count)])
    value = decode(document, tensors, allow_pickle=allow_pickle, where=where)
    if key == COMMON_KEY and not isinstance(value, dict):
        raise CorruptedCheckpointError(f"{where}: a {type(value).__name__}, expected a dict.")
    return value


def encode_alone(value: object, key: str) -> tuple[bytes, Sequence[torch.Tensor]]:
    """Return a value's document and the tensors in it, to be stored by the caller."""
    encoded = _encode(value, key)
    return _document(encoded.document, len(encoded.tensors), is_read=True), encoded.tensors


class PickleReport:
    """Tells of what had to be pickled, once for each place and class: saves repeat."""

    def __init__(self) -> None:
        """Begin with nothing told."""
        self._told: set[tuple[str, str, str]] = set()

    def tell(self, key: str, document: object) -> None:
        """Warn of the pickled values in ``document`` that have not been told yet."""
        found = {(key, where, name) for where, name in iter_pickled(document)} - self._told
        if not found or len(self._told) > _MOST_REPORTED:
            return
        self._told |= found
        logger.warning(
            "pickled, so that loading needs allow_pickle=True: %s, all below %r; "
            "dist_ckpt.types.register_value_type stores a class without pickle",
            ", ".join(f"{where or 'the value'} ({name})" for _, where, name in sorted(found)),
            key,
        )


pickle_report = PickleReport()
"""What this process has told."""


def _encode(value: object, path: str) -> Encoded:
    encoded = encode(value, path=path)
    if encoded.has_pickles:
        pickle_report.tell(path, encoded.document)
    return encoded


def _document(document: object, count: int, *, is_read: bool = False) -> bytes:
    """Return the JSON of a document; in lines if people read it and it is short."""
    wrapper = {"version": DOCUMENT_VERSION, "tensors": count, "document": document}
    data = json.dumps(wrapper)
    # In lines it is made without the encoder in C, several times as slowly.
    if is_read and len(data) <= _READABLE_NBYTES:
        data = json.dumps(wrapper, indent=1)
    return data.encode("ascii")


def _parts(key: str, tensors: Sequence[torch.Tensor]) -> list[ShardedTensor]:
    return [_whole(part_key(key, number), tensor) for number, tensor in enumerate(tensors)]


def _whole(key: str, tensor: torch.Tensor) -> ShardedTensor:
    shape = tuple(tensor.shape)
    return ShardedTensor(
        key, tensor.detach(), tensor.dtype, shape, shape, (0,) * len(shape), (1,) * len(shape)
    )
