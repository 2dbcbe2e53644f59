"""Formats of a single file: one process, no sharding.

Here: ``torch.save`` and safetensors, synced. Not here: anything that knows ranks.
"""

from __future__ import annotations

from pathlib import Path

import torch
from harness.pages import sync_below

from contenders.base import Contender, copy_into


class TorchSave(Contender):
    """``torch.save``; ``torch.load`` of a mapped file, then copied."""

    def save(self, at: Path) -> None:
        at.mkdir()
        torch.save(self.tensors, at / "state.pt")
        sync_below(at)

    def load(self, at: Path) -> None:
        copy_into(self.tensors, torch.load(at / "state.pt", mmap=True, weights_only=True))


class Safetensors(Contender):
    """``save_file``; ``load_file``, then copied."""

    def save(self, at: Path) -> None:
        from safetensors.torch import save_file

        at.mkdir()
        save_file(self.tensors, at / "state.safetensors")
        sync_below(at)

    def load(self, at: Path) -> None:
        from safetensors.torch import load_file

        copy_into(self.tensors, load_file(at / "state.safetensors"))
