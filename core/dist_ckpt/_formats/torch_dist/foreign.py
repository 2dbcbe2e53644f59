"""What other writers left in their checkpoints beside tensors, as ``torch.save`` records.

Here: finding and reading the common part and objects. Not here: unpickling (``unpickle``), our own
objects (``_formats.objects``). Runs on every rank for itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dist_ckpt._formats.torch_dist.mcore import is_common_state, is_object_key
from dist_ckpt._formats.torch_dist.unpickle import unpickled
from dist_ckpt.errors import CorruptedCheckpointError
from dist_ckpt.storage import Extent, open_store
from dist_ckpt.validation import shortened

if TYPE_CHECKING:
    from pathlib import Path

    from dist_ckpt._formats.documents import CheckpointContents
    from dist_ckpt._sharding.index import StoredBytes
    from dist_ckpt.types import StateDict

__all__ = ["COMMON_PT", "foreign_common", "read_foreign_object", "sharded_object_keys"]

COMMON_PT = "common.pt"
_MAX_NBYTES = 1 << 31


def sharded_object_keys(contents: CheckpointContents) -> list[str]:
    """Return the unique keys of the sharded objects of another writer.

    The common part, which newer Megatron-Core stores in the same form, is none of them.
    """
    return [key for key in contents.objects if is_object_key(key) and not is_common_state(key)]


def foreign_common(contents: CheckpointContents, *, allow_pickle: bool) -> StateDict:
    """Return what another writer stored as one for all ranks.

    That is ``common.pt``, or the sharded object ``common_state`` of newer Megatron-Core, which wins
    where both are there: it belongs to the newer save. Byte objects of DCP stand at the nested path
    that the writer noted for their flat key. Other sharded objects are not common.

    Raises:
        UnsafeContentError: It needs more than tensors and plain values, and pickle is not allowed.
        CorruptedCheckpointError: It is no dict, or paths contradict each other.
    """
    common = _common_dict(contents, allow_pickle=allow_pickle)
    room = _Room(len(contents.paths) + len(contents.objects))
    for key, stored in contents.objects.items():
        if is_object_key(key):
            continue
        value = read_foreign_object(contents.directory, key, stored, allow_pickle=allow_pickle)
        try:
            room.place(common, contents.paths.get(key, (key,)), value)
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
        CorruptedCheckpointError: It is no record, or it is not certain which object it is.
    """
    where = directory / stored.file
    if stored.doubt:
        raise CorruptedCheckpointError(f"{key!r} in {where}: {stored.doubt}.")
    data = bytearray(stored.nbytes)
    extent = Extent(stored.position, memoryview(data))
    open_store(directory).read_ranges(stored.file, [extent])
    value = unpickled(bytes(data), what=key, where=str(where), allow_pickle=allow_pickle)
    if stored.in_list and isinstance(value, list) and value:
        return value[0]  # the replicas of one shard on one rank: they are the same
    return value


def _common_dict(contents: CheckpointContents, *, allow_pickle: bool) -> StateDict:
    store = open_store(contents.directory)
    states = sorted(key for key in contents.objects if is_common_state(key))
    if len(states) > 1:
        raise CorruptedCheckpointError(
            f"{contents.directory}: {shortened(states)}: the common part is stored several times."
        )
    if states:
        (where,) = states
        stored = contents.objects[where]
        common = read_foreign_object(contents.directory, where, stored, allow_pickle=allow_pickle)
    elif store.nbytes(COMMON_PT) is not None:
        data = store.read(COMMON_PT, max_nbytes=_MAX_NBYTES)
        where = str(contents.directory / COMMON_PT)
        common = unpickled(data, what=COMMON_PT, where=where, allow_pickle=allow_pickle)
    else:
        return {}
    if not isinstance(common, dict):
        raise CorruptedCheckpointError(
            f"{contents.directory}: {where} holds a {type(common).__name__}, not a dict."
        )
    return common


class _Room:
    """Puts values at their paths; lists grow by as many places as there are keys, in all."""

    def __init__(self, places: int) -> None:
        self._places = places

    def place(self, tree: StateDict, path: tuple[str | int, ...], value: object) -> None:
        node: Any = tree
        for part, following in zip(path, (*path[1:], None), strict=True):
            if following is None:
                self._set(node, part, value)
            else:
                node = self._child(node, part, [] if isinstance(following, int) else {})

    def _child(self, node: Any, part: str | int, fresh: Any) -> Any:
        if isinstance(node, list):
            if len(node) <= int(part) or node[int(part)] is None:
                self._set(node, part, fresh)
            return node[int(part)]
        return node.setdefault(part, fresh)

    def _set(self, node: Any, part: str | int, value: object) -> None:
        if not isinstance(node, list):
            node[part] = value
            return
        index = int(part)
        grown = index + 1 - len(node)
        if index < 0 or grown > self._places:
            raise CorruptedCheckpointError(f"list index {index} in the metadata")
        self._places -= max(grown, 0)
        node.extend([None] * grown)
        node[index] = value
