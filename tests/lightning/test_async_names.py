"""Which names there are, and what ModelCheckpoint knows, while saves are in flight."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger

from dist_ckpt.errors import AsyncSaveError, StorageError
from dist_ckpt.training_state import is_checkpoint
from tests.faults._leaks import no_leaks
from tests.lightning._flight import (
    At,
    Gate,
    copy_late,
    make_async,
    saver_of,
    visible,
    wait_until_idle,
)
from tests.lightning._training import Tiny, differences, loader, make_trainer, stored

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

THREAD = {"worker": "thread", "max_in_flight": 4}


class Scored(Tiny):
    """Its metric is the best at the second step, and gets worse after the fourth."""

    values = (3.0, 1.0, 2.0, 1.5, 4.0, 5.0, 6.0)

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        loss = super().training_step(batch, index)
        self.log("score", torch.tensor(self.values[self.global_step]))
        return loss


def knowledge(checkpoint: ModelCheckpoint, folder: Path) -> dict[str, Any]:
    """Return what a callback remembers, without the folder."""
    state = checkpoint.state_dict()
    return {
        "best": Path(state["best_model_path"]).name,
        "last": Path(state["last_model_path"]).name,
        "top": {Path(path).name: float(one) for path, one in state["best_k_models"].items()},
        "score": None if state["best_model_score"] is None else float(state["best_model_score"]),
        "folder": state["dirpath"] == str(folder),
    }


def listing(folder: Path) -> dict[str, str]:
    """Return names with what they are: a directory, or where a link leads."""
    return {
        path.name: str(path.readlink()) if path.is_symlink() else "directory"
        for path in folder.iterdir()
    }


TRIGGERS: dict[str, dict[str, Any]] = {
    "steps": {"every_n_train_steps": 1},
    "epochs": {"every_n_epochs": 1, "save_on_train_epoch_end": True},
}


@pytest.mark.parametrize("trigger", TRIGGERS)
@pytest.mark.parametrize("save_last", [True, "link", False], ids=str)
@pytest.mark.parametrize("top_k", [1, 2, -1])
def test_as_if_saves_were_not_in_flight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, top_k: int, save_last: Any, trigger: str
) -> None:
    """Names, links, contents and memory are those of a run that waits for each save."""
    found = []
    for kind in ("sync", "async"):
        folder = tmp_path / kind
        checkpoint = ModelCheckpoint(
            folder, "best", monitor="score", save_top_k=top_k, save_last=save_last,
            **TRIGGERS[trigger],
        )  # fmt: skip
        if kind == "sync":
            trainer = make_trainer("single", tmp_path, callbacks=[checkpoint])
        else:
            gate = Gate(monkeypatch)
            trainer = make_async("single", tmp_path, THREAD, callbacks=[gate, checkpoint])
        trainer.fit(Scored(), loader(batches=2))
        assert is_checkpoint(checkpoint.best_model_path)
        assert type(checkpoint) is ModelCheckpoint
        found.append((listing(folder), knowledge(checkpoint, folder)))

    assert found[0] == found[1]
    for name in found[0][0]:
        assert not differences(stored(tmp_path / "sync" / name), stored(tmp_path / "async" / name))


@pytest.mark.parametrize("save_last", [True, "link"], ids=str)
def test_names_that_count_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save_last: Any
) -> None:
    """Two callbacks with the same names in one folder keep apart what is in flight."""
    found = []
    for kind in ("sync", "async"):
        folder = tmp_path / kind
        callbacks = [
            ModelCheckpoint(folder, "x", save_last=save_last, every_n_train_steps=n)
            for n in (2, 3)
        ]  # fmt: skip
        if kind == "sync":
            trainer = make_trainer("single", tmp_path, callbacks=[*callbacks])
        else:
            # Six in flight would be more than there is memory for while the gate is closed.
            trainer = make_async("single", tmp_path, {"worker": "thread"}, callbacks=[*callbacks])
        trainer.fit(Tiny(), loader())
        found.append((listing(folder), [knowledge(one, folder) for one in callbacks]))

    assert found[0] == found[1]


def test_without_a_metric(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest is kept; the link never leads to nothing, not even between two batches."""
    folder = tmp_path / "c"
    link = folder / "last.ckpt"
    seen = []

    def look(trainer: Any) -> None:
        if os.path.lexists(link):
            assert is_checkpoint(link)
            seen.append(str(link.readlink()))

    checkpoint = ModelCheckpoint(folder, "{step}", save_last="link", every_n_train_steps=1)
    events = tmp_path / "events.jsonl"
    trainer = make_async(
        "single", tmp_path,
        {"worker": "thread", "max_in_flight": 2, "events_file": str(events)},
        callbacks=[Gate(monkeypatch), At(batch_start=look, batch_end=look), checkpoint],
    )  # fmt: skip
    trainer.fit(Tiny(), loader())

    assert listing(folder) == {"step=6.ckpt": "directory", "last.ckpt": "step=6.ckpt"}
    assert checkpoint.best_model_path == str(folder / "step=6.ckpt")
    assert seen == sorted(seen)
    told = [json.loads(line) for line in events.read_text().splitlines()]
    pruned = [Path(one["path"]).name for one in told if one["event"] == "Pruned"]
    assert pruned == [f"step={n}.ckpt" for n in range(1, 6)]


