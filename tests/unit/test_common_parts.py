"""Comparing the common parts of ranks: digests of whatever stands there."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from dist_ckpt._saving.common_parts import digest_of


class Circle:
    """An object that refers to itself."""

    def __init__(self, value: int) -> None:
        self.value = value
        self.myself = [self]


class Shy:
    """An object that has no text."""

    __slots__ = ("value",)

    def __init__(self, value: int) -> None:
        self.value = value

    def __repr__(self) -> str:
        raise ValueError


def quantised(value: int) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(torch.ones(2) * value, float(value), 0, torch.qint8)


VALUES = {
    "sparse": lambda value: (torch.eye(2) * value).to_sparse(),
    "quantised": quantised,
    "meta": lambda value: torch.empty(value, device="meta"),
    "needs gradients": lambda value: torch.ones(2, requires_grad=True) * value,
    "circle": Circle,
    "circle of dicts": lambda value: [Circle(value), Circle(value)],
}


@pytest.mark.parametrize("kind", VALUES)
def test_values_of_every_kind_have_a_digest(kind: str) -> None:
    """Equal for equal values, another for others; a save that compares must not fail by it."""
    make: Any = VALUES[kind]

    assert digest_of({"x": make(1), "y": 1}) == digest_of({"y": 1, "x": make(1)})
    assert digest_of({"x": make(1)}) != digest_of({"x": make(2)})


def test_what_cannot_be_looked_at_is_not_compared() -> None:
    """It must not fail the save."""
    assert digest_of({"x": Shy(1)}) == digest_of({"x": Shy(2)})
