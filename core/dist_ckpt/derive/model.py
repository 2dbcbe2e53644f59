"""What this rank holds of a model, by canonical names.

Here: the walk over a module tree, canonical names, tied tensors. Not here: the layouts of single
tensors (``derive.dtensor``, ``derive.fsdp``, ``derive.ddp``) and optimizers (``derive.optim``).
Called by the training-state code and by users, on every rank, locally: nothing communicates.

Canonical names are those of the model before any wrapper: DDP, FSDP, ``torch.compile`` and
activation checkpointing leave no trace in them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from dist_ckpt._codec.subclasses import is_wrapper
from dist_ckpt.derive.ddp import (
    current_rank,
    hides_child,
    ignored_names,
    keeps_equal,
    replicated_layout,
)
from dist_ckpt.derive.dtensor import dtensor_layout, local_of
from dist_ckpt.derive.fsdp import (
    FlatTable,
    ensure_sharded,
    is_flat_parameter,
    read_flat_parameters,
)
from dist_ckpt.derive.layout import FlatPiece, LocalTensor, ModelLayout, TensorLayout
from dist_ckpt.errors import InvalidShardingError
from dist_ckpt.types import ShardedStateDict, Writer

__all__ = [
    "Place",
    "Replicas",
    "bare_module",
    "is_hidden",
    "is_odd",
    "model_layout",
    "places",
    "sharded_model_state",
    "without_wrappers",
]

Replicas = Literal["equal", "differ"]
Kind = Literal["parameter", "buffer"]

_WRAPPER_NAMES = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})


def model_layout(model: nn.Module, *, replicas: Replicas | None = None) -> ModelLayout:
    """Find what this rank holds of each parameter and persistent buffer of ``model``.

    FSDP units that still hold gathered parameters are brought back to their sharded form.

    Args:
        model: Any module: plain, or wrapped by DDP, FSDP, ``torch.compile``, tensor parallelism.
        replicas: Whether plain parameters are equal on all ranks: "equal" where something keeps
            them so that the module does not show (the module inside of DDP), "differ" to trust
            nothing, None to trust DDP wrappers in the model only.

    Raises:
        InvalidShardingError: Tensors without storage or of a kind that cannot be stored; all of
            them are named.
    """
    ensure_sharded(model)
    walk = _Walk(flat=read_flat_parameters(model), replicas=replicas, rank=current_rank()[0])
    for place in places(model, equal=replicas == "equal"):
        walk.visit(place)
    if walk.problems:
        raise InvalidShardingError(
            f"{len(walk.problems)} tensor(s) cannot be described: {'; '.join(walk.problems)}.",
            hint="materialise the model (to_empty(), a first forward pass) before it is saved or "
            "loaded.",
        )
    return ModelLayout(
        tensors=walk.tensors,
        order=tuple(walk.taken),
        tied=walk.tied,
        names=walk.names,
        pieces={owner: tuple(pieces) for owner, pieces in walk.pieces.items()},
    )


def sharded_model_state(layout: ModelLayout, *, prefix: str) -> ShardedStateDict:
    """Return ``{name: ShardedTensor or list}`` with keys ``prefix + name``.

    The data of each ShardedTensor aliases the module, so that loading into it fills the module.
    """
    return {
        name: item.layout.shard(f"{prefix}{name}", item.local)
        for name, item in layout.tensors.items()
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A module in the tree, and what the wrappers above it guarantee.

    Attributes:
        module: The module.
        prefix: Its canonical prefix.
        path: Its prefix with the names of wrappers, as in torch's own state dicts.
        equal: Whether DDP keeps its parameters equal on all ranks.
        in_fsdp: Whether FSDP1 shards its parameters.
        ignored: Canonical names that DDP ignores.
    """

    module: nn.Module
    prefix: str = ""
    path: str = ""
    equal: bool = False
    in_fsdp: bool = False
    ignored: frozenset[str] = frozenset()


def places(model: nn.Module, *, equal: bool = False) -> Iterator[Place]:
    """Yield all modules in the order of ``state_dict``, a shared module at each of its places.

    A wrapper comes before the module that it wraps, with the same prefix.
    """
    return _places(model, Place(module=model, equal=equal))


def bare_module(model: nn.Module) -> nn.Module:
    """Return the module inside all wrappers around the whole model."""
    while inner := next((c for n, c in model.named_children() if is_hidden(model, n)), None):
        model = inner
    return model


def is_odd(tensor: torch.Tensor) -> bool:
    """Whether a tensor is not plain dense memory: quantised, sparse, nested or of a wrapper class.

    Such a tensor cannot be cut into boxes: it is stored as a value.
    """
    if type(tensor) in {torch.Tensor, nn.Parameter} or isinstance(tensor, DTensor):
        return tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested
    return is_wrapper(tensor) or tensor.layout != torch.strided


