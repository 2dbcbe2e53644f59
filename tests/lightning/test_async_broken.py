"""Saving in the background where it was broken: what a user of Lightning met."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import LearningRateFinder, ModelCheckpoint

from dist_ckpt.errors import AsyncSaveError
from dist_ckpt.training_state import is_checkpoint
from tests.lightning._flight import At, Gate, copy_late, make_async
from tests.lightning._training import Tiny, loader


class TinyLR(Tiny):
    """A module with a learning rate to tune."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.lr = 0.05


class FindInTheMiddle(LearningRateFinder):
    """Looks for a learning rate before the second epoch, as Lightning's documents show it."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Not yet."""

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 1:
            self.lr_find(trainer, pl_module)


def test_after_a_search_for_a_learning_rate(tmp_path: Path) -> None:
    """The fit within the fit ends; saves go on in the background all the same."""
    seen: list[bool] = []

    def look(trainer: Any) -> None:
        seen.append(trainer.strategy.dist_ckpt_binding.saves.is_training)

    trainer = make_async(
        "single",
        tmp_path,
        callbacks=[FindInTheMiddle(num_training_steps=4, update_attr=False), At(batch_end=look)],
    )
    trainer.fit(TinyLR(), loader())

    assert seen == [True] * 6


def test_a_callback_is_pickled_while_it_is_watched(tmp_path: Path) -> None:
    """A copy is of the class that can be imported, and knows what the callback knows."""
    checkpoint = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1)
    copies: list[Any] = []
    hook = At(batch_end=lambda _: copies.append(pickle.loads(pickle.dumps(checkpoint))))
    make_async("single", tmp_path, callbacks=[checkpoint, hook], max_steps=2).fit(Tiny(), loader())

    assert [type(one) for one in copies] == [ModelCheckpoint] * 2
    assert copies[1].best_model_path == str(tmp_path / "step=1.ckpt")


@pytest.mark.parametrize(("failing", "known"), [("step=1", ""), ("step=2", "last.ckpt")])
def test_a_link_to_a_save_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str, known: str
) -> None:
    """The callback names no link that was never made."""
    gate = Gate(monkeypatch)
    gate.failing = (failing,)
    checkpoint = ModelCheckpoint(
        tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1, save_last="link"
    )
    trainer = make_async("single", tmp_path, {"worker": "thread"}, callbacks=[gate, checkpoint])
    with pytest.raises(AsyncSaveError, match=failing):
        trainer.fit(Tiny(), loader())

    assert checkpoint.last_model_path == (known and str(tmp_path / known))
    assert (tmp_path / "last.ckpt").exists() == bool(known)


class SavesInItsStep(Tiny):
    """A module that saves while its optimizer's step has begun: that calls ``training_step``."""

    def training_step(self, batch: Any, index: int) -> Any:
        if self.trainer.global_step == 1:
            self.trainer.save_checkpoint(Path(self.trainer.default_root_dir, "a.ckpt"))
        return super().training_step(batch, index)


def test_the_first_save_comes_within_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step that has begun waits for the copy of that save, too."""
    copy_late(monkeypatch)
    make_async("single", tmp_path, {"overlap": True}).fit(SavesInItsStep(), loader())

    assert is_checkpoint(tmp_path / "a.ckpt")
