"""A checkpoint that is replaced while it is read is an error, never a mixture."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from dist_ckpt import (
    CheckpointNotFoundError,
    ShardedTensor,
    load,
    save,
    save_model_and_optimizer,
)
from dist_ckpt.storage import LocalStore
from dist_ckpt.training_state import CheckpointView


def state(value: float) -> dict[str, ShardedTensor]:
    return {
        k: ShardedTensor.from_rank_offsets(k, torch.full((64,), value)) for k in ("a", "b", "c")
    }


def replace_at_first_read(monkeypatch: pytest.MonkeyPatch, again: Callable[[], None]) -> None:
    original = LocalStore.read_ranges
    calls: list[str] = []

    def replaced_before(self: LocalStore, name: str, extents: object) -> None:
        if not calls:
            calls.append(name)
            again()
        original(self, name, extents)  # type: ignore[arg-type]

    monkeypatch.setattr(LocalStore, "read_ranges", replaced_before)


def test_a_view_notices_that_its_checkpoint_was_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So does loading live objects, which has read the common part before."""
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    save_model_and_optimizer(tmp_path / "c", model)
    view = CheckpointView.open(tmp_path / "c")
    replace_at_first_read(monkeypatch, lambda: save_model_and_optimizer(tmp_path / "c", other))

    with pytest.raises(CheckpointNotFoundError, match="was replaced while it was read"):
        view.load_model(0, nn.Linear(3, 2))


def test_a_reader_notices_that_its_checkpoint_was_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second half of the bytes would come from another step: the load raises."""
    save(state(1.0), tmp_path / "c")
    replace_at_first_read(monkeypatch, lambda: save(state(2.0), tmp_path / "c"))

    with pytest.raises(CheckpointNotFoundError, match="was replaced while it was read"):
        load(state(0.0), tmp_path / "c")
