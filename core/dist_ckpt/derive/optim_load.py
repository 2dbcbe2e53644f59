"""Loading optimizer state: the request for a checkpoint, and passing the result to the optimizer.

Here: ``optimizer_template`` (from what the checkpoint has, never from a dummy step) and
``load_optimizer_state``. Not here: what is stored (``derive.optim``), reading. Called by the
training-state code and by users, on every rank, locally: nothing communicates.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from dist_ckpt._codec.subclasses import is_wrapper
from dist_ckpt.derive import optim_form as form
from dist_ckpt.derive.dtensor import local_of, wrap_like
from dist_ckpt.derive.layout import ModelLayout, TensorLayout
from dist_ckpt.derive.optim import (
    LIKE_PARAMETER,
    OPAQUE,
    extra_object,
    opaque_key,
    opaque_object,
    state_key,
    unsharded_layout,
    value_object,
    whole_object,
)
from dist_ckpt.derive.slots import Slot, optimizer_slots, unwrap_optimizer
from dist_ckpt.derive.state_spec import StateSpec, find_state_spec, spec_layout
from dist_ckpt.errors import MismatchError
from dist_ckpt.mapping import ShardedObject, ShardedTensor
from dist_ckpt.types import ShardedStateDict, StateDict

__all__ = ["load_optimizer_state", "optimizer_template"]

Stored = Mapping[str, ShardedTensor | ShardedObject]


def optimizer_template(
    optimizer: Any,
    layouts: Sequence[ModelLayout],
    *,
    prefix: str,
    metadata: Stored,
    saved: StateDict,
) -> ShardedStateDict:
    """Describe what this rank reads of a stored optimizer state.

    Args:
        optimizer: The optimizer to load into, with or without state of its own.
        layouts: Layouts of the models whose parameters it may hold.
        prefix: Prefix of all keys, as at saving.
        metadata: What the checkpoint has, from ``load_sharded_metadata``.
        saved: The optimizer's tree in the checkpoint's common part: its plain leaves.

    Returns:
        A tree like that of ``sharded_optimizer_state``. Tensors are the optimizer's own state where
        that fits, otherwise new ones.

    Raises:
        MismatchError: Stored state that this rank cannot take; all offenders are named.
    """
    inner = unwrap_optimizer(optimizer)
    # Objects may be listed under a key with their position; only the plain key counts here.
    stored = {item.key: item for item in metadata.values() if item.key.startswith(prefix)}
    request = _Request(prefix=prefix, spec=find_state_spec(inner), stored=stored)
    by_parameter = _stored_states(stored, prefix)
    plain = saved.get("state", {})
    tree: ShardedStateDict = {key: value for key, value in saved.items() if key != "state"}
    tree["state"] = {}
    slots = optimizer_slots(inner, layouts)
    tree |= request.of_all(inner, is_replicated=form.are_replicated(slots, layouts))
    for slot in slots:
        if _has_no_state(slot) or request.is_other_parameter(
            slot, metadata.get(f"models.{slot.name}")
        ):
            continue
        states = dict(plain.get(slot.name, {}))
        states |= request.states(
            slot, by_parameter.get(slot.name, ()), _own_state(inner, slot.param)
        )
        if states:
            tree["state"][slot.name] = states
    if request.problems:
        raise MismatchError(
            f"{len(request.problems)} optimizer state(s) cannot be loaded: "
            f"{'; '.join(request.problems)}."
        )
    return tree


def load_optimizer_state(optimizer: Any, layouts: Sequence[ModelLayout], loaded: StateDict) -> None:
    """Load state into an optimizer, through its own ``load_state_dict`` and its hooks.

    Parameters are matched by name. The state keeps the dtypes it was stored with.

    Args:
        optimizer: The optimizer, as given to ``optimizer_template``.
        layouts: The same layouts too.
        loaded: The template with its leaves replaced by what was loaded.

    Raises:
        MismatchError: The stored parameter groups hold other parameters.
    """
    inner = unwrap_optimizer(optimizer)
    slots = optimizer_slots(inner, layouts)
    extra = {
        name: value
        for name, value in loaded.items()
        if form.is_own_entry(name) and name not in {"state", "param_groups"}
    }
    others = loaded.get("other_state", {})
    if form.WHOLE in loaded or any(map(form.has_data, (*extra.values(), others))):
        # Their own entries have parameters by number.
        _check_order(slots, loaded.get("param_groups", []))
    if form.WHOLE in loaded:
        params = list(dict.fromkeys(slot.param for slot in slots))
        inner.load_state_dict(form.with_parameters(loaded[form.WHOLE], params))
        return
    keys = _keys(slots, loaded.get(form.KEYS, {}))
    groups = _match_groups(slots, inner.param_groups, loaded.get("param_groups", []), keys)
    spec = find_state_spec(inner)
    state: dict[Any, Any] = {}
    problems: list[str] = []
    orders = {frozenset(names): names for names in loaded.get(form.ORDER, ())}
    for members in _by_index(slots):
        for slot in members:
            _check_values(slot, loaded.get("state", {}), problems, spec=spec)
        own = _own_state(inner, members[0].param)
        values = _state_of(members, loaded.get("state", {}), own=own, spec=spec)
        is_empty = any(s.name in loaded.get("state", {}) and not _has_no_state(s) for s in members)
        if values or is_empty:
            names = orders.get(frozenset(values), values)
            state[keys[id(members[0].param)]] = {name: values[name] for name in names}
    if problems:
        raise MismatchError(
            f"{len(problems)} optimizer state(s) cannot be loaded: {'; '.join(problems)}."
        )
    with _stored_dtypes(inner):
        inner.load_state_dict({"state": {**state, **others}, "param_groups": groups, **extra})


@contextmanager
def _stored_dtypes(optimizer: Any) -> Iterator[None]:
    """Make ``Optimizer.load_state_dict`` leave tensors in the dtypes they were stored with.

    It casts them to their parameter's. They are put back by a hook that runs before all others, so
    that whatever the optimizer's class and its users' hooks do to the state afterwards stays.
    """
    given: dict[str, Any] = {}

    def keep(_: Any, state_dict: dict[str, Any]) -> None:
        given.update(state_dict)

    def restore(_: Any) -> None:
        stored = (key for group in given["param_groups"] for key in group["params"])
        params = (param for group in optimizer.param_groups for param in group["params"])
        for param, key in zip(params, stored, strict=True):
            now, before = _own_state(optimizer, param), given["state"].get(key)
            if isinstance(now, dict) and isinstance(before, Mapping):
                _restore_dtypes(now, before)

    if not hasattr(optimizer, "_optimizer_load_state_dict_pre_hooks"):
        yield  # no optimizer of torch's, or one that has not run torch's __init__
        return
    handles = (
        optimizer.register_load_state_dict_pre_hook(keep),
        optimizer.register_load_state_dict_post_hook(restore, prepend=True),
    )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _own_state(optimizer: Any, param: torch.Tensor) -> Mapping[str, Any]:
    state: Mapping[str, Any] = getattr(optimizer, "state", {}).get(param, {})
    return state


def _keys(slots: Sequence[Slot], stored: Mapping[str, Any]) -> dict[int, Any]:
    """Return ``id(parameter)`` -> its key in the state dict to load."""
    keys: dict[int, Any] = {}
    for slot in slots:
        key = stored.get(slot.name, slot.index)
        keys[id(slot.param)] = slot.param if key is None else key
    return keys


def _check_order(slots: Sequence[Slot], saved: Sequence[Mapping[str, Any]]) -> None:
    groups = range(max(len(saved), *(slot.group + 1 for slot in slots), 0))
    now = [[slot.name for slot in slots if slot.group == index] for index in groups]
    stored = [list(group.get("params", ())) for group in saved]
    if now != stored:
        raise MismatchError(
            f"The state dict is stored with parameters by number, and their order differs: stored "
            f"{stored}, now {now}.",
            hint="give the optimizer the same parameters, in the same groups and order.",
        )


def _check_values(
    slot: Slot, loaded: StateDict, problems: list[str], *, spec: StateSpec | None
) -> None:
    """Add a problem for each value with tensors of a parameter that is sharded only now."""
    if slot.layout.is_replicated and not isinstance(slot.param, DTensor):
        return
    for name, value in loaded.get(slot.name, {}).items():
        is_tensor = isinstance(value, torch.Tensor) and not is_wrapper(value)
        if name == OPAQUE or is_tensor or not form.has_data(value):
            continue
        if not isinstance(value, list) or _parts_of(slot, name, value, spec=spec) is None:
            problems.append(
                f"state {name!r} of parameter {slot.name!r}: stored as a value of an unsharded "
                f"parameter (a {type(value).__name__}), and the parameter is sharded here"
            )


def _parts_of(
    slot: Slot, name: str, value: list[Any], *, spec: StateSpec | None
) -> TensorLayout | None:
    """Return the layout whose parts were loaded as a list; None if that is something else."""
    if _as_parts(slot.layout, value) is not None:
        return slot.layout
    if not value or not isinstance(value[0], torch.Tensor):
        return None
    declared = spec_layout(spec, name=name, shape=tuple(value[0].shape), layout=slot.layout)
    return declared if declared is not None and _as_parts(declared, value) is not None else None


class _Request:
    """Builds the leaves of a template and collects what does not fit."""

    def __init__(
        self,
        *,
        prefix: str,
        spec: StateSpec | None,
        stored: Stored,
    ) -> None:
        self.prefix = prefix
        self.spec = spec
        self.stored = stored
        self.problems: list[str] = []
        self._opaque: dict[str, set[str]] = {}
        start = f"{prefix}opaque."
        for key in stored:
            if key.startswith(start):
                parameter, _, _ = key.removeprefix(start).partition("@")
                self._opaque.setdefault(parameter, set()).add(key)

    def of_all(self, optimizer: Any, *, is_replicated: bool) -> ShardedStateDict:
        """Return the leaves of objects that belong to no parameter."""
        tree: ShardedStateDict = {}
        whole = whole_object(self.prefix, None)
        if whole.key in self.stored:
            tree[form.WHOLE] = whole
            if not is_replicated:
                self.problems.append(
                    f"the state dict of a {type(optimizer).__name__} is stored as it is, and "
                    f"parameters are sharded here (load it under DDP or in a single process)"
                )
        start = f"{self.prefix}{form.EXTRA}."
        names = [key.removeprefix(start) for key in self.stored if key.startswith(start)]
        return tree | {name: extra_object(self.prefix, name, None) for name in names}

    def states(self, slot: Slot, names: Sequence[str], own: Mapping[str, Any]) -> ShardedStateDict:
        """Return the leaves for the stored states of a parameter."""
        states = {name: self.state(slot, name, own.get(name)) for name in names}
        states[OPAQUE] = self.opaque(slot)
        return {name: leaf for name, leaf in states.items() if leaf is not None}

    def is_other_parameter(self, slot: Slot, stored: object) -> bool:
        """Whether the stored parameter of this name has another shape; adds a problem then."""
        shape = getattr(stored, "global_shape", slot.layout.global_shape)
        if tuple(shape) == slot.layout.global_shape:
            return False
        self.problems.append(
            f"parameter {slot.name!r}: stored with shape {tuple(shape)}, now "
            f"{slot.layout.global_shape}"
        )
        return True

    def state(self, slot: Slot, name: str, own: object) -> Any:
        """Return the leaf for one stored state; None if this rank needs none of it."""
        key = state_key(self.prefix, name, slot.name)
        stored = self.stored[key]
        if isinstance(stored, ShardedObject):
            return value_object(key, slot, None)
        layout = self._layout(slot, name, tuple(stored.global_shape))
        if layout is None:
            return None
        return layout.shard(key, self._target(slot, layout, dtype=stored.dtype, own=own))

    def opaque(self, slot: Slot) -> ShardedObject | None:
        """Return the leaf for this rank's opaque state, if the checkpoint has any."""
        keys = self._opaque.get(slot.name)
        if not keys:
            return None
        key = opaque_key(self.prefix, slot)
        if key in keys:
            return opaque_object(self.prefix, slot, None)
        saved = sorted({other.partition("@")[2].rpartition("@")[0] for other in keys})
        self.problems.append(
            f"parameter {slot.name!r}: its state of undeclared shape was saved for topology "
            f"{saved}, now {key.partition('@')[2].rpartition('@')[0]!r} (declare the shape with "
            f"register_state_spec() before saving, or load on the same topology)"
        )
        return None

    def _layout(self, slot: Slot, name: str, shape: tuple[int, ...]) -> TensorLayout | None:
        if shape == slot.layout.global_shape and shape:
            return slot.layout
        if not shape or slot.layout.is_replicated:
            return unsharded_layout(slot, shape)
        layout = spec_layout(self.spec, name=name, shape=shape, layout=slot.layout)
        if layout is None or layout.global_shape != shape:
            self.problems.append(
                f"state {name!r} of parameter {slot.name!r}: stored with shape {shape}, which is "
                f"not the parameter's {slot.layout.global_shape}, and the parameter is sharded "
                f"(declare the state's shape with register_state_spec())"
            )
            return None
        return layout

    def _target(
        self, slot: Slot, layout: TensorLayout, *, dtype: torch.dtype, own: object
    ) -> torch.Tensor:
        """Return the tensor to load into: the optimizer's own if it fits, else a new one."""
        if isinstance(own, torch.Tensor) and own.dtype == dtype:
            local = local_of(own)
            if layout is slot.layout and tuple(local.shape) == slot.state_shape:
                local = slot.cut(local)
            if tuple(local.shape) == layout.local_shape:
                return local
        param = local_of(slot.param)
        is_like = layout is slot.layout and slot.piece is None and not is_wrapper(param)
        if is_like and layout.local_shape and tuple(param.shape) == layout.local_shape:
            return torch.empty_like(param, dtype=dtype)  # with its strides, as at a first step
        device = slot.param.device if layout.local_shape else "cpu"
        return torch.empty(layout.local_shape, dtype=dtype, device=device)


