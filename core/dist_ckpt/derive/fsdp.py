"""FSDP: bring modules to their sharded form, and the layouts of FSDP1's flat parameters.

Here: ``ensure_sharded`` for both FSDPs, and reading the shard table of FSDP1's flat parameters. Not
here: FSDP2's parameters, which are DTensors (``derive.dtensor``). Used on every rank; nothing is
gathered.

A flat parameter is the concatenation of its parameters, with padding, cut evenly over the ranks. So
a rank holds of each parameter one range of its flattened self, perhaps an empty one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from dist_ckpt.box import Box, boxes_of_flat_range
from dist_ckpt.derive.ddp import current_rank, replicated_layout
from dist_ckpt.derive.layout import Part, TensorLayout
from dist_ckpt.errors import InvalidShardingError
from dist_ckpt.types import ReplicaId, Writer

__all__ = ["FlatEntry", "FlatTable", "ensure_sharded", "is_flat_parameter", "read_flat_parameters"]

Place = tuple[int, str]
"""``id`` of a module and the name of a parameter of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatEntry:
    """One parameter inside a flat parameter.

    Args:
        owner: What an optimizer holds: the parameter itself or the flat parameter.
        local: The local elements, a view of the local shard.
        layout: What they are of the parameter.
        offset: Where they begin in the local shard.
        is_flat: Whether ``owner`` is the flat parameter.
    """

    owner: torch.Tensor
    local: torch.Tensor
    layout: TensorLayout
    offset: int
    is_flat: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatTable:
    """All parameters of a model that live in flat parameters.

    Args:
        entries: By module and parameter name, in the order of the flat parameter.
        shared: Second place of a parameter that two modules use, to its first place.
        by_module: ``id`` of a module to the names in ``entries`` and ``shared``.
    """

    entries: dict[Place, FlatEntry] = field(default_factory=dict)
    shared: dict[Place, Place] = field(default_factory=dict)
    by_module: dict[int, list[str]] = field(default_factory=dict)

    def names_in(self, module: nn.Module) -> Sequence[str]:
        """Return the names of the parameters that ``module`` has in flat parameters."""
        return self.by_module.get(id(module), ())


