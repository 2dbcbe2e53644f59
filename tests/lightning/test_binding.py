"""Which Trainers are bound, to which strategies, and what is refused."""
# ruff: noqa: ARG002 - the arguments of hooks are Lightning's

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.strategies import DeepSpeedStrategy, SingleDeviceStrategy
from torch import nn

import lightning_dist_ckpt.io as plugin
from dist_ckpt.errors import (
    ConfigError,
)
from dist_ckpt.training_state import (
    is_checkpoint,
)
from lightning_dist_ckpt import DistCkptIO, load_module
from lightning_dist_ckpt._bind import bind
from lightning_dist_ckpt.binding import lightning_callbacks, pytorch_lightning_callbacks
from tests.lightning._training import (
    Tiny,
    every_3_steps,
    loader,
    make_trainer,
    names,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@pytest.fixture
def no_other_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the plugins that other tests left to the garbage collector."""
    monkeypatch.setattr(plugin, "_LIVE", weakref.WeakSet())


@pytest.mark.usefixtures("no_other_plugin")
def test_trainers_without_the_plugin_stay_untouched(tmp_path: Path) -> None:
    """No callback is added while no plugin exists; a bound Trainer keeps its class's name."""
    assert lightning_callbacks() == pytorch_lightning_callbacks() == []
    trainer = make_trainer("single", tmp_path, plugins=None)
    assert not [cb for cb in trainer.callbacks if "DistCkpt" in type(cb).__name__]

    io = DistCkptIO()
    assert len(lightning_callbacks()) == len(pytorch_lightning_callbacks()) == 1
    bind(trainer)
    assert type(trainer.strategy) is SingleDeviceStrategy
    bound = make_trainer("single", tmp_path, plugins=[io])
    for _ in range(2):
        bind(bound)
    assert type(bound.strategy).__mro__[1] is SingleDeviceStrategy
    assert type(bound.strategy).__name__ == "SingleDeviceStrategy"


@pytest.mark.usefixtures("no_other_plugin")
def test_switched_off(tmp_path: Path) -> None:
    """``enabled=False`` is stock Lightning: files, its class, no callback."""
    io = DistCkptIO(enabled=False)
    assert lightning_callbacks() == []
    trainer = make_trainer("single", tmp_path, plugins=[io], callbacks=[every_3_steps(tmp_path)])
    trainer.fit(Tiny(), loader())

    assert type(trainer.strategy) is SingleDeviceStrategy
    assert (tmp_path / "step=3.ckpt").is_file()
    assert set(torch.load(tmp_path / "step=3.ckpt")) >= {"state_dict", "optimizer_states", "loops"}
    trainer.fit(Tiny(), loader(), ckpt_path=tmp_path / "step=3.ckpt")
    trainer.strategy.remove_checkpoint(tmp_path / "step=3.ckpt")
    assert names(tmp_path) == {"step=6.ckpt"}


def test_unsupported_strategies(tmp_path: Path) -> None:
    """DeepSpeed is refused when the Trainer is bound, not silently ignored."""
    trainer = make_trainer("single", tmp_path)
    trainer.strategy.__class__ = type("Mine", (SingleDeviceStrategy,), {})
    bind(trainer)  # a user's own subclass is fine

    class Deep(DeepSpeedStrategy):
        def __init__(self) -> None:
            self._checkpoint_io = DistCkptIO()

    class Owner:
        strategy = Deep()

    with pytest.raises(ConfigError, match="does not support Deep"):
        bind(Owner())


@pytest.mark.parametrize(
    ("async_save", "hint"),
    [(False, "Use DistCkptIO.async_save=True."), (True, "in the background already")],
)
def test_plugins_around_it(tmp_path: Path, hint: str, *, async_save: bool) -> None:
    """A wrapping plugin is gone past, and that is said."""
    io = DistCkptIO(async_save=async_save, worker="thread")
    trainer = make_trainer("single", tmp_path, plugins=[AsyncCheckpointIO(io)])
    expected = f"AsyncCheckpointIO around DistCkptIO has no effect.*{hint}"
    with pytest.warns(UserWarning, match=expected):
        trainer.fit(Tiny(), loader())
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    assert is_checkpoint(tmp_path / "x.ckpt")


def test_bad_targets(tmp_path: Path) -> None:
    """URLs and options for a single save are refused with a reason."""
    trainer = make_trainer("single", tmp_path)
    trainer.fit(Tiny(), loader())

    with pytest.raises(ConfigError, match="s3://"):
        trainer.save_checkpoint("s3://bucket/x.ckpt")
    with pytest.raises(ConfigError, match="storage_options"):
        trainer.save_checkpoint(tmp_path / "x", storage_options={"a": 1})
    with pytest.raises(ConfigError, match="s3://"):
        DistCkptIO().save_checkpoint({}, "s3://bucket/x.ckpt")


def test_the_other_name_of_lightning(run: Path, tmp_path: Path) -> None:
    """``pytorch_lightning`` has classes of its own, and works the same."""
    import pytorch_lightning as pl
    from pytorch_lightning.callbacks import ModelCheckpoint

    class Small(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(5, 2)

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            return self.net(batch).mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters())

    def trainer(steps: int) -> Any:
        return pl.Trainer(
            accelerator="cpu", devices=1, max_steps=steps, logger=False, default_root_dir=tmp_path,
            enable_progress_bar=False, enable_model_summary=False,
            plugins=[DistCkptIO(async_save=steps > 3, worker="thread")],
            callbacks=[ModelCheckpoint(tmp_path / f"{steps}", "{step}", save_last="link")],
        )  # fmt: skip

    first = trainer(3)
    first.fit(Small(), loader())
    first.save_checkpoint(tmp_path / "pl.ckpt")
    again = trainer(6)
    again.fit(module := Small(), loader(), ckpt_path=tmp_path / "pl.ckpt")

    assert again.global_step == 6
    assert names(tmp_path / "6") == {"step=6.ckpt", "last.ckpt"}
    assert type(again.checkpoint_callback) is ModelCheckpoint
    assert is_checkpoint(tmp_path / "6" / "last.ckpt")
    assert is_checkpoint(tmp_path / "pl.ckpt")
    assert load_module(Small, tmp_path / "pl.ckpt").net.weight.shape == module.net.weight.shape
