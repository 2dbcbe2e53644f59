"""What a user of one Trainer sees: which checkpoints there are, and what resumes from them."""
# ruff: noqa: ARG002 - the arguments of hooks are Lightning's

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812 - as its documents write it
import pytest
import torch
from lightning.pytorch.callbacks import LearningRateFinder, ModelCheckpoint
from lightning.pytorch.strategies import SingleDeviceStrategy

from dist_ckpt.errors import (
    CheckpointNotFoundError,
    IncompleteCheckpointError,
)
from dist_ckpt.training_state import (
    TrainingState,
    is_checkpoint,
    save_training_state,
)
from lightning_dist_ckpt import DistCkptIO, export_to_file, load_module
from tests.lightning._training import (
    Tiny,
    differences,
    loader,
    make_trainer,
    names,
    stored,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


LINKS_TO_ITSELF = tuple(map(int, L.__version__.split(".")[:2])) < (2, 6)
"""Whether ModelCheckpoint makes ``last.ckpt`` a link to itself, if a run that was resumed from this
link finds nothing better: Lightning 2.4 and 2.5 do, with files of their own, too."""


class Worsening(Tiny):
    """Its metric gets worse with every validation, but for the second: that is the best."""

    values = (3.0, 1.0, 4.0, 5.0)

    def validation_step(self, batch: torch.Tensor, index: int) -> None:
        self.log("loss", torch.tensor(self.values[self.current_epoch % 4]))


# -- ModelCheckpoint


@pytest.mark.parametrize("save_last", [True, "link"])
def test_top_k_and_last(tmp_path: Path, save_last: Any) -> None:
    """The best one and the last one are there, all others are gone; both load."""
    checkpoint = ModelCheckpoint(
        tmp_path, "e{epoch}", monitor="loss", save_top_k=1, save_last=save_last,
        auto_insert_metric_name=False,
    )  # fmt: skip
    trainer = make_trainer("single", tmp_path, callbacks=[checkpoint], max_steps=9)
    trainer.fit(Worsening(), loader(), loader())

    assert names(tmp_path) == {"e1.ckpt", "last.ckpt"}
    assert checkpoint.best_model_path == str(tmp_path / "e1.ckpt")
    assert (tmp_path / "last.ckpt").is_symlink() is (save_last == "link")
    assert all(is_checkpoint(path) for path in tmp_path.iterdir())

    again = make_trainer(
        "single", tmp_path, max_steps=12,
        callbacks=[ModelCheckpoint(tmp_path, monitor="loss", save_last=save_last)],
    )  # fmt: skip
    again.fit(Worsening(1), loader(), loader(), ckpt_path="last")

    assert again.global_step == 12
    assert (tmp_path / "last.ckpt").exists() or (save_last == "link" and LINKS_TO_ITSELF)


def test_what_a_link_resumed_from_is_kept(tmp_path: Path) -> None:
    """Better checkpoints do not remove the one that the run was resumed from through a link."""

    def checkpoint() -> ModelCheckpoint:
        return ModelCheckpoint(tmp_path, "{step}", monitor="step", mode="max", save_last="link",
                               every_n_train_steps=3)  # fmt: skip

    make_trainer("single", tmp_path, callbacks=[checkpoint()], max_steps=3).fit(Tiny(), loader())
    assert (tmp_path / "last.ckpt").resolve() == tmp_path / "step=3.ckpt"

    trainer = make_trainer("single", tmp_path, callbacks=[checkpoint()], max_steps=9)
    trainer.fit(Tiny(1), loader(), ckpt_path="last")

    # The new run leaves the old link alone and names its own differently: that is Lightning's way.
    assert names(tmp_path) == {"step=3.ckpt", "step=9.ckpt", "last.ckpt", "last-v1.ckpt"}
    assert (tmp_path / "last.ckpt").resolve() == tmp_path / "step=3.ckpt"
    assert (tmp_path / "last-v1.ckpt").resolve() == tmp_path / "step=9.ckpt"


def test_evaluation_loads_weights(run: Path, tmp_path: Path) -> None:
    """Validate, test and predict read the weights only, of any path and of the best."""
    module = load_module(Tiny, run / "step=3.ckpt")
    trainer = make_trainer("single", tmp_path)
    expected = trainer.validate(module, loader())
    batch = next(iter(loader()))

    for method in (trainer.validate, trainer.test):
        assert method(Tiny(5), loader(), ckpt_path=run / "step=3.ckpt") == expected
    predicted = trainer.predict(Tiny(5), loader(), ckpt_path=str(run / "step=3.ckpt"))
    assert torch.equal(predicted[0], module.net(batch))

    checkpoint = ModelCheckpoint(tmp_path, monitor="loss")
    trainer = make_trainer("single", tmp_path, callbacks=[checkpoint])
    trainer.fit(model := Worsening(), loader(), loader())
    trainer.validate(model, loader(), ckpt_path="best")
    best = load_module(Worsening, checkpoint.best_model_path)
    assert all(map(torch.equal, model.parameters(), best.parameters()))


def test_weights_only(tmp_path: Path) -> None:
    """Nothing of the optimizer is stored, and resuming says what Lightning says."""
    checkpoint = ModelCheckpoint(tmp_path, "w", save_weights_only=True)
    trainer = make_trainer("single", tmp_path, callbacks=[checkpoint])
    trainer.fit(Tiny(), loader())
    trainer.save_checkpoint(tmp_path / "again.ckpt", weights_only=True)

    for name in ("w.ckpt", "again.ckpt"):
        assert not [key for key in stored(tmp_path / name) if not key.startswith("models.")]
        trainer.validate(Tiny(1), loader(), ckpt_path=tmp_path / name)
        with pytest.raises(KeyError, match="Trying to restore optimizer state but checkpoint"):
            make_trainer("single", tmp_path).fit(Tiny(), loader(), ckpt_path=tmp_path / name)


def test_names_of_slurm(run: Path, tmp_path: Path) -> None:
    """The names that the requeueing handler uses are found again, the highest first."""
    trainer = make_trainer("single", tmp_path)
    trainer.fit(Tiny(), loader(), ckpt_path=run / "step=3.ckpt")
    connector = trainer._checkpoint_connector
    for _ in range(2):
        trainer.save_checkpoint(connector.hpc_save_path(tmp_path))

    assert names(tmp_path) == {"hpc_ckpt_1.ckpt", "hpc_ckpt_2.ckpt"}
    again = make_trainer("single", tmp_path, max_steps=9)
    again.fit(Tiny(), loader(), ckpt_path="hpc")
    assert again.global_step == 9
    assert again._checkpoint_connector._hpc_resume_path == str(tmp_path / "hpc_ckpt_2.ckpt")


@pytest.mark.parametrize("async_save", [False, True], ids=["waiting", "background"])
def test_learning_rate_finder(tmp_path: Path, *, async_save: bool) -> None:
    """Its temporary checkpoint is restored and removed."""

    class Tuned(Tiny):
        lr = 0.1

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=self.lr)

    finder = LearningRateFinder(num_training_steps=5, early_stop_threshold=None)
    io = DistCkptIO(async_save=async_save, worker="thread", timeout_secs=60)
    trainer = make_trainer(
        "single", tmp_path, plugins=[io], callbacks=[finder], enable_checkpointing=False
    )
    trainer.fit(model := Tuned(), loader(batches=6))

    assert finder.optimal_lr is not None
    assert float(model.net.count) == 6  # the steps of the search were taken back
    assert not names(tmp_path)


