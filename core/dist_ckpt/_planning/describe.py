"""What a rank says of its shards: small, picklable, without data.

Here: ``ShardInfo`` and how it is taken from ``ShardedTensor``. Not here: decisions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

import torch

from dist_ckpt._geometry import Box
from dist_ckpt.errors import InvalidShardingError
from dist_ckpt.mapping import ShardedTensor, is_main_replica

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dist_ckpt.types import Writer

__all__ = ["LocalShard", "Role", "ShardInfo", "dtype_from_name", "dtype_name", "local_shards"]


Role: TypeAlias = Literal["tensor", "object", "part"]
"""``tensor``: a sharded tensor of the user; ``object``: the JSON document of a sharded object, as
uint8; ``part``: a tensor inside such a document or inside the common part."""


@dataclass(frozen=True, slots=True)
class ShardInfo:
    """One box of a global tensor that a rank holds."""

    key: str
    box: Box
    global_shape: tuple[int, ...]
    dtype: str
    is_main: bool
    writer: Writer
    has_data: bool
    role: Role = "tensor"

    @property
    def nbytes(self) -> int:
        """Size of the box in bytes."""
        return self.box.numel * dtype_from_name(self.dtype).itemsize


@dataclass(frozen=True, slots=True)
class LocalShard:
    """A ``ShardInfo`` together with this rank's view of the data (None on validation only)."""

    info: ShardInfo
    view: torch.Tensor | None


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name a dtype has in our files: ``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def dtype_from_name(name: str) -> torch.dtype:
    """Return the dtype of that name, or raise ``ValueError``: no other attribute is ever taken."""
    dtype = getattr(torch, name, None) if name.isidentifier() else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"unknown dtype {name!r}")  # noqa: TRY004 - the name is wrong, not its type
    return dtype


def local_shards(
    sharded_tensors: Iterable[ShardedTensor], *, role: Role = "tensor"
) -> list[LocalShard]:
    """Cut this rank's sharded tensors into boxes, in their order.

    A flattened range becomes several boxes. Every sharded tensor yields at least one, empty ones
    too, so that all ranks know of every key.

    Raises:
        InvalidShardingError: Data that is not a plain strided tensor, or a box out of bounds.
    """
    shards: list[LocalShard] = []
    problems: list[str] = []
    for tensor in sharded_tensors:
        problem = _data_problem(tensor)
        if problem:
            problems.append(f"{tensor.key!r}: {problem}")
            continue
        pieces = list(tensor.pieces()) or [(_empty_box(tensor), None)]
        for box, view in pieces:
            shards.append(LocalShard(_info(tensor, box, role), view))
            if (
                box.numel
                and not box.within(tensor.global_shape)
                and not tensor.allow_shape_mismatch
            ):
                problems.append(
                    f"{tensor.key!r}: box at {box.offset} of shape {box.shape} does not lie in "
                    f"the global shape {tensor.global_shape}"
                )
    if problems:
        raise InvalidShardingError("; ".join(problems))
    return shards


def _info(tensor: ShardedTensor, box: Box, role: Role) -> ShardInfo:
    return ShardInfo(
        key=tensor.key,
        box=box,
        global_shape=tuple(tensor.global_shape),
        dtype=dtype_name(tensor.dtype),
        is_main=is_main_replica(tensor.replica_id),
        writer=tensor.writer,
        has_data=tensor.data is not None,
        role=role,
    )


def _empty_box(tensor: ShardedTensor) -> Box:
    return Box(tuple(tensor.global_offset), (0,) * len(tensor.global_shape))


def _data_problem(tensor: ShardedTensor) -> str | None:
    data = tensor.data
    if data is None:
        return None
    if data.layout != torch.strided or data.is_quantized:
        return f"the data is no plain strided tensor but {data.layout}, {data.dtype}"
    if data.device.type == "meta":
        return "the data is on the meta device and has no values"
    return None
