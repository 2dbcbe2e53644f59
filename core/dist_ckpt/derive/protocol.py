"""The content of ``model.state_dict()``: names in order, metadata, and entries that modules add.

Here: ``ModelState``, of a live model or of a state dict that a caller has edited. Not here: where
the bytes of parameters and buffers are (``derive.model``), loading (``derive.protocol_load``).
Called on every rank, locally: no communication.

A model whose modules do not customise PyTorch's protocol is described by a walk over its parameters
and buffers. If any module has code or hooks of its own, the model's own ``state_dict`` is called,
with ``keep_vars=True``: entries that are a parameter or buffer of the model are recognised by
identity and keep the direct path to their memory; the other entries are stored as values.
"""

from __future__ import annotations

import contextlib
import functools
from collections import OrderedDict
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from dist_ckpt.derive.ddp import current_rank
from dist_ckpt.derive.dtensor import local_of
from dist_ckpt.derive.fsdp import is_flat_parameter
from dist_ckpt.derive.layout import LocalTensor, ModelLayout
from dist_ckpt.derive.model import bare_module, is_odd, places, without_wrappers
from dist_ckpt.errors import InvalidShardingError

__all__ = [
    "EXTRA_STATE",
    "Entries",
    "ModelState",
    "deepest_prefix",
    "given_entries",
    "has_odd_tensors",
    "has_own_state",
    "has_whole_model",
    "holds_own_part",
    "is_of_wrapper",
    "local_state_dict",
    "model_state",
    "own_entries",
    "own_versions",
    "owned_by",
]

EXTRA_STATE = "_extra_state"
"""Last part of the name of the entry that ``get_extra_state`` makes."""


@dataclass(frozen=True, slots=True)
class Entries:
    """A state dict as modules or callers made it, by canonical names.

    Attributes:
        values: Name to entry, in order.
        metadata: ``_metadata``: canonical prefix of a module, without its last dot, to the module's
            metadata; None if the state dict has none.
    """

    values: Mapping[str, Any]
    metadata: Mapping[str, Mapping[str, Any]] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelState:
    """This rank's part of what is stored of a model, by canonical names.

    Attributes:
        names: All entries, in the order of the state dict.
        metadata: As of ``Entries``.
        values: Entries that are neither a parameter nor a buffer of the model: tensors and others.
    """

    names: tuple[str, ...]
    metadata: Mapping[str, Mapping[str, Any]]
    values: Mapping[str, Any] = field(default_factory=dict)


def own_entries(model: nn.Module) -> Entries | None:
    """Return the model's own state dict if a module customises it, else None.

    Its entries are parameters and buffers themselves, not detached aliases; nothing is gathered.
    """
    if not has_own_state(model):
        return None
    bare = bare_module(model)
    canonical = {place.path: place.prefix for place in places(bare)}
    with _without_gathering(bare), torch.no_grad():
        state_dict = bare.state_dict(keep_vars=True)
    _check_names(bare, state_dict)
    metadata = {
        canonical.get(f"{path}." if path else "", f"{path}.").removesuffix("."): dict(of_module)
        for path, of_module in getattr(state_dict, "_metadata", {}).items()
    }
    values = {_renamed(name, canonical): value for name, value in state_dict.items()}
    return Entries(values, metadata)


def given_entries(given: Mapping[str, Any]) -> Entries:
    """Return a caller's state dict by canonical names."""
    metadata = getattr(given, "_metadata", None)
    if metadata is not None:
        metadata = {without_wrappers(prefix): dict(one) for prefix, one in metadata.items()}
    return Entries({without_wrappers(name): value for name, value in given.items()}, metadata)


def model_state(model: nn.Module, layout: ModelLayout, entries: Entries | None) -> ModelState:
    """Return what is to be stored of ``model``.

    Args:
        model: The model, wrapped or not.
        layout: Its layout.
        entries: From ``own_entries``, or from ``given_entries`` to store those instead.
    """
    if entries is None:
        return ModelState(names=layout.order, metadata=own_versions(model))
    values = {
        name: value
        for name, value in entries.values.items()
        if not _is_flat(value) and not _is_own(value, owned_by(layout, name))
    }
    metadata = own_versions(model) if entries.metadata is None else entries.metadata
    return ModelState(names=_ordered(entries.values, layout), metadata=metadata, values=values)