def failure_of(trainer: Any) -> str:
    """Fit, and return what fails; not the exception: its traceback holds what the frames held."""
    try:
        trainer.fit(Tiny(), loader())
    except AsyncSaveError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("save_last", [True, "link"], ids=str)
def test_a_save_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save_last: Any) -> None:
    """What it would have replaced stays, the link too, and the callback knows what it knew."""
    folder = tmp_path / "c"
    checkpoint = ModelCheckpoint(
        folder, "{step}", monitor="step", mode="max", save_last=save_last, every_n_train_steps=2
    )
    gate = Gate(monkeypatch)

    gate.failing = ("step=4.ckpt",)

    def pass_and_end(trainer: Any) -> None:
        gate.let_pass(trainer)
        wait_until_idle(trainer)

    gate.hooks["batch_start"] = pass_and_end
    trainer = make_async(
        "single", tmp_path, {"worker": "thread", "max_in_flight": 2},
        callbacks=[gate, checkpoint], max_steps=8,
    )  # fmt: skip
    with no_leaks(tmp_path):
        told = failure_of(trainer)

    assert "step=4.ckpt failed" in told
    assert "No space left" in told
    assert trainer.global_step == 4
    assert visible(folder) == {"step=2.ckpt", "last.ckpt"}
    assert is_checkpoint(folder / "last.ckpt")
    if save_last == "link":
        assert (folder / "last.ckpt").readlink() == Path("step=2.ckpt")
    assert knowledge(checkpoint, folder) == {
        "best": "step=2.ckpt", "last": "last.ckpt", "top": {"step=2.ckpt": 2.0}, "score": 2.0,
        "folder": True,
    }  # fmt: skip
    assert is_checkpoint(checkpoint.best_model_path)

    gate.failing = ()
    gate.close()
    trainer.fit(Tiny(), loader(), ckpt_path=checkpoint.best_model_path)
    assert visible(folder) >= {"step=8.ckpt", "last.ckpt"}
    assert checkpoint.best_model_path == str(folder / "step=8.ckpt")


def test_loading_what_is_in_flight(tmp_path: Path) -> None:
    """A load in the middle of a fit waits for saves, and for the link that leads to them."""
    folder = tmp_path / "c"
    seen = []

    def load(trainer: Any) -> None:
        if trainer.global_step == 4:
            trainer.save_checkpoint(folder / "mine.ckpt")
            seen.append(trainer.strategy.load_checkpoint(folder / "mine.ckpt")["global_step"])
            seen.append(trainer.strategy.load_checkpoint(folder / "last.ckpt")["global_step"])

    checkpoint = ModelCheckpoint(folder, "{step}", save_last="link", every_n_train_steps=1)
    make_async(
        "single", tmp_path, {"worker": "thread"}, callbacks=[At(batch_end=load), checkpoint]
    ).fit(Tiny(), loader())

    assert seen == [4, 3]


