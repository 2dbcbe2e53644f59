"""Sharding found by itself: from live models and optimizers to sharded state dicts.

Here: the front door. Not here: saving and loading (``dist_ckpt.serialization``). Called on every
rank, locally: nothing in this package communicates, but what it describes is to be saved by all
ranks together. Known: plain modules, DDP, FSDP1, FSDP2, tensor parallelism, FSDP2 with tensor
parallelism, ``torch.compile``, activation checkpointing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from dist_ckpt.derive.layout import FlatPiece, LocalTensor, ModelLayout, Part, TensorLayout
from dist_ckpt.derive.model import model_layout, sharded_model_state, without_wrappers
from dist_ckpt.derive.optim import check_optimizer, check_optimizers, sharded_optimizer_state
from dist_ckpt.derive.optim_load import load_optimizer_state, optimizer_template
from dist_ckpt.derive.protocol import local_state_dict
from dist_ckpt.derive.protocol_load import load_whole_model
from dist_ckpt.derive.state_spec import StateSpec, StateSpecHandle, register_state_spec
from dist_ckpt.derive.values import copy_box
from dist_ckpt.mapping import ShardedObject, ShardedTensor
from dist_ckpt.types import ShardedStateDict, StateDict

__all__ = [
    "FlatPiece",
    "LocalTensor",
    "ModelLayout",
    "Part",
    "StateSpec",
    "StateSpecHandle",
    "TensorLayout",
    "check_optimizer",
    "check_optimizers",
    "copy_box",
    "load_optimizer_state",
    "load_whole_model",
    "local_state_dict",
    "model_layout",
    "optimizer_template",
    "register_state_spec",
    "sharded_model_state",
    "sharded_optimizer_state",
    "sharded_state_dict",
    "without_wrappers",
]


def sharded_state_dict(
    model: nn.Module,
    optimizer: Any = None,
    *,
    metadata: Mapping[str, ShardedTensor | ShardedObject] | None = None,
    common: StateDict | None = None,
) -> ShardedStateDict:
    """Return the sharded state dict of a model and, if given, its optimizer.

    Without ``metadata`` it is for saving. With it, and with ``common``, it is for loading: model
    tensors are filled in place; the optimizer's part is to be given to ``load_optimizer_state``.

    Args:
        model: The model, wrapped or not.
        optimizer: Its optimizer, wrapped or not.
        metadata: What the checkpoint has, from ``load_sharded_metadata``.
        common: Its common part, from ``load_common_state_dict``.

    Returns:
        ``{"model": ..., "tied": {other name: first name}, "optimizer": ...}``

    Example:
        >>> from torch import nn
        >>> sorted(sharded_state_dict(nn.Linear(2, 3))["model"])
        ['bias', 'weight']
    """
    layout = model_layout(model)
    tree: ShardedStateDict = {
        "model": sharded_model_state(layout, prefix="models.0."),
        "tied": dict(layout.tied),
    }
    if optimizer is not None and metadata is None:
        tree["optimizer"] = sharded_optimizer_state(optimizer, [layout], prefix="optimizers.0.")
    elif optimizer is not None and metadata is not None:
        saved = (common or {}).get("optimizer", {})
        tree["optimizer"] = optimizer_template(
            optimizer, [layout], prefix="optimizers.0.", metadata=metadata, saved=saved
        )
    return tree
