"""Optimizers that cannot be saved are refused when a fit begins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from dist_ckpt.errors import InvalidShardingError
from tests.lightning._training import Tiny, every_3_steps, loader, make_trainer

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


class Ghostly(Tiny):
    """Its optimizer has a setting without data."""

    steps = 0

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
        optimizer.param_groups[0]["ghost"] = torch.empty(1, device="meta")
        return optimizer

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        self.steps += 1
        return super().training_step(batch, index)


class Emptying(Ghostly):
    """Leaves the optimizers out."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["optimizer_states"] = []


def test_a_fit_with_an_optimizer_that_cannot_be_saved_does_not_begin(tmp_path: Path) -> None:
    """Not after the first interval of training."""
    module = Ghostly()
    trainer = make_trainer("single", tmp_path, callbacks=[every_3_steps(tmp_path)])
    with pytest.raises(InvalidShardingError, match=r"SGD.*param_groups\[0\]\['ghost'\].*meta"):
        trainer.fit(module, loader())
    assert module.steps == 0


def test_what_no_callback_saves_is_not_looked_at(tmp_path: Path) -> None:
    """Weights only, or no checkpoints at all."""
    weights = ModelCheckpoint(dirpath=tmp_path, save_weights_only=True)
    for settings in ({"callbacks": [weights]}, {}):
        module = Ghostly()
        make_trainer("single", tmp_path, max_steps=2, **settings).fit(module, loader())
        assert module.steps == 2


def test_a_module_that_edits_what_is_saved_is_warned(tmp_path: Path) -> None:
    """It may leave the optimizers out, as this one does."""
    module = Emptying()
    trainer = make_trainer("single", tmp_path, callbacks=[every_3_steps(tmp_path)])
    with pytest.warns(UserWarning, match="on_save_checkpoint leaves optimizers out.*ghost"):
        trainer.fit(module, loader())
    assert module.steps == 6
