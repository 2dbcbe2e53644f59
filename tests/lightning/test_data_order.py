"""A Trainer with a stateful loader gets the batches that it gets without us."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_dist_ckpt import DistCkptIO

pytestmark = [
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:lightning"),
]


class Recorder(pl.LightningModule):
    """Keeps the batches."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen: list[list[int]] = []

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        self.seen.append(batch.tolist())
        return self.layer(batch.float()[:, None]).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 1e-3)


def fit(folder: Path, every: int, *, ours: bool, resume: bool) -> list[list[int]]:
    from torchdata.stateful_dataloader import StatefulDataLoader

    torch.manual_seed(5 if resume else 1)
    module = Recorder()
    loader = StatefulDataLoader(torch.arange(12), batch_size=2, shuffle=True)
    saving = pl.callbacks.ModelCheckpoint(
        dirpath=folder, filename="{step}", every_n_train_steps=every, save_top_k=-1
    )
    trainer = pl.Trainer(
        max_epochs=2,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=not resume,
        callbacks=[] if resume else [saving],
        plugins=[DistCkptIO()] if ours else [],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    path = folder / f"step={every}.ckpt" if resume else None
    more: Any = {} if ours or not resume else {"weights_only": False}
    trainer.fit(module, loader, ckpt_path=path, **more)
    return module.seen


@pytest.mark.parametrize("every", [3, 6, 8])
def test_stateful_loaders_resume_as_without_us(tmp_path: Path, every: int) -> None:
    """In the first epoch, at its end, and in the second."""
    found = {}
    for ours in (False, True):
        folder = tmp_path / ("ours" if ours else "stock")
        straight = fit(folder, every, ours=ours, resume=False)
        found[ours] = straight, fit(folder, every, ours=ours, resume=True)

    assert found[True] == found[False]
    if every != 6:  # at an epoch's end Lightning ends the run that it resumes with such a loader
        assert len(found[True][1]) == 12 - every