def local_state_dict(model: nn.Module, layout: ModelLayout) -> OrderedDict[str, Any]:
    """Return the model's state dict with what this rank holds; nothing is gathered.

    Tensors alias the model: DTensors are DTensors, what FSDP1 has flattened is the local range.
    It has the attribute ``_metadata``, as torch's own.
    """
    state = model_state(model, layout, own_entries(model))
    entries: OrderedDict[str, Any] = OrderedDict()
    for name in state.names:
        own = owned_by(layout, name)
        if name in state.values or own is None:
            entries[name] = state.values[name]
        else:
            entries[name] = own.owner.detach() if isinstance(own.owner, DTensor) else own.local
    vars(entries)["_metadata"] = OrderedDict(state.metadata)
    return entries


def owned_by(layout: ModelLayout, name: str) -> LocalTensor | None:
    """Return the parameter or buffer of this name, which may be its second one (tied)."""
    return layout.tensors.get(layout.tied.get(name, name))


def has_own_state(model: nn.Module) -> bool:
    """Whether a module contributes to ``state_dict()`` more than its parameters and buffers.

    Called at every save, so it is cheap: each class is inspected once, each module for its own
    attributes and hooks.
    """
    plain: set[type] = set()
    modules, seen = [model], {id(model)}
    for module in modules:  # grows on the way
        cls, held = type(module), vars(module)
        if cls not in plain:
            if _class_has_own_state(cls) or isinstance(module, torch.jit.ScriptModule):
                return True
            plain.add(cls)
        if "state_dict" in held or "_save_to_state_dict" in held or has_odd_tensors(module):
            return True
        hooks = (*held["_state_dict_hooks"].values(), *held["_state_dict_pre_hooks"].values())
        if hooks and not all(map(is_of_wrapper, hooks)):
            return True
        for child in held["_modules"].values():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                modules.append(child)
    return False


def _class_has_own_state(cls: Any) -> bool:
    base: Any = nn.Module
    return (
        cls.state_dict is not base.state_dict
        or cls._save_to_state_dict is not base._save_to_state_dict  # noqa: SLF001 - the protocol
        or cls.get_extra_state is not base.get_extra_state
    )


def has_odd_tensors(module: nn.Module) -> bool:
    """Whether a parameter or buffer of the module itself is stored as a value, see ``is_odd``."""
    for held in (module._parameters, module._buffers):  # noqa: SLF001 - the protocol
        for tensor in held.values():
            if tensor is not None and is_odd(tensor):
                return True
    return False


def is_of_wrapper(hook: Any) -> bool:
    """Whether a hook belongs to a wrapper of torch (FSDP, checkpointing); we skip such hooks.

    They change names and gather shards, which canonical names and layouts replace.
    """
    hook = getattr(hook, "hook", hook)  # load hooks are wrapped in an object
    while isinstance(hook, functools.partial):
        hook = hook.func
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed.")


def holds_own_part(model: nn.Module, *, equal: bool) -> bool:
    """Whether this rank must describe a part of the model that rank 0 may not have.

    Rank 0 stores entries that are not tensors. A pipeline stage on other ranks has modules that
    rank 0 does not have: there, the first rank of each device mesh stores them, and so does every
    rank with plain parameters that are not known to be equal on all ranks.

    Args:
        model: The model, wrapped or not.
        equal: Whether the caller keeps plain parameters equal on all ranks.
    """
    rank, world_size = current_rank()
    return rank != 0 and any(_parts(model, world_size, equal=equal))


def has_whole_model(model: nn.Module, *, equal: bool) -> bool:
    """Whether every rank has a part in all of the model: names that rank 0 lacks are none of it.

    Args:
        model: The model, wrapped or not.
        equal: Whether the caller keeps plain parameters equal on all ranks.
    """
    _, world_size = current_rank()
    return world_size == 1 or not list(_parts(model, world_size, equal=equal))


