"""Save plans of torch.distributed.checkpoint (DCP), compared and kept for the next save.

Here: when a plan may be used again, and what is remembered with it. Not here: the agreement between
ranks (``strategies.state_dict_saver``), planners (``planners``). Pure, but for what ``remember``
notes on a plan.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan

from dist_ckpt.errors import StorageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import SavePlanner

__all__ = [
    "Settings",
    "WriteFailedError",
    "default_planner",
    "differences",
    "noted_for_later",
    "planner_settings",
    "recall",
    "remember",
]

Settings: TypeAlias = tuple[Any, ...]
"""What, beside the state dict, a plan depends on."""

_NOT_COMPARED = frozenset({"storage_data"})
_MEMORY = "_dist_ckpt_memory"


class WriteFailedError(StorageError, CheckpointException):
    """A save through DCP failed on some rank; DCP's ``CheckpointException`` too.

    ``failures`` maps each rank that failed to a description of what it raised.
    """

    failures: Any = None  # DCP has a property of this name, without a setter


@dataclass(frozen=True, slots=True)
class _Memory:
    settings: Settings
    metadata: Metadata | None


def default_planner() -> SavePlanner:
    """Return the planner of a caller who names none."""
    return DefaultSavePlanner()


def differences(plan: SavePlan, other: SavePlan) -> list[str]:
    """Return the names of the fields in which two plans differ.

    Items are compared whole: kind, key, offset, global shape, chunk and every property of the
    tensor, its dtype among them. Where the data goes (``storage_data``) is not compared.
    """
    names = {field.name for one in (plan, other) for field in dataclasses.fields(one)}
    return [
        name
        for name in sorted(names - _NOT_COMPARED | {"mcore_data"})
        if (getattr(plan, name, None) or None) != (getattr(other, name, None) or None)
    ]


def planner_settings(planner: SavePlanner, ranks: Sequence[int], coordinator: int) -> Settings:
    """Return what a plan depends on beside the state dict. Before the planner is set up.

    That is the planner's class and its plain options, and the ranks that take part.
    """
    options = {
        name: value
        for name, value in vars(planner).items()
        if isinstance(value, bool | int | str | None) and name != "is_coordinator"
    }
    return (type(planner), tuple(sorted(options.items())), tuple(ranks), coordinator)


def remember(plan: SavePlan, settings: Settings, metadata: Metadata | None) -> None:
    """Note on the final plan of a rank what another save needs to use it again."""
    vars(plan)[_MEMORY] = _Memory(settings, metadata)


def recall(plan: SavePlan, settings: Settings) -> tuple[bool, Metadata | None]:
    """Return whether the plan was made under the same settings, and the metadata kept with it."""
    memory = vars(plan).get(_MEMORY)
    if not isinstance(memory, _Memory) or memory.settings != settings:
        return False, None
    return True, memory.metadata


def noted_for_later(plan: SavePlan) -> SavePlan:
    """Return a local plan as the metadata stores it: of DCP's class, which others can read."""
    stored = SavePlan(plan.items, None, plan.planner_data)
    noted = getattr(plan, "mcore_data", None)
    if noted:
        vars(stored)["mcore_data"] = noted
    return stored
