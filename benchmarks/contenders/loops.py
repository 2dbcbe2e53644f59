"""Our loop that writes one file, with checksums and without them.

Here: what checksums cost a save, alone. Not here: saves; a file without checksums belongs to no
checkpoint.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from contenders.base import Contender
from dist_ckpt.storage import Extent, LocalStore, local


class NoSums:
    """Stands for ``BlockSums``: what the write loop would be without them."""

    def add(self, position: int, data: memoryview) -> None:
        """Do nothing."""

    def finish(self, nbytes: int, read: object) -> None:
        """Return nothing."""


class WriteLoop(Contender):
    """``LocalStore.write`` of all tensors to one file, synced."""

    warms_up = False

    def __init__(self, *, sums: bool = True, **given: Any) -> None:
        super().__init__(**given)
        if not sums:
            local.BlockSums = NoSums  # type: ignore[assignment,misc]  # in this process only

    def save(self, at: Path) -> None:
        at.mkdir()
        extents, position = [], 0
        for shard in self.shards:
            view = memoryview(shard.data.reshape(-1).view(torch.uint8).numpy())
            extents.append(Extent(position, view))
            position += view.nbytes
        LocalStore(at).write("f", extents, nbytes=position)

    def load(self, at: Path) -> None:
        with (at / "f").open("rb", buffering=0) as file:
            for shard in self.shards:
                view = memoryview(shard.data.reshape(-1).view(torch.uint8).numpy())
                while view.nbytes:
                    view = view[file.readinto(view) or 0 :]
