"""What a contender is: a way to save shards to a directory and to load them in place.

Here: the port. Not here: any contender, any clock.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

import torch
from harness.states import Shard

State = dict[str, torch.Tensor]


class Contender(ABC):
    """One library on one rank.

    Attributes:
        threads: How many it may use, where it lets one choose.
        shards: What it saves, and loads into.
        warms_up: Whether a tiny save and load before the clock are of use.
    """

    warms_up = True

    def __init__(self, *, rank: int = 0, world: int = 1, threads: int = 2) -> None:
        """Keep who this is."""
        self.rank, self.world, self.threads = rank, world, threads
        self.shards: Sequence[Shard] = ()

    def bind(self, shards: Sequence[Shard]) -> None:
        """Take the shards; describe them in this library's terms. Outside of every clock."""
        self.shards = shards

    @property
    def tensors(self) -> State:
        """The shards as a flat dict."""
        return {shard.key: shard.data for shard in self.shards}

    @abstractmethod
    def save(self, at: Path) -> None:
        """Save to ``at``, which does not exist; durable when this returns."""

    @abstractmethod
    def load(self, at: Path) -> None:
        """Load into the tensors of the shards."""

    def close(self) -> None:  # noqa: B027 - most have nothing to end
        """End threads and processes."""


def copy_into(state: State, loaded: State) -> None:
    """Copy what was loaded elsewhere to where it has to be."""
    for key, tensor in state.items():
        tensor.copy_(loaded[key])
