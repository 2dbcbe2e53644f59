"""The vocabulary of found sharding: which boxes of a global tensor the local tensor holds.

Here: ``TensorLayout`` and the frozen records made of it. Not here: finding a layout
(``derive.dtensor``, ``derive.fsdp``, ``derive.ddp``), walking a model (``derive.model``). Used on
every rank, locally; nothing here communicates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from dist_ckpt.box import Box
from dist_ckpt.errors import InvalidShardingError
from dist_ckpt.mapping import ShardedTensor
from dist_ckpt.types import ReplicaId, Writer

__all__ = ["FlatPiece", "LocalTensor", "ModelLayout", "Part", "TensorLayout"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One box of the global tensor and where its elements lie in the local tensor.

    Args:
        box: The box of the global tensor.
        source: Box of the local tensor with the elements; None for the whole local tensor.
        flat_range: The elements are only this range ``[start, stop)`` of the flattened ``box``.
        order: The elements lie 1-D in the local tensor (``source`` is their range); these are the
            axes of ``box`` from the slowest to the fastest there. None for row-major.
    """

    box: Box
    source: Box | None = None
    flat_range: tuple[int, int] | None = None
    order: tuple[int, ...] | None = None

    def view(self, local: torch.Tensor) -> torch.Tensor:
        """Return the elements of this part as a view of ``local``."""
        if self.source is not None:
            local = local[self.source.slices()]
        if self.order is None:
            return local
        inverse = [self.order.index(axis) for axis in range(len(self.order))]
        return local.view([self.box.shape[axis] for axis in self.order]).permute(inverse)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorLayout:
    """Which boxes of a global tensor this rank's local tensor holds.

    Args:
        global_shape: Shape of the global tensor.
        local_shape: Shape of the local tensor that ``shard`` takes.
        parts: The boxes. A rank that holds no element has one part of size 0; none at all only on
            ranks outside of the tensor's device mesh.
        replica_id: Tells ranks apart that hold the same boxes.
        writer: Which of them stores a box.
        whole: On every rank the one part is the whole tensor, or a range of it.
        is_first: Of all ranks this one comes first: it stores what belongs to the tensor but is no
            tensor itself.
        sharded_axes: Axes that are cut over ranks, whether or not they are on this one.
        topology: Text that is equal where the tensor is cut in the same way.
    """

    global_shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    parts: tuple[Part, ...]
    replica_id: ReplicaId
    writer: Writer
    whole: bool = False
    is_first: bool = True
    sharded_axes: tuple[int, ...] = ()
    topology: str = "whole"

    @property
    def is_replicated(self) -> bool:
        """Whether every rank holds the entire tensor, in its own shape."""
        return self.whole and all(part.flat_range is None for part in self.parts)

    def shard(
        self, key: str, local: torch.Tensor | None, *, dtype: torch.dtype | None = None
    ) -> ShardedTensor | list[ShardedTensor]:
        """Describe ``local`` as a part of the global tensor ``key``; the data aliases ``local``.

        Args:
            key: Key of the global tensor.
            local: Plain tensor of ``local_shape``; None to describe only.
            dtype: Needed when ``local`` is None.

        Returns:
            One ShardedTensor when the layout has one part, otherwise a list with one for each.

        Raises:
            InvalidShardingError: ``local`` has another shape, or there is no dtype.
        """
        if local is not None:
            if tuple(local.shape) != self.local_shape:
                raise InvalidShardingError(
                    f"Tensor {key!r}: the local tensor has shape {tuple(local.shape)}, "
                    f"expected {self.local_shape}."
                )
            local, dtype = local.detach(), local.dtype
        if dtype is None:
            raise InvalidShardingError(f"Tensor {key!r}: neither a local tensor nor a dtype given.")
        shards = [self._shard_part(key, part, local=local, dtype=dtype) for part in self.parts]
        return shards[0] if len(shards) == 1 else shards

    def _shard_part(
        self, key: str, part: Part, *, local: torch.Tensor | None, dtype: torch.dtype
    ) -> ShardedTensor:
        return ShardedTensor(
            key,
            None if local is None else part.view(local),
            dtype,
            part.box.shape,
            self.global_shape,
            part.box.offset,
            (1,) * len(self.global_shape) if self.whole else None,
            self.replica_id,
            flattened_range=None if part.flat_range is None else slice(*part.flat_range),
            writer=self.writer,
        )

    def assemble(self, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return a fresh local tensor with the parts' values: the way back of ``shard``."""
        local = torch.empty(self.local_shape, dtype=pieces[0].dtype, device=pieces[0].device)
        for part, piece in zip(self.parts, pieces, strict=True):
            part.view(local).copy_(piece)
        return local


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalTensor:
    """A parameter or buffer on this rank.

    Args:
        local: Plain tensor with the local elements, aliasing the module's storage.
        layout: What they are of the global tensor.
        owner: The object in the module (or its flat parameter under FSDP1), kept alive.
        kind: What it is.
    """

    local: torch.Tensor
    layout: TensorLayout
    owner: torch.Tensor
    kind: Literal["parameter", "buffer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatPiece:
    """A parameter within the local shard of an FSDP1 flat parameter, ``[offset, offset + numel)``.

    Args:
        name: Canonical name of the parameter.
        offset: Where its local elements begin in the local shard.
        numel: How many there are; 0 when they are all on other ranks.
        layout: What they are of the parameter.
    """

    name: str
    offset: int
    numel: int
    layout: TensorLayout

    def cut(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the elements of this parameter as a view of ``flat``, a whole local shard."""
        return flat[self.offset : self.offset + self.numel]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLayout:
    """What this rank holds of a model.

    Args:
        tensors: Canonical name to parameter or persistent buffer; tied ones under their first name.
        order: All names, tied ones too, in the order of ``state_dict``.
        tied: Other name to first name.
        names: ``id`` of the parameter to canonical name, to find what an optimizer holds.
        pieces: ``id`` of an FSDP1 flat parameter to the parameters in it, where the optimizer holds
            the flat parameter itself (``use_orig_params=False``).
    """

    tensors: Mapping[str, LocalTensor]
    order: tuple[str, ...] = ()
    tied: Mapping[str, str] = field(default_factory=dict)
    names: Mapping[int, str] = field(default_factory=dict)
    pieces: Mapping[int, tuple[FlatPiece, ...]] = field(default_factory=dict)
