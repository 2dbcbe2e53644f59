"""What a rank says of one of its shards: small, picklable, without data.

Here: ``ShardInfo`` and the names of dtypes. Not here: all shards of a rank, and how they are taken
from ``ShardedTensor`` (``_sharding.table``); decisions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

import torch

from dist_ckpt.box import Box

if TYPE_CHECKING:
    from dist_ckpt.types import Writer

__all__ = ["LocalShard", "Role", "ShardInfo", "dtype_from_name", "dtype_name", "missing_memory"]


_NO_DATA_BELOW = 1 << 40
"""Memory that was given up has an address near zero; below this one it is looked at closely."""

_TORCH_DISPATCH = torch.Tensor.__torch_dispatch__

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


def missing_memory(tensor: torch.Tensor) -> str | None:
    """Return why a strided tensor has no memory for its elements, None if it has some.

    Reading or writing at its address would end the process.
    """
    if tensor.is_meta:
        return "the data is on the meta device and has no values"
    if not tensor.is_cpu or not tensor.numel():
        return None
    if type(tensor).__torch_dispatch__ is not _TORCH_DISPATCH and (
        # Fake tensors warn who asks for their address.
        tensor.untyped_storage().device.type == "meta" or tensor.data_ptr() == 0
    ):
        return f"the data is a {type(tensor).__name__}, which has no memory of its own"
    if tensor.data_ptr() >= _NO_DATA_BELOW:
        return None
    span = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    needed = (tensor.storage_offset() + span) * tensor.element_size()
    there = tensor.untyped_storage().nbytes()
    if needed > there:
        return f"the data has no memory: its storage was resized to {there} bytes of {needed}"
    return None
