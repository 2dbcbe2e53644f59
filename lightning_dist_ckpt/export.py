"""A checkpoint directory as Lightning's one-file checkpoint, and modules from it.

Here: ``export_to_file``, ``load_module``, and the whole dict they are made of. Not here: anything
collective: each process that calls reads for itself.
"""

from __future__ import annotations

import io
import os
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from dist_ckpt.errors import MismatchError
from dist_ckpt.mapping import ShardedTensor
from dist_ckpt.options import LoadOptions
from dist_ckpt.serialization import (
    load_common_state_dict,
    load_plain_tensors,
    load_sharded_metadata,
    single_process,
)
from dist_ckpt.training_state import CheckpointView
from lightning_dist_ckpt._document import DIRECT
from lightning_dist_ckpt._folders import is_url, without_scheme

if TYPE_CHECKING:
    from dist_ckpt.types import PathLike, StateDict

__all__ = ["export_to_file", "is_stock", "load_module", "whole_checkpoint"]

_Module = TypeVar("_Module")

_MARKER = "metadata.json"  # the file that makes a directory a checkpoint of ours
_STOCK_MARKER = "meta.pt"  # the same of Lightning's own sharded checkpoints


def is_stock(path: PathLike) -> bool:
    """Whether Lightning itself saved the checkpoint at ``path``. Not collective."""
    if is_url(path):
        return True
    path = Path(without_scheme(path))
    if path.is_dir():
        return (path / _STOCK_MARKER).is_file() and not (path / _MARKER).exists()
    return path.is_file()


def load_module(
    cls: type[_Module],
    path: PathLike,
    *,
    allow_pickle: bool = False,
    **kwargs: Any,
) -> _Module:
    """Make a LightningModule from a checkpoint directory: ``load_from_checkpoint`` for ours.

    Not collective.

    Args:
        cls: The class of the module.
        path: A checkpoint directory, or a file that Lightning saved.
        allow_pickle: Whether pickled values (hyperparameters of unusual types) are loaded. That
            runs code from the checkpoint: only for checkpoints you trust.
        **kwargs: As for ``cls.load_from_checkpoint``: ``strict``, hyperparameters, and so on.

    Returns:
        The module with its weights.
    """
    source: Any = path
    if not is_stock(path):
        options = LoadOptions(allow_pickle=allow_pickle)
        whole = whole_checkpoint(Path(without_scheme(path)), options, optimizers=False)
        source = io.BytesIO()
        torch.save(whole, source)
        source.seek(0)
        kwargs.setdefault("weights_only", False)  # what is read was checked above, and is ours
    module: _Module = cls.load_from_checkpoint(source, **kwargs)  # type: ignore[attr-defined]
    return module


def export_to_file(checkpoint_dir: PathLike, file: PathLike, *, allow_pickle: bool = False) -> None:
    """Write a checkpoint directory as one file that stock Lightning loads. Not collective.

    Args:
        checkpoint_dir: The checkpoint; it stays as it is.
        file: The file to make; an older one is replaced when the new one is complete.
        allow_pickle: Whether pickled values are loaded, see ``load_module``.

    Raises:
        MismatchError: An optimizer has state that exists only per rank.
    """
    whole = whole_checkpoint(Path(checkpoint_dir), LoadOptions(allow_pickle=allow_pickle))
    target = Path(file)
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name}.{uuid.uuid4().hex[:12]}.part")
    try:
        with part.open("wb") as stream:
            torch.save(whole, stream)
            stream.flush()
            os.fsync(stream.fileno())
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


def whole_checkpoint(path: Path, options: LoadOptions, *, optimizers: bool = True) -> StateDict:
    """Return a checkpoint of ours as the dict that stock Lightning saves. Not collective."""
    view = CheckpointView.open(path, options=options, communicator=single_process())
    if DIRECT in view.common:
        direct: StateDict = view.common[DIRECT]
        return direct
    common = view.common
    whole = dict(common.get("lightning", {"global_step": common.get("step", 0), "epoch": 0}))
    whole["state_dict"] = view.full_model(0)
    if optimizers and view.num_optimizers:
        whole["optimizer_states"] = _optimizer_states(path, options)
    elif optimizers and common.get("no_optimizers"):
        whole["optimizer_states"] = []  # Lightning takes a dict without it for weights only
    if "lightning" not in common and "schedulers" in common:
        whole["lr_schedulers"] = list(common["schedulers"])
    return whole


def _optimizer_states(path: Path, options: LoadOptions) -> list[StateDict]:
    trees = load_common_state_dict(path, options=options).get("optimizers", {})
    objects = [
        key
        for key, item in load_sharded_metadata(path).items()
        if key.startswith("optimizers.") and not isinstance(item, ShardedTensor)
    ]
    if objects:
        raise MismatchError(
            f"{path}: optimizer state that is stored per rank has no form in one file: "
            f"{', '.join(objects[:5])}."
        )
    tensors = load_plain_tensors(path, options=options)
    ordered = sorted(trees.items(), key=lambda item: int(item[0]))
    return [_optimizer_state(tree, f"optimizers.{j}.state.", tensors) for j, tree in ordered]


def _optimizer_state(tree: StateDict, prefix: str, tensors: StateDict) -> StateDict:
    """Return ``Optimizer.state_dict()`` with parameters numbered, from states by name."""
    names = [name for group in tree["param_groups"] for name in group["params"]]
    number = {name: i for i, name in enumerate(names)}
    state: dict[Any, Any] = {
        number[name]: dict(values) for name, values in tree.get("state", {}).items()
    }
    for key, tensor in tensors.items():
        if not key.startswith(prefix):
            continue
        kind, _, name = key.removeprefix(prefix).partition(".")
        if name in number:
            kind = kind.replace("%2E", ".").replace("%25", "%")
            state.setdefault(number[name], {})[kind] = tensor
    groups = [
        {**group, "params": [number[name] for name in group["params"]]}
        for group in tree["param_groups"]
    ]
    return {"state": dict(sorted(state.items())), "param_groups": groups}
