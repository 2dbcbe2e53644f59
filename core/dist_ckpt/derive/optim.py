"""Optimizer state as sharded tensors, from the layouts of the parameters.

Here: what is stored of an optimizer (``sharded_optimizer_state``) and the kinds of state. Not here:
loading it (``derive.optim_load``), layouts of parameters (``derive.model``). Called by the
training-state code and by users, on every rank, locally: nothing communicates.

What ``optimizer.state_dict()`` returns is what is stored. Kinds of state, decided for each value of
a parameter's state:

* *following*: has the parameter's shape, so it is cut as the parameter is;
* *scalar*: a tensor without axes, equal on all ranks;
* *whole*: any other tensor of a parameter that is not sharded;
* *declared*: any other tensor whose optimizer class has a registered spec;
* *opaque*: any other tensor of a sharded parameter, stored for each rank, for the same topology;
* *plain*: without tensors; it goes to the common part, or to an object if the parameter is sharded,
  as then the rank that stores the common part may not have it;
* *value*: a container with tensors, or a tensor that is made of others, of a parameter that is not
  sharded: an object.

A state dict of another form than torch's is one object, if no parameter is sharded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from dist_ckpt._codec.subclasses import is_wrapper
from dist_ckpt.derive import optim_form as form
from dist_ckpt.derive.ddp import current_rank, replicated_layout
from dist_ckpt.derive.dtensor import dtensor_layout, local_of
from dist_ckpt.derive.layout import ModelLayout, TensorLayout
from dist_ckpt.derive.model import model_layout
from dist_ckpt.derive.slots import Slot, optimizer_slots, unwrap_optimizer
from dist_ckpt.derive.state_spec import StateSpec, find_state_spec, spec_layout
from dist_ckpt.errors import InvalidShardingError
from dist_ckpt.mapping import ShardedObject
from dist_ckpt.types import ShardedStateDict

__all__ = [
    "LIKE_PARAMETER",
    "OPAQUE",
    "check_optimizer",
    "check_optimizers",
    "extra_object",
    "opaque_key",
    "opaque_object",
    "sharded_optimizer_state",
    "state_key",
    "unsharded_layout",
    "value_object",
    "whole_object",
]

OPAQUE = "$opaque"
"""Name, among a parameter's states, under which the tree holds its opaque ones."""

LIKE_PARAMETER: Final = "dist_ckpt.like_parameter"
"""``(LIKE_PARAMETER, tensor)`` among opaque states is the local tensor of a DTensor that is placed
as the parameter is."""


def sharded_optimizer_state(
    optimizer: Any, layouts: Sequence[ModelLayout], *, prefix: str
) -> ShardedStateDict:
    """Describe what this rank holds of an optimizer's state: of its ``state_dict()``.

    Args:
        optimizer: A torch optimizer, or a framework's wrapper around one.
        layouts: Layouts of the models whose parameters it may hold.
        prefix: Prefix of all keys, e.g. ``optimizers.0.``.

    Returns:
        ``{"state": {parameter: {state: ...}}, "param_groups": [{..., "params": [...]}]}``
        with parameters by name, as ``{model index}.{canonical name}``, and further entries of the
        state dict. The tensors' keys are ``{prefix}state.{state}.{parameter}``; their data aliases
        the optimizer's. A state dict of another form is one object, ``{prefix}whole``.

    Raises:
        InvalidShardingError: State that cannot be described; all offenders are named.
    """
    inner = unwrap_optimizer(optimizer)
    slots = optimizer_slots(inner, layouts)
    raw = form.read_state_dict(inner, slots)
    title = f"{type(inner).__name__} ({prefix.rstrip('.')})"
    is_sharded = not form.are_replicated(slots, layouts)
    keys = form.state_keys(inner, raw)
    if keys is None:
        return _whole_tree(raw, slots, title=title, prefix=prefix, is_sharded=is_sharded)
    spec = find_state_spec(inner)
    problems: list[str] = []
    tree: ShardedStateDict = {"state": {}}
    orders: dict[tuple[str, ...], None] = {}
    for slot in slots:
        state = raw["state"].get(keys[id(slot.param)])
        if state is None:
            continue
        orders[tuple(state)] = None
        try:
            tree["state"][slot.name] = _describe_slot(slot, state, spec=spec, prefix=prefix)
        except InvalidShardingError as error:  # collected: all offenders are named at once
            problems.append(str(error))
    tree["param_groups"] = [
        {**group, "params": [slot.name for slot in slots if slot.group == index]}
        for index, group in enumerate(raw["param_groups"])
    ]
    rest = {key: value for key, value in raw.items() if key not in {"state", "param_groups"}}
    own = set(keys.values())
    others = {key: value for key, value in raw["state"].items() if key not in own}
    if others:
        rest["other_state"] = others
    problems += _unstorable_settings(raw["param_groups"], is_sharded=is_sharded)
    for name, value in rest.items():
        problems += form.unstorable(value, f"entry {name!r}", is_sharded=is_sharded)
        # Tensors are read only by who loads the optimizer, and the common part by everybody.
        tree[name] = extra_object(prefix, name, value) if form.has_data(value) else value
    tree |= _odd_keys(slots, keys) | {form.ORDER: [list(names) for names in orders]}
    _raise_all(title, problems)
    return tree


