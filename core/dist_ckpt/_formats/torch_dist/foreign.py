"""Objects that other writers left in their checkpoints, as ``torch.save`` records.

Here: reading them with ``weights_only=True``, or unguarded when the caller allows it. Not here:
our own objects (``objects``). Runs on every rank for itself.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import torch

from dist_ckpt.errors import CorruptedCheckpointError, UnsafeContentError
from dist_ckpt.storage import Extent, LocalStore

if TYPE_CHECKING:
    from pathlib import Path

    from dist_ckpt._formats.torch_dist.contents import CheckpointContents
    from dist_ckpt._formats.torch_dist.metadata import StoredBytes
    from dist_ckpt.types import StateDict

__all__ = ["COMMON_PT", "foreign_common", "read_foreign_object"]

COMMON_PT = "common.pt"
_MAX_NBYTES = 1 << 31
_OBJECT_MARK = "/shard_"


def foreign_common(contents: CheckpointContents, *, allow_pickle: bool) -> StateDict:
    """Return what another writer stored beside tensors: ``common.pt`` and DCP's byte objects.

    Objects stand at the nested path that the writer noted for their flat key. Sharded objects of
    Megatron-Core (``key/shard_...``) are not common and are left out.
    """
    common: StateDict = {}
    store = LocalStore(contents.directory)
    if store.nbytes(COMMON_PT) is not None:
        data = store.read(COMMON_PT, max_nbytes=_MAX_NBYTES)
        where = contents.directory / COMMON_PT
        common = _unpickled(data, str(where), where, allow_pickle=allow_pickle)
    for key, stored in contents.objects.items():
        if _OBJECT_MARK not in key:
            value = read_foreign_object(contents.directory, key, stored, allow_pickle=allow_pickle)
            try:
                _place(common, contents.paths.get(key, (key,)), value)
            except (AttributeError, TypeError, ValueError, IndexError) as error:
                raise CorruptedCheckpointError(
                    f"{contents.directory}: the path of {key!r} does not fit those of other keys "
                    f"({error})."
                ) from error
    return common


def read_foreign_object(
    directory: Path, key: str, stored: StoredBytes, *, allow_pickle: bool
) -> Any:
    """Return one object of another writer.

    Raises:
        UnsafeContentError: It needs more than tensors and plain values, and pickle is not allowed.
    """
    data = bytearray(stored.nbytes)
    extent = Extent(stored.position, memoryview(data))
    LocalStore(directory).read_ranges(stored.file, [extent])
    return _unpickled(bytes(data), key, directory / stored.file, allow_pickle=allow_pickle)


def _unpickled(data: bytes, what: str, where: Path, *, allow_pickle: bool) -> Any:
    import pickle  # noqa: PLC0415 - for the name of its error only

    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=not allow_pickle)
    except pickle.UnpicklingError as error:
        if not allow_pickle:
            reason = str(error).split("\n", maxsplit=1)[0]
            raise UnsafeContentError(
                f"{what!r} in {where} is pickled and holds more than tensors and plain values "
                f"({reason}).",
                hint="allow_pickle=True loads it, which runs code from the checkpoint.",
            ) from error
        raise CorruptedCheckpointError(f"{what!r} in {where}: {error}") from error
    except Exception as error:  # a torn record makes torch raise almost anything
        raise CorruptedCheckpointError(f"{what!r} in {where}: not a record ({error}).") from error


def _place(tree: StateDict, path: tuple[str | int, ...], value: object) -> None:
    node: Any = tree
    for part, following in zip(path, (*path[1:], None), strict=True):
        if following is None:
            _set(node, part, value)
        else:
            node = _child(node, part, [] if isinstance(following, int) else {})


def _child(node: Any, part: str | int, fresh: Any) -> Any:
    if isinstance(node, list):
        _set(node, part, fresh) if len(node) <= int(part) or node[int(part)] is None else None
        return node[int(part)]
    return node.setdefault(part, fresh)


def _set(node: Any, part: str | int, value: object) -> None:
    if isinstance(node, list):
        index = int(part)
        if not 0 <= index < 1 << 20:
            raise CorruptedCheckpointError(f"list index {index} in the metadata")
        node.extend([None] * (index + 1 - len(node)))
        node[index] = value
    else:
        node[part] = value
