"""Generators of random numbers as values: python's, numpy's and torch's on the CPU.

Here: their states, and generators made from them. Not here: states that a program keeps by itself,
which are tuples, dicts and tensors like any other. A state is believed only within the bounds that
the generator's own code relies on.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import torch

__all__ = [
    "dump_numpy_generator",
    "dump_random_state",
    "dump_torch_generator",
    "load_numpy_generator",
    "load_python_generator",
    "load_random_state",
    "load_torch_generator",
]

_BIT_GENERATORS: Final[Mapping[str, type[np.random.BitGenerator]]] = MappingProxyType(
    {
        one.__name__: one
        for one in (
            np.random.MT19937, np.random.PCG64, np.random.PCG64DXSM, np.random.Philox,
            np.random.SFC64,
        )
    }
)  # fmt: skip
_MOST: Final[Mapping[tuple[str, str], int]] = MappingProxyType(
    {("MT19937", "pos"): 624, ("Philox", "buffer_pos"): 4}
)
"""Positions in a buffer, which numpy uses unchecked."""

_PYTHON_STATE: Final = 3


def load_python_generator(state: tuple[Any, ...]) -> random.Random:
    """Return a ``random.Random`` in ``state``."""
    if len(state) != _PYTHON_STATE or type(state[1]) is not tuple:
        raise ValueError("no state of random.Random")
    value = random.Random(0)  # noqa: S311 - no secret is made with it
    value.setstate(state)
    return value


def dump_numpy_generator(value: np.random.Generator) -> Any:
    """Return the state of the generator's source of bits."""
    name = type(value.bit_generator).__name__
    is_known = _BIT_GENERATORS.get(name) is type(value.bit_generator)
    return dict(value.bit_generator.state) if is_known else NotImplemented


def load_numpy_generator(state: dict[str, Any]) -> np.random.Generator:
    """Return a ``numpy.random.Generator`` in ``state``."""
    return np.random.Generator(_bits(state))


def dump_random_state(value: np.random.RandomState) -> Any:
    """Return the state of numpy's older kind of generator."""
    state: Any = value.get_state(legacy=False)
    return dict(state) if state.get("bit_generator") == "MT19937" else NotImplemented


def load_random_state(state: dict[str, Any]) -> np.random.RandomState:
    """Return a ``numpy.random.RandomState`` in ``state``."""
    value = np.random.RandomState(0)
    _bits({name: state[name] for name in ("bit_generator", "state")})
    value.set_state(state)
    return value


def _is_plain(value: object) -> bool:
    """Whether numpy makes no more of it than it is: of a range, it makes an array of any size."""
    if type(value) is list:
        return all(type(one) is int for one in value)
    return type(value) in (str, int, float, np.ndarray)


def _bits(state: dict[str, Any]) -> np.random.BitGenerator:
    name = state["bit_generator"]
    value = _BIT_GENERATORS[name](0)
    for place in (state, state["state"]):
        if not all(_is_plain(one) for one in place.values() if one is not state["state"]):
            raise ValueError(f"no state of {name}")
        for field, most in ((f, most) for (kind, f), most in _MOST.items() if kind == name):
            if field in place and not (type(place[field]) is int and 0 <= place[field] <= most):
                raise ValueError(f"{field} {place[field]!r} of {name}")
    value.state = state
    return value


def dump_torch_generator(value: torch.Generator) -> Any:
    """Return the state of a generator on the CPU; others need their device to be there."""
    return value.get_state() if value.device.type == "cpu" else NotImplemented


def load_torch_generator(state: torch.Tensor) -> torch.Generator:
    """Return a ``torch.Generator`` on the CPU in ``state``."""
    value = torch.Generator()
    value.set_state(state.cpu())
    return value
