"""A tiny module and Trainers for it under every layout, on CPU.

Here: what the tests of this folder train. Not here: tests. Lightning refuses FSDP on CPUs by the
exact type of the strategy; a subclass passes, and trains.
"""
# ruff: noqa: ARG002 - the arguments of hooks are Lightning's

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812 - as its documents write it
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader

from dist_ckpt import load_plain_tensors
from lightning_dist_ckpt import DistCkptIO

LAYOUTS = {"single": 1, "ddp": 2, "fsdp1": 2, "fsdp2": 2, "tp": 2, "fsdp2_tp": 4}

for name in ("lightning.pytorch", "lightning.fabric"):
    logging.getLogger(name).setLevel(logging.ERROR)


class Net(nn.Module):
    """Sizes that no world divides, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(5, 10)
        self.norm = nn.LayerNorm(10)
        self.down = nn.Linear(10, 3)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.norm(self.up(x)))


class Tiny(L.LightningModule):
    """A module that can be sharded in ``configure_model``."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(seed)
        self.net = Net()
        self.is_sharded = False

    def configure_model(self) -> None:
        mesh = self.device_mesh
        if mesh is None or self.is_sharded:
            return
        self.is_sharded = True
        if mesh["tensor_parallel"].size() > 1:
            plan = {
                "up": ColwiseParallel(output_layouts=Replicate()),
                "down": RowwiseParallel(input_layouts=Replicate()),
            }
            parallelize_module(self.net, mesh["tensor_parallel"], plan)
        if mesh["data_parallel"].size() > 1:
            fully_shard(self.net.up, mesh=mesh["data_parallel"])
            fully_shard(self.net, mesh=mesh["data_parallel"])

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        loss = self.net(batch).pow(2).mean()
        self.net.count += 1
        return loss

    def validation_step(self, batch: torch.Tensor, index: int) -> None:
        self.log("loss", self.net(batch).pow(2).mean(), sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        return self.net(batch)

    def configure_optimizers(self) -> Any:
        named = dict(self.named_parameters())
        flat = [p for name, p in named.items() if name.endswith("bias")]
        rest = [p for name, p in named.items() if not name.endswith("bias")]
        optimizer = torch.optim.AdamW(
            [{"params": rest}, {"params": flat, "weight_decay": 0.0, "lr": 0.02}], lr=0.05
        )
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class CpuFSDP(FSDPStrategy):
    """FSDP1 on CPUs."""

    def _setup_model(self, model: nn.Module) -> nn.Module:
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"), **self.kwargs)


def strategy_of(layout: str) -> Any:
    """Return a fresh strategy for a layout of ``LAYOUTS``."""
    if layout == "fsdp1":
        return CpuFSDP(auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    if layout == "fsdp2":
        return ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    if layout == "fsdp2_tp":
        return ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=2)
    if layout == "tp":
        return ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=2)
    return DDPStrategy() if layout == "ddp" else "auto"


def make_trainer(layout: str, root: Path | str, **kwargs: Any) -> L.Trainer:
    """Return a quiet Trainer with a DistCkptIO."""
    warnings.simplefilter("ignore")
    settings = {
        "accelerator": "cpu",
        "devices": LAYOUTS[layout],
        "strategy": strategy_of(layout),
        "plugins": [DistCkptIO(timeout_secs=60)],
        "default_root_dir": str(root),
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "max_steps": 6,
    }
    settings |= kwargs
    if "callbacks" not in settings:
        settings |= {"enable_checkpointing": False}
    return L.Trainer(**settings)


def every_3_steps(folder: Path | str) -> ModelCheckpoint:
    """Return a callback that keeps a checkpoint of every third step, ``step=3.ckpt`` and so on."""
    return ModelCheckpoint(dirpath=folder, filename="{step}", every_n_train_steps=3, save_top_k=-1)


def loader(layout: str = "single", batches: int = 3) -> DataLoader[Any]:
    """Return the same data each time; ``batches`` for each rank and epoch."""
    shards = LAYOUTS[layout] // (2 if "tp" in layout else 1)  # a TP group sees the same data
    data = torch.randn(batches * shards * 2, 5, generator=torch.Generator().manual_seed(1))
    return DataLoader(data, batch_size=2)


def stored(path: Path | str) -> dict[str, torch.Tensor]:
    """Return all tensors of models and optimizers in a checkpoint, whole."""
    return load_plain_tensors(path)


def differences(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> list[str]:
    """Return the keys that are not in both with the same dtype, shape and bits."""
    return sorted(
        key
        for key in a.keys() | b.keys()
        if key not in a
        or key not in b
        or a[key].dtype != b[key].dtype
        or not torch.equal(a[key], b[key])
    )


def names(folder: Path) -> set[str]:
    """Return the names in a folder."""
    return {path.name for path in folder.iterdir()}
