"""A model's state dict entry by entry: which entries are stored as tensors, and how they are cut.

Here: ``stored_state``, and filling tensors that cannot be read in place. Not here: the entries
themselves (``derive.protocol``), the memory of parameters and buffers (``derive.model``). Called on
every rank, locally.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from dist_ckpt.derive.ddp import replicated_layout
from dist_ckpt.derive.dtensor import dtensor_layout, local_of
from dist_ckpt.derive.layout import ModelLayout
from dist_ckpt.derive.protocol import EXTRA_STATE, ModelState, owned_by
from dist_ckpt.dict_utils import diff
from dist_ckpt.errors import InvalidShardingError, MismatchError
from dist_ckpt.mapping import ShardedTensor
from dist_ckpt.types import ShardedStateDict

__all__ = [
    "StoredState",
    "copy_box",
    "fill_shared",
    "has_tensors",
    "is_plain_tensor",
    "stored_state",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredState:
    """A model's state, split for a save.

    Attributes:
        tensors: ``{name: ShardedTensor or list of them}``.
        tied: Other name to the name whose tensor it shares.
        values: Entries that are not plain tensors; they are stored as values.
    """

    tensors: ShardedStateDict
    tied: Mapping[str, str]
    values: Mapping[str, Any]


def stored_state(
    state: ModelState, layout: ModelLayout, *, prefix: str, stores_values: bool
) -> StoredState:
    """Describe what this rank stores of a model; the tensors' keys are ``prefix + name``.

    Parameters and buffers are cut as the layout says. Of the other entries, a DTensor is cut by its
    own placements, and a plain tensor with the shape of this rank's part of the parameter of that
    name is cut like that parameter; any other plain tensor is stored whole. Of tensors that every
    rank holds whole, the lowest rank's is stored: DDP keeps parameters equal, but not what a module
    makes of them.

    Args:
        state: The state to store.
        layout: Layout of the model.
        prefix: Prefix of all keys.
        stores_values: Whether this rank stores what is not cut; of several, the lowest rank's
            counts.

    Raises:
        InvalidShardingError: A module makes entries of its sharded parameters in a form that does
            not describe the sharding; all such entries are named.
    """
    problems = _packed(state, layout)
    if problems:
        raise InvalidShardingError(
            f"{len(problems)} entr{'y' if len(problems) == 1 else 'ies'} of the model's state "
            f"dict cannot be described: {'; '.join(problems)}.",
            hint="such a module can be saved where its parameters are not sharded (DDP, a single "
            "device), or if it stores DTensors.",
        )
    tensors: ShardedStateDict = {}
    tied: dict[str, str] = {}
    values: dict[str, Any] = {}
    firsts: dict[str, str] = {}
    for name in state.names:
        first = layout.tied.get(name, name)
        if name not in state.values:
            item = layout.tensors[first]
            key = firsts.setdefault(first, name)
            if key == name:
                tensors[name] = item.layout.shard(f"{prefix}{name}", item.local)
            else:
                tied[name] = key
            continue
        value = state.values[name]
        if first != name and _is_same(state.values.get(first), value):
            tied[name] = first
        elif not is_plain_tensor(value):
            if stores_values:
                values[name] = value
        else:
            described = _described(
                f"{prefix}{name}", value, layout, name, stores_values=stores_values
            )
            if described is not None:
                tensors[name] = described
    return StoredState(tensors=tensors, tied=tied, values=values)


def is_plain_tensor(value: Any) -> bool:
    """Whether a value is stored as a tensor: dense, and a DTensor or of torch's own classes."""
    if not isinstance(value, torch.Tensor):
        return False
    if isinstance(value, DTensor):
        return True
    return (
        type(value) in {torch.Tensor, nn.Parameter}
        and value.layout == torch.strided
        and not value.is_quantized
        and not value.is_nested
    )


