"""Descriptions of live models and optimizers, made again only if something has changed.

Here: ``LiveDescriptions``, and the comparison that shows whether something has changed. Not here:
how a description is made (``derive``), what else is saved (``training_state``). Local, on every
rank.

Describing a tensor costs about as much as copying a megabyte. From save to save the same tensor
objects hold the values, so that their description stays valid. This is never assumed, but compared
for each module and each tensor (identity, address, shape, strides, dtype).
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from dist_ckpt._sharding.split import SaveParts, split_for_save
from dist_ckpt._sharding.table import LocalShards, local_shards
from dist_ckpt.derive import ModelLayout, model_layout, sharded_optimizer_state
from dist_ckpt.derive.ddp import current_rank
from dist_ckpt.derive.document import model_document
from dist_ckpt.derive.model import is_odd
from dist_ckpt.derive.optim_form import ORDER
from dist_ckpt.derive.protocol import (
    Entries,
    given_entries,
    has_whole_model,
    holds_own_part,
    model_state,
    own_entries,
)
from dist_ckpt.derive.slots import unwrap_optimizer
from dist_ckpt.derive.state_spec import find_state_spec
from dist_ckpt.derive.steady import steady_keys
from dist_ckpt.derive.values import is_plain_tensor, stored_state
from dist_ckpt.types import ShardedStateDict, StateDict

__all__ = ["Live", "LiveDescriptions", "LiveObjects"]

_FAMILIAR = {torch.Tensor, nn.Parameter, type(None)}
_Signature: TypeAlias = "list[Any]"


class _Unfamiliar(Exception):  # noqa: N818 - a reason to describe anew, no error
    """Something that cannot be compared with the last save."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveObjects:
    """What is to be described; see ``training_state.TrainingState``."""

    models: Sequence[nn.Module]
    optimizers: Sequence[Any]
    replicas: Literal["equal", "differ"] | None
    model_values: Mapping[int, Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """A description.

    Attributes:
        parts: Models' tensors and optimizers' states, taken apart; ``common`` has the rest of the
            states, without the optimizers' groups.
        shards: The tensors as boxes with data, in their order.
        rests: For each optimizer how to get what else is in its state dict.
        layouts: Of each model.
        documents: Of each model, see ``derive.document``.
        steady: Keys of what only an optimizer's step changes.
        memo: What others have made of the shards, and may take again; it goes when this goes.
    """

    parts: SaveParts
    shards: LocalShards
    rests: tuple[_Rest, ...]
    layouts: tuple[ModelLayout, ...]
    documents: tuple[StateDict, ...]
    steady: frozenset[str]
    memo: dict[int, Any] = field(default_factory=dict, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class _Rest:
    """The names of an optimizer's parameters by group, and entries that change only with them."""

    names: tuple[tuple[str, ...], ...]
    lasting: StateDict

    def of(self, optimizer: torch.optim.Optimizer) -> StateDict:
        """Return what the optimizer's own state dict has of its groups now, with names."""
        groups = [
            {**{key: value for key, value in group.items() if key != "params"}, "params": [*names]}
            for group, names in zip(optimizer.param_groups, self.names, strict=True)
        ]
        return {"param_groups": groups, **self.lasting}


class LiveDescriptions:
    """Describes live objects, and remembers the last description while they live."""

    def __init__(self) -> None:
        """Start without a description."""
        self._signature: _Signature = []
        self._live: Live | None = None
        self._rest: list[weakref.ref[Any]] = []

    def describe(self, objects: LiveObjects) -> tuple[Live, list[StateDict], list[StateDict]]:
        """Return the description, and the present values that are stored beside it.

        Returns:
            The description; for each optimizer the part of its state dict that is not state of its
            parameters; for each model its document.

        Raises:
            InvalidShardingError: Something cannot be described.
        """
        entries = [
            own_entries(model)
            if objects.model_values.get(i) is None
            else given_entries(objects.model_values[i])
            for i, model in enumerate(objects.models)
        ]
        try:
            signature = _signature(objects, entries)
        except _Unfamiliar:
            self.forget()
            return _described(objects, entries)
        if self._live is not None and signature == self._signature:
            rests = zip(self._live.rests, objects.optimizers, strict=True)
            documents = [
                document if of_model is None else _stored(objects, i, layout, of_model)[1]
                for i, (document, layout, of_model) in enumerate(
                    zip(self._live.documents, self._live.layouts, entries, strict=True)
                )
            ]
            optimizers = [rest.of(unwrap_optimizer(optimizer)) for rest, optimizer in rests]
            return self._live, optimizers, documents
        self.forget()
        live, optimizers, documents = _described(objects, entries)
        if not live.parts.objects:  # values of objects change without a sign
            self._signature, self._live = signature, live
            # Weak: a model or an optimizer that the caller drops must be freed.
            held = (*objects.models, *map(unwrap_optimizer, objects.optimizers))
            self._rest = [weakref.ref(one, lambda _: self.forget()) for one in held]
        return live, optimizers, documents

    def forget(self) -> None:
        """Drop the description, and with it the references to the tensors."""
        self._signature, self._live, self._rest = [], None, []


def _described(
    objects: LiveObjects, entries: Sequence[Entries | None]
) -> tuple[Live, list[StateDict], list[StateDict]]:
    layouts = [model_layout(model, replicas=objects.replicas) for model in objects.models]
    stored = [
        _stored(objects, i, layout, of_model)
        for i, (layout, of_model) in enumerate(zip(layouts, entries, strict=True))
    ]
    models = {str(i): tensors for i, (tensors, _) in enumerate(stored)}
    trees = [
        sharded_optimizer_state(optimizer, layouts, prefix=f"optimizers.{j}.")
        for j, optimizer in enumerate(objects.optimizers)
    ]
    states = {str(j): {"state": tree["state"]} for j, tree in enumerate(trees)}
    parts = split_for_save({"models": models, "optimizers": states})
    own = {i: one for i, one in enumerate(layouts) if objects.model_values.get(i) is None}
    documents = [document for _, document in stored]
    live = Live(
        parts=parts,
        shards=local_shards(parts.tensors),
        rests=tuple(
            _Rest(
                tuple(tuple(group["params"]) for group in tree["param_groups"]),
                {ORDER: tree[ORDER]} if ORDER in tree else {},
            )
            for tree in trees
        ),
        layouts=tuple(layouts),
        documents=tuple(documents),
        steady=steady_keys(own, objects.optimizers, trees),
    )
    rests = [{key: value for key, value in tree.items() if key != "state"} for tree in trees]
    return live, rests, documents


def _stored(
    objects: LiveObjects, i: int, layout: ModelLayout, entries: Entries | None
) -> tuple[ShardedStateDict, StateDict]:
    """Return the tensors of model ``i``, and its document."""
    model = objects.models[i]
    state = model_state(model, layout, entries)
    rank, _ = current_rank()
    equal = objects.replicas == "equal"
    stores_values = rank == 0 or holds_own_part(model, equal=equal)
    stored = stored_state(state, layout, prefix=f"models.{i}.", stores_values=stores_values)
    if not stores_values:
        return stored.tensors, {}
    is_whole = has_whole_model(model, equal=equal)
    return stored.tensors, model_document(state, stored, is_whole=is_whole)


def _signature(objects: LiveObjects, entries: Sequence[Entries | None]) -> _Signature:
    """Return all that a description depends on, cheaply: this is done at every save.

    Column by column, so that what is done for each tensor is done by the interpreter's own loops.

    Raises:
        _Unfamiliar: It depends on something else, too.
    """
    found: _Signature = [objects.replicas, tuple(objects.model_values)]
    tensors: list[Any] = []
    for model in objects.models:
        found.append("model")
        _add_model(found, tensors, model)
    if any(of_model is not None for of_model in entries):
        tensors = [None if tensor is None or is_odd(tensor) else tensor for tensor in tensors]
    for of_model in entries:
        if of_model is not None:
            found += ("entries", *of_model.values)
            tensors += map(_as_tensor, of_model.values.values())
    for optimizer in objects.optimizers:
        found.append("optimizer")
        _add_optimizer(found, tensors, unwrap_optimizer(optimizer))
    _add_tensors(found, tensors)
    return found


def _add_model(found: _Signature, tensors: list[Any], model: nn.Module) -> None:
    """Add the modules' dicts themselves: what names the tensors walks the whole tree."""
    modules, seen = [model], {id(model)}
    for module in modules:  # grows on the way
        if isinstance(module, FullyShardedDataParallel | torch.jit.ScriptModule):
            # FSDP1's flat parameters change their shape as it runs; TorchScript hides its dicts.
            raise _Unfamiliar
        held = module.__dict__
        parameters, buffers, children = held["_parameters"], held["_buffers"], held["_modules"]
        # Which child stands where: one that stands at several places is looked at once only.
        found += (id(module), type(module), len(children), *children, len(parameters))
        if children:
            found += map(id, children.values())
            for child in children.values():
                if child is not None and id(child) not in seen:
                    seen.add(id(child))
                    modules.append(child)
        if parameters:
            found += parameters
            tensors += parameters.values()
        if buffers:
            found += ("buffers", *buffers, frozenset(held["_non_persistent_buffers_set"]))
            tensors += buffers.values()


def _as_tensor(value: Any) -> torch.Tensor | None:
    """Return an entry that is stored as a tensor; None for others, which each save encodes."""
    return value if is_plain_tensor(value) else None


def _add_optimizer(found: _Signature, tensors: list[Any], optimizer: Any) -> None:
    if type(optimizer).state_dict is not torch.optim.Optimizer.state_dict:
        raise _Unfamiliar
    hooks = optimizer._optimizer_state_dict_pre_hooks, optimizer._optimizer_state_dict_post_hooks  # noqa: SLF001 - no other way to see them
    if any(hooks):
        raise _Unfamiliar
    found += (id(optimizer), find_state_spec(optimizer))
    parameters: list[int] = []
    for group in optimizer.param_groups:
        found += ("group", len(group["params"]))
        parameters += map(id, group["params"])
    found += parameters
    holders = list(map(id, optimizer.state))
    if not set(parameters).issuperset(holders):
        raise _Unfamiliar  # state of something that is no parameter
    found.append("states")
    found += holders
    for state in optimizer.state.values():
        found.append(len(state))
        found += state
        tensors += state.values()


def _add_tensors(found: _Signature, tensors: list[Any]) -> None:
    """Add identity, address, shape, strides and dtype of each."""
    found += map(id, tensors)
    kinds = list(map(type, tensors))
    strange = set(kinds) - _FAMILIAR
    if strange:
        if not all(issubclass(kind, DTensor) for kind in strange):
            # Also a number in an optimizer's state, which each step changes, or a list.
            raise _Unfamiliar
        # `to_local` makes a new object each time.
        sharded = [one for one, kind in zip(tensors, kinds, strict=True) if kind in strange]
        found += [one._spec for one in sharded]  # noqa: SLF001 - see above
        tensors = [
            one._local_tensor if kind in strange else one  # noqa: SLF001 - see above
            for one, kind in zip(tensors, kinds, strict=True)
        ]
        found += map(id, tensors)
        if set(map(type, tensors)) - _FAMILIAR:
            raise _Unfamiliar
    if type(None) in kinds:
        tensors = [one for one in tensors if one is not None]
    dtypes = [one.dtype for one in tensors]
    found += dtypes
    found += [one.data_ptr() for one in tensors]
    found += [one.shape for one in tensors]
    found += [one.stride() for one in tensors]
    found += [one.is_neg() for one in tensors]
    if any(dtype.is_complex for dtype in set(dtypes)):
        found += [one.is_conj() for one in tensors]
