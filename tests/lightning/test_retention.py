"""What is removed, and when: not the last good checkpoint, and not what a live save is making."""

from __future__ import annotations

import os
from pathlib import Path
from signal import SIGKILL
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from dist_ckpt import recovery
from dist_ckpt._saving import save as saving
from lightning_dist_ckpt import _retention
from tests._damage import data_file
from tests._peaks import Peak
from tests.lightning._flight import make_async, visible
from tests.lightning._resumes import keeping, resume, train
from tests.lightning._training import Tiny, loader, make_trainer
from tests.multiprocess._world import run_ranks

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


class Falling(Tiny):
    """Its score gets better with each step."""

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        loss = super().training_step(batch, index)
        self.log("score", torch.tensor(-float(self.global_step)))
        return loss


class Torn(ModelCheckpoint):
    """Its checkpoint of step 6 is damaged as soon as it is there."""

    def _save_checkpoint(self, trainer: Any, filepath: str) -> None:
        super()._save_checkpoint(trainer, filepath)
        if trainer.global_step == 6:
            data_file(Path(filepath)).write_bytes(b"")


def test_the_last_good_one_is_not_removed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With ``save_top_k=1`` the old one goes when the new one is seen to be whole."""
    checkpoint = Torn(tmp_path, "{step}", every_n_train_steps=3)
    trainer = make_trainer("single", tmp_path, max_steps=6, callbacks=[checkpoint])
    trainer.fit(Tiny(), loader())

    assert visible(tmp_path) == {"step=3.ckpt", "step=6.ckpt"}
    assert any("step=3.ckpt is kept" in one for one in caplog.messages)

    trainer = resume(tmp_path, save_last=False, save_top_k=1)
    assert trainer.ckpt_path == str(tmp_path / "step=3.ckpt")
    assert trainer.global_step == 12
    assert visible(tmp_path) == {"step=3.ckpt", "step=12.ckpt"}  # what was resumed from is spared


def test_the_last_good_one_is_not_removed_in_the_background(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """There, too, one looks at what stays, when it is committed."""
    monkeypatch.setattr(_retention, "_is_good", lambda path: path.name == "step=9.ckpt")
    checkpoint = keeping(tmp_path, save_top_k=1, save_last=False)
    trainer = make_async("single", tmp_path, max_steps=9, callbacks=[checkpoint])
    trainer.fit(Tiny(), loader())

    assert visible(tmp_path) == {"step=3.ckpt", "step=9.ckpt"}
    assert [one for one in caplog.messages if "kept" in one] == [
        f"{tmp_path}/step=3.ckpt is kept: none of the 1 checkpoint(s) that stay is good."
    ]


def test_dead_saves_are_swept_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first save of a Trainer looks for what dead ones left; a failure to do so is no matter."""
    swept = []

    def sweep(folder: Path, *, older_than_secs: float) -> None:
        swept.append((folder, older_than_secs))
        raise OSError(5, "a test")

    monkeypatch.setattr(recovery, "sweep", sweep)
    resume(tmp_path, None, io={"sweep_after_secs": 60.0})

    assert swept == [(tmp_path, 60.0)]


def kill(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), SIGKILL)


def die_in_a_save(rank: int, world_size: int, root: str) -> None:
    """Be killed while files are written."""
    with mock.patch.object(saving, "write_part", kill):
        train(root)


def test_what_a_killed_save_left_is_removed(tmp_path: Path) -> None:
    """Not while it is young; then by the first save, as the process that made it is gone."""
    run_ranks(die_in_a_save, 1, str(tmp_path), expect_errors=True)
    left = {path.suffix for path in tmp_path.iterdir()}
    assert left == {".attempt", ".owner"}

    resume(tmp_path)
    assert {path.suffix for path in tmp_path.glob(".*")} == left
    resume(tmp_path, None, io={"sweep_after_secs": 0.001})
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("save_last", [True, "link", False], ids=str)
@pytest.mark.parametrize("top_k", [1, 2])
def test_background_saves_need_no_more_of_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, top_k: int, save_last: Any
) -> None:
    """At most as many copies are there at once as in a run that waits for each save."""
    peaks = []
    for make, io in ((make_trainer, ()), (make_async, ({"worker": "thread"},))):
        root = tmp_path / make.__name__
        checkpoint = ModelCheckpoint(
            root / "c", "{step}", monitor="score", save_top_k=top_k, save_last=save_last,
            every_n_train_steps=1,
        )  # fmt: skip
        with monkeypatch.context() as patch:
            peak = Peak(root, patch)
            make("single", root, *io, max_steps=4, callbacks=[checkpoint]).fit(Falling(), loader())
        one = sum(file.stat().st_size for file in (root / "c").glob("step=4.ckpt/*"))
        peaks.append(peak.nbytes / one)
    assert peaks[1] <= peaks[0] + 0.1
    assert round(peaks[0]) == top_k + (2 if save_last is True else 1)