def _has_no_state(slot: Slot) -> bool:
    """Whether FSDP1 gives the parameter no state, as none of its elements are here."""
    flat = any(part.flat_range or part.order for part in slot.layout.parts)
    return slot.piece is None and flat and slot.layout.local_shape == (0,)


def _stored_states(stored: Stored, prefix: str) -> dict[str, list[str]]:
    """Return parameter name to the names of its stored states."""
    start = f"{prefix}state."
    states: dict[str, list[str]] = {}
    for key in stored:
        if key.startswith(start):
            state, _, parameter = key.removeprefix(start).partition(".")
            name = state.replace("%2E", ".").replace("%25", "%")
            states.setdefault(parameter, []).append(name)
    return states


def _by_index(slots: Sequence[Slot]) -> Iterator[list[Slot]]:
    members: dict[int, list[Slot]] = {}
    for slot in slots:
        members.setdefault(slot.index, []).append(slot)
    yield from members.values()


def _match_groups(
    slots: Sequence[Slot],
    current: Sequence[dict[str, Any]],
    saved: Sequence[dict[str, Any]],
    keys: Mapping[int, Any],
) -> list[dict[str, Any]]:
    """Return the saved groups in the current order, with the parameters' keys."""
    group_of = {name: index for index, group in enumerate(saved) for name in group["params"]}
    names = {slot.name for slot in slots}
    problems = [f"not in the checkpoint: {sorted(names - set(group_of))}"] * bool(
        names - set(group_of)
    )
    if set(group_of) - names:
        problems.append(f"not in the optimizer: {sorted(set(group_of) - names)}")
    matched: list[dict[str, Any]] = []
    for index, group in enumerate(current):
        members = [slot for slot in slots if slot.group == index]
        origin = {group_of[slot.name] for slot in members if slot.name in group_of}
        if len(origin) > 1 or (
            origin and len(members) != len(set(saved[min(origin)]["params"])) and not problems
        ):
            problems.append(
                f"group {index} ({len(members)} parameters) is spread over, or only a part of, the "
                f"saved group(s) {sorted(origin)}"
            )
        if not members and index < len(saved) and not saved[index]["params"]:
            origin = {index}  # a group without parameters has only its position
        settings = _settings(saved[min(origin)] if origin else group, members)
        matched.append({**settings, "params": [keys[id(param)] for param in group["params"]]})
    if problems:
        raise MismatchError(
            f"The optimizer's parameter groups do not match the checkpoint's: "
            f"{'; '.join(problems)}.",
            hint="give the optimizer the same parameters, in the same groups, as at saving.",
        )
    return matched


