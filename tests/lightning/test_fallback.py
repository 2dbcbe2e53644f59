"""Resuming finds the newest checkpoint that is whole and true, and says what it passed by."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint

from dist_ckpt.errors import (
    CheckpointNotFoundError,
    CorruptedCheckpointError,
    UnsafeContentError,
)
from dist_ckpt.recovery import set_aside
from dist_ckpt.storage.commit import attempt_prefix
from dist_ckpt.training_state import is_checkpoint
from tests._damage import DAMAGES, aside, damage, data_file, flip
from tests.lightning._flight import make_async, visible
from tests.lightning._resumes import keeping, newest, resume, train
from tests.lightning._training import LAYOUTS, Tiny, differences, loader, make_trainer, stored
from tests.multiprocess._world import run_ranks

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


# -- what the framework chose ----------------------------------------------------------------------


@pytest.mark.parametrize("name", DAMAGES)
def test_the_one_before_is_taken(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A run that finds its newest damaged is a run resumed from the one before, bit for bit."""
    folder, straight = tmp_path / "c", tmp_path / "straight"
    train(folder)
    shutil.copytree(folder, straight, symlinks=True)
    moved = damage(name, folder / "step=9.ckpt")

    events = tmp_path / "events.jsonl"

    trainer = resume(folder, io={"events_file": str(events)})
    resume(straight, straight / "step=6.ckpt")

    assert trainer.ckpt_path == str(folder / "step=6.ckpt")
    assert not differences(stored(newest(folder)), stored(newest(straight)))
    assert aside(folder) == (["step=9.ckpt"] if moved else [])
    assert (folder / "last.ckpt").resolve() == newest(folder)
    assert all(is_checkpoint(path) for path in folder.glob("step=*.ckpt") if moved)
    assert [one for one in caplog.messages if "step=9.ckpt is" in one and "skipped" in one]
    told = [json.loads(line) for line in events.read_text().splitlines()]
    told = [one for one in told if one["event"] in {"Skipped", "SetAside"}]
    assert [one["event"] for one in told] == ["Skipped"] + (["SetAside"] if moved else [])
    assert all(one["path"] == str(folder / "step=9.ckpt") for one in told)


def test_the_user_is_warned(tmp_path: Path) -> None:
    """A warning says what was passed by, why, and what is loaded instead."""
    train(tmp_path)
    flip(data_file(tmp_path / "step=9.ckpt"))
    trainer = make_trainer("single", tmp_path, max_steps=12, callbacks=[keeping(tmp_path)])

    with pytest.warns(UserWarning, match=r"resumes from .*step=6.ckpt: step=9.ckpt is damaged.*__"):
        trainer.fit(Tiny(), loader(), ckpt_path="last")


def test_a_copy_called_last_that_is_damaged(tmp_path: Path) -> None:
    """What was saved beside it at the same step is as good."""
    train(tmp_path, save_last=True)
    flip(data_file(tmp_path / "last.ckpt"))

    trainer = resume(tmp_path, save_last=True)

    assert trainer.ckpt_path == str(tmp_path / "step=9.ckpt")
    assert aside(tmp_path) == ["last.ckpt"]
    assert not differences(stored(tmp_path / "last.ckpt"), stored(tmp_path / "step=12.ckpt"))


def test_a_link_that_leads_to_nothing_is_no_fresh_start(tmp_path: Path) -> None:
    """Lightning would begin anew; the newest that is there is taken."""
    train(tmp_path)
    shutil.rmtree(tmp_path / "step=9.ckpt")
    assert not (tmp_path / "last.ckpt").exists()

    trainer = resume(tmp_path)

    assert trainer.ckpt_path == str(tmp_path / "step=6.ckpt")
    assert trainer.global_step == 12
    assert (tmp_path / "last.ckpt").resolve() == tmp_path / "step=12.ckpt"


def test_a_link_to_itself_is_no_fresh_start(tmp_path: Path) -> None:
    """It leads to nothing, as any other that is broken."""
    train(tmp_path)
    (tmp_path / "last.ckpt").unlink()
    (tmp_path / "last.ckpt").symlink_to("last.ckpt")

    assert resume(tmp_path).ckpt_path == str(tmp_path / "step=9.ckpt")


def test_a_link_to_nothing_and_nothing_else_is_an_error(tmp_path: Path) -> None:
    """There was something, and it is gone: that is for the user to decide."""
    train(tmp_path)
    for path in tmp_path.glob("step=*.ckpt"):
        shutil.rmtree(path)

    with pytest.raises(CheckpointNotFoundError, match=r"last\.ckpt.*hint: to begin anew"):
        resume(tmp_path)
    (tmp_path / "last.ckpt").unlink()
    assert resume(tmp_path).ckpt_path is None