def is_flat_parameter(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is FSDP1's flat parameter."""
    return bool(getattr(tensor, "_is_flat_param", False))


def ensure_sharded(model: nn.Module) -> None:
    """Bring all FSDP units of ``model`` to their sharded form, as they are between steps.

    After a forward pass without a backward pass, units may still hold their gathered parameters;
    these are freed, as the next forward pass gathers them anyway.

    Raises:
        InvalidShardingError: A unit is in use at this moment (within forward, backward or
            ``summon_full_params``).
    """
    busy = []
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            module.reshard()
        elif isinstance(module, FullyShardedDataParallel):
            handle: Any = module._handle  # noqa: SLF001 - FSDP1 shows its shards nowhere else
            if handle is not None and not _reshard(module, handle):
                busy.append(f"{name or '(root)'}: {handle._training_state.name}")  # noqa: SLF001
    if busy:
        raise InvalidShardingError(
            f"FSDP unit(s) not in sharded form: {', '.join(busy)}.",
            hint="save and load between training steps, outside of summon_full_params().",
        )


def _reshard(module: FullyShardedDataParallel, handle: Any) -> bool:
    from torch.distributed.fsdp._runtime_utils import _reshard as reshard  # noqa: PLC0415

    if handle._training_state.name != "IDLE":  # noqa: SLF001
        return False
    flat = handle.flat_param
    if not handle.uses_sharded_strategy or not hasattr(flat, "_full_param_padded"):
        return True  # nothing was ever gathered
    if not handle.is_sharded(flat) or not handle.needs_unshard():
        reshard(module, handle, True)  # noqa: FBT003 - their signature
    return bool(handle.is_sharded(flat))


def read_flat_parameters(model: nn.Module) -> FlatTable:
    """Return where each parameter of an FSDP1 model lies; empty for other models.

    Raises:
        InvalidShardingError: The flat parameters hold something other than ranges of whole
            parameters (FSDP1 over tensor parallelism).
    """
    table = FlatTable()
    for module in model.modules():
        if not isinstance(module, FullyShardedDataParallel):
            continue
        handle: Any = module._handle  # noqa: SLF001
        if handle is None:
            continue
        flat = handle.flat_param
        for index, info in enumerate(flat._param_infos):  # noqa: SLF001
            entry = _entry(module, handle, index)
            table.entries[id(info.module), info.param_name] = entry
        for info in flat._shared_param_infos:  # noqa: SLF001
            first = (id(info.prim_module), info.prim_param_name)
            table.shared[id(info.module), info.param_name] = first
    for owner, name in (*table.entries, *table.shared):
        table.by_module.setdefault(owner, []).append(name)
    return table


def _entry(module: FullyShardedDataParallel, handle: Any, index: int) -> FlatEntry:
    flat = handle.flat_param
    name = flat._fqns[index]  # noqa: SLF001
    if flat._param_extensions[index] is not None or isinstance(flat, DTensor):  # noqa: SLF001
        raise InvalidShardingError(
            f"Parameter {name!r} is sharded by tensor parallelism inside of FSDP1, which cannot be "
            f"described.",
            hint="use FSDP2 (fully_shard) together with tensor parallelism.",
        )
    owner = flat if flat._params is None else flat._params[index]  # noqa: SLF001
    if not handle.uses_sharded_strategy and flat._params is not None:  # noqa: SLF001
        # NO_SHARD with original parameters: each of them is an ordinary, whole tensor.
        layout = replicated_layout(tuple(flat._shapes[index]), writer="any")  # noqa: SLF001
        return FlatEntry(owner=owner, local=owner.detach(), layout=layout, offset=0, is_flat=False)
    start, stop, offset = _local_range(flat, index)
    shard = getattr(flat, "_local_shard", flat).detach()
    return FlatEntry(
        owner=owner,
        local=shard[offset : offset + stop - start],
        layout=_layout(module, index, (start, stop)),
        offset=offset,
        is_flat=flat._params is None,  # noqa: SLF001
    )


def _local_range(flat: Any, index: int) -> tuple[int, int, int]:
    """Return the range of the flattened parameter held here, and where it lies in the shard."""
    info = flat._shard_param_infos[index]  # noqa: SLF001
    if not info.in_shard or not flat._numels[index]:  # noqa: SLF001
        return 0, 0, 0
    return info.intra_param_start_idx, info.intra_param_end_idx + 1, info.offset_in_shard


def _layout(module: FullyShardedDataParallel, index: int, held: tuple[int, int]) -> TensorLayout:
    handle: Any = module._handle  # noqa: SLF001
    flat = handle.flat_param
    shape = tuple(flat._shapes[index])  # noqa: SLF001
    start, stop = held
    order = _memory_order(flat, index)
    parts: tuple[Part, ...]
    if order is None:
        parts = (Part(box=Box(tuple(0 for _ in shape), shape), flat_range=held),)
    else:
        parts = _permuted_parts(shape, order, held)
    replica_id, writer = _replica(module, handle)
    return TensorLayout(
        global_shape=shape,
        local_shape=(stop - start,),
        parts=parts,
        replica_id=replica_id,
        writer=writer,
        whole=order is None,
        is_first=start == 0 and stop > 0 and _group_index(module) == 0,
        topology=f"flat{handle.world_size}",
    )


def _memory_order(flat: Any, index: int) -> tuple[int, ...] | None:
    """Return the axes from slowest to fastest in memory; None if the parameter is row-major."""
    if flat._contiguities[index]:  # noqa: SLF001
        return None
    shape, strides = tuple(flat._shapes[index]), tuple(flat._strides[index])  # noqa: SLF001
    order = tuple(sorted(range(len(shape)), key=lambda axis: (-strides[axis], axis)))
    expected = 1
    for axis in reversed(order):
        if shape[axis] != 1 and strides[axis] != expected:
            raise InvalidShardingError(
                f"Parameter {flat._fqns[index]!r} with shape {shape} and strides {strides} does "  # noqa: SLF001
                f"not fill its memory; its flattened form cannot be described.",
                hint="make the parameter contiguous before wrapping it.",
            )
        expected *= shape[axis]
    return order


def _permuted_parts(
    shape: tuple[int, ...], order: tuple[int, ...], held: tuple[int, int]
) -> tuple[Part, ...]:
    in_memory = tuple(shape[axis] for axis in order)
    inverse = [order.index(axis) for axis in range(len(order))]
    parts = []
    for at, box in boxes_of_flat_range(in_memory, *held):
        turned = Box(tuple(box.offset[i] for i in inverse), tuple(box.shape[i] for i in inverse))
        parts.append(Part(box=turned, source=Box((at,), (box.numel,)), order=order))
    if not parts:
        nothing = Box(tuple(0 for _ in shape), tuple(0 for _ in shape))
        parts = [Part(box=nothing, source=Box((0,), (0,)), order=order)]
    return tuple(parts)


def _group_index(module: FullyShardedDataParallel) -> int:
    between: Any = getattr(module, "_inter_node_pg", None)  # only with hybrid sharding
    return 0 if between is None else int(between.rank())


def _replica(module: FullyShardedDataParallel, handle: Any) -> tuple[ReplicaId, Writer]:
    rank, world_size = current_rank()
    between: Any = getattr(module, "_inter_node_pg", None)
    groups = 1 if between is None else int(between.size())
    if handle.world_size * groups != world_size:
        return rank, "first"  # other ranks hold the same, but FSDP does not know them
    if not handle.uses_sharded_strategy:
        return rank, "any"
    return _group_index(module), "any" if groups > 1 else "main"
