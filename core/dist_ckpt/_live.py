"""Live models and optimizers, described; again only if something about them is new.

Here: ``LiveDescriptions``, and by what it is known that nothing is new. Not here: how a description
is made (``derive``), what else is saved (``training_state``). Local, on every rank.

To describe a tensor costs about as much as to copy a megabyte. From save to save the same tensor
objects hold the values, so what was said of them still holds: this is looked at tensor by tensor
(identity, address, shape, strides, dtype), module by module, never assumed.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from dist_ckpt._planning.describe import LocalShard, local_shards
from dist_ckpt._state import SaveParts, split_for_save
from dist_ckpt.derive import model_layout, sharded_model_state, sharded_optimizer_state
from dist_ckpt.derive.slots import unwrap_optimizer
from dist_ckpt.derive.state_spec import find_state_spec
from dist_ckpt.derive.steady import steady_keys
from dist_ckpt.derive.values import sharded_values
from dist_ckpt.types import ShardedStateDict, StateDict

__all__ = ["Live", "LiveDescriptions", "LiveObjects"]

_PLAIN = (torch.Tensor, nn.Parameter)
_Signature: TypeAlias = "list[Hashable]"


class _Unfamiliar(Exception):  # noqa: N818 - a reason to describe anew, no error
    """Something of which it cannot be seen whether it is as before."""


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
        tied: For each model, other name to first name.
        steady: Keys of what only an optimizer's step changes.
        memo: What others have made of the shards, and may take again; it goes when this goes.
    """

    parts: SaveParts
    shards: tuple[LocalShard, ...]
    rests: tuple[_Rest, ...]
    tied: tuple[Mapping[str, str], ...]
    steady: frozenset[str]
    memo: dict[int, Any] = field(default_factory=dict, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class _Rest:
    """The names of an optimizer's parameters, by group."""

    names: tuple[tuple[str, ...], ...]

    def of(self, optimizer: torch.optim.Optimizer) -> StateDict:
        """Return what the optimizer's own state dict has of its groups now, with names."""
        groups = [
            {**{key: value for key, value in group.items() if key != "params"}, "params": [*names]}
            for group, names in zip(optimizer.param_groups, self.names, strict=True)
        ]
        return {"param_groups": groups}


class LiveDescriptions:
    """Describes live objects, and remembers the last description while they live."""

    def __init__(self) -> None:
        """Remember nothing yet."""
        self._signature: _Signature = []
        self._live: Live | None = None
        self._rest: list[weakref.ref[Any]] = []

    def describe(self, objects: LiveObjects) -> tuple[Live, list[StateDict]]:
        """Return the description, and for each optimizer what is not of its parameters' states.

        Raises:
            InvalidShardingError: Something cannot be described.
        """
        try:
            signature = _signature(objects)
        except _Unfamiliar:
            self.forget()
            return _described(objects)
        if self._live is not None and signature == self._signature:
            rests = zip(self._live.rests, objects.optimizers, strict=True)
            return self._live, [rest.of(unwrap_optimizer(optimizer)) for rest, optimizer in rests]
        self.forget()
        live, rests_now = _described(objects)
        if not live.parts.objects:  # values of objects change without a sign
            self._signature, self._live = signature, live
            # Who lets go of a model or an optimizer gets its memory back.
            held = (*objects.models, *map(unwrap_optimizer, objects.optimizers))
            self._rest = [weakref.ref(one, lambda _: self.forget()) for one in held]
        return live, rests_now

    def forget(self) -> None:
        """Remember nothing; the memory of the tensors is not held any more."""
        self._signature, self._live, self._rest = [], None, []


def _described(objects: LiveObjects) -> tuple[Live, list[StateDict]]:
    layouts = [model_layout(model, replicas=objects.replicas) for model in objects.models]
    models: ShardedStateDict = {}
    for i, layout in enumerate(layouts):
        values, prefix = objects.model_values.get(i), f"models.{i}."
        models[str(i)] = (
            sharded_model_state(layout, prefix=prefix)
            if values is None
            else sharded_values(values, layout, prefix=prefix)
        )
    trees = [
        sharded_optimizer_state(optimizer, layouts, prefix=f"optimizers.{j}.")
        for j, optimizer in enumerate(objects.optimizers)
    ]
    states = {str(j): {"state": tree["state"]} for j, tree in enumerate(trees)}
    parts = split_for_save({"models": models, "optimizers": states})
    own = {i: one for i, one in enumerate(layouts) if objects.model_values.get(i) is None}
    live = Live(
        parts=parts,
        shards=tuple(local_shards(parts.tensors)),
        rests=tuple(
            _Rest(tuple(tuple(group["params"]) for group in tree["param_groups"])) for tree in trees
        ),
        tied=tuple(dict(layout.tied) for layout in layouts),
        steady=steady_keys(own, objects.optimizers, trees),
    )
    return live, [{key: value for key, value in tree.items() if key != "state"} for tree in trees]


def _signature(objects: LiveObjects) -> _Signature:
    """Return all that a description depends on, cheaply: this is done at every save.

    Raises:
        _Unfamiliar: It depends on something else, too.
    """
    if any(values is not None for values in objects.model_values.values()):
        raise _Unfamiliar
    found: _Signature = [objects.replicas]
    for model in objects.models:
        found.append("model")
        for module in model.modules():
            _add_module(found, module)
    for optimizer in objects.optimizers:
        found.append("optimizer")
        _add_optimizer(found, unwrap_optimizer(optimizer))
    return found


def _add_module(found: _Signature, module: nn.Module) -> None:
    if isinstance(module, FullyShardedDataParallel):
        raise _Unfamiliar  # its flat parameters change their shape as it runs
    # The dicts themselves: what names the tensors walks the whole tree.
    parameters, buffers = module._parameters, module._buffers  # noqa: SLF001 - see above
    children = module._modules  # noqa: SLF001 - see above
    names = (*children, None, *parameters, None, *buffers)
    # Which child stands where: one that stands at several places is looked at once only.
    found.append((id(module), id(type(module)), *names, *map(id, children.values())))
    for parameter in parameters.values():
        found.append(None if parameter is None else _of_tensor(parameter))
    if buffers:
        found.append(tuple(module._non_persistent_buffers_set))  # noqa: SLF001 - see above
        for buffer in buffers.values():
            found.append(None if buffer is None else _of_tensor(buffer))


def _add_optimizer(found: _Signature, optimizer: Any) -> None:
    if type(optimizer).state_dict is not torch.optim.Optimizer.state_dict:
        raise _Unfamiliar
    hooks = optimizer._optimizer_state_dict_pre_hooks, optimizer._optimizer_state_dict_post_hooks  # noqa: SLF001 - no other way to see them
    if any(hooks):
        raise _Unfamiliar
    found.append((id(optimizer), id(find_state_spec(optimizer))))
    seen, states = 0, optimizer.state
    for group in optimizer.param_groups:
        found.append("group")
        for parameter in group["params"]:
            state = states.get(parameter)
            found.append(id(parameter))
            if state is None:
                continue
            seen += 1
            found.append(tuple(state))
            for value in state.values():
                if not isinstance(value, torch.Tensor):
                    raise _Unfamiliar  # a number that each step changes, or a list
                found.append(_of_tensor(value))
    if seen != len(states):
        raise _Unfamiliar  # state of something that is no parameter


def _of_tensor(tensor: torch.Tensor) -> Hashable:
    local, spec = tensor, 0
    if type(tensor) not in _PLAIN:
        if not isinstance(tensor, DTensor):
            raise _Unfamiliar
        local, spec = tensor._local_tensor, id(tensor._spec)  # noqa: SLF001 - `to_local` makes a new object each time
        if type(local) not in _PLAIN:
            raise _Unfamiliar
    return (
        id(tensor), spec, local.data_ptr(), local.dtype, local.shape, local.stride(),
        local.is_conj(), local.is_neg(),
    )  # fmt: skip
