"""Resume under the same layout and under others, with real ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dist_ckpt.training_state import (
    CheckpointView,
    TrainingState,
    is_checkpoint,
    load_model_and_optimizer,
    save_training_state,
)
from lightning_dist_ckpt import DistCkptIO, export_to_file
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


def train_and_resume(rank: int, world_size: int, layout: str, root: str) -> str:
    """Train six steps at one go, and from step 3 on once more with another start."""
    folder = Path(root, layout)
    whole = make_trainer(layout, root, callbacks=[every_3_steps(folder / "whole")])
    whole.fit(Tiny(0), loader(layout))
    again = make_trainer(layout, root, callbacks=[every_3_steps(folder / "again")])
    again.fit(Tiny(1), loader(layout), ckpt_path=folder / "whole" / "step=3.ckpt")
    return type(again.strategy).__name__


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a run under each layout."""
    root = tmp_path_factory.mktemp("layouts")
    for layout, size in LAYOUTS.items():
        run_ranks(train_and_resume, size, layout, str(root))
    return root


@pytest.mark.parametrize("layout", LAYOUTS)
def test_resumed_equals_uninterrupted(trained: Path, layout: str) -> None:
    """Model and optimizer after six steps are the same bit for bit."""
    whole, again = (stored(trained / layout / run / "step=6.ckpt") for run in ("whole", "again"))

    assert not differences(whole, again)
    assert any(key.startswith("optimizers.0.state.exp_avg.0.net") for key in whole)
    assert differences(whole, stored(trained / layout / "whole" / "step=3.ckpt"))


def load_all(rank: int, world_size: int, layout: str, root: str) -> list[int]:
    """Load each layout's step 3, train no step, and save what was loaded."""
    steps = []
    for path in sorted(Path(root, "sources").iterdir()):
        trainer = make_trainer(layout, root, max_steps=3)
        trainer.fit(Tiny(2), loader(layout), ckpt_path=path)
        steps.append(trainer.global_step)
        trainer.save_checkpoint(Path(root, "loaded", layout, path.name))
    return steps


@pytest.fixture(scope="module")
def sources(trained: Path) -> dict[str, dict[str, torch.Tensor]]:
    """Return what step 3 of each layout holds, and of a file that stock Lightning could have saved."""
    folder = trained / "sources"
    folder.mkdir()
    tensors = {}
    for layout in LAYOUTS:
        checkpoint = trained / layout / "whole" / "step=3.ckpt"
        (folder / layout).symlink_to(checkpoint)
        tensors[layout] = stored(checkpoint)
    export_to_file(folder / "single", folder / "file.ckpt")
    whole = torch.load(folder / "file.ckpt")
    DistCkptIO().save_checkpoint(whole, folder / "direct")  # as a Trainer that never ran would
    save_as_another(folder / "single", folder / "another")
    same = ("file.ckpt", "direct", "another")
    return tensors | dict.fromkeys(same, tensors["single"])


def save_as_another(source: Path, target: Path) -> None:
    """Save what is in a checkpoint once more, as another framework would."""
    model = Tiny(4)
    [optimizer], [config] = model.configure_optimizers()
    view = CheckpointView.open(source)
    view.load_model(0, model)
    view.load_optimizer(0, optimizer, [model])
    scheduler = config["scheduler"]
    scheduler.load_state_dict(view.common["schedulers"][0])
    state = TrainingState(
        models=[model],
        optimizers=[optimizer],
        common={"schedulers": [scheduler.state_dict()], "step": view.common["step"]},
        framework="another",
    )
    save_training_state(target, state)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_loads_any(
    trained: Path, sources: dict[str, dict[str, torch.Tensor]], layout: str
) -> None:
    """What was loaded from each of the others, and from a file, is what they saved, bit for bit."""
    results = run_ranks(load_all, LAYOUTS[layout], layout, str(trained))

    assert results == [[3] * len(sources)] * LAYOUTS[layout]
    for source, before in sources.items():
        assert not differences(before, stored(trained / "loaded" / layout / source)), source


def stock_and_ours(rank: int, world_size: int, root: str) -> list[str]:
    """Save with stock Lightning, sharded; load with ours, and save again under the same name."""
    stock = make_trainer("fsdp2", root, max_steps=3, plugins=None)
    stock.fit(first := Tiny(), loader("fsdp2"))
    stock.save_checkpoint(Path(root, "stock.ckpt"))
    stock.save_checkpoint(Path(root, "x.ckpt"))
    kinds = sorted(path.name for path in Path(root, "x.ckpt").iterdir())
    expected = [parameter.to_local().clone() for parameter in first.parameters()]
    ours = make_trainer("fsdp2", root, max_steps=3)
    ours.fit(second := Tiny(1), loader("fsdp2"), ckpt_path=Path(root, "x.ckpt"))
    for one, other in zip(expected, second.parameters(), strict=True):
        assert torch.equal(one, other.to_local())
    ours.save_checkpoint(Path(root, "ours.ckpt"))
    ours.save_checkpoint(Path(root, "x.ckpt"))
    again = make_trainer("fsdp2", root, max_steps=6)
    again.fit(Tiny(2), loader("fsdp2"), ckpt_path=Path(root, "x.ckpt"))
    assert again.global_step == 6
    return kinds


def test_sharded_checkpoints_of_stock_lightning(tmp_path: Path) -> None:
    """They load as before under the strategy that saved them, and give way to ours."""
    results = run_ranks(stock_and_ours, 2, str(tmp_path))

    assert "meta.pt" in results[0]
    assert is_checkpoint(tmp_path / "x.ckpt")
    found = []
    for name in ("stock.ckpt", "ours.ckpt"):  # theirs is of DCP: it loads without a Trainer, too
        (optimizer,), _ = (module := Tiny(5)).configure_optimizers()
        load_model_and_optimizer(tmp_path / name, module, optimizer)
        state = optimizer.state_dict()["state"]
        moments = {f"{i}.{k}": v for i, one in state.items() for k, v in one.items()}
        found.append(dict(module.state_dict()) | moments)
    assert len(found[0]) > len(Tiny(5).state_dict())
    assert not differences(*found)
    assert stored(tmp_path / "x.ckpt")["models.0.net.up.weight"].shape == (10, 5)