# -- whole files


def test_plain_file_and_back(run: Path, tmp_path: Path) -> None:
    """A directory as one file resumes in stock Lightning, and a stock file resumes in ours.

    Compared with a resume from the directory, not with the run that nobody interrupted: Lightning
    2.4 and 2.5 do not continue from the end of an epoch as if nothing had been.
    """
    export_to_file(run / "step=3.ckpt", tmp_path / "plain.ckpt")
    stock = make_trainer("single", tmp_path, plugins=None)
    stock.fit(Tiny(1), loader(), ckpt_path=tmp_path / "plain.ckpt")
    assert type(stock.strategy) is SingleDeviceStrategy
    stock.save_checkpoint(tmp_path / "stock.ckpt")
    ours = make_trainer("single", tmp_path, max_steps=6)
    ours.fit(Tiny(2), loader(), ckpt_path=tmp_path / "stock.ckpt")
    ours.save_checkpoint(tmp_path / "ours.ckpt")
    resumed = make_trainer("single", tmp_path, max_steps=6)
    resumed.fit(Tiny(3), loader(), ckpt_path=run / "step=3.ckpt")
    resumed.save_checkpoint(tmp_path / "resumed.ckpt")

    assert (tmp_path / "stock.ckpt").is_file()
    assert not differences(stored(tmp_path / "ours.ckpt"), stored(tmp_path / "resumed.ckpt"))
    module = Tiny.load_from_checkpoint(tmp_path / "plain.ckpt")
    other = load_module(Tiny, run / "step=3.ckpt", seed=7)
    assert all(map(torch.equal, module.parameters(), other.parameters()))
    assert (module.hparams.seed, other.hparams.seed) == (0, 7)


