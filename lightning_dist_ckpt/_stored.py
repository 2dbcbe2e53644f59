"""Parts of a checkpoint that are not read yet, in the dict that user hooks see and may edit.

Here: ``StoredModel`` and ``StoredOptimizer``, and filling a sharded model from the former. Not
here: when that happens (``_overrides``). On every rank alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from dist_ckpt.derive import ModelLayout, model_layout
from dist_ckpt.errors import MismatchError
from dist_ckpt.mapping import ShardedTensor
from dist_ckpt.serialization import load, load_common_state_dict
from lightning_dist_ckpt._document import canonical_name
from lightning_dist_ckpt._plain import copy_box

if TYPE_CHECKING:
    from dist_ckpt.options import LoadOptions
    from dist_ckpt.training_state import CheckpointView

__all__ = ["StoredModel", "StoredOptimizer", "fill_sharded"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredOptimizer:
    """Stands in ``checkpoint["optimizer_states"]`` for the state of optimizer ``index``."""

    view: CheckpointView
    index: int

    def __getitem__(self, key: object) -> Any:
        """Refuse, with a reason that helps the author of a hook."""
        raise TypeError(
            f"checkpoint['optimizer_states'][{self.index}][{key!r}]: the state goes straight into "
            "the optimizer and is not here. Change the optimizer in on_train_start instead; "
            "assign [] to checkpoint['optimizer_states'] to load none."
        )


class StoredModel(MutableMapping[str, Any]):
    """Stands for ``checkpoint["state_dict"]`` of a sharded model.

    Names are known, and may be deleted, at no cost. At the first access to a value all of them are
    read, whole and on the CPU; from then on this is an ordinary dict. Untouched, it costs nothing:
    each rank reads straight into its own shards.

    Args:
        view: The open checkpoint.
        path: Where it is.
        options: How it is read.
        extra: Values that are no tensors of the model.
    """

    def __init__(
        self,
        view: CheckpointView,
        path: Path,
        *,
        options: LoadOptions,
        extra: Mapping[str, Any],
    ) -> None:
        """Note the names; nothing is read."""
        self.view, self.path, self.options = view, path, options
        self._unread: dict[str, None] = dict.fromkeys(view.model_names(0))
        self._values: dict[str, Any] = dict(extra)
        self.is_untouched = True

    @property
    def unread(self) -> tuple[str, ...]:
        """Names whose values are still only in the checkpoint."""
        return tuple(self._unread)

    @property
    def values_given(self) -> dict[str, Any]:
        """Values that are here."""
        return dict(self._values)

    def _read(self) -> None:
        if self._unread:
            full = self.view.full_model(0)
            self._values |= {name: full[name] for name in self._unread}
            self._unread.clear()
        self.is_untouched = False

    def __getitem__(self, name: str) -> Any:
        """Return a whole tensor; reads all of them the first time."""
        if name in self._unread:
            self._read()
        return self._values[name]

    def __setitem__(self, name: str, value: Any) -> None:
        """Put a whole tensor, in place of a stored one or beside them."""
        self._unread.pop(name, None)
        self._values[name] = value
        self.is_untouched = False

    def __delitem__(self, name: str) -> None:
        """Leave a tensor out."""
        if name in self._unread:
            del self._unread[name]
        else:
            del self._values[name]
        self.is_untouched = False

    def __contains__(self, name: object) -> bool:
        """Whether there is such a name; reads nothing."""
        return name in self._unread or name in self._values

    def __iter__(self) -> Iterator[str]:
        """Yield the names."""
        yield from (*self._unread, *self._values)

    def __len__(self) -> int:
        """Return the number of names."""
        return len(self._unread) + len(self._values)


def fill_sharded(model: nn.Module, values: Mapping[str, Any], *, strict: bool) -> None:
    """Fill a sharded model in place. Collective.

    Raises:
        MismatchError: Names or shapes do not agree.
    """
    layout = model_layout(model)
    known = {*layout.tensors, *layout.tied}
    if isinstance(values, StoredModel):
        unread, given = set(values.unread), values.values_given
    else:
        unread, given = set(), {canonical_name(name): value for name, value in values.items()}
    source = values if isinstance(values, StoredModel) else given
    unexpected = sorted(_fill_others(model, (unread | given.keys()) - known, values=source))
    missing = sorted(_missing(layout, unread | given.keys()))
    if strict and (missing or unexpected):
        raise MismatchError(_like_torch(model, missing, unexpected))
    if isinstance(values, StoredModel):
        if values.is_untouched:
            values.view.load_model(0, model, strict=False)
            return
        _fill_from_disk(layout, values)
        given = values.values_given
    _fill_from_memory(layout, given)


def _fill_others(model: nn.Module, names: set[str], *, values: Mapping[str, Any]) -> set[str]:
    """Fill what is neither parameter nor buffer (states of metrics); return the unknown names."""
    names = {name for name in names if name.rpartition(".")[2] != "_extra_state"}
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        return names  # its state dict would gather
    taken = {name for name in model.state_dict() if canonical_name(name) in names}
    if taken:
        model.load_state_dict({name: values[canonical_name(name)] for name in taken}, strict=False)
    return names - {canonical_name(name) for name in taken}


def _missing(layout: ModelLayout, names: set[str]) -> Iterator[str]:
    for name in layout.tensors:
        tied = [other for other, first in layout.tied.items() if first == name]
        if not names.intersection((name, *tied)):
            yield name


def _like_torch(model: nn.Module, missing: list[str], unexpected: list[str]) -> str:
    module = model.module if isinstance(model, FullyShardedDataParallel) else model
    lines = [f"Error(s) in loading state_dict for {type(module).__name__}:"]
    for kind, names in (("Missing", missing), ("Unexpected", unexpected)):
        if names:
            quoted = ", ".join(f'"{name}"' for name in names)
            lines.append(f"\t{kind} key(s) in state_dict: {quoted}. ")
    return "\n".join(lines)


def _fill_from_disk(layout: ModelLayout, values: StoredModel) -> None:
    """Read the tensors that no hook has touched. Collective."""
    tied = load_common_state_dict(values.path, options=values.options).get("tied", {}).get("0", {})
    request = {}
    for name in values.unread:
        item = layout.tensors.get(layout.tied.get(name, name))
        if item is not None:
            request[name] = item.layout.shard(f"models.0.{tied.get(name, name)}", item.local)
    load(request, values.path, validate_access_integrity=False, options=values.options)


def _fill_from_memory(layout: ModelLayout, values: Mapping[str, Any]) -> None:
    """Copy this rank's boxes of whole tensors."""
    for name, value in values.items():
        item = layout.tensors.get(layout.tied.get(name, name))
        if item is None or not isinstance(value, torch.Tensor):
            continue
        shards = item.layout.shard(name, item.local)
        for shard in [shards] if isinstance(shards, ShardedTensor) else shards:
            if tuple(value.shape) != shard.global_shape:
                raise MismatchError(
                    f"size mismatch for {name}: copying a param with shape {tuple(value.shape)} "
                    f"from checkpoint, the shape in current model is {shard.global_shape}."
                )
            copy_box(shard, value)