def test_what_is_no_checkpoint_is_no_fresh_start(tmp_path: Path) -> None:
    """A last one without anything in it is an error, as it is in Lightning."""
    (tmp_path / "last.ckpt").mkdir()

    with pytest.raises(CheckpointNotFoundError, match=r"last\.ckpt"):
        resume(tmp_path)


def test_steps_decide_not_times_or_names(tmp_path: Path) -> None:
    """Without any last one, the most optimizer steps win."""
    train(tmp_path, save_last=False)
    (tmp_path / "step=9.ckpt").rename(tmp_path / "a.ckpt")
    os.utime(tmp_path / "step=3.ckpt")

    assert resume(tmp_path, save_last=False).ckpt_path == str(tmp_path / "a.ckpt")


def test_names_with_folders_in_them(tmp_path: Path) -> None:
    """As deep as the callback's names go, and no deeper."""
    checkpoint = ModelCheckpoint(tmp_path, "run/{step}", every_n_train_steps=3, save_top_k=-1)
    make_trainer("single", tmp_path, max_steps=6, callbacks=[checkpoint]).fit(Tiny(), loader())
    shutil.copytree(tmp_path / "run" / "step=6.ckpt", tmp_path / "a" / "b" / "step=99.ckpt")

    again = ModelCheckpoint(tmp_path, "run/{step}", every_n_train_steps=3, save_top_k=-1)
    trainer = make_trainer("single", tmp_path, max_steps=9, callbacks=[again])
    trainer.fit(Tiny(7), loader(), ckpt_path="last")

    assert trainer.ckpt_path == str(tmp_path / "run" / "step=6.ckpt")


class Odd:
    """A value that is pickled."""


def test_where_steps_are_not_told_times_decide(tmp_path: Path) -> None:
    """Nothing is unpickled to find out how old a checkpoint is."""

    class WithOdd(Tiny):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["odd"] = Odd()

    kept = keeping(tmp_path, save_last=False)
    trainer = make_trainer("single", tmp_path, max_steps=9, callbacks=[kept])
    trainer.fit(WithOdd(), loader())
    for n, name in ((3, "c"), (6, "b"), (9, "a")):
        os.utime((tmp_path / f"step={n}.ckpt").rename(tmp_path / f"{name}.ckpt"), (n, n))

    with pytest.raises(UnsafeContentError, match="allow_pickle"):
        resume(tmp_path, save_last=False)
    trainer = resume(tmp_path, save_last=False, io={"allow_pickle": True})
    assert trainer.ckpt_path == str(tmp_path / "a.ckpt")


def test_a_crash_between_two_renames(tmp_path: Path) -> None:
    """What a save has put aside counts under its name."""
    train(tmp_path, save_last=True)
    last = tmp_path / "last.ckpt"
    last.rename(tmp_path / f"{attempt_prefix(last)}0123456789ab.previous")

    assert resume(tmp_path, save_last=True).ckpt_path == str(last)
    assert not list(tmp_path.glob(".*.previous"))


@pytest.mark.parametrize(
    "note", [".dist-ckpt-a.previous/manifest.json", ".dist-ckpt-a.damaged/damaged.json"]
)
@pytest.mark.parametrize("kind", ["deep", "pipe"])
def test_notes_that_cannot_be_read(tmp_path: Path, note: str, kind: str) -> None:
    """What lies beside the checkpoints is no reason not to find them."""
    train(tmp_path)
    (tmp_path / note).parent.mkdir()
    if kind == "pipe":
        os.mkfifo(tmp_path / note)
    else:
        (tmp_path / note).write_text("[" * 100_000)
    (tmp_path / "last.ckpt").unlink()

    assert resume(tmp_path).ckpt_path == str(tmp_path / "step=9.ckpt")


def test_nothing_to_resume_from_is_a_fresh_start(tmp_path: Path) -> None:
    """The first run may be called like all others."""
    trainer = resume(tmp_path)

    assert trainer.ckpt_path is None
    assert trainer.global_step == 12
    assert visible(tmp_path) == {f"step={n}.ckpt" for n in (3, 6, 9, 12)} | {"last.ckpt"}


def test_all_damaged_is_an_error_each_time(tmp_path: Path) -> None:
    """Nothing is renamed, so that the next start does not begin anew either."""
    train(tmp_path)
    for path in tmp_path.glob("step=*.ckpt"):
        flip(data_file(path))
    before = visible(tmp_path)

    for _ in range(2):
        with pytest.raises(CorruptedCheckpointError, match="none of 3") as caught:
            resume(tmp_path)
        assert all(f"step={n}.ckpt (damaged)" in str(caught.value) for n in (3, 6, 9))
        assert visible(tmp_path) == before
        assert aside(tmp_path) == []


