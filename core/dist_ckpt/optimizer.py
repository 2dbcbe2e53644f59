"""Sharding of an optimizer's state, taken over from that of the parameters.

Here: the seeds' functions for a caller who described the model by hand. Not here: finding the
sharding by itself (``dist_ckpt.derive``). Called on any rank, locally.
"""

from __future__ import annotations

import logging
from copy import deepcopy
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

import torch

from dist_ckpt.dict_utils import nested_values
from dist_ckpt.errors import OptimizerShapeError
from dist_ckpt.mapping import LocalNonpersistentObject, ShardedTensor, ShardedTensorFactory

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from dist_ckpt.types import ShardedStateDict, StateDict

__all__ = [
    "KEEP_VARS_HINT",
    "get_optim_param_to_id_map",
    "get_param_id_to_sharded_param_map",
    "make_sharded_optimizer_tensor",
    "optim_state_to_sharding_state",
]

logger = logging.getLogger(__name__)

KEEP_VARS_HINT = "was the state dict taken with keep_vars=True?"
"""Megatron-Core's own optimizer imports this name, to say the same."""

ShardedParam: TypeAlias = ShardedTensor | ShardedTensorFactory


def get_optim_param_to_id_map(optim_params_iter: Iterable[torch.nn.Parameter]) -> dict[int, int]:
    """Map the ``id`` of each parameter to its first index in the optimizer."""
    index_of: dict[int, int] = {}
    for index, param in enumerate(optim_params_iter):
        index_of.setdefault(id(param), index)
    return index_of


def get_param_id_to_sharded_param_map(
    model_sharded_state_dict: ShardedStateDict, optim_params_iter: Iterable[torch.nn.Parameter]
) -> dict[int, ShardedParam]:
    """Map the index of each parameter in the optimizer to the model's sharded parameter.

    Args:
        model_sharded_state_dict: Any nesting of dicts and lists. The ``data`` of its leaves must be
            the parameters themselves, as ``state_dict(keep_vars=True)`` gives them. Of several
            leaves with the same parameter the last one counts.
        optim_params_iter: The parameters in the optimizer's order.
    """
    index_of = get_optim_param_to_id_map(optim_params_iter)
    sharded_params = {
        index_of[id(leaf.data)]: leaf
        for leaf in nested_values(model_sharded_state_dict)
        if isinstance(leaf, ShardedTensor | ShardedTensorFactory) and id(leaf.data) in index_of
    }
    if not sharded_params:
        logger.warning(
            "No sharded parameter of the model is a parameter of the optimizer; %s", KEEP_VARS_HINT
        )
    return sharded_params


def make_sharded_optimizer_tensor(
    model_param: ShardedParam, optim_param: torch.Tensor, prefix: str
) -> ShardedParam:
    """Describe a state tensor that is sharded like its parameter.

    Args:
        model_param: The sharded parameter.
        optim_param: The state tensor; of a DTensor, the local part is taken.
        prefix: Put before the parameter's key, with a dot between.

    Raises:
        OptimizerShapeError: If the state tensor does not have the shape of the parameter.
    """
    local = _local(optim_param)
    key = f"{prefix}.{model_param.key}"
    if isinstance(model_param, ShardedTensorFactory):
        return replace(model_param, key=key, data=local)
    expected = model_param.data_shape
    if tuple(local.shape) != expected:
        raise OptimizerShapeError(
            f"Optimizer shape ({tuple(local.shape)}) does not match model shape ({expected}) "
            f"for {key!r}.",
            hint="name states of another shape in exclude_keys.",
        )
    return replace(model_param, key=key, data=local, dtype=local.dtype)


def optim_state_to_sharding_state(
    optim_state_dict: StateDict,
    id_to_sharded_param_map: Mapping[int, ShardedParam],
    exclude_keys: tuple[str, ...] = (),
) -> None:
    """Turn an optimizer's state dict into a sharded one, in place; nothing changes on an error.

    A state tensor gets the key ``optimizer.state.{state key}.{parameter key}``. Numbers and 0-dim
    tensors such as Adam's ``step`` stay as they are, in the common part. ``params`` of the groups
    are not stored.

    Args:
        optim_state_dict: With ``state`` and ``param_groups``, as ``Optimizer.state_dict`` returns.
        id_to_sharded_param_map: See ``get_param_id_to_sharded_param_map``.
        exclude_keys: State keys to leave out.

    Raises:
        ValueError: If a parameter with state has no sharded parameter.
        OptimizerShapeError: If a state tensor has another shape than its parameter.
    """
    states = {
        param_id: {k: v for k, v in state.items() if k not in exclude_keys}
        for param_id, state in optim_state_dict["state"].items()
    }
    unknown = [i for i, state in states.items() if state and i not in id_to_sharded_param_map]
    if unknown:
        raise ValueError(
            f"Param id {', '.join(map(str, unknown))} does not match any model sharded param"
        )
    sharded_states = {
        param_id: {
            k: _sharded_or_common(id_to_sharded_param_map[param_id], k, v) for k, v in state.items()
        }
        for param_id, state in states.items()
    }
    groups = deepcopy(optim_state_dict["param_groups"])
    for group in groups:
        group["params"] = LocalNonpersistentObject(group["params"])
    optim_state_dict["state"] = sharded_states
    optim_state_dict["param_groups"] = groups


def _sharded_or_common(model_param: ShardedParam, state_key: str, value: object) -> object:
    if not isinstance(value, torch.Tensor):
        return value
    if value.ndim == 0 and not _is_scalar(model_param):
        return _local(value)
    return make_sharded_optimizer_tensor(model_param, value, f"optimizer.state.{state_key}")


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local part of a DTensor, any other tensor as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _is_scalar(model_param: ShardedParam) -> bool:
    if isinstance(model_param, ShardedTensor):
        return model_param.data_shape == ()
    return model_param.data is not None and model_param.data.ndim == 0
