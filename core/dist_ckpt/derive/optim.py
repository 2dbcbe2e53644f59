"""Optimizer state as sharded tensors, from the layouts of the parameters.

Here: what is stored of an optimizer (``sharded_optimizer_state``) and the kinds of state. Not here:
loading it (``derive.optim_load``), layouts of parameters (``derive.model``). Called by the
training-state code and by users, on every rank, locally: nothing communicates.

Kinds of state, decided for each value:

* *following*: has the parameter's shape, so it is cut as the parameter is;
* *scalar*: a tensor without axes, equal on all ranks;
* *whole*: any other tensor of a parameter that is not sharded;
* *declared*: any other tensor whose optimizer class has a registered spec;
* *opaque*: any other tensor of a sharded parameter, stored for each rank, for the same topology;
* *plain*: no tensor; it goes to the common part, or to an object if the parameter is sharded, as
  then the rank that stores the common part may not have it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from dist_ckpt.derive.ddp import current_rank, replicated_layout
from dist_ckpt.derive.dtensor import dtensor_layout, local_of
from dist_ckpt.derive.layout import ModelLayout, TensorLayout
from dist_ckpt.derive.slots import Slot, optimizer_slots, unwrap_optimizer
from dist_ckpt.derive.state_spec import StateSpec, find_state_spec, spec_layout
from dist_ckpt.errors import InvalidShardingError
from dist_ckpt.mapping import ShardedObject
from dist_ckpt.types import ShardedStateDict

__all__ = [
    "OPAQUE",
    "opaque_key",
    "opaque_object",
    "plain_object",
    "scalar_layout",
    "sharded_optimizer_state",
    "state_key",
]

OPAQUE = "$opaque"
"""Name, among a parameter's states, under which the tree holds its opaque ones."""


def sharded_optimizer_state(
    optimizer: Any, layouts: Sequence[ModelLayout], *, prefix: str
) -> ShardedStateDict:
    """Describe what this rank holds of an optimizer's state.

    Args:
        optimizer: A torch optimizer, or a framework's wrapper around one.
        layouts: Layouts of the models whose parameters it may hold.
        prefix: Begin of all keys, e.g. ``optimizers.0.``.

    Returns:
        ``{"state": {parameter: {state: ...}}, "param_groups": [{..., "params": [...]}]}``
        with parameters by name, as ``{model index}.{canonical name}``. The tensors' keys are
        ``{prefix}state.{state}.{parameter}``; their data aliases the optimizer's.

    Raises:
        InvalidShardingError: State that cannot be described; all offenders are named.
    """
    inner = unwrap_optimizer(optimizer)
    slots = optimizer_slots(inner, layouts)
    raw = inner.state_dict()
    if not isinstance(raw.get("state"), Mapping) or "param_groups" not in raw:
        raise InvalidShardingError(
            f"{type(inner).__name__}.state_dict() has no 'state' and 'param_groups'; found "
            f"{sorted(map(str, raw))}."
        )
    spec = find_state_spec(inner)
    problems: list[str] = []
    tree: ShardedStateDict = {"state": {}}
    for slot in slots:
        try:
            described = _describe_slot(
                slot, raw["state"].get(slot.index, {}), spec=spec, prefix=prefix
            )
        except InvalidShardingError as error:  # collected: all offenders are named at once
            problems.append(str(error))
            continue
        if described:
            tree["state"][slot.name] = described
    if problems:
        raise InvalidShardingError(f"{len(problems)} state(s) not described: {'; '.join(problems)}")
    tree["param_groups"] = [
        {**group, "params": [slot.name for slot in slots if slot.group == index]}
        for index, group in enumerate(raw["param_groups"])
    ]
    indices = {slot.index for slot in slots}
    rest = {key: value for key, value in raw["state"].items() if key not in indices}
    if rest:
        tree["other_state"] = rest
    tree.update({key: value for key, value in raw.items() if key not in {"state", "param_groups"}})
    return tree