def without_wrappers(name: str) -> str:
    """Return a name of torch's state dicts without the names of wrappers in it."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPER_NAMES)


def _places(model: nn.Module, place: Place) -> Iterator[Place]:
    if keeps_equal(model):
        names = frozenset(f"{place.prefix}{name}" for name in ignored_names(model))
        place = replace(place, equal=True, ignored=place.ignored | names)
    if isinstance(model, FullyShardedDataParallel):
        place = replace(place, in_fsdp=True)
    yield place
    for name, child in model._modules.items():  # noqa: SLF001 - named_children() drops repetitions
        if child is None:
            continue
        prefix = place.prefix if is_hidden(model, name) else f"{place.prefix}{name}."
        path = f"{place.path}{name}."
        yield from _places(child, replace(place, module=child, prefix=prefix, path=path))


def is_hidden(module: nn.Module, name: str) -> bool:
    """Whether the child of this name has the canonical name of ``module`` itself."""
    if name in _WRAPPER_NAMES:
        return len(module._modules) == 1  # noqa: SLF001 - a user's module may have such a child, too
    return name == "module" and hides_child(module)


@dataclass(slots=True, kw_only=True)
class _Walk:
    """What the walk has found so far."""

    flat: FlatTable
    replicas: Replicas | None
    rank: int
    tensors: dict[str, LocalTensor] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)
    pieces: dict[int, list[FlatPiece]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    first_names: dict[object, str] = field(default_factory=dict)
    taken: dict[str, object] = field(default_factory=dict)

    def visit(self, place: Place) -> None:
        """Take the parameters and persistent buffers of one module."""
        module = place.module
        in_flat = set()
        for short in self.flat.names_in(module):
            in_flat.add(short)
            self._add_flat(f"{place.prefix}{short}", (id(module), short))
        for short, parameter in module._parameters.items():  # noqa: SLF001 - keeps repetitions
            if parameter is not None and short not in in_flat and not is_flat_parameter(parameter):
                self._add_plain(f"{place.prefix}{short}", parameter, place=place, kind="parameter")
        for short, buffer in module._buffers.items():  # noqa: SLF001
            if buffer is not None and short not in module._non_persistent_buffers_set:  # noqa: SLF001
                self._add_plain(f"{place.prefix}{short}", buffer, place=place, kind="buffer")

    def _add_flat(self, name: str, at: tuple[int, str]) -> None:
        at = self.flat.shared.get(at, at)
        if not self._is_new(name, at):
            return
        entry = self.flat.entries[at]
        if not self._is_storable(name, entry.local):
            return
        self.tensors[name] = LocalTensor(
            local=entry.local, layout=entry.layout, owner=entry.owner, kind="parameter"
        )
        if entry.is_flat:
            piece = FlatPiece(
                name=name, offset=entry.offset, numel=entry.local.numel(), layout=entry.layout
            )
            self.pieces.setdefault(id(entry.owner), []).append(piece)
        else:
            self.names[id(entry.owner)] = name

    def _add_plain(self, name: str, tensor: torch.Tensor, *, place: Place, kind: Kind) -> None:
        if not self._is_new(name, id(tensor)) or not self._is_storable(name, tensor):
            return
        if is_odd(tensor):
            return
        equal = place.equal and self.replicas != "differ" and name not in place.ignored
        layout = self._layout(name, tensor, equal=equal and kind == "parameter")
        if layout is None:
            return
        self.tensors[name] = LocalTensor(
            local=local_of(tensor), layout=layout, owner=tensor, kind=kind
        )
        if kind == "parameter":
            self.names[id(tensor)] = name

    def _is_new(self, name: str, identity: object) -> bool:
        if self.taken.setdefault(name, identity) != identity:
            self.problems.append(f"{name}: two different tensors have this name")
            return False
        first = self.first_names.setdefault(identity, name)
        if first != name:
            self.tied[name] = first
        return first == name

    def _layout(self, name: str, tensor: torch.Tensor, *, equal: bool) -> TensorLayout | None:
        if not isinstance(tensor, DTensor):
            writer: Writer = "any" if equal else "first"
            return replicated_layout(tuple(tensor.shape), writer=writer, rank=self.rank)
        try:
            return dtensor_layout(tensor, name=name, equal=equal)
        except InvalidShardingError as error:  # collected: all offenders are named at once
            self.problems.append(str(error))
            return None

    def _is_storable(self, name: str, tensor: torch.Tensor) -> bool:
        problem = ""
        if isinstance(tensor, (UninitializedBuffer, UninitializedParameter)):
            problem = "not initialised (lazy module)"
        elif tensor.device.type == "meta":
            problem = "on the meta device, without storage"
        if problem:
            self.problems.append(f"{name}: {problem}")
        return not problem
