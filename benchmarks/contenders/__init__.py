"""Who takes part: ours, its peers, the floor.

Here: the roster. Not here: the contenders, which are imported in the process that runs them.
"""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from contenders.base import Contender


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A contender of the roster.

    Attributes:
        label: What stands in tables.
        home: ``module:class`` of this package.
        options: Arguments of the class.
        needs: Modules that must be installed.
        in_group: Whether it wants a process group for one rank, too.
    """

    label: str
    home: str
    options: dict[str, Any] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    in_group: bool = False

    def missing(self) -> list[str]:
        """Return the modules that are not installed."""
        return [name for name in self.needs if not _is_installed(name)]


ROSTER = {
    "floor": Entry(label="floor", home="floor:Floor"),
    "floor-direct": Entry(label="floor, O_DIRECT", home="floor:DirectFloor"),
    "floor-exchange": Entry(label="floor, read once and exchanged", home="floor:ExchangeFloor"),
    "ours": Entry(label="dist-ckpt", home="ours:Ours"),
    "ours-manager": Entry(label="dist-ckpt, CheckpointManager", home="ours:Managed"),
    "ours-described": Entry(label="dist-ckpt, described in the clock", home="ours:Described"),
    "ours-zarr3": Entry(
        label="dist-ckpt, zarr v3", home="ours:Ours", options={"strategy": ["zarr", 2]}
    ),
    "ours-zarr2": Entry(
        label="dist-ckpt, zarr v2", home="ours:Ours", options={"strategy": ["zarr", 1]}
    ),
    "ours-verify-off": Entry(
        label='dist-ckpt, verify="off"', home="ours:Ours", options={"verify": "off"}
    ),
    "ours-keep": Entry(
        label='dist-ckpt, page_cache="keep"', home="ours:Ours", options={"page_cache": "keep"}
    ),
    "ours-drop": Entry(
        label='dist-ckpt, page_cache="drop"', home="ours:Ours", options={"page_cache": "drop"}
    ),
    "ours-verify-full": Entry(
        label='dist-ckpt, verify="full"', home="ours:Ours", options={"verify": "full"}
    ),
    "loop": Entry(label="write loop", home="loops:WriteLoop"),
    "loop-no-sums": Entry(
        label="write loop, no checksums", home="loops:WriteLoop", options={"sums": False}
    ),
    "dcp": Entry(label="torch DCP", home="dcp:TorchDcp"),
    "experimental": Entry(label="torch _experimental", home="dcp:TorchExperimental"),
    "torch-save": Entry(label="torch.save", home="files:TorchSave"),
    "safetensors": Entry(label="safetensors", home="files:Safetensors", needs=("safetensors",)),
    "megatron": Entry(
        label="Megatron-Core",
        home="others:Megatron",
        needs=("megatron.core",),
        in_group=True,
    ),
    "megatron-parallel": Entry(
        label="Megatron-Core, fully parallel",
        home="others:Megatron",
        options={"parallel": True},
        needs=("megatron.core",),
        in_group=True,
    ),
    "torchsnapshot": Entry(label="torchsnapshot", home="others:Snapshot", needs=("torchsnapshot",)),
    "tensorstore": Entry(
        label="raw TensorStore, zarr v3", home="others:TensorStore", needs=("tensorstore",)
    ),
}


def make(name: str, **given: Any) -> Contender:
    """Return a new contender of the roster."""
    entry = ROSTER[name]
    module, kind = entry.home.split(":")
    made: Contender = getattr(importlib.import_module(f"contenders.{module}"), kind)(
        **entry.options, **given
    )
    return made


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ImportError:
        return False
