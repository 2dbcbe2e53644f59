"""Lightning with ``backend: zarr``: the same runs, stored as arrays that zarr reads."""

from __future__ import annotations

from pathlib import Path

import torch
import zarr

from dist_ckpt.core import maybe_load_config
from lightning_dist_ckpt import DistCkptIO
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


def plugin(root: str) -> DistCkptIO:
    """Return the IO of the YAML in ``root``, as a user would write it."""
    return DistCkptIO.from_yaml(Path(root, "ckpt.yaml"))


def train_and_resume(rank: int, world_size: int, layout: str, root: str) -> None:
    """Train six steps at one go, and from step 3 on once more with another start."""
    for run, seed, start in (("whole", 0, None), ("again", 1, "whole/step=3.ckpt")):
        callbacks = [every_3_steps(Path(root, run))]
        trainer = make_trainer(layout, root, callbacks=callbacks, plugins=[plugin(root)])
        path = Path(root, start) if start else None
        trainer.fit(Tiny(seed), loader(layout), ckpt_path=path)


def load_and_save(rank: int, world_size: int, layout: str, root: str) -> int:
    """Load step 6 under another layout and save it there as torch_dist."""
    trainer = make_trainer(layout, root, max_steps=6)
    trainer.fit(Tiny(2), loader(layout), ckpt_path=Path(root, "whole", "step=6.ckpt"))
    trainer.save_checkpoint(Path(root, "loaded", layout))
    return trainer.global_step


def test_resume_and_other_layouts(tmp_path: Path) -> None:
    """FSDP1's flat ranges become arrays; a resume is equal to the bit, other layouts load them."""
    (tmp_path / "ckpt.yaml").write_text("backend: zarr\ntimeout_secs: 60.0\n")

    run_ranks(train_and_resume, 2, "fsdp1", str(tmp_path))

    whole = stored(tmp_path / "whole" / "step=6.ckpt")
    assert not differences(whole, stored(tmp_path / "again" / "step=6.ckpt"))
    config = maybe_load_config(tmp_path / "whole" / "step=6.ckpt")
    assert config is not None
    assert (config.sharded_backend, config.sharded_backend_version) == ("zarr", 2)
    for layout in ("single", "fsdp2_tp"):
        steps = run_ranks(load_and_save, LAYOUTS[layout], layout, str(tmp_path))
        assert steps == [6] * LAYOUTS[layout]
        assert not differences(whole, stored(tmp_path / "loaded" / layout))


def test_zarr_reads_the_arrays(tmp_path: Path) -> None:
    """What zarr opens is what the module holds, parameter by parameter."""
    trainer = make_trainer("single", tmp_path, plugins=[DistCkptIO(backend="zarr")], max_steps=2)
    module = Tiny()
    trainer.fit(module, loader())
    trainer.save_checkpoint(tmp_path / "x")

    for name, parameter in module.named_parameters():
        array = zarr.open_array(tmp_path / "x" / f"models.0.{name}", mode="r")
        assert torch.equal(torch.from_numpy(array[...]), parameter.detach()), name
