"""Lightning: one plugin, nothing else. Train, stop, and go on from ``ckpt_path="last"``."""

from __future__ import annotations

import logging
import tempfile
import warnings
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_dist_ckpt import DistCkptIO


class Regression(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)

    def training_step(self, batch):
        inputs, targets = batch
        return torch.nn.functional.mse_loss(self.layer(inputs), targets)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.05)


def train(directory: str, *, max_epochs: int, ckpt_path: str | None) -> L.Trainer:
    """Train; the strategy may be another one when the job goes on (ddp, fsdp, ...)."""
    L.seed_everything(0, verbose=False)
    inputs = torch.randn(64, 8)
    data = torch.utils.data.TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=max_epochs,
        plugins=[DistCkptIO()],
        callbacks=[ModelCheckpoint(directory, save_last=True)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = torch.utils.data.DataLoader(data, batch_size=16)
    trainer.fit(Regression(), loader, ckpt_path=ckpt_path)
    return trainer


if __name__ == "__main__":
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    with tempfile.TemporaryDirectory() as directory:
        first = train(directory, max_epochs=2, ckpt_path=None)
        print(f"stopped at step {first.global_step}")
        print("checkpoints:", ", ".join(sorted(p.name for p in Path(directory).iterdir())))
        second = train(directory, max_epochs=4, ckpt_path="last")
        print(f"resumed, and trained on to step {second.global_step}")
