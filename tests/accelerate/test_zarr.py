"""Accelerate with ``backend: zarr``."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from accelerate_dist_ckpt import DistCkptIO
from dist_ckpt.core import maybe_load_config
from tests.accelerate._jobs import build, differing, state_of, train
from tests.multiprocess._world import run_ranks


def save_as_zarr(rank: int, world_size: int, root: str) -> Any:
    job = build("fsdp2", seed=1, io=DistCkptIO.from_yaml(Path(root, "ckpt.yaml")))
    train(job, 4)
    job.accelerator.save_state(str(Path(root, "a")))
    job.accelerator.save_state(str(Path(root, "a")))  # once more, over the first
    return state_of(job)


def load_and_save(rank: int, world_size: int, mode: str, source: str, target: str) -> Any:
    job = build(mode, seed=100)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # ranks without random states are another test
        job.accelerator.load_state(source)
    job.accelerator.save_state(target)
    return state_of(job)


def test_other_modes_load_it(tmp_path: Path) -> None:
    """FSDP2 saves arrays; one process and TP load them, equal to the bit, and train on."""
    (tmp_path / "ckpt.yaml").write_text("backend: zarr\n")
    expected = run_ranks(save_as_zarr, 2, str(tmp_path))[0]

    config = maybe_load_config(tmp_path / "a")
    assert config is not None
    assert (config.sharded_backend, config.sharded_backend_version) == ("zarr", 2)
    for mode, size in (("single", 1), ("tp", 2), ("ddp", 2)):
        target = str(tmp_path / mode)
        found = run_ranks(load_and_save, size, mode, str(tmp_path / "a"), target)
        assert differing(expected, found[0]) == [], mode
    (tmp_path / "a" / "models.0.up.weight" / "zarr.json").unlink()
    outcomes = run_ranks(
        load_and_save, 2, "ddp", str(tmp_path / "a"), str(tmp_path / "b"), expect_errors=True
    )
    assert {outcome.error_type for outcome in outcomes} == {"CorruptedCheckpointError"}
    assert not (tmp_path / "b").exists()
