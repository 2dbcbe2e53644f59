"""torchdata's StatefulDataLoader under the three APIs: which samples come after a resume.

Here: for each API one function like those of ``_apis.py``; the state that is compared is the order of
the samples. Not here: ordinary dataloaders (tests/accelerate, tests/lightning).
"""
# ruff: noqa: ARG002 - the arguments of hooks are Lightning's

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812 - as its documents write it
import torch
from accelerate.utils import DataLoaderConfiguration
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from accelerate_dist_ckpt import DistCkptIO as AccelerateIO
from dist_ckpt.training_state import CheckpointView, TrainingState, save_training_state
from lightning_dist_ckpt import DistCkptIO as LightningIO
from tests.accelerate._jobs import new_accelerator, reset
from tests.lightning._training import make_trainer

SAMPLES = 24
SAVED_AT = 3  # batches of an epoch
EPOCHS = 3


def _loader(layout: str, rank: int, seed: int) -> Any:
    torch.manual_seed(seed)
    data = torch.arange(SAMPLES)
    if layout == "single":
        return StatefulDataLoader(data, batch_size=2, shuffle=True)
    sampler = StatefulDistributedSampler(data, num_replicas=2, rank=rank, shuffle=True)
    return StatefulDataLoader(data, batch_size=2, sampler=sampler)


def core(layout: str, rank: int, root: Path, *, how: str) -> dict[str, Any]:
    """Each rank stores the state of its own loader, in the second epoch."""
    loader = _loader(layout, rank, seed=1)
    list(loader)
    batches = iter(loader)
    for _ in range(SAVED_AT):
        next(batches)
    state, path = loader.state_dict(), root / how
    if how == "uninterrupted":
        return {"order": [batch.tolist() for batch in batches]}
    again = _loader(layout, rank, seed=2)
    if how == "ours":
        save_training_state(path, TrainingState(models=[nn.Linear(2, 2)], per_rank=state))
        again.load_state_dict(CheckpointView.open(path).per_rank())
    else:
        torch.save(state, root / f"stock-{rank}")
        again.load_state_dict(torch.load(root / f"stock-{rank}", weights_only=False))
    return {"order": [batch.tolist() for batch in again]}


class _Reader(L.LightningModule):
    """Notes what it is given."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.seed = seed
        self.order: list[tuple[int, Any]] = []

    def train_dataloader(self) -> Any:
        torch.manual_seed(self.seed)
        return StatefulDataLoader(torch.arange(SAMPLES), batch_size=2, shuffle=True)

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        self.order.append((self.trainer.global_step, batch.tolist()))
        return self.layer(batch[:, None].float()).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def lightning(layout: str, rank: int, root: Path, *, how: str) -> dict[str, Any]:
    """A ModelCheckpoint in the middle of the second epoch."""
    length = SAMPLES // 2 // (1 if layout == "single" else 2)
    saved_at = length + SAVED_AT

    def fit(module: _Reader, **kwargs: Any) -> None:
        saves = ModelCheckpoint(
            root / how, filename="{step}", every_n_train_steps=saved_at, save_top_k=-1
        )
        trainer = make_trainer(
            layout,
            root,
            plugins=[LightningIO(timeout_secs=300.0)] if how == "ours" else None,
            callbacks=[saves],
            max_steps=-1,
            max_epochs=2,
        )
        trainer.fit(module, **kwargs)

    whole = _Reader(seed=1)
    fit(whole)
    if how == "uninterrupted":
        return {"order": [step for step in whole.order if step[0] >= saved_at]}
    again = _Reader(seed=2)
    fit(again, ckpt_path=root / how / f"step={saved_at}.ckpt")
    return {"order": again.order}


def accelerate(layout: str, rank: int, root: Path, *, how: str) -> dict[str, Any]:
    """``use_stateful_dataloader``, saved in the first and in the second epoch."""
    try:
        return {
            f"order of epoch {epoch}": _accelerate(layout, root, how, epoch) for epoch in range(2)
        }
    finally:
        reset()


def _accelerate(layout: str, root: Path, how: str, saved_in: int) -> list[Any]:
    def start(seed: int) -> tuple[Any, Any]:
        config = DataLoaderConfiguration(use_stateful_dataloader=True)
        accelerator = new_accelerator(layout, dataloader_config=config)
        if how == "ours":
            accelerator.register_checkpoint_io(AccelerateIO(timeout_secs=300.0))
        torch.manual_seed(seed)
        loader = torch.utils.data.DataLoader(torch.arange(SAMPLES), batch_size=2, shuffle=True)
        return accelerator, accelerator.prepare(loader)

    path = str(root / f"{how}-{saved_in}")
    accelerator, loader = start(1)
    rest = []
    for epoch in range(saved_in + 1):
        for index, batch in enumerate(loader, start=1):
            if epoch == saved_in and index > SAVED_AT:
                rest.append(batch.tolist())
            if epoch == saved_in and index == SAVED_AT and how != "uninterrupted":
                accelerator.save_state(path)
    if how == "uninterrupted":
        return rest
    accelerator, loader = start(2)
    accelerator.load_state(path)
    return [batch.tolist() for batch in loader]


APIS = {"core": core, "lightning": lightning, "accelerate": accelerate}
