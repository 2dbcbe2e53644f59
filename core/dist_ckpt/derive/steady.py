"""Which tensors nothing but an optimizer's step changes.

Here: that one question, for copies that go on while the next step's gradients are computed. Not
here: the copies. Local, on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from dist_ckpt.derive.layout import ModelLayout
from dist_ckpt.derive.slots import unwrap_optimizer
from dist_ckpt.dict_utils import nested_values
from dist_ckpt.mapping import ShardedTensor
from dist_ckpt.types import ShardedStateDict

__all__ = ["steady_keys"]


def steady_keys(
    layouts: Mapping[int, ModelLayout],
    optimizers: Sequence[Any],
    trees: Sequence[ShardedStateDict],
) -> frozenset[str]:
    """Return the keys of parameters that an optimizer holds, and of its states' tensors.

    Buffers change in a forward pass, and what no optimizer of torch's class holds, or one with
    methods of its own, may change at any time: they are not among them.

    Args:
        layouts: Of the models whose own tensors are saved, by number.
        optimizers: Wrapped or not.
        trees: What ``sharded_optimizer_state`` returned for each of them.
    """
    return frozenset(_keys(layouts, optimizers, trees))


def _keys(
    layouts: Mapping[int, ModelLayout], optimizers: Sequence[Any], trees: Sequence[ShardedStateDict]
) -> Iterator[str]:
    for optimizer, tree in zip(optimizers, trees, strict=True):
        inner = unwrap_optimizer(optimizer)
        if not _only_steps(inner):
            continue
        for leaf in nested_values(tree):
            if isinstance(leaf, ShardedTensor):
                yield leaf.key
        held = {id(one) for group in inner.param_groups for one in group["params"]}
        for number, layout in layouts.items():
            for name in _names(layout, held):
                yield f"models.{number}.{name}"


def _only_steps(optimizer: Any) -> bool:
    """Whether the optimizer changes its tensors only in a step that calls torch's hooks.

    Those hooks wait for the copy. Classes of other libraries may change parameters in further
    methods: schedule-free ones in ``eval()``, sharpness-aware ones in ``first_step()``.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        return False
    known = set(dir(torch.optim.Optimizer))
    own = (
        name
        for cls in type(optimizer).__mro__
        if not cls.__module__.startswith("torch.")
        for name, value in vars(cls).items()
        if callable(value) and not name.startswith("_")
    )
    return bool(getattr(type(optimizer).step, "hooked", False)) and known.issuperset(own)


def _names(layout: ModelLayout, held: set[int]) -> Iterator[str]:
    for identity in held:
        if identity in layout.names:
            yield layout.names[identity]
        for piece in layout.pieces.get(identity, ()):
            yield piece.name