def state_key(prefix: str, state: str, parameter: str) -> str:
    """Return the key of one state; dots in the state's name are escaped to keep keys readable."""
    return f"{prefix}state.{state.replace('%', '%25').replace('.', '%2E')}.{parameter}"


def opaque_key(prefix: str, slot: Slot) -> str:
    """Return the key of this rank's opaque state, which tells the topology too."""
    rank, world_size = current_rank()
    return f"{prefix}opaque.{slot.name}@{slot.layout.topology} of {world_size}@{rank}"


def opaque_object(prefix: str, slot: Slot, data: Any) -> ShardedObject:
    """Return the object that holds this rank's opaque state; nobody else has the same key."""
    return ShardedObject(opaque_key(prefix, slot), data, (1,), (0,), replica_id=0)


def plain_object(key: str, slot: Slot, data: Any) -> ShardedObject:
    """Return the object that holds a value without tensors of a sharded parameter."""
    rank, _ = current_rank()
    replica_id = 0 if slot.layout.is_first else rank + 1
    return ShardedObject(key, data, (1,), (0,), replica_id=replica_id)


def scalar_layout(slot: Slot) -> TensorLayout:
    """Return the layout of a tensor without axes that belongs to the slot's parameter."""
    writer = slot.layout.writer if slot.layout.is_replicated else "first"
    return replicated_layout((), writer="first" if writer == "main" else writer)


def _describe_slot(
    slot: Slot, state: Mapping[Any, Any], *, spec: StateSpec | None, prefix: str
) -> ShardedStateDict:
    tree: ShardedStateDict = {}
    opaque: dict[str, Any] = {}
    for name, value in state.items():
        if not isinstance(name, str):
            raise InvalidShardingError(
                f"State of parameter {slot.name!r}: names must be str, found {name!r}."
            )
        key = state_key(prefix, name, slot.name)
        if isinstance(value, torch.Tensor):
            found = _layout_of_state(slot, name, value, spec=spec)
            if found is None:
                opaque[name] = local_of(value)
            else:
                layout, local = found
                tree[name] = layout.shard(key, local)
        elif slot.layout.is_replicated:
            tree[name] = value
        elif any(True for _ in _tensors_in(value)):
            opaque[name] = _without_dtensors(value)
        else:
            tree[name] = plain_object(key, slot, value)
    if opaque:
        tree[OPAQUE] = opaque_object(prefix, slot, opaque)
    return tree


def _layout_of_state(
    slot: Slot, name: str, value: torch.Tensor, *, spec: StateSpec | None
) -> tuple[TensorLayout, torch.Tensor] | None:
    """Return layout and local elements of a state tensor; None for opaque ones."""
    layout = slot.layout
    local = local_of(value)
    if value.device.type == "meta" or value.layout != torch.strided:
        raise InvalidShardingError(
            f"State {name!r} of parameter {slot.name!r} is on {value.device} with layout "
            f"{value.layout}; only dense tensors with storage can be stored."
        )
    if isinstance(value, DTensor):
        if layout.global_shape == tuple(value.shape) and layout.local_shape == tuple(local.shape):
            own = dtensor_layout(value, name=f"{slot.name}: {name}", equal=layout.writer == "any")
            return (layout if own.parts == layout.parts else own), local
        return dtensor_layout(value, name=f"{slot.name}: {name}"), local
    if value.ndim and tuple(value.shape) == slot.state_shape:
        return layout, slot.cut(local)
    if not value.ndim:
        return scalar_layout(slot), local
    if layout.is_replicated:
        writer = "first" if layout.writer == "main" else layout.writer
        return replicated_layout(tuple(value.shape), writer=writer), local
    declared = spec_layout(spec, name=name, shape=tuple(value.shape), layout=layout)
    return None if declared is None else (declared, local)


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors_in(item)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for item in value:
            yield from _tensors_in(item)


def _without_dtensors(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return local_of(value)
    if isinstance(value, dict):
        return {key: _without_dtensors(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_dtensors(item) for item in value]
    if type(value) is tuple:
        return tuple(_without_dtensors(item) for item in value)
    return value
