"""Lightning's checkpoint dict, and where its parts go in a checkpoint of ours.

Here: taking the dict apart for a save, and making it again for a load, also from a checkpoint that
Lightning did not save. Not here: reading and writing. Pure functions, on every rank alike.

Common part: ``{"lightning": the dict without tensors of model and optimizers, "schedulers":
[state dicts], "step": optimizer steps}``. The last two are the same for all frameworks.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from dist_ckpt.derive import without_wrappers

if TYPE_CHECKING:
    from dist_ckpt.types import StateDict

__all__ = [
    "DIRECT",
    "FRAMEWORK",
    "common_of",
    "lightning_dict",
    "named_as_in",
]

FRAMEWORK = "lightning"

DIRECT = "lightning_direct"
"""In the common part: a whole value that one process saved for itself."""

_APART = frozenset({"state_dict", "optimizer_states"})


def common_of(checkpoint: Mapping[str, Any]) -> StateDict:
    """Return the common part for Lightning's dict."""
    rest = {key: value for key, value in checkpoint.items() if key not in _APART}
    return {
        "lightning": rest,
        "schedulers": list(checkpoint.get("lr_schedulers", ())),
        "step": int(checkpoint.get("global_step", 0)),
    }


def lightning_dict(
    common: Mapping[str, Any], *, version: str, loops: Mapping[str, StateDict]
) -> StateDict:
    """Return Lightning's dict, still without model and optimizers.

    Args:
        common: The common part of a checkpoint of any framework.
        version: Lightning's version, which the dict must name.
        loops: State dicts of all loops at their start, for checkpoints of other frameworks.
    """
    if "lightning" in common:
        return dict(common["lightning"])
    step = int(common.get("step", 0))
    made: StateDict = {
        "epoch": 0,
        "global_step": step,
        "pytorch-lightning_version": version,
        "loops": {**loops, "fit_loop": _at_step(loops["fit_loop"], step)},
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
    """Return ``values`` with the names that ``module`` uses (with or without ``_orig_mod``).

    ``_metadata``, if there is any, is renamed likewise.
    """
    actual = {without_wrappers(name): name for name, _ in module.named_modules()}
    if all(name == used for name, used in actual.items()):
        return values
    renamed: OrderedDict[str, Any] = OrderedDict()
    for name, value in values.items():
        parent, short = without_wrappers(name), ""
        while parent and parent not in actual:
            parent, _, last = parent.rpartition(".")
            short = f"{last}.{short}" if short else last
        renamed[f"{actual[parent]}.{short}".strip(".")] = value
    metadata = getattr(values, "_metadata", None)
    if metadata is not None:
        vars(renamed)["_metadata"] = OrderedDict(
            (actual.get(without_wrappers(prefix), prefix), of_module)
            for prefix, of_module in metadata.items()
        )
    return renamed
