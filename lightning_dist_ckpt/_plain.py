"""Whole optimizer state, as one-file checkpoints have it, into a sharded optimizer.

Here: numbers to names, and cutting. Not here: models (``_stored``). On every rank, locally: each
has the whole state at hand (files are mapped into memory, so only its boxes are read).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from dist_ckpt.derive import (
    ModelLayout,
    TensorLayout,
    copy_box,
    load_optimizer_state,
    model_layout,
    without_wrappers,
)
from dist_ckpt.errors import MismatchError
from dist_ckpt.mapping import ShardedTensor

__all__ = ["load_whole_optimizer"]


def load_whole_optimizer(optimizer: Any, model: nn.Module, state: Mapping[str, Any]) -> None:
    """Give a whole ``Optimizer.state_dict()`` to the optimizer of a sharded model.

    Its parameters are numbered in the order of its groups, or named.

    Raises:
        MismatchError: Other parameters, or state that does not follow its parameter's shape.
    """
    layout = model_layout(model)
    names = _names(optimizer, layout)
    saved = [key for group in state["param_groups"] for key in group["params"]]
    if len(saved) != len(names):
        raise MismatchError(
            f"The optimizer's parameter groups do not match the checkpoint's: {len(saved)} "
            f"parameter(s) stored, {len(names)} now."
        )
    name_of = {
        key: without_wrappers(key) if isinstance(key, str) else name
        for key, name in zip(saved, names, strict=True)
    }
    loaded: dict[str, Any] = {
        "state": {
            f"0.{name_of[key]}": _cut(name_of[key], layout, values)
            for key, values in state["state"].items()
        },
        "param_groups": [
            {**group, "params": [f"0.{name_of[key]}" for key in group["params"]]}
            for group in state["param_groups"]
        ],
    }
    load_optimizer_state(optimizer, [layout], loaded)


def _names(optimizer: Any, layout: ModelLayout) -> list[str]:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    unknown = sum(id(parameter) not in layout.names for parameter in parameters)
    if unknown:
        raise MismatchError(
            f"{unknown} parameter(s) of the optimizer have no name in the model.",
            hint="FSDP with use_orig_params=False takes checkpoint directories, no files: load the "
            "file under DDP or a single device, and save again.",
        )
    return [layout.names[id(parameter)] for parameter in parameters]


def _cut(name: str, layout: ModelLayout, values: Mapping[str, Any]) -> dict[str, Any]:
    if name not in layout.tensors:
        raise MismatchError(f"The model has no parameter {name!r}, the optimizer's state does.")
    own = layout.tensors[name].layout
    is_flat = any(part.flat_range is not None or part.order is not None for part in own.parts)
    if is_flat and own.local_shape == (0,):
        return {}  # FSDP1 gives an optimizer no state for a parameter that is all on other ranks
    return _parts(own, name, values)


def _parts(own: TensorLayout, name: str, values: Mapping[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for kind, value in values.items():
        if not isinstance(value, torch.Tensor) or not value.ndim or own.is_replicated:
            result[kind] = value
        elif tuple(value.shape) == own.global_shape:
            shards = own.shard(name, torch.empty(own.local_shape, dtype=value.dtype))
            pieces = [shards] if isinstance(shards, ShardedTensor) else shards
            for shard in pieces:
                copy_box(shard, value)
            data = [shard.data for shard in pieces]
            result[kind] = data[0] if len(data) == 1 else data
        else:
            raise MismatchError(
                f"state {kind!r} of parameter {name!r} has shape {tuple(value.shape)}, which is "
                f"not the parameter's {own.global_shape}, and the parameter is sharded."
            )
    return result