def test_files_only(tmp_path: Path) -> None:
    """At that level sizes decide: a flipped byte is found when it is read, not before."""
    train(tmp_path)
    flip(data_file(tmp_path / "step=9.ckpt"))

    with pytest.raises(CorruptedCheckpointError, match=r"__0_\d+\.distcp"):
        resume(tmp_path, io={"verify_newest": "files"})
    assert aside(tmp_path) == []

    data_file(tmp_path / "step=9.ckpt").write_bytes(b"")
    assert resume(tmp_path, io={"verify_newest": "files"}).ckpt_path.endswith("step=6.ckpt")


def test_before_a_requeue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the saves of SLURM's handler the newest good one; then those of callbacks."""
    trainer = train(tmp_path)
    for n in (1, 2):
        trainer.save_checkpoint(tmp_path / f"hpc_ckpt_{n}.ckpt")
    flip(data_file(tmp_path / "hpc_ckpt_2.ckpt"))
    monkeypatch.setenv("SLURM_NTASKS", "1")
    monkeypatch.setenv("SLURM_JOB_NAME", "train")

    assert resume(tmp_path, None).ckpt_path == str(tmp_path / "hpc_ckpt_1.ckpt")
    assert aside(tmp_path) == ["hpc_ckpt_2.ckpt"]

    flip(data_file(tmp_path / "hpc_ckpt_1.ckpt"))
    assert resume(tmp_path, "hpc").ckpt_path == str(tmp_path / "step=12.ckpt")
    # Both are gone now: a requeued job must not begin anew.
    assert resume(tmp_path, None).ckpt_path == str(tmp_path / "step=12.ckpt")
    monkeypatch.delenv("SLURM_NTASKS")
    assert resume(tmp_path, None).ckpt_path is None


def test_after_an_exception(tmp_path: Path) -> None:
    """What ``OnExceptionCheckpoint`` saved, if it is good; else the newest of ModelCheckpoint."""
    trainer = train(tmp_path)
    trainer.save_checkpoint(tmp_path / "on_exception.ckpt")
    flip(data_file(tmp_path / "on_exception.ckpt"))
    again = make_trainer(
        "single", tmp_path, max_steps=12,
        callbacks=[keeping(tmp_path), OnExceptionCheckpoint(tmp_path)],
    )  # fmt: skip

    again.fit(Tiny(7), loader())

    assert again.ckpt_path == str(tmp_path / "last.ckpt")
    assert aside(tmp_path) == ["on_exception.ckpt"]


@pytest.mark.parametrize("save_last", ["link", True, False], ids=str)
def test_killed_before_the_next_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save_last: Any
) -> None:
    """A run that went on from an older one and saved nothing is no fresh start the next time."""
    trainer = train(tmp_path, save_last=save_last)
    trainer.save_checkpoint(tmp_path / "on_exception.ckpt")
    for path in (tmp_path / "last.ckpt", tmp_path / "on_exception.ckpt", tmp_path / "step=9.ckpt"):
        if path.exists():
            data_file(path).write_bytes(b"")
    monkeypatch.setattr(Trainer, "save_checkpoint", lambda *_: None)
    for _ in range(2):
        again = make_trainer(
            "single", tmp_path, max_steps=7,
            callbacks=[keeping(tmp_path, save_last=save_last), OnExceptionCheckpoint(tmp_path)],
        )  # fmt: skip
        again.fit(Tiny(7), loader())

        resumed = Path(again.ckpt_path)
        assert resumed.resolve() == tmp_path / "step=6.ckpt"
    assert {"step=9.ckpt", "on_exception.ckpt"} <= set(aside(tmp_path))


def test_a_file_of_stock_lightning_is_taken_as_before(tmp_path: Path) -> None:
    """It has no checksums, and counts as good."""
    stock = make_trainer(
        "single", tmp_path, max_steps=3, plugins=[], callbacks=[keeping(tmp_path, save_last=False)]
    )
    stock.fit(Tiny(), loader())
    assert (tmp_path / "step=3.ckpt").is_file()
    make = make_trainer("single", tmp_path, max_steps=6, callbacks=[keeping(tmp_path)])
    make.fit(Tiny(), loader(), ckpt_path=tmp_path / "step=3.ckpt")
    flip(data_file(tmp_path / "step=6.ckpt"))

    assert resume(tmp_path).ckpt_path == str(tmp_path / "step=3.ckpt")


# -- what the user named ---------------------------------------------------------------------------


