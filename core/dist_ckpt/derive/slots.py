"""The parameters of an optimizer, by name.

Here: looking through optimizer wrappers, matching an optimizer's parameters with model layouts.
Not here: their state (``derive.optim``). Used on every rank, locally.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from dist_ckpt.derive.ddp import replicated_layout
from dist_ckpt.derive.dtensor import dtensor_layout
from dist_ckpt.derive.layout import FlatPiece, ModelLayout, TensorLayout
from dist_ckpt.errors import InvalidShardingError

__all__ = ["Slot", "optimizer_slots", "unwrap_optimizer"]

_WRAPPERS = frozenset({"AcceleratedOptimizer", "LightningOptimizer", "_FabricOptimizer"})
_PARTITIONING = frozenset({"ZeroRedundancyOptimizer"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """One named parameter of an optimizer.

    Args:
        name: ``{model index}.{canonical name}``, or ``_.{group}.{position}`` if in no model.
        index: Its number in ``optimizer.state_dict()``; several slots share the one of a flat
            parameter.
        group: Index of its parameter group.
        param: What the optimizer holds.
        layout: What this rank holds of the parameter.
        piece: Where the parameter lies in ``param``, if that is an FSDP1 flat parameter.
    """

    name: str
    index: int
    group: int
    param: torch.Tensor
    layout: TensorLayout
    piece: FlatPiece | None = None

    @property
    def state_shape(self) -> tuple[int, ...]:
        """Shape, in the optimizer, of a state that follows the parameter element by element."""
        return tuple(self.param.shape) if self.piece is not None else self.layout.local_shape

    def cut(self, state: torch.Tensor) -> torch.Tensor:
        """Return this parameter's elements, as a view of a plain state of ``state_shape``."""
        return state if self.piece is None else self.piece.cut(state)


def unwrap_optimizer(optimizer: Any) -> Any:
    """Return the optimizer whose ``state_dict()`` is stored: below the wrappers of frameworks.

    A wrapper whose class defines ``state_dict`` is kept, even if it shares the state of the
    optimizer in it: what it adds (slow weights, counters) is only in its own state dict.

    Raises:
        InvalidShardingError: The optimizer spreads its state over the ranks by itself.
    """
    while True:
        names = {cls.__name__ for cls in type(optimizer).__mro__}
        if names & _PARTITIONING:
            raise InvalidShardingError(
                f"{type(optimizer).__name__} spreads its state over the ranks in a way that cannot "
                f"be described.",
                hint="shard the model with FSDP instead, or consolidate the optimizer yourself.",
            )
        inner: Any = getattr(optimizer, "optimizer", None)
        if inner is None:
            inner = getattr(optimizer, "_optimizer", None)
        has_state = hasattr(inner, "state") or hasattr(inner, "state_dict")
        if not has_state or not hasattr(inner, "param_groups"):
            return optimizer
        if hasattr(type(optimizer), "state_dict") and not names & _WRAPPERS:
            return optimizer
        optimizer = inner


def optimizer_slots(optimizer: Any, layouts: Sequence[ModelLayout]) -> list[Slot]:
    """Return the named parameters of an unwrapped optimizer, in the order of its groups.

    Raises:
        InvalidShardingError: A parameter that is in no model has a sharding without boxes.
    """
    slots: list[Slot] = []
    seen: set[int] = set()
    start = 0
    for group_index, group in enumerate(getattr(optimizer, "param_groups", ())):
        # As ``Optimizer.state_dict`` numbers them: one that stands there twice by its last place.
        numbers = {id(param): number for number, param in enumerate(group["params"], start)}
        start += len(group["params"])
        for position, param in enumerate(group["params"]):
            if id(param) in seen:
                continue
            place = {"index": numbers[id(param)], "group": group_index, "param": param}
            seen.add(id(param))
            slots += _slots_of(param, layouts, fallback=f"_.{group_index}.{position}", place=place)
    return slots


def _slots_of(
    param: torch.Tensor,
    layouts: Sequence[ModelLayout],
    *,
    fallback: str,
    place: dict[str, Any],
) -> list[Slot]:
    for i, layout in enumerate(layouts):
        name = layout.names.get(id(param))
        if name is not None and layout.tensors[name].owner is param:
            return [Slot(name=f"{i}.{name}", layout=layout.tensors[name].layout, **place)]
        if id(param) in layout.pieces:
            return [
                Slot(name=f"{i}.{piece.name}", layout=piece.layout, piece=piece, **place)
                for piece in layout.pieces[id(param)]
            ]
    if isinstance(param, DTensor):
        return [Slot(name=fallback, layout=dtensor_layout(param, name=fallback), **place)]
    layout_of_all = replicated_layout(tuple(param.shape), writer="first")
    return [Slot(name=fallback, layout=layout_of_all, **place)]
