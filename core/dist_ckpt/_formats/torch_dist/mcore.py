"""What Megatron-Core adds to a DCP checkpoint: class names, flattened tensors, names of objects.

Here: pure translation of what its ``.metadata`` says into the terms of our index. Not here: the
unpickler (``metadata``), reading (``read``, ``foreign``). Source: checkpoints of Megatron-Core 0.15
and of its main branch of 2026; the names are those of its ``dist_checkpointing/strategies``.
"""

from __future__ import annotations

import math
import operator
import re
from itertools import islice
from typing import TYPE_CHECKING, Any

from dist_ckpt._formats.torch_dist.inert import Node, ordered_dict, size
from dist_ckpt._sharding.index import StoredChunk
from dist_ckpt.box import Box, boxes_of_flat_range

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "checked_shape",
    "is_common_state",
    "is_object_key",
    "metadata_classes",
    "original_shapes",
    "unfold_flattened",
]

_OBJECT_KEY = re.compile(r".*/shard_([\d.]*)_([\d.]*)", re.DOTALL | re.ASCII)
_NUMBERS = re.compile(r"(\d+(\.\d+)*)?", re.ASCII)
_COMMON_STATE = "common_state/shard_"
_MAX_EXTENT = 1 << 63

_DCP = "torch.distributed.checkpoint"
_OLD_DCP = "torch.distributed._shard.sharded_tensor.metadata"
_MCORE = "megatron.core.dist_checkpointing.strategies.torch"
_NAMES = (
    *((f"{_DCP}.metadata", name) for name in (
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties",
        "ChunkStorageMetadata", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
    )),
    *((f"{_DCP}.planner", name) for name in (
        "SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData",
    )),
    (f"{_DCP}.filesystem", "_StorageInfo"),
    (_OLD_DCP, "TensorProperties"),  # torch before 2.4
    (_OLD_DCP, "MEM_FORMAT_ENCODING"),
    (_MCORE, "MCoreMetadata"),
    (_MCORE, "MCoreSavePlan"),
    ("torch.serialization", "_get_layout"),
    *((module, name)
      for module in ("pathlib", "pathlib._local")  # python 3.13 has the latter
      for name in ("PosixPath", "WindowsPath")),
)  # fmt: skip
_SAME_AS = {"MCoreMetadata": "Metadata"}


def metadata_classes() -> dict[tuple[str, str], object]:
    """Return a stand-in for every name that checkpoint metadata needs, made anew at each call.

    A pickle can set attributes of whatever it names, and call it with anything. So it gets to name
    nothing but inert classes of its own, which copy nothing large; the library that wrote it need
    not be installed.
    """
    table: dict[tuple[str, str], object] = {
        (module, name): type(_SAME_AS.get(name, name), (Node,), {}) for module, name in _NAMES
    }
    sizes = type("Size", (), {"__new__": lambda _, *values: size(*values)})
    mapping = type("OrderedDict", (), {"__new__": lambda _: ordered_dict()})
    return table | {("torch", "Size"): sizes, ("collections", "OrderedDict"): mapping}


def is_object_key(key: str) -> bool:
    """Whether ``key`` is the unique key of a sharded object: ``rng_state/shard_0.1_1.2``."""
    match = _OBJECT_KEY.fullmatch(key)
    if match is None or not all(_NUMBERS.fullmatch(numbers) for numbers in match.groups()):
        return False
    offset, shape = ([int(n) for n in numbers.split(".") if n] for numbers in match.groups())
    return len(offset) == len(shape) and all(map(operator.lt, offset, shape))


def is_common_state(key: str) -> bool:
    """Whether ``key`` is that of the common part, which newer Megatron-Core stores as an object."""
    return key.startswith(_COMMON_STATE) and is_object_key(key)


def checked_shape(values: Any) -> tuple[int, ...]:
    """Return ``values`` as a shape or an offset that a tensor can have, else raise ValueError."""
    shape = size(list(islice(values, 65)))
    if not all(type(n) is int and 0 <= n < _MAX_EXTENT for n in shape):
        raise ValueError(f"expected sizes, found {values!r}")
    if math.prod(n for n in shape if n) >= _MAX_EXTENT:
        raise ValueError(f"shape {shape} is larger than any tensor")
    return shape


def original_shapes(mcore_data: object) -> dict[str, tuple[int, ...]]:
    """Return the shapes that flattened tensors had before they were stored in another form."""
    if mcore_data is None:
        return {}
    if not isinstance(mcore_data, dict):
        raise TypeError(f"mcore_data is a {type(mcore_data).__name__}")
    shapes = {}
    for key, entry in mcore_data.items():
        shape = entry.get("nd_reformulated_orig_global_shape")
        if shape is not None:
            shapes[key] = checked_shape(shape)
    return shapes


def unfold_flattened(
    chunk: StoredChunk, stored: tuple[int, ...], original: tuple[int, ...]
) -> Iterator[StoredChunk]:
    """Yield the boxes of the original tensor that lie in one chunk of its flattened form.

    A tensor of shape ``[X, Y]`` in shards of shape ``[x, y]``, each flattened and cut over several
    ranks, is stored as a tensor of shape ``[X // x, Y // y, x * y]``: which shard, then which
    element of it. So a chunk is a range of one shard, and that is at most
    ``2 * len(original) - 1`` boxes of the tensor, one after the other in the chunk.

    Raises:
        ValueError: The two shapes do not belong together.
    """
    *grid, length = stored
    if len(grid) != len(original) or any(
        n < 1 or size % n for n, size in zip(grid, original, strict=True)
    ):
        raise ValueError(f"shape {stored} is no flattened form of {original}")
    shard = tuple(size // n for n, size in zip(grid, original, strict=True))
    if math.prod(shard) != length:
        raise ValueError(f"shards of shape {shard} do not have {length} elements")
    if any(n != 1 for n in chunk.box.shape[:-1]):
        raise ValueError(f"{chunk.box} is not within one shard")
    *cell, start = chunk.box.offset
    corner = tuple(at * n for at, n in zip(cell, shard, strict=True))
    for position, inside in boxes_of_flat_range(shard, start, start + chunk.box.shape[-1]):
        offset = tuple(a + b for a, b in zip(corner, inside.offset, strict=True))
        yield StoredChunk(
            Box(offset, inside.shape),
            chunk.file,
            chunk.position,
            chunk.nbytes,
            chunk.encoding,
            record_shape=chunk.box.shape,
            record_start=position,
        )
