"""What modules and callbacks put into a checkpoint, and what they find there again."""
# ruff: noqa: ARG002 - the arguments of hooks are Lightning's

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812 - as its documents write it
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import nn

from dist_ckpt.errors import (
    ConfigError,
    MismatchError,
    UnsafeContentError,
)
from dist_ckpt.training_state import (
    CheckpointView,
    save_model_and_optimizer,
)
from lightning_dist_ckpt import DistCkptIO, export_to_file
from tests.lightning._training import (
    Tiny,
    differences,
    every_3_steps,
    loader,
    make_trainer,
    stored,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


def test_average_of_weights(tmp_path: Path) -> None:
    """What is stored as the model is the average; the current weights resume."""

    def trainer(steps: int) -> L.Trainer:
        return make_trainer("single", tmp_path, max_steps=steps, enable_checkpointing=False,
                            callbacks=[EMAWeightAveraging(decay=0.5)])  # fmt: skip

    whole = trainer(6)
    whole.fit(expected := Tiny(), loader())
    first = trainer(3)
    first.fit(Tiny(), loader())
    # Training has ended, the module holds the average: its current weights are in the checkpoint
    # that a callback saves meanwhile.
    folder = tmp_path / "c"
    make_trainer("single", tmp_path, max_steps=3,
                 callbacks=[EMAWeightAveraging(decay=0.5), every_3_steps(folder)],
                 ).fit(Tiny(), loader())  # fmt: skip
    current = CheckpointView.open(folder / "step=3.ckpt").common["lightning"]["current_model_state"]
    average = stored(folder / "step=3.ckpt")
    again = trainer(6)
    again.fit(resumed := Tiny(1), loader(), ckpt_path=folder / "step=3.ckpt")

    assert not torch.equal(average["models.0.net.up.weight"], current["net.up.weight"])
    assert torch.equal(
        average["models.0.net.up.weight"], first.lightning_module.net.up.weight.detach()
    )
    assert all(map(torch.equal, resumed.parameters(), expected.parameters()))


class Edited(Tiny):
    """Leaves one tensor out of its checkpoints, and adds one."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        del checkpoint["state_dict"]["net.norm.bias"]
        checkpoint["state_dict"]["more"] = torch.ones(2)
        checkpoint["mine"] = {"text": "kept", 3: torch.eye(2)}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        assert checkpoint["mine"]["text"] == "kept"
        assert torch.equal(checkpoint["mine"][3], torch.eye(2))
        checkpoint["state_dict"]["net.norm.bias"] = torch.full((10,), 5.0)
        del checkpoint["state_dict"]["more"]


def test_hooks_edit_the_dict(tmp_path: Path) -> None:
    """What a hook takes out is not stored, what it puts in is; the same when loading."""
    trainer = make_trainer("single", tmp_path, max_steps=3)
    trainer.fit(Edited(), loader())
    trainer.save_checkpoint(tmp_path / "e.ckpt")
    again = make_trainer("single", tmp_path, max_steps=3)
    again.fit(module := Edited(1), loader(), ckpt_path=tmp_path / "e.ckpt")

    tensors = stored(tmp_path / "e.ckpt")
    assert "models.0.net.norm.bias" not in tensors
    assert torch.equal(tensors["models.0.more"], torch.ones(2))
    assert torch.equal(module.net.norm.bias.detach(), torch.full((10,), 5.0))
    assert torch.equal(module.net.up.weight.detach(), tensors["models.0.net.up.weight"])


def test_edited_optimizer_states(tmp_path: Path) -> None:
    """Emptying the list stores none; other edits are refused, as they would be lost."""

    class Without(Tiny):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["optimizer_states"] = []

    class Changing(Tiny):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["optimizer_states"][0]["param_groups"][0]["lr"] = 1.0

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["optimizer_states"][0]["param_groups"][0]["lr"] = 1.0

    trainer = make_trainer("single", tmp_path, max_steps=3)
    trainer.fit(Without(), loader())
    trainer.save_checkpoint(tmp_path / "o.ckpt")
    again = make_trainer("single", tmp_path)
    again.fit(Tiny(), loader(), ckpt_path=tmp_path / "o.ckpt")
    assert again.global_step == 6
    again.save_checkpoint(tmp_path / "all.ckpt")

    trainer = make_trainer("single", tmp_path, max_steps=3)
    trainer.fit(Changing(), loader())
    with pytest.raises(ConfigError, match="optimizer_states"):
        trainer.save_checkpoint(tmp_path / "r.ckpt")
    with pytest.raises(TypeError, match="on_train_start"):
        trainer.fit(Changing(), loader(), ckpt_path=tmp_path / "all.ckpt")
    assert not (tmp_path / "r.ckpt").exists()


def test_strictness(run: Path, tmp_path: Path) -> None:
    """Names are checked as torch does, unless the module says otherwise."""

    class Other(Tiny):
        def __init__(self) -> None:
            super().__init__(1)
            self.head = nn.Linear(2, 2)
            del self.net.norm.bias
            self.net.norm.register_parameter("bias", None)

    trainer = make_trainer("single", tmp_path)
    with pytest.raises(RuntimeError, match=r'(?s)Missing.*"head.weight".*Unexpected.*"net.norm.b'):
        trainer.validate(Other(), loader(), ckpt_path=run / "step=3.ckpt")
    lenient = Other()
    lenient.strict_loading = False
    trainer.validate(lenient, loader(), ckpt_path=run / "step=3.ckpt")
    weights = stored(run / "step=3.ckpt")
    assert torch.equal(lenient.net.up.weight.detach(), weights["models.0.net.up.weight"])


def test_compiled_modules(run: Path, tmp_path: Path) -> None:
    """A compiled child leaves no trace in the names, in both directions."""

    class Compiled(Tiny):
        def __init__(self) -> None:
            super().__init__(1)
            self.net.up = torch.compile(self.net.up, backend="eager")

    trainer = make_trainer("single", tmp_path, max_steps=3)
    model = Compiled()
    assert "net.up._orig_mod.weight" in model.state_dict()
    trainer.fit(model, loader(), ckpt_path=run / "step=3.ckpt")
    trainer.save_checkpoint(tmp_path / "c.ckpt")

    assert not differences(stored(tmp_path / "c.ckpt"), stored(run / "step=3.ckpt"))


class Holder(nn.Module):
    """Something that is no tensor, kept by the module itself."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = ["none"]

    def get_extra_state(self) -> Any:
        return self.seen

    def set_extra_state(self, state: Any) -> None:
        self.seen = state


def test_extra_state(tmp_path: Path) -> None:
    """get_extra_state is stored and set again."""

    class Holding(Tiny):
        def __init__(self) -> None:
            super().__init__()
            self.holder = Holder()

    trainer = make_trainer("single", tmp_path, max_steps=3)
    trainer.fit(model := Holding(), loader())
    model.holder.seen = ["one", 2]
    trainer.save_checkpoint(tmp_path / "h.ckpt")
    again = Holding()
    trainer.validate(again, loader(), ckpt_path=tmp_path / "h.ckpt")

    assert again.holder.seen == ["one", 2]


class Editing(Tiny):
    """Its hook edits in place what is not the model's own memory."""

    def __init__(self) -> None:
        super().__init__()
        self.holder = Holder()
        self.net.register_state_dict_post_hook(add_sum)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"]["holder._extra_state"]["list"].append(2)
        checkpoint["state_dict"]["net.sum"].fill_(7)
        checkpoint["state_dict"]._metadata["net"]["version"] = 5


def add_sum(module: Any, entries: dict[str, Any], prefix: str, _: Any) -> None:
    entries[f"{prefix}sum"] = module.up.weight.detach().sum()


def test_edits_in_place(tmp_path: Path) -> None:
    """What a hook changes within an entry is stored, as by stock Lightning."""
    trainer = make_trainer("single", tmp_path, max_steps=1)
    trainer.fit(module := Editing(), loader())
    module.holder.get_extra_state = lambda: {"list": [1]}  # type: ignore[method-assign]
    trainer.save_checkpoint(tmp_path / "e.ckpt")

    full = CheckpointView.open(tmp_path / "e.ckpt").full_model(0)
    assert full["holder._extra_state"] == {"list": [1, 2]}
    assert full["net.sum"] == 7
    assert full._metadata["net"]["version"] == 5  # type: ignore[attr-defined]


def test_casts_as_configured(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Also without sharding a load that casts warns, or is refused."""
    trainer = make_trainer("single", tmp_path, max_steps=1)
    trainer.fit(Tiny(), loader())
    trainer.save_checkpoint(tmp_path / "c.ckpt")

    class Idle(Tiny):
        def validation_step(self, batch: torch.Tensor, index: int) -> None:
            """Compute nothing: its layers are of two dtypes."""

    half = Idle()
    half.net.up.half()
    plugins = [DistCkptIO(cast="error")]
    trainer = make_trainer("single", tmp_path, plugins=plugins)
    with pytest.raises(MismatchError, match=r"'net.up.weight': float16.*'net.up.bias'"):
        trainer.validate(half, loader(), ckpt_path=tmp_path / "c.ckpt")
    trainer = make_trainer("single", tmp_path)
    trainer.validate(half, loader(), ckpt_path=tmp_path / "c.ckpt", verbose=False)
    assert "float32 -> float16: 'net.up.weight'" in caplog.text


def test_of_a_bare_model(tmp_path: Path) -> None:
    """Without sharding, too, a checkpoint of what is an attribute here loads."""
    saved = Tiny(1)
    save_model_and_optimizer(tmp_path / "b.ckpt", saved.net)
    trainer = make_trainer("single", tmp_path)
    trainer.validate(again := Tiny(2), loader(), ckpt_path=tmp_path / "b.ckpt", verbose=False)
    assert not differences(again.net.state_dict(), saved.net.state_dict())


class Opaque:
    """Something that only pickle can store."""


def test_pickled_values_need_trust(tmp_path: Path) -> None:
    """A hyperparameter of an unknown class is not unpickled unless that is allowed."""
    trainer = make_trainer("single", tmp_path, max_steps=3)
    model = Tiny()
    model.save_hyperparameters({"thing": Opaque()})
    trainer.fit(model, loader())
    path = tmp_path / "p.ckpt"
    trainer.save_checkpoint(path)

    with pytest.raises(UnsafeContentError, match="allow_pickle"):
        make_trainer("single", tmp_path).fit(Tiny(), loader(), ckpt_path=path)
    make_trainer("single", tmp_path).fit(Tiny(), loader(), ckpt_path=path, weights_only=False)
    trusting = make_trainer("single", tmp_path, plugins=[DistCkptIO(allow_pickle=True)])
    trusting.fit(Tiny(), loader(), ckpt_path=path)
    assert trusting.global_step == 6


class TwoOptimizers(Tiny):
    """Optimizes by hand, with two optimizers."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.automatic_optimization = False

    def training_step(self, batch: torch.Tensor, index: int) -> None:
        loss = self.net(batch).pow(2).mean()
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        up, rest = self.net.up, (self.net.norm, self.net.down)
        return [
            torch.optim.AdamW(up.parameters()),
            torch.optim.SGD([p for part in rest for p in part.parameters()], 0.1, momentum=0.9),
        ]


def test_several_optimizers(run: Path, tmp_path: Path) -> None:
    """Each gets its own state again; another number of them is an error that says so."""
    for seed, name, start in ((0, "whole", None), (1, "again", tmp_path / "whole" / "step=6.ckpt")):
        # Two optimizers step for each batch, so that steps are counted by two.
        trainer = make_trainer(
            "single", tmp_path, callbacks=[every_3_steps(tmp_path / name)], max_steps=12
        )
        trainer.fit(TwoOptimizers(seed), loader(), ckpt_path=start)
    whole, again = (stored(tmp_path / name / "step=12.ckpt") for name in ("whole", "again"))

    assert not differences(whole, again)
    assert any(key.startswith("optimizers.1.state.momentum") for key in whole)
    with pytest.raises(RuntimeError, match=r"has 1 optimizer\(s\), the module configures 2"):
        make_trainer("single", tmp_path).fit(
            TwoOptimizers(), loader(), ckpt_path=run / "step=3.ckpt"
        )


class WithoutOptimizer(Tiny):
    """Trains nothing, as Lightning allows."""

    def configure_optimizers(self) -> None:
        pass


def test_module_without_optimizers(tmp_path: Path) -> None:
    """Its checkpoint resumes; also as one file, under Lightning alone."""
    trainer = make_trainer("single", tmp_path, max_steps=3, callbacks=[every_3_steps(tmp_path)])
    trainer.fit(WithoutOptimizer(), loader())
    export_to_file(tmp_path / "step=3.ckpt", tmp_path / "file.ckpt")
    for plugins, name in (([DistCkptIO()], "step=3.ckpt"), ([], "file.ckpt")):
        again = make_trainer("single", tmp_path, max_steps=6, plugins=plugins)
        again.fit(WithoutOptimizer(), loader(), ckpt_path=tmp_path / name)
        assert again.global_step == 6
