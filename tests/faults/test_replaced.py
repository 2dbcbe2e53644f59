"""A checkpoint that is replaced while it is read is an error, never a mixture."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dist_ckpt import CheckpointNotFoundError, ShardedTensor, load, save
from dist_ckpt.storage import LocalStore


def state(value: float) -> dict[str, ShardedTensor]:
    return {
        k: ShardedTensor.from_rank_offsets(k, torch.full((64,), value)) for k in ("a", "b", "c")
    }


def test_a_reader_notices_that_its_checkpoint_was_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second half of the bytes would come from another step: the load raises."""
    save(state(1.0), tmp_path / "c")
    original = LocalStore.read_ranges
    calls: list[str] = []

    def replaced_before(self: LocalStore, name: str, extents: object) -> None:
        if not calls:
            calls.append(name)
            save(state(2.0), tmp_path / "c")
        original(self, name, extents)  # type: ignore[arg-type]

    monkeypatch.setattr(LocalStore, "read_ranges", replaced_before)

    with pytest.raises(CheckpointNotFoundError, match="was replaced while it was read"):
        load(state(0.0), tmp_path / "c")
