"""What goes wrong on one rank, and what hooks do to a model that is sharded."""
# ruff: noqa: ARG002 - the arguments of hooks are the frameworks'

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L  # noqa: N812 - as its documents write it
import pytest
import torch

import dist_ckpt._saving.save as saving
from dist_ckpt import load_plain_tensors
from dist_ckpt.derive import model_layout
from dist_ckpt.derive.protocol import given_entries, model_state
from dist_ckpt.errors import RankFailedError
from dist_ckpt.training_state import is_checkpoint
from lightning_dist_ckpt import load_module
from tests.lightning._flight import make_async
from tests.lightning._training import (
    LAYOUTS,
    Tiny,
    differences,
    every_3_steps,
    loader,
    make_trainer,
    stored,
)
from tests.multiprocess._world import run_ranks

SHARDED = ("fsdp1", "fsdp2")


def kill(*args: Any, **kwargs: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail(*args: Any, **kwargs: Any) -> None:
    raise OSError(28, "No space left on device")


def train_until(rank: int, world_size: int, layout: str, root: str, accident: str) -> int:
    """Save at step 3; at step 6, something happens while files are written."""
    trainer = make_trainer(layout, root, max_steps=3, callbacks=[every_3_steps(root)])
    trainer.fit(Tiny(), loader(layout))
    trainer = make_trainer(layout, root, max_steps=9, callbacks=[every_3_steps(root)])
    with contextlib.ExitStack() as stack:
        if accident == "killed" or rank == 1:
            what = kill if accident == "killed" else fail
            stack.enter_context(mock.patch.object(saving, "write_part", what))
        trainer.fit(Tiny(), loader(layout), ckpt_path=Path(root, "step=3.ckpt"))
    return trainer.global_step


def resume(rank: int, world_size: int, layout: str, root: str) -> int:
    """Train on from the last checkpoint there is."""
    trainer = make_trainer(layout, root, max_steps=6, callbacks=[every_3_steps(root)])
    trainer.fit(Tiny(7), loader(layout), ckpt_path=Path(root, "step=3.ckpt"))
    return trainer.global_step


@pytest.mark.parametrize("layout", ["single", "fsdp2"])
def test_killed_while_saving(tmp_path: Path, layout: str) -> None:
    """After SIGKILL the checkpoint before is there, loads, and trains on to the same end."""
    outcomes = run_ranks(
        train_until, LAYOUTS[layout], layout, str(tmp_path), "killed", expect_errors=True
    )
    assert {outcome.exit_code for outcome in outcomes} == {-signal.SIGKILL}
    assert [path.name for path in tmp_path.glob("*.ckpt")] == ["step=3.ckpt"]

    assert run_ranks(resume, LAYOUTS[layout], layout, str(tmp_path)) == [6] * LAYOUTS[layout]
    straight = tmp_path / "straight"
    straight.mkdir()
    run_ranks(resume_and_reach, LAYOUTS[layout], layout, str(straight))
    assert not differences(stored(tmp_path / "step=6.ckpt"), stored(straight / "step=6.ckpt"))


def resume_and_reach(rank: int, world_size: int, layout: str, root: str) -> None:
    trainer = make_trainer(layout, root, max_steps=6, callbacks=[every_3_steps(root)])
    trainer.fit(Tiny(), loader(layout))


@pytest.mark.parametrize("layout", ["ddp", "fsdp1"])
def test_failure_on_one_rank(tmp_path: Path, layout: str) -> None:
    """All ranks raise the same, which names rank and cause; nothing half is left."""
    outcomes = run_ranks(train_until, 2, layout, str(tmp_path), "full", expect_errors=True)

    assert [outcome.error_type for outcome in outcomes] == [outcomes[0].error_type] * 2
    for outcome in outcomes:
        assert "rank 1" in outcome.message
        assert "No space left" in outcome.message
    assert [path.name for path in tmp_path.iterdir()] == ["step=3.ckpt"]
    assert is_checkpoint(tmp_path / "step=3.ckpt")


def aliases(rank: int, world_size: int, name: str, root: str) -> bool:
    """Look whether the state dict that a save starts from is the model itself."""
    trainer = make_trainer(name, root, max_steps=3)
    trainer.fit(Tiny(), loader(name))
    model = trainer.strategy.model
    state_dict = trainer.strategy.lightning_module_state_dict()
    layout = model_layout(model)
    unedited = not model_state(model, layout, given_entries(state_dict)).values
    state_dict["net.norm.bias"] = state_dict["net.norm.bias"].clone()
    edited = bool(model_state(model, layout, given_entries(state_dict)).values)
    return unedited and (edited or not state_dict["net.norm.bias"].numel())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing_is_copied_or_gathered(tmp_path: Path, layout: str) -> None:
    """Hooks get the model's own tensors, and that they left them alone is noticed."""
    assert all(run_ranks(aliases, LAYOUTS[layout], layout, str(tmp_path)))


class Replacing(Tiny):
    """Its hook does on rank 1 what cannot be stored."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.global_rank == 1:
            checkpoint["optimizer_states"] = [{"state": {}}]


def save_what_cannot_be(rank: int, world_size: int, root: str) -> None:
    trainer = make_trainer("ddp", root, max_steps=3)
    trainer.fit(Replacing(), loader("ddp"))
    trainer.save_checkpoint(Path(root, "x.ckpt"))


def test_bad_state_on_one_rank(tmp_path: Path) -> None:
    """Also what goes wrong before anything is written is raised on all ranks."""
    outcomes = run_ranks(save_what_cannot_be, 2, str(tmp_path), expect_errors=True)

    assert all("rank 1" in outcome.message for outcome in outcomes)
    assert all("optimizer_states" in outcome.message for outcome in outcomes)
    assert not list(tmp_path.iterdir())


class Edited(Tiny):
    """Its hooks take out, change and add, alike on all ranks."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        del checkpoint["state_dict"]["net.norm.bias"]

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        values = checkpoint["state_dict"]
        assert "net.norm.bias" not in values
        assert values["net.up.weight"].shape == (10, 5)
        values["net.norm.bias"] = torch.arange(10.0)
        values["net.up.weight"] = values["net.up.weight"] * 0 + 3


class Partial(Tiny):
    """Leaves one tensor as it was initialised, and puts one; reads none."""

    strict_loading = False

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        del checkpoint["state_dict"]["net.up.weight"]
        checkpoint["state_dict"]["net.norm.weight"] = torch.full((10,), 2.0)


def edit(rank: int, world_size: int, layout: str, root: str) -> tuple[str, str]:
    """Save and load with hooks that edit; then what is wrong for this model."""
    trainer = make_trainer(layout, root, max_steps=3)
    trainer.fit(Edited(), loader(layout))
    trainer.save_checkpoint(Path(root, "edited"))
    trainer.save_checkpoint(Path(root, "weights"), weights_only=True)
    for cls, name in ((Edited, "loaded"), (Partial, "partial")):
        again = make_trainer(layout, root, max_steps=3)
        again.fit(cls(1), loader(layout), ckpt_path=Path(root, "edited"))
        again.lightning_module.on_save_checkpoint = lambda _: None
        again.save_checkpoint(Path(root, name))
    messages = []
    for name in ("edited", "weights"):
        with pytest.raises((RuntimeError, KeyError)) as error:
            cls = Tiny if name == "edited" else Edited
            make_trainer(layout, root).fit(cls(), loader(layout), ckpt_path=Path(root, name))
        messages.append(str(error.value))
    make_trainer(layout, root).validate(Edited(), loader(layout), ckpt_path=Path(root, "weights"))
    return messages[0], messages[1]


@pytest.mark.parametrize("layout", SHARDED)
def test_hooks_edit_a_sharded_model(tmp_path: Path, layout: str) -> None:
    """Hooks see whole tensors under every layout; what they do is stored, and loaded."""
    messages = run_ranks(edit, 2, layout, str(tmp_path))

    saved, loaded, partial = (stored(tmp_path / name) for name in ("edited", "loaded", "partial"))
    assert "models.0.net.norm.bias" not in saved
    assert torch.equal(loaded["models.0.net.norm.bias"], torch.arange(10.0))
    assert torch.equal(loaded["models.0.net.up.weight"], torch.full((10, 5), 3.0))
    assert torch.equal(loaded["models.0.net.down.weight"], saved["models.0.net.down.weight"])
    assert torch.equal(partial["models.0.net.norm.weight"], torch.full((10,), 2.0))
    assert torch.equal(partial["models.0.net.up.weight"], Tiny(1).net.up.weight.detach())
    assert torch.equal(partial["models.0.net.up.bias"], saved["models.0.net.up.bias"])
    assert not [key for key in load_plain_tensors(tmp_path / "weights") if "optim" in key]
    for strict, weights in messages:
        assert "Error(s) in loading state_dict for Tiny:" in strict
        assert 'Missing key(s) in state_dict: "net.norm.bias"' in strict
        assert "Trying to restore optimizer state but checkpoint" in weights


@pytest.mark.usefixtures("warm_spawn")
def test_spawned_ranks(tmp_path: Path) -> None:
    """The launcher sends the Trainer to new processes, in whose background it saves."""
    checkpoint = every_3_steps(tmp_path)
    trainer = make_async("ddp", tmp_path, strategy="ddp_spawn", max_steps=3, callbacks=[checkpoint])
    trainer.fit(model := Tiny(), loader("ddp"))

    assert checkpoint.best_model_path == str(tmp_path / "step=3.ckpt")
    assert is_checkpoint(checkpoint.best_model_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step=3.ckpt"]
    saved = load_module(Tiny, checkpoint.best_model_path)
    assert all(map(torch.equal, model.parameters(), saved.parameters()))


class Counting(Tiny):
    """Has a state that is neither parameter nor buffer, as metrics do, and a hook that looks."""

    strict_loading = False

    def __init__(self, seed: int = 0, *, counts: bool = True) -> None:
        super().__init__(seed)
        if counts:
            self.counter = Counter()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.values = checkpoint["state_dict"]


class Counter(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.total = torch.tensor(0)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}total"] = self.total

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        self.total = state_dict.pop(f"{prefix}total", self.total)


def count(rank: int, world_size: int, root: str) -> tuple[int, bool]:
    trainer = make_trainer("fsdp2", root, max_steps=3)
    trainer.fit(first := Counting(), loader("fsdp2"))
    first.counter.total = torch.tensor(7)
    trainer.save_checkpoint(Path(root, "x"))
    with_it, without = Counting(1), Counting(1, counts=False)
    for module in (with_it, without):
        again = make_trainer("fsdp2", root, max_steps=3)
        again.fit(module, loader("fsdp2"), ckpt_path=Path(root, "x"))
    return int(with_it.counter.total), without.values.entries is None


def test_states_of_metrics(tmp_path: Path) -> None:
    """They are stored and loaded; a checkpoint with names the model lacks is not read as a whole."""
    assert run_ranks(count, 2, str(tmp_path)) == [(7, True)] * 2


class Failing(Tiny):
    """One of its hooks fails on rank 1."""

    at = ""

    def check(self, at: str) -> None:
        if self.at == at and self.global_rank == 1:
            raise ValueError(f"no {at}")

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        self.check("state_dict")
        return super().state_dict(*args, **kwargs)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.check("on_save")

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.check("on_load")

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        self.check("load_state_dict")
        return super().load_state_dict(*args, **kwargs)


class FailingCallback(L.Callback):
    """Likewise."""

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        module.check("callback_saves")

    def on_load_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        module.check("callback_loads")


def fail_in_hooks(rank: int, world_size: int, layout: str, root: str) -> dict[str, str]:
    told = {}
    trainer = make_trainer(layout, root, max_steps=1, callbacks=[FailingCallback()])
    trainer.fit(module := Failing(), loader(layout))
    trainer.save_checkpoint(Path(root, "good.ckpt"))
    for module.at in ("state_dict", "on_save", "callback_saves"):
        with pytest.raises(RankFailedError) as caught:
            trainer.save_checkpoint(Path(root, "bad.ckpt"))
        told[module.at] = str(caught.value)
    hooks = ["on_load", "callback_loads", *(["load_state_dict"] if layout == "ddp" else [])]
    for at in hooks:
        module = Failing()
        module.at = at
        trainer = make_trainer(layout, root, max_steps=2, callbacks=[FailingCallback()])
        with pytest.raises(RankFailedError) as caught:
            trainer.fit(module, loader(layout), ckpt_path=Path(root, "good.ckpt"))
        told[at] = str(caught.value)
    return told


@pytest.mark.parametrize("layout", ["ddp", "fsdp2"])
def test_hook_that_fails_on_one_rank(tmp_path: Path, layout: str) -> None:
    """All ranks raise it at once, named by rank, at saves and at loads."""
    for told in run_ranks(fail_in_hooks, 2, layout, str(tmp_path)):
        assert len(told) >= 5
        assert all(f"rank 1: ValueError: no {at}" in text for at, text in told.items())
    assert not (tmp_path / "bad.ckpt").exists()


class EditedOnRank0(Tiny):
    """Its hook does something on rank 0 only, as is usual under DDP."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.trainer.is_global_zero:
            state = checkpoint["state_dict"]
            del state["net.norm.bias"]
            state["net.up.weight"] = torch.full_like(state["net.up.weight"], 7)
            state["more"] = torch.ones(2)
            checkpoint["optimizer_states"] = []


def save_edited(rank: int, world_size: int, root: str) -> None:
    trainer = make_trainer("ddp", root, max_steps=3, callbacks=[every_3_steps(root)])
    trainer.fit(EditedOnRank0(), loader("ddp"))


def test_hook_on_rank_0_decides_under_ddp(tmp_path: Path) -> None:
    """Ranks are replicas: what rank 0 leaves in the dict is stored, all of it and nothing else."""
    run_ranks(save_edited, 2, str(tmp_path))
    found = stored(tmp_path / "step=3.ckpt")
    assert torch.equal(found["models.0.net.up.weight"], torch.full((10, 5), 7.0))
    assert torch.equal(found["models.0.more"], torch.ones(2))
    assert "models.0.net.norm.bias" not in found
    assert not [key for key in found if key.startswith("optimizers.")]
