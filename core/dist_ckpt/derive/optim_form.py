"""The form of an optimizer's state dict, and what in it can be stored.

Here: which entry of ``state`` is of which parameter, parameters that are keys, tensors that cannot
be stored. Not here: how states are described (``derive.optim``) or loaded (``derive.optim_load``).
Local, on every rank.

``torch.optim.Optimizer.state_dict`` returns ``{"state": {number: {...}}, "param_groups": [...]}``.
Subclasses and hooks add entries, use other keys for parameters, or return something else. Of a
state dict of another form only this is known: the optimizer's own ``load_state_dict`` accepts it.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch.distributed.tensor import DTensor

from dist_ckpt._codec.subclasses import is_admitted, is_wrapper, take_apart
from dist_ckpt.derive.layout import ModelLayout
from dist_ckpt.derive.slots import Slot
from dist_ckpt.errors import InvalidShardingError, MismatchError

__all__ = [
    "EXTRA",
    "KEYS",
    "ORDER",
    "WHOLE",
    "are_replicated",
    "has_data",
    "is_own_entry",
    "read_state_dict",
    "state_keys",
    "unstorable",
    "with_marks",
    "with_parameters",
]

WHOLE: Final = "$whole"
"""Entry of a tree: the object that holds the state dict as it is."""
KEYS: Final = "$keys"
"""Entry of a tree: parameter's name to its key in ``state``, where that is not torch's number."""
ORDER: Final = "$order"
"""Entry of a tree: the names of states in the order in which they stand, without repetitions."""
EXTRA: Final = "extra"
"""Part of the key of an object with an entry that is neither of state nor of groups."""

_PARAMETER: Final = "dist_ckpt.parameter"


def read_state_dict(optimizer: Any, slots: Sequence[Slot]) -> Any:
    """Return ``optimizer.state_dict()``.

    Raises:
        InvalidShardingError: It has state of parameters that it does not hold, at which torch's own
            method fails with a bare KeyError.
    """
    try:
        return optimizer.state_dict()
    except KeyError as error:
        held = {id(slot.param) for slot in slots}
        state = getattr(optimizer, "state", {})
        strays = [key for key in state if isinstance(key, torch.Tensor) and id(key) not in held]
        if not strays:
            raise
        shapes = ", ".join(str(tuple(stray.shape)) for stray in strays)
        raise InvalidShardingError(
            f"{type(optimizer).__name__}.state has state of {len(strays)} tensor(s) that are in "
            f"none of its parameter groups, of shape {shapes}: its state_dict() fails.",
            hint="remove their state when parameters are taken out of the optimizer.",
        ) from error


def state_keys(optimizer: Any, raw: Any) -> dict[int, Hashable] | None:
    """Return ``id(parameter)`` -> its key in ``raw["state"]``; None for a dict of another form."""
    if not isinstance(raw, Mapping) or not isinstance(raw.get("state"), Mapping):
        return None
    keys = _keys_of_groups(raw.get("param_groups"), getattr(optimizer, "param_groups", None))
    if keys is None or not all(map(is_own_entry, raw)):
        return None
    states = [raw["state"].get(key, {}) for key in keys.values()]
    if not all(isinstance(s, Mapping) and all(type(name) is str for name in s) for s in states):
        return None
    return keys


def _keys_of_groups(groups: Any, live: Any) -> dict[int, Hashable] | None:
    if not isinstance(groups, (list, tuple)) or live is None or len(groups) != len(live):
        return None
    keys: dict[int, Hashable] = {}
    for stored, own in zip(groups, live, strict=True):
        named = stored.get("params") if isinstance(stored, Mapping) else None
        if not isinstance(named, (list, tuple)) or len(named) != len(own["params"]):
            return None
        if not all(isinstance(key, Hashable) for key in named):
            return None
        keys.update((id(param), key) for param, key in zip(own["params"], named, strict=True))
    return keys if len(set(keys.values())) == len(keys) else None


def is_own_entry(name: object) -> bool:
    """Whether an entry of a state dict can be in a tree under its own name, beside ours."""
    return type(name) is str and not name.startswith("$") and name != "other_state"


def are_replicated(slots: Sequence[Slot], layouts: Sequence[ModelLayout]) -> bool:
    """Whether every rank holds all parameters of the optimizer, as plain tensors.

    An optimizer without parameter groups may hold any parameter of the models.
    """
    if not slots:
        items = [item for layout in layouts for item in layout.tensors.values()]
        return all(
            item.layout.is_replicated and not isinstance(item.owner, DTensor) for item in items
        )
    return all(
        slot.layout.is_replicated and slot.piece is None and not isinstance(slot.param, DTensor)
        for slot in slots
    )


def has_data(value: Any, *, least: int = 2) -> bool:
    """Whether a value has a tensor of at least ``least`` elements in it."""
    return any(tensor.numel() >= least for _, tensor in _tensors(value, ()))


def unstorable(value: Any, where: str, *, is_sharded: bool = False) -> Iterator[str]:
    """Yield the reason for each tensor in a value that cannot be stored as a part of it.

    Args:
        value: Any nesting of containers.
        where: Name of the value, for the texts.
        is_sharded: Whether the value belongs to no parameter while parameters are sharded: a tensor
            in it may then differ between the ranks.
    """
    for path, tensor in _tensors(value, ()):
        name = f"{where}{''.join(f'[{step!r}]' for step in path)}"
        if isinstance(tensor, DTensor):
            yield (
                f"{name} is a DTensor inside a container, which a load cannot rebuild (store "
                f"full_tensor(), or to_local() if the ranks stay the same)"
            )
        elif tensor.device.type == "meta":
            yield f"{name} is on the meta device, without data"
        elif is_wrapper(tensor) and not is_admitted(type(tensor)):
            cls = type(tensor)
            yield (
                f"{name} is a {cls.__module__}.{cls.__qualname__}, which torch.load does not "
                f"rebuild either before torch.serialization.add_safe_globals([{cls.__name__}])"
            )
        elif is_sharded and tensor.numel() > 1:
            yield (
                f"{name} has shape {tuple(tensor.shape)} and belongs to no parameter, while "
                f"parameters are sharded: it may differ between the ranks"
            )


def with_marks(value: Any, params: Sequence[torch.Tensor]) -> Any:
    """Return a state dict in which marks replace parameters that are keys.

    A stored parameter is loaded as a new tensor, which is not the key that the optimizer expects.

    Raises:
        InvalidShardingError: A key is a tensor that is no parameter of the optimizer.
    """
    numbers = {id(param): (_PARAMETER, number) for number, param in enumerate(params)}

    def marked(key: Any) -> Any:
        if isinstance(key, torch.Tensor) and id(key) not in numbers:
            raise InvalidShardingError(
                f"its state_dict() has a tensor of shape {tuple(key.shape)} as a key that is no "
                f"parameter of the optimizer.",
                hint="use parameters, numbers or strings as keys.",
            )
        return numbers[id(key)] if isinstance(key, torch.Tensor) else key

    return _with_keys(value, marked)


def with_parameters(value: Any, params: Sequence[torch.Tensor]) -> Any:
    """Return a state dict with the parameters that its marks refer to.

    Raises:
        MismatchError: The optimizer has fewer parameters than at saving.
    """

    def parameter(key: Any) -> Any:
        if type(key) is not tuple or len(key) != 2 or key[0] != _PARAMETER:  # noqa: PLR2004 - a mark
            return key
        if type(key[1]) is not int or not 0 <= key[1] < len(params):
            raise MismatchError(
                f"the optimizer's stored state has parameter number {key[1]!r}, the optimizer has "
                f"{len(params)} parameters.",
                hint="give the optimizer the same parameters, in the same order, as at saving.",
            )
        return params[key[1]]

    return _with_keys(value, parameter)


def _with_keys(value: Any, change: Any) -> Any:
    """Return the value with keys of dicts changed, at any depth of dicts, lists and tuples."""
    if isinstance(value, dict):
        items = [(change(key), _with_keys(inner, change)) for key, inner in value.items()]
        if all(a is b and c is d for (a, c), (b, d) in zip(items, value.items(), strict=True)):
            return value
        changed = copy.copy(value)
        changed.clear()
        changed.update(items)
        return changed
    if type(value) in {list, tuple}:
        changed_items = [_with_keys(inner, change) for inner in value]
        is_same = all(a is b for a, b in zip(changed_items, value, strict=True))
        return value if is_same else type(value)(changed_items)
    return value


def _tensors(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
        if is_wrapper(value):
            for name, inner in take_apart(value).tensors.items():
                yield from _tensors(inner, (*path, name)) if is_wrapper(inner) else ()
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _tensors(item, (*path, key))
    elif isinstance(value, (list, tuple, set, frozenset)):
        for position, item in enumerate(value):
            yield from _tensors(item, (*path, position))
