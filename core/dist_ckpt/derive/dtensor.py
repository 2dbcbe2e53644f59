"""Layouts of DTensors: placements on a device mesh become boxes.

Here: the arithmetic of ``Shard``, ``_StridedShard`` and ``Replicate`` for FSDP2, tensor parallelism
and both together. Not here: plain tensors (``derive.ddp``), flat parameters (``derive.fsdp``). Used
on every rank, locally.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import (
    Placement,
    _StridedShard,  # no public name yet; FSDP2 + TP places parameters by it
)

from dist_ckpt.box import Box
from dist_ckpt.derive.ddp import current_rank
from dist_ckpt.derive.layout import Part, TensorLayout
from dist_ckpt.errors import InvalidShardingError
from dist_ckpt.types import ReplicaId, Writer

__all__ = ["dtensor_layout", "local_of", "wrap_like"]

Runs = list[tuple[int, int]]
"""Ranges of one axis as (start, length), in the order in which the local tensor holds them."""


def dtensor_layout(tensor: DTensor, *, name: str = "", equal: bool = False) -> TensorLayout:
    """Return the layout of a DTensor.

    Args:
        tensor: The tensor.
        name: Its name, for errors.
        equal: Ranks outside of its mesh that hold the same box hold equal values (DDP around TP).

    Raises:
        InvalidShardingError: A placement has no boxes (``Partial``), or the boxes that follow from
            the placements do not have the local tensor's shape.
    """
    mesh, placements = tensor.device_mesh, tuple(tensor.placements)
    _check_placements(tensor, name)
    global_shape, local_shape = tuple(tensor.shape), tuple(local_of(tensor).shape)
    coordinate = mesh.get_coordinate()
    axes = {p.dim for p in placements if isinstance(p, (Shard, _StridedShard))}
    parts: tuple[Part, ...] = ()
    if coordinate is not None:
        runs = [_runs_of_axis(axis, tensor, coordinate) for axis in range(tensor.ndim)]
        expected = tuple(sum(length for _, length in axis_runs) for axis_runs in runs)
        if expected != local_shape:
            raise InvalidShardingError(
                f"DTensor {name!r} with placements {placements} on mesh {tuple(mesh.shape)} at "
                f"{tuple(coordinate)}: the placements give local shape {expected}, "
                f"found {local_shape}."
            )
        parts = _parts(runs)
    replica_id, writer = _replica(tensor, coordinate, equal=equal)
    return TensorLayout(
        global_shape=global_shape,
        local_shape=local_shape,
        parts=parts,
        replica_id=replica_id,
        writer=writer,
        whole=not axes and bool(parts),
        is_first=current_rank()[0] == _lowest_rank(mesh),
        sharded_axes=tuple(sorted(axes)),
        topology=f"{'x'.join(map(str, mesh.shape))}{list(placements)}",
    )


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local elements of a tensor as a plain detached tensor, aliasing its storage."""
    if isinstance(tensor, DTensor):
        with torch.no_grad():
            return tensor.to_local().detach()
    return tensor.detach()


def wrap_like(local: torch.Tensor, pattern: DTensor) -> DTensor:
    """Return a DTensor over ``local``, distributed as ``pattern`` is."""
    with torch.no_grad():
        wrapped: DTensor = DTensor.from_local(
            local,
            pattern.device_mesh,
            pattern.placements,
            run_check=False,
            shape=pattern.shape,
            stride=pattern.stride(),
        )
    return wrapped


def _check_placements(tensor: DTensor, name: str) -> None:
    placements = tensor.placements
    bad = [p for p in placements if not isinstance(p, (Shard, _StridedShard, Replicate))]
    if bad:
        raise InvalidShardingError(
            f"DTensor {name!r} has placement(s) {bad}; only Shard and Replicate can be stored.",
            hint="redistribute() it first.",
        )
    spec: Any = tensor._spec  # noqa: SLF001 - the order of sharding has no public name
    order = getattr(spec, "shard_order", None)
    if order is not None and not spec.is_default_device_order(order):
        raise InvalidShardingError(
            f"DTensor {name!r} is sharded over mesh dimensions in the order {order}; only left to "
            f"right is supported.",
            hint="redistribute() it first.",
        )


def _runs_of_axis(axis: int, tensor: DTensor, coordinate: Sequence[int]) -> Runs:
    """Return what this rank holds of one axis: the mesh dimensions cut it from left to right."""
    cuts: list[tuple[Placement, int, int]] = [
        (placement, tensor.device_mesh.size(dim), coordinate[dim])
        for dim, placement in enumerate(tensor.placements)
        if isinstance(placement, (Shard, _StridedShard)) and placement.dim == axis
    ]
    if any(isinstance(placement, _StridedShard) for placement, _, _ in cuts):
        return _runs_by_example(axis, int(tensor.shape[axis]), cuts)
    start, length = 0, int(tensor.shape[axis])
    for _, count, index in cuts:
        step = -(-length // count)  # torch.chunk: equal chunks, the last ones short or empty
        skipped = min(step * index, length)
        start, length = start + skipped, min(step, length - skipped)
    return [(start, length)] if length else []


def _runs_by_example(axis: int, size: int, cuts: list[tuple[Placement, int, int]]) -> Runs:
    """Let the placements themselves cut the indices of the axis, and look at what is left."""
    indices = torch.arange(size).view([1] * axis + [size])
    for placement, count, index in cuts:
        cutter: Any = placement
        indices = cutter._split_tensor(  # noqa: SLF001 - its own rule is the only exact one
            indices, count, with_padding=False, contiguous=False
        )[0][index]
    runs: Runs = []
    for position in indices.reshape(-1).tolist():
        if runs and sum(runs[-1]) == position:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((position, 1))
    return runs


def _parts(runs: list[Runs]) -> tuple[Part, ...]:
    """Cross the runs of all axes; without any element, one empty part at the corner."""
    if not all(runs):
        offset = tuple(axis_runs[0][0] if axis_runs else 0 for axis_runs in runs)
        shape = tuple(sum(length for _, length in axis_runs) for axis_runs in runs)
        return (Part(box=Box(offset, shape)),)
    placed = []
    for axis_runs in runs:
        at = itertools.accumulate((length for _, length in axis_runs), initial=0)
        placed.append([(start, at_, length) for (start, length), at_ in zip(axis_runs, at)])  # noqa: B905 - accumulate gives one more
    parts = []
    for combination in itertools.product(*placed):
        shape = tuple(length for _, _, length in combination)
        parts.append(
            Part(
                box=Box(tuple(start for start, _, _ in combination), shape),
                source=Box(tuple(at_ for _, at_, _ in combination), shape),
            )
        )
    return (Part(box=parts[0].box),) if len(parts) == 1 else tuple(parts)


def _replica(
    tensor: DTensor, coordinate: Sequence[int] | None, *, equal: bool
) -> tuple[ReplicaId, Writer]:
    mesh = tensor.device_mesh
    rank, world_size = current_rank()
    if coordinate is None or mesh.size() != world_size:
        # The mesh does not tell who else holds this box.
        return rank, "any" if equal else "first"
    copies = 1
    replica = 0
    for dim, placement in enumerate(tensor.placements):
        if isinstance(placement, Replicate):
            replica = replica * mesh.size(dim) + coordinate[dim]
            copies *= mesh.size(dim)
    return replica, "any" if copies > 1 else "main"


def _lowest_rank(mesh: Any) -> int:
    root = mesh._get_root_mesh() if hasattr(mesh, "_get_root_mesh") else mesh  # noqa: SLF001 - no public name
    return int(root.mesh.min())
