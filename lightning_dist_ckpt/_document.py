"""Lightning's checkpoint dict, and where its parts go in a checkpoint of ours.

Here: taking the dict apart for a save, and making it again for a load, also from a checkpoint that
Lightning did not save. Not here: reading and writing. Pure functions, on every rank alike.

Common part: ``{"lightning": the dict without tensors of model and optimizers, "schedulers":
[state dicts], "step": optimizer steps}``. The last two are the same for all frameworks.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from dist_ckpt.derive import ModelLayout
    from dist_ckpt.types import StateDict

__all__ = [
    "DIRECT",
    "EXTRA",
    "FRAMEWORK",
    "ModelValues",
    "canonical_name",
    "common_of",
    "extra_state_of",
    "lightning_dict",
    "model_values",
    "named_as_in",
    "own_state_dict",
]

FRAMEWORK = "lightning"

DIRECT = "lightning_direct"
"""In the common part: a whole value that one process saved for itself."""

EXTRA = "state_dict_extra"
"""In the dict: what of ``state_dict`` is no tensor of the model (``get_extra_state``)."""

_WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
_APART = frozenset({"state_dict", "optimizer_states"})


def canonical_name(name: str) -> str:
    """Return a name of a state dict without the traces of wrappers."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelValues:
    """What is to be stored of ``checkpoint["state_dict"]``.

    Attributes:
        tensors: By canonical name; None if they are the model's own, all of them.
        extra: What is no tensor of the model.
    """

    tensors: dict[str, torch.Tensor] | None
    extra: dict[str, Any]


def model_values(state_dict: Mapping[str, Any], layout: ModelLayout) -> ModelValues:
    """Look whether a hook or a callback has put other tensors in place of the model's own."""
    named = {canonical_name(name): value for name, value in state_dict.items()}
    extra = {
        name: value
        for name, value in named.items()
        if name.rpartition(".")[2] == "_extra_state" or not isinstance(value, torch.Tensor)
    }
    tensors = {name: value.detach() for name, value in named.items() if name not in extra}
    own = {name: layout.tensors[name].local for name in layout.tensors}
    own |= {name: own[first] for name, first in layout.tied.items()}
    is_own = tensors.keys() == own.keys() and all(
        _is_same(value, own[name]) for name, value in tensors.items()
    )
    return ModelValues(tensors=None if is_own else tensors, extra=extra)


def _is_same(value: torch.Tensor, own: torch.Tensor) -> bool:
    local = value.to_local() if isinstance(value, DTensor) else value
    return (
        local.shape == own.shape
        and local.dtype == own.dtype
        and local.stride() == own.stride()
        and local.data_ptr() == own.data_ptr()
    )


def own_state_dict(model: nn.Module, layout: ModelLayout) -> dict[str, Any]:
    """Return a state dict of what this rank holds; nothing is gathered, tensors alias the model."""
    values: dict[str, Any] = {}
    for name, item in layout.tensors.items():
        values[name] = item.owner.detach() if isinstance(item.owner, DTensor) else item.local
    values |= {name: values[first] for name, first in layout.tied.items()}
    return values | extra_state_of(model)


def extra_state_of(model: nn.Module) -> dict[str, Any]:
    """Return what ``get_extra_state`` gives, by its name in a state dict."""
    base = nn.Module.get_extra_state
    prefixes = {
        canonical_name(f"{name}.") if name else "": module
        for name, module in model.named_modules()
        if type(module).get_extra_state is not base
    }
    return {f"{prefix}_extra_state": m.get_extra_state() for prefix, m in prefixes.items()}


def common_of(checkpoint: Mapping[str, Any], extra: Mapping[str, Any]) -> StateDict:
    """Return the common part for Lightning's dict."""
    rest = {key: value for key, value in checkpoint.items() if key not in _APART}
    if extra:
        rest[EXTRA] = dict(extra)
    return {
        "lightning": rest,
        "schedulers": list(checkpoint.get("lr_schedulers", ())),
        "step": int(checkpoint.get("global_step", 0)),
    }


def lightning_dict(common: Mapping[str, Any], *, version: str, fit_loop: StateDict) -> StateDict:
    """Return Lightning's dict, still without model and optimizers.

    Args:
        common: The common part of a checkpoint of any framework.
        version: Lightning's version, which the dict must name.
        fit_loop: State dict of a fit loop at its start, for checkpoints of other frameworks.
    """
    if "lightning" in common:
        return dict(common["lightning"])
    step = int(common.get("step", 0))
    made: StateDict = {
        "epoch": 0,
        "global_step": step,
        "pytorch-lightning_version": version,
        "loops": {"fit_loop": _at_step(fit_loop, step)},
        "callbacks": {},
    }
    if "schedulers" in common:
        made["lr_schedulers"] = list(common["schedulers"])
    return made


def _at_step(fit_loop: StateDict, step: int) -> StateDict:
    """Return the loop's state with ``step`` optimizer steps behind it."""
    state = copy.deepcopy(fit_loop)
    automatic = state["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]["step"]
    manual = state["epoch_loop.manual_optimization.optim_step_progress"]
    for progress in (automatic, manual):  # the module's way of optimizing decides which one counts
        progress["total"].update(ready=step, completed=step)
    state["epoch_loop.state_dict"]["_batches_that_stepped"] = step
    return state


def named_as_in(module: nn.Module, values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return ``values`` with the names that ``module`` uses (with or without ``_orig_mod``)."""
    actual = {canonical_name(name): name for name, _ in module.named_parameters()}
    actual |= {canonical_name(name): name for name, _ in module.named_buffers()}
    actual = {name: used for name, used in actual.items() if used != name}
    if not actual:
        return values
    return {actual.get(canonical_name(name), name): value for name, value in values.items()}