def test_what_is_named_is_never_replaced(tmp_path: Path) -> None:
    """A path, the best one, and a path set on the Trainer: an error, and all stays as it is."""
    trainer = train(tmp_path, monitor="step", mode="max")
    last, newest_one = tmp_path / "last.ckpt", tmp_path / "step=9.ckpt"
    flip(data_file(newest_one))
    before = visible(tmp_path)

    for path in (newest_one, str(last)):
        with pytest.raises(CorruptedCheckpointError, match=r"__0_\d\.distcp"):
            resume(tmp_path, path)
    with pytest.raises(CorruptedCheckpointError, match=r"__0_\d\.distcp"):
        trainer.validate(Tiny(), loader(), ckpt_path="best")
    managed = make_trainer("single", tmp_path, max_steps=12, callbacks=[keeping(tmp_path)])
    managed.ckpt_path = str(last)
    with pytest.raises(CorruptedCheckpointError, match=r"__0_\d\.distcp"):
        managed.fit(Tiny(), loader())

    shutil.rmtree(newest_one)
    with pytest.raises(CheckpointNotFoundError):
        resume(tmp_path, newest_one)
    assert visible(tmp_path) == before - {"step=9.ckpt"}
    assert aside(tmp_path) == []


# -- what callbacks know ---------------------------------------------------------------------------


def test_callbacks_forget_what_was_set_aside(tmp_path: Path) -> None:
    """A restored callback neither calls it the best nor counts it among the top ones."""
    train(tmp_path, save_last=True, monitor="step", mode="max")
    set_aside(tmp_path / "step=9.ckpt", "a test")

    trainer = make_trainer(
        "single", tmp_path, max_steps=10,
        callbacks=[keeping(tmp_path, save_last=True, monitor="step", mode="max")],
    )  # fmt: skip
    trainer.fit(Tiny(7), loader(), ckpt_path="last")

    checkpoint = trainer.checkpoint_callback
    assert set(checkpoint.best_k_models) == {str(tmp_path / f"step={n}.ckpt") for n in (3, 6)}
    assert checkpoint.best_model_path == str(tmp_path / "step=6.ckpt")
    assert checkpoint.best_model_score == 6
    trainer.validate(Tiny(), loader(), ckpt_path="best")


# -- in the background, and on several ranks -------------------------------------------------------


def test_in_the_background(tmp_path: Path) -> None:
    """The same with saves that go on while training does."""
    train(tmp_path)
    flip(data_file(tmp_path / "step=9.ckpt"))
    trainer = make_async("single", tmp_path, max_steps=12, callbacks=[keeping(tmp_path)])

    trainer.fit(Tiny(7), loader(), ckpt_path="last")

    assert trainer.ckpt_path == str(tmp_path / "step=6.ckpt")
    assert aside(tmp_path) == ["step=9.ckpt"]
    assert (tmp_path / "last.ckpt").resolve() == tmp_path / "step=12.ckpt"


def on_ranks(rank: int, world_size: int, layout: str, root: str) -> dict[str, Any]:
    """Train, damage, and resume in all the ways that need ranks to agree."""
    told: dict[str, Any] = {}
    folder = Path(root, "c")
    train(folder, layout)
    if rank == 0:
        shutil.copytree(folder, Path(root, "bad"), symlinks=True)
        flip(data_file(folder / "step=9.ckpt"))
        for path in Path(root, "bad").glob("step=*.ckpt"):
            flip(data_file(path))
    torch.distributed.barrier()

    told["files"] = error_of(folder, layout, {"verify_newest": "files"})
    told["named"] = error_of(folder, layout, {}, folder / "step=9.ckpt")
    told["all bad"] = error_of(Path(root, "bad"), layout, {})
    trainer = resume(folder, layout=layout)
    told["resumed"] = (Path(trainer.ckpt_path).name, trainer.global_step)
    return told


def error_of(folder: Path, layout: str, io: dict[str, Any], path: Any = "last") -> str:
    """Return the name of what a resume raises."""
    try:
        resume(folder, path, layout, io)
    except Exception as error:
        return type(error).__name__
    return ""


def explicitly(rank: int, world_size: int, layout: str, root: str) -> None:
    """Resume by hand."""
    resume(root, Path(root, "step=6.ckpt"), layout)


@pytest.mark.parametrize("layout", ["ddp", "fsdp2"])
def test_all_ranks_agree(tmp_path: Path, layout: str) -> None:
    """The same checkpoint, or the same error, on each rank; bit-equal to a resume by hand."""
    world = LAYOUTS[layout]
    told = run_ranks(on_ranks, world, layout, str(tmp_path))

    bad = "CorruptedCheckpointError"
    expected = {"files": bad, "named": bad, "all bad": bad, "resumed": ("step=6.ckpt", 12)}
    assert told == [expected] * world
    assert aside(tmp_path / "c") == ["step=9.ckpt"]
    assert aside(tmp_path / "bad") == []
    straight = tmp_path / "straight"
    straight.mkdir()
    shutil.copytree(tmp_path / "c" / "step=6.ckpt", straight / "step=6.ckpt")
    run_ranks(explicitly, world, layout, str(straight))
    assert not differences(stored(newest(tmp_path / "c")), stored(newest(straight)))
