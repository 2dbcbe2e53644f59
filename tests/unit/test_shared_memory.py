"""Buffers whose elements share memory: read aside, then filled."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from dist_ckpt import MismatchError, load_model_and_optimizer, save_model_and_optimizer


class Expanded(nn.Module):
    def __init__(self, rows: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("scale", rows)


def test_an_expanded_buffer_is_loaded(tmp_path: Path) -> None:
    """It is stored in full, and its one row of memory is filled again."""
    save_model_and_optimizer(tmp_path / "c", Expanded(torch.arange(4.0).expand(3, 4)))
    other = Expanded(torch.zeros(1, 4).expand(3, 4))

    load_model_and_optimizer(tmp_path / "c", other)

    assert torch.equal(other.scale, torch.arange(4.0).expand(3, 4))
    assert other.scale.stride() == (0, 1)


def test_rows_that_differ_do_not_fit_into_one(tmp_path: Path) -> None:
    """What the model cannot hold is an error, not the last row."""
    save_model_and_optimizer(tmp_path / "c", Expanded(torch.arange(12.0).view(3, 4)))

    with pytest.raises(MismatchError, match="'scale': elements that differ"):
        load_model_and_optimizer(tmp_path / "c", Expanded(torch.zeros(1, 4).expand(3, 4)))