def _settings(group: Mapping[str, Any], members: Sequence[Slot]) -> dict[str, Any]:
    """Return a group with torch's own names of its parameters in the order of ``members``."""
    settings = dict(group)
    stored, names = group["params"], group.get("param_names")
    if isinstance(names, list) and len(names) == len(stored):
        by_name = {key: name for key, name in zip(stored, names, strict=True) if type(key) is str}
        if all(slot.name in by_name for slot in members):
            settings["param_names"] = [by_name[slot.name] for slot in members]
    return settings


def _state_of(
    members: Sequence[Slot], loaded: StateDict, *, own: Mapping[str, Any], spec: StateSpec | None
) -> dict[str, Any]:
    """Return the state of one parameter of the optimizer, in the form the optimizer keeps it."""
    if members[0].piece is not None:
        return _flat_state(members, loaded)
    slot = members[0]
    found = dict(loaded.get(slot.name, {}))
    opaque = found.pop(OPAQUE, {})
    values = {n: _rebuilt(slot, n, value, own=own, spec=spec) for n, value in found.items()}
    values |= {n: _rebuilt_opaque(slot, n, value, own=own) for n, value in opaque.items()}
    return values


def _flat_state(members: Sequence[Slot], loaded: StateDict) -> dict[str, Any]:
    """Put the states of the parameters in a flat parameter together again."""
    merged: dict[str, Any] = {}
    for slot in members:
        found = dict(loaded.get(slot.name, {}))
        found.update(found.pop(OPAQUE, {}))
        for name, value in found.items():
            piece = slot.piece
            parts = _as_parts(slot.layout, value)
            if piece is None or parts is None:
                merged.setdefault(name, value)
                continue
            local = parts[0] if len(parts) == 1 else slot.layout.assemble(parts)
            if name not in merged:
                merged[name] = torch.zeros(
                    slot.state_shape, dtype=local.dtype, device=slot.param.device
                )
            piece.cut(merged[name]).copy_(local)
    return merged


