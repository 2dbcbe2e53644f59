"""Tensors given by name in place of a model's own: an average of weights, an edited state dict.

Here: their sharding, from what they are or from the parameter of that name; and the way back for
tensors that cannot be read in place. Not here: the model's
own tensors (``derive.model``). Called on every rank, locally.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from dist_ckpt.derive.ddp import replicated_layout
from dist_ckpt.derive.dtensor import dtensor_layout, local_of
from dist_ckpt.derive.layout import ModelLayout
from dist_ckpt.dict_utils import diff
from dist_ckpt.errors import MismatchError
from dist_ckpt.types import ShardedStateDict

__all__ = ["fill_shared", "sharded_values"]


def sharded_values(
    values: Mapping[str, Any], layout: ModelLayout, *, prefix: str
) -> ShardedStateDict:
    """Return ``{name: ShardedTensor or list}`` with keys ``prefix + name`` for ``values``.

    A DTensor is cut as it says itself. A plain tensor shaped like this rank's part of the parameter
    of that name is cut like it; any other plain tensor is stored whole, from the lowest rank.
    A tied name is stored under its first name only, unless the two values differ. Values that are
    no tensors come back as they are.
    """
    tree: ShardedStateDict = {}
    for name, value in values.items():
        first = layout.tied.get(name)
        if first is not None and _is_same(values.get(first), value):
            continue
        tree[name] = _described(f"{prefix}{name}", value, layout, name)
    return tree


def fill_shared(layout: ModelLayout, loaded: Mapping[str, Any]) -> None:
    """Fill tensors whose elements share memory (``expand``): they were read aside, not in place.

    Args:
        layout: The model.
        loaded: What was read, by name; tensors that were filled in place are passed over.

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
                f"{name!r}: elements that differ in the checkpoint share memory in the model."
            )


def _described(key: str, value: Any, layout: ModelLayout, name: str) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    own = layout.tensors.get(layout.tied.get(name, name))
    equal = own is not None and own.layout.writer == "any"
    if isinstance(value, DTensor):
        return dtensor_layout(value, name=name, equal=equal).shard(key, local_of(value))
    if own is not None and tuple(value.shape) == own.layout.local_shape:
        return own.layout.shard(key, value)
    shape = tuple(value.shape)
    return replicated_layout(shape, writer="first").shard(key, value)


def _is_same(a: object, b: object) -> bool:
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
        return a is b
    return a is b or (local_of(a).data_ptr() == local_of(b).data_ptr() and a.shape == b.shape)