def test_two_saves_to_one_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that was asked for last is there, also if a removal of that name was queued."""
    target = tmp_path / "same.ckpt"
    gate = Gate(monkeypatch)

    def save(trainer: Any) -> None:
        trainer.save_checkpoint(target)
        if trainer.global_step == 3:
            trainer.strategy.remove_checkpoint(target)
            trainer.save_checkpoint(target)

    trainer = make_async(
        "single", tmp_path, {"worker": "thread", "max_in_flight": 2}, max_steps=4,
        callbacks=[gate, At(batch_end=save)], enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(Tiny(), loader())
    expected = make_trainer("single", tmp_path, max_steps=4)
    expected.fit(Tiny(), loader())
    expected.save_checkpoint(tmp_path / "expected.ckpt")

    assert visible(tmp_path) == {"same.ckpt", "expected.ckpt"}
    assert not differences(stored(target), stored(tmp_path / "expected.ckpt"))


def test_requeueing_and_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save for SLURM is done when it returns, whatever became of those before; also after fit."""
    gate = Gate(monkeypatch)
    gate.failing = ("bad.ckpt",)
    seen = []

    def requeue(trainer: Any) -> None:
        if trainer.global_step == 3:
            trainer.save_checkpoint(tmp_path / "good.ckpt")
            trainer.save_checkpoint(tmp_path / "bad.ckpt")
            gate.open(trainer)
            path = trainer._checkpoint_connector.hpc_save_path(tmp_path)
            trainer.save_checkpoint(path)
            seen.extend((is_checkpoint(path), visible(tmp_path)))

    trainer = make_async(
        "single", tmp_path, {"worker": "thread", "max_in_flight": 2},
        callbacks=[gate, At(batch_end=requeue)], enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(Tiny(), loader())
    assert seen == [True, {"good.ckpt", "hpc_ckpt_1.ckpt"}]

    trainer.save_checkpoint(tmp_path / "after.ckpt")
    assert is_checkpoint(tmp_path / "after.ckpt")


class Watching(CSVLogger):
    """Looks at what it is told of."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.told: list[bool] = []
        self.rows: list[tuple[int, dict[str, float]]] = []

    def after_save_checkpoint(self, checkpoint_callback: ModelCheckpoint) -> None:
        self.told.append(is_checkpoint(checkpoint_callback.best_model_path))

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        if any(name.startswith("checkpoint/") for name in metrics):
            self.rows.append((step or 0, metrics))
        super().log_metrics(metrics, step)


@pytest.mark.parametrize("log_metrics", [True, False], ids=["told", "not-told"])
def test_loggers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, log_metrics: bool) -> None:
    """They get the numbers of each save at its step, and hear of checkpoints that are there."""
    logger = Watching(tmp_path / "logs")
    trainer = make_async(
        "single", tmp_path, {"worker": "thread", "log_metrics": log_metrics}, logger=logger,
        callbacks=[Gate(monkeypatch), ModelCheckpoint(tmp_path / "c", every_n_train_steps=2)],
    )  # fmt: skip
    trainer.fit(Tiny(), loader())

    assert logger.told == [True] * len(logger.told) != []
    assert [step for step, _ in logger.rows] == ([2, 4, 6] if log_metrics else [])
    for _, values in logger.rows:
        assert values.keys() == {
            f"checkpoint/{name}" for name in ("stall_secs", "write_secs", "gb_per_sec")
        }
        assert all(value > 0 for value in values.values())


def told_in(file: Path) -> list[tuple[Any, ...]]:
    """Return name, checkpoint, save and written bytes of each event, save by save; then removals."""
    events = [json.loads(line) for line in file.read_text().splitlines()]
    events.sort(key=lambda one: one["event"] == "Pruned")
    return [
        (
            one["event"],
            Path(one["path"]).name,
            0 if one["event"] == "Pruned" else one["save"],
            None if one["event"] == "Staged" else one.get("nbytes"),
        )
        for one in events
    ]


def test_saves_that_block_tell_the_same(tmp_path: Path) -> None:
    """File of events and loggers hear of each save and removal; also of one that fails."""
    files, rows = [], []
    for is_async in (False, True):
        folder = tmp_path / str(is_async)
        logger = Watching(folder / "logs")
        files.append(folder / "events.jsonl")
        make_async(
            "single", folder,
            {"async_save": is_async, "worker": "thread", "events_file": str(files[-1])},
            callbacks=[ModelCheckpoint(folder / "c", "{step}", every_n_train_steps=2)],
            logger=logger,
        ).fit(Tiny(), loader())  # fmt: skip
        rows.append([(step, set(values)) for step, values in logger.rows])
        assert all(value > 0 for _, values in logger.rows for value in values.values())
    blocking, background = map(told_in, files)
    assert blocking == background
    assert [one[0] for one in blocking[4:8]] == ["SaveStarted", "Staged", "Written", "Committed"]
    assert [one[1] for one in blocking if one[0] == "Pruned"] == ["step=2.ckpt", "step=4.ckpt"]
    assert rows[0] == rows[1]
    assert [step for step, _ in rows[0]] == [2, 4, 6]


def test_a_save_that_blocks_and_fails_is_told(tmp_path: Path) -> None:
    """As Failed, with the phase; a logger that fails is no reason."""

    class Full(CSVLogger):
        def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
            raise OSError(f"no room for {metrics} of {step}")

    events = tmp_path / "events.jsonl"
    trainer = make_async(
        "single", tmp_path, {"async_save": False, "events_file": str(events)}, max_steps=1,
        enable_checkpointing=False, logger=Full(tmp_path / "logs"),
    )  # fmt: skip
    trainer.fit(Tiny(), loader())
    trainer.save_checkpoint(tmp_path / "good.ckpt")
    with (
        mock.patch("dist_ckpt.storage.local.LocalStore.write", side_effect=StorageError("full")),
        pytest.raises(StorageError),
    ):
        trainer.save_checkpoint(tmp_path / "bad.ckpt")
    told = [json.loads(line) for line in events.read_text().splitlines()]
    assert [one["event"] for one in told] == [
        "SaveStarted", "Staged", "Written", "Committed", "SaveStarted", "Staged", "Failed",
    ]  # fmt: skip
    assert [one["save"] for one in told] == [1] * 4 + [2] * 3
    assert told[-1]["phase"] == "writing"


class Own(ModelCheckpoint):
    """Counts in a method that a fit gives to Lightning's own class only."""

    saved = 0

    def _save_checkpoint(self, trainer: Any, filepath: str) -> None:
        super()._save_checkpoint(trainer, filepath)
        self.saved += 1


def test_a_callback_of_ones_own(tmp_path: Path) -> None:
    """What a subclass does at a save is still done, and it has its class back afterwards."""
    checkpoint = Own(tmp_path / "c", "{step}", every_n_train_steps=2, save_last="link")
    make_async("single", tmp_path, {"worker": "thread"}, callbacks=[checkpoint]).fit(
        Tiny(), loader()
    )

    assert checkpoint.saved == 3
    assert type(checkpoint) is Own
    assert listing(tmp_path / "c") == {"step=6.ckpt": "directory", "last.ckpt": "step=6.ckpt"}


def test_copies_end_before_weights_are_exchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With overlap, no callback of an epoch, a validation or the end runs while a copy goes on."""
    copy_late(monkeypatch)
    going_on: dict[str, int] = dict.fromkeys(("epoch_start", "validation_start", "train_end"), 0)
    seen: dict[str, int] = {}

    def look(name: str) -> Any:
        def hook(trainer: Any) -> None:
            submitted = saver_of(trainer)._queue.submitted
            busy = sum(one.task is not None and not one.task.is_done for one in submitted)
            seen[name] = seen.get(name, 0) + busy

        return hook

    checkpoint = ModelCheckpoint(tmp_path / "c", every_n_train_steps=1)
    trainer = make_async(
        "single", tmp_path, {"overlap": True, "worker": "thread"},
        callbacks=[At(**{name: look(name) for name in (*going_on, "batch_start")}), checkpoint],
    )  # fmt: skip
    trainer.fit(Tiny(), loader(), loader())

    assert "DistCkpt" in type(trainer.callbacks[0]).__name__
    assert seen.pop("batch_start") > 0
    assert seen == going_on


AVERAGES: dict[str, Any] = {
    "none": At,
    "ema": lambda: EMAWeightAveraging(decay=0.5),
    "swa": lambda: StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1),
}


@pytest.mark.parametrize("average", AVERAGES)
def test_copies_at_the_last_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, average: str
) -> None:
    """With overlap, what is stored is the state at the call, also if callbacks exchange weights."""
    copy_late(monkeypatch)

    def checkpoint(kind: str) -> ModelCheckpoint:
        return ModelCheckpoint(tmp_path / kind, "{step}", every_n_train_steps=1, save_top_k=-1)

    settings: dict[str, Any] = {"max_steps": -1, "max_epochs": 3}
    waiting = make_trainer(
        "single", tmp_path, callbacks=[AVERAGES[average](), checkpoint("sync")], **settings
    )
    waiting.fit(Tiny(), loader(), loader())
    trainer = make_async(
        "single", tmp_path, {"overlap": True, "worker": "thread"},
        callbacks=[AVERAGES[average](), checkpoint("async")], **settings,
    )  # fmt: skip
    trainer.fit(Tiny(), loader(), loader())

    assert visible(tmp_path / "sync") == visible(tmp_path / "async")
    assert len(visible(tmp_path / "sync")) == 9
    for path in (tmp_path / "sync").iterdir():
        assert not differences(stored(path), stored(tmp_path / "async" / path.name)), path.name


class Broken(Tiny):
    """Fails before it trains."""

    def configure_optimizers(self) -> Any:
        raise ValueError("mine")


def test_nothing_is_left_of_a_fit_that_never_began(tmp_path: Path) -> None:
    """The worker was started already; it ends, and the exception stays what it was."""
    with no_leaks(tmp_path):
        trainer = make_async("single", tmp_path)
        with pytest.raises(ValueError, match="mine"):
            trainer.fit(Broken(), loader())
        trainer.validate(Tiny(), loader())


def test_saving_on_exception(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Saves in flight come first; what is saved then is there when the exception leaves."""

    def fail(trainer: Any) -> None:
        if trainer.global_step == 5:
            raise ValueError("mine")

    checkpoint = ModelCheckpoint(
        tmp_path, "{step}", every_n_train_steps=4, save_top_k=-1, save_on_exception=True
    )
    trainer = make_async(
        "single", tmp_path, {"worker": "thread"},
        callbacks=[Gate(monkeypatch), At(batch_end=fail), checkpoint],
    )  # fmt: skip
    with pytest.raises(ValueError, match="mine"):
        trainer.fit(Tiny(), loader(batches=6))

    assert visible(tmp_path) == {"step=4.ckpt", "step=5.ckpt"}
    assert all(is_checkpoint(path) for path in tmp_path.iterdir())