def _rebuilt(
    slot: Slot, name: str, value: Any, *, own: Mapping[str, Any], spec: StateSpec | None
) -> Any:
    """Return a loaded value as the optimizer keeps it: in one piece, and a DTensor if it was."""
    parts = _as_parts(slot.layout, value)
    follows = parts is not None
    if parts is not None:
        value = parts[0] if len(parts) == 1 else slot.layout.assemble(parts)
    elif isinstance(value, list):
        declared = _parts_of(slot, name, value, spec=spec)
        value = value if declared is None else declared.assemble(value)
    if not isinstance(value, torch.Tensor):
        return value
    before = own.get(name)
    if follows and isinstance(slot.param, DTensor):
        keeps_plain = isinstance(before, torch.Tensor) and not isinstance(before, DTensor)
        return value if keeps_plain else wrap_like(value, slot.param)
    if isinstance(before, DTensor) and tuple(before.shape) == tuple(value.shape):
        return wrap_like(value, before)
    return value


def _rebuilt_opaque(slot: Slot, name: str, value: Any, *, own: Mapping[str, Any]) -> Any:
    if type(value) is tuple and len(value) and value[0] == LIKE_PARAMETER:
        param, local = slot.param, value[1]
        return wrap_like(local, param) if isinstance(param, DTensor) else local
    before = own.get(name)
    if not isinstance(before, DTensor) or not isinstance(value, torch.Tensor) or is_wrapper(value):
        return value
    return wrap_like(value, before) if tuple(before.shape) == tuple(value.shape) else value


