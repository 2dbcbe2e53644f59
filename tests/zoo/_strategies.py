"""A Lightning strategy of a user's own, in the shape of NeMo's, that saves and loads by itself.

Here: one function like those of ``_apis.py``: each rank holds parameters of its own, which only the
strategy knows. Not here: what else is refused at bind (tests/lightning/test_contract.py).
"""
# ruff: noqa: ARG002 - the arguments of hooks are Lightning's

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812 - as its documents write it
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import nn

from lightning_dist_ckpt import DistCkptIO
from tests.lightning._training import make_trainer
from tests.zoo._pictures import state_picture


class OwnPartStrategy(DDPStrategy):
    """The model is not wrapped, and each rank has a file."""

    def configure_ddp(self) -> None:
        pass

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    def save_checkpoint(self, checkpoint: Any, filepath: Any, storage_options: Any = None) -> None:
        torch.save(checkpoint, f"{filepath}.rank{self.global_rank}")

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> Any:
        return torch.load(f"{checkpoint_path}.rank{self.global_rank}", weights_only=False)


class _OwnPart(L.LightningModule):
    def __init__(self, rank: int, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed + rank)
        self.net = nn.Linear(4, 4)

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def lightning(layout: str, rank: int, root: Path, *, how: str) -> dict[str, Any]:
    """Trainer.save_checkpoint and fit(ckpt_path=...) with that strategy."""

    def fit(module: _OwnPart, steps: int, path: Any = None) -> Any:
        trainer = make_trainer(
            layout,
            root,
            strategy=OwnPartStrategy(),
            plugins=[DistCkptIO(timeout_secs=300.0)] if how == "ours" else None,
            max_steps=steps,
        )
        trainer.fit(module, data, ckpt_path=path, weights_only=False)
        return trainer

    data = torch.utils.data.DataLoader(torch.arange(48.0).view(12, 4))
    module = _OwnPart(rank, seed=1)
    if how == "uninterrupted":
        trainer = fit(module, 5)
        return state_picture(module, trainer.optimizers[0])
    fit(module, 3).save_checkpoint(root / how)
    again = _OwnPart(rank, seed=10)
    trainer = fit(again, 5, root / how)
    return state_picture(again, trainer.optimizers[0])


APIS = {"lightning": lightning}