def _parts(model: nn.Module, world_size: int, *, equal: bool) -> Iterator[bool]:
    """Yield for what need not be on all ranks whether this rank is the first to have it."""
    held = list(places(model))
    for place in held:
        if isinstance(place.module, FullyShardedDataParallel):
            group = place.module.process_group
            if dist.get_world_size(group) != world_size:
                yield dist.get_rank(group) == 0
        for parameter in place.module.parameters(recurse=False):
            if isinstance(parameter, DTensor):
                mesh = parameter.device_mesh
                if mesh.size() != world_size:
                    coordinate = mesh.get_coordinate()
                    yield coordinate is not None and not any(coordinate)
            elif not (equal or place.equal or place.in_fsdp):
                yield True
    if not equal and not any(True for _ in model.parameters()):
        yield True  # nothing tells of its ranks


def own_versions(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Return the ``_metadata`` of a model whose modules add nothing to it."""
    # A wrapper comes before the module in it, which has the same prefix and replaces its entry.
    return {
        place.prefix.removesuffix("."): {"version": place.module._version}  # noqa: SLF001 - as torch notes it
        for place in places(model)
    }


def _check_names(model: nn.Module, entries: Any) -> None:
    """Raise an error if a module's state dict is not a dict with strings as keys."""
    wrong = None if isinstance(entries, Mapping) else f"returned a {type(entries).__name__}"
    if wrong is None:
        keys = ", ".join(repr(name)[:80] for name in entries if not isinstance(name, str))
        wrong = keys and f"has the keys {keys}"
    if wrong:
        raise InvalidShardingError(
            f"{type(model).__name__}.state_dict() must return a dict whose keys are strings; it "
            f"{wrong}."
        )


def deepest_prefix(name: str, prefixes: Container[str]) -> str:
    """Return the longest prefix of a name, up to a dot, that is in ``prefixes``; else ``""``."""
    end = name.rfind(".") + 1
    while end and name[:end] not in prefixes:
        end = name.rfind(".", 0, end - 1) + 1
    return name[:end]


def _renamed(name: str, canonical: Mapping[str, str]) -> str:
    """Return the canonical name of an entry, by the deepest module whose path it begins with."""
    path = deepest_prefix(name, canonical)
    return canonical.get(path, path) + name.removeprefix(path)


@contextlib.contextmanager
def _without_gathering(model: nn.Module) -> Iterator[None]:
    """Prevent FSDP1 from gathering its parameters when a state dict is made.

    Its hooks are removed from the units inside the context and restored afterwards. A unit's own
    entries are then its local shards, which the layout describes.
    """
    removed: list[tuple[dict[int, Any], dict[int, Any]]] = []
    try:
        for module in model.modules():
            if isinstance(module, FullyShardedDataParallel):
                for name in ("_state_dict_hooks", "_state_dict_pre_hooks"):
                    hooks: dict[int, Any] = vars(module)[name]
                    removed.append((hooks, dict(hooks)))
                    for key in [key for key, hook in hooks.items() if is_of_wrapper(hook)]:
                        del hooks[key]
        yield
    finally:
        for hooks, before in removed:
            hooks.clear()
            hooks.update(before)


def _is_own(value: Any, own: LocalTensor | None) -> bool:
    if own is None or not isinstance(value, torch.Tensor):
        return False
    if value is own.owner or value is own.local:
        return True
    if type(value) not in {torch.Tensor, nn.Parameter} and not isinstance(value, DTensor):
        return False
    local = local_of(value)
    return (
        local.shape == own.local.shape
        and local.dtype == own.local.dtype
        and local.stride() == own.local.stride()
        and local.device == own.local.device
        and local.layout == own.local.layout
        and not local.is_meta
        and local.data_ptr() == own.local.data_ptr()
        and local.is_neg() == own.local.is_neg()
        and local.is_conj() == own.local.is_conj()
    )


def _is_flat(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and is_flat_parameter(value)


def _ordered(entries: Mapping[str, Any], layout: ModelLayout) -> tuple[str, ...]:
    """Return all names in order; parameters that FSDP1 has flattened keep their position."""
    if not any(_is_flat(value) for value in entries.values()):
        return tuple(entries)
    known, before, others = set(layout.order), "", dict[str, list[str]]()
    for name, value in entries.items():
        if name in known:
            before = name
        elif not _is_flat(value):
            others.setdefault(before, []).append(name)
    ordered = others.get("", [])
    for name in layout.order:
        own = owned_by(layout, name)
        if name in entries or (own is not None and _is_flat(own.owner)):
            ordered.append(name)
        ordered += others.get(name, ())
    return tuple(ordered)