def _as_parts(layout: TensorLayout, value: Any) -> list[torch.Tensor] | None:
    """Return the tensors of ``layout``'s parts if ``value`` is what was loaded for it."""
    if isinstance(value, torch.Tensor):
        fits = tuple(value.shape) == layout.local_shape and len(layout.parts) == 1 and value.ndim
        return [value] if fits else None
    if not isinstance(value, list) or len(value) != len(layout.parts) or len(value) == 1:
        return None
    shapes = zip(value, layout.parts, strict=True)
    if all(isinstance(v, torch.Tensor) and tuple(v.shape) == p.box.shape for v, p in shapes):
        return value
    return None


def _restore_dtypes(now: Any, given: Any) -> None:
    """Put loaded tensors back where ``load_state_dict`` cast them to the parameter's dtype."""
    keys = now.keys() if isinstance(now, dict) else range(len(now))
    for key in list(keys):
        if isinstance(now, dict) and key not in given:
            continue
        new, old = now[key], given[key]
        if isinstance(new, torch.Tensor) and isinstance(old, torch.Tensor):
            if new.dtype != old.dtype and key != "step":
                now[key] = old.to(device=new.device)
        elif isinstance(new, (dict, list)) and type(new) is type(old) and len(new) == len(old):
            _restore_dtypes(new, old)