def test_a_file_in_the_way_is_replaced(run: Path, tmp_path: Path) -> None:
    """A stock checkpoint of the same name, or a link to one, gives way; what it points to stays."""
    target = tmp_path / "last.ckpt"
    export_to_file(run / "step=3.ckpt", target)
    trainer = make_trainer("single", tmp_path)
    trainer.fit(Tiny(), loader(), ckpt_path=target)
    trainer.save_checkpoint(target)
    link = tmp_path / "link.ckpt"
    link.symlink_to(target)
    trainer.save_checkpoint(link)

    assert is_checkpoint(target)
    assert is_checkpoint(link)
    assert not link.is_symlink()


def test_direct_calls(tmp_path: Path) -> None:
    """By itself the plugin keeps any dict, for one process."""
    io = DistCkptIO()
    value = {"state_dict": {"a": torch.arange(3)}, "epoch": 4, "names": ("x", None)}
    io.save_checkpoint(value, tmp_path / "one.ckpt")
    loaded = io.load_checkpoint(tmp_path / "one.ckpt")

    assert torch.equal(loaded["state_dict"].pop("a"), torch.arange(3))
    assert loaded == {"state_dict": {}, "epoch": 4, "names": ("x", None)}
    io.remove_checkpoint(tmp_path / "one.ckpt")
    assert not names(tmp_path)
    with pytest.raises(FileNotFoundError):
        io.load_checkpoint(tmp_path / "one.ckpt")


# -- other frameworks


def test_checkpoint_of_another_framework(tmp_path: Path) -> None:
    """Model, optimizer, scheduler and step are restored, with a warning about the rest."""
    model = Tiny(3)
    [optimizer], [config] = model.configure_optimizers()
    for _ in range(4):
        model.training_step(next(iter(loader())), 0).backward()
        optimizer.step()
        config["scheduler"].step()
    state = TrainingState(
        models=[model],
        optimizers=[optimizer],
        common={"schedulers": [config["scheduler"].state_dict()], "step": 4, "accelerate": {}},
        framework="accelerate",
    )
    save_training_state(tmp_path / "a", state)

    trainer = make_trainer("single", tmp_path, max_steps=4)
    with pytest.warns(UserWarning, match="was saved by accelerate"):
        trainer.fit(Tiny(), loader(), ckpt_path=tmp_path / "a")
    assert trainer.global_step == 4
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == 4
    trainer.save_checkpoint(tmp_path / "b")
    assert not differences(stored(tmp_path / "a"), stored(tmp_path / "b"))

    trainer = make_trainer("single", tmp_path, max_steps=6)
    trainer.fit(module := Tiny(), loader(), ckpt_path=tmp_path / "a")
    assert trainer.global_step == 6
    assert float(module.net.count) == 6


def test_half_a_checkpoint(run: Path, tmp_path: Path) -> None:
    """A directory without its marker, or nothing at all, is a clear error."""
    trainer = make_trainer("single", tmp_path)
    trainer.fit(Tiny(), loader())
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    (tmp_path / "half.ckpt" / "metadata.json").unlink()

    with pytest.raises(IncompleteCheckpointError):
        trainer.validate(Tiny(), loader(), ckpt_path=tmp_path / "half.ckpt")
    with pytest.raises(CheckpointNotFoundError):
        trainer.validate(Tiny(), loader(), ckpt_path=tmp_path / "nothing.ckpt")