def _unstorable_settings(groups: Sequence[Mapping[str, Any]], *, is_sharded: bool) -> Iterator[str]:
    for index, group in enumerate(groups):
        for name, value in group.items():
            if name != "params":
                where = f"param_groups[{index}][{name!r}]"
                yield from form.unstorable(value, where, is_sharded=is_sharded)


def check_optimizer(optimizer: Any, layouts: Sequence[ModelLayout]) -> None:
    """Raise the error that a save would raise, as far as it is known before the first step.

    Local and cheap. State that an optimizer makes at its first step is not checked. An optimizer
    whose ``state_dict`` has hooks is not checked at all: hooks may do anything, so they run at
    saves only.

    Args:
        optimizer: A torch optimizer, or a framework's wrapper around one.
        layouts: Layouts of the models whose parameters it may hold.

    Raises:
        InvalidShardingError: Its state cannot be stored; all offenders are named.
    """
    inner = unwrap_optimizer(optimizer)
    hooks = ("_optimizer_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks")
    if not any(getattr(inner, name, None) for name in hooks):
        sharded_optimizer_state(inner, layouts, prefix="optimizer.")


def check_optimizers(optimizers: Iterable[Any], models: Iterable[nn.Module]) -> None:
    """Check all optimizers of a job as ``check_optimizer`` does; one error names all offenders.

    A model that cannot be described yet (lazy modules before their first batch) is represented by
    the parameters that its optimizers hold.

    Raises:
        InvalidShardingError: The state of an optimizer cannot be stored.
    """
    layouts: list[ModelLayout] = []
    for model in models:
        with contextlib.suppress(InvalidShardingError):
            layouts.append(model_layout(model))
    problems: list[str] = []
    for number, optimizer in enumerate(optimizers):
        try:
            check_optimizer(optimizer, layouts)
        except InvalidShardingError as error:
            problems.append(f"optimizer {number}: {error}")
    if problems:
        raise InvalidShardingError(
            f"{len(problems)} optimizer(s) cannot be saved: {' '.join(problems)}"
        )


def _whole_tree(
    raw: Any, slots: Sequence[Slot], *, title: str, prefix: str, is_sharded: bool
) -> ShardedStateDict:
    """Describe a state dict of unknown form: all of it is one object."""
    if is_sharded:
        entries = sorted(map(str, raw)) if isinstance(raw, Mapping) else type(raw).__name__
        raise InvalidShardingError(
            f"{title}: its state_dict() is not {{'state': {{parameter: {{name: value}}}}, "
            f"'param_groups': [...]}} with one entry for each parameter (found {entries}), so that "
            f"it can only be stored as it is, and parameters are sharded.",
            hint="use it under DDP or in a single process, or train with the optimizer that it "
            "wraps.",
        )
    _raise_all(title, list(form.unstorable(raw, "its state_dict()")))
    data = form.with_marks(raw, list(dict.fromkeys(slot.param for slot in slots)))
    groups = max((slot.group for slot in slots), default=-1) + 1
    names = [{"params": [s.name for s in slots if s.group == i]} for i in range(groups)]
    return {"state": {}, "param_groups": names, form.WHOLE: whole_object(prefix, data)}


def _odd_keys(slots: Sequence[Slot], keys: Mapping[int, Any]) -> ShardedStateDict:
    """Return the parameters' keys in ``state`` if they are not the numbers that torch gives."""
    by_name = {slot.name: keys[id(slot.param)] for slot in slots}
    if all(type(by_name[s.name]) is int and by_name[s.name] == s.index for s in slots):
        return {}
    params = {id(slot.param) for slot in slots}
    return {form.KEYS: {name: None if id(key) in params else key for name, key in by_name.items()}}


def _raise_all(title: str, problems: Sequence[str]) -> None:
    if problems:
        raise InvalidShardingError(
            f"{title}: {len(problems)} state(s) cannot be stored: {'; '.join(problems)}."
        )


def state_key(prefix: str, state: str, parameter: str) -> str:
    """Return the key of one state; dots in the state's name are escaped to keep keys readable."""
    return f"{prefix}state.{state.replace('%', '%25').replace('.', '%2E')}.{parameter}"


def opaque_key(prefix: str, slot: Slot) -> str:
    """Return the key of this rank's opaque state; the topology is a part of it."""
    rank, world_size = current_rank()
    return f"{prefix}opaque.{slot.name}@{slot.layout.topology} of {world_size}@{rank}"


