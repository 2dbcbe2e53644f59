"""Train under Lightning: ``train_lightning.py STRATEGY WORK_DIR LOSS_LOG STEPS [CHECKPOINT]``."""

from __future__ import annotations

import logging
import sys
import warnings

import lightning as L
import torch
from language_model import STEPS, LanguageModel, LossLog, Text, loss_of, make_optimizer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from lightning_dist_ckpt import DistCkptIO

warnings.filterwarnings("ignore")
for name in ("lightning.pytorch", "lightning.fabric"):
    logging.getLogger(name).setLevel(logging.ERROR)


class LitJob(L.LightningModule):
    def __init__(self, log_path: str) -> None:
        super().__init__()
        self.net = LanguageModel()
        self.text, self.losses = Text(), LossLog(log_path)

    def configure_model(self) -> None:
        if isinstance(self.trainer.strategy, ModelParallelStrategy):
            for block in self.net.blocks:
                fully_shard(block, mesh=self.device_mesh["data_parallel"])
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        del batch  # the step alone says which text comes: the same under every layout
        step, world_size = self.global_step, self.trainer.world_size
        loss = loss_of(self.net, self.text.batch(step, self.global_rank, world_size))
        self.losses.add(step, loss, world_size)
        return loss

    def configure_optimizers(self) -> dict:
        optimizer, scheduler = make_optimizer(self)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


def main(strategy: str, work_dir: str, log_path: str, steps: str, checkpoint: str = "") -> None:
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    fsdp2 = strategy == "fsdp2"
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2 if fsdp2 else 1,
        # "auto" would make both processes of one node a tensor-parallel pair.
        strategy=ModelParallelStrategy(2, 1) if fsdp2 else DDPStrategy(),
        plugins=[DistCkptIO()],  # the one line
        max_steps=int(steps),
        callbacks=[
            ModelCheckpoint(work_dir, filename="{step}", every_n_train_steps=8, save_top_k=-1)
        ],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(LitJob(log_path), DataLoader(range(STEPS)), ckpt_path=checkpoint or None)


if __name__ == "__main__":
    main(*sys.argv[1:])
