"""The job whose state is saved in the background, and what a contender is.

Here: a model with AdamW, the port, small helpers. Not here: any contender (``async_contenders``,
``async_peers``).
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

MIB = 1 << 20
TIMEOUT_SECS = 600.0

State = dict[str, torch.Tensor]


class Block(nn.Module):
    """The parameters of a decoder layer; never run."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)


class Net(nn.Module):
    """As many layers as fill ``mib`` with their Adam moments, and a small head that trains."""

    def __init__(self, mib: int) -> None:
        super().__init__()
        width = 512 if mib >= 96 else 256 if mib >= 16 else 64
        per_layer = 12 * sum(one.numel() for one in Block(width).parameters())
        self.layers = nn.ModuleList(Block(width) for _ in range(max(1, mib * MIB // per_layer)))
        self.head = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(batch)
        return out


class Job:
    """A model and its AdamW, whose state has been trained once in full and then in the head only.

    Attributes:
        state: All tensors of both by name: the live ones, not copies.
    """

    def __init__(self, mib: int, seed: int = 0) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.model = Net(mib)
            self.optimizer = torch.optim.AdamW(self.model.parameters())
            for parameter in self.model.parameters():
                parameter.grad = torch.randn_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.state: State = {}
        for name, parameter in self.model.named_parameters():
            self.state[f"model.{name}"] = parameter.detach()
            moments = self.optimizer.state[parameter]
            self.state |= {f"optimizer.{name}.{key}": one for key, one in moments.items()}

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.state.values())

    def change(self) -> None:
        """Change each tensor a little, so that no save finds what the one before has saved."""
        for tensor in self.state.values():
            tensor.view(-1)[0].add_(1.0)

    def forward_backward(self, rows: int) -> None:
        self.model(torch.ones(rows, 256)).square().mean().backward()


class Contender(ABC):
    """A way to save ``job`` in the background. One save at a time.

    Attributes:
        name: What stands in the table.
    """

    name: str

    def __init__(self, job: Job, threads: int) -> None:
        """Make what may be made before the first save."""
        self.job, self.threads = job, threads

    @abstractmethod
    def save(self, at: Path) -> None:
        """Start a save to ``at``; the caller then goes on to forward and backward."""

    def guard(self) -> None:  # noqa: B027 - most are safe already when save returns
        """Return when the state may change."""

    @abstractmethod
    def is_done(self) -> bool:
        """Whether the last save is durable."""

    @abstractmethod
    def finish(self) -> None:
        """Wait until it is; raise what failed."""

    @abstractmethod
    def load(self, at: Path) -> State:
        """Return the tensors of a checkpoint under the names of ``job.state``."""

    def close(self) -> None:  # noqa: B027 - some have nothing to end
        """End threads and processes."""


def sync(path: Path) -> None:
    """Make a file durable, and its name."""
    for one in (path, path.parent):
        descriptor = os.open(one, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def differing(found: State, expected: State) -> Iterator[str]:
    """Yield the names whose bits differ."""
    for name in sorted(found.keys() | expected.keys()):
        both = [_bits(state[name]) for state in (found, expected) if name in state]
        if len(both) < 2 or not torch.equal(*both):
            yield name


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