def copy_box(shard: ShardedTensor, whole: torch.Tensor) -> None:
    """Copy the box that ``shard`` describes from a whole tensor into its data."""
    slices = tuple(
        slice(start, start + size)
        for start, size in zip(shard.global_offset, shard.local_shape, strict=True)
    )
    box = whole[slices]
    if shard.flattened_range is not None:
        box = box.reshape(-1)[shard.flattened_range]
    if shard.data is not None and box.numel():
        shard.data.copy_(box)


def _packed(state: ModelState, layout: ModelLayout) -> list[str]:
    """Return one line for each entry that a module has made of parameters that are cut."""
    cut = {
        name.rpartition(".")[0]
        for name, item in layout.tensors.items()
        if item.layout.local_shape != item.layout.global_shape
    }
    memory = {
        _memory_of(item.local)
        for item in layout.tensors.values()
        if item.layout.local_shape != item.layout.global_shape and item.local.numel()
    }
    memory.discard(None)
    problems = []
    for name, value in state.values.items() if cut else ():
        own = owned_by(layout, name)
        follows = (
            own is not None
            and isinstance(value, torch.Tensor)
            and tuple(value.shape) == own.layout.local_shape
        )
        is_extra = name.rpartition(".")[2] == EXTRA_STATE
        if isinstance(value, DTensor) or follows:
            continue
        # Extra state and entries of parent modules are allowed, unless they share that memory.
        is_part = any(_memory_of(tensor) in memory for tensor in _tensors_in(value))
        if not is_part and (is_extra or not has_tensors(value)):
            continue
        module = name.rpartition(".")[0]
        while module and module not in state.metadata:
            module = module.rpartition(".")[0]
        if is_part or module in cut:
            problems.append(
                f"{name!r} ({type(value).__name__}), which module {module or '(root)'!r} makes "
                f"while its parameters are sharded"
            )
    return problems


def has_tensors(value: Any) -> bool:
    """Whether a value is a tensor or a container with one in it."""
    return next(_tensors_in(value), None) is not None


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors_in(item)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for item in value:
            yield from _tensors_in(item)


def _memory_of(tensor: torch.Tensor) -> int | None:
    """Return the address of a tensor's storage; None if it has no storage of its own."""
    tensor = local_of(tensor)
    if type(tensor) not in {torch.Tensor, nn.Parameter} or tensor.layout != torch.strided:
        return None
    return None if tensor.is_meta else tensor.untyped_storage().data_ptr() or None


def fill_shared(layout: ModelLayout, loaded: Mapping[str, Any]) -> None:
    """Fill tensors whose elements share memory (``expand``): they were not read in place.

    Args:
        layout: Layout of the model.
        loaded: What was read, by name; tensors that were filled in place are skipped.

    Raises:
        MismatchError: Elements that share memory in the model differ in the checkpoint.
    """
    for name, item in layout.tensors.items():
        value, local = loaded.get(name), item.local
        if not isinstance(value, torch.Tensor) or value.data_ptr() == local.data_ptr():
            continue
        shared = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in local.stride())
        with torch.no_grad():
            local[shared].copy_(value[shared])
        if any(diff({name: local}, {name: value})):
            raise MismatchError(
                f"{name!r}: elements that differ in the checkpoint share memory in the model.",
                hint="make the tensor contiguous (clone()) before the load.",
            )


def _described(
    key: str, value: torch.Tensor, layout: ModelLayout, name: str, *, stores_values: bool
) -> ShardedTensor | list[ShardedTensor] | None:
    """Return the description; None if only other ranks store the tensor."""
    own = owned_by(layout, name)
    if isinstance(value, DTensor):
        return dtensor_layout(value, name=name).shard(key, local_of(value))
    if own is not None and tuple(value.shape) == own.layout.local_shape:
        made = replace(own.layout, writer="first") if own.layout.writer == "any" else own.layout
        return made.shard(key, value)
    if not stores_values:
        return None
    return replicated_layout(tuple(value.shape), writer="first").shard(key, value)


def _is_same(a: object, b: object) -> bool:
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
        return a is b and a is not None
    if not (is_plain_tensor(a) and is_plain_tensor(b)):
        return a is b
    return a is b or (local_of(a).data_ptr() == local_of(b).data_ptr() and a.shape == b.shape)