def opaque_object(prefix: str, slot: Slot, data: Any) -> ShardedObject:
    """Return the object that holds this rank's opaque state; no other rank has the same key."""
    return ShardedObject(opaque_key(prefix, slot), data, (1,), (0,), replica_id=0)


def value_object(key: str, slot: Slot, data: Any) -> ShardedObject:
    """Return the object that holds a value of a parameter, the same on all ranks that have it."""
    return ShardedObject(
        key, data, (1,), (0,), replica_id=0 if slot.layout.is_first else current_rank()[0] + 1
    )


def whole_object(prefix: str, data: Any) -> ShardedObject:
    """Return the object that holds a whole state dict of unknown form."""
    return _object_of_all(f"{prefix}whole", data)


def extra_object(prefix: str, name: str, data: Any) -> ShardedObject:
    """Return the object that holds a further entry of a state dict."""
    return _object_of_all(f"{prefix}{form.EXTRA}.{name}", data)


def _object_of_all(key: str, data: Any) -> ShardedObject:
    return ShardedObject(key, data, (1,), (0,), replica_id=current_rank()[0])


def unsharded_layout(slot: Slot, shape: tuple[int, ...]) -> TensorLayout:
    """Return the layout of a tensor of the slot's parameter that every rank holds entirely."""
    writer = slot.layout.writer if slot.layout.is_replicated else "first"
    return replicated_layout(shape, writer="first" if writer == "main" else writer)


def _describe_slot(
    slot: Slot, state: Mapping[str, Any], *, spec: StateSpec | None, prefix: str
) -> ShardedStateDict:
    tree: ShardedStateDict = {}
    opaque: dict[str, Any] = {}
    problems: list[str] = []
    is_replicated = slot.layout.is_replicated and not isinstance(slot.param, DTensor)
    for name, value in state.items():
        key = state_key(prefix, name, slot.name)
        where = f"state {name!r} of parameter {slot.name!r}"
        if isinstance(value, torch.Tensor) and not _is_value(value):
            placed = _layout_of_state(slot, name, value, spec=spec)
            if placed is None:
                opaque[name] = local_of(value)
            else:
                layout, local = placed
                tree[name] = layout.shard(key, local)
            continue
        inside = _local_wrapper(slot, value) if isinstance(value, DTensor) else value
        problems += form.unstorable(inside, where)
        if inside is None and isinstance(value, DTensor):
            problems.append(f"{where} is a {type(value).__name__} placed unlike the parameter")
        elif not is_replicated and form.has_data(inside, least=0):
            opaque[name] = inside if inside is value else (LIKE_PARAMETER, inside)
        elif is_replicated and not form.has_data(value):
            tree[name] = value
        else:
            tree[name] = value_object(key, slot, value)
    if problems:
        raise InvalidShardingError("; ".join(problems))
    if opaque:
        tree[OPAQUE] = opaque_object(prefix, slot, opaque)
    return tree


def _is_value(tensor: torch.Tensor) -> bool:
    """Whether a tensor is stored as a value: it has no memory of its own to read into."""
    with torch.no_grad():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    is_plain = local.layout == torch.strided and not local.is_quantized
    return is_wrapper(local) or not (is_plain or local.device.type == "meta")


def _local_wrapper(slot: Slot, value: DTensor) -> torch.Tensor | None:
    """Return the local tensor of a DTensor that is placed as the parameter is, else None."""
    param = slot.param
    if not isinstance(param, DTensor) or len(slot.layout.parts) != 1:
        return None
    is_like = (
        value.device_mesh == param.device_mesh
        and value.placements == param.placements
        and value.shape == param.shape
    )
    with torch.no_grad():  # not detached: some of these classes lose their dtype then
        return value.to_local() if is_like else None


def _layout_of_state(
    slot: Slot, name: str, value: torch.Tensor, *, spec: StateSpec | None
) -> tuple[TensorLayout, torch.Tensor] | None:
    """Return layout and local elements of a state tensor; None for opaque ones."""
    layout = slot.layout
    local = local_of(value)
    if value.device.type == "meta":
        raise InvalidShardingError(
            f"state {name!r} of parameter {slot.name!r} is on the meta device, without data"
        )
    if isinstance(value, DTensor):
        if layout.global_shape == tuple(value.shape) and layout.local_shape == tuple(local.shape):
            own = dtensor_layout(value, name=f"{slot.name}: {name}", equal=layout.writer == "any")
            return (layout if own.parts == layout.parts else own), local
        return dtensor_layout(value, name=f"{slot.name}: {name}"), local
    if value.ndim and tuple(value.shape) == slot.state_shape:
        return layout, slot.cut(local)
    if not value.ndim:
        return unsharded_layout(slot, ()), local
    if layout.is_replicated:
        return unsharded_layout(slot, tuple(value.shape)), local
    declared = spec_layout(spec, name=name, shape=tuple(value.shape), layout=layout)
    return None if declared is None else (declared, local)
